"""A log of the writes to a buffer: the ring position, the generation of each slot, and the dirty flag."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, gather_in_bounds, increase, read, scalar
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.recoverable import Recoverable
from torchrl_replay_ext.indices import as_index

# Special values of last_seen_step.
UNKNOWN = -1
OUT_OF_ORDER = -2


class RingWrite(NamedTuple):
    """Where a write lies in the ring.

    Args:
        slots_as_index: its slots as a slice or NumPy array where values can be read, see
            :func:`~torchrl_replay_ext.indices.as_index`.
        first, last: the steps of the first and of the last row.
        smallest, largest: the smallest and the largest slot.
        newest: the step that was last written to the storage; -1 if unknown.
        last_seen: the step at which the last write ended that the log has seen, or a special value.
    """

    slots_as_index: Array
    first: int
    last: int
    smallest: int
    largest: int
    newest: int
    last_seen: int


class WriteLog(Recoverable):
    """Records the writes to a buffer: the ring position, the generation of each slot, and the dirty flag.

    Writes are numbered from 1. The generation of a slot is the number of the write that filled it, or 0 if the slot is
    empty. A number is never used again, even after the buffer was emptied or a state was loaded.

    The state is kept in tensors that are modified in place, so processes can share it.

    Args:
        layout: the slots.
    """

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout
        device = layout.device
        self.generation = torch.zeros(layout.size, dtype=torch.int64, device=device)
        self.num_writes = torch.zeros((), dtype=torch.int64, device=layout.counters)
        # the step of the ring at which the last write that the sampler was notified of ended
        self.last_seen_step = torch.full((), UNKNOWN, dtype=torch.int64, device=layout.counters)
        # the number of writes at the last clear(), and True if it is known that there were later ones; always on the
        # CPU, where reading is cheap
        self._cleared_at = torch.zeros((), dtype=torch.int64, device="cpu")
        self._has_writes = torch.zeros((), dtype=torch.bool, device="cpu")
        # the index in the notification of the last write, and its slots
        self._announced: int | Tensor | None = None
        self._written: Array | None = None

    @property
    def is_empty(self) -> bool:
        """True if there was no write since the log was created or cleared."""
        if not self._has_writes:
            # a graph that writes changes only num_writes
            self._has_writes.fill_(self.num_writes.item() != self._cleared_at.item())
        return not self._has_writes

    def stored_slots(self) -> Tensor:
        """Slots that are not empty, int64 [n]."""
        return (self.generation > 0).nonzero().squeeze(1)

    def record(self, slots: Array) -> None:
        """Register one write of ``slots``, an index as :attr:`RingWrite.slots_as_index`."""
        increase(self.num_writes, 1)
        if not isinstance(slots, Tensor):
            self.generation.numpy()[slots] = self.num_writes.item()
            return
        number = scalar(self.num_writes)
        if isinstance(number, Tensor):
            # index_fill_ would read the number from the device
            self.generation[slots] = number
        else:
            self.generation.index_fill_(0, slots, number)

    def next_number(self) -> int | Tensor:
        """The number of the next write; int64 [] in graphs and on accelerators."""
        return scalar(self.num_writes_on_device()) + 1

    def num_writes_on_device(self) -> Tensor:
        """The number of writes, int64 [], on the device of the slots."""
        if self.num_writes.device == self.generation.device:
            return self.num_writes
        return torch.full((), self.num_writes.item(), device=self.generation.device)

    def announce(self, index: int | Tensor | None, slots_as_index: Array | None = None) -> None:
        """Remember the index in the notification of the last write, and its slots as :attr:`RingWrite.slots_as_index`.

        None: no update for its rows is expected.
        """
        self._announced = index
        # a copy, because the index may be changed in place; a comparison on an accelerator would wait for it
        self._written = None if isinstance(slots_as_index, Tensor) else copy.copy(slots_as_index)

    def is_last_write(self, index: object, slots: Tensor) -> bool:
        """True if an update of ``index`` (``slots`` [n]) is for the rows of the last write.

        If written data contains TD errors, TorchRL's buffers update the priorities right after the write, with the same
        index tensor.
        """
        announced, written = self._announced, self._written
        if announced is None or (written is not None and not np.array_equal(written, as_index(slots))):
            return False
        if isinstance(index, Tensor) and index.ndim:
            if not isinstance(announced, Tensor) or announced.shape != index.shape:
                return False
            return announced.untyped_storage().data_ptr() == index.untyped_storage().data_ptr()
        is_number = not isinstance(announced, Tensor) or not announced.ndim
        return is_number and isinstance(index, (int, Tensor)) and int(index) == int(announced)

    def invalidate(self, slots: Tensor) -> None:
        """Mark ``slots`` [n] as empty. Later updates of rows drawn from them are late."""
        self.num_writes.add_(1)
        self.generation.index_fill_(0, slots, 0)
        self._announced = None

    def forget_contents(self) -> None:
        """Mark all slots as empty, but keep the ring position."""
        self.generation.zero_()
        self._announced = None

    # --- the ring

    def see_step(self, step: int | Tensor) -> None:
        """Set the step of the ring at which the last write ended."""
        if isinstance(step, Tensor):
            self.last_seen_step.copy_(step)
        else:
            self.last_seen_step.fill_(step)

    def next_step(self) -> int | None:
        """The step where the next write should begin; None if unknown."""
        last = int(self.last_seen_step)
        return (last + 1) % self.layout.steps if last >= 0 else None

    def steps_until(self, step: int) -> Tensor:
        """Steps after the last seen write up to ``step``, int64 [n]; empty if the ring position is unknown."""
        last, steps = int(self.last_seen_step), self.layout.steps
        if last < 0:
            return torch.zeros(0, dtype=torch.int64, device=self.layout.device)
        return (last + 1 + torch.arange((step - last) % steps, device=self.layout.device)) % steps

    def unannounced(self, storage_step: int | None) -> Tensor:
        """Slots written after the last write that the sampler was notified of, int64 [n]. They may be incomplete.

        Args:
            storage_step: the step that was last written to the storage; None if unknown.
        """
        steps = self.steps_until(int(self.last_seen_step) if storage_step is None else storage_step)
        return self.layout.slots_at(steps).reshape(-1)

    def locate(self, slots: Tensor, newest: int | Tensor | None) -> RingWrite:
        """Find where a write of ``slots`` [n] lies in the ring. ``newest``: see :class:`RingWrite`; None: unknown."""
        newest, lanes, index = -1 if newest is None else newest, self.layout.slots_per_step, as_index(slots)
        if isinstance(index, slice):
            first, last = index.start, index.stop - 1
            others = [first, last, *read(newest, self.last_seen_step)]
        elif isinstance(index, np.ndarray):
            first, last, *others = map(int, (index[0], index[-1], index.min(), index.max()))
            others += read(newest, self.last_seen_step)
        else:
            first, last, *others = read(slots[0], slots[-1], *torch.aminmax(slots), newest, self.last_seen_step)
        return RingWrite(index, first // lanes, last // lanes, *others)

    def place_write(self, count: int, write: RingWrite, is_sequential: Callable[[], bool]) -> tuple[int, Tensor | None]:
        """Find the step of the ring at which a write ends, and the slots that it skipped.

        Args:
            count: number of rows.
            write: where the write lies in the ring.
            is_sequential: returns True if all writes follow each other in the ring. Only then a gap means that a write
                was interrupted.

        Returns:
            The value for :meth:`see_step` once the write is accepted; the skipped slots, int64 [k], or None.
        """
        newest, last_seen = write.newest, write.last_seen
        if newest < 0 or write.last != newest:
            return last_seen, None
        if count < self.layout.num_slots and last_seen != UNKNOWN:
            if last_seen == newest:
                # a notification of stored rows (rb.mark_update), not of a new write
                return last_seen, None
            if write.first != (last_seen + 1) % self.layout.steps:
                if not is_sequential():
                    return OUT_OF_ORDER, None
                skipped = self.steps_until((write.first - 1) % self.layout.steps)
                return newest, self.layout.slots_at(skipped).reshape(-1)
        return newest, None

    def is_rewrite(self, slots: Tensor, write: RingWrite) -> bool:
        """True if ``slots`` [n] were not empty and not next in the ring: rows changed in place (``rb.mark_update``).

        Raises:
            ValueError: if the rows are new and not consecutive in the ring.
        """
        size = self.layout.num_slots
        if isinstance(write.slots_as_index, slice):
            were_stored, consecutive = bool(gather_in_bounds(self.generation, write.slots_as_index).all()), True
        else:
            order = torch.arange(slots.shape[0], device=slots.device)
            were_stored, consecutive = read(
                (self.generation.index_select(0, slots) > 0).all(), (slots == (slots[0] + order) % size).all()
            )
        if were_stored:
            if write.last != write.newest:
                return True
            expected = (write.last_seen + 1) % self.layout.steps
            if write.last_seen >= 0 and write.first != expected and (write.last + 1) % self.layout.steps == expected:
                return True
        if not consecutive:
            raise ValueError("slots must be written one after the other; use a round-robin writer, the default.")
        return False

    def known_runs(self, storage_step: int | None, being_written: Tensor | None = None) -> list[Tensor]:
        """Contiguous runs of slots with valid content, oldest first, int64 [n] each.

        Args:
            storage_step: the step that was last written to the storage; None if unknown.
            being_written: slots to exclude. Default: None.
        """
        layout, last_seen = self.layout, int(self.last_seen_step)
        known = self.generation > 0
        if being_written is not None:
            known[being_written] = False
        newest = last_seen if last_seen >= 0 else -1 if storage_step is None else storage_step
        order = (newest + 1 + torch.arange(layout.steps, device=layout.device)) % layout.steps
        if last_seen >= 0 and storage_step is not None:
            order = order[(storage_step - last_seen) % layout.steps :]
        slots = layout.slots_at(order)
        is_known = known[slots].all(1)
        ends = ((is_known[1:] != is_known[:-1]).nonzero().squeeze(1) + 1).cpu()
        runs = zip(slots.tensor_split(ends), is_known.tensor_split(ends), strict=True)
        return [run.reshape(-1) for run, kept in runs if kept.numel() and bool(kept[0])]

    # --- state

    def clear(self) -> None:
        """Mark all slots as empty and the ring position as unknown. Write numbers are not reset."""
        self.generation.zero_()
        self._cleared_at.copy_(self.num_writes)
        self._has_writes.fill_(False)
        self.last_seen_step.fill_(UNKNOWN)
        self.mark_clean()
        self._announced = None

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {
            "generation": self.generation,
            "num_writes": self.num_writes,
            "num_writes_at_clear": self._cleared_at,
        }

    def skip_numbers(self, last: int) -> None:
        """Do not give the numbers up to ``last`` to further writes: batches drawn before a load may carry them."""
        is_empty = bool(self.num_writes == self._cleared_at)
        self.num_writes.clamp_min_(last)
        if is_empty:
            self._cleared_at.copy_(self.num_writes)

    def rebuild(self) -> None:
        """Called after :meth:`tensors` were replaced. The ring position is then unknown."""
        self._has_writes.fill_(False)
        self.last_seen_step.fill_(UNKNOWN)
        self.mark_clean()
        self._announced = None

    def check_valid(self) -> None:
        """Raise AssertionError if the log is inconsistent. O(N)."""
        if bool((self.generation > self.num_writes).any()):
            raise AssertionError("WriteLog: the generation of a slot is larger than the number of writes")

    def __getstate__(self) -> dict[str, object]:
        # the update that follows a write comes from the same process
        return {**vars(self), "_announced": None, "_written": None}
