"""Conflict-averse gradient descent (CAGrad; Liu et al., 2021), to combine the gradients of several event tables.

The SSET paper explores it in its appendix A.2 (Figure 13).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_RIDGE = 1e-12
MOST_GRADIENTS = 12


def cagrad(gradients: Tensor, c: float | Tensor, weights: Tensor | None = None) -> Tensor:
    """The update that improves the worst-off loss most, within a ball around the average gradient.

        d = argmax min_i <g_i, d>  subject to  ||d - g_0|| <= c ||g_0||,   g_0 = mean_i g_i

    With √φ = c ||g_0|| and g_w = Σ_i w_i g_i, the solution is

        d = g_0 + √φ g_w / ||g_w||,   w = argmin <g_w, g_0> + √φ ||g_w||  over the simplex.

    c = 0 gives g_0, and gradients that agree, or a single one, give (1 + c) g_0: as in the paper, d is not rescaled. A
    d of a constant norm for agreeing gradients is this one divided by 1 + c.

    Where no d in the ball improves all losses, g_w = 0 and g_w / ||g_w|| has no value; its limit does, and this is what
    comes out. There are no branches on values: this can be compiled.

    Args:
        gradients: g_i, floating point [K, P] with K <= 12; all 0 gives 0.
        c: in [0, 1); may be a tensor, which is not checked.
        weights: weights [K] >= 0 of the mean, which need not sum to 1, such as each table's rows in the batch. One of
            weight 0 is absent and its gradient is not read. ``None``: all alike.

    Returns:
        d, [P], of the dtype of the gradients; detached from their graph.
    """
    if gradients.ndim != 2 or len(gradients) == 0:
        raise ValueError(f"cagrad: gradients must be [K, P] with K >= 1, found {list(gradients.shape)}")
    if len(gradients) > MOST_GRADIENTS:
        raise ValueError(
            f"cagrad: at most {MOST_GRADIENTS} gradients (the cost doubles with each), found {len(gradients)}"
        )
    if weights is not None and weights.shape != gradients.shape[:1]:
        raise ValueError(f"cagrad: weights must be [{len(gradients)}], found {list(weights.shape)}")
    if not isinstance(c, Tensor) and not 0 <= c < 1:
        raise ValueError(f"cagrad(c={c}): must be in [0, 1)")
    gradients = gradients.detach()
    num_gradients = len(gradients)
    if weights is None:
        weights = gradients.new_ones(num_gradients)
    present = weights > 0
    # where, not times: an absent gradient may hold anything.
    gradients = torch.where(present[:, None], gradients, 0.0)
    share = torch.where(present, weights, 0.0).double()
    share = share / torch.where(present.any(), share.sum(), 1.0)
    # g_0 stands in for what is absent: being a mean of the others, it leaves the g_w that can be reached the same.
    mixing = torch.where(present[:, None], torch.eye(num_gradients, dtype=share.dtype, device=share.device), share)
    double = gradients.double()
    gram = mixing @ (double @ double.mT) @ mixing.mT
    w = mixing.mT @ _dual(gram, share, c)
    return (share + w).to(gradients.dtype) @ gradients


def losses_by_table(rows: Tensor, weights: Tensor, tables: Tensor, num_tables: int) -> tuple[Tensor, Tensor]:
    """The weighted mean loss of each table's rows; the mean of these, by their weights, is that of all rows.

    Args:
        rows: loss of each row times its weight, [B].
        weights: of the rows, [B].
        tables: number of each row's table, int64 [B].
        num_tables: K.

    Returns:
        Losses [K], with gradients, 0 for a table without rows; sums of the weights [K], without.
    """
    member = (tables == torch.arange(num_tables, device=tables.device)[:, None]).to(rows.dtype)
    total = member @ weights.to(rows.dtype)
    return (member @ rows) / torch.where(total > 0, total, 1.0), total.detach()


def cagrad_gradients(losses: Tensor, weights: Tensor, parameters: Sequence[Tensor], c: float) -> list[Tensor]:
    """Gradients of `parameters` as `cagrad` combines those of `losses` [K] by `weights` [K]."""
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses.unbind()]
    flat = torch.stack([torch.cat([gradient.reshape(-1) for gradient in row]) for row in rows])
    parts = cagrad(flat, c, weights).split([parameter.numel() for parameter in parameters])
    return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _dual(gram: Tensor, share: Tensor, c: float | Tensor) -> Tensor:
    """√φ / ||g_w|| w, for the w that minimises <g_w, g_0> + √φ ||g_w|| over the simplex.

    Solves all 2^K - 1 faces of the simplex at once, each in closed form, and takes the best. With M = (<g_i, g_j>),
    b_i = <g_i, g_0> and v = √φ / ||g_w|| w, all restricted to a face, the minimum over its affine hull is where

        M v = λ 1 - b,  vᵀ M v = φ,

    a quadratic equation in λ, which is the value of the minimum. It counts if v >= 0, as it is in every corner. Nothing
    is divided by ||g_w|| or √φ.

    Args:
        gram: <g_i, g_j>, float64 [K, K].
        share: weights of g_0, [K], summing to 1.
        c: in [0, 1).

    Returns:
        float64 [K].
    """
    num_gradients = len(gram)
    identity = torch.eye(num_gradients, dtype=gram.dtype, device=gram.device)
    norms = (gram * identity).sum(1)
    largest = norms.amax()
    b = gram @ share
    phi = c * c * (share @ b).clamp(min=0.0)
    # Makes all faces regular; like a component of √ridge ||g_i|| of its own for each gradient.
    ridge = torch.where(norms > 0, norms, torch.where(largest > 0, largest, 1.0))
    gram = gram + _RIDGE * ridge * identity

    bits = torch.arange(num_gradients, device=gram.device)
    faces = torch.arange(1, 2**num_gradients, device=gram.device)[:, None] >> bits & 1
    on_face = faces.to(gram.dtype)
    matrices = on_face[:, :, None] * gram * on_face[:, None] + (1 - on_face)[:, :, None] * identity
    factors = torch.linalg.cholesky_ex(matrices).L

    def solve(right: Tensor) -> Tensor:
        return torch.cholesky_solve(right[..., None], factors)[..., 0]

    ones = solve(on_face)
    total = ones.sum(1)
    # Split λ 1 - b into a part along 1 and one that is orthogonal to it in the metric of M⁻¹.
    centre = (ones @ b) / total
    rest = on_face * (b - centre[:, None])
    tilt = solve(rest)
    height = (phi - (rest * tilt).sum(1)) / total
    height_root = height.clamp(min=0.0).sqrt()
    v = height_root[:, None] * ones - tilt
    is_minimum = (height >= 0) & (v >= 0).all(1)
    value = torch.where(is_minimum, centre + height_root, torch.inf)
    return v[value.argmin()[None]][0]
