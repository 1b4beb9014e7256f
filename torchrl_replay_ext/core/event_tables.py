"""Event tables: first-in-first-out lists of transitions that led to an event. All lists refer to one storage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import increase
from torchrl_replay_ext.core.event_list import EventList
from torchrl_replay_ext.core.event_spec import EventSpec, Retention, table_capacities
from torchrl_replay_ext.core.free_list import FreeList
from torchrl_replay_ext.core.recoverable import Recoverable
from torchrl_replay_ext.core.table_state import Listener, Listeners, TableState
from torchrl_replay_ext.indices import as_index

# Attribute of a storage through which a writer and a sampler that were built separately share the tables.
STORAGE_ATTRIBUTE = "_event_tables"


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


class EventTables(Recoverable, Mapping[str, EventTable]):
    """The tables of SSET (Kompella et al. 2022, Algorithm 1): lists of indices into one storage.

    An :class:`~torchrl_replay_ext.EventTableWriter` fills the tables and an
    :class:`~torchrl_replay_ext.EventTableSampler` draws from them; pass the same object to both. If the writer and the
    sampler are built separately (from a configuration, in a Ray actor), build the tables of both with equal arguments;
    the sampler then uses the tables of the writer. The table ``"default"`` holds all transitions.

    An entry is the index of a transition. It takes 12 bytes, 24 with ``retention="ring"``. Each table takes 4 bytes per
    slot of the storage. The tables are on the CPU; if the storage is on another device, draws read a copy of them
    there.

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
        super().__init__()
        capacities = table_capacities(specs, capacity, retention)
        self.specs, self.retention = tuple(specs), retention
        self.names, self._max_capacity = [*capacities], [*capacities.values()]
        self._pinned = retention == "pinned"
        # with retention="ring" the default table is the whole storage and needs no list
        self._first = 0 if self._pinned else 1
        self.num_slots = 0
        self._listeners = Listeners()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Mark the tables as dirty while the block modifies them; then notify the listeners that they are settled."""
        with super().transaction():
            yield
            if self._depth == 1:
                self._listeners.notify("on_settled")

    def abandon_write(self) -> None:
        """Mark the tables as valid in a transaction that ends with an error and whose effects were undone."""
        self._listeners.notify("on_settled")
        self.mark_clean()

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
        return int(self._state.ends.numpy()[2, number]) if self.is_allocated else 0

    def capacity_of(self, number: int) -> int:
        """κ of a table."""
        if number < self._first:
            return self.num_slots
        return int(self._state.capacity.numpy()[number]) if self.is_allocated else self._max_capacity[number]

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
        with self.transaction():
            self._state.capacity[number] = int(value)
            self._release(self.list_of(number).make_room(0))

    def index(self, number: int) -> Tensor:
        """The slots of a table, oldest entry first, int64, on the device of the storage."""
        if not self.is_allocated:
            return torch.zeros(0, dtype=torch.int64)
        if number < self._first:
            size, count = self.num_slots, self.size(0)
            return (torch.arange(count, device=self.device) + (self.num_written if count == size else 0)) % size
        return self._state.on_device(self.list_of(number).slots())

    # --- memory

    def regions(self, num_slots: int) -> list[int]:
        """The first position of each table for a storage of ``num_slots``, then the total number of positions."""
        # with retention="ring" entries are removed out of order, so a list needs more positions than entries
        lengths = [capacity * (1 if self._pinned else 2) for capacity in self._max_capacity]
        if not self._pinned:
            lengths[0] = num_slots
        begins = [0]
        for length in lengths:
            begins.append(begins[-1] + length)
        return begins

    def check(self, num_slots: int) -> None:
        """Raise ValueError if a storage of ``num_slots`` is too small."""
        needed = sum(self._max_capacity)
        if self._pinned and num_slots < needed:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage has {num_slots} slots, the capacities add up to "
                f"{needed} and must all fit; use LazyTensorStorage({needed})."
            )

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate the lists for a storage of ``num_slots`` on ``device``. Later calls only change the device.

        Raises:
            ValueError: if the storage is too small, or the tables hold transitions of a storage of another size.
        """
        if self.num_slots == num_slots:
            self._state.move(device)
            return
        self.check(num_slots)
        if self.num_written:
            raise ValueError(
                f"EventTables: these tables are used with a storage of {self.num_slots} slots and cannot be used with "
                f"one of {num_slots} slots; give each buffer its own."
            )
        self._begins = begins = self.regions(num_slots)
        self.num_slots, self.nowhere = num_slots, begins[-1]
        capacities, first = self._max_capacity, self._first
        # one more position, which belongs to no list
        self._state = TableState(
            begins[-1] + 1, num_slots, capacities, first=first, device=device, listeners=self._listeners
        )
        self._lists = [EventList(self._state, n, begins[n], begins[n + 1]) for n in range(first, len(capacities))]
        # number of transitions written; in a ring, transition n is in slot n % num_slots
        self._written = torch.zeros((), dtype=torch.int64, device="cpu")
        # number of times that all content was replaced; writers in other processes compare it to detect a reset
        self._resets = torch.zeros((), dtype=torch.int64, device="cpu")
        self._free = FreeList(num_slots, device="cpu") if self._pinned else None

    @property
    def device(self) -> torch.device:
        """The device of the storage, where draws read the tables."""
        return self._state.device

    @property
    def slot_at(self) -> Tensor:
        """The slot at each position of all tables, on the device of the storage, int [positions + 1]."""
        return self._state.slots_on_device

    @property
    def counts(self) -> Tensor:
        """The number of transitions in each table, on the device of the storage, int64 [tables]."""
        return self._state.counts

    def list_of(self, number: int) -> EventList:
        """The list of a table. With ``retention="ring"`` the default table has no list."""
        return self._lists[number - self._first]

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. :meth:`load` restores it in place."""
        own = self._state
        state = {"place": own.places, "slot_at": own.listed_slots, "lists": own.ends, "written": self._written}
        state |= {"capacity": own.capacity, "newest": own.newest, "ordered": own.ordered}
        return state if self._free is None else state | self._free.tensors("free")

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`tensors`, in place."""
        for key, tensor in self.tensors().items():
            tensor.copy_(state[key])
        self._state.send()
        self.mark_clean()
        self._resets.add_(1)

    def clear(self) -> None:
        """Empty all tables."""
        if not self.is_allocated:
            return
        self._state.clear()
        self._written.zero_()
        if self._free is not None:
            self._free.clear_()
        self.mark_clean()
        self._resets.add_(1)

    @property
    def num_resets(self) -> int:
        """Number of times that :meth:`clear`, :meth:`load` or :meth:`recover` replaced all content."""
        return int(self._resets) if self.is_allocated else 0

    def recover(self, next_slot: int | None = None) -> None:
        """Rebuild the lists if a transaction was interrupted. Must not be called within a transaction.

        Entries stay in their tables. Writers discard their unfinished episodes.

        Args:
            next_slot: the slot after the last one that holds a complete or partial row; None (default) if unknown.
        """
        if not self.needs_recovery:
            return
        if self.is_allocated:
            ordered = self._state.ordered.numpy()
            for entries in self._lists:
                slots = entries.rebuild()
                if not self._pinned:
                    age = (slots - self.num_written) % self.num_slots
                    ordered[entries.number] = (age[1:] > age[:-1]).all()
            if self._free is not None:
                self._free.refill_((~self._is_listed(np.arange(self.num_slots))).nonzero()[0])
            elif next_slot is not None:
                self.skip_to(next_slot)
            self._state.send()
            self._resets.add_(1)
        self._listeners.notify("on_relayout")
        self.mark_clean()

    # --- which tables hold a slot

    def attach(self, listener: Listener) -> None:
        """Notify ``listener`` of all later changes of the lists."""
        self._listeners.attach(listener)

    def positions(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each table, ``nowhere`` if it is not there; int64 [tables, n]."""
        listed = self._state.find(slots).to(torch.int64)
        return listed if self._pinned else torch.cat([slots.unsqueeze(0), listed])

    def holds(self, slots: Tensor) -> Tensor:
        """True where a table holds one of ``slots`` [n], bool [tables, n]; in a ring, the default table has no row."""
        return self._state.find(slots) != self.nowhere

    def holding(self, slots: np.ndarray) -> np.ndarray:
        """:meth:`holds` for NumPy arrays, without a read from the device."""
        return self._state.places.numpy()[:, as_index(slots)] != self.nowhere

    def _is_listed(self, slots: np.ndarray) -> np.ndarray:
        return np.logical_or.reduce(self.holding(slots))

    def sum_over_tables(self, slots: Tensor, per_table: list[float]) -> Tensor:
        """Sum of ``per_table`` over the tables that hold each of ``slots`` [n], float32 [n]. For the CPU only."""
        held = self._state.places_on_device.index_select(1, slots) != self.nowhere
        result = torch.tensor(per_table[self._first :]) @ held.to(torch.float32)
        return result if self._pinned else result.add_(per_table[0])

    def runs(self) -> list[tuple[int, int, int, int]] | None:
        """First position, number of positions, number of the oldest entry and size of each table.

        Returns:
            None if a table has gaps. Otherwise the entries of each table are at cyclically consecutive positions.
        """
        heads, tails, counts = self._state.ends.tolist()
        if not self._pinned:
            tails[0], heads[0] = 0, counts[0]
        if any(head - tail != count for head, tail, count in zip(heads, tails, counts, strict=True)):
            return None
        begins, ends = self._begins[:-1], self._begins[1:]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return [*zip(begins, lengths, tails, counts, strict=True)]

    # --- writing

    @property
    def num_written(self) -> int:
        """Number of transitions written so far."""
        return int(self._written.item()) if self.is_allocated else 0

    @property
    def oldest(self) -> int:
        """Lower bound on the numbers of the transitions in the default table."""
        return self.num_written - (self.size(0) if self._pinned else self.num_slots)

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
        self._written.fill_(self.num_slots + next_slot)
        self._set_default_size(count)

    def _set_default_size(self, count: int) -> None:
        self._state.ends[2, 0] = count
        self._state.send_counts()

    def written(self, slots: np.ndarray) -> None:
        """Count a write of ``slots`` [n], given in the order of writing."""
        increase(self._written, len(slots))
        if not self._pinned and self.size(0) < self.num_slots:
            self._set_default_size(max(self.size(0), int(slots.max()) + 1))

    def ring(self, first: int, count: int) -> np.ndarray:
        """``count`` slots of the ring, from ``first`` on; int64 [count]."""
        slots = np.arange(first, first + count)
        return slots if first + count <= self.num_slots else slots % self.num_slots

    def skip_to(self, slot: int) -> bool:
        """Ring: let the next write begin at ``slot``, and remove the entries of skipped slots.

        Slots are skipped if a process was killed while it wrote them, or if the storage was filled before and its ring
        begins elsewhere.

        Returns:
            True if slots were skipped.
        """
        first = self.num_written
        count = (slot - first) % self.num_slots if first else 0
        if count:
            self.overwrite(self.ring(first % self.num_slots, count))
            self._written.add_(count)
        return count > 0

    def overwrite(self, slots: np.ndarray, *, in_turn: bool = True) -> None:
        """Remove the entries of ``slots``, whose transitions were overwritten.

        Args:
            slots: int64 [n], distinct.
            in_turn: True (default) if these transitions were the oldest ones of the storage.
        """
        places, index = self._state.places.numpy(), as_index(slots)
        positions = places[:, index]
        held = positions != self.nowhere
        if not held.any():
            return
        with self.transaction():
            positions = positions.astype(np.int64)
            removed = held.sum(1)
            places[:, index] = self.nowhere
            ends = self._state.ends.numpy()[:, self._first :]
            ends[2] -= removed
            if in_turn:
                # in an ordered list the oldest transitions are the first entries
                ends[1] += removed * self._state.ordered.numpy()[self._first :]
            every = np.broadcast_to(slots, held.shape)
            self._state.removed_from_all(positions[held], every[held], slots[held.any(0)])

    def take(self, count: int, entering: Mapping[int, np.ndarray]) -> np.ndarray:
        """Pinned: make room for a write and return the slots for the new transitions, int64 [count].

        Args:
            count: number of new transitions, at most the capacity of the default table.
            entering: for each table the slots of the transitions that will enter it, int64; -1 for new transitions.
        """
        assert self._free is not None
        evicted = self.list_of(0).make_room(count)
        if entering:
            others = [self.list_of(number).make_room(len(slots)) for number, slots in entering.items()]
            evicted = np.unique(np.concatenate([evicted, *others]))
        self._release(evicted, entering.values())
        return self._free.take(count)

    def give_back(self, slots: np.ndarray) -> None:
        """Pinned: free those of ``slots`` [n] that no table holds, after the write that took them failed."""
        self._release(np.unique(slots))

    def _release(self, slots: np.ndarray, needed: Iterable[np.ndarray] = ()) -> None:
        """Pinned: free each of ``slots`` [n], distinct, that no table holds and that is not in ``needed``."""
        if self._free is None or not len(slots):
            return
        # sorted, so that new rows often get consecutive slots, which take less time to write
        slots = np.sort(slots)
        slots = slots[~self._is_listed(slots)]
        for others in needed:
            slots = slots[~np.isin(slots, others)]
        self._free.give_back(slots)

    def check_valid(self) -> None:
        """Raise AssertionError if lists, positions, counts and free slots are inconsistent. O(slots)."""
        if not self.is_allocated:
            return
        self._state.check_valid()
        for name, entries in zip(self.names[self._first :], self._lists, strict=True):
            entries.check_valid(name)
        if self._free is not None:
            listed = torch.from_numpy(self._is_listed(np.arange(self.num_slots)))
            if not torch.equal(self._free.free(), ~listed):
                raise AssertionError("EventTables: the free slots are not the slots that no table holds")
