"""How many rows of a batch come from which table."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Allocation = Literal["systematic", "multinomial", "largest_remainder"]
METHODS = get_args(Allocation)


def allocate(eta: Tensor, batch_size: int, method: Allocation = "systematic", u: Tensor | None = None) -> Tensor:
    r"""Divide a batch among tables in the proportions η (SSET, Kompella et al. 2022, Algorithm 1).

    The source draws "fixed i.i.d. proportions", though B·η_k is seldom an integer. Three readings:

    * ``"systematic"``: the points (j + u) / B, j = 0..B−1, looked up in the cumulated η. Each count is B·η_k rounded
      down or up, and B·η_k in expectation.
    * ``"multinomial"``: each row chooses its table by itself.
    * ``"largest_remainder"``: no chance at all, and therefore biased: the same rounding for every batch.

    Args:
        eta: proportions, float [K], >= 0; they are divided by their sum.
        batch_size: B, >= 1.
        method: see above.
        u: uniform numbers in [0, 1): [] or [1] for ``"systematic"``, [B] for ``"multinomial"``; by default drawn.

    Returns:
        The counts, int64 [K]; they sum to B.

    Raises:
        ValueError: if ``method`` is unknown or ``batch_size`` < 1.

    Examples:
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, u=torch.tensor(0.5))
        tensor([16,  6, 10])
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, "largest_remainder")
        tensor([16,  6, 10])
    """
    if method not in METHODS:
        raise ValueError(f"allocate(method={method!r}): method must be one of {', '.join(METHODS)}.")
    if batch_size < 1:
        raise ValueError(f"allocate(batch_size={batch_size}): batch_size must be >= 1.")
    ends = table_ends(eta, batch_size, method, u)
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def table_ends(eta: Tensor, batch_size: int, method: str, u: Tensor | None = None) -> Tensor:
    """The cumulated counts of :func:`allocate`, int64 [K]."""
    eta = eta.to(torch.float64)
    if method == "largest_remainder":
        share = batch_size * eta / eta.sum()
        counts = share.floor()
        # rank of each fraction among all, ties in order
        fraction = share - counts
        ahead = fraction.unsqueeze(0) > fraction.unsqueeze(1)
        number = torch.arange(len(eta), device=eta.device)
        tied = (fraction.unsqueeze(0) == fraction.unsqueeze(1)) & (number.unsqueeze(0) < number.unsqueeze(1))
        rank = (ahead | tied).sum(1)
        return (counts + (rank < batch_size - counts.sum())).to(torch.int64).cumsum(0)
    if u is None:
        size = 1 if method == "systematic" else batch_size
        u = torch.rand(size, dtype=torch.float64, device=eta.device)
    cumulated = eta.cumsum(0)
    cumulated = cumulated / cumulated[-1]
    if method == "systematic":
        return (batch_size * cumulated - u.reshape(-1)[0]).ceil_().clamp_(0, batch_size).to(torch.int64)
    return (u.reshape(1, -1) < cumulated.unsqueeze(1)).sum(1)
