"""The ranks of transitions by buckets of nearly equal priorities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.sum_tree import read_root
from torchrl_replay_ext.kernels.ops import Views, empty, rank_draw, rank_find, rank_move, rank_rank_of, rank_rebuild
from torchrl_replay_ext.kernels.rank_layout import BUCKETS, DROPPED_BITS, NEW, NOWHERE


class RankBuckets:
    """Slots in the order of their ranks, counted from 0.

    A bucket holds the slots whose float32 priorities have the same upper 16 bits, which differ by less than 0.8 %.
    Ranks descend from bucket to bucket. Within a bucket they follow the places of its members in an array: a slot gets
    the last place when it is updated, and when one leaves, that of the last place takes its place. The first bucket is
    for slots that were never updated; there the last place has rank 0.

    The arrays are those of ``kernels/rank_layout.py``. On the CPU, changes take effect at once and cost O(1) per row.
    On CUDA, :meth:`refresh` sorts, and within a bucket the slots that were written last come first.

    Args:
        size: number of slots.
        device: device of the arrays.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size

        def numbers(count: int, dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self._bucket = numbers(size, torch.int32, NOWHERE)
        self._place = numbers(size, torch.int64)
        # blocks with space for half as many more slots, and space for blocks that grow
        self._members = numbers(3 * size + 2 * min(size, BUCKETS) + 2, torch.int32)
        self._start = numbers(BUCKETS, torch.int64)
        self._room = numbers(BUCKETS, torch.int32)
        self._counts = numbers(2 * BUCKETS, torch.int32)
        self._top = numbers(1, torch.int64)
        arrays = self._bucket, self._place, self._members, self._start, self._room, self._counts, self._top
        self._views = Views(*arrays)
        # the priorities of all new transitions, and of all that are removed
        self._new, self._removed = numbers(1, torch.float32, -1), numbers(1, torch.float32) * math.nan

    def insert(self, slots: Tensor) -> None:
        """Give new transitions in ``slots`` [n] the first ranks, the last one rank 0."""
        rank_move(*self._views(), slots.contiguous(), self._new)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n]."""
        rank_move(*self._views(), slots.contiguous(), self._removed)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Move each of ``slots`` [n] to the rank of its ``priority`` [n]; see :meth:`ReplaySampler.update`."""
        rank_move(*self._views(), slots.contiguous(), priority.contiguous())

    def refresh(self) -> None:
        """Bring the ranks up to date before they are read."""
        if not self._bucket.is_cpu:
            rank_rebuild(*self._views())

    def total(self) -> Tensor:
        """Number of transitions, int64 []."""
        # within limits also while another thread changes the counts
        return read_root(self._counts).to(torch.int64).clamp_(0, self._size)

    def draw(self, u: Tensor, cumulative: Tensor, alpha: Tensor) -> tuple[Array, Array, Array]:
        """Draw slots by rank^-alpha; see :func:`torchrl_replay_ext.kernels.rank.draw`.

        Returns:
            The slots, int64 [n]; rank^-alpha of each, float64 [n]; and that of the last rank, float64 [1].
        """
        _, _, members, start, _, counts, _ = self._views()
        slots = empty(members, u.shape[0], torch.int64)
        density, smallest = empty(members, u.shape[0], torch.float64), empty(members, 1, torch.float64)
        rank_draw(members, start, counts, self._size, cumulative, alpha, u, slots, density, smallest)
        return slots, density, smallest

    def find(self, rank: Tensor) -> Tensor:
        """The slot of each ``rank`` [n], int64 [n]; 0 if there are not so many transitions."""
        slots = torch.empty_like(rank)
        rank_find(self._members, self._start, self._counts, self._size, rank.contiguous(), slots)
        return slots

    def rank_of(self, slots: Tensor) -> Tensor:
        """The rank of each of ``slots`` [n], int64 [n]; -1 for slots without a transition."""
        rank = torch.empty_like(slots)
        rank_rank_of(self._bucket, self._place, self._members, self._counts, slots.contiguous(), rank)
        return rank

    def density(self, slots: Tensor, alpha: Tensor) -> Tensor:
        """rank^-alpha of each of ``slots`` [n], for ranks from 1 on, float64 [n]; 0 for slots without a transition."""
        rank = self.rank_of(slots)
        return (rank + 1).clamp_min(1).to(torch.float64) ** -alpha * (rank >= 0)

    def clear(self) -> None:
        """Remove all transitions."""
        self._bucket.fill_(NOWHERE)
        self._place.zero_()
        self._top.zero_()
        rank_rebuild(*self._views())

    def tensors(self) -> dict[str, Tensor]:
        """The state to save; the rest follows from the priorities."""
        return {"place": self._place}

    def rebuild(self, priority: Tensor, stored: Tensor) -> None:
        """Recompute the buckets after :meth:`tensors` were replaced.

        Args:
            priority: of each slot, negative if it was never updated, float32 [slots].
            stored: True if a slot holds a transition, bool [slots].
        """
        # the bits of positive floats are ordered like the floats
        bucket = torch.where(priority < 0, NEW, BUCKETS - 1 - (priority.view(torch.int32) >> DROPPED_BITS))
        self._bucket.copy_(torch.where(stored, bucket, NOWHERE))
        # saved places of other devices, or wrong ones, still are an order
        order = self._place.argsort(stable=True)
        order = order[self._bucket[order].argsort(stable=True)]
        ordered = self._bucket[order]
        # new transitions: the number of those that follow, negative
        origin = torch.searchsorted(ordered, torch.where(ordered == NEW, NEW + 1, ordered))
        self._place[order] = torch.arange(self._size, device=order.device) - origin
        self._top.fill_(self._size)
        rank_rebuild(*self._views())
