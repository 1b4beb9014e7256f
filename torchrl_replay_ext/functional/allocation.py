"""The number of rows of a batch that each event table contributes."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_choice
from torchrl_replay_ext.compilation import raise_if

Allocation = Literal["systematic", "multinomial", "largest_remainder"]
METHODS = get_args(Allocation)


def allocate(eta: Tensor, batch_size: int, method: Allocation = "systematic", u: Tensor | None = None) -> Tensor:
    r"""Divide a batch among tables in proportions η (SSET, Kompella et al. 2022, Algorithm 1).

    The paper collects "fixed i.i.d. proportions" from the tables, but B·η_k is rarely an integer. Three methods turn
    the proportions into counts:

    * ``"systematic"``: looks up the points (j + u) / B, j = 0..B−1, in the cumulative η. Each count is B·η_k, rounded
      down or up, and its expected value is B·η_k.
    * ``"multinomial"``: draws the table of each row independently.
    * ``"largest_remainder"``: deterministic rounding, the same for every batch. The counts are therefore biased.

    Args:
        eta: proportions η, float [K], >= 0. They are divided by their sum.
        batch_size: number of rows B, >= 1.
        method: ``"systematic"`` (default), ``"multinomial"`` or ``"largest_remainder"``.
        u: uniform random numbers in [0, 1), of shape [] or [1] for ``"systematic"`` and [B] for ``"multinomial"``.
            ``"largest_remainder"`` does not use them. Default: None, drawn from torch's global generator.

    Returns:
        The counts, int64 [K]. Their sum is B.

    Raises:
        ValueError: if ``method`` is unknown, ``batch_size`` < 1, or a proportion is negative or not finite, or all are
            0. The proportions are not checked in a graph and on an accelerator.

    Examples:
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, u=torch.tensor(0.5))
        tensor([16,  6, 10])
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, "largest_remainder")
        tensor([16,  6, 10])
    """
    require_choice("allocate", "method", method, METHODS)
    if not (batch_size >= 1 and batch_size == int(batch_size)):
        raise ValueError(f"allocate(batch_size={batch_size}): batch_size must be an integer >= 1.")
    raise_if(
        lambda: not (eta >= 0).all() or not 0 < float(eta.sum()) < math.inf,
        lambda: ValueError(f"allocate(eta={eta.tolist()}): eta must be >= 0 and finite, and one of them > 0."),
        skip_on=eta,
    )
    ends = table_ends(eta, batch_size, method, u)
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def table_ends(eta: Tensor, batch_size: int, method: str, u: Tensor | None = None) -> Tensor:
    """Cumulative counts of :func:`allocate`, int64 [K]; arguments are not checked."""
    eta = eta.to(torch.float64)
    if method == "largest_remainder":
        share = batch_size * eta / eta.sum()
        counts = share.floor()
        # rank 0 is the largest fraction; of equal fractions the lower index comes first
        rank = (counts - share).argsort(stable=True).argsort()
        return (counts + (rank < batch_size - counts.sum())).to(torch.int64).cumsum(0)
    if u is None:
        size = 1 if method == "systematic" else batch_size
        u = torch.rand(size, dtype=torch.float64, device=eta.device)
    cumulated = eta.cumsum(0)
    cumulated = cumulated / cumulated[-1]
    if method == "systematic":
        return (batch_size * cumulated - u.reshape(-1)[0]).ceil_().clamp_(0, batch_size).to(torch.int64)
    return (u.reshape(1, -1) < cumulated.unsqueeze(1)).sum(1)
