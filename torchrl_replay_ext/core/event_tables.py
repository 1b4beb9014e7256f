"""Event tables: first-in-first-out lists of transitions that led to an event. All lists refer to one storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced
from torchrl_replay_ext.core.event_spec import EventSpec, Retention, table_capacities
from torchrl_replay_ext.core.layout import check_counts
from torchrl_replay_ext.kernels.ops import (
    Views,
    events_earlier,
    events_order,
    events_remove,
    events_reopen,
    events_write,
)

# Attribute of a storage through which a writer and a sampler that were built separately share the tables.
STORAGE_ATTRIBUTE = "_event_tables"

# the entries of a saved state
STATE = "slot_at", "links", "places", "heads", "counts", "capacity", "begins", "number", "before", "free", "counters"
# Values of EventTables.places instead of a position, and entries of the counters; see kernels/events.py.
UNSENT, LEFT = -1, -2
WRITTEN, NEXT_SLOT, CHANGES, JOURNAL_BEGIN, RESETS, FREE_HEAD, FREE_TAIL = range(7)
_NO_SLOTS, _NO_EPISODES = np.empty(0, np.int64), torch.empty(0, 4, dtype=torch.int64, device="cpu")
_FEWEST_CELLS = 64


class EventTable:
    """One table of :class:`EventTables`."""

    def __init__(self, tables: EventTables, number: int):
        self._tables, self._number = tables, number

    def __len__(self) -> int:
        return self._tables.size(self._number)

    def index(self) -> Tensor:
        """Slots of the transitions, oldest entry first; int64 [len]. Storages with ndim >= 2: row-major numbers."""
        return self._tables.index(self._number)

    @property
    def capacity(self) -> int:
        """κ, the maximum number of transitions. It can be lowered, and raised up to its initial value.

        A fraction, as a schedule produces it, is rounded down.
        """
        return self._tables.capacity_of(self._number)

    @capacity.setter
    def capacity(self, value: float) -> None:
        self._tables.set_capacity(self._number, value)


class EventTables(Mapping[str, EventTable]):
    """The tables of SSET (Kompella et al. 2022, Algorithm 1): lists of indices into one storage.

    An :class:`~torchrl_replay_ext.EventTableWriter` fills the tables and an
    :class:`~torchrl_replay_ext.EventTableSampler` draws from them; pass the same object to both. If the writer and the
    sampler are built separately (from a configuration, in a Ray actor), build the tables of both with equal arguments;
    the sampler then uses the tables of the writer. The table ``"default"`` holds all transitions.

    An entry is the index of a transition. It takes 12 bytes. Each table takes 4 bytes per slot of the storage, and
    further 12 bytes per slot say which steps an episode consists of. The tables are on the CPU; if the storage is on
    another device, draws read a copy of them there.

    Each table is first-in-first-out. ``retention`` decides what happens to an entry when its transition becomes old:

    * ``"ring"``: the storage is a ring of N transitions, and the default table holds all of them. An entry is removed
      when its slot is overwritten.
    * ``"pinned"``: the default table holds the newest κ_0 transitions. A transition stays stored as long as any table
      holds it, so rare events are kept. The authors' implementation with Reverb does the same. The storage must be flat
      and have at least Σκ slots, the maximum number of stored transitions.

    Args:
        specs: the events.
        capacity: κ of each table by name, in transitions. Include ``"default"`` only if ``retention="pinned"``.
        retention: ``"ring"`` (default) or ``"pinned"``.

    Raises:
        ValueError: if ``capacity`` does not name exactly the tables of ``specs``, or an argument is out of range.
        TypeError: if ``specs`` is not a list or ``capacity`` is not a mapping.

    Examples:
        >>> tables = EventTables(
        ...     [EventSpec("gap", ("next", "at_gap"), 200), EventSpec("done", ("next", "terminated"), 200)],
        ...     capacity={"gap": 4000, "done": 6000},
        ... )
        >>> tables.sizes()
        {'default': 0, 'gap': 0, 'done': 0}
    """

    def __init__(self, specs: Sequence[EventSpec], capacity: Mapping[str, int], *, retention: Retention = "ring"):
        capacities = table_capacities(specs, capacity, retention)
        self.specs, self.retention = tuple(specs), retention
        self.names, self._max_capacity = [*capacities], [*capacities.values()]
        self._pinned = retention == "pinned"
        # with retention="ring" the default table is the whole storage and needs no list
        self._first = 0 if self._pinned else 1
        self.num_slots = 0
        # address of the memory, and the arrays
        self._memory: tuple[int, list[np.ndarray]] | None = None
        # the writer of this process that last wrote to the tables
        self.writer: ReferenceType[Any] | None = None

    @property
    def num_lists(self) -> int:
        """The number of tables that are lists: all but the default table of a ring."""
        return len(self.names) - self._first

    # --- tables by name

    def __getitem__(self, name: str) -> EventTable:
        if name not in self.names:
            raise KeyError(f"EventTables: there is no table {name!r}; the tables are {self.names}.")
        return EventTable(self, self.names.index(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]: Mapping has no hash
        return id(self)

    def description(self) -> list[Any]:
        """Events, capacities and retention, to compare two objects. Functions cannot be compared and are left out."""
        specs = [
            (spec.name, spec.history, spec.table, spec.context, None if callable(spec.condition) else spec.condition)
            for spec in self.specs
        ]
        return [specs, self._max_capacity, self.retention]

    def fits(self, other: EventTables) -> bool:
        """True if ``other`` has the same events, capacities and retention; see :meth:`description`."""
        return self.description() == other.description()

    def table_of(self, spec: EventSpec) -> int:
        """The number of the table that ``spec`` fills."""
        return self.names.index(spec.table or spec.name)

    @property
    def is_allocated(self) -> bool:
        """True once the storage, and with it the number of slots, is known; before, all tables are empty."""
        return self.num_slots > 0

    def sizes(self) -> dict[str, int]:
        """The number of transitions in each table."""
        return {name: len(self[name]) for name in self.names}

    def size(self, number: int) -> int:
        """The number of transitions in a table."""
        return int(self.arrays()[4][number]) if self.is_allocated else 0

    def capacity_of(self, number: int) -> int:
        """κ of a table."""
        if number < self._first:
            return self.num_slots
        return int(self._capacity[number]) if self.is_allocated else self._max_capacity[number]

    def set_capacity(self, number: int, value: float) -> None:
        """Change κ of a table. If it is lowered, the oldest entries are removed."""
        name, most = self.names[number], self._max_capacity[number]
        if number < self._first or not self.is_allocated:
            raise ValueError(
                f"EventTables[{name!r}].capacity={value}: the capacity can only be changed after the first write; with "
                "retention='ring' the capacity of the default table is that of the storage and cannot be changed."
            )
        if isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(
                f"EventTables[{name!r}].capacity={value}: the capacity must be in [1, {most}], since memory was "
                f"allocated for {most} entries; for more, pass a larger capacity to EventTables."
            )
        self._capacity[number] = int(value)
        self.remove(_NO_SLOTS)

    def index(self, number: int) -> Tensor:
        """The slots of a table, oldest entry first, int64, on the device of the storage."""
        if not self.is_allocated:
            return torch.zeros(0, dtype=torch.int64)
        size, count = self.num_slots, self.size(number)
        if number < self._first:
            slots = (torch.arange(count, device="cpu") + (self.counter(NEXT_SLOT) if count == size else 0)) % size
        else:
            slots = torch.empty(count, dtype=torch.int64, device="cpu")
            events_order(slots, number, *self.arrays())
        return slots.to(self.device, non_blocking=True)

    # --- memory

    def check(self, num_slots: int) -> None:
        """Raise ValueError if a storage of ``num_slots`` is too small."""
        needed = sum(self._max_capacity)
        if self._pinned and num_slots < needed:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage has {num_slots} slots, the capacities add up to "
                f"{needed} and must all fit; use LazyTensorStorage({needed})."
            )

    def begins_for(self, num_slots: int) -> list[int]:
        """The first position of each table for a storage of ``num_slots``, then the number of positions."""
        begins = [0]
        for number, capacity in enumerate(self._max_capacity):
            begins.append(begins[-1] + (num_slots if number < self._first else capacity))
        return begins

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate the lists for a storage of ``num_slots`` on ``device``. Later calls only change the device.

        Raises:
            ValueError: if the storage is too small, or the tables hold transitions of a storage of another size.
        """
        self.device = device
        if self.num_slots == num_slots:
            return
        self.check(num_slots)
        if self.num_written:
            raise ValueError(
                f"EventTables: these tables are used with a storage of {self.num_slots} slots and cannot be used with "
                f"one of {num_slots} slots; give each buffer its own."
            )
        self.num_slots, begins, self._memory = num_slots, self.begins_for(num_slots), None
        count, first = len(self.names), self._first

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu")

        wide = torch.int32 if begins[-1] < 2**31 else torch.int64
        self.begins = torch.tensor(begins, device="cpu")
        self.counts = zeros(count, dtype=torch.int64)
        self.slot_at = zeros(begins[-1], dtype=wide)
        self.places = zeros(count - first, num_slots, dtype=wide)
        self.number = zeros(num_slots, dtype=torch.int64)
        self._before = zeros(num_slots, dtype=wide)
        self._links = zeros(2, begins[-1] - begins[first], dtype=wide)
        self._heads = zeros(2, count, dtype=torch.int64)
        self._capacity = torch.tensor(self._max_capacity, device="cpu")
        self._free = zeros(num_slots if self._pinned else 0, dtype=wide)
        self._counters = zeros(7, dtype=torch.int64)
        self.journal = zeros(4096 + begins[-1] // 16, 2, dtype=wide)
        self.clear()

    def _tensors(self) -> list[Tensor]:
        return [
            *(self.slot_at, self._links, self.places, self._heads, self.counts, self._capacity, self.begins),
            *(self.number, self._before, self._free, self._counters, self.journal),
        ]

    def arrays(self) -> list[np.ndarray]:
        """The arrays of the kernels, see :mod:`torchrl_replay_ext.kernels.events`."""
        # other memory if another process shares it by now
        address = self.slot_at.data_ptr()
        if self._memory is None or self._memory[0] != address:
            self._memory = address, [tensor.numpy() for tensor in self._tensors()]
        return self._memory[1]

    def counters(self) -> np.ndarray:
        """The counters, see :mod:`torchrl_replay_ext.kernels.events`; the tables are allocated."""
        return self.arrays()[10]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_memory": None, "writer": None}

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. :meth:`load` restores it in place."""
        return dict(zip(STATE, self._tensors(), strict=False))

    def state(self) -> dict[str, Tensor]:
        """A copy of :meth:`tensors`, in which the journal begins now, as after a :meth:`load`."""
        state = {key: tensor.clone() for key, tensor in self.tensors().items()}
        state["counters"][RESETS], state["counters"][JOURNAL_BEGIN] = 0, state["counters"][CHANGES]
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`tensors`, in place."""
        resets = self.num_resets
        for key, tensor in self.tensors().items():
            tensor.copy_(state[key])
        self._counters[RESETS] = resets + 1
        self._counters[JOURNAL_BEGIN] = self._counters[CHANGES]

    def clear(self) -> None:
        """Empty all tables."""
        if not self.is_allocated:
            return
        resets, changes = self.num_resets, self.counter(CHANGES)
        self.slot_at.fill_(-1)
        if self._first:
            self.slot_at[: self.num_slots] = torch.arange(self.num_slots, device="cpu")
        for tensor in (self.places, self.number, self._before, self._links, self._heads):
            tensor.fill_(-1)
        self.counts.zero_()
        self._free.copy_(torch.arange(len(self._free), device="cpu"))
        self._counters.zero_()
        self._counters[FREE_TAIL] = len(self._free)
        self._counters[RESETS] = resets + 1
        self._counters[CHANGES] = changes
        self._forget_journal()

    def counter(self, which: int) -> int:
        """One of the counters, see :mod:`torchrl_replay_ext.kernels.events`."""
        return int(self._counters[which].item())

    @property
    def num_resets(self) -> int:
        """Number of times that :meth:`clear` or :meth:`load` replaced all content, in any process."""
        return self.counter(RESETS) if self.is_allocated else 0

    @property
    def num_written(self) -> int:
        """Number of transitions written so far."""
        return self.counter(WRITTEN) if self.is_allocated else 0

    # --- changes

    def has_changes_since(self, seen: int) -> bool:
        """True if :meth:`changes` knows all changes since the counter of changes was ``seen``."""
        counters = self._counters.numpy()
        end = counters[CHANGES]
        return max(0, counters[JOURNAL_BEGIN], end - len(self.journal)) <= seen <= end

    def changes(self, seen: int) -> tuple[np.ndarray, np.ndarray]:
        """The positions that changed since the counter of changes was ``seen``, and the slots that moved; int64 [n]."""
        rows = np.arange(seen, self.counter(CHANGES)) % len(self.journal)
        position, slot = self.journal.numpy()[rows].astype(np.int64).T
        return position, slot

    # --- writing

    def adopt(self, count: int, next_slot: int) -> None:
        """Add the transitions that a storage held before the first write to the default table, without events.

        Args:
            count: length of the storage.
            next_slot: the slot that will be written next.
        """
        if self.num_written or not count:
            return
        if self._pinned:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage must be empty at first, but holds {count} transitions; "
                "create the buffer with an empty storage and write them to it."
            )
        self._counters[WRITTEN] = count
        self._counters[NEXT_SLOT] = next_slot
        self.set_default_size(count)

    def set_default_size(self, count: int) -> None:
        """Ring: let the default table hold the first ``count`` slots."""
        self.counts[0] = count
        self._forget_journal()

    def _forget_journal(self) -> None:
        """Let samplers read all entries again."""
        self._counters[CHANGES] += 1
        self._counters[JOURNAL_BEGIN] = self._counters[CHANGES]

    def skip_to(self, slot: int) -> bool:
        """Ring: remove the entries of the slots between the last write and ``slot``, where the next write begins.

        Slots are skipped if a process was killed while it wrote them, or if the storage was filled before and its ring
        begins elsewhere.

        Returns:
            True if slots were skipped.
        """
        first = self.counter(NEXT_SLOT)
        if not self.num_written:
            return False
        self.overwrite((first + np.arange((slot - first) % self.num_slots)) % self.num_slots)
        return True

    def overwrite(self, slots: np.ndarray) -> None:
        """Ring: remove the entries of ``slots`` [n], whose transitions may be overwritten and are no history."""
        self.remove(slots)
        self.number.numpy()[slots] = self.num_written

    def remove(self, slots: np.ndarray) -> None:
        """Remove the entries of ``slots``, int64 [n], and those beyond the capacities."""
        if self.is_allocated:
            events_remove(_NO_EPISODES, slots, _NO_SLOTS, *self.arrays())

    def check_valid(self) -> None:
        """Raise AssertionError if lists, positions, counts and free slots are inconsistent. O(slots)."""
        if not self.is_allocated:
            return
        check_counts("EventTables", self._counters, self._capacity, self.counts)
        slot_at, places = self.slot_at.numpy(), self.places.numpy()
        if self.size(0) > self.num_slots:
            raise AssertionError("EventTables['default']: there are more entries than slots")
        if self._first and not np.array_equal(slot_at[: self.num_slots], np.arange(self.num_slots)):
            raise AssertionError("EventTables['default']: a slot is not at its own position")
        for number in range(self._first, len(self.names)):
            name, count, place = self.names[number], self.size(number), places[number - self._first]
            begin, end = self.begins[number : number + 2].tolist()
            held = np.flatnonzero(place >= 0)
            if len(held) != count or count > self.capacity_of(number):
                raise AssertionError(f"EventTables[{name!r}]: the number of entries is wrong or exceeds the capacity")
            if not np.array_equal(np.sort(place[held]), np.arange(begin, begin + count)):
                raise AssertionError(f"EventTables[{name!r}]: a slot points to a position outside of the list")
            if not np.array_equal(slot_at[place[held]], held) or (slot_at[begin + count : end] >= 0).any():
                raise AssertionError(f"EventTables[{name!r}]: a slot points to a position that holds another slot")
            order = self.index(number).cpu().numpy()
            chain = [-1, *(place[order] - int(self.begins[self._first])), -1]
            heads, (older, newer) = self._heads[:, number].tolist(), self._links.numpy()[:, chain[1:-1]].tolist()
            if not np.array_equal(np.sort(order), held) or heads != [chain[1], chain[-2]]:
                raise AssertionError(f"EventTables[{name!r}]: the order of the entries is broken")
            if older != chain[:-2] or newer != chain[2:]:
                raise AssertionError(f"EventTables[{name!r}]: an entry does not know its neighbours")
        if self._pinned:
            head, tail = self.counter(FREE_HEAD), self.counter(FREE_TAIL)
            if not 0 <= tail - head <= self.num_slots:
                raise AssertionError("EventTables: there are more free slots than slots")
            free = self._free.numpy()[np.arange(head, tail) % self.num_slots]
            if not np.array_equal(np.sort(free), np.flatnonzero((places < 0).all(0))):
                raise AssertionError("EventTables: the free slots are not the slots that no table holds")


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
        self.load(_NO_EPISODES)

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


