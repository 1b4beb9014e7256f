"""A log of the writes to a buffer: the ring position and the generation of each slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, read
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.write_observer import WriteObserver
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.kernels.ops import Views, as_tensor, empty, rows_drawn


class RingWrite(NamedTuple):
    """Where a write lies in the ring.

    Args:
        slots_as_index: its slots as a slice or NumPy array where values can be read, see
            :func:`~torchrl_replay_ext.indices.as_index`.
        first, last: the steps of the first and of the last row.
        smallest, largest: the smallest and the largest slot.
        expected: the step after the last one that the log has seen; -1 before the first write.
        cursor: the step that the buffer's writer fills next; -1 without a round-robin writer.
    """

    slots_as_index: Array
    first: int
    last: int
    smallest: int
    largest: int
    expected: int
    cursor: int


class WriteLog(WriteObserver):
    """Records the writes to a buffer: the ring position and the generation of each slot.

    Writes are numbered from 1. The generation of a slot is the number of the write that filled it, or 0 if the slot is
    empty. A number is never used again, even after the buffer was emptied or a state was loaded.

    The state is kept in tensors that are modified in place, so processes can share it.

    Args:
        layout: the slots.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        device = layout.device
        self.generation = torch.zeros(layout.size, dtype=torch.int64, device=device)
        self.num_writes = torch.zeros(1, dtype=torch.int64, device=device)
        # the last draw of each slot, and counts, see kernels.rows; they are not saved
        self.drawn_at = torch.zeros(layout.size, dtype=torch.int64, device=device)
        self.draws = torch.zeros(2, dtype=torch.int64, device=device)
        nothing = (torch.empty(0, dtype=kind, device=device) for kind in (torch.float64, torch.float32, torch.int64))
        state = self.generation, self.num_writes, self.drawn_at, self.draws
        # what kernels take: these, and the empty arrays that stand for draws, numbers, weights and stamps
        self.views = Views(*state, self.draws[:0].clone(), *nothing)
        # the step of the ring at which the last write ended, or -1; only kept if the order of the writes matters
        self.last_seen_step = torch.full((), -1, dtype=torch.int64, device=layout.counters)
        # True if slots are known to hold transitions; always on the CPU, where reading is cheap
        self._is_used = torch.zeros(1, dtype=torch.bool, device="cpu")

    @property
    def is_empty(self) -> bool:
        """True if no slot is known to hold a transition."""
        if self._is_used.item():
            return False
        # a graph that writes changes only the generations
        self._is_used.fill_(bool(self.generation.any()))
        return not self._is_used.item()

    def stored_slots(self) -> Tensor:
        """Slots that are not empty, int64 [n]."""
        return (self.generation > 0).nonzero().squeeze(1)

    def drawn(
        self,
        slots: Array,
        density: Array | None,
        smallest: Array | None,
        beta: Array | None,
        *,
        is_counted: bool,
        is_stamped: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Complete a draw of ``slots`` [n].

        Args:
            slots: int64 [n].
            density: see :func:`~torchrl_replay_ext.kernels.rows.drawn`; None: no weights.
            smallest: likewise; None: the weights are divided by the largest one of the batch.
            beta: likewise.
            is_counted: an update of the rows is expected.
            is_stamped: return stamps.

        Returns:
            Weights, float32 [n], and stamps, int64 [n]; None if not asked for.
        """
        generation, num_writes, drawn_at, draws, no_draws, nothing, no_weights, no_stamps = self.views()
        count = slots.shape[0]
        weight = empty(generation, count, torch.float32) if density is not None and beta is not None else no_weights
        stamp = empty(generation, count, torch.int64) if is_stamped else no_stamps
        density = nothing if density is None else density
        smallest = nothing if smallest is None else smallest
        beta = nothing if beta is None else beta
        drawn_at = drawn_at if is_counted else no_draws
        rows_drawn(generation, slots, density, smallest, beta, num_writes, drawn_at, draws, weight, stamp)
        return None if weight is no_weights else as_tensor(weight), None if stamp is no_stamps else as_tensor(stamp)

    def count_draw(self, slots: Tensor) -> None:
        """Count a draw of ``slots`` [n], whose updates are expected."""
        self.drawn(slots, None, None, None, is_counted=True, is_stamped=False)

    # --- the ring

    def locate(self, slots: Tensor, cursor: int | Tensor | None) -> RingWrite:
        """Find where a write of ``slots`` [n] lies in the ring.

        Args:
            slots: int64 [n].
            cursor: see :class:`RingWrite`. None: the order of the writes does not matter.
        """
        lanes, index = self.layout.slots_per_step, as_index(slots)
        seen, cursor = (-1, -1) if cursor is None else (self.last_seen_step, cursor)
        if isinstance(index, slice):
            numbers = index.start, index.stop - 1, index.start, index.stop - 1, seen, cursor
        elif isinstance(index, np.ndarray):
            numbers = index[0], index[-1], index.min(), index.max(), seen, cursor
        else:
            numbers = read(slots[0], slots[-1], *torch.aminmax(slots), seen, cursor)
        first, last, smallest, largest, seen, cursor = map(int, numbers)
        expected = (seen + 1) % self.layout.steps if seen >= 0 else -1
        return RingWrite(index, first // lanes, last // lanes, smallest, largest, expected, cursor)

    def is_rewrite(self, slots: Tensor, write: RingWrite) -> bool:
        """True if a write of ``slots`` [n] changed stored rows in place: the buffer's writer has not written them."""
        is_next = (write.last + 1) % self.layout.steps == write.cursor
        is_next &= write.cursor != write.expected or slots.shape[0] >= self.layout.size
        return not is_next and bool((self.generation[slots] > 0).all())

    # --- state

    def clear(self) -> None:
        """Mark all slots as empty and the ring position as unknown. Write numbers are not reset."""
        self.generation.zero_()
        self.last_seen_step.fill_(-1)
        self.rebuild()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {
            "generation": self.generation,
            "num_writes": self.num_writes,
            "last_step": self.last_seen_step,
        }

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of all writes by ``last``, so that batches drawn before a load carry none of them."""
        self.generation.add_(last * (self.generation > 0))
        self.num_writes.add_(last)

    def rebuild(self) -> None:
        """Called after :meth:`tensors` were replaced."""
        # this counts as a write of all slots, and then a draw of none
        self.drawn_at.abs_().neg_()
        self.draws[:1].add_(1)
        self.draws[1:].copy_(self.num_writes)
        self._is_used.fill_(False)
