"""A queue of free ids."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import increase, values_can_be_read, where_int64


class FreeList:
    """A queue of the free ids among 0..size-1, in tensors of static shape.

    Args:
        size: number of ids.
        device: device of the tensors. Default: None, torch's default device.
    """

    def __init__(self, size: int, *, device: torch.device | str | None = None):
        self.size = size
        # masked-out writes go to the additional last entry
        self.queue = torch.arange(size + 1, device=device).to(torch.int32 if size < 2**31 else torch.int64)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), size, device=device)

    def pop(self, mask: Tensor) -> Tensor:
        """Take one free id for each True in ``mask`` [n].

        Returns:
            int64 [n]. Where ``mask`` is False, the result is the id of the last True before it, or an arbitrary id if
            there is no True before it.
        """
        rank = mask.cumsum(0)
        ids = self.queue.index_select(0, (self.head + rank - 1) % self.size).to(torch.int64)
        self.head.add_(rank[-1])
        return ids

    def push(self, ids: Tensor, mask: Tensor) -> None:
        """Return ``ids`` [n] to the queue where ``mask`` is True."""
        if values_can_be_read(mask) and not bool(mask.any()):
            return
        rank = mask.cumsum(0)
        place = where_int64(mask, (self.tail + rank - 1) % self.size, torch.full_like(ids, self.size))
        self.queue.index_copy_(0, place, ids.to(self.queue.dtype))
        self.tail.add_(rank[-1])

    def take(self, count: int) -> np.ndarray:
        """Like :meth:`pop` for ``count`` ids, for a queue on the CPU; int64 [count]."""
        ids = self.queue.numpy()[self._places(self.head, count)].astype(np.int64)
        increase(self.head, count)
        return ids

    def give_back(self, ids: np.ndarray) -> None:
        """Like :meth:`push` for all ``ids`` [n], for a queue on the CPU."""
        self.queue.numpy()[self._places(self.tail, len(ids))] = ids
        increase(self.tail, len(ids))

    def _places(self, end: Tensor, count: int) -> slice | np.ndarray:
        """The places of ``count`` ids in the queue, from ``end`` on."""
        first = int(end) % self.size
        stop = first + count
        return slice(first, stop) if stop <= self.size else np.arange(first, stop) % self.size

    def clear_(self) -> None:
        """Make all ids free."""
        self.queue.copy_(torch.arange(self.size + 1, device=self.queue.device))
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
