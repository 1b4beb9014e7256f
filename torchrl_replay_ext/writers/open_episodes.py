"""The unfinished episode of each stream, and the rows of a write as event tables take them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.kernels.ops import events_earlier, events_remove, events_reopen, events_write

_FEWEST_CELLS = 64


class Rows(NamedTuple):
    """The rows of a write.

    Args:
        stream: stream of each row, int64 [n].
        trajectory: trajectory id, int64 [n]; empty if the stream is all that is known.
        ends: True if the row is the last of an episode, bool [n].
        begins: True if the row is marked as the first of an episode, bool [n]; empty if no row is.
        occurred: True if an event occurs in a row, bool [n, events].
    """

    stream: np.ndarray
    trajectory: np.ndarray
    ends: np.ndarray
    begins: np.ndarray
    occurred: np.ndarray

    def part(self, first: int, end: int) -> Rows:
        """The rows ``first`` to ``end`` - 1."""
        return Rows(*(column[first:end] for column in self))


class OpenEpisodes:
    """The last step of the unfinished episode of each stream; the tables know the steps before it.

    Args:
        tables: the tables to fill.
    """

    def __init__(self, tables: EventTables):
        self._tables = tables
        self._table_of = np.array([tables.table_of(spec) for spec in tables.specs])
        self._history = np.array([spec.history for spec in tables.specs])
        self._used = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.clear()

    def clear(self) -> None:
        """Discard all unfinished episodes."""
        self.load(torch.empty(0, 4, dtype=torch.int64, device="cpu"))

    def load(self, found: Tensor) -> None:
        """Replace all episodes by those of :meth:`stored`."""
        size = _FEWEST_CELLS
        while size < 4 * len(found):
            size *= 2
        self._cells = torch.zeros(size, 4, dtype=torch.int64, device="cpu")
        events_reopen(self._cells, self._used, found.cpu())

    def stored(self) -> Tensor:
        """The episodes whose last step is still stored: stream, slot, number and trajectory, int64 [n, 4]."""
        found = self._cells[self._cells[:, 1] >= 0]
        return found[self._tables.number[found[:, 1]] == found[:, 2]] if len(found) else found

    def write(self, rows: Rows, slots: np.ndarray) -> None:
        """Write ``rows`` to the tables. ``slots``, int64 [n], are a result if the tables are pinned."""
        arrays, done = self._tables.arrays(), np.zeros(1, np.int64)
        while True:
            events_write(self._cells, self._used, slots, *rows, self._table_of, self._history, done, *arrays)
            if done[0] == len(slots):
                return
            self.load(self.stored())

    def undo(self, rows: Rows, slots: np.ndarray) -> None:
        """Remove the rows of a failed write from the tables. Entries that they have displaced are lost."""
        events_remove(self._cells, slots, rows.stream, *self._tables.arrays())

    def earlier(self, stream: int, trajectory: int, count: int) -> np.ndarray:
        """The slots of the last ``count`` steps of the unfinished episode of a stream, oldest first; int64."""
        slots = torch.full((count,), -1, device="cpu")
        if self._tables.is_allocated:
            events_earlier(self._cells, stream, trajectory, slots, *self._tables.arrays())
        return slots[slots >= 0].flip(0).numpy()

    def __getstate__(self) -> tuple[EventTables, np.ndarray]:
        # not tensors, which processes would share
        return self._tables, self.stored().numpy()

    def __setstate__(self, state: tuple[EventTables, np.ndarray]) -> None:
        tables, found = state
        self.__init__(tables)
        self.load(torch.from_numpy(found.copy()))
