"""ReaPER's reliability of a target, computed at once for a whole buffer."""

from __future__ import annotations

import torch
from torch import Tensor


def reliability(
    td_error: Tensor, episode: Tensor, finished: Tensor, *, max_episode_sum: float | Tensor | None = None
) -> Tensor:
    r"""Reliability of the targets of all stored transitions.

    With δ⁺ = |TD error|, t = 1..n the stored transitions of an episode in time order, and F the largest sum of δ⁺ over
    an episode (Pleiss et al., arXiv 2506.18482, Eqs. 16-17)::

        R_t = 1 − Σ_{i>t} δ⁺_i / Σ_i δ⁺_i    finished episodes (Eq. 4)
        R_t = Σ_{i≤t} δ⁺_i / F               ongoing episodes

    A finished episode whose δ⁺ are all 0 has nothing unlearned ahead of any of its transitions: its reliability is 1.

    Args:
        td_error: absolute TD errors δ⁺, shape [N], >= 0.
        episode: integer ids, shape [N]; transitions of one episode stand in time order, others may stand between them.
        finished: bool, shape [N]: whether the episode of each transition is finished.
        max_episode_sum: F; by default the largest sum among the episodes given.

    Returns:
        R in [0, 1], shape [N], dtype of ``td_error`` (sums are taken in float64); no gradient flows.

    Raises:
        ValueError: if the shapes differ or a TD error is negative or not finite.

    Examples:
        >>> delta = torch.tensor([1.0, 1.0, 2.0])
        >>> reliability(delta, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
        tensor([0.2500, 0.5000, 1.0000])
    """
    if td_error.ndim != 1 or episode.shape != td_error.shape or finished.shape != td_error.shape:
        raise ValueError(
            "reliability: td_error, episode and finished must share one shape [N]; got "
            f"{tuple(td_error.shape)}, {tuple(episode.shape)} and {tuple(finished.shape)}."
        )
    if not bool(((td_error >= 0) & td_error.isfinite()).all()):
        raise ValueError("reliability: td_error must be >= 0 and finite.")
    if not td_error.numel():
        return td_error.detach().clone()
    delta = td_error.detach().double()
    _, group = episode.unique(return_inverse=True)
    order = group.argsort(stable=True)
    totals = delta.new_zeros(int(group.max()) + 1).index_add_(0, group, delta)
    running = delta[order].cumsum(0)
    before = totals.cumsum(0) - totals
    prefix = torch.empty_like(delta)
    prefix[order] = running - before[group[order]]
    largest = totals.max() if max_episode_sum is None else max_episode_sum
    denominator = torch.where(finished, totals[group], largest)
    ratio = torch.where(denominator > 0, prefix / denominator, 1.0)
    return ratio.clamp(0.0, 1.0).to(td_error.dtype)
