"""Index of the episodes in a ring buffer, with prefix sums of TD errors along each episode."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import (
    add_in_bounds,
    gather_in_bounds,
    scatter_in_bounds,
    values_can_be_read,
    where_int64,
)
from torchrl_replay_ext.core.free_list import FreeList
from torchrl_replay_ext.core.lanes import EpisodeMarks, Lanes, at_last, shifted
from torchrl_replay_ext.core.sum_tree import MaxTree, SumTree
from torchrl_replay_ext.indices import is_last_occurrence, write_last
from torchrl_replay_ext.kernels.ops import reaper_reliability

_PAGE = SumTree.PAGE


class EpisodeIndex:
    r"""The episodes in a ring buffer, and prefix sums of a mass (\|δ\|) along each episode.

    Each lane holds the transitions of one stream of experience in time order. An episode is a run of consecutive
    positions in its lane, cyclic if the ring has wrapped. One sum tree over all positions gives the prefix sum of any
    transition in O(log N), whatever the length of the episode. Overwritten transitions are removed from the sums, so an
    episode loses its oldest transitions first. Layouts:

    * ``assigned=False``: the storage fixes the lanes. Slot t·lanes + e is step t of lane e. One environment in flat
      storage is a single lane.
    * ``assigned=True``, for several environments in one flat storage: the trajectory id determines the lane of a
      transition. Lanes take pages from a common pool and return them, so a lane may have any length.

    All shapes are static, and no operation reads from an accelerator, except with ``validate``.

    Args:
        steps: length of the ring: in slots per lane if lanes are fixed, in slots if they are assigned.
        num_lanes: number of lanes. Default: 1.
        assigned: lanes are assigned by trajectory id. Default: False.
        device: device of the tensors. Default: None, the CPU.
        validate: see :class:`~torchrl_replay_ext.core.lanes.Lanes`. Default: False.
    """

    # lower limit of the largest total in :meth:`reliability`: the largest total of other shards
    least_largest = 0

    def __init__(
        self,
        steps: int,
        num_lanes: int = 1,
        *,
        assigned: bool = False,
        device: torch.device | str | None = None,
        validate: bool = False,
    ):
        self.steps, self.num_lanes, self.assigned = steps, num_lanes, assigned
        self.lanes = Lanes(steps, num_lanes, assigned=assigned, device=device, validate=validate)
        self.size = size = self.lanes.size
        self.device = torch.device(device or "cpu")
        page_table = None
        num_pages = None
        self.span = steps
        if assigned:
            self._page_shift = _PAGE.bit_length() - 1
            blocks = -(-steps // _PAGE) + 2
            self.span = blocks * _PAGE
            num_pages = -(-steps // _PAGE) + 2 * num_lanes
            # unwritten slots point to the last block, which never has a page
            page_table = torch.full((num_lanes * blocks + 2,), num_pages, dtype=torch.int64, device=device)
            self._nowhere = num_lanes * self.span
            wide = torch.int32 if self._nowhere < 2**31 else torch.int64
            self._position = torch.full((size,), self._nowhere, dtype=wide, device=device)
            self._pages = FreeList(num_pages, device=device)
            self._no_page = num_pages
        else:
            self._position = torch.zeros(0, dtype=torch.int64, device=device)
        positions = num_lanes * self.span
        self._tree = SumTree(
            positions + (_PAGE if assigned else 0),
            page_table=page_table,
            num_pages=num_pages,
            device=device,
        )

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        narrow = torch.int32 if positions < 2**31 else torch.int64
        # One record per episode. The extra record at the end receives masked writes; its total stays 0.
        records = size + num_lanes
        self._none = records
        self.episode = full(size, records, narrow)
        self._totals = MaxTree(records + 1, device=device)
        self._start = full(records + 1, 0, narrow)
        self._count = full(records + 1, 0, narrow)
        # the number of writes when the episode was last updated or ended; transitions written later are new
        self._updated_at = full(records + 1, 0)
        self._finished = full(records + 1, 0, torch.bool)
        self._open = full(records + 1, 0, torch.bool)
        self._records = FreeList(records, device=device)
        # per lane: its unfinished episode (the extra record if there is none), sum, and offset of its next transition
        self._lane_episode = full(num_lanes, records)
        self._lane_total = full(num_lanes, 0)
        self._lane_next = full(num_lanes, 0)

    def largest_total(self) -> int:
        """The largest sum of the masses of an episode."""
        return int(self._totals.max())

    @property
    def _page_table(self) -> Tensor:
        assert self._tree.page_table is not None
        return self._tree.page_table

    def holds(self, slots: Tensor) -> Tensor:
        """True where a slot of ``slots`` [n] belongs to an episode, bool [n]."""
        return gather_in_bounds(self.episode, slots) != self._none

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest first.

        In fixed lanes, unfinished episodes do not continue afterwards. In assigned lanes, the trajectory id decides.
        """
        self.lanes.mark_ends_missed()
        position = self.positions(slots)
        self._evict(slots, slots % self.num_lanes)
        if not self.assigned:
            # a write would replace the mass
            self._tree.write(position, torch.zeros_like(position))
            self._abandon(self._lane_episode)
            self._lane_episode.fill_(self._none)

    def write(
        self,
        slots: Tensor,
        mass: Tensor | int,
        write_number: Tensor | int,
        marks: EpisodeMarks,
        finished: Tensor,
    ) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        ``mass``, int64 [] or a number, is the mass of each new transition. ``finished``, bool [n]: where an episode
        ends, whether reliability treats it as finished. For the other arguments see
        :meth:`~torchrl_replay_ext.core.lanes.Lanes.register`.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        if self.num_lanes == 1 and not self.assigned and values_can_be_read(slots):
            self._write_alone(slots.numpy(), int(mass), int(write_number), marks, finished)
            return
        count = slots.shape[0]
        mass = torch.as_tensor(mass, device=slots.device)
        write_number = torch.as_tensor(write_number, device=slots.device)
        rows = torch.arange(count, device=slots.device)
        order, lane, first, new, preempted = self.lanes.register(
            slots, self._lane_episode != self._none, write_number, marks
        )
        slots, ended, finished = slots[order], marks.ended[order], finished[order]

        self._evict(slots, lane)
        if preempted is not None:
            self._abandon(where_int64(preempted, self._lane_episode, torch.full_like(self._lane_episode, self._none)))
            self._lane_episode.copy_(where_int64(preempted, self._none, self._lane_episode))

        going_on = self._lane_episode[lane]
        begun = new.cumsum(0)
        begun_before_lane = where_int64(first, begun - new.to(torch.int64), torch.zeros_like(begun)).cummax(0).values
        record = where_int64(begun == begun_before_lane, going_on, self._records.pop(new))
        # reliability treats an episode that stops without an end as unfinished
        before = where_int64(first, going_on, shifted(record, self._none))
        abandoned = where_int64(new & ~shifted(ended, False) | new & first, before, torch.full_like(before, self._none))

        position = self._place(slots, lane, first, rows)
        begins = where_int64(new, record, torch.full_like(record, self._none))
        for field, value in ((self._totals.leaves, 0), (self._count, 0), (self._updated_at, 0)):
            field.index_fill_(0, begins, value)
        self._finished.index_fill_(0, begins, False)
        self._open.index_fill_(0, begins, True)
        self._start.index_copy_(0, begins, position.to(self._start.dtype))
        self._tree.write(position, mass.expand(count))
        self._totals.leaves.index_add_(0, record, mass.expand(count))
        self._lane_total.index_add_(0, lane, mass.expand(count))
        self._count.index_add_(0, record, torch.ones_like(record, dtype=self._count.dtype))
        self.episode.index_copy_(0, slots, record.to(self.episode.dtype))

        ends = where_int64(ended, record, torch.full_like(record, self._none))
        self._finished.index_copy_(0, ends, finished)
        self._open.index_fill_(0, ends, False)
        self._updated_at.index_copy_(0, ends, write_number.expand(count))
        self._abandon(abandoned)
        self._open.index_fill_(0, torch.full_like(lane[:1], self._none), False)
        self._lane_episode.copy_(at_last(lane, where_int64(ended, self._none, record), self._lane_episode))
        self._totals.refresh(record)

    def _write_alone(
        self,
        slots: np.ndarray,
        mass: int,
        write_number: int,
        marks: EpisodeMarks,
        finished: Tensor,
    ) -> None:
        """:meth:`write` with a single lane, where values can be read: by episodes instead of rows."""
        going_on, lane_total = int(self._lane_episode), self._lane_total.numpy()
        begins = self.lanes.register_in_single_lane(going_on != self._none, write_number, marks)
        episode, start, count = self.episode.numpy(), self._start.numpy(), self._count.numpy()
        totals, updated_at = self._totals.leaves.numpy(), self._updated_at.numpy()
        is_open, is_finished = self._open.numpy(), self._finished.numpy()
        changed, freed = [], []

        # remove the content of the slots from all sums
        masses, end = self._tree.get(slots).tolist(), 0
        for record, same in itertools.groupby(episode[slots].tolist()):
            first, end = end, end + sum(1 for _ in same)
            if record != self._none:
                removed = sum(masses[first:end])
                totals[record] -= removed
                lane_total -= removed
                count[record] -= end - first
                start[record] = (slots[end - 1] + 1) % self.steps
                changed.append(record)
                if not count[record] and not is_open[record]:
                    freed.append(record)
        continues = begins[:1] != [0]
        if not continues and going_on != self._none:
            # reliability treats an episode that stops without an end as unfinished
            is_open[going_on] = False
            if not count[going_on]:
                freed.append(going_on)
        if freed:
            self._records.give_back(np.array(freed))

        records = self._records.take(len(begins)).tolist() if begins else []
        for record, first in zip(records, begins, strict=True):
            start[record], count[record], totals[record], updated_at[record] = slots[first], 0, 0, 0
            is_finished[record] = False
        if continues:
            records, begins = [going_on, *records], [0, *begins]
        is_end = marks.ended.tolist()
        for record, first, end in zip(records, begins, [*begins[1:], len(slots)], strict=True):
            count[record] += end - first
            totals[record] += (end - first) * mass
            episode[slots[first:end]] = record
            is_open[record] = False
            if is_end[end - 1]:
                is_finished[record], updated_at[record] = finished[end - 1].item(), write_number
        is_open[records[-1]] = not is_end[-1]
        lane_total += len(slots) * mass
        self._lane_episode.fill_(self._none if is_end[-1] else records[-1])
        self._tree.write(slots, mass)
        self._totals.refresh(np.array(changed + records))

    def _evict(self, slots: Tensor, lane: Tensor) -> None:
        """Remove the content of ``slots`` [n] from all sums."""
        record = self.episode.index_select(0, slots).to(torch.int64)
        live = record != self._none
        position = self.positions(slots)
        mass = self._tree.get(position) * live
        if self.assigned:
            lane = (position // self.span).clamp_max(self.num_lanes - 1)
        self._totals.leaves.index_add_(0, record, -mass)
        self._lane_total.index_add_(0, lane, -mass)
        self._count.index_add_(0, record, -live.to(self._count.dtype))
        following = lane * self.span + (position - lane * self.span + 1) % self.span
        write_last(self._start, record, following.to(self._start.dtype))
        if self.assigned:
            self._tree.write(position, torch.zeros_like(mass))
            block = position >> self._page_shift
            over = live & (position & ((1 << self._page_shift) - 1) == (1 << self._page_shift) - 1)
            self._pages.push(self._page_table[block], over)
            nowhere = torch.full_like(block, self._nowhere >> self._page_shift)
            self._page_table.index_fill_(0, where_int64(over, block, nowhere), self._no_page)
            self._position.index_fill_(0, slots, self._nowhere)
        self._free(record)
        self._totals.refresh(record)
        self.episode.index_fill_(0, slots, self._none)

    def before_full_overwrite(self) -> None:
        """Remove all content before a write of more rows than slots, whose first rows are not inserted."""
        self.remove(torch.arange(self.size, device=self.device))
        self.lanes.mark_ends_missed(self._lane_episode != self._none)

    def _free(self, record: Tensor) -> None:
        """Free the records of ``record`` [n] that are empty and not open."""
        empty = (self._count.index_select(0, record) == 0) & ~self._open.index_select(0, record)
        empty &= record != self._none
        if values_can_be_read(empty) and not bool(empty.any()):
            return
        self._records.push(record, empty & is_last_occurrence(record))

    def _abandon(self, record: Tensor) -> None:
        """Close the episodes ``record`` [n], which did not end."""
        if values_can_be_read(record) and bool((record == self._none).all()):
            return
        self._open.index_fill_(0, record, False)
        self._free(record)

    def _place(self, slots: Tensor, lane: Tensor, first: Tensor, rows: Tensor) -> Tensor:
        """Assign positions to new transitions, which are sorted by lane."""
        if not self.assigned:
            return self.positions(slots)
        rank = rows - where_int64(first, rows, torch.zeros_like(rows)).cummax(0).values
        offset = (self._lane_next[lane] + rank) % self.span
        position = lane * self.span + offset
        block = position >> self._page_shift
        starts = offset & ((1 << self._page_shift) - 1) == 0
        pages = self._pages.pop(starts)
        nowhere = torch.full_like(block, self._nowhere >> self._page_shift)
        self._page_table.index_copy_(
            0, where_int64(starts, block, nowhere), where_int64(starts, pages, torch.full_like(pages, self._no_page))
        )
        self._lane_next.copy_(at_last(lane, offset + 1, self._lane_next))
        self._position.index_copy_(0, slots, position.to(self._position.dtype))
        return position

    def positions(self, slots: Tensor) -> Tensor:
        """Positions of ``slots`` [n], lane by lane in time order, int64 [n]."""
        if self.assigned:
            return gather_in_bounds(self._position, slots).to(torch.int64)
        if self.num_lanes == 1:
            return slots
        return slots % self.num_lanes * self.steps + slots // self.num_lanes

    def update(self, slots: Tensor, mass: Tensor, num_writes: Tensor | None) -> None:
        """Set the masses of ``slots`` [n].

        Args:
            slots: int64 [n], each once; the slot must hold a transition. Rows of slot -1 are skipped.
            mass: int64 [n].
            num_writes: number of the last write. The transitions of the updated episodes are no longer new. None: no
                change.
        """
        valid, slots = slots >= 0, slots.clamp_min(0)
        position = self.positions(slots)
        record = where_int64(valid, gather_in_bounds(self.episode, slots).to(torch.int64), self._none)
        change = (mass - self._tree.get(position)) * valid
        self._tree.write(where_int64(valid, position, -1), mass)
        add_in_bounds(self._totals.leaves, record, change)
        self._totals.refresh(record)
        if self.num_lanes == 1:
            self._lane_total.add_(change.sum())
        else:
            # positions of empty slots lie after the last lane
            add_in_bounds(self._lane_total, (position // self.span).clamp_max(self.num_lanes - 1), change)
        if num_writes is not None:
            scatter_in_bounds(self._updated_at, record, num_writes.expand(record.shape[0]))

    def arrays(self, generation: Tensor) -> list[Tensor | int]:
        """The arguments ``episodes`` of :mod:`torchrl_replay_ext.kernels.reaper`.

        ``generation``, int64 [size]: number of the write that filled each slot.
        """
        masses = [*self._tree.arrays()]
        places = [self._position, self.num_lanes, self.span, self._lane_total]
        records = [self.episode, self._start, self._finished, self._updated_at, *self._totals.tensors()]
        return [*masses, *places, *records, self.least_largest, generation]

    def reliability(self, slots: Tensor, generation: Tensor) -> Tensor:
        """Reliability R of ``slots`` [n] that hold transitions, in (0, 1]; 1 for new transitions.

        It is also 1 in episodes without mass. ``generation``: see :meth:`arrays`.

        Returns:
            float64 [n].
        """
        result = slots.new_empty(slots.shape[0], dtype=torch.float64)
        reaper_reliability(slots.contiguous(), result, *self.arrays(generation))
        return result

    @property
    def max_supported_priority(self) -> float:
        """The largest mass a transition may have, as a priority."""
        return self._tree.max_supported_priority

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`rebuild_` recomputes derived state."""
        state = {
            "masses": self._tree.leaves,
            "episode": self.episode,
            "totals": self._totals.leaves,
            "start": self._start,
            "count": self._count,
            "updated_at": self._updated_at,
            "finished": self._finished,
            "open": self._open,
            "lane_episode": self._lane_episode,
            "lane_total": self._lane_total,
            "lane_next": self._lane_next,
            **self.lanes.tensors(),
            **self._records.tensors("records"),
        }
        if self.assigned:
            state |= {"position": self._position, "page_table": self._page_table, **self._pages.tensors("pages")}
        return state

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of all writes by ``last``."""
        self._updated_at.add_(last * (self._updated_at > 0))

    def rebuild_(self) -> None:
        """Recompute the trees after their leaves were overwritten."""
        self._tree.rebuild_()
        self._totals.rebuild_()

    def clear_(self) -> None:
        """Remove all content."""
        self._tree.clear_()
        if self.assigned:
            self._page_table.fill_(self._no_page)
            self._position.fill_(self._nowhere)
            self._pages.clear_()
        zeros = [self._totals.leaves, self._start, self._count, self._updated_at, self._finished, self._open]
        for field in (*zeros, self._lane_total, self._lane_next):
            field.zero_()
        for field in (self.episode, self._lane_episode):
            field.fill_(self._none)
        self.lanes.clear_()
        self._totals.rebuild_()
        self._records.clear_()

    def check_valid(self) -> None:
        """Raise AssertionError if sums, counts, records or pages contradict each other. O(size)."""
        self._tree.check_valid()
        self._totals.check_valid()
        record = self.episode.to(torch.int64)
        stored = (record != self._none).nonzero().squeeze(1)
        record, position = record[stored], self.positions(stored)
        if position.unique().numel() != position.numel():
            raise AssertionError("EpisodeIndex: two slots have the same position")
        mass = self._tree.get(position)
        per_record = torch.zeros_like(self._totals.leaves).index_add_(0, record, mass)
        per_lane = torch.zeros_like(self._lane_total).index_add_(0, position // self.span, mass)
        if not torch.equal(per_record, self._totals.leaves) or not torch.equal(per_lane, self._lane_total):
            raise AssertionError("EpisodeIndex: a sum differs from the sum over its transitions")
        if int(self._tree.total()) != int(mass.sum()):
            raise AssertionError("EpisodeIndex: an empty position has mass")
        count = record.bincount(minlength=self._none + 1)
        if not torch.equal(count[:-1], self._count[:-1].to(torch.int64)):
            raise AssertionError("EpisodeIndex: the number of transitions of an episode is wrong")
        in_use = (count > 0) | self._open
        if not torch.equal(self._records.free(), ~in_use[:-1]):
            raise AssertionError("EpisodeIndex: the free records are wrong")
        going_on = self._lane_episode[self._lane_episode != self._none]
        expected = torch.zeros_like(self._open).index_fill_(0, going_on, True)
        if not torch.equal(expected, self._open):
            raise AssertionError("EpisodeIndex: the open episodes differ from the unfinished episodes of the lanes")
        start = self._start[record].to(torch.int64)
        before_start, upto = self._tree.prefix(torch.cat([start, position + 1])).chunk(2)
        part = upto - before_start + (position < start) * self._lane_total[position // self.span]
        whole = torch.zeros_like(per_record).scatter_reduce_(0, record, part, "amax")
        if not torch.equal(whole, per_record):
            raise AssertionError("EpisodeIndex: the transitions of an episode are not consecutive")
        if self.assigned:
            pages = self._page_table[self._page_table != self._no_page]
            held = pages.bincount(minlength=self._no_page)
            if int(held.max()) > 1 or not torch.equal(self._pages.free(), held == 0):
                raise AssertionError("EpisodeIndex: the free pages are wrong")
