"""Event tables: which transitions led to an event, in first-in-first-out lists over one storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced
from torchrl_replay_ext.core.event_spec import DEFAULT, EventSpec
from torchrl_replay_ext.core.free_list import FreeList

# The attribute of a storage by which a writer and a sampler that were built apart find their tables.
STORAGE_ATTRIBUTE = "_event_tables"

Retention = Literal["ring", "pinned"]


class Listener(Protocol):
    """Who wants to know what enters and leaves the tables."""

    def entered(self, positions: Tensor, slots: Tensor) -> None:
        """``slots`` [n] are now at ``positions`` [n]."""
        ...

    def left(self, positions: Tensor, slots: Tensor) -> None:
        """``slots`` [n] are no longer at ``positions`` [n]."""
        ...

    def lists_changed(self) -> None:
        """Entries may be anywhere else now."""
        ...


class EventTable:
    """One of :class:`EventTables`."""

    def __init__(self, tables: EventTables, number: int):
        self._tables, self._number = tables, number

    def __len__(self) -> int:
        return self._tables.size(self._number)

    def index(self) -> Tensor:
        """The slots of its transitions, oldest entry first; int64 [len], row-major in a storage of more dimensions."""
        return self._tables.index(self._number)

    @property
    def capacity(self) -> int:
        """κ, the largest number of transitions; may be lowered, and raised up to what it was at first."""
        return self._tables.capacity_of(self._number)

    @capacity.setter
    def capacity(self, value: float) -> None:
        self._tables.set_capacity(self._number, value)


class EventTables(Mapping[str, EventTable]):
    """The tables of SSET (Kompella et al. 2022, Algorithm 1): lists of indices into one storage.

    An :class:`~torchrl_replay_ext.EventTableWriter` fills them and an :class:`~torchrl_replay_ext.EventTableSampler`
    draws from them; hand the same object to both. (Where they are built apart, from a configuration or in a Ray actor,
    equal tables find together through the buffer's storage.) The table ``"default"`` is that of all transitions.

    An entry is the index of a transition, 12 bytes of memory with its place in the list, and 4 bytes per slot and table
    tell which slots are in which table. Each table is first-in-first-out. ``retention`` decides what happens to an
    entry when time has passed its transition:

    * ``"ring"``: the storage is a ring of N transitions, all of which are the default table. Entries die with their
      slot; dead entries do not count.
    * ``"pinned"``: what the authors run (Reverb): the default table is the newest κ_0 transitions, and a transition is
      kept as long as any table holds it, so that rare events are not forgotten. The storage needs Σκ slots, flat; it
      never holds more transitions than that.

    Args:
        specs: the events.
        capacity: κ of each table, in transitions; of ``"default"`` too, but only if ``retention="pinned"``.
        retention: ``"ring"`` (default) or ``"pinned"``.

    Raises:
        ValueError: if names or capacities do not fit together.
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
        if isinstance(specs, EventSpec) or not isinstance(capacity, Mapping):
            raise TypeError(
                "EventTables: specs must be a list of EventSpec, and capacity a dict with a number for each table."
            )
        specs = tuple(specs)
        if not specs or not all(isinstance(spec, EventSpec) for spec in specs):
            raise ValueError("EventTables: specs must be a list of at least one EventSpec.")
        if retention not in ("ring", "pinned"):
            raise ValueError(f"EventTables(retention={retention!r}): retention must be 'ring' or 'pinned'.")
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ValueError(f"EventTables: two events have the same name among {names}.")
        self.specs = specs
        self.retention = retention
        self.names = list(dict.fromkeys([DEFAULT, *(spec.table or spec.name for spec in specs)]))
        self._pinned = retention == "pinned"
        expected = set(self.names) if self._pinned else set(self.names) - {DEFAULT}
        if DEFAULT in capacity and not self._pinned:
            raise ValueError(
                "EventTables: the default table of retention='ring' is the whole storage, it has no capacity of its "
                "own; leave 'default' out, or use retention='pinned'."
            )
        if set(capacity) != expected:
            raise ValueError(f"EventTables: capacity names {sorted(capacity)}, the tables are {sorted(expected)}.")
        for name, value in capacity.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"EventTables(capacity={{{name!r}: {value!r}}}): a capacity must be an integer >= 1.")
        longest = max(specs, key=lambda spec: spec.history)
        if self._pinned and longest.history > capacity[DEFAULT]:
            raise ValueError(
                f"EventTables: EventSpec({longest.name!r}) has history={longest.history}, more than the "
                f"{capacity[DEFAULT]} transitions that the default table keeps."
            )
        self._max_capacity = [capacity.get(name, 0) for name in self.names]
        self.num_slots = 0
        self._listeners: list[weakref.ref[Listener]] = []
        # whether the lists are being changed, by any process; and how many changes by this one are nested
        self._changing = torch.zeros((), dtype=torch.bool)
        self._depth = 0

    # The tables that are lists: in a ring the default table is not.
    @property
    def _first(self) -> int:
        return 0 if self._pinned else 1

    def table_of(self, spec: EventSpec) -> int:
        """The number of the table that ``spec`` fills."""
        return self.names.index(spec.table or spec.name)

    def regions(self, num_slots: int) -> list[int]:
        """Where each table's positions begin, among those of all, for a storage of ``num_slots``; the end is last."""
        # a list needs more positions than entries where they may die in its midst
        lengths = [capacity * (1 if self._pinned else 2) for capacity in self._max_capacity]
        if not self._pinned:
            lengths[0] = num_slots
        begins = [0]
        for length in lengths:
            begins.append(begins[-1] + length)
        return begins

    def allocate(self, num_slots: int, device: torch.device) -> None:
        """Make the lists for a storage of ``num_slots``, once.

        Raises:
            ValueError: if the storage is too small, or they were made for another one.
        """
        if self.num_slots == num_slots:
            self._move(device)
            return
        self.check(num_slots)
        if self.num_written:
            raise ValueError(
                f"EventTables: they are in use with a storage of {self.num_slots} slots, and cannot serve one of "
                f"{num_slots} too; give each buffer its own."
            )
        self.num_slots, self.device = num_slots, device
        self._begins = self.regions(num_slots)
        self.nowhere = self._begins[-1]
        wide = torch.int32 if self.nowhere < 2**31 else torch.int64
        count = len(self.names)
        # one position behind all, which holds nothing
        self.slot_at = torch.zeros(self.nowhere + 1, dtype=wide, device=device)
        # [tables that are lists, slots]
        self._place = torch.full((count - self._first, num_slots), self.nowhere, dtype=wide, device=device)
        # entries written and passed so far, and alive
        self._lists = torch.zeros(3, count, dtype=torch.int64, device=device)
        self._rows()
        self._capacity = torch.tensor(self._max_capacity, dtype=torch.int64, device=device)
        # the number of the newest transition in each list, and whether the list is in the order of their numbers
        self._newest = torch.full((count,), -1, dtype=torch.int64, device=device)
        self._ordered = torch.ones(count, dtype=torch.bool, device=device)
        # transitions written so far
        self._written = torch.zeros((), dtype=torch.int64, device=device)
        # in a ring, the slot to be written next
        self._next = torch.zeros((), dtype=torch.int64, device=device)
        # how often everything was replaced; writers in other processes see it here
        self._resets = torch.zeros((), dtype=torch.int64, device=device)
        self._free = FreeList(num_slots, device=device) if self._pinned else None
        if not self._pinned:
            self.slot_at[:num_slots] = torch.arange(num_slots, device=device)

    def check(self, num_slots: int) -> None:
        """ValueError if a storage of ``num_slots`` is too small."""
        needed = sum(self._max_capacity)
        if self._pinned and num_slots < needed:
            raise ValueError(
                f"EventTables(retention='pinned'): the storage has {num_slots} slots, the capacities add up to "
                f"{needed}; use LazyTensorStorage({needed})."
            )

    def _rows(self) -> None:
        self._head, self._tail, self.counts = self._lists.unbind()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_listeners": self._heard(), "_depth": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._listeners = [weakref.ref(listener) for listener in state["_listeners"]]
        if self.num_slots:
            self._rows()

    def attach(self, listener: Listener) -> None:
        """Tell ``listener`` from now on what enters and leaves the lists."""
        if all(other is not listener for other in self._heard()):
            self._listeners.append(weakref.ref(listener))

    def _heard(self) -> list[Listener]:
        found = [reference() for reference in self._listeners]
        return [listener for listener in found if listener is not None]

    def _entered(self, positions: Tensor, slots: Tensor) -> None:
        for listener in self._heard():
            listener.entered(positions, slots)

    def _left(self, positions: Tensor, slots: Tensor) -> None:
        for listener in self._heard():
            listener.left(positions, slots)

    def runs(self) -> list[tuple[int, int, int, int]] | None:
        """Of each table, where its positions begin, how many there are, the place of its oldest entry and its size.

        Its entries are at that place and after it, cyclically; None where some of them are dead.
        """
        heads, tails, counts = self._lists.tolist()
        if not self._pinned:
            tails[0], heads[0] = 0, counts[0]
        if any(head - tail != count for head, tail, count in zip(heads, tails, counts, strict=True)):
            return None
        begins, ends = self._begins[:-1], self._begins[1:]
        lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
        return [*zip(begins, lengths, tails, counts, strict=True)]

    def _move(self, device: torch.device) -> None:
        if self.device != device:
            self.device = device
            for part in (self, self._free):
                for name, value in list(vars(part).items()) if part is not None else ():
                    if isinstance(value, Tensor) and name != "_changing":
                        setattr(part, name, value.to(device))
            self._rows()

    def tensors(self) -> dict[str, Tensor]:
        """The state, to be saved and restored in place."""
        names = ["slot_at", "_place", "_lists", "_capacity", "_newest", "_ordered", "_written", "_next"]
        state = {name.lstrip("_"): getattr(self, name) for name in names}
        return state if self._free is None else state | self._free.tensors("free")

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore :meth:`tensors`, in place."""
        for key, tensor in self.tensors().items():
            tensor.copy_(state[key])
        self._changing.fill_(False)
        self._resets.add_(1)

    def clear(self) -> None:
        """Empty all tables."""
        if not self.num_slots:
            return
        self._place.fill_(self.nowhere)
        self._lists.zero_()
        self._written.zero_()
        self._next.zero_()
        self._newest.fill_(-1)
        self._ordered.fill_(True)
        self._changing.fill_(False)
        self._resets.add_(1)
        if self._free is not None:
            self._free.clear_()

    @contextmanager
    def change(self) -> Iterator[None]:
        """What is left before its end leaves lists of which parts contradict each other; see :meth:`mend`."""
        outer = bool(self._changing)
        self._changing.fill_(True)
        self._depth += 1
        try:
            yield
            self._changing.fill_(outer)
        finally:
            self._depth -= 1

    def settle(self) -> None:
        """The change that goes on has been taken back: there is nothing to mend."""
        self._changing.fill_(False)

    def mend(self) -> None:
        """Make the lists anew if a change of them broke off: by Ctrl-C, or since its process was killed.

        What was in a table stays there. No episode goes on: what was written last of it does not enter with what comes.
        """
        if not self._changing or self._depth:
            return
        if self.num_slots:
            for number in range(self._first, len(self.names)):
                place = self._place[number - self._first]
                held = (place != self.nowhere).nonzero().squeeze(1)
                begin, end = self._begins[number : number + 2]
                passed = (place[held].to(torch.int64) - begin - self._tail[number]) % (end - begin)
                held = held[passed.argsort()]
                place[held] = self.nowhere
                held = held[-self.capacity_of(number) :]
                self._lay_out(number, held)
                self.counts[number] = len(held)
                if not self._pinned:
                    age = (held - self._next) % self.num_slots
                    self._ordered[number] = bool((age[1:] > age[:-1]).all())
            if self._free is not None:
                everything = torch.arange(self.num_slots, device=self.device)
                self._free.refill_(~self.holds(everything).any(0))
            self._resets.add_(1)
        for listener in self._heard():
            listener.lists_changed()
        self._changing.fill_(False)

    def __getitem__(self, name: str) -> EventTable:
        if name not in self.names:
            raise KeyError(f"EventTables: there is no table {name!r}, only {self.names}.")
        return EventTable(self, self.names.index(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def fits(self, other: EventTables) -> bool:
        """Whether ``other`` was built from the same events, capacities and retention; functions are not compared."""

        def described(tables: EventTables) -> list[Any]:
            specs = [(spec.name, spec.history, spec.table, spec.context) for spec in tables.specs]
            conditions = [None if callable(spec.condition) else spec.condition for spec in tables.specs]
            return [specs, conditions, tables._max_capacity, tables.retention]

        return described(self) == described(other)

    def sizes(self) -> dict[str, int]:
        """The number of transitions in each table."""
        return {name: len(self[name]) for name in self.names}

    def size(self, number: int) -> int:
        """The number of transitions in a table."""
        return int(self.counts[number]) if self.num_slots else 0

    def capacity_of(self, number: int) -> int:
        """κ of a table."""
        if number < self._first:
            return self.num_slots
        return int(self._capacity[number]) if self.num_slots else self._max_capacity[number]

    def set_capacity(self, number: int, value: float) -> None:
        """Change κ of a table, and drop its oldest entries if need be."""
        name, most = self.names[number], self._max_capacity[number]
        if number < self._first or not self.num_slots:
            raise ValueError(f"EventTables[{name!r}].capacity: a list is needed, in a buffer that was written to.")
        if isinstance(value, bool) or not 1 <= value <= most:
            raise ValueError(
                f"EventTables[{name!r}].capacity={value}: must be in [1, {most}]; memory is set aside for the capacity "
                "given at first."
            )
        with self.change():
            self._capacity[number] = int(value)
            gone = self._evict(number, self.size(number) - int(value))
            self._release(gone)

    def index(self, number: int) -> Tensor:
        """The slots of a table, oldest entry first, int64."""
        if not self.num_slots:
            return torch.zeros(0, dtype=torch.int64)
        if number < self._first:
            size, count = self.num_slots, self.size(0)
            return (torch.arange(count, device=self.device) + (int(self._next) if count == size else 0)) % size
        positions = self._between(number, int(self._tail[number]), int(self._head[number]))
        slots = self.slot_at[positions].to(torch.int64)
        return slots[self._place[number - self._first, slots] == positions]

    def positions(self, slots: Tensor) -> Tensor:
        """Where ``slots`` [n] are in each table, ``nowhere`` if they are not; int64 [tables, n]."""
        listed = self._listed(slots).to(torch.int64)
        return listed if self._pinned else torch.cat([slots.unsqueeze(0), listed])

    def _listed(self, slots: Tensor) -> Tensor:
        """:meth:`positions` in the tables that are lists."""
        if not is_traced():
            return self._place.index_select(1, slots)
        rows = torch.arange(len(self._place), device=self.device).unsqueeze(1) * self.num_slots
        return gather_in_bounds(self._place.view(-1), (rows + slots).view(-1)).view(rows.shape[0], -1)

    def holds(self, slots: Tensor) -> Tensor:
        """Which tables hold each of ``slots`` [n], of those that are lists (in a ring: all but the default); bool."""
        return self._listed(slots) != self.nowhere

    def share(self, slots: Tensor, of_table: list[float]) -> Tensor:
        """Sum of ``of_table`` over the tables that hold each of ``slots`` [n], outside graphs; float32 [n]."""
        result = torch.tensor(of_table[self._first :], device=self.device) @ self.holds(slots).to(torch.float32)
        return result if self._pinned else result.add_(of_table[0])

    def _between(self, number: int, first: int, last: int) -> Tensor:
        begin, end = self._begins[number : number + 2]
        return begin + torch.arange(first, last, device=self.device) % (end - begin)

    def written(self, slots: Tensor) -> None:
        """Note that ``slots`` [n] were written, in turn."""
        self._written.add_(len(slots))
        if not self._pinned:
            self._next.copy_((slots[-1] + 1) % self.num_slots)
            self.counts[0] = torch.maximum(self.counts[0], slots.max() + 1)

    def skipped(self, slot: int) -> Tensor:
        """In a ring, the slots from where the next write was expected up to ``slot``; int64 [n]."""
        if not self.num_written:
            return torch.zeros(0, dtype=torch.int64)
        expected = int(self._next)
        behind = torch.arange((slot - expected) % self.num_slots, device=self.device)
        return (expected + behind) % self.num_slots

    def adopt(self, count: int, last: int | Tensor | None) -> None:
        """Take in that a storage held ``count`` transitions before anything was written; no events are known of them.

        Args:
            count: the storage's length.
            last: where it was written last; None if that is not known.
        """
        if self.num_written or not count:
            return
        if self._pinned:
            raise ValueError("EventTables(retention='pinned'): the storage must be empty at first.")
        self._written.fill_(self.num_slots)
        self._next.fill_(0 if last is None else (int(last) + 1) % self.num_slots)
        self.counts[0] = count

    def overwrite(self, slots: Tensor, *, in_turn: bool = True) -> None:
        """Entries of ``slots`` [n], each named once, die: their transitions were overwritten, in turn or out of it."""
        positions = self._listed(slots)
        alive = positions != self.nowhere
        if not bool(alive.any()):
            return
        with self.change():
            deaths = alive.sum(1)
            self._place[:, slots] = self.nowhere
            self.counts[self._first :] -= deaths
            # in lists in the order of time, what dies is what is oldest
            if in_turn:
                self._tail[self._first :] += deaths * self._ordered[self._first :]
            self._left(positions[alive].to(torch.int64), slots.expand_as(positions)[alive])

    def _evict(self, number: int, count: int) -> Tensor:
        """Drop the ``count`` oldest entries of a table and return their slots."""
        if count <= 0:
            return torch.zeros(0, dtype=torch.int64, device=self.device)
        tail = int(self._tail[number])
        dead = int(self._head[number]) - tail - self.size(number)
        positions = self._between(number, tail, tail + dead + count)
        slots = self.slot_at[positions].to(torch.int64)
        place = self._place[number - self._first]
        alive = (place[slots] == positions).nonzero().squeeze(1)[:count]
        positions, slots = positions[alive], slots[alive]
        place[slots] = self.nowhere
        self._tail[number] = tail + int(alive[-1]) + 1
        self.counts[number] -= count
        self._left(positions, slots)
        return slots

    def room(self, number: int, count: int) -> Tensor:
        """Make room for ``count`` new entries in a table; returns the slots of those that had to go."""
        capacity = self.capacity_of(number)
        return self._evict(number, self.size(number) + min(count, capacity) - capacity)

    def insert(self, number: int, slots: Tensor, numbers: Tensor) -> None:
        """Add ``slots`` [n], oldest first, to a table that does not hold them; the oldest entries give way.

        Args:
            number: of the table.
            slots: int64 [n], all different.
            numbers: of the transitions in them, int64 [n], counted as they are written.
        """
        capacity = self.capacity_of(number)
        slots, numbers = slots[-capacity:], numbers[-capacity:]
        count = len(slots)
        self.room(number, count)
        size = self.size(number)
        begin, end = self._begins[number : number + 2]
        if not size:
            self._tail[number] = self._head[number]
            self._newest[number], self._ordered[number] = -1, True
        elif int(self._head[number] - self._tail[number]) + count > end - begin:
            self._compact(number)
        head = int(self._head[number])
        positions = self._between(number, head, head + count)
        self.slot_at[positions] = slots.to(self.slot_at.dtype)
        self._place[number - self._first, slots] = positions.to(self._place.dtype)
        self._head[number] = head + count
        self.counts[number] += count
        in_order = self.follows(number, numbers)
        self._ordered[number] &= in_order
        self._newest[number] = torch.maximum(self._newest[number], numbers.max())
        self._entered(positions, slots)

    def follows(self, number: int, numbers: Tensor) -> bool:
        """Whether a table is in the order of its transitions, and will be when ``numbers`` are added."""
        previous = torch.cat([self._newest[number : number + 1], numbers[:-1]])
        return bool(self._ordered[number] & (numbers > previous).all())

    def _compact(self, number: int) -> None:
        """Move the living entries of a table together, at the beginning of its positions."""
        slots = self.index(number)
        old = self._place[number - self._first, slots].to(torch.int64)
        self._left(old, slots)
        self._entered(self._lay_out(number, slots), slots)

    def _lay_out(self, number: int, slots: Tensor) -> Tensor:
        """Put a table's entries, ``slots`` [n], oldest first, at the beginning of its positions; returns these, [n]."""
        positions = self._between(number, 0, len(slots))
        self.slot_at[positions] = slots.to(self.slot_at.dtype)
        self._place[number - self._first, slots] = positions.to(self._place.dtype)
        self._tail[number], self._head[number] = 0, len(slots)
        return positions

    def _release(self, slots: Tensor, but: Tensor | None = None) -> None:
        """Give back those of ``slots`` that no table holds any more, and that are not among ``but``."""
        if self._free is None or not len(slots):
            return
        slots = slots.unique()
        unused = ~self.holds(slots).any(0)
        if but is not None:
            unused &= ~torch.isin(slots, but)
        self._free.push(slots, unused)

    def take(self, count: int, entering: Mapping[int, Tensor]) -> Tensor:
        """Slots for ``count`` new transitions of pinned tables, and room for them and what else enters the lists.

        Args:
            count: of new transitions, at most the default table's capacity.
            entering: for each table, the slots written before that will enter it, int64; and -1 for new ones.
        """
        assert self._free is not None
        gone = [self.room(0, count), *(self.room(number, len(slots)) for number, slots in entering.items())]
        self._release(torch.cat(gone), torch.cat([*entering.values(), gone[0][:0]]))
        return self._free.pop(torch.ones(count, dtype=torch.bool, device=self.device))

    def give_back(self, slots: Tensor) -> None:
        """Free ``slots`` [n], which were taken and could not be written; no table holds them."""
        assert self._free is not None
        self._free.push(slots, torch.ones(len(slots), dtype=torch.bool, device=self.device))

    def check_valid(self) -> None:
        """Raise AssertionError if lists, places, counts and free slots contradict each other. O(slots)."""
        if not self.num_slots:
            return
        for number in range(self._first, len(self.names)):
            name, place = self.names[number], self._place[number - self._first].to(torch.int64)
            held = (place != self.nowhere).nonzero().squeeze(1)
            if len(held) != self.size(number) or len(held) > self.capacity_of(number):
                raise AssertionError(f"EventTables[{name!r}]: the count of entries is wrong")
            if not torch.equal(self.slot_at[place[held]].to(torch.int64), held):
                raise AssertionError(f"EventTables[{name!r}]: an entry is of another slot")
            if not torch.equal(self.index(number).sort().values, held):
                raise AssertionError(f"EventTables[{name!r}]: an entry lies outside the list")
        if self._free is not None:
            everything = torch.arange(self.num_slots, device=self.device)
            if not torch.equal(self._free.free(), ~self.holds(everything).any(0)):
                raise AssertionError("EventTables: the free slots are wrong")

    @property
    def num_resets(self) -> int:
        """How often everything was replaced."""
        return int(self._resets) if self.num_slots else 0

    @property
    def num_written(self) -> int:
        """Transitions written so far."""
        return int(self._written) if self.num_slots else 0

    @property
    def oldest(self) -> int:
        """The number of the oldest transition that the default table may hold."""
        return self.num_written - (self.size(0) if self._pinned else self.num_slots)
