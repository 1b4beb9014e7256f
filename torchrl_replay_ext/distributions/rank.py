"""P(i) by the rank of the priority (Schaul et al. 2016, rank-based variant)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.arguments import WeightNorm
from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    increase,
    is_traced,
    scalar,
    scatter_in_bounds,
    stratified_uniform,
    uniform,
    where_int64,
)
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.rank_order import RankOrder
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView
from torchrl_replay_ext.indices import UpdateMask, is_last_occurrence, last_occurrence

# Offsets of the gaps that are tried; and the factor of Knuth's multiplicative hash, which spreads slots evenly.
_PROBES = (0, 1, -1, 2)
_HASH = 2654435761
# A transition that could not be moved counts as so many changes.
_STAYED = 10

Segments = Literal["exact", "piecewise"]


class RankBased(Distribution):
    """P(i) = rank(i)^−α / Σ_r r^−α, with ranks of the last sort; see :class:`~torchrl_replay_ext.RankBasedSampler`.

    Stored transitions occupy places in the order of their ranks. The first places are for transitions written since the
    last sort; they are filled from the end. Then come the places of the last sort, with a gap before each and more gaps
    before the first and after the last. The last place stands for empty slots. A sum tree counts the places in use.

    Args:
        log, priorities: the state of the slots.
        alpha: the exponent.
        stratified: draw one slot from each of B segments of equal probability.
        segments: ``"exact"``: segments follow P exactly. ``"piecewise"``: the paper's approximation.
        stale_fraction: share of the transitions that may change before the next sort.
        weight_norm: ``"buffer"`` or ``"batch"``: weights are divided by the largest weight of the buffer or batch.
    """

    # a graph cannot sort; writes outside graphs sort instead
    writes_in_graphs = False
    why_not_joint = "ranks need the priorities of all shards; use ProportionalSampler or ReaPERSampler."

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        *,
        alpha: Hyperparameter,
        stratified: bool,
        segments: Segments,
        stale_fraction: float,
        weight_norm: WeightNorm,
    ):
        self._log, self._priorities, self._alpha = log, priorities, alpha
        self._stratified, self._segments, self._weight_norm = stratified, segments, weight_norm
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
        # Σ_{r≤k} r^-alpha, and the alpha of this table
        self._cumulative = torch.zeros(size, dtype=torch.float64, device=device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=device)
        self._tabulate(alpha.value)
        # piecewise: size of the last batch, which is the number of segments; 0 (exact probabilities) before the first
        self._num_segments = 0

    def _tabulate(self, alpha: Tensor) -> None:
        self._table_alpha.copy_(alpha.reshape(1))
        ranks = torch.arange(1, self._size + 1, dtype=torch.float64, device=self._device)
        torch.cumsum(ranks.pow_(-self._table_alpha), 0, out=self._cumulative)

    def clear(self) -> None:
        self._tree.clear_()
        self._slot_at.zero_()
        self._place.fill_(self._nowhere)
        self._order.clear()
        self._num_sorted.zero_()
        self._extremes.fill_(1.0)
        self._written.zero_()

    def tensors(self) -> dict[str, Tensor]:
        return {
            "places_in_use": self._tree.leaves,
            "slot_at": self._slot_at,
            "place": self._place,
            "num_sorted": self._num_sorted,
            "extremes": self._extremes,
            "written": self._written,
            "table_alpha": self._table_alpha,
            **self._order.tensors(),
        }

    def check_valid(self) -> None:
        self._tree.check_valid()
        place = self._place[:-1]
        placed = (place != self._nowhere).nonzero().squeeze(1)
        if not torch.equal(placed, self._log.stored_slots()):
            raise AssertionError("RankBased: an empty slot has a place, or a stored slot has none")
        in_use = (self._tree.leaves > 0).nonzero().squeeze(1)
        places = place[placed]
        if not torch.equal(places.sort().values, in_use) or not torch.equal(self._slot_at[places], placed):
            raise AssertionError("RankBased: a place is assigned to another slot")

    def rebuild(self) -> None:
        self._tree.rebuild_()
        self._tabulate(self._table_alpha.clone())

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        count = slots.shape[0]
        if self._log.layout.for_graphs:
            self._sort_if_due()
        if not is_traced() and int(self._written) + count > self._size:
            self.sort()
        if isinstance(rows.slots_as_index, slice):
            self._place_consecutive(rows.slots_as_index, self._size - int(self._written))
        else:
            number = torch.arange(count, device=self._device)
            place = self._size - 1 - (self._written + number) % self._size
            self._move(slots, place, is_last_occurrence(slots))
        increase(self._written, count)
        increase(self._order.changes, count)

    def remove(self, slots: Tensor) -> None:
        left = self._place[slots]
        self._tree.write(left, torch.zeros_like(left))
        self._place.index_fill_(0, slots, self._nowhere)

    def update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        """Move each slot to the gap of its new priority. If this gap and the next ones are in use, the slot stays."""
        count = slots.shape[0]
        moves = is_last_occurrence(slots) if mask is None else mask.valid & mask.is_last
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

    def _place_consecutive(self, slots: slice, end: int) -> None:
        """Move ``slots`` to the places before ``end``, the first slot to the last place."""
        place_of, count = self._place.numpy(), slots.stop - slots.start
        place = np.arange(end - 1, end - count - 1, -1)
        mass = np.zeros(2 * count, np.int64)
        mass[count:] = 1
        self._tree.write(np.concatenate([place_of[slots], place]), mass)
        self._slot_at.numpy()[end - count : end] = np.arange(slots.stop - 1, slots.start - 1, -1)
        place_of[slots] = place

    def _outside(self, priority: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gaps for priorities above all, and for priorities below all, of the last sort."""
        largest, smallest = self._extremes.unbind()
        ahead = self._margin / (1 + priority / largest)
        behind = self._margin / 2 * (1 + 1 / (1 + priority / smallest))
        spread = slots * _HASH % (self._margin // 4)
        return ahead.to(torch.int64), self._margin + self._num_sorted + behind.to(torch.int64) - spread

    def reweight(self, slots: Tensor | None) -> None:
        if slots is None:
            self._tabulate(self._alpha.value)

    def _sort_if_due(self) -> None:
        if self._order.is_due(self._tree.total()):
            self.sort()

    @torch.no_grad()
    def sort(self) -> None:
        """Sort all transitions; O(N log N). This call is needed only if all writes are part of a graph."""
        with self._log.transaction():
            self._sort()

    def _sort(self) -> None:
        in_use = self._tree.leaves > 0
        slots = self._slot_at[in_use.nonzero().squeeze(1)]
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
        alpha = self._alpha.value
        if alpha.item() != self._table_alpha.item():
            self._tabulate(alpha)

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        self._sort_if_due()
        num = self._tree.total()
        draw_numbers = stratified_uniform if self._stratified else uniform
        u = draw_numbers(batch_size, device=self._device, generator=generator)
        bounds = None
        if self._segments == "exact":
            rank = torch.searchsorted(self._cumulative, u * self._mass_of(num), right=True)
            rank = torch.minimum(rank, num - 1)
            smallest = num.to(torch.float64) ** -self._table_alpha
        else:
            self._num_segments = batch_size
            bounds = begin, width = self._bounds(num, batch_size)
            scaled = u * batch_size
            segment = scaled.to(torch.int64).clamp_max(batch_size - 1)
            rank = gather_in_bounds(begin, segment) + ((scaled - segment) * gather_in_bounds(width, segment)).to(
                torch.int64
            )
            smallest = self._density(begin, bounds).amin()
        # if nothing can be drawn, the rank is -1, which finds place 0
        place, in_use = self._tree.find(rank)
        slots = gather_in_bounds(self._slot_at, place)
        density = self._density(rank.clamp_min(0), bounds) * (in_use > 0)
        return Draw(slots, density, None if self._weight_norm == "batch" else scalar(smallest.reshape(())))

    def _mass_of(self, num: Tensor) -> Tensor:
        """Σ_{r≤num} r^-alpha, float64 [1]."""
        return gather_in_bounds(self._cumulative, (num - 1).clamp_min(0).reshape(1))

    def _bounds(self, num: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each of ``count`` segments, the first rank, counted from 0, and the number of ranks; int64 [count]."""
        parts = torch.arange(1, count + 1, dtype=torch.float64, device=self._device) / count
        # a boundary that lies on the end of a rank must not include the next rank because of rounding
        ends = torch.searchsorted(self._cumulative, parts * self._mass_of(num) * (1 - 1e-12)) + 1
        # the last segment ends with the last rank, however small its probability
        ends = torch.maximum(torch.minimum(ends, num), num * (parts == 1))
        begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return torch.minimum(begins, ends - 1), (ends - begins).clamp_min(1)

    def _density(self, rank: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Tensor:
        """A number proportional to the probability of each ``rank`` [n], counted from 0; float64 [n].

        ``bounds``: the segments of :meth:`_bounds`, or None for exact probabilities.
        """
        if bounds is None:
            return (rank + 1).to(torch.float64) ** -self._table_alpha
        begin, width = bounds
        # a rank lies in consecutive segments: the first has any width, the others contain only this rank
        first = torch.searchsorted(begin + width, rank, right=True)
        end = torch.searchsorted(begin, rank, right=True)
        first_width = gather_in_bounds(width, first.clamp_max(len(width) - 1))
        return 1 / first_width.to(torch.float64) + (end - first - 1)

    def density(self, slots: Tensor) -> Tensor:
        self._sort_if_due()
        place = self._place[slots]
        bounds = self._bounds(self._tree.total(), self._num_segments) if self._num_segments else None
        return self._density(self._tree.prefix(place), bounds) * self._tree.get(place)

    def stats(self) -> dict[str, Tensor]:
        return {"stale": self._order.changes / self._tree.total().clamp_min(1)}
