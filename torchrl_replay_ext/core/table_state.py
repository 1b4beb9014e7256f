"""The tensors of event tables: the lists on the CPU, and a copy of what draws need on the device of the storage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced


class Listener(Protocol):
    """An object that is notified when entries of the lists change. All tensors are on the device of the storage."""

    def on_insert(self, positions: Tensor, slots: Tensor) -> None:
        """``slots`` [n], distinct, were inserted at ``positions`` [n]."""
        ...

    def on_remove(self, positions: Tensor, slots: Tensor, distinct: Tensor) -> None:
        """``slots`` [n] were removed from ``positions`` [n]; ``distinct`` [k]: the same slots without duplicates."""
        ...

    def on_settled(self) -> None:
        """The change that the last notifications belong to is complete."""
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

    def notify(self, event: Literal["on_insert", "on_remove", "on_settled", "on_relayout"], *arguments: Tensor) -> None:
        """Call the method ``event`` of each listener."""
        for listener in self:
            getattr(listener, event)(*arguments)

    def __getstate__(self) -> list[Listener]:
        return list(self)

    def __setstate__(self, state: list[Listener]) -> None:
        self._references = [weakref.ref(listener) for listener in state]


class TableState:
    """The tensors of all lists of :class:`~torchrl_replay_ext.core.event_tables.EventTables`.

    Only code on the CPU changes the lists, so their tensors (``listed_slots``, ``places``, ``ends``, ...) are on the
    CPU, and a change needs no read from an accelerator. Processes share these tensors; they are changed in place,
    through NumPy views that are created for each change, because sharing a tensor moves its memory.

    Draws and priority updates read ``slots_on_device``, ``places_on_device`` and ``counts``. On the CPU these are the
    tensors of the lists themselves. On an accelerator they are copies, to which each change is sent without waiting for
    the device.

    Args:
        positions: number of positions. The last one, ``nowhere``, belongs to no list.
        num_slots: number of slots.
        capacities: κ of each table.
        first: number of the first table that is a list.
        device: device of the storage.
        listeners: the objects to notify of changes.
    """

    def __init__(
        self,
        positions: int,
        num_slots: int,
        capacities: list[int],
        *,
        first: int,
        device: torch.device,
        listeners: Listeners,
    ):
        self.nowhere = positions - 1
        self.first, self.device, self._listeners = first, device, listeners
        wide, count = torch.int32 if positions <= 2**31 else torch.int64, len(capacities)
        self.listed_slots = torch.zeros(positions, dtype=wide, device="cpu")
        if first:
            self.listed_slots[:num_slots] = torch.arange(num_slots, device="cpu")
        # the position of each slot in each list
        self.places = torch.full((count - first, num_slots), self.nowhere, dtype=wide, device="cpu")
        # head, tail and count of each list, see EventList; of the default table of a ring only the count is used
        self.ends = torch.zeros(3, count, dtype=torch.int64, device="cpu")
        self.capacity = torch.tensor(capacities, dtype=torch.int64, device="cpu")
        self.newest = torch.full((count,), -1, dtype=torch.int64, device="cpu")
        self.ordered = torch.ones(count, dtype=torch.bool, device="cpu")
        self._copy()

    @property
    def _has_copy(self) -> bool:
        return self.device.type != "cpu"

    def _copy(self) -> None:
        self.slots_on_device = self.listed_slots.to(self.device, non_blocking=True)
        self.places_on_device = self.places.to(self.device, non_blocking=True)
        self.counts = self.ends[2].to(self.device, non_blocking=True)

    def move(self, device: torch.device) -> None:
        """Let draws read from another device."""
        if device != self.device:
            self.device = device
            self._copy()

    def clear(self) -> None:
        """Empty all lists."""
        self.ends.zero_()
        self.places.fill_(self.nowhere)
        self.newest.fill_(-1)
        self.ordered.fill_(True)
        self.send()

    # --- reading, on the device of the storage

    def find(self, slots: Tensor) -> Tensor:
        """Position of each of ``slots`` [n] in each list, ``nowhere`` if it is not there; [lists, n]."""
        if not is_traced():
            return self.places_on_device.index_select(1, slots)
        rows = (
            torch.arange(len(self.places_on_device), device=self.device).unsqueeze(1) * self.places_on_device.shape[1]
        )
        return gather_in_bounds(self.places_on_device.view(-1), (rows + slots).view(-1)).view(rows.shape[0], -1)

    # --- changes

    def on_device(self, values: np.ndarray) -> Tensor:
        """A tensor with ``values`` on the device of the storage."""
        tensor = torch.from_numpy(values)
        return tensor.to(self.device, non_blocking=True) if self._has_copy else tensor

    def send(self) -> None:
        """Send the content of all lists to the device."""
        if self._has_copy:
            self.slots_on_device.copy_(self.listed_slots, non_blocking=True)
            self.places_on_device.copy_(self.places, non_blocking=True)
            self.send_counts()

    def send_counts(self) -> None:
        """Send the number of entries of each table to the device."""
        if self._has_copy:
            self.counts.copy_(self.ends[2], non_blocking=True)

    def inserted(self, row: int, positions: np.ndarray, slots: np.ndarray) -> None:
        """Announce that list ``row`` now holds ``slots`` [n], distinct, at ``positions`` [n]."""
        moved_to, moved = self.on_device(positions), self.on_device(slots)
        if self._has_copy:
            self.slots_on_device.index_copy_(0, moved_to, moved.to(self.slots_on_device.dtype))
            self.places_on_device[row].index_copy_(0, moved, moved_to.to(self.places_on_device.dtype))
            self.send_counts()
        self._listeners.notify("on_insert", moved_to, moved)

    def removed(self, row: int, positions: np.ndarray, slots: np.ndarray) -> None:
        """Announce that ``slots`` [n], distinct, left list ``row``, where they were at ``positions`` [n]."""
        left = self.on_device(slots)
        if self._has_copy:
            self.places_on_device[row].index_fill_(0, left, self.nowhere)
            self.send_counts()
        self._listeners.notify("on_remove", self.on_device(positions), left, left)

    def removed_from_all(self, positions: np.ndarray, slots: np.ndarray, distinct: np.ndarray) -> None:
        """Announce that ``slots`` [n] left all lists, where they were at ``positions`` [n].

        ``distinct`` [k]: the same slots without duplicates.
        """
        left = self.on_device(distinct)
        if self._has_copy:
            self.places_on_device.index_fill_(1, left, self.nowhere)
            self.send_counts()
        self._listeners.notify("on_remove", self.on_device(positions), self.on_device(slots), left)

    def moved(self, row: int, before: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Announce that ``slots`` [n], distinct, of list ``row`` are now at ``positions`` instead of ``before``."""
        left = self.on_device(slots)
        self._listeners.notify("on_remove", self.on_device(before), left, left)
        self.inserted(row, positions, slots)

    def check_valid(self) -> None:
        """Raise AssertionError if the device has other content than the lists."""
        pairs = (
            (self.slots_on_device, self.listed_slots),
            (self.places_on_device, self.places),
            (self.counts, self.ends[2]),
        )
        if not all(torch.equal(copy.cpu(), own) for copy, own in pairs):
            raise AssertionError("EventTables: the tensors for draws differ from the lists")

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        if not self._has_copy:
            # pickled views would become separate tensors
            for name in ("slots_on_device", "places_on_device", "counts"):
                del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self._has_copy:
            self._copy()
