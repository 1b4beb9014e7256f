"""Which slots form which episode, in which order, and how much of the episode's TD error lies behind each of them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.functional.priorities import all_different, is_last_occurrence, write_last
from torchrl_replay_ext.tracing import is_traced, pick, put, take
from torchrl_replay_ext.tree import MaxTree, Resolved, SumTree

# Positions per page: a row of the tree.
_PAGE = 64


def _shifted(values: Tensor, first: Tensor | int | bool) -> Tensor:
    """``values`` one place later, led by ``first``."""
    head = first.reshape(1).to(values.dtype) if isinstance(first, Tensor) else values.new_full((1,), first)
    return torch.cat([head, values[:-1]])


class FreeList:
    """A queue of free ids 0..size-1, in tensors of static shape.

    Args:
        size: number of ids.
        device: where the tensors live.
    """

    def __init__(self, size: int, *, device: torch.device | str | None = None):
        self.size = size
        # one place more, for writes that are masked out
        self.queue = torch.arange(size + 1, device=device).to(torch.int32 if size < 2**31 else torch.int64)
        self.head = torch.zeros((), dtype=torch.int64, device=device)
        self.tail = torch.full((), size, device=device)

    def pop(self, mask: Tensor) -> Tensor:
        """An id for each True of ``mask`` [n], int64; where False, that of the last True before (any id if none)."""
        rank = mask.cumsum(0)
        ids = self.queue.index_select(0, (self.head + rank - 1) % self.size).to(torch.int64)
        self.head.add_(rank[-1])
        return ids

    def push(self, ids: Tensor, mask: Tensor) -> None:
        """Give back ``ids`` [n] where ``mask`` is True."""
        rank = mask.cumsum(0)
        place = pick(mask, (self.tail + rank - 1) % self.size, torch.full_like(ids, self.size))
        self.queue.index_copy_(0, place, ids.to(self.queue.dtype))
        self.tail.add_(rank[-1])

    def clear_(self) -> None:
        """All ids are free again."""
        self.queue.copy_(torch.arange(self.size + 1, device=self.queue.device))
        self.head.zero_()
        self.tail.fill_(self.size)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The state, under names that start with ``name``."""
        return {f"{name}_queue": self.queue, f"{name}_head": self.head, f"{name}_tail": self.tail}