class TableView:
    """What draws and updates read of event tables, on the device of the storage.

    On the CPU these are the arrays of the tables. On an accelerator they are copies, to which changes are sent without
    waiting for the device.

    Args:
        tables: the tables.
        num_slots: number of slots. The view is empty if the tables are not those of a storage of this size.
        device: the device.
    """

    def __init__(self, tables: EventTables, num_slots: int, device: torch.device):
        self._tables, self._device, self.is_copy = tables, device, device.type != "cpu"
        self.is_empty, self._first = tables.num_slots != num_slots, len(tables) - tables.num_lists
        begins = tables.begins_for(num_slots)
        self.begins = torch.tensor(begins, device=device)
        if self.is_empty:
            self.slot_at = torch.full((begins[-1],), -1, device=device)
            self.places = torch.full((tables.num_lists, num_slots), -1, device=device)
            self.counts = torch.zeros(len(tables), dtype=torch.int64, device=device)
            self.journal = torch.zeros(1, 2, dtype=torch.int64, device=device)
        else:
            arrays = tables.slot_at, tables.places, tables.counts
            self.slot_at, self.places, self.counts = (array.to(device, non_blocking=True) for array in arrays)
            # changes are sent one by one
            self.journal = self.begins[:2].view(1, 2) if self.is_copy else tables.journal
        self.views = Views(self.slot_at, self.places, self.counts, self.journal)

    def send(self) -> None:
        """Send all arrays to the device."""
        if self.is_copy and not self.is_empty:
            for own, array in (
                (self.slot_at, self._tables.slot_at),
                (self.places, self._tables.places),
                (self.counts, self._tables.counts),
            ):
                own.copy_(array, non_blocking=True)

    def changes(self, seen: int) -> Tensor:
        """Positions that changed since the counter of changes was ``seen``, and the slots that moved, [n, 2].

        They are on the device, and the device knows what is at the positions now.
        """
        position, slot = self._tables.changes(seen)
        changes = torch.from_numpy(np.stack([position, slot], 1))
        if self.is_copy:
            now, places = self._tables.slot_at[position], self._tables.places[:, slot]
            changes, now, places = (each.to(self._device, non_blocking=True) for each in (changes, now, places))
            self.slot_at.index_copy_(0, changes[:, 0], now)
            self.places.index_copy_(1, changes[:, 1], places)
            self.counts.copy_(self._tables.counts, non_blocking=True)
        return changes

    def positions(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each table, negative if it is not there; int64 [tables, n]."""
        listed = self.find(slots).to(torch.int64)
        return torch.cat([slots.unsqueeze(0), listed]) if self._first else listed

    def find(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each list, [lists, n]; in a ring, the default table is no list."""
        if not is_traced():
            return self.places.index_select(1, slots)
        rows = torch.arange(len(self.places), device=self._device).unsqueeze(1) * self.places.shape[1]
        return gather_in_bounds(self.places.view(-1), (rows + slots).view(-1)).view(rows.shape[0], -1)

    def holds(self, slots: Tensor) -> Tensor:
        """True where a list holds one of ``slots`` [n], bool [lists, n]."""
        return self.find(slots) >= 0
