"""A queue of free ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import increase


class FreeList:
    """A queue of the free ids among 0..size-1, in tensors of static shape.

    Args:
        size: number of ids.
        device: device of the tensors. Default: None, torch's default device.
    """

    def __init__(self, size: int, *, device: torch.device | str | None = None):
        self.size = size
        self.queue = torch.arange(size, device=device).to(torch.int32 if size < 2**31 else torch.int64)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), size, device=device)

    def take(self, count: int) -> np.ndarray:
        """Take ``count`` free ids, for a queue on the CPU; int64 [count]."""
        ids = self.queue.numpy()[self._places(self.head, count)].astype(np.int64)
        increase(self.head, count)
        return ids

    def give_back(self, ids: np.ndarray) -> None:
        """Return ``ids`` [n] to a queue on the CPU."""
        self.queue.numpy()[self._places(self.tail, len(ids))] = ids
        increase(self.tail, len(ids))

    def _places(self, end: Tensor, count: int) -> slice | np.ndarray:
        """The places of ``count`` ids in the queue, from ``end`` on."""
        first = int(end) % self.size
        stop = first + count
        return slice(first, stop) if stop <= self.size else np.arange(first, stop) % self.size

    def clear_(self) -> None:
        """Make all ids free."""
        self.queue.copy_(torch.arange(self.size, device=self.queue.device))
        self.head.zero_()
        self.tail.fill_(self.size)

    def free(self) -> Tensor:
        """True for each free id, bool [size]; AssertionError if an id is in the queue twice."""
        waiting = (self.head + torch.arange(int(self.tail - self.head), device=self.queue.device)) % self.size
        times = self.queue[waiting].to(torch.int64).bincount(minlength=self.size)
        if int(times.max()) > 1:
            raise AssertionError("FreeList: an id is in the queue twice")
        return times > 0

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of the state, by names that start with ``name``."""
        return {f"{name}_queue": self.queue, f"{name}_head": self.head, f"{name}_tail": self.tail}
