"""The ranks of transitions by sorting, on accelerators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    increase,
    is_traced,
    scatter_in_bounds,
    where_int64,
)
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.rank_order import RankOrder
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.indices import is_last_occurrence, last_occurrence

# Offsets of the gaps that are tried; and the factor of Knuth's multiplicative hash, which spreads slots evenly.
_PROBES = (0, 1, -1, 2)
_HASH = 2654435761
# A transition that could not be moved counts as so many changes.
_STAYED = 10


class SortedRanks:
    """The stored transitions in the order of their ranks, counted from 0, at the last sort.

    Stored transitions occupy places in the order of their ranks. The first places are for transitions written since the
    last sort; they are filled from the end. Then come the places of the last sort, with a gap before each and more gaps
    before the first and after the last. The last place stands for empty slots. A sum tree counts the places in use.

    Args:
        log, priorities: the state of the slots.
        stale_fraction: share of the transitions that may change before the next sort.
        on_sort: called after each sort.
    """

    # a graph cannot sort; writes outside graphs sort instead
    writes_in_graphs = False

    def __init__(self, log: WriteLog, priorities: Priorities, *, stale_fraction: float, on_sort: Callable[[], None]):
        self._log, self._priorities, self._on_sort = log, priorities, on_sort
        self._size, self._device = size, device = log.layout.size, log.layout.device
        self._margin = size // 8 + 64
        self._num_gaps = size + 2 * self._margin
        self._nowhere = size + 2 * self._num_gaps
        self._tree = SumTree(self._nowhere + 1, device=device)
        self._slot_at = torch.zeros(self._nowhere + 1, dtype=torch.int64, device=device)
        # the last element receives masked writes
        self._place = torch.full((size + 1,), self._nowhere, dtype=torch.int64, device=device)
        self._order = RankOrder(size, tables=1, stale_fraction=stale_fraction, device=device)
        # at the last sort: the number of transitions, and the largest and the smallest d
        self._num_sorted = torch.zeros((), dtype=torch.int64, device=device)
        self._extremes = torch.ones(2, device=device)
        self._probes = torch.tensor(_PROBES, device=device).unsqueeze(1)
        # number of slots written since the last sort
        self._written = torch.zeros((), dtype=torch.int64, device=log.layout.counters)

    def clear(self) -> None:
        """Remove all transitions."""
        self._tree.clear_()
        self._slot_at.zero_()
        self._place.fill_(self._nowhere)
        self._order.clear()
        self._num_sorted.zero_()
        self._extremes.fill_(1.0)
        self._written.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save; the rest follows from the priorities."""
        return {"place": self._place[:-1]}

    def check_valid(self) -> None:
        """Raise AssertionError if the state is inconsistent. O(N)."""
        self._tree.check_valid()
        place = self._place[:-1]
        placed = (place != self._nowhere).nonzero().squeeze(1)
        if not torch.equal(placed, self._log.stored_slots()):
            raise AssertionError("SortedRanks: an empty slot has a place, or a stored slot has none")
        in_use = (self._tree.leaves > 0).nonzero().squeeze(1)
        places = place[placed]
        if not torch.equal(places.sort().values, in_use) or not torch.equal(self._slot_at[places], placed):
            raise AssertionError("SortedRanks: a place is assigned to another slot")

    def rebuild(self) -> None:
        """Sort after :meth:`tensors` were replaced; of equal priorities, the smaller place comes first."""
        slots = self._log.stored_slots()
        slots = slots[self._place[slots].argsort(stable=True)]
        self.clear()
        self._arrange(slots)

    def insert(self, slots: Tensor) -> None:
        """Give new transitions in ``slots`` [n] the first ranks, the last one rank 0."""
        count = slots.shape[0]
        if self._log.layout.for_graphs:
            self.sort_if_due()
        if not is_traced() and int(self._written) + count > self._size:
            self.sort()
        number = torch.arange(count, device=self._device)
        place = self._size - 1 - (self._written + number) % self._size
        self._move(slots, place, is_last_occurrence(slots))
        increase(self._written, count)
        increase(self._order.changes, count)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n]."""
        left = self._place[slots]
        self._tree.write(left, torch.zeros_like(left))
        self._place.index_fill_(0, slots, self._nowhere)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Move each slot to the gap of its new priority. If this gap and the next ones are in use, the slot stays."""
        count, moves = slots.shape[0], slots >= 0
        slots = slots.clamp_min(0)
        low, high = self._order.find(priority)
        # equal priorities are spread over the gaps between them
        gap = self._margin + low + slots * _HASH % (high - low + 1)
        ahead, behind = self._outside(priority, slots)
        gap = where_int64(high == 0, ahead, gap)
        gap = where_int64(low == self._num_sorted, behind, gap)
        gaps = (gap + self._probes).clamp(0, self._num_gaps - 1)
        free = self._tree.get((self._size + 2 * gaps).reshape(-1)).view(gaps.shape) == 0
        first = free.to(torch.int64).argmax(0, keepdim=True)
        place = self._size + 2 * gaps.gather(0, first).squeeze(0)
        # of several rows that choose the same gap, the last one moves
        wanted, moves = moves, moves & free.any(0)
        moves = moves & (last_occurrence(place, moves) == torch.arange(count, device=self._device))
        self._order.changes.add_(count + (_STAYED - 1) * (wanted & ~moves).sum())
        self._move(slots, place, moves)

    def _move(self, slots: Tensor, place: Tensor, moves: Tensor) -> None:
        """Move ``slots`` [n] to ``place`` [n] where ``moves`` [n] is True; each slot and place at most once."""
        nowhere = torch.full_like(place, self._nowhere)
        left, taken = (
            where_int64(moves, gather_in_bounds(self._place, slots), nowhere),
            where_int64(moves, place, nowhere),
        )
        self._tree.write(torch.cat([left, taken]), torch.cat([torch.zeros_like(slots), moves.to(torch.int64)]))
        scatter_in_bounds(self._slot_at, taken, slots)
        scatter_in_bounds(self._place, where_int64(moves, slots, torch.full_like(slots, self._size)), taken)

    def _outside(self, priority: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gaps for priorities above all, and for priorities below all, of the last sort."""
        largest, smallest = self._extremes.unbind()
        ahead = self._margin / (1 + priority / largest)
        behind = self._margin / 2 * (1 + 1 / (1 + priority / smallest))
        spread = slots * _HASH % (self._margin // 4)
        return ahead.to(torch.int64), self._margin + self._num_sorted + behind.to(torch.int64) - spread

    def sort_if_due(self) -> None:
        """Sort if enough transitions have changed."""
        if self._order.is_due(self.total()):
            self.sort()

    @torch.no_grad()
    def sort(self) -> None:
        """Sort all transitions, O(N log N)."""
        self._sort()
        self._on_sort()

    def _sort(self) -> None:
        self._arrange(self._slot_at[(self._tree.leaves > 0).nonzero().squeeze(1)])

    def _arrange(self, slots: Tensor) -> None:
        """Sort ``slots`` [n], which are all transitions. The sort is stable."""
        slots = slots[self._order.sort(self._priorities.of_slot[slots])]
        count = len(slots)
        if count:
            ends = self._priorities.of_slot[torch.stack([slots[0], slots[-1]])]
            self._extremes.copy_(torch.where(ends > 0, ends, 1.0))
        places = self._size + 1 + 2 * (self._margin + torch.arange(count, device=self._device))
        self._slot_at[places] = slots
        self._place[slots] = places
        self._num_sorted.fill_(count)
        self._tree.leaves.zero_()
        self._tree.leaves.index_fill_(0, places, 1)
        self._tree.rebuild_()
        self._written.zero_()

    def total(self) -> Tensor:
        """Number of transitions, int64 []."""
        return self._tree.total()

    def find(self, rank: Tensor) -> Tensor:
        """The slot of each ``rank`` [n], int64 [n]; 0 if there are no transitions."""
        place, in_use = self._tree.find(rank)
        return gather_in_bounds(self._slot_at, place) * (in_use > 0)

    def rank_of(self, slots: Tensor) -> Tensor:
        """The rank of each of ``slots`` [n], int64 [n]; -1 for slots without a transition."""
        place = self._place[slots]
        return torch.where(self._tree.get(place) > 0, self._tree.prefix(place), -1)

    def stats(self) -> dict[str, Tensor]:
        """Statistics for logging, scalars."""
        return {"stale": self._order.changes / self.total().clamp_min(1)}
