"""A queue of free ids."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import where_int64


class FreeList:
    """A queue of free ids 0..size-1, in tensors of static shape.

    Args:
        size: number of ids.
        device: where the tensors live.
    """

    def __init__(self, size: int, *, device: torch.device | str | None = None):
        self.size = size
        # the last place takes writes that are masked out
        self.queue = torch.arange(size + 1, device=device).to(torch.int32 if size < 2**31 else torch.int64)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), size, device=device)

    def pop(self, mask: Tensor) -> Tensor:
        """Take an id for each True of ``mask`` [n].

        Returns:
            int64 [n]. A row where ``mask`` is False has the id of the last True before it, or any id if there is none.
        """
        rank = mask.cumsum(0)
        ids = self.queue.index_select(0, (self.head + rank - 1) % self.size).to(torch.int64)
        self.head.add_(rank[-1])
        return ids

    def push(self, ids: Tensor, mask: Tensor) -> None:
        """Return ``ids`` [n] to the queue where ``mask`` is True."""
        rank = mask.cumsum(0)
        place = where_int64(mask, (self.tail + rank - 1) % self.size, torch.full_like(ids, self.size))
        self.queue.index_copy_(0, place, ids.to(self.queue.dtype))
        self.tail.add_(rank[-1])

    def clear_(self) -> None:
        """Make all ids free."""
        self.queue.copy_(torch.arange(self.size + 1, device=self.queue.device))
        self.head.zero_()
        self.tail.fill_(self.size)

    def refill_(self, free: Tensor) -> None:
        """Make exactly the ids free that are True in ``free`` [size]."""
        ids = free.nonzero().squeeze(1)
        self.queue[: len(ids)] = ids.to(self.queue.dtype)
        self.head.zero_()
        self.tail.fill_(len(ids))

    def free(self) -> Tensor:
        """True for each free id, bool [size]; AssertionError if an id is in the queue twice."""
        waiting = (self.head + torch.arange(int(self.tail - self.head), device=self.queue.device)) % self.size
        times = self.queue[waiting].to(torch.int64).bincount(minlength=self.size)
        if int(times.max()) > 1:
            raise AssertionError("FreeList: an id is free twice")
        return times > 0

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state, under names that start with ``name``."""
        return {f"{name}_queue": self.queue, f"{name}_head": self.head, f"{name}_tail": self.tail}
