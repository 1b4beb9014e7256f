"""The functional core: tensors in, tensors out."""

from torchrl_replay_ext.functional.priorities import (
    importance_weights,
    is_last_occurrence,
    last_occurrence,
    write_last,
    write_last_marked,
)
from torchrl_replay_ext.functional.reliability import reliability

__all__ = [
    "importance_weights",
    "is_last_occurrence",
    "last_occurrence",
    "reliability",
    "write_last",
    "write_last_marked",
]
