"""Finds the transitions that enter each event table, from a write and the unfinished episode of each stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.core.event_tables import EventTables

_NEVER = np.iinfo(np.int64).max
# With more tails than this, search for abandoned episodes.
_MANY_TAILS = 64
# Number of transitions for which a tail has room at first.
_ROOM = 16


class Tail:
    """The newest transitions of an unfinished episode, in arrays with room for more.

    Args:
        trajectory: trajectory id of the episode; -1 if unknown.
        num_tables: number of tables.
    """

    def __init__(self, trajectory: int, num_tables: int):
        self.trajectory = trajectory
        self._begin = self._end = 0
        self._number, self._slot = np.empty((2, _ROOM), np.int64)
        self._sent = np.empty((_ROOM, num_tables), bool)

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def slot(self) -> np.ndarray:
        """Slots of the transitions, int64 [n]."""
        return self._slot[self._begin : self._end]

    @property
    def number(self) -> np.ndarray:
        """Transition numbers, in the order of writing, int64 [n]."""
        return self._number[self._begin : self._end]

    @property
    def sent(self) -> np.ndarray:
        """True if the transition has already entered a table, bool [n, tables]."""
        return self._sent[self._begin : self._end]

    def append(self, number: np.ndarray, slot: np.ndarray, keep: int) -> None:
        """Add transitions ``number`` [n] in ``slot`` [n] that have entered no table; keep the newest ``keep``."""
        newest = slice(max(len(number) - keep, 0), None)
        number, slot = number[newest], slot[newest]
        end = self._end + len(number)
        self._begin = max(self._begin, end - keep)
        if end > len(self._number):
            self._move(len(number))
            end = self._end + len(number)
        here = slice(self._end, end)
        self._number[here], self._slot[here], self._sent[here] = number, slot, False
        self._end = end

    def _move(self, count: int) -> None:
        """Move to arrays with twice the room that the transitions and ``count`` more need."""
        number, slot, sent = self.number, self.slot, self.sent
        size = len(number)
        self._number, self._slot = np.empty((2, 2 * (size + count)), np.int64)
        self._sent = np.empty((2 * (size + count), sent.shape[1]), bool)
        self._number[:size], self._slot[:size], self._sent[:size] = number, slot, sent
        self._begin, self._end = 0, size


class Group(NamedTuple):
    """Rows of one stream, a part of the rows of a write in the order of their streams.

    Args:
        stream: the stream.
        first: place of the first row in this order.
        end: the place after the last row.
    """

    stream: int
    first: int
    end: int


@dataclass
class WrittenRows:
    """The rows of a write.

    Args:
        stream: stream of each row, int64 [n].
        trajectory: trajectory id, int64 [n]; None if the stream is all that is known.
        ends: True if the row is the last of an episode, bool [n].
        begins: True if the row is marked as the first of an episode, bool [n]; None if no row is.
    """

    stream: np.ndarray
    trajectory: np.ndarray | None
    ends: np.ndarray
    begins: np.ndarray | None

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, part: slice) -> WrittenRows:
        trajectory, begins = (None if column is None else column[part] for column in (self.trajectory, self.begins))
        return WrittenRows(self.stream[part], trajectory, self.ends[part], begins)

    def trajectory_of(self, row: int) -> int:
        """Trajectory id of a row; -1 if unknown."""
        return -1 if self.trajectory is None else int(self.trajectory[row])

    @cached_property
    def order(self) -> np.ndarray:
        """The rows by stream, in the order of writing within each stream, int64 [n]."""
        streams = self.stream.tolist()
        if streams.count(streams[0]) == len(streams):
            return np.arange(len(streams))
        return self.stream.argsort(kind="stable")

    @cached_property
    def groups(self) -> list[Group]:
        """The rows of each stream, in the order of the streams."""
        streams = self.stream[self.order].tolist()
        if streams[0] == streams[-1]:
            return [Group(streams[0], 0, len(streams))]
        first = [0, *(place for place, (one, other) in enumerate(pairwise(streams), 1) if one != other)]
        return [Group(streams[begin], begin, end) for begin, end in pairwise([*first, len(streams)])]

    @cached_property
    def starts(self) -> list[int]:
        """Places in ``order`` of the rows that start an episode whatever precedes this write, sorted."""
        order, starts = self.order, list[int]()
        if self.ends.any():
            starts += (self.ends[order[:-1]].nonzero()[0] + 1).tolist()
        if self.trajectory is not None:
            trajectory = self.trajectory[order]
            starts += ((trajectory[1:] != trajectory[:-1]).nonzero()[0] + 1).tolist()
        if starts:
            starts = [*{*starts}.difference(group.first for group in self.groups)]
        if self.begins is not None and self.begins.any():
            starts += self.begins[order].nonzero()[0].tolist()
        return sorted({*starts})


@dataclass
class Timeline:
    """The rows of a write, grouped by stream. Each stream is in time order and starts with its tail.

    Args:
        ends: the place after the last row of each stream, by stream.
        row: row of the write, int64 [m]; -1 for a transition of a tail.
        slot: the slot of the transition, int64 [m]; -1 if it is not written yet.
        number: transition number, int64 [m].
        episode: number of the episode within this timeline, int64 [m].
        sent: True if the transition has already entered a table, bool [m, tables].
    """

    ends: dict[int, int]
    row: np.ndarray
    slot: np.ndarray
    number: np.ndarray
    episode: np.ndarray
    sent: np.ndarray

    def set_slots(self, slots: np.ndarray) -> None:
        """Set ``slots`` [n] of the rows of the write, int64."""
        new = self.row >= 0
        self.slot[new] = slots[self.row[new]]


# For each table: the timeline indices of the transitions that enter it, in order, and the row of each event.
Entering = dict[int, tuple[np.ndarray, np.ndarray]]


class EpisodeTails:
    """The tails of the unfinished episodes, one for each stream.

    Args:
        tables: the tables to fill.
    """

    def __init__(self, tables: EventTables):
        self._tables = tables
        self._table_of_spec = [tables.table_of(spec) for spec in tables.specs]
        # maximum number of transitions of an unfinished episode that can still enter a table or be part of a context
        self._length = max(max(spec.history - 1, spec.context) for spec in tables.specs)
        self._tails: dict[int, Tail] = {}
        self._many = _MANY_TAILS

    def clear(self) -> None:
        """Discard all unfinished episodes."""
        self._tails.clear()
        self._many = _MANY_TAILS

    def timeline(self, rows: WrittenRows, occurred: np.ndarray | None = None) -> Timeline:
        """Concatenate the tail of each stream and its rows of a write.

        Args:
            rows: the rows.
            occurred: leave out the streams without an event, bool [n, events]. Default: None, all streams.
        """
        written, num_tables = self._tables.num_written, len(self._tables)
        chosen = None if occurred is None else {*rows.stream[occurred.any(1)].tolist()}
        parts: list[tuple[np.ndarray, ...]] = []
        ends: dict[int, int] = {}
        size = 0
        all_starts = np.zeros(len(rows), bool)
        all_starts[rows.starts] = True
        for stream, first, end in rows.groups:
            if chosen is not None and stream not in chosen:
                continue
            of_stream, starts = rows.order[first:end], all_starts[first:end]
            tail = self._tails.get(stream)
            if tail is None:
                starts[0] = True
            else:
                starts[0] |= rows.trajectory_of(of_stream[0]) != tail.trajectory
                starts_of_tail = np.arange(len(tail)) == 0
                parts.append((np.full(len(tail), -1), tail.slot, tail.number, starts_of_tail, tail.sent))
                size += len(tail)
            no_slot, unsent = np.full(len(of_stream), -1), np.zeros((len(of_stream), num_tables), bool)
            parts.append((of_stream, no_slot, written + of_stream, starts, unsent))
            size += len(of_stream)
            ends[stream] = size
        row, slot, number, starts, sent = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Timeline(ends, row, slot, number, starts.cumsum(), sent)

    def plan(self, timeline: Timeline, occurred: np.ndarray) -> Entering:
        """Find the transitions that enter each table, and mark them as sent in ``timeline``.

        Args:
            timeline: from :meth:`timeline`.
            occurred: True if an event occurs in a row, bool [n, events].
        """
        entering: Entering = {}
        size = len(timeline.row)
        here = np.arange(size)
        new = timeline.row >= 0
        events = np.zeros((size, occurred.shape[1]), bool)
        events[new] = occurred[timeline.row[new]]
        reach, oldest = self._tables.capacity_of(0), self._tables.oldest
        for table in sorted(set(self._table_of_spec)):
            trigger = np.full(size, _NEVER)
            for column, spec in enumerate(self._tables.specs):
                if self._table_of_spec[column] != table or not events[:, column].any():
                    continue
                following = np.where(events[:, column], here, size)
                following = np.minimum.accumulate(following[::-1])[::-1]
                found = np.minimum(following, size - 1)
                reached = (following < size) & (following - here < spec.history)
                reached &= timeline.episode[found] == timeline.episode
                # transitions that were overwritten before the event cannot enter
                reached &= timeline.number[found] - timeline.number < reach
                reached &= timeline.number >= oldest
                trigger = np.minimum(trigger, np.where(reached, following, _NEVER))
            chosen = np.flatnonzero((trigger < _NEVER) & ~timeline.sent[:, table])
            if len(chosen):
                at = timeline.row[trigger[chosen]]
                order = np.argsort(at, kind="stable")
                timeline.sent[chosen, table] = True
                entering[table] = chosen[order], at[order]
        return entering

    def update(self, rows: WrittenRows, slots: np.ndarray, timeline: Timeline | None) -> None:
        """Update the tail of each stream after a write.

        Args:
            rows: the rows.
            slots: their slots, int64 [n].
            timeline: the streams with events, after :meth:`plan`; None: there are none.
        """
        tails, keep, order = self._tails, self._length, rows.order
        number, slots = order + (self._tables.num_written - len(rows)), slots[order]
        starts = rows.starts
        for stream, first, end in rows.groups:
            last = order[end - 1]
            if rows.ends[last] or not keep:
                tails.pop(stream, None)
                continue
            trajectory, tail = rows.trajectory_of(last), tails.get(stream)
            number_of_starts = bisect_left(starts, end)
            started = number_of_starts and starts[number_of_starts - 1] >= first
            if tail is None or started or tail.trajectory != trajectory:
                tail = tails[stream] = Tail(trajectory, len(self._tables))
                first = starts[number_of_starts - 1] if started else first
            tail.append(number[first:end], slots[first:end], keep)
            if timeline is not None and stream in timeline.ends:
                upto = timeline.ends[stream]
                tail.sent[:] = timeline.sent[upto - len(tail) : upto]
        if len(tails) > self._many:
            self._discard_overwritten()

    def _discard_overwritten(self) -> None:
        """Discard unfinished episodes whose transitions are all overwritten."""
        oldest = self._tables.oldest
        self._tails = {name: tail for name, tail in self._tails.items() if tail.number[-1] >= oldest}
        self._many = 2 * len(self._tails) + _MANY_TAILS

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the state to save."""
        tails = [*self._tails.values()]
        none = Tail(-1, len(self._tables))
        return {
            "stream": torch.tensor([*self._tails], dtype=torch.int64),
            "length": torch.tensor([len(tail) for tail in tails], dtype=torch.int64),
            "trajectory": torch.tensor([tail.trajectory for tail in tails], dtype=torch.int64),
            **{
                key: torch.from_numpy(np.concatenate([getattr(tail, key) for tail in (none, *tails)]))
                for key in ("slot", "number", "sent")
            },
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`tensors`."""
        ends = np.cumsum(state["length"].numpy())[:-1]
        columns = [np.split(state[key].cpu().numpy().copy(), ends) for key in ("slot", "number", "sent")]
        streams, trajectories = state["stream"].tolist(), state["trajectory"].tolist()
        self.clear()
        # not strict: np.split of an empty array returns one part
        for stream, trajectory, slot, number, sent in zip(streams, trajectories, *columns, strict=False):
            tail = self._tails[stream] = Tail(trajectory, len(self._tables))
            tail.append(number, slot, self._length)
            tail.sent[:] = sent[len(sent) - len(tail) :]
