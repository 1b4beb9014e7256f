"""Formulas of prioritized replay: probabilities by rank, reliability, and importance-sampling weights."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_finite


def importance_weights(
    probability: Tensor, num_items: int | Tensor, beta: float | Tensor, normalize: bool = True
) -> Tensor:
    r"""Importance-sampling weights of prioritized draws.

    w = (1 / (N · P))^β, divided by the largest w if ``normalize`` (Schaul et al. 2016, Sec. 3.4; ReaPER, Eq. 18).

    Args:
        probability: probabilities P of the drawn items, float, any shape, > 0.
        num_items: N, the number of items in the buffer, >= 1.
        beta: correction exponent β in [0, 1]; 0 is no correction, 1 is full correction.
        normalize: divide by the largest of the weights, so that weights only scale updates down. Default: True.

    Returns:
        The weights, in the shape and dtype of ``probability``. Gradients flow.

    Examples:
        >>> importance_weights(torch.tensor([0.5, 0.25]), 2, 1.0)
        tensor([0.5000, 1.0000])
    """
    weights = (num_items * probability) ** -beta
    return weights / weights.max() if normalize else weights


def rank_probabilities(num_items: int, alpha: float) -> Tensor:
    r"""Probabilities of rank-based prioritization, P(r) = r^−α / Σ_{k≤N} k^−α (Schaul et al. 2016, Sec. 3.3).

    Args:
        num_items: N, the number of items, >= 1.
        alpha: exponent α, >= 0 and finite; 0 is uniform.

    Returns:
        The probabilities of ranks 1 to N, float64 [N]. Rank 1 is the largest TD error.

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> rank_probabilities(3, 1.0)
        tensor([0.5455, 0.2727, 0.1818], dtype=torch.float64)
    """
    if not (num_items >= 1 and num_items == int(num_items)):
        raise ValueError(f"rank_probabilities(num_items={num_items}): num_items must be an integer >= 1.")
    alpha = require_finite("rank_probabilities", "alpha", alpha)
    mass = torch.arange(1, num_items + 1, dtype=torch.float64) ** -alpha
    return mass / mass.sum()


def reliability(
    td_error: Tensor, episode: Tensor, finished: Tensor, *, max_episode_sum: float | Tensor | None = None
) -> Tensor:
    r"""Reliability of the TD targets of all stored transitions (Pleiss et al., arXiv 2506.18482, Eqs. 16-17).

    δ⁺ is the absolute TD error, t = 1..n are the stored transitions of an episode in time order, and F is the largest
    sum of δ⁺ over an episode::

        R_t = 1 − Σ_{i>t} δ⁺_i / Σ_i δ⁺_i    finished episodes (Eq. 4)
        R_t = Σ_{i≤t} δ⁺_i / F               ongoing episodes

    R is 1 where the denominator is 0: in finished episodes whose δ⁺ are all 0, and in ongoing episodes if F = 0.

    Args:
        td_error: absolute TD errors δ⁺, float [N], >= 0 and finite.
        episode: episode ids, integers [N]. The transitions of an episode must be in time order; transitions of other
            episodes may lie between them.
        finished: bool [N], True if the episode of the transition is finished.
        max_episode_sum: F, a number or a tensor []. Default: None, the largest sum among the given episodes.

    Returns:
        R in [0, 1], shape [N], in the dtype of ``td_error``; sums are computed in float64. No gradient flows.

    Raises:
        ValueError: if the shapes differ or a TD error is negative or not finite.

    Examples:
        >>> delta = torch.tensor([1.0, 1.0, 2.0])
        >>> reliability(delta, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
        tensor([0.2500, 0.5000, 1.0000])
    """
    if td_error.ndim != 1 or episode.shape != td_error.shape or finished.shape != td_error.shape:
        raise ValueError(
            "reliability: td_error, episode and finished must have the same shape [N]; got "
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
