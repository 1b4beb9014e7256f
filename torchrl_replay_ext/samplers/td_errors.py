"""Checks of TD errors, and of updates that carry none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.core.priorities import Priorities, as_float32
from torchrl_replay_ext.functional import extremes


class DefaultPriority:
    """The default that TorchRL's TensorDictReplayBuffer fills in for a sample without TD errors.

    The buffer reads ``sampler.default_priority`` and expands it to all rows. Constant TD errors of a user differ by
    their memory: only an expanded tensor shares its memory between rows. After a reduction to the anchors of sequences
    only the value is left to compare.
    """

    def __init__(self):
        self._asked: float | None = None

    def ask(self, value: float) -> float:
        """Note that the default was read."""
        self._asked = value
        return value

    def is_filled_in(self, priority: Any, draws_sequences: Callable[[], bool]) -> bool:
        """Whether ``priority`` is the default that was read since the last call, filled in by TorchRL."""
        default, self._asked = self._asked, None
        if default is None or not isinstance(priority, Tensor) or priority.ndim != 1 or not priority.numel():
            return False
        expanded = priority.stride(0) == 0 or draws_sequences()
        return expanded and bool((priority == as_float32(default)).all())


def is_initialization(priority: Any, storage: Storage | None, priorities: Priorities) -> bool:
    """Whether ``priority`` is what TorchRL hands over for all slots when a buffer is made of a filled storage."""
    given = torch.as_tensor(priority, dtype=torch.float32)
    if storage is None or given.numel() != _torchrl.length(storage):
        return False
    return all(map(priorities.is_default, extremes(given.reshape(-1))))


def td_errors(owner: str, given: Any, count: int, device: torch.device) -> Tensor:
    """``given`` as one TD error for each of ``count`` slots, float32 [count]; ValueError if the numbers differ."""
    error = torch.as_tensor(given, dtype=torch.float32, device=device)
    if error.ndim != 1:
        error = error.reshape(-1)
    if error.shape[0] == count:
        return error
    if torch.as_tensor(given).ndim != 0:
        raise ValueError(
            f"{owner}.update_priority: there are {error.shape[0]} TD errors for {count} indices; one TD error per "
            "transition is needed."
        )
    return error.expand(count)


def largest_td_error(owner: str, error: Tensor, slots: Tensor, priorities: Priorities, limit: float) -> float:
    """The largest of ``error`` [n]; ValueError if one is negative, not finite, or its priority above ``limit``."""
    smallest, largest = extremes(error)
    from_td_error = priorities.from_td_error
    if smallest >= 0 and from_td_error(largest) <= limit:
        return largest
    wrong = int((~((error >= 0) & (from_td_error(error) <= limit))).nonzero()[0])
    raise ValueError(
        f"{owner}.update_priority: TD error {float(error[wrong]):g} at index {int(slots[wrong])} (position {wrong} of "
        f"the update); TD errors must be >= 0 and finite, and the priority |δ| + eps at most {limit:g}."
    )
