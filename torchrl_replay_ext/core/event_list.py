"""A first-in-first-out list of slots."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from torchrl_replay_ext.core.lanes import shifted


class Listener(Protocol):
    """An object that is notified when entries of the lists change."""

    def on_insert(self, positions: Tensor, slots: Tensor) -> None:
        """``slots`` [n] were inserted at ``positions`` [n]."""
        ...

    def on_remove(self, positions: Tensor, slots: Tensor) -> None:
        """``slots`` [n] were removed from ``positions`` [n]."""
        ...

    def on_relayout(self) -> None:
        """The positions of all entries may have changed."""
        ...


class Listeners:
    """The objects to notify, held by weak references."""

    def __init__(self):
        self._references: list[weakref.ref[Listener]] = []

    def __iter__(self) -> Iterator[Listener]:
        return iter([found for found in (reference() for reference in self._references) if found is not None])

    def attach(self, listener: Listener) -> None:
        """Notify ``listener`` of later events."""
        if all(other is not listener for other in self):
            self._references.append(weakref.ref(listener))

    def notify(self, event: Literal["on_insert", "on_remove", "on_relayout"], *arguments: Tensor) -> None:
        """Call the method ``event`` of each listener."""
        for listener in self:
            getattr(listener, event)(*arguments)

    def __getstate__(self) -> list[Listener]:
        return list(self)

    def __setstate__(self, state: list[Listener]) -> None:
        self._references = [weakref.ref(listener) for listener in state]


@dataclass(eq=False)
class EventList:
    """A first-in-first-out list of slots, in a ring of positions.

    The list consists of entries ``tail`` to ``head - 1``; entry k is at position ``begin + k % (end - begin)``. If the
    slot of an entry is overwritten, the entry leaves a gap at its position. Gaps are closed when no free position is
    left.

    All tensors are views of the state of :class:`~torchrl_replay_ext.core.event_tables.EventTables`, which also
    modifies them.

    Args:
        begin: first position.
        end: the position after the last one.
        nowhere: the position of a slot that is not in the list.
        slot_at: the slot at each position, int [positions]; shared by all lists.
        place: the position of each slot, int [slots].
        head: number of the next entry, int64 [].
        tail: number of the oldest entry, int64 [].
        count: number of entries, gaps not included, int64 [].
        capacity: upper limit of ``count``, int64 [].
        newest: the largest transition number inserted since the list was last empty; -1 if none, int64 [].
        ordered: True if the entries are sorted by transition number, bool [].
        listeners: the objects to notify.
    """

    begin: int
    end: int
    nowhere: int
    slot_at: Tensor
    place: Tensor
    head: Tensor
    tail: Tensor
    count: Tensor
    capacity: Tensor
    newest: Tensor
    ordered: Tensor
    listeners: Listeners

    def __len__(self) -> int:
        return int(self.count)

    def _positions(self, first: int, last: int) -> Tensor:
        """The positions of entries ``first`` to ``last - 1``."""
        return self.begin + torch.arange(first, last, device=self.slot_at.device) % (self.end - self.begin)

    def slots(self) -> Tensor:
        """The slots in the list, oldest entry first; int64 [count]."""
        positions = self._positions(int(self.tail), int(self.head))
        slots = self.slot_at[positions].to(torch.int64)
        return slots[self.place[slots] == positions]

    def evict(self, count: int) -> Tensor:
        """Remove the ``count`` oldest entries and return their slots, int64 [count]."""
        if count <= 0:
            return torch.zeros(0, dtype=torch.int64, device=self.slot_at.device)
        tail = int(self.tail)
        gaps = int(self.head) - tail - len(self)
        positions = self._positions(tail, tail + gaps + count)
        slots = self.slot_at[positions].to(torch.int64)
        kept = (self.place[slots] == positions).nonzero().squeeze(1)[:count]
        positions, slots = positions[kept], slots[kept]
        self.place[slots] = self.nowhere
        self.tail.fill_(tail + int(kept[-1]) + 1)
        self.count.sub_(count)
        self.listeners.notify("on_remove", positions, slots)
        return slots

    def make_room(self, count: int) -> Tensor:
        """Remove the oldest entries to make room for ``count`` more; returns the slots of the removed entries."""
        capacity = int(self.capacity)
        return self.evict(len(self) + min(count, capacity) - capacity)

    def insert(self, slots: Tensor, numbers: Tensor) -> None:
        """Add entries that are not in the list. If there is no room, remove the oldest entries.

        Args:
            slots: int64 [n], distinct, oldest first. If n exceeds the capacity, the oldest ones are left out.
            numbers: transition numbers, int64 [n].
        """
        capacity = int(self.capacity)
        slots, numbers = slots[-capacity:], numbers[-capacity:]
        count = len(slots)
        self.make_room(count)
        if not len(self):
            self.tail.copy_(self.head)
            self.newest.fill_(-1)
            self.ordered.fill_(True)
        elif int(self.head - self.tail) + count > self.end - self.begin:
            self._compact()
        positions = self._place_at(int(self.head), slots)
        self.head.add_(count)
        self.count.add_(count)
        self.ordered.logical_and_(self._follow(numbers))
        self.newest.copy_(torch.maximum(self.newest, numbers.max()))
        self.listeners.notify("on_insert", positions, slots)

    def stays_ordered(self, numbers: Tensor) -> bool:
        """True if the list is ordered and would stay ordered after inserting transitions ``numbers`` [n]."""
        return bool(self.ordered & self._follow(numbers))

    def _follow(self, numbers: Tensor) -> Tensor:
        return (numbers > shifted(numbers, self.newest)).all()

    def _place_at(self, first: int, slots: Tensor) -> Tensor:
        """Store ``slots`` [n] as entries ``first`` to ``first + n - 1``; returns their positions."""
        positions = self._positions(first, first + len(slots))
        self.slot_at[positions] = slots.to(self.slot_at.dtype)
        self.place[slots] = positions.to(self.place.dtype)
        return positions

    def _lay_out(self, slots: Tensor) -> Tensor:
        """Make ``slots`` [n], oldest first, the only entries, starting at ``begin``; returns their positions."""
        positions = self._place_at(0, slots)
        self.tail.zero_()
        self.head.fill_(len(slots))
        return positions

    def _compact(self) -> None:
        slots = self.slots()
        self.listeners.notify("on_remove", self.place[slots].to(torch.int64), slots)
        self.listeners.notify("on_insert", self._lay_out(slots), slots)

    def rebuild(self) -> Tensor:
        """Restore the list from ``place`` after an interrupted change. Listeners are not notified.

        Returns:
            The slots in the list, oldest entry first; int64 [count].
        """
        held = (self.place != self.nowhere).nonzero().squeeze(1)
        passed = (self.place[held].to(torch.int64) - self.begin - self.tail) % (self.end - self.begin)
        held = held[passed.argsort()]
        self.place[held] = self.nowhere
        held = held[-int(self.capacity) :]
        self._lay_out(held)
        self.count.fill_(len(held))
        return held

    def check_valid(self, name: str) -> None:
        """Raise AssertionError if positions, slots and count are inconsistent; ``name`` is the table in the message."""
        held = (self.place != self.nowhere).nonzero().squeeze(1)
        if len(held) != len(self) or len(held) > int(self.capacity):
            raise AssertionError(f"EventTables[{name!r}]: the number of entries is wrong or exceeds the capacity")
        if not torch.equal(self.slot_at[self.place[held].to(torch.int64)].to(torch.int64), held):
            raise AssertionError(f"EventTables[{name!r}]: a slot points to a position that holds another slot")
        if not torch.equal(self.slots().sort().values, held):
            raise AssertionError(f"EventTables[{name!r}]: a slot points to a position outside of the list")