class EpisodeIndex:
    r"""The episodes in a ring buffer, and prefix sums of a mass (\|δ\|) along each.

    Transitions lie in *lanes*, one for each stream of experience, in time order; within its lane an episode is a run of
    positions, cyclic where the ring has wrapped. One sum tree over all positions gives the prefix sum of any
    transition in O(log N), whatever the length of its episode. Transitions that were overwritten leave the sums: an
    episode loses its head. Layouts:

    * ``lanes`` fixed by the storage (``assigned=False``): slot t·lanes + e is step t of lane e. One environment written
      to flat storage is a single lane.
    * several environments in one flat storage (``assigned=True``): the lane of a transition is that of its trajectory
      id. A lane grows by pages that are taken from a common pool and given back, so lanes may be of any length.

    All shapes are static. Nothing waits for the device but the check for too many trajectories, which are counted
    instead where that is traced, and :meth:`skipped`.

    Args:
        steps: length of the ring in slots per lane if fixed, in slots if assigned.
        lanes: number of lanes.
        assigned: lanes are assigned by trajectory id.
        device: where the tensors live.
    """

    def __init__(self, steps: int, lanes: int = 1, *, assigned: bool = False, device: torch.device | str | None = None):
        self.steps, self.lanes, self.assigned = steps, lanes, assigned
        # slots per step of the ring
        self._width = 1 if assigned else lanes
        self.size = size = steps * self._width
        self.device = torch.device(device or "cpu")
        page_table = None
        num_pages = None
        self.span = steps
        if assigned:
            self._page_shift = _PAGE.bit_length() - 1
            blocks = -(-steps // _PAGE) + 2
            self.span = blocks * _PAGE
            num_pages = -(-steps // _PAGE) + 2 * lanes
            # the last block is never stored: it is where unwritten slots point to
            page_table = torch.full((lanes * blocks + 2,), num_pages, dtype=torch.int64, device=device)
            self._nowhere = lanes * self.span
            wide = torch.int32 if self._nowhere < 2**31 else torch.int64
            self._position = torch.full((size,), self._nowhere, dtype=wide, device=device)
            self._pages = FreeList(num_pages, device=device)
            self._no_page = num_pages
        positions = lanes * self.span
        self._tree = SumTree(
            positions + (_PAGE if assigned else 0),
            fanout=_PAGE,
            page_table=page_table,
            num_pages=num_pages,
            device=device,
        )

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        narrow = torch.int32 if positions < 2**31 else torch.int64
        # an episode's record; the one behind the last takes writes that are masked out, and its total stays 0
        records = size + lanes
        self._none = records
        self.episode = full(size, records, narrow)
        self._totals = MaxTree(records + 1, device=device)
        self._start = full(records + 1, 0, narrow)
        self._count = full(records + 1, 0, narrow)
        self._touched = full(records + 1, 0)
        self._finished = full(records + 1, 0, torch.bool)
        self._open = full(records + 1, 0, torch.bool)
        self._records = FreeList(records, device=device)
        # a lane's episode that still goes on (none: the last record), its last trajectory id, its sum, ...
        self._lane_episode = full(lanes, records)
        self._lane_trajectory = full(lanes, -1)
        self._lane_total = full(lanes, 0)
        self._lane_next = full(lanes, 0)
        self._lane_written = full(lanes, 0)
        # ... and, since it was last written: whether trajectory ids restarted, whether its end may have gone unseen
        self._lane_old = full(lanes, 0, torch.bool)
        self._lane_doubtful = full(lanes, 0, torch.bool)
        self._max_trajectory = full(1, -1)
        self._zero_seen = full(1, 0, torch.bool)
        self._cursor = full(1, 0)
        # trajectories that were too many, where that could not be an error
        self.broken_off = full(1, 0)

    def prepare(self) -> None:
        """Make it fit to become part of a graph."""
        self._tree.prepare()
        self._totals.prepare()

    def step_of(self, slot: Tensor) -> int:
        """The place of ``slot`` [] in the ring."""
        return int(slot) // self._width

    def expected_step(self) -> int:
        """The place in the ring where the next write is expected."""
        return int(self._cursor)

    def skipped(self, slots: Tensor) -> Tensor:
        """The slots from where the next write was expected up to ``slots`` [n]: written behind our back. int64 [k]."""
        gap = (self.step_of(slots[0]) - self.expected_step()) % self.steps
        steps = (self._cursor + torch.arange(gap, device=slots.device)) % self.steps
        return (steps.unsqueeze(1) * self._width + torch.arange(self._width, device=slots.device)).reshape(-1)

    def drop(self, slots: Tensor) -> None:
        """Forget what ``slots`` [n] held, the oldest first; what goes on does not go on after them."""
        self._evict(slots, slots % self.lanes)
        if not self.assigned:
            self._abandon(self._lane_episode)
            self._lane_episode.fill_(self._none)

    def write(
        self,
        slots: Tensor,
        mass: Tensor,
        clock: Tensor,
        *,
        ended: Tensor,
        finished: Tensor,
        trajectory: Tensor | None = None,
        initial: Tensor | None = None,
    ) -> None:
        """Take in new transitions, in the order of writing, over whatever their slots held.

        Args:
            slots: int64 [n], distinct, n <= size.
            mass: int64 [], of each new transition.
            clock: int64 [], number of this write; larger than all before.
            ended: bool [n], the episode ends with this transition.
            finished: bool [n], where ``ended``: its reliability is that of a finished episode.
            trajectory: int64 [n], trajectory ids; needed where lanes are assigned.
            initial: bool [n], the transition is the first of its episode.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes; nothing is changed then.
        """
        count = slots.shape[0]
        rows = torch.arange(count, device=slots.device)
        newest = slots[-1:] // self._width
        if self.assigned:
            lane, stolen, restarted = self._assign(trajectory, ended)
        else:
            lane = slots % self.lanes
            self._require_one_stream(trajectory, ended, initial)
        order = lane.argsort(stable=True) if self.lanes > 1 else rows
        lane, slots, ended, finished = lane[order], slots[order], ended[order], finished[order]
        first = _shifted(lane, -1) != lane

        self._evict(slots, lane)
        if self.assigned:
            self._abandon(pick(stolen, self._lane_episode, torch.full_like(self._lane_episode, self._none)))
            self._lane_episode.copy_(pick(stolen, self._none, self._lane_episode))
            self._lane_old |= restarted & (self._lane_episode != self._none)

        # where a new episode begins
        going_on = self._lane_episode[lane]
        new = torch.where(first, going_on == self._none, _shifted(ended, False))
        if trajectory is not None:
            trajectory = trajectory[order]
            new |= trajectory != pick(first, self._lane_trajectory[lane], _shifted(trajectory, 0))
            self._lane_trajectory.copy_(self._at_last(lane, trajectory, self._lane_trajectory))
        if initial is not None:
            new |= initial[order]
        begun = new.cumsum(0)
        begun_before_lane = pick(first, begun - new.to(torch.int64), torch.zeros_like(begun)).cummax(0).values
        record = pick(begun == begun_before_lane, going_on, self._records.pop(new))
        # an episode that stops without an end stays ongoing for good
        before = pick(first, going_on, _shifted(record, self._none))
        abandoned = pick(new & ~_shifted(ended, False) | new & first, before, torch.full_like(before, self._none))

        position = self._place(slots, lane, first, rows)
        begins = pick(new, record, torch.full_like(record, self._none))
        for field, value in ((self._totals.leaves, 0), (self._count, 0), (self._touched, 0)):
            field.index_fill_(0, begins, value)
        self._finished.index_fill_(0, begins, False)
        self._open.index_fill_(0, begins, True)
        self._start.index_copy_(0, begins, position.to(self._start.dtype))
        self._tree.write(position, mass.expand(count))
        self._totals.leaves.index_add_(0, record, mass.expand(count))
        self._lane_total.index_add_(0, lane, mass.expand(count))
        self._count.index_add_(0, record, torch.ones_like(record, dtype=self._count.dtype))
        self.episode.index_copy_(0, slots, record.to(self.episode.dtype))

        ends = pick(ended, record, torch.full_like(record, self._none))
        self._finished.index_copy_(0, ends, finished)
        self._open.index_fill_(0, ends, False)
        self._touched.index_copy_(0, ends, clock.expand(count))
        self._abandon(abandoned)
        self._open.index_fill_(0, torch.full_like(newest, self._none), False)
        self._lane_episode.copy_(self._at_last(lane, pick(ended, self._none, record), self._lane_episode))
        self._lane_written.index_copy_(0, lane, clock.expand(count))
        self._totals.refresh(record)
        self._cursor.copy_((newest + 1) % self.steps)

    @staticmethod
    def _at_last(lane: Tensor, value: Tensor, current: Tensor) -> Tensor:
        """``current`` [lanes] with the last of ``value`` [n] written for each lane."""
        result = current.clone()
        write_last(result, lane, value)
        return result

    def _evict(self, slots: Tensor, lane: Tensor) -> None:
        """Take what ``slots`` held out of all sums."""
        record = self.episode.index_select(0, slots).to(torch.int64)
        live = record != self._none
        position = self.positions(slots)
        mass = self._tree.get(position) * live
        if self.assigned:
            lane = (position // self.span).clamp_max(self.lanes - 1)
        self._totals.leaves.index_add_(0, record, -mass)
        self._lane_total.index_add_(0, lane, -mass)
        self._count.index_add_(0, record, -live.to(self._count.dtype))
        following = lane * self.span + (position - lane * self.span + 1) % self.span
        write_last(self._start, record, following.to(self._start.dtype))
        if self.assigned:
            self._tree.write(position, torch.zeros_like(mass))
            block = position >> self._page_shift
            over = live & (position & ((1 << self._page_shift) - 1) == (1 << self._page_shift) - 1)
            table = self._tree.page_table
            assert table is not None
            self._pages.push(table[block], over)
            nowhere = torch.full_like(block, self._nowhere >> self._page_shift)
            table.index_fill_(0, pick(over, block, nowhere), self._no_page)
            self._position.index_fill_(0, slots, self._nowhere)
        self._free(record)
        self._totals.refresh(record)
        self.episode.index_fill_(0, slots, self._none)

    def forget(self) -> None:
        """Drop all content, before a write of more rows than there are slots, whose first rows go unseen."""
        self.drop(torch.arange(self.size, device=self.device))
        # trajectories may go on, or have ended unseen
        self._lane_doubtful.copy_(self._lane_episode != self._none)

    def _free(self, record: Tensor) -> None:
        """Give back those of ``record`` [n] that hold nothing any more and do not go on."""
        once = is_last_occurrence(record)
        empty = (self._count.index_select(0, record) == 0) & ~self._open.index_select(0, record)
        self._records.push(record, once & empty & (record != self._none))

    def _abandon(self, record: Tensor) -> None:
        """These episodes will not go on, though they did not end."""
        self._open.index_fill_(0, record, False)
        self._free(record)

    def _place(self, slots: Tensor, lane: Tensor, first: Tensor, rows: Tensor) -> Tensor:
        """Positions for new transitions, sorted by lane."""
        if not self.assigned:
            return self.positions(slots)
        rank = rows - pick(first, rows, torch.zeros_like(rows)).cummax(0).values
        offset = (self._lane_next[lane] + rank) % self.span
        position = lane * self.span + offset
        block = position >> self._page_shift
        starts = offset & ((1 << self._page_shift) - 1) == 0
        table = self._tree.page_table
        assert table is not None
        pages = self._pages.pop(starts)
        nowhere = torch.full_like(block, self._nowhere >> self._page_shift)
        table.index_copy_(0, pick(starts, block, nowhere), pick(starts, pages, torch.full_like(pages, self._no_page)))
        self._lane_next.copy_(self._at_last(lane, offset + 1, self._lane_next))
        self._position.index_copy_(0, slots, position.to(self._position.dtype))
        return position

    def _require_one_stream(self, trajectory: Tensor | None, ended: Tensor, initial: Tensor | None) -> None:
        """With one lane, a trajectory may break off only where ids restart or a first transition is marked."""
        if trajectory is None or self.lanes > 1:
            return
        previous = _shifted(trajectory, self._lane_trajectory[0])
        broken_off = ~_shifted(ended, self._lane_episode[0] == self._none)
        unexpected = broken_off & (trajectory != previous) & (trajectory > self._max_trajectory)
        if initial is not None:
            unexpected &= ~initial
        if is_traced():
            self.broken_off.add_(unexpected.sum())
        elif bool(unexpected.any()):
            self._raise_too_many(torch.ones(()), trajectory[unexpected][0])
        self._count_trajectories(trajectory, (trajectory != previous) & (trajectory <= self._max_trajectory))

    def _count_trajectories(self, trajectory: Tensor, restarted: Tensor) -> None:
        self._zero_seen |= (trajectory == 0).any()
        largest = trajectory.max().reshape(1)
        self._max_trajectory.copy_(pick(restarted.any(), largest, torch.maximum(largest, self._max_trajectory)))

    def _raise_too_many(self, going_on: Tensor, new: Tensor) -> None:
        raise ValueError(
            f"trajectory {int(new)} begins while {int(going_on)} of {self.lanes} streams hold one that still goes on: "
            f"more simultaneous trajectories than num_streams={self.lanes}. Pass num_streams=<number of environments "
            "that write to the buffer>; where a trajectory is cut off, mark it as truncated and done (a collector does "
            "with set_truncated=True), or mark the first transition of the next (torchrl's InitTracker does)."
        )

    def _assign(self, trajectory: Tensor | None, ended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The lane of each row by its trajectory id [n].

        A trajectory keeps its lane until it ends; a new one takes the lane that became free first. If none is free and
        ids have restarted, it takes the lane that was written least recently of those from before.

        Returns:
            lane [n]; lanes [lanes] taken from an unfinished trajectory; whether ids restarted [].
        """
        assert trajectory is not None
        count, device = trajectory.shape[0], trajectory.device
        rows = torch.arange(count, device=device)
        # groups: the rows of one trajectory each
        order = trajectory.argsort(stable=True)
        ids = trajectory[order]
        group_sorted = (_shifted(ids, 0) != ids).to(torch.int64)
        group_sorted[0] = 0
        group_sorted = group_sorted.cumsum(0)
        group = torch.empty_like(order).index_copy_(0, order, group_sorted)
        # for each group (padded to n of them): its id, its first and last row
        first = torch.full_like(rows, count).scatter_reduce_(0, group, rows, "amin")
        last = torch.zeros_like(rows).scatter_reduce_(0, group, rows, "amax")
        used = first < count
        group_id = torch.full_like(rows, -1).index_copy_(0, group, trajectory)
        # which of them go on in an open lane
        open_lane = self._lane_episode != self._none
        match = (group_id.unsqueeze(1) == self._lane_trajectory) & open_lane & ~self._lane_old & used.unsqueeze(1)
        # ids begin at 0 again: what was going on before does not go on
        begins_again = used & (group_id == 0) & ~match.any(1) & self._zero_seen
        restarted = begins_again.any()
        match &= (first < pick(begins_again, first, torch.full_like(first, count)).amin()).unsqueeze(1)
        request = used & ~match.any(1)
        closes = used & ended[last]
        # the others request a lane at their first row; a group that ends releases its lane at its last row. Counted
        # along the rows, the k-th request can be met if k lanes were free or released before it.
        row_or_none = torch.zeros(count + 1, dtype=torch.int64, device=device)
        requested = row_or_none.index_add(0, first, request.to(torch.int64))[:count].cumsum(0)
        released = row_or_none.index_add(0, last, closes.to(torch.int64))[:count].cumsum(0)
        clipped = first.clamp_max(count - 1)
        number = requested[clipped] - 1
        released_before = released[clipped] - closes[group[clipped]].to(torch.int64) * (last[group[clipped]] == clipped)
        missing = ((number + 1 - (~open_lane).sum() - released_before) * request).amax().clamp_min(0)
        # lanes that may be taken from a trajectory of which no end was seen, the longest silent first
        seen_before = (request & (group_id <= self._max_trajectory)).any()
        available = open_lane & ~match.any(0) & (self._lane_old | self._lane_doubtful | seen_before)
        if is_traced():
            self.broken_off.add_((missing - available.sum()).clamp_min(0))
        elif bool(missing > available.sum()):
            self._raise_too_many(open_lane.sum(), group_id[request][-1])
        age = (
            pick(available, self._lane_written, torch.full_like(self._lane_written, 2**62))
            .argsort(stable=True)
            .argsort()
        )
        stolen = available & (age < missing)
        closed = ~open_lane | stolen
        free = torch.argsort(~closed, stable=True)
        num_free = closed.sum()
        # the k-th request takes the k-th lane that is or becomes free: in the latter case that of the group which
        # releases it, which may itself have taken it from another; the chain is followed by doubling
        release = torch.zeros(count + 1, dtype=torch.int64, device=device)
        release.index_copy_(0, pick(closes, released[last] - 1, torch.full_like(last, count)), rows)
        inherits = request & (number >= num_free)
        parent = pick(inherits, release[(number - num_free).clamp(0, count)], rows)
        lane = pick(request, free[number.clamp(0, self.lanes - 1)], match.to(torch.int64).argmax(1))
        for _ in range(count.bit_length()):
            parent = parent[parent]
        self._count_trajectories(trajectory, restarted)
        lane = lane[parent][group]
        self._lane_old.index_fill_(0, lane, False)
        self._lane_doubtful.index_fill_(0, lane, False)
        untouched = torch.ones_like(self._lane_old).index_fill_(0, lane, False)
        return lane, stolen, restarted & untouched

    def positions(self, slots: Tensor) -> Tensor:
        """Positions of ``slots`` [n] in their lanes' order, int64."""
        if self.assigned:
            return take(self._position, slots).to(torch.int64)
        if self.lanes == 1:
            return slots
        return slots % self.lanes * self.steps + slots // self.lanes

    def update(self, slots: Tensor, mass: Tensor, clock: Tensor | None, resolved: Resolved | None = None) -> None:
        """Set the masses of ``slots`` [n].

        Args:
            slots: int64 [n]; each holds a transition where it is taken.
            mass: int64 [n]; of duplicates the last one wins if not ``resolved``.
            clock: number of the last write; the transitions of these episodes stop being new. None: they do not.
            resolved: what becomes of each row, if that cannot be looked at.
        """
        position = self.positions(slots)
        record = take(self.episode, slots).to(torch.int64)
        before = self._tree.get(position)
        if resolved is not None:
            taken, once = resolved
            mass = pick(taken, mass, before)
            record = pick(taken, record, torch.full_like(record, self._none))
            change = (mass - before) * once
        else:
            change = mass - before
            if not all_different(slots):
                change *= is_last_occurrence(slots)
        self._tree.write(position, mass, resolved=resolved)
        put(self._totals.leaves, record, change, accumulate=True)
        self._totals.refresh(record)
        if self.lanes == 1:
            self._lane_total.add_(change.sum())
        else:
            # what is not stored lies behind the last lane
            put(self._lane_total, (position // self.span).clamp_max(self.lanes - 1), change, accumulate=True)
        if clock is not None:
            put(self._touched, record, clock.expand(record.shape[0]))

    def reliability(self, slots: Tensor, stamp: Tensor, *, exact: bool = True) -> Tensor:
        """R of ``slots`` [n] that hold something, in (0, 1]; 1 for what is new.

        Args:
            slots: int64 [n].
            stamp: int64 [size], the number of the write of each slot.
            exact: float64, and 1 where an episode has no mass at all; otherwise float32, and NaN there, which is enough
                for a draw and takes fewer operations.

        Returns:
            [n].
        """
        record = take(self.episode, slots)
        position = self.positions(slots)
        start = take(self._start, record)
        behind, upto = self._tree.prefix(torch.cat([start, position + 1])).chunk(2)
        # an episode that runs over the end of its lane's ring
        around = self._lane_total
        if self.lanes > 1:
            around = take(around, (position // self.span).clamp_max(self.lanes - 1))
        part = upto.sub_(behind).add_((position < start) * around)
        totals = take(self._totals.leaves, record)
        whole = torch.where(take(self._finished, record), totals, self._totals.max())
        is_new = take(stamp, slots) > take(self._touched, record)
        ratio = (part.double() / whole).nan_to_num_(nan=1.0) if exact else part / whole
        return ratio.masked_fill_(is_new, 1.0)

    @property
    def max_priority(self) -> float:
        """The largest mass a transition may have, as a priority."""
        return self._tree.max_priority

    def tensors(self) -> dict[str, Tensor]:
        """All state from which the rest is recomputed, by name."""
        state = {
            "masses": self._tree.leaves,
            "episode": self.episode,
            "totals": self._totals.leaves,
            "start": self._start,
            "count": self._count,
            "touched": self._touched,
            "finished": self._finished,
            "open": self._open,
            "lane_episode": self._lane_episode,
            "lane_trajectory": self._lane_trajectory,
            "lane_total": self._lane_total,
            "lane_next": self._lane_next,
            "lane_written": self._lane_written,
            "lane_old": self._lane_old,
            "lane_doubtful": self._lane_doubtful,
            "max_trajectory": self._max_trajectory,
            "zero_seen": self._zero_seen,
            "cursor": self._cursor,
            "broken_off": self.broken_off,
            **self._records.tensors("records"),
        }
        if self.assigned:
            assert self._tree.page_table is not None
            state |= {"position": self._position, "page_table": self._tree.page_table, **self._pages.tensors("pages")}
        return state

    def rebuild_(self) -> None:
        """Recompute the trees after their leaves were overwritten."""
        self._tree.rebuild_()
        self._totals.rebuild_()

    def clear_(self) -> None:
        """Forget everything."""
        self._tree.clear_()
        if self.assigned:
            assert self._tree.page_table is not None
            self._tree.page_table.fill_(self._no_page)
            self._position.fill_(self._nowhere)
            self._pages.clear_()
        for field, value in (
            (self.episode, self._none),
            (self._totals.leaves, 0),
            (self._start, 0),
            (self._count, 0),
            (self._touched, 0),
            (self._finished, 0),
            (self._open, 0),
            (self._lane_episode, self._none),
            (self._lane_trajectory, -1),
            (self._lane_total, 0),
            (self._lane_next, 0),
            (self._lane_written, 0),
            (self._lane_old, 0),
            (self._lane_doubtful, 0),
            (self._max_trajectory, -1),
            (self._zero_seen, 0),
            (self._cursor, 0),
            (self.broken_off, 0),
        ):
            field.fill_(value)
        self._totals.rebuild_()
        self._records.clear_()

    def nbytes(self) -> int:
        """Memory in bytes."""
        trees = self._tree.nbytes() + self._totals.nbytes()
        own = [t for name, t in self.tensors().items() if name not in ("masses", "totals")]
        return trees + sum(t.numel() * t.element_size() for t in own)
