"""Finds the transitions that enter each event table, from a write and the unfinished episode of each stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.core.event_tables import EventTables

_NEVER = np.iinfo(np.int64).max
# With more tails than this, search for abandoned episodes.
_MANY_TAILS = 64


@dataclass
class Tail:
    """The newest transitions of an unfinished episode.

    Args:
        slot: their slots, int64 [n].
        number: transition numbers, in the order of writing, int64 [n].
        sent: True if the transition has already entered a table, bool [n, tables].
        trajectory: trajectory id of the episode; -1 if unknown.
    """

    slot: np.ndarray
    number: np.ndarray
    sent: np.ndarray
    trajectory: int

    def __len__(self) -> int:
        return len(self.slot)


@dataclass
class Rows:
    """The rows of a write.

    Args:
        stream: stream of each row, int64 [n].
        trajectory: trajectory id, int64 [n]; -1 if unknown.
        ends: True if the row is the last of an episode, bool [n].
        begins: True if the row is marked as the first of an episode, bool [n].
    """

    stream: np.ndarray
    trajectory: np.ndarray
    ends: np.ndarray
    begins: np.ndarray

    def __len__(self) -> int:
        return len(self.stream)

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.stream[part], self.trajectory[part], self.ends[part], self.begins[part])

    def by_stream(self) -> list[tuple[int, np.ndarray]]:
        """Each stream, in increasing order, and the indices of its rows."""
        first = int(self.stream[0])
        if (self.stream == first).all():
            return [(first, np.arange(len(self)))]
        order = np.argsort(self.stream, kind="stable")
        streams, begins = np.unique(self.stream[order], return_index=True)
        return [*zip(streams.tolist(), np.split(order, begins[1:]), strict=True)]


@dataclass
class Timeline:
    """The rows of a write, grouped by stream. Each stream is in time order and starts with its tail.

    Args:
        row: row of the write, int64 [m]; -1 for a transition of a tail.
        slot: the slot of the transition, int64 [m]; -1 if it is not written yet.
        number: transition number, int64 [m].
        episode: number of the episode within this timeline, int64 [m].
        sent: True if the transition has already entered a table, bool [m, tables].
    """

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

    def __len__(self) -> int:
        return len(self._tails)

    def clear(self) -> None:
        """Discard all unfinished episodes."""
        self._tails.clear()
        self._many = _MANY_TAILS

    def timeline(self, rows: Rows) -> Timeline:
        """Concatenate the tail of each stream and its rows of a write."""
        written, num_tables = self._tables.num_written, len(self._tables)
        parts: list[tuple[np.ndarray, ...]] = []
        for stream, chosen in rows.by_stream():
            starts = rows.begins[chosen].copy()
            starts[1:] |= rows.ends[chosen[:-1]] | (np.diff(rows.trajectory[chosen]) != 0)
            tail = self._tails.get(stream)
            if tail is None:
                starts[0] = True
            else:
                starts[0] |= rows.trajectory[chosen[0]] != tail.trajectory
                starts_of_tail = np.arange(len(tail)) == 0
                parts.append((np.full(len(tail), -1), tail.slot, tail.number, starts_of_tail, tail.sent))
            no_slot, unsent = np.full(len(chosen), -1), np.zeros((len(chosen), num_tables), bool)
            parts.append((chosen, no_slot, written + chosen, starts, unsent))
        row, slot, number, starts, sent = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Timeline(row, slot, number, starts.cumsum(), sent)

    def plan(self, timeline: Timeline, occurred: np.ndarray) -> Entering:
        """Find the transitions that enter each table, and mark them as sent in ``timeline``.

        Args:
            timeline: from :meth:`timeline`.
            occurred: True if an event occurs in a row, bool [n, events].
        """
        entering: Entering = {}
        if not occurred.any():
            return entering
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

    def update(self, rows: Rows, timeline: Timeline) -> None:
        """Update the tail of each stream. Call it after the rows were written."""
        order = np.flatnonzero(timeline.row >= 0)
        stream = rows.stream[timeline.row[order]]
        last = order[np.append(np.flatnonzero(np.diff(stream)), len(stream) - 1)]
        begins = np.searchsorted(timeline.episode, timeline.episode[last])
        for place, begin in zip(last.tolist(), begins.tolist(), strict=True):
            row = timeline.row[place]
            name = int(rows.stream[row])
            if rows.ends[row] or not self._length:
                self._tails.pop(name, None)
                continue
            kept = slice(max(begin, place + 1 - self._length), place + 1)
            self._tails[name] = Tail(
                timeline.slot[kept], timeline.number[kept], timeline.sent[kept], int(rows.trajectory[row])
            )
        if len(self._tails) > self._many:
            self._discard_overwritten()

    def _discard_overwritten(self) -> None:
        """Discard unfinished episodes whose transitions are all overwritten."""
        oldest = self._tables.oldest
        self._tails = {name: tail for name, tail in self._tails.items() if tail.number[-1] >= oldest}
        self._many = 2 * len(self._tails) + _MANY_TAILS

    def tensors(self) -> dict[str, Tensor]:
        """A copy of the state to save."""
        tails = [*self._tails.values()]
        none = Tail(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, len(self._tables)), bool), -1)
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
            self._tails[stream] = Tail(slot, number, sent, trajectory)
