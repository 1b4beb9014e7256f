"""The slots of a buffer: their numbering, and where their state is kept."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# more writes, draws or rows than any run has; sums of such numbers fit into int64
MOST = 2**48


def check_counts(owner: str, *counts: Tensor) -> None:
    """Raise AssertionError if a number of writes or rows is negative, or larger than that of any run."""
    numbers = torch.cat([count.reshape(-1).to("cpu", torch.int64) for count in counts])
    if bool(((numbers < 0) | (numbers > MOST)).any()):
        raise AssertionError(f"{owner}: a count is out of range")


class Layout(NamedTuple):
    """The slots of a buffer, numbered in row-major order.

    Args:
        shape: shape of the storage. The first dimension is the ring; the product of the others is the number of lanes.
        device: device of the state.
        for_graphs: True if compiled graphs use the state; all state must then be in tensors. Default: False.
        known: True if ``shape`` was read from a storage, False if it is a guess before the first write. Default:
            False.
        validate: True if invalid input raises errors on accelerators too, although the host must wait for the device
            to see it. Default: False.
    """

    shape: tuple[int, ...]
    device: torch.device
    for_graphs: bool = False
    known: bool = False
    validate: bool = False

    @property
    def skip_checks_on(self) -> torch.device | None:
        """The device on which checks of values are skipped, because the host would wait; None with ``validate``."""
        return None if self.validate else self.device

    @property
    def counters(self) -> torch.device:
        """The device of numbers that the host needs: the CPU, unless graphs change them."""
        return self.device if self.for_graphs else torch.device("cpu")

    @property
    def steps(self) -> int:
        """Number of steps of the ring."""
        return self.shape[0]

    @property
    def slots_per_step(self) -> int:
        """Number of slots per step: the number of columns of the storage, 1 in flat storage."""
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Number of slots."""
        return math.prod(self.shape)

    def lanes(self, num_streams: int) -> tuple[int, int, bool]:
        """Number of steps, number of lanes, and whether streams are assigned to lanes (``num_streams`` > 1, flat)."""
        if len(self.shape) > 1:
            return self.steps, self.slots_per_step, False
        return self.steps, num_streams, num_streams > 1

    def slots_from(self, step: int, count: int) -> Tensor:
        """The next ``count`` slots of the ring from ``step`` on, int64 [count]."""
        return (step * self.slots_per_step + torch.arange(count, device=self.device)) % self.size
