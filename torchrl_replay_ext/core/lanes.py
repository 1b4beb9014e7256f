"""Assignment of the transitions in a ring buffer to lanes, one per stream, and detection of episode starts."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import fetch, is_traced, raise_if, values_can_be_read, where_int64
from torchrl_replay_ext.functional.priorities import write_last

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


class Rows(NamedTuple):
    """The rows of a write, sorted by lane; the rows of each lane are in the order of writing.

    Args:
        order: index of each row in the write, int64 [n].
        lane: lane of each row, int64 [n].
        first: True for the first row of each lane, bool [n].
        new: True if an episode begins with the row, bool [n].
        stolen: True for lanes that were taken from an unfinished trajectory, bool [lanes]; None if lanes are fixed.
    """

    order: Tensor
    lane: Tensor
    first: Tensor
    new: Tensor
    stolen: Tensor | None


class Lanes:
    """The lanes of a ring buffer and the streams that are assigned to them.

    A stream is the sequence of steps of one environment. Lanes are either fixed or assigned:

    * Fixed by the storage: slot t·lanes + e is step t of lane e. One environment in flat storage is a single lane.
    * Assigned by trajectory id, for several environments in one flat storage. A trajectory keeps its lane until it
      ends.

    The caller tracks the lanes with an unfinished episode and passes them as ``open_lane``.

    Args:
        steps: length of the ring: in slots per lane if lanes are fixed, in slots if they are assigned.
        lanes: number of lanes. Default: 1.
        assigned: lanes are assigned by trajectory id. Default: False.
        device: device of the tensors. Default: None, the CPU.
        validate: check trajectory ids on accelerators too, where the host must wait for the device to see them. If
            False (default), trajectories that would raise an error are counted instead, as in graphs.
    """

    def __init__(
        self,
        steps: int,
        lanes: int = 1,
        *,
        assigned: bool = False,
        device: torch.device | str | None = None,
        validate: bool = False,
    ):
        self.steps, self.lanes, self.assigned, self._validate = steps, lanes, assigned, validate
        self._checked = None if validate else torch.device(device or "cpu")
        # slots per step of the ring
        self._width = 1 if assigned else lanes
        self.size = steps * self._width

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        # the last trajectory id and the number of the last write of each lane
        self._trajectory = full(lanes, -1)
        self._written = full(lanes, 0)
        # per lane: trajectory ids restarted since its last write; the end of its trajectory may have been missed
        self._old = full(lanes, 0, torch.bool)
        self._end_may_be_missed = full(lanes, 0, torch.bool)
        self._max_trajectory = full(1, -1)
        self._zero_seen = full(1, 0, torch.bool)
        # per lane: the trajectories that were recently preempted by another one, the latest last
        remembered = _REMEMBERED if lanes > 1 else _REMEMBERED_ALONE
        self._recently_preempted = torch.full((lanes, remembered), -1, dtype=torch.int64, device=device)
        # number of trajectories that were interrupted, or that exceeded the number of lanes in a graph
        self.broken_off = full(1, 0)
        self._warned = False

    def miss_ends(self) -> None:
        """Note that rows were lost. Any trajectory may have ended in the lost rows."""
        self._end_may_be_missed.fill_(True)

    def follow(
        self,
        slots: Tensor,
        open_lane: Tensor,
        clock: Tensor,
        *,
        ended: Tensor,
        trajectory: Tensor | None = None,
        initial: Tensor | None = None,
    ) -> Rows:
        """Register a write: assign its rows to lanes and find where episodes begin.

        Args:
            slots: int64 [n], distinct, in the order of writing.
            open_lane: bool [lanes], the lane has an unfinished episode.
            clock: int64 [], number of this write, larger than the numbers of earlier writes.
            ended: bool [n], the episode ends with this transition.
            trajectory: int64 [n], trajectory ids; required if lanes are assigned.
            initial: bool [n], the transition is the first of its episode.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        stolen = None
        if self.assigned:
            assert trajectory is not None
            turn = self._by_time(trajectory, ended, open_lane)
            marked = None if initial is None else initial[turn]
            lane, stolen, restarted = self._assign(trajectory[turn], ended[turn], marked, open_lane)
            lane = torch.empty_like(lane).index_copy_(0, turn, lane)
            open_lane = open_lane & ~stolen
            self._old |= restarted & open_lane
        else:
            lane = slots % self.lanes
            self._require_one_stream(trajectory, ended, initial, open_lane)
        if self.lanes > 1:
            order = lane.argsort(stable=True)
            lane, ended = lane[order], ended[order]
        else:
            order = torch.arange(slots.shape[0], device=slots.device)
        first = shifted(lane, -1) != lane
        new = torch.where(first, ~open_lane[lane], shifted(ended, False))
        if trajectory is not None:
            trajectory = trajectory[order]
            if self.lanes > 1 and not self.assigned:
                marked = None if initial is None else initial[order]
                self._require_own_lane(lane, first & open_lane[lane], trajectory, marked)
            new |= trajectory != where_int64(first, self._trajectory[lane], shifted(trajectory, 0))
            self._trajectory.copy_(at_last(lane, trajectory, self._trajectory))
        if initial is not None:
            new |= initial[order]
        self._written.index_copy_(0, lane, clock.expand(lane.shape))
        return Rows(order, lane, first, new, stolen)

    def follow_alone(
        self, is_open: bool, clock: int, *, ended: Tensor, trajectory: Tensor | None, initial: Tensor | None
    ) -> list[int]:
        """:meth:`follow` for a single lane, where values can be read.

        Args:
            is_open: the lane has an unfinished episode.
            clock: number of this write.
            ended: see :meth:`follow`.
            trajectory: see :meth:`follow`.
            initial: see :meth:`follow`.

        Returns:
            The rows where episodes begin, in order.
        """
        begins = {row + 1 for row, is_end in enumerate(ended.tolist()[:-1]) if is_end}
        if not is_open:
            begins.add(0)
        if trajectory is not None:
            ids, last = trajectory.tolist(), self._trajectory.item()
            changes = [row for row, (new, old) in enumerate(zip(ids, [last, *ids], strict=False)) if new != old]
            if changes:
                self._require_one_stream(trajectory, ended, initial, torch.tensor([is_open], device="cpu"))
                begins.update(changes)
                self._trajectory.fill_(ids[-1])
        if initial is not None:
            begins.update(row for row, is_first in enumerate(initial.tolist()) if is_first)
        self._written.fill_(clock)
        return sorted(begins)

    def lose_track(self, open_lane: Tensor) -> None:
        """Note that rows were written without notification. Trajectories in open lanes may have ended in these rows."""
        self._end_may_be_missed.copy_(open_lane)

    def _require_one_stream(
        self, trajectory: Tensor | None, ended: Tensor, initial: Tensor | None, open_lane: Tensor
    ) -> None:
        """With one lane, count interrupted trajectories and warn; raise an error if such a trajectory continues.

        A trajectory is interrupted if another one begins before it has ended. If ids restart, or if the first
        transition of the other trajectory is marked, this is expected: it is not counted and causes no warning.
        """
        if trajectory is None or self.lanes > 1:
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
        self.broken_off.add_(unexpected.sum())
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
            reads=self._checked,
            error=lambda: ValueError(
                f"trajectory {int(trajectory[returned][0])} continues in a column of the storage after another one was "
                "written there: several workers or collectors alternate in the same columns. Use flat storage (ndim=1) "
                "with num_streams=<number of environments that write to the buffer>. If a new collector restarted the "
                "trajectory ids, mark the first transition of each episode (torchrl's InitTracker does)."
            ),
        )
        self.broken_off.add_(returned.sum())
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
        how = how or f"begins while each of {self.lanes} streams has an unfinished trajectory"
        return ValueError(
            f"trajectory {int(new)} {how}: more simultaneous trajectories than num_streams={self.lanes}. Pass "
            "num_streams=<number of environments that write to the buffer> to the sampler (EventTableSampler: in "
            "priority=). If trajectories are cut off, mark the last transition as truncated and done (a collector does "
            "with set_truncated=True), or mark the first transition of the next trajectory (torchrl's InitTracker "
            "does); with several streams, this trajectory must begin in a later write."
        )

    def _by_time(self, trajectory: Tensor, ended: Tensor, open_lane: Tensor) -> Tensor:
        """The order in which the rows of a write [n] are assigned to lanes, int64 [n].

        The first steps of all environments come first, then the second steps, and so on. In flattened [E, T] data, the
        rows of one environment precede the rows of the next. If rows were assigned in this order, one lane could
        receive rows of two environments and another lane none.
        """
        count, lanes = trajectory.shape[0], self.lanes
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
        all_go_on = (~open_lane | (~self._old & (self._trajectory.unsqueeze(1) == first).any(1))).all()
        one_by_one = ~by_step & continues(ids, done) & apart.all() & all_go_on
        return where_int64(one_by_one, rows.view(lanes, -1).T.reshape(-1), rows)

    def _assign(
        self, trajectory: Tensor, ended: Tensor, initial: Tensor | None, open_lane: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The lane of each row by its trajectory id [n].

        A trajectory keeps its lane until it ends. A new trajectory takes the lane that became free first. If no lane is
        free, it takes the lane that was written to least recently, excluding lanes that this write continues. Only
        lanes from before a restart of ids are candidates, or all lanes if the first transition is marked.

        Returns:
            Lane of each row [n]; True for lanes taken from an unfinished trajectory [lanes]; if ids restarted, True for
            lanes without rows of this write [lanes].
        """
        count, device = trajectory.shape[0], trajectory.device
        rows = torch.arange(count, device=device)
        # a group has the rows of one trajectory
        order = trajectory.argsort(stable=True)
        ids = trajectory[order]
        group_sorted = (shifted(ids, 0) != ids).to(torch.int64)
        group_sorted[:1].zero_()
        group_sorted = group_sorted.cumsum(0)
        group = torch.empty_like(order).index_copy_(0, order, group_sorted)
        # first row, last row and id of each group, padded to n groups
        first = torch.full_like(rows, count).scatter_reduce_(0, group, rows, "amin")
        last = torch.zeros_like(rows).scatter_reduce_(0, group, rows, "amax")
        used = first < count
        group_id = torch.full_like(rows, -1).index_copy_(0, group, trajectory)
        # [group, lane]: the group continues the trajectory of an open lane
        match = (group_id.unsqueeze(1) == self._trajectory) & open_lane & ~self._old & used.unsqueeze(1)
        # ids restart at 0: earlier trajectories do not continue
        begins_again = used & (group_id == 0) & ~match.any(1) & self._zero_seen
        restarted = begins_again.any()
        match &= (first < where_int64(begins_again, first, torch.full_like(first, count)).amin()).unsqueeze(1)
        request = used & ~match.any(1)
        closes = used & ended[last]
        # The other groups request a lane at their first row. A group that ends releases its lane at its last row. The
        # k-th request can be met if k lanes were free or released before it.
        row_or_none = torch.zeros(count + 1, dtype=torch.int64, device=device)
        requested = row_or_none.index_add(0, first, request.to(torch.int64))[:count].cumsum(0)
        released = row_or_none.index_add(0, last, closes.to(torch.int64))[:count].cumsum(0)
        clipped = first.clamp_max(count - 1)
        number = requested[clipped] - 1
        released_before = released[clipped] - closes[group[clipped]].to(torch.int64) * (last[group[clipped]] == clipped)
        missing = ((number + 1 - (~open_lane).sum() - released_before) * request).amax().clamp_min(0)
        # lanes that may be taken from an unfinished trajectory
        cuts_off = group_id <= self._max_trajectory
        if initial is not None:
            cuts_off |= initial[clipped]
        available = open_lane & ~match.any(0) & (self._old | self._end_may_be_missed | (request & cuts_off).any())
        # there are too few lanes if a trajectory continues that was preempted for lack of a lane
        returned = (
            request & (missing > 0) & ~restarted & (group_id.unsqueeze(1) == self._recently_preempted.view(-1)).any(1)
        )
        too_many = torch.maximum((missing - available.sum()).clamp_min(0), returned.sum())
        raise_if(
            lambda: too_many > 0,
            lambda: self._too_many(group_id[returned if bool(returned.any()) else request][-1]),
            reads=self._checked,
        )
        self.broken_off.add_(too_many)
        age = (
            where_int64(available, self._written, torch.full_like(self._written, 2**62)).argsort(stable=True).argsort()
        )
        stolen = available & (age < missing)
        # after a restart, earlier ids no longer identify trajectories
        self._recently_preempted.copy_(where_int64(restarted, -1, self._recently_preempted))
        # a trajectory whose end may have been missed is not counted as preempted: it may have ended
        self._remember(stolen & ~self._old & ~self._end_may_be_missed & ~restarted)
        closed = ~open_lane | stolen
        free = torch.argsort(~closed, stable=True)
        num_free = closed.sum()
        # The k-th request takes the k-th lane that is free or becomes free. A lane that becomes free is inherited from
        # the group that releases it, which may itself have inherited it. Pointer doubling follows these chains.
        release = torch.zeros(count + 1, dtype=torch.int64, device=device)
        release.index_copy_(0, where_int64(closes, released[last] - 1, torch.full_like(last, count)), rows)
        inherits = request & (number >= num_free)
        parent = where_int64(inherits, release[(number - num_free).clamp(0, count)], rows)
        lane = where_int64(request, free[number.clamp(0, self.lanes - 1)], match.to(torch.int64).argmax(1))
        for _ in range(count.bit_length()):
            parent = parent[parent]
        self._count_trajectories(trajectory, restarted)
        lane = lane[parent][group]
        self._old.index_fill_(0, lane, False)
        self._end_may_be_missed.index_fill_(0, lane, False)
        untouched = torch.ones_like(self._old).index_fill_(0, lane, False)
        return lane, stolen, restarted & untouched

    def tensors(self) -> dict[str, Tensor]:
        """The state by name."""
        return {
            "lane_trajectory": self._trajectory,
            "lane_written": self._written,
            "lane_old": self._old,
            "lane_doubtful": self._end_may_be_missed,
            "lane_cut_off": self._recently_preempted,
            "max_trajectory": self._max_trajectory,
            "zero_seen": self._zero_seen,
            "broken_off": self.broken_off,
        }

    def clear_(self) -> None:
        """Remove all streams."""
        for name, tensor in self.tensors().items():
            tensor.fill_(-1 if name in ("lane_trajectory", "lane_cut_off", "max_trajectory") else 0)
