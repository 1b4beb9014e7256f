"""Importance-sampling weights and rank probabilities."""

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
