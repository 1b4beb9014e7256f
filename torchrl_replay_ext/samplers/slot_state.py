"""What a sampler does at a write: which slots are new, changed or empty, and which of its parts are told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import is_traced, outside_inference_mode, to_device
from torchrl_replay_ext.core.layout import Layout, as_index, out_of_range
from torchrl_replay_ext.core.slots import RingWrite, Slots, WriteObserver
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.samplers.rows import EpisodeReader, RowView, read_ahead


class Follower(WriteObserver):
    """State of another sampler that follows the writes to a sampler. It is saved with that one."""

    @abstractmethod
    def allocate(self, slots: Slots) -> None:
        """Allocate the state for the slots of that sampler."""


class SlotState(WriteObserver, ABC):
    """What a sampler knows of each slot, and the changes that writes to the buffer make.

    Subclasses define :meth:`allocate`, and ``write`` and ``remove`` of
    :class:`~torchrl_replay_ext.core.slots.WriteObserver`.

    Args:
        layout: the slots, as far as they are known.
        hyperparameters: by name.
        **priorities: arguments of :class:`~torchrl_replay_ext.core.slots.Slots`.
    """

    # the class that errors name
    owner = "SlotState"
    layout: Layout
    # writes, draws and priorities of the slots
    slots: Slots
    # further state that takes in each write before this object does; allocate() sets it
    parts: Sequence[WriteObserver] = ()
    # True if writes in a graph have the same effect as outside of it
    writes_in_graphs = True
    # names of the state that allocate() sets; True if the order of the writes matters to a part
    _saved_names: Sequence[str] = ()
    _is_ordered = False
    # True once rows were written, or those of the storage were taken in: then the storage holds no unknown rows
    _knows_storage = False

    def __init__(self, layout: Layout, hyperparameters: dict[str, Hyperparameter], **priorities: Any):
        self.hyperparameters, self._slots_arguments = hyperparameters, priorities
        self.followers: list[Follower] = []
        # what reads the episodes of rows, and may learn their number of streams from the storage
        self.episode_readers: list[EpisodeReader] = []
        self._set_up_state(layout)

    @abstractmethod
    def allocate(self, layout: Layout) -> None:
        """Allocate arrays for the slots of ``layout``, on its device.

        It is called again if the storage is another one than expected; no slot holds a transition then. Tensors and
        sum trees that become attributes here are saved, and must be changed in place afterwards.
        """

    @outside_inference_mode()
    def _set_up_state(self, layout: Layout) -> None:
        """Allocate all state for the slots of ``layout``."""
        self.layout = layout
        # on an accelerator the host finds the episodes of a write
        self._is_on_cpu = layout.device.type == "cpu"
        is_found_there = self._is_on_cpu or not self.episode_readers
        self.writes_in_graphs = type(self).writes_in_graphs and is_found_there
        for hyperparameter in self.hyperparameters.values():
            hyperparameter.to(layout.counters, layout.device)
        self.slots = Slots(layout, **self._slots_arguments)
        before = dict(vars(self))
        self.allocate(layout)
        new = {name: value for name, value in vars(self).items() if value is not before.get(name)}
        self._saved_names = [name for name, value in new.items() if isinstance(value, (Tensor, SumTree))]
        for follower in self.followers:
            follower.allocate(self.slots)
        # Parts may reject rows, and those before then remove them again. Sums of episodes lose only their oldest rows,
        # so they come after followers, which may reject rows.
        self._write_observers: list[WriteObserver] = [*self.followers, *self.parts, self]
        # those that read rows
        self._row_readers = [part for part in self._write_observers if type(part).write is not WriteObserver.write]
        self._is_ordered = any(part.needs_order for part in self._write_observers)

    def attach(self, follower: Follower, reader: EpisodeReader) -> None:
        """Add state that follows the writes, before the first one; it reads episodes with ``reader``."""
        if not self.slots.is_empty:
            raise RuntimeError(f"{self.owner}: this sampler belongs to another buffer; create one sampler for each.")
        self.followers.append(follower)
        self.episode_readers.append(reader)
        self._set_up_state(self.layout)

    # --- writes

    def _take_in_storage(self, storage: Storage, following: int) -> None:
        """Take in the rows that a storage held before, oldest first, as new transitions.

        Args:
            storage: the storage.
            following: the step that is written next, or -1 if it is unknown. In a full ring it is the oldest one.
        """
        self._knows_storage = True
        count, oldest = _torchrl.length(storage), max(following, 0)
        for part in self._write_observers:
            part.before_ingest(count, oldest * self.layout.slots_per_step)
        self._insert_rows(self.layout.slots_from(oldest if count == self.slots.size else 0, count), storage)
        if following >= 0 and self._is_ordered:
            self.slots.last_seen_step.fill_((following - 1) % self.layout.steps)

    def _apply_write(self, slots: Tensor, storage: Storage | None) -> None:
        """Apply a write of ``slots``, int64 [n], n > 0. On the CPU they can be read without waiting. Not for graphs.

        If the order of the rows matters, there are four cases: new rows that follow the last write; new rows after a
        gap, whose slots were lost and are removed; more new rows than slots, which replace everything; and stored rows
        that were changed in place, see :meth:`~torchrl_replay_ext.core.slots.Slots.is_rewrite`.

        Raises:
            KeyError, TypeError, ValueError: if a part rejects the rows. These slots are then empty.
            IndexError: if a slot is out of range.
        """
        layout = self.layout
        if not self._is_ordered:
            write = self.slots.locate(slots)
        else:
            seen, writer_next = self.slots.last_seen_step, _torchrl.next_step(storage)
            if self._is_on_cpu:
                write = self.slots.locate(slots, seen, writer_next)
            else:
                keys = [key for reader in self.episode_readers for key in reader.keys]
                there, index = to_device(slots, layout.device), as_index(slots)
                rows = index if isinstance(index, slice) else there
                numbers, columns = read_ahead(storage, rows, keys, slots, seen, writer_next)
                slots, write = there, self.slots.locate(*numbers)._replace(columns=columns)
        if write.smallest < 0 and len(layout.shape) == 1:
            # TensorDictMaxValueWriter returns -1 for transitions that it does not store
            slots = write.slots[write.slots >= 0]
            if len(slots):
                self._apply_write(slots, storage)
            return
        if write.smallest < 0 or write.largest >= self.slots.size:
            raise out_of_range(self.owner, write.smallest if write.smallest < 0 else write.largest, layout.shape)
        if slots.device != layout.device:
            slots = to_device(slots, layout.device)
            if not self._is_ordered:
                write = write._replace(slots_as_index=as_index(slots))
        is_first = not self._knows_storage and self.slots.is_empty
        self._knows_storage = True
        if is_first and storage is not None and _torchrl.length(storage) > slots.shape[0]:
            self._take_in_storage(storage, (write.last + 1) % layout.steps)
        elif self._is_ordered and self.slots.is_rewrite(slots, write):
            self._insert_rows(slots, storage, write, is_rewrite=True)
        else:
            self._append_rows(slots, write, storage)

    def _append_rows(self, slots: Tensor, write: RingWrite, storage: Storage | None) -> None:
        """Insert new rows, ``slots`` [n]. If n exceeds the number of slots, the first ones were overwritten."""
        layout, size = self.layout, self.slots.size
        if self._is_ordered:
            self._require_ring_order(write)
            if write.own_next not in (-1, write.first):
                lost = (write.first - write.own_next) % layout.steps
                self._remove_all(layout.slots_from(write.own_next, lost * layout.slots_per_step))
        if slots.shape[0] > size:
            # all earlier rows are overwritten, and also the first rows of this write
            for part in self._write_observers:
                part.before_full_overwrite()
            self._insert_rows(slots[-size:], storage)
        else:
            self._insert_rows(slots, storage, write)
        if self._is_ordered:
            # last, because the write may be rejected
            self.slots.last_seen_step.fill_(write.last)

    def _require_ring_order(self, write: RingWrite) -> None:
        """Raise ValueError if the writer does not fill one slot of the ring after the other."""
        is_ring = isinstance(write.slots_as_index, slice)
        is_ring = is_ring or torch.equal(write.slots, self.layout.slots_from(write.first, len(write.slots), "cpu"))
        if not is_ring or write.writer_next < 0:
            raise ValueError(
                f"{self.owner}: slots must be written one after the other, by a buffer with a round-robin writer, the "
                "default."
            )

    def _insert_rows(
        self, slots: Tensor, storage: Storage | None, write: RingWrite | None = None, *, is_rewrite: bool = False
    ) -> None:
        """Insert the transitions in ``slots`` [n].

        Args:
            slots: int64 [n].
            storage: the storage.
            write: where they lie in the ring. Default: None, unknown.
            is_rewrite: True if the rows were stored before and changed in place. Default: False.
        """
        if self.slots.within_buffer:
            self.slots.exclude(slots)
        rows: Any = None
        if self._row_readers:
            if write is None:
                is_read = self._is_ordered and not self._is_on_cpu and not is_traced()
                on_host, columns = (slots.cpu(), {}) if is_read else (slots, None)
                index = as_index(on_host)
            else:
                on_host, index, columns = write.slots, write.slots_as_index, write.columns
            rows = RowView(self.owner, storage, slots, index, self.slots.size, is_rewrite, on_host, columns)
        inserted: list[WriteObserver] = []
        try:
            for part in self._row_readers:
                part.write(slots, rows)
                inserted.append(part)
            self.slots.record(slots, stays=True)
        except BaseException as error:
            # a part that raises an error has not taken in the rows; one that Ctrl-C interrupts may have
            self._undo_write(slots, inserted if isinstance(error, Exception) else self._row_readers)
            raise

    def _undo_write(self, slots: Tensor, inserted: Sequence[WriteObserver]) -> None:
        """Empty ``slots`` [n] after an error: the rows before were overwritten, and those of the write are refused.

        ``inserted``: the parts that may have taken in the rows.
        """
        if is_traced():
            return
        before = slots[self.slots.generation_of(slots) > 0]
        for part in self._write_observers:
            rows = slots if part in inserted else before
            if rows.numel():
                part.remove(rows)
        if before.numel():
            self.slots.record(before, stays=False)

    def _remove_all(self, slots: Tensor) -> None:
        """Mark ``slots`` [n], without duplicates, as empty."""
        if slots.numel():
            self.slots.exclude(slots)
            for part in self._write_observers:
                part.remove(slots)
            self.slots.record(slots, stays=False)

    # --- what is saved

    def clear(self) -> None:
        """Remove all transitions."""
        if len(stored := self.slots.stored()):
            self.remove(stored)

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place. Default: the attributes that :meth:`allocate` has set."""
        saved = {name: vars(self)[name] for name in self._saved_names}
        return {
            f"own{name}" if name[0] == "_" else f"own_{name}": value.leaves if isinstance(value, SumTree) else value
            for name, value in saved.items()
        }

    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced. Default: the sums of trees among them."""
        for tree in self._trees():
            tree.rebuild_()

    def _trees(self) -> list[SumTree]:
        """The attributes that :meth:`allocate` has set and that are trees."""
        return [vars(self)[name] for name in self._saved_names if isinstance(vars(self)[name], SumTree)]

    def _all_tensors(self) -> dict[str, Tensor]:
        """The tensors of all parts."""
        return {
            name: tensor for part in (self.slots, *self._write_observers) for name, tensor in part.tensors().items()
        }

    def _empty(self) -> None:
        """Called by the buffer: restore the initial state."""
        for part in (*self._write_observers, self.slots):
            part.clear()
        self._knows_storage = False
