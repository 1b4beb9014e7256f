"""Which transitions of a ring buffer follow each other: streams of experience, and where episodes begin in them."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import is_traced, where_int64
from torchrl_replay_ext.functional.priorities import write_last

# Trajectories that are remembered as cut off by another: for each lane, and if there is a single one.
_REMEMBERED = 8
_REMEMBERED_ALONE = 64


def shifted(values: Tensor, first: Tensor | int | bool) -> Tensor:
    """``values`` one place later, led by ``first``."""
    head = first.reshape(1).to(values.dtype) if isinstance(first, Tensor) else values.new_full((1,), first)
    return torch.cat([head, values[:-1]])


def at_last(lane: Tensor, value: Tensor, current: Tensor) -> Tensor:
    """``current`` [lanes] with the last of ``value`` [n] written for each lane."""
    result = current.clone()
    write_last(result, lane, value)
    return result


class Rows(NamedTuple):
    """Rows of a write, sorted by lane, in the order of writing within each.

    Args:
        order: int64 [n], their places among the rows as they were written.
        lane: int64 [n].
        first: bool [n], the first of its lane.
        new: bool [n], an episode begins.
        stolen: bool [lanes], lanes that were taken from an unfinished trajectory; None where lanes are fixed.
    """

    order: Tensor
    lane: Tensor
    first: Tensor
    new: Tensor
    stolen: Tensor | None


class Lanes:
    """The lanes of a ring buffer, one for each stream of experience, and where episodes begin in them.

    Lanes are fixed by the storage: slot t·lanes + e is step t of lane e, and one environment written to flat storage is
    a single lane; or, for several environments in one flat storage, assigned by trajectory id: a trajectory keeps its
    lane until it ends. Whoever holds this knows in which lanes an episode goes on.

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
        self.size = steps * self._width

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        # of each lane: the last trajectory id, the number of the last write, ...
        self._trajectory = full(lanes, -1)
        self._written = full(lanes, 0)
        # ... and, since then: whether trajectory ids restarted, whether its end may have gone unseen
        self._old = full(lanes, 0, torch.bool)
        self._end_may_be_missed = full(lanes, 0, torch.bool)
        self._max_trajectory = full(1, -1)
        self._zero_seen = full(1, 0, torch.bool)
        self._cursor = full(1, 0)
        # the last trajectories that another one cut off in each lane, the latest last
        remembered = _REMEMBERED if lanes > 1 else _REMEMBERED_ALONE
        self._recently_preempted = torch.full((lanes, remembered), -1, dtype=torch.int64, device=device)
        # trajectories that broke off, or were too many, where that could not be an error
        self.broken_off = full(1, 0)
        self._warned = False

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

    def skip(self, slots: Tensor) -> None:
        """The next write is expected behind ``slots`` [n], which were written behind our back, the oldest first.

        Any trajectory may have ended there.
        """
        self._end_may_be_missed.fill_(True)
        self._cursor.fill_((self.step_of(slots[-1]) + 1) % self.steps)

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
        """Take in a write: assign its rows to lanes and find where episodes begin.

        Args:
            slots: int64 [n], distinct, in the order of writing.
            open_lane: bool [lanes], an episode goes on.
            clock: int64 [], number of this write; larger than all before.
            ended: bool [n], the episode ends with this transition.
            trajectory: int64 [n], trajectory ids; needed where lanes are assigned.
            initial: bool [n], the transition is the first of its episode.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes; nothing is changed then.
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
        self._cursor.copy_((slots[-1:] // self._width + 1) % self.steps)
        return Rows(order, lane, first, new, stolen)

    def lose_track(self, open_lane: Tensor) -> None:
        """Trajectories in open lanes may go on, or have ended unseen."""
        self._end_may_be_missed.copy_(open_lane)

    def _require_one_stream(
        self, trajectory: Tensor | None, ended: Tensor, initial: Tensor | None, open_lane: Tensor
    ) -> None:
        """With one lane, count and warn about a trajectory that breaks off; raise an error if it comes back later.

        A trajectory breaks off where another one begins before it has ended. Where ids restart or a first transition is
        marked, this is expected: it is neither counted nor warned about.
        """
        if trajectory is None or self.lanes > 1:
            return
        previous = shifted(trajectory, self._trajectory[0])
        begins = trajectory != previous
        if not is_traced() and not bool(begins.any()):
            return
        cuts = begins & ~shifted(ended, ~open_lane)
        marked = torch.zeros_like(begins) if initial is None else initial
        restarted = begins & (trajectory <= self._max_trajectory)
        unexpected = cuts & ~restarted & ~marked
        if not is_traced():
            returned = begins & ~marked & (trajectory.unsqueeze(1) == self._recently_preempted).any(1)
            if bool((returned | cuts).any()):
                latest = self._latest_preempted(trajectory, previous, begins, cuts, marked)
                if bool(unexpected.any()):
                    self._warn_of_cut()
                self._recently_preempted.copy_(latest)
            elif bool(restarted.any()):
                self._recently_preempted.fill_(-1)
        else:
            self._recently_preempted.copy_(where_int64(restarted.any(), -1, self._recently_preempted))
        self.broken_off.add_(unexpected.sum())
        self._count_trajectories(trajectory, restarted)

    def _latest_preempted(
        self, trajectory: Tensor, previous: Tensor, begins: Tensor, cuts: Tensor, marked: Tensor
    ) -> Tensor:
        """With one lane: the trajectories that others have cut off after a write, the latest last; int64 [1, .].

        Args:
            trajectory: int64 [n].
            previous: int64 [n], the trajectory of the row before.
            begins: bool [n], the row is of another trajectory than the row before.
            cuts: bool [n], where the trajectory of the row before had not ended.
            marked: bool [n], the row is marked as the first of its episode, whatever its id.

        Raises:
            ValueError: if a trajectory that was cut off comes back.
        """
        columns = (values[begins].tolist() for values in (trajectory, previous, cuts, marked))
        gone = dict.fromkeys(each for each in self._recently_preempted[0].tolist() if each >= 0)
        largest = int(self._max_trajectory)
        for new, old, is_cut, is_marked in zip(*columns, strict=True):
            if new in gone and not is_marked:
                self._raise_too_many(new, "comes back after another one was written")
            if new <= largest:
                # ids restarted: earlier ids no longer identify trajectories
                gone = {}
            elif is_cut:
                gone[old] = None
            largest = new
        return torch.tensor([[*[-1] * _REMEMBERED_ALONE, *gone][-_REMEMBERED_ALONE:]])

    def _warn_of_cut(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "A trajectory began before the last one had ended (done); the last one is closed where it broke off. "
                "This is normal once after a run was resumed from a checkpoint. If several environments write to this "
                "buffer, pass num_streams=<number of environments>.",
                stacklevel=2,
            )

    def _require_own_lane(self, lane: Tensor, continues: Tensor, trajectory: Tensor, initial: Tensor | None) -> None:
        """In fixed lanes a trajectory may break off; but then it may not go on after the one that cut it off.

        Args:
            lane: int64 [n].
            continues: bool [n], where something is written to a lane in which an episode goes on.
            trajectory: int64 [n].
            initial: bool [n].
        """
        cut = continues & (trajectory != self._trajectory[lane])
        if initial is not None:
            cut &= ~initial
        returned = cut & (self._recently_preempted[lane] == trajectory.unsqueeze(1)).any(1)
        if is_traced():
            self.broken_off.add_(returned.sum())
        elif bool(returned.any()):
            raise ValueError(
                f"trajectory {int(trajectory[returned][0])} goes on in a column of the storage after another one was "
                "written there: several workers or collectors write to the same columns in turn. Use flat storage "
                "(ndim=1) with num_streams=<number of environments that write to the buffer>. (If it was a new "
                "collector whose trajectory ids began again, mark the first transitions: torchrl's InitTracker does.)"
            )
        self._remember(torch.zeros_like(self._written).index_add_(0, lane, cut.to(torch.int64)))

    def _remember(self, cut: Tensor) -> None:
        """Note that the last trajectories in lanes where ``cut`` [lanes] is 1 were cut off by others."""
        longer = torch.cat([self._recently_preempted[:, 1:], self._trajectory.unsqueeze(1)], 1)
        self._recently_preempted.copy_(where_int64(cut.unsqueeze(1), longer, self._recently_preempted))

    def _count_trajectories(self, trajectory: Tensor, restarted: Tensor) -> None:
        self._zero_seen |= (trajectory == 0).any()
        largest = trajectory.max().reshape(1)
        self._max_trajectory.copy_(where_int64(restarted.any(), largest, torch.maximum(largest, self._max_trajectory)))

    def _raise_too_many(self, new: Tensor | int, how: str | None = None) -> None:
        how = how or f"begins while each of {self.lanes} streams holds one that still goes on"
        raise ValueError(
            f"trajectory {int(new)} {how}: more "
            f"simultaneous trajectories than num_streams={self.lanes}. Pass num_streams=<number of environments that "
            "write to the buffer>; where a trajectory is cut off, mark it as truncated and done (a collector does with "
            "set_truncated=True), or mark the first transition of the next, in a later write if there are several "
            "streams (torchrl's InitTracker does)."
        )

    def _by_time(self, trajectory: Tensor, ended: Tensor, open_lane: Tensor) -> Tensor:
        """The order in which the rows of a write [n] are assigned to lanes, int64 [n].

        All environments' first steps come first, then their second steps, and so on. Flattened [E, T] data lists one
        environment after the other. Assigned in that order, one lane could receive rows of two environments and another
        lane none.
        """
        count, lanes = trajectory.shape[0], self.lanes
        rows = torch.arange(count, device=trajectory.device)
        if lanes == 1 or count % lanes or count == lanes:
            return rows

        def continues(ids: Tensor, done: Tensor) -> Tensor:
            """Whether each of these environments [k, T] has one trajectory at a time."""
            return ((ids[:, 1:] == ids[:, :-1]) | done[:, :-1]).all()

        by_step = continues(trajectory.view(-1, lanes).T, ended.view(-1, lanes).T)
        if not is_traced() and bool(by_step):
            return rows
        ids, done = trajectory.view(lanes, -1), ended.view(lanes, -1)
        first = ids[:, 0]
        # no trajectory is in the rows of two environments, and all that are open go on: otherwise environments take
        # turns in another way, and this order is not that of time
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

        A trajectory keeps its lane until it ends; a new one takes the lane that became free first. If none is free and
        ids have restarted, it takes the lane that was written least recently of those from before; if its beginning is
        marked, that of all to which this write adds nothing.

        Returns:
            lane [n]; lanes [lanes] taken from an unfinished trajectory; whether ids restarted [].
        """
        count, device = trajectory.shape[0], trajectory.device
        rows = torch.arange(count, device=device)
        # groups: the rows of one trajectory each
        order = trajectory.argsort(stable=True)
        ids = trajectory[order]
        group_sorted = (shifted(ids, 0) != ids).to(torch.int64)
        group_sorted[0] = 0
        group_sorted = group_sorted.cumsum(0)
        group = torch.empty_like(order).index_copy_(0, order, group_sorted)
        # for each group (padded to n of them): its id, its first and last row
        first = torch.full_like(rows, count).scatter_reduce_(0, group, rows, "amin")
        last = torch.zeros_like(rows).scatter_reduce_(0, group, rows, "amax")
        used = first < count
        group_id = torch.full_like(rows, -1).index_copy_(0, group, trajectory)
        # which of them go on in an open lane
        match = (group_id.unsqueeze(1) == self._trajectory) & open_lane & ~self._old & used.unsqueeze(1)
        # ids begin at 0 again: what was going on before does not go on
        begins_again = used & (group_id == 0) & ~match.any(1) & self._zero_seen
        restarted = begins_again.any()
        match &= (first < where_int64(begins_again, first, torch.full_like(first, count)).amin()).unsqueeze(1)
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
        cuts_off = group_id <= self._max_trajectory
        if initial is not None:
            cuts_off |= initial[clipped]
        available = open_lane & ~match.any(0) & (self._old | self._end_may_be_missed | (request & cuts_off).any())
        # one that was cut off for lack of a lane, and goes on: there are not enough
        returned = (
            request & (missing > 0) & ~restarted & (group_id.unsqueeze(1) == self._recently_preempted.view(-1)).any(1)
        )
        if is_traced():
            self.broken_off.add_(torch.maximum((missing - available.sum()).clamp_min(0), returned.sum()))
        elif bool((missing > available.sum()) | returned.any()):
            self._raise_too_many(group_id[returned if bool(returned.any()) else request][-1])
        age = (
            where_int64(available, self._written, torch.full_like(self._written, 2**62)).argsort(stable=True).argsort()
        )
        stolen = available & (age < missing)
        # where ids have restarted, those from before mean nothing any more
        self._recently_preempted.copy_(where_int64(restarted, -1, self._recently_preempted))
        # one whose end may have gone unseen may also go on
        self._remember((stolen & ~self._old & ~self._end_may_be_missed & ~restarted).to(torch.int64))
        closed = ~open_lane | stolen
        free = torch.argsort(~closed, stable=True)
        num_free = closed.sum()
        # the k-th request takes the k-th lane that is or becomes free: in the latter case that of the group which
        # releases it, which may itself have taken it from another; the chain is followed by doubling
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
        """All state, by name."""
        return {
            "lane_trajectory": self._trajectory,
            "lane_written": self._written,
            "lane_old": self._old,
            "lane_doubtful": self._end_may_be_missed,
            "lane_cut_off": self._recently_preempted,
            "max_trajectory": self._max_trajectory,
            "zero_seen": self._zero_seen,
            "cursor": self._cursor,
            "broken_off": self.broken_off,
        }

    def clear_(self) -> None:
        """Forget everything."""
        for name, tensor in self.tensors().items():
            tensor.fill_(-1 if name in ("lane_trajectory", "lane_cut_off", "max_trajectory") else 0)
