"""The functional core: tensors in, tensors out."""

from torchrl_replay_ext.functional.allocation import allocate
from torchrl_replay_ext.functional.gaussian import gaussian_policy_kl, ornstein_uhlenbeck_scale
from torchrl_replay_ext.functional.priorities import (
    all_different,
    extremes,
    importance_weights,
    is_last_occurrence,
    last_occurrence,
    rank_probabilities,
    write_last,
)
from torchrl_replay_ext.functional.reliability import reliability

__all__ = [
    "all_different",
    "allocate",
    "extremes",
    "gaussian_policy_kl",
    "importance_weights",
    "is_last_occurrence",
    "last_occurrence",
    "ornstein_uhlenbeck_scale",
    "rank_probabilities",
    "reliability",
    "write_last",
]
