"""Event tables: first-in-first-out lists of transitions that led to an event. All lists refer to one storage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, outside_inference_mode
from torchrl_replay_ext.core.event_spec import EventSpec, Retention, StatefulCondition, table_capacities
from torchrl_replay_ext.kernels.layouts import CHANGES, FREE_HEAD, FREE_TAIL, NEXT_SLOT, WRITTEN
from torchrl_replay_ext.kernels.ops import Views, events_order, events_remove

# Attribute of a storage through which a writer and a sampler that were built separately share the tables.
STORAGE_ATTRIBUTE = "_event_tables"

# the arrays of the kernels, all but the last one are saved; see kernels/events.py
ARRAYS = (
    *("slot_at", "links", "position_of", "heads", "counts", "begins", "number", "step_before", "free", "counters"),
    "journal",
)


class EventTable:
    """One table of :class:`EventTables`."""

    def __init__(self, tables: EventTables, number: int):
        self._tables, self._number = tables, number

    def __len__(self) -> int:
        return int(self._tables.counts[self._number])

    def index(self) -> Tensor:
        """Slots of the transitions, oldest entry first; int64 [len]. Storages with ndim >= 2: row-major numbers."""
        tables, count, size = self._tables, len(self), self._tables.num_slots
        slots = torch.arange(count, device="cpu")
        if self._number >= tables.first:
            events_order(slots, self._number, *tables.arrays())
        elif count == size:
            slots = (slots + int(tables.counters[NEXT_SLOT])) % size
        return slots.to(tables.device, non_blocking=True)

    @property
    def capacity(self) -> int:
        """κ, the maximum number of transitions."""
        return self._tables.capacities[self._number]


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
        TypeError: if ``specs`` is not a list, or ``capacity`` is not a mapping to integers.

    Examples:
        >>> tables = EventTables(
        ...     [EventSpec("gap", ("next", "at_gap"), 200), EventSpec("done", ("next", "terminated"), 200)],
        ...     capacity={"gap": 4000, "done": 6000},
        ... )
        >>> tables.sizes()
        {'default': 0, 'gap': 0, 'done': 0}
    """

    @outside_inference_mode()
    def __init__(self, specs: Sequence[EventSpec], capacity: Mapping[str, int], *, retention: Retention = "ring"):
        capacities = table_capacities(specs, capacity, retention)
        self.specs, self.retention = tuple(spec.without_memory() for spec in specs), retention
        self.is_pinned = retention == "pinned"
        self.names, self.capacities = [*capacities], [*capacities.values()]
        # the first table that is a list: in a ring, the default table is the whole storage and needs none
        self.first = 0 if self.is_pinned else 1
        # the storage of the buffer
        self.storage: ReferenceType[Any] | None = None
        # the number of slots is not known before the first write
        self.num_slots, self.is_allocated, self.device = 1, False, torch.device("cpu")
        self._allocate()

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
        specs = [vars(spec) | {"condition": None} if callable(spec.condition) else spec for spec in self.specs]
        return [specs, self.capacities[self.first :], self.retention]

    def sizes(self) -> dict[str, int]:
        """The number of transitions in each table."""
        return dict(zip(self.names, self.counts.tolist(), strict=True))

    # --- memory

    def check(self, num_slots: int) -> None:
        """Raise ValueError if a storage of ``num_slots`` is too small."""
        needed = sum(self.capacities)
        if self.is_pinned and num_slots < needed:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage has {num_slots} slots, the capacities add up to "
                f"{needed} and must all fit; use LazyTensorStorage({needed})."
            )

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Allocate the lists for a storage of ``num_slots`` on ``device``. Later calls only change the device.

        Raises:
            ValueError: if the storage is too small, or the tables hold transitions of a storage of another size.
        """
        self.device = device
        if self.is_allocated and self.num_slots == num_slots:
            return
        self.check(num_slots)
        if self.counts[0]:
            raise ValueError(
                f"EventTables: these tables are used with a storage of {self.num_slots} slots and cannot be used with "
                f"one of {num_slots} slots; give each buffer its own."
            )
        self.num_slots, self.is_allocated = num_slots, True
        self._allocate()

    @outside_inference_mode()
    def _allocate(self) -> None:
        size, count, first = self.num_slots, len(self.names), self.first
        # in a ring, the default table holds the whole storage
        self.capacities[:first] = [size] * first
        positions, listed = sum(self.capacities), sum(self.capacities[first:])
        wide = torch.int32 if positions < 2**31 else torch.int64

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu")

        self.begins = torch.tensor([0, *accumulate(self.capacities)], device="cpu")
        self.counts, self.counters = zeros(count), zeros(5)
        self.slot_at, self.step_before, self.number = zeros(positions, dtype=wide), zeros(size, dtype=wide), zeros(size)
        self.position_of = zeros(count - first, size, dtype=wide)
        self.links, self.heads = zeros(2, listed, dtype=wide), zeros(2, count)
        self.free = zeros(size if self.is_pinned else 0, dtype=wide)
        self.journal = zeros(4096 + positions // 16, 2, dtype=wide)
        self.arrays = Views(*(vars(self)[name] for name in ARRAYS))
        self.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "storage": None}

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. :meth:`load` restores it in place."""
        return {name: vars(self)[name] for name in ARRAYS[:-1]} | self._memories()

    def _memories(self) -> dict[str, Tensor]:
        """What the conditions remember, by the name of the event."""
        conditions = ((spec.name, spec.condition) for spec in self.specs)
        states = ((name, each.tensors) for name, each in conditions if isinstance(each, StatefulCondition))
        return {f"{name}.{part}": tensor for name, state in states for part, tensor in state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`tensors`, in place."""
        changes = int(self.counters[CHANGES])
        for key, tensor in self.tensors().items():
            tensor.copy_(state[key])
        self.counters[CHANGES] = changes
        self._forget_journal()

    def clear(self) -> None:
        """Empty all tables. Transitions are numbered further, so those of open episodes are known to be gone.

        Conditions forget what they remember.
        """
        for tensor in self._memories().values():
            tensor.zero_()
        self.slot_at.fill_(-1)
        if self.first:
            self.slot_at[: self.num_slots] = torch.arange(self.num_slots, device="cpu")
        for tensor in (self.position_of, self.number, self.step_before, self.links, self.heads):
            tensor.fill_(-1)
        self.counts.zero_()
        self.free.copy_(torch.arange(len(self.free), device="cpu"))
        self.counters[[NEXT_SLOT, FREE_HEAD]] = 0
        self.counters[FREE_TAIL] = len(self.free)
        self._forget_journal()

    # --- changes

    def _forget_journal(self) -> None:
        """Let samplers read all entries again: count more changes than the journal has."""
        self.counters[CHANGES] += len(self.journal) + 1

    def has_changes_since(self, seen: int) -> bool:
        """True if the journal has all changes since the counter of changes was ``seen``."""
        return self.counters.numpy()[CHANGES] - len(self.journal) <= seen

    # --- writing

    def adopt(self, count: int, next_slot: int) -> None:
        """Add the transitions that a storage held before the first write to the default table, without events.

        Args:
            count: length of the storage.
            next_slot: the slot that will be written next.
        """
        if self.counts[0] or not count:
            return
        if self.is_pinned:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage must be empty at first, but holds {count} transitions; "
                "create the buffer with an empty storage and write them to it."
            )
        self._restart_ring(count, next_slot)

    def _restart_ring(self, count: int, next_slot: int) -> None:
        self.counts[0], self.counters[NEXT_SLOT] = count, next_slot
        self._forget_journal()

    def remove(self, slots: np.ndarray) -> None:
        """Remove the entries of ``slots``, int64 [n]."""
        events_remove(slots, *self.arrays())

    def undo(self, slots: np.ndarray, size: int) -> None:
        """Remove ``slots`` [n] of a failed write, which are no history either. Entries that were displaced are lost.

        ``size`` is the number of transitions that the default table held before.
        """
        self.remove(slots)
        self.number[torch.from_numpy(slots)] = self.counters[WRITTEN]
        if self.is_pinned:
            # the next write takes the same slots, which are now the last free ones
            self.counters[[FREE_HEAD, FREE_TAIL]] -= len(slots)
            queue = self.counters[FREE_HEAD] + torch.arange(len(slots), device="cpu")
            self.free[queue % self.num_slots] = torch.from_numpy(slots).to(self.free.dtype)
        elif len(slots):
            self._restart_ring(size, int(slots[0]))


class TableView:
    """What draws and updates read of event tables, on the device of the storage.

    On the CPU these are the arrays of the tables. On an accelerator they are copies, to which changes are sent without
    waiting for the device.

    Args:
        tables: the tables.
        device: the device.
    """

    def __init__(self, tables: EventTables, device: torch.device):
        self._tables, self._device, self.is_copy = tables, device, device.type != "cpu"
        self._sources = tables.slot_at, tables.position_of, tables.counts
        self._arrays = [array.to(device, non_blocking=True) for array in self._sources]
        self.slot_at, self.position_of, self.counts = self._arrays
        self.begins = tables.begins.to(device, non_blocking=True)
        # changes are sent one by one
        self.journal = self.begins[:2].view(1, 2) if self.is_copy else tables.journal
        self.views = Views(self.slot_at, self.position_of, self.counts, self.journal)

    def send(self) -> None:
        """Send all arrays to the device."""
        if self.is_copy:
            for own, source in zip(self._arrays, self._sources, strict=True):
                own.copy_(source, non_blocking=True)

    def changes(self, seen: int) -> Tensor:
        """Positions that changed since the counter of changes was ``seen``, and the slots that moved, int64 [n, 2].

        They are on the device, and the device knows what is at the positions now.
        """
        journal, end = self._tables.journal, int(self._tables.counters[CHANGES])
        changes = journal[torch.arange(seen, end, device="cpu") % len(journal)].to(torch.int64)
        if self.is_copy:
            position, slot = changes.unbind(1)
            now = changes, self._tables.slot_at[position], self._tables.position_of[:, slot]
            changes, slot_at, position_of = (each.to(self._device, non_blocking=True) for each in now)
            self.slot_at.index_copy_(0, changes[:, 0], slot_at)
            self.position_of.index_copy_(1, changes[:, 1], position_of)
            self.counts.copy_(self._tables.counts, non_blocking=True)
        return changes

    def positions(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each table, negative if it is not there; int64 [tables, n]."""
        listed = self.find(slots).to(torch.int64)
        return torch.cat([slots.unsqueeze(0), listed]) if self._tables.first else listed

    def find(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each list, [lists, n]; in a ring, the default table is no list."""
        if not is_traced():
            return self.position_of.index_select(1, slots)
        rows = torch.arange(len(self.position_of), device=self._device).unsqueeze(1) * self.position_of.shape[1]
        return gather_in_bounds(self.position_of.view(-1), (rows + slots).view(-1)).view(rows.shape[0], -1)
