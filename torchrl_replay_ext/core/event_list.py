"""A first-in-first-out list of slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrl_replay_ext.core.table_state import TableState
from torchrl_replay_ext.indices import as_index

_NO_SLOTS = np.zeros(0, np.int64)


@dataclass(eq=False)
class EventList:
    """A first-in-first-out list of slots, in a ring of positions.

    The list consists of entries ``tail`` to ``head - 1``; entry k is at position ``begin + k % (end - begin)``. If the
    slot of an entry is overwritten, the entry leaves a gap at its position. Gaps are closed when no free position is
    left.

    All content is in ``state``, which :class:`~torchrl_replay_ext.core.event_tables.EventTables` also modifies:

    * ``listed_slots``: the slot at each position.
    * ``places[row]``: the position of each slot; ``nowhere`` if it is not in the list.
    * ``ends[:, number]``: number of the next entry (head), number of the oldest entry (tail), number of entries
      without gaps.
    * ``capacity[number]``: upper limit of the number of entries.
    * ``newest[number]``: the largest transition number inserted since the list was last empty; -1 if none.
    * ``ordered[number]``: True if the entries are sorted by transition number.

    Args:
        state: the tensors of all lists.
        number: number of the table.
        begin: first position.
        end: the position after the last one.
    """

    state: TableState
    number: int
    begin: int
    end: int

    def __post_init__(self):
        self._row = self.number - self.state.first

    def __len__(self) -> int:
        return int(self._ends[2])

    @property
    def _ends(self) -> np.ndarray:
        return self.state.ends.numpy()[:, self.number]

    @property
    def _capacity(self) -> int:
        return int(self.state.capacity.numpy()[self.number])

    @property
    def _place(self) -> np.ndarray:
        return self.state.places.numpy()[self._row]

    def _positions(self, first: int, last: int) -> np.ndarray:
        """The positions of entries ``first`` to ``last - 1``."""
        length = self.end - self.begin
        first, last = first % length, first % length + last - first
        if last <= length:
            return np.arange(self.begin + first, self.begin + last)
        return self.begin + np.arange(first, last) % length

    def _entries(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions and slots of entries ``first`` to ``last - 1``, and the indices of those that are not gaps."""
        positions = self._positions(first, last)
        slots = self.state.listed_slots.numpy()[positions].astype(np.int64)
        return positions, slots, (self._place[slots] == positions).nonzero()[0]

    def slots(self) -> np.ndarray:
        """The slots in the list, oldest entry first; int64 [count]."""
        head, tail, _ = self._ends.tolist()
        _, slots, listed = self._entries(tail, head)
        return slots[listed]

    def evict(self, count: int) -> np.ndarray:
        """Remove the ``count`` oldest entries and return their slots, int64 [count]."""
        ends = self._ends
        head, tail, size = ends.tolist()
        if head - tail == size:
            positions = self._positions(tail, tail + count)
            slots, passed = self.state.listed_slots.numpy()[positions].astype(np.int64), count
        else:
            positions, slots, listed = self._entries(tail, head - size + count)
            listed = listed[:count]
            positions, slots, passed = positions[listed], slots[listed], int(listed[-1]) + 1
        self._place[slots] = self.state.nowhere
        ends[1:] = tail + passed, size - count
        self.state.removed(self._row, positions, slots)
        return slots

    def make_room(self, count: int) -> np.ndarray:
        """Remove the oldest entries to make room for ``count`` more; returns the slots of the removed entries."""
        capacity = self._capacity
        surplus = len(self) + min(count, capacity) - capacity
        return self.evict(surplus) if surplus > 0 else _NO_SLOTS

    def insert(self, slots: np.ndarray, numbers: np.ndarray) -> None:
        """Add entries that are not in the list. If there is no room, remove the oldest entries.

        Args:
            slots: int64 [n], distinct, oldest first. If n exceeds the capacity, the oldest ones are left out.
            numbers: transition numbers, int64 [n].
        """
        capacity = self._capacity
        if len(slots) > capacity:
            slots, numbers = slots[-capacity:], numbers[-capacity:]
        count = len(slots)
        if len(self) + count > capacity:
            self.make_room(count)
        number, ends = self.number, self._ends
        newest, ordered = self.state.newest.numpy(), self.state.ordered.numpy()
        head, tail, size = ends.tolist()
        if not size:
            ends[1], newest[number], ordered[number] = head, -1, True
        elif head - tail + count > self.end - self.begin:
            self._compact()
            head = size
        positions = self._place_at(head, slots)
        ends[0], ends[2] = head + count, size + count
        follows = self._follow(numbers)
        ordered[number] &= follows
        newest[number] = numbers[-1] if follows else max(newest[number], numbers.max())
        self.state.inserted(self._row, positions, slots)

    def stays_ordered(self, numbers: np.ndarray) -> bool:
        """True if the list is ordered and would stay ordered after inserting transitions ``numbers`` [n]."""
        return bool(self.state.ordered.numpy()[self.number]) and self._follow(numbers)

    def _follow(self, numbers: np.ndarray) -> bool:
        is_increasing = isinstance(as_index(numbers), slice) or (numbers[1:] > numbers[:-1]).all()
        return bool(is_increasing and numbers[0] > self.state.newest.numpy()[self.number])

    def _place_at(self, first: int, slots: np.ndarray) -> np.ndarray:
        """Store ``slots`` [n] as entries ``first`` to ``first + n - 1``; returns their positions."""
        positions = self._positions(first, first + len(slots))
        self.state.listed_slots.numpy()[positions] = slots
        self._place[slots] = positions
        return positions

    def _lay_out(self, slots: np.ndarray) -> np.ndarray:
        """Make ``slots`` [n], oldest first, the only entries, starting at ``begin``; returns their positions."""
        positions = self._place_at(0, slots)
        self._ends[:2] = len(slots), 0
        return positions

    def _compact(self) -> None:
        slots = self.slots()
        before = self._place[slots].astype(np.int64)
        self.state.moved(self._row, before, self._lay_out(slots), slots)

    def rebuild(self) -> np.ndarray:
        """Restore the list from ``places`` after an interrupted change. Listeners are not notified.

        Returns:
            The slots in the list, oldest entry first; int64 [count].
        """
        place, ends = self._place, self._ends
        held = (place != self.state.nowhere).nonzero()[0]
        passed = (place[held].astype(np.int64) - self.begin - ends[1]) % (self.end - self.begin)
        held = held[passed.argsort()]
        place[held] = self.state.nowhere
        held = held[-self._capacity :]
        self._lay_out(held)
        ends[2] = len(held)
        return held

    def check_valid(self, name: str) -> None:
        """Raise AssertionError if positions, slots and count are inconsistent; ``name`` is the table in the message."""
        place = self._place
        held = (place != self.state.nowhere).nonzero()[0]
        if len(held) != len(self) or len(held) > self._capacity:
            raise AssertionError(f"EventTables[{name!r}]: the number of entries is wrong or exceeds the capacity")
        if not np.array_equal(self.state.listed_slots.numpy()[place[held]], held):
            raise AssertionError(f"EventTables[{name!r}]: a slot points to a position that holds another slot")
        if not np.array_equal(np.sort(self.slots()), held):
            raise AssertionError(f"EventTables[{name!r}]: a slot points to a position outside of the list")
