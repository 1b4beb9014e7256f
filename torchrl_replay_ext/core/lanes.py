"""Assignment of the transitions in a ring buffer to lanes, one per stream, and detection of episode starts."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import fetch, is_traced, raise_if, values_can_be_read, where_int64
from torchrl_replay_ext.indices import write_last

# The number of recently preempted trajectories that are remembered: per lane, and if there is a single lane.
_REMEMBERED = 8
_REMEMBERED_ALONE = 64


def shifted(values: Tensor, first: Tensor | int | bool) -> Tensor:
    """``values`` [n] shifted by one place to the right; the first value is ``first``."""
    head = first.reshape(1).to(values.dtype) if isinstance(first, Tensor) else values.new_full((1,), first)
    return torch.cat([head, values[:-1]])


def at_last(lane: Tensor, value: Tensor, current: Tensor) -> Tensor:
    """A copy of ``current`` [lanes]; each lane with rows gets the ``value`` [n] of its last row."""
    result = current.clone()
    write_last(result, lane, value)
    return result


class EpisodeMarks(NamedTuple):
    """Ends, trajectory ids and first transitions of episodes in the rows of a write.

    Args:
        ended: the episode ends with this transition, bool [n].
        trajectory: trajectory ids, int64 [n]; required if lanes are assigned. Default: None, not stored.
        initial: the transition is the first of its episode, bool [n]. Default: None, not stored.
    """

    ended: Tensor
    trajectory: Tensor | None = None
    initial: Tensor | None = None

    def at(self, rows: Tensor) -> EpisodeMarks:
        """The marks of ``rows``, int64 [k]."""
        trajectory, initial = (None if column is None else column[rows] for column in (self.trajectory, self.initial))
        return EpisodeMarks(self.ended[rows], trajectory, initial)


class LaneRows(NamedTuple):
    """The rows of a write, sorted by lane; the rows of each lane are in the order of writing.

    Args:
        order: index of each row in the write, int64 [n].
        lane: lane of each row, int64 [n].
        first: True for the first row of each lane, bool [n].
        new: True if an episode begins with the row, bool [n].
        preempted: True for lanes that were taken from an unfinished trajectory, bool [lanes]; None if lanes are fixed
            or all trajectories go on.
    """

    order: Tensor
    lane: Tensor
    first: Tensor
    new: Tensor
    preempted: Tensor | None


class _Groups(NamedTuple):
    """The rows of a write by trajectory: one group per trajectory, padded to n groups.

    Args:
        of_row: group of each row, int64 [n].
        id: trajectory of each group, int64 [n].
        first, last: its first and last row, int64 [n]; n and 0 in padding.
        used: False in padding, bool [n].
    """

    of_row: Tensor
    id: Tensor
    first: Tensor
    last: Tensor
    used: Tensor


def _group_by_trajectory(trajectory: Tensor) -> _Groups:
    """Group the rows of a write by their trajectory ids, int64 [n]."""
    count = trajectory.shape[0]
    rows = torch.arange(count, device=trajectory.device)
    order = trajectory.argsort(stable=True)
    ids = trajectory[order]
    group_sorted = (shifted(ids, 0) != ids).to(torch.int64)
    group_sorted[:1].zero_()
    group_sorted = group_sorted.cumsum(0)
    group = torch.empty_like(order).index_copy_(0, order, group_sorted)
    first = torch.full_like(rows, count).scatter_reduce_(0, group, rows, "amin")
    last = torch.zeros_like(rows).scatter_reduce_(0, group, rows, "amax")
    group_id = torch.full_like(rows, -1).index_copy_(0, group, trajectory)
    return _Groups(group, group_id, first, last, first < count)


class _Queue(NamedTuple):
    """The groups that ask for a lane at their first row, and those that release theirs at their last row.

    The k-th request can be met if k lanes were free or released before it.

    Args:
        asks: the group asks for a lane, bool [n].
        closes: the group releases its lane, bool [n].
        number: how many groups asked before, int64 [n].
        released_before: lanes released before the request, int64 [n].
        place: which of all released lanes is that of the group, int64 [n].
    """

    asks: Tensor
    closes: Tensor
    number: Tensor
    released_before: Tensor
    place: Tensor


def _queue_for_lanes(group: _Groups, asks: Tensor, closes: Tensor) -> _Queue:
    """Order the requests and releases of lanes; for the arguments see :class:`_Queue`."""
    count = len(asks)
    none = torch.zeros(count + 1, dtype=torch.int64, device=asks.device)
    requested = none.index_add(0, group.first, asks.to(torch.int64))[:count].cumsum(0)
    released = none.index_add(0, group.last, closes.to(torch.int64))[:count].cumsum(0)
    first = group.first.clamp_max(count - 1)
    # a group of one row that ends has not released its lane before it
    by_itself = closes[group.of_row[first]].to(torch.int64) * (group.last[group.of_row[first]] == first)
    return _Queue(asks, closes, requested[first] - 1, released[first] - by_itself, released[group.last] - 1)


def _inherit_lanes(group: _Groups, queue: _Queue, match: Tensor, closed: Tensor) -> Tensor:
    """The lane of each group, int64 [n].

    The k-th request takes the k-th lane that is free or becomes free. A lane that becomes free is inherited from the
    group that releases it, which may itself have inherited it. Pointer doubling follows these chains.

    Args:
        group: the trajectories of the write.
        queue: their requests for lanes.
        match: the group continues the trajectory of the lane, bool [n, lanes].
        closed: the lane is free before the write, bool [lanes].
    """
    count, lanes = match.shape
    rows = torch.arange(count, device=match.device)
    free = torch.argsort(~closed, stable=True)
    num_free = closed.sum()
    release = torch.zeros(count + 1, dtype=torch.int64, device=match.device)
    release.index_copy_(0, where_int64(queue.closes, queue.place, torch.full_like(queue.place, count)), rows)
    inherits = queue.asks & (queue.number >= num_free)
    parent = where_int64(inherits, release[(queue.number - num_free).clamp(0, count)], rows)
    lane = where_int64(queue.asks, free[queue.number.clamp(0, lanes - 1)], match.to(torch.int64).argmax(1))
    for _ in range(count.bit_length()):
        parent = parent[parent]
    return lane[parent]


class Lanes:
    """The lanes of a ring buffer and the streams that are assigned to them.

    A stream is the sequence of steps of one environment. Lanes are either fixed or assigned:

    * Fixed by the storage: slot t·lanes + e is step t of lane e. One environment in flat storage is a single lane.
    * Assigned by trajectory id, for several environments in one flat storage. A trajectory keeps its lane until it
      ends.

    The caller tracks the lanes with an unfinished episode and passes them as ``open_lane``.

    Args:
        steps: length of the ring: in slots per lane if lanes are fixed, in slots if they are assigned.
        num_lanes: number of lanes. Default: 1.
        assigned: lanes are assigned by trajectory id. Default: False.
        device: device of the tensors. Default: None, the CPU.
        validate: check trajectory ids on accelerators too, where the host must wait for the device to see them. If
            False (default), trajectories that would raise an error are counted instead, as in graphs.
    """

    def __init__(
        self,
        steps: int,
        num_lanes: int = 1,
        *,
        assigned: bool = False,
        device: torch.device | str | None = None,
        validate: bool = False,
    ):
        self.steps, self.num_lanes, self.assigned, self._validate = steps, num_lanes, assigned, validate
        self._skip_checks_on = None if validate else torch.device(device or "cpu")
        # slots per step of the ring
        self._width = 1 if assigned else num_lanes
        self.size = steps * self._width

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        # the last trajectory id and the number of the last write of each lane
        self._trajectory = full(num_lanes, -1)
        self._written = full(num_lanes, 0)
        # per lane: trajectory ids restarted since its last write; the end of its trajectory may have been missed
        self._ids_restarted = full(num_lanes, 0, torch.bool)
        self._end_may_be_missed = full(num_lanes, 0, torch.bool)
        # per lane: not written to since a state was loaded. Not part of the state itself
        self._was_loaded = full(num_lanes, 0, torch.bool)
        self._max_trajectory = full(1, -1)
        self._zero_seen = full(1, 0, torch.bool)
        # per lane: the trajectories that were recently preempted by another one, the latest last
        remembered = _REMEMBERED if num_lanes > 1 else _REMEMBERED_ALONE
        self._recently_preempted = torch.full((num_lanes, remembered), -1, dtype=torch.int64, device=device)
        # number of trajectories that were interrupted, or that exceeded the number of lanes in a graph
        self.interrupted = full(1, 0)
        self._warned = False

    def mark_loaded(self) -> None:
        """Note that a state was loaded. In each lane the run may go on, or a new trajectory may begin."""
        self._was_loaded.fill_(True)

    def mark_ends_missed(self, lanes: Tensor | None = None) -> None:
        """Note that rows were lost in which trajectories may have ended.

        Args:
            lanes: True for the lanes of these trajectories, bool [lanes]. Default: None, all lanes.
        """
        if lanes is None:
            self._end_may_be_missed.fill_(True)
        else:
            self._end_may_be_missed.copy_(lanes)

    def register(
        self,
        slots: Tensor,
        open_lane: Tensor,
        write_number: Tensor,
        marks: EpisodeMarks,
    ) -> LaneRows:
        """Register a write: assign its rows to lanes and find where episodes begin.

        Args:
            slots: int64 [n], distinct, in the order of writing.
            open_lane: bool [lanes], the lane has an unfinished episode.
            write_number: int64 [], number of this write, larger than the numbers of earlier writes.
            marks: the ends and beginnings of episodes, and the trajectory ids.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        preempted = None
        if self.assigned:
            turn = self._by_time(marks, open_lane)
            lane, preempted = self._assign(marks.at(turn), open_lane)
            lane = torch.empty_like(lane).index_copy_(0, turn, lane)
            if preempted is not None:
                open_lane = open_lane & ~preempted
        else:
            lane = slots % self.num_lanes
            self._track_single_lane(marks, open_lane)
        if self.num_lanes > 1:
            order = lane.argsort(stable=True)
            lane, marks = lane[order], marks.at(order)
        else:
            order = torch.arange(slots.shape[0], device=slots.device)
        ended, trajectory, initial = marks
        first = shifted(lane, -1) != lane
        new = torch.where(first, ~open_lane[lane], shifted(ended, False))
        if trajectory is not None:
            if self.num_lanes > 1 and not self.assigned:
                self._require_own_lane(lane, first & open_lane[lane], trajectory, initial)
            new |= trajectory != where_int64(first, self._trajectory[lane], shifted(trajectory, 0))
            self._trajectory.copy_(at_last(lane, trajectory, self._trajectory))
        if initial is not None:
            new |= initial
        self._written.index_copy_(0, lane, write_number.expand(lane.shape))
        return LaneRows(order, lane, first, new, preempted)

    def register_in_single_lane(self, is_open: bool, write_number: int, marks: EpisodeMarks) -> list[int]:
        """:meth:`register` for a single lane, where values can be read.

        Args:
            is_open: the lane has an unfinished episode.
            write_number: see :meth:`register`.
            marks: see :meth:`register`.

        Returns:
            The rows where episodes begin, in order.
        """
        ended, trajectory, initial = marks
        begins = {row + 1 for row, is_end in enumerate(ended.tolist()[:-1]) if is_end}
        if not is_open:
            begins.add(0)
        if trajectory is not None:
            ids, last = trajectory.tolist(), self._trajectory.item()
            changes = [row for row, (new, old) in enumerate(zip(ids, [last, *ids], strict=False)) if new != old]
            if changes:
                self._track_single_lane(marks, torch.tensor([is_open], device="cpu"))
                begins.update(changes)
                self._trajectory.fill_(ids[-1])
        if initial is not None:
            begins.update(row for row, is_first in enumerate(initial.tolist()) if is_first)
        self._written.fill_(write_number)
        return sorted(begins)

    def _track_single_lane(self, marks: EpisodeMarks, open_lane: Tensor) -> None:
        """With one lane, count interrupted trajectories and warn; raise an error if such a trajectory continues.

        A trajectory is interrupted if another one begins before it has ended. If ids restart, or if the first
        transition of the other trajectory is marked, this is expected: it is not counted and causes no warning.
        """
        ended, trajectory, initial = marks
        if trajectory is None or self.num_lanes > 1:
            return
        previous = shifted(trajectory, self._trajectory[0])
        begins = trajectory != previous
        if values_can_be_read(begins) and not bool(begins.any()):
            return
        cuts = begins & ~shifted(ended, ~open_lane)
        marked = torch.zeros_like(begins) if initial is None else initial
        restarted = begins & (trajectory <= self._max_trajectory)
        unexpected = cuts & ~restarted & ~marked
        preempted = where_int64(restarted.any(), -1, self._recently_preempted)
        if values_can_be_read(begins) or (self._validate and not is_traced()):
            preempted = self._latest_preempted(trajectory, previous, begins, cuts, marked, unexpected)
        self._recently_preempted.copy_(preempted, non_blocking=True)
        self.interrupted.add_(unexpected.sum())
        self._count_trajectories(trajectory, restarted)

    def _latest_preempted(
        self,
        trajectory: Tensor,
        previous: Tensor,
        begins: Tensor,
        cuts: Tensor,
        marked: Tensor,
        unexpected: Tensor,
    ) -> Tensor:
        """With one lane: the recently preempted trajectories after a write, the latest last; int64 [1, .].

        Args:
            trajectory: int64 [n].
            previous: int64 [n], the trajectory of the previous row.
            begins: bool [n], the row belongs to another trajectory than the previous row.
            cuts: bool [n], the row preempts the trajectory of the previous row, which had not ended.
            marked: bool [n], the row is marked as the first of its episode.
            unexpected: bool [n], the row preempts a trajectory for an unknown reason: warn.

        Raises:
            ValueError: if a preempted trajectory continues.
        """
        recent, columns = self._recently_preempted[0], (trajectory, previous, cuts, marked, unexpected)
        begins, recent, highest, *columns = fetch(begins, recent, self._max_trajectory, *columns)
        rows = begins.to(torch.bool)
        columns = [column[rows].tolist() for column in columns]
        must_warn = any(columns.pop())
        gone = dict.fromkeys(each for each in recent.tolist() if each >= 0)
        largest = int(highest)
        for new, old, is_cut, is_marked in zip(*columns, strict=True):
            if new in gone and not is_marked:
                raise self._too_many(new, "continues after another one was written")
            if new <= largest:
                # ids restarted: earlier ids no longer identify trajectories
                gone = {}
            elif is_cut:
                gone[old] = None
            largest = new
        if must_warn:
            self._warn_of_cut()
        return torch.tensor([[*[-1] * _REMEMBERED_ALONE, *gone][-_REMEMBERED_ALONE:]])

    def _warn_of_cut(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "A trajectory began before the last one had ended (done); the unfinished one is closed at its last "
                "stored step. This is normal once after a run was resumed from a checkpoint. If several environments "
                "write to this buffer, pass num_streams=<number of environments> to the sampler (EventTableSampler: in "
                "priority=).",
                stacklevel=2,
            )

    def _require_own_lane(self, lane: Tensor, continues: Tensor, trajectory: Tensor, initial: Tensor | None) -> None:
        """In fixed lanes a trajectory may be interrupted, but it must not continue after another one in its lane.

        Args:
            lane: int64 [n].
            continues: bool [n], the row is written to a lane with an unfinished episode.
            trajectory: int64 [n].
            initial: bool [n].
        """
        cut = continues & (trajectory != self._trajectory[lane])
        if initial is not None:
            cut &= ~initial
        returned = cut & (self._recently_preempted[lane] == trajectory.unsqueeze(1)).any(1)
        raise_if(
            returned.any,
            skip_on=self._skip_checks_on,
            error=lambda: ValueError(
                f"trajectory {int(trajectory[returned][0])} continues in a column of the storage after another one was "
                "written there: several workers or collectors alternate in the same columns. Use flat storage (ndim=1) "
                "with num_streams=<number of environments that write to the buffer>. If a new collector restarted the "
                "trajectory ids, mark the first transition of each episode (torchrl's InitTracker does)."
            ),
        )
        self.interrupted.add_(returned.sum())
        self._remember(torch.zeros_like(self._written).index_add_(0, lane, cut.to(torch.int64)) > 0)

    def _remember(self, cut: Tensor) -> None:
        """Record the last trajectory of each lane where ``cut``, bool [lanes], is True as preempted."""
        longer = torch.cat([self._recently_preempted[:, 1:], self._trajectory.unsqueeze(1)], 1)
        self._recently_preempted.copy_(where_int64(cut.unsqueeze(1), longer, self._recently_preempted))

    def _count_trajectories(self, trajectory: Tensor, restarted: Tensor) -> None:
        self._zero_seen |= (trajectory == 0).any()
        largest = trajectory.max().reshape(1)
        self._max_trajectory.copy_(where_int64(restarted.any(), largest, torch.maximum(largest, self._max_trajectory)))

    def _too_many(self, new: Tensor | int, how: str | None = None) -> ValueError:
        how = how or f"begins while each of {self.num_lanes} streams has an unfinished trajectory"
        return ValueError(
            f"trajectory {int(new)} {how}: more simultaneous trajectories than num_streams={self.num_lanes}. Pass "
            "num_streams=<number of environments that write to the buffer> to the sampler (EventTableSampler: in "
            "priority=). If trajectories are cut off, mark the last transition as truncated and done (a collector does "
            "with set_truncated=True), or mark the first transition of the next trajectory (torchrl's InitTracker "
            "does); with several streams, this trajectory must begin in a later write. Leave out the padding of "
            "split_trajs=True: data[data['collector', 'mask']]."
        )

    def _by_time(self, marks: EpisodeMarks, open_lane: Tensor) -> Tensor:
        """The order in which the rows of a write [n] are assigned to lanes, int64 [n].

        The first steps of all environments come first, then the second steps, and so on. In flattened [E, T] data, the
        rows of one environment precede the rows of the next. If rows were assigned in this order, one lane could
        receive rows of two environments and another lane none.
        """
        ended, trajectory, _ = marks
        assert trajectory is not None
        count, lanes = trajectory.shape[0], self.num_lanes
        rows = torch.arange(count, device=trajectory.device)
        if lanes == 1 or count % lanes or count == lanes:
            return rows

        def continues(ids: Tensor, done: Tensor) -> Tensor:
            """True if each of the environments [k, T] has one trajectory at a time."""
            return ((ids[:, 1:] == ids[:, :-1]) | done[:, :-1]).all()

        by_step = continues(trajectory.view(-1, lanes).T, ended.view(-1, lanes).T)
        if values_can_be_read(by_step) and bool(by_step):
            return rows
        ids, done = trajectory.view(lanes, -1), ended.view(lanes, -1)
        first = ids[:, 0]
        # This order is time order only if no trajectory has rows in two environments and every open trajectory
        # continues. Otherwise the rows are interleaved in another way.
        order = trajectory.argsort(stable=True)
        of_env, sorted_ids = order // ids.shape[1], trajectory[order]
        apart = (sorted_ids[1:] != sorted_ids[:-1]) | (of_env[1:] == of_env[:-1])
        all_go_on = (~open_lane | (~self._ids_restarted & (self._trajectory.unsqueeze(1) == first).any(1))).all()
        one_by_one = ~by_step & continues(ids, done) & apart.all() & all_go_on
        return where_int64(one_by_one, rows.view(lanes, -1).T.reshape(-1), rows)

    def _assign(self, marks: EpisodeMarks, open_lane: Tensor) -> tuple[Tensor, Tensor | None]:
        """The lane of each row by its trajectory id [n].

        A trajectory keeps its lane until it ends. A new trajectory takes the lane that became free first. If no lane is
        free, it takes the lane that was written to least recently, excluding lanes that this write continues. Only
        lanes from before a restart of ids, a loss of rows or a load are candidates, or all lanes if the first
        transition is marked.

        Returns:
            Lane of each row [n]; and True for lanes taken from an unfinished trajectory [lanes], or None if all
            trajectories go on.
        """
        ended, trajectory, initial = marks
        assert trajectory is not None
        group = _group_by_trajectory(trajectory)
        # [group, lane]: the group continues the trajectory of an open lane
        match = group.id.unsqueeze(1) == self._trajectory
        match &= open_lane & ~self._ids_restarted & group.used.unsqueeze(1)
        # the group begins with a row that is marked as the first of its episode
        marked = None if initial is None else initial[group.first.clamp_max(len(initial) - 1)]
        # ids restart at 0: earlier trajectories do not continue
        begins = ~match.any(1) if marked is None else ~match.any(1) | marked
        begins_again = group.used & (group.id == 0) & begins & self._zero_seen
        restarted = begins_again.any()
        unless_restarted = torch.full_like(group.first, len(trajectory))
        goes_on = group.first < where_int64(begins_again, group.first, unless_restarted).amin()
        if marked is not None:
            # a row that is not marked does not begin a trajectory
            goes_on |= ~marked
        match &= goes_on.unsqueeze(1)
        asks, preempted = group.used & ~match.any(1), None
        if values_can_be_read(asks) and not bool(asks.any()):
            # most writes: all trajectories go on
            lane = match.to(torch.int64).argmax(1)[group.of_row]
        else:
            queue = _queue_for_lanes(group, asks, closes=group.used & ended[group.last])
            preempted = self._preempt(group, queue, match, marked, open_lane, restarted)
            self._count_trajectories(trajectory, restarted)
            lane = _inherit_lanes(group, queue, match, closed=~open_lane | preempted)[group.of_row]
            self._ids_restarted |= restarted & open_lane & ~preempted
        for doubt in (self._ids_restarted, self._end_may_be_missed, self._was_loaded):
            doubt.index_fill_(0, lane, False)
        return lane, preempted

    def _preempt(
        self,
        group: _Groups,
        queue: _Queue,
        match: Tensor,
        marked: Tensor | None,
        open_lane: Tensor,
        restarted: Tensor,
    ) -> Tensor:
        """Choose the lanes that are taken from unfinished trajectories, bool [lanes].

        Args:
            group: the trajectories of the write.
            queue: the groups that ask for a lane.
            match: the group continues the trajectory of the lane, bool [n, lanes].
            marked: the first row of the group is marked as the first of its episode, bool [n]; None without marks.
            open_lane: the lane has an unfinished episode, bool [lanes].
            restarted: trajectory ids restarted in this write, bool [].

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        asks = queue.asks
        missing = ((queue.number + 1 - (~open_lane).sum() - queue.released_before) * asks).amax().clamp_min(0)
        cuts_off = group.id <= self._max_trajectory
        if marked is not None:
            cuts_off |= marked
        in_doubt = self._ids_restarted | self._end_may_be_missed | self._was_loaded
        available = open_lane & ~match.any(0) & (in_doubt | (asks & cuts_off).any())
        # there are too few lanes if a trajectory continues that was preempted for lack of a lane
        was_preempted = (group.id.unsqueeze(1) == self._recently_preempted.view(-1)).any(1)
        returned = asks & (missing > 0) & ~restarted & was_preempted
        too_many = torch.maximum((missing - available.sum()).clamp_min(0), returned.sum())
        raise_if(
            lambda: too_many > 0,
            lambda: self._too_many(group.id[returned if bool(returned.any()) else asks][-1]),
            skip_on=self._skip_checks_on,
        )
        self.interrupted.add_(too_many)
        never = torch.full_like(self._written, 2**62)
        age = where_int64(available, self._written, never).argsort(stable=True).argsort()
        preempted = available & (age < missing)
        # after a restart, earlier ids no longer identify trajectories
        self._recently_preempted.copy_(where_int64(restarted, -1, self._recently_preempted))
        # a trajectory whose end may have been missed is not counted as preempted: it may have ended
        self._remember(preempted & ~in_doubt & ~restarted)
        return preempted

    def tensors(self) -> dict[str, Tensor]:
        """The state by name."""
        return {
            "lane_trajectory": self._trajectory,
            "lane_written": self._written,
            "lane_ids_restarted": self._ids_restarted,
            "lane_end_may_be_missed": self._end_may_be_missed,
            "lane_recently_preempted": self._recently_preempted,
            "max_trajectory": self._max_trajectory,
            "zero_seen": self._zero_seen,
            "interrupted": self.interrupted,
        }

    def clear_(self) -> None:
        """Forget all trajectories."""
        self._was_loaded.zero_()
        for name, tensor in self.tensors().items():
            tensor.fill_(-1 if name in ("lane_trajectory", "lane_recently_preempted", "max_trajectory") else 0)
