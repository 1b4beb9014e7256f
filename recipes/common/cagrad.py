"""Conflict-averse gradient descent (CAGrad; Liu et al., 2021): combines the gradients of several event tables.

The SSET paper tests it in appendix A.2 (Figure 13). The update maximizes the smallest improvement over all losses, in a
ball around the average gradient:

    d = argmax min_i <g_i, d>  subject to  ||d - g_0|| <= c ||g_0||,   g_0 = mean_i g_i

With √φ = c ||g_0|| and g_w = Σ_i w_i g_i, the solution is

    d = g_0 + √φ g_w / ||g_w||,   w = argmin <g_w, g_0> + √φ ||g_w||  over the simplex.

With c = 0, d = g_0. With a single gradient, or equal gradients, d = (1 + c) g_0: as in the paper, d is not rescaled. If
no d in the ball improves all losses, g_w = 0 and g_w / ||g_w|| is undefined; d is then its limit.
"""

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

_RIDGE = 1e-12


def table_losses(rows: Tensor, batch: TensorDictBase, num_tables: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch from event tables, and the weighted mean loss of each table's rows.

    The weighted mean of the losses of the tables is the loss of the batch.

    Args:
        rows: loss of each row times its weight, [B]: the result of a loss with reduction="none".
        batch: the batch, [B], with "priority_weight" and "table", the number of each row's table.
        num_tables: K, number of tables including the default table.

    Returns:
        The loss of the batch, []; the losses of the tables [K], differentiable, 0 for a table without rows; the sum of
        each table's weights [K], detached.
    """
    weights, tables = batch["priority_weight"].to(rows.dtype), batch["table"]
    member = (tables == torch.arange(num_tables, device=tables.device)[:, None]).to(rows.dtype)
    total = member @ weights
    return rows.sum() / weights.sum(), (member @ rows) / torch.where(total > 0, total, 1.0), total.detach()


def cagrad_gradients(losses: Tensor, weights: Tensor, parameters: Sequence[Tensor], c: float) -> list[Tensor]:
    """The CAGrad update d.

    It does not branch on values, so torch.compile can trace it.

    Args:
        losses: [K] with 1 <= K <= `MOST_GRADIENTS`, since the cost doubles with each.
        weights: weights of the losses in g_0, [K], >= 0. They need not sum to 1. A loss with weight 0 is ignored and
            must have the gradient 0, as the loss of a table without rows.
        parameters: the tensors that the losses depend on.
        c: radius of the ball relative to ||g_0||, in [0, 1).

    Returns:
        The part of d for each parameter, with its shape and dtype.
    """
    each = torch.eye(len(losses), dtype=losses.dtype, device=losses.device)
    gradients = torch.autograd.grad(losses, parameters, each, is_grads_batched=True)  # of each parameter, [K, *shape]
    flat = [gradient.reshape(len(losses), -1).double() for gradient in gradients]
    products = torch.stack([gradient @ gradient.mT for gradient in flat]).sum(0)  # <g_i, g_j>, [K, K]
    coefficients = _coefficients(products, c, weights)
    return [torch.tensordot(coefficients.to(gradient.dtype), gradient, 1) for gradient in gradients]


def _coefficients(products: Tensor, c: float, weights: Tensor) -> Tensor:
    """The numbers a with Σ_i a_i g_i = d.

    Args:
        products: <g_i, g_j>, float64 [K, K]; 0 where i or j has weight 0.
        c: radius of the ball, in [0, 1).
        weights: weights of the mean, [K], >= 0.

    Returns:
        a, float64 [K].
    """
    present = weights > 0
    share = torch.where(present, weights, 0.0).double()
    share = share / torch.where(present.any(), share.sum(), 1.0)
    # g_0 replaces ignored gradients. It is a mean of the other gradients, so the set of possible g_w does not change.
    mixing = torch.where(present[:, None], torch.eye(len(share), dtype=share.dtype, device=share.device), share)
    return share + mixing.mT @ _dual(mixing @ products @ mixing.mT, share, c)


def _dual(gram: Tensor, share: Tensor, c: float) -> Tensor:
    """√φ / ||g_w|| w, for the w that minimises <g_w, g_0> + √φ ||g_w|| over the simplex.

    Solves all 2^K - 1 faces of the simplex at once in closed form and takes the best solution. Let M = (<g_i, g_j>),
    b_i = <g_i, g_0> and v = √φ / ||g_w|| w, all restricted to a face. The minimum over the affine hull of the face
    satisfies

        M v = λ 1 - b,  vᵀ M v = φ,

    a quadratic equation in λ, the value of the minimum. The solution is valid if v >= 0, which is always true in the
    corners. No term is divided by ||g_w|| or √φ.

    Args:
        gram: <g_i, g_j>, float64 [K, K].
        share: weights of g_0, [K], summing to 1.
        c: in [0, 1).

    Returns:
        v, float64 [K].
    """
    num_gradients = len(gram)
    identity = torch.eye(num_gradients, dtype=gram.dtype, device=gram.device)
    norms = (gram * identity).sum(1)
    largest = norms.amax()
    b = gram @ share
    phi = c * c * (share @ b).clamp(min=0.0)
    # Makes all faces regular. Equivalent to an extra component √ridge ||g_i|| per gradient, orthogonal to all others.
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
    # Split λ 1 - b into a part along 1 and a part orthogonal to 1 in the metric of M⁻¹.
    centre = (ones @ b) / total
    rest = on_face * (b - centre[:, None])
    tilt = solve(rest)
    height = (phi - (rest * tilt).sum(1)) / total
    height_root = height.clamp(min=0.0).sqrt()
    v = height_root[:, None] * ones - tilt
    is_minimum = (height >= 0) & (v >= 0).all(1)
    value = torch.where(is_minimum, centre + height_root, torch.inf)
    return v[value.argmin()[None]][0]
