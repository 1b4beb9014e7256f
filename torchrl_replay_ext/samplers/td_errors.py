"""Checks of TD errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.arguments import shown

# Stands for a TD error that is missing. TorchRL's buffers pass it for rows that they add and for samples without TD
# errors. It is negative, and no TD error.
NO_TD_ERROR = -(2.0**-100)


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
