"""Checks of TD errors, and detection of updates without TD errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import shown
from torchrl_replay_ext.core.priorities import Priorities, as_float32
from torchrl_replay_ext.indices import extremes


class DefaultPriority:
    """Detects the default priority that TensorDictReplayBuffer uses for rows without TD errors.

    The buffer does so for samples, and for each row that it adds. It reads ``sampler.default_priority`` and expands it
    to all rows. All rows of an expanded tensor share their memory; this distinguishes the default from constant TD
    errors of a user. For a single row it is a number in a tensor. A buffer that draws sequences reduces the priorities
    to one per sequence, which makes a new tensor; then only the value can be compared.
    """

    def __init__(self):
        self._recorded: float | None = None

    def record(self, value: float) -> float:
        """Record that the default was read, and return it."""
        self._recorded = value
        return value

    def is_filled_in(self, index: Any, priority: Any, draws_sequences: Callable[[], bool]) -> bool:
        """Whether ``priority`` is the default that TorchRL read since the last call of this method.

        Args:
            index: the index of the update.
            priority: its TD errors.
            draws_sequences: returns True if the buffer draws sequences. It is only called if needed.
        """
        default, self._recorded = self._recorded, None
        if default is None or not isinstance(priority, Tensor) or priority.ndim > 1 or not priority.numel():
            return False
        if priority.ndim:
            expanded = priority.stride(0) == 0 or draws_sequences()
        else:
            expanded = isinstance(index, Tensor) and not index.ndim
        return expanded and bool((priority == as_float32(default)).all())


def is_initialization(priority: Any, storage: Storage | None, priorities: Priorities) -> bool:
    """Whether ``priority`` is the default for all slots, which TorchRL passes when a buffer gets a filled storage."""
    given = torch.as_tensor(priority, dtype=torch.float32)
    if storage is None or given.numel() != _torchrl.length(storage):
        return False
    return all(map(priorities.is_default, extremes(given.reshape(-1))))


def td_errors(owner: str, given: Any, count: int, device: torch.device) -> Tensor:
    """Convert TD errors to one for each slot.

    Args:
        owner: the class that error messages name.
        given: TD errors, one for each slot, or a scalar for all slots.
        count: number of slots.
        device: device of the result.

    Returns:
        float32 [count].

    Raises:
        ValueError: if ``given`` has another number of elements.
    """
    if isinstance(given, Tensor) and given.dtype == torch.float32 and given.device == device:
        # conversions that change nothing take as long as the rest
        error = given.detach() if given.requires_grad else given
    else:
        error = torch.as_tensor(given, dtype=torch.float32, device=device).detach()
    if error.ndim != 1:
        error = error.reshape(-1)
    if error.shape[0] == count:
        return error
    if torch.as_tensor(given).ndim != 0:
        raise ValueError(
            f"{owner}.update_priority: there are {error.shape[0]} TD errors for {count} indices; pass one TD error per "
            "transition."
        )
    return error.expand(count)


def invalid_td_error(owner: str, error: float, slot: int, position: int, limit: float) -> ValueError:
    """The error for an invalid TD error at ``position`` of an update; ``limit``: the largest allowed priority."""
    return ValueError(
        f"{owner}.update_priority: TD error {shown(np.float32(error))} at index {slot} (position {position} of the "
        f"update); TD errors must be >= 0 and finite, and the priority |δ| + eps at most {shown(limit)}."
    )
