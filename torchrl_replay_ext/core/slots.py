"""What a sampler keeps of each slot of a buffer: its last write, its last draw and its priority."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.arguments import TDError
from torchrl_replay_ext.compilation import Array, gather_in_bounds, scatter_in_bounds, to_host
from torchrl_replay_ext.core.layout import Layout, as_index
from torchrl_replay_ext.core.sum_tree import MaxTree, PowerMasses
from torchrl_replay_ext.kernels.ops import Views, as_tensor, empty, rows_drawn, rows_record, rows_update

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import RowView


class RingWrite(NamedTuple):
    """Where a write lies in the ring.

    Args:
        slots: its slots, int64 [n]; on the CPU if the order of the writes matters.
        slots_as_index: the same slots as a slice or NumPy array where values can be read, see
            :func:`~torchrl_replay_ext.core.layout.as_index`.
        first, last: the steps of the first and of the last row.
        smallest, largest: the smallest and the largest slot.
        own_next: the step after the last one that the sampler has seen; -1 before the first write.
        writer_next: the step that the buffer's writer fills next; -1 without a round-robin writer.
        columns: entries of its rows that were read ahead, as arrays [n]. Default: None.
    """

    slots: Tensor
    slots_as_index: Array
    first: int
    last: int
    smallest: int
    largest: int
    own_next: int
    writer_next: int
    columns: dict[Any, Array] | None = None


class Slots:
    r"""The number of the last write, the last draw and the priority of each slot.

    Writes are numbered from 1. The generation of a slot is the number of the write that filled it, or 0 if the slot is
    empty. A number is never used again, even after the buffer was emptied or a state was loaded.

    The priority of a transition is d = max(\|δ\| + eps, min_priority). New transitions get the largest d seen so far,
    at least max(1, min_priority). With ``within_buffer`` they get the largest d of the stored transitions that have
    been updated; if there are none, the last such value is kept.

    The state is kept in tensors that are modified in place, so processes can share it.

    Args:
        layout: the slots.
        eps: constant added to \|δ\|. Default: 0.
        min_priority: the smallest d of an updated transition. Default: 0.
        td_error: ``"squared"`` (default) if updates contain δ², ``"absolute"`` if they contain \|δ\|.
        within_buffer: see above. Default: False.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        eps: float = 0.0,
        min_priority: float = 0.0,
        td_error: TDError = "squared",
        within_buffer: bool = False,
    ):
        self.layout, self.eps, self.min_priority = layout, eps, min_priority
        self.td_error: TDError = td_error
        self.within_buffer = within_buffer
        self.size = size = layout.size
        device = layout.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.generation, self.num_writes = zeros(size), zeros(1)
        # the last draw of each slot, and counts, see kernels.rows; they are not saved
        self.drawn_at, self.draws = zeros(size), zeros(2)
        # the step of the ring at which the last write ended, or -1; only kept if the order of the writes matters
        self.last_seen_step = torch.full((), -1, dtype=torch.int64, device=layout.counters)
        # d of each slot; negative if the transition was never updated
        self.priority = zeros(size, dtype=torch.float32)
        # the priority of new transitions before the first update
        self._first = max(1.0, min_priority)
        # shape [1]: in torch 2.13 the writes of a compiled graph to 0-dim float64 tensors are lost
        self.largest = torch.full((1,), self._first, dtype=torch.float64, device=device)
        # d of each updated slot, as the bits of the float32 number: positive floats and their bits have the same order
        self._updated = MaxTree(size, device=device) if within_buffer else None
        # what the kernel of updates raises; with within_buffer, ``largest`` follows from the tree instead
        self._largest_updated = torch.zeros_like(self.largest) if within_buffer else self.largest
        # the largest d that updates may contain
        self.limit = zeros(1, dtype=torch.float64)
        # the numbers of late and of invalid rows of updates
        self.counts = zeros(2)
        # in graphs, the slot to which an annealed alpha is applied next
        self.reweighted = zeros()
        # True if slots are known to hold transitions; always on the CPU, where reading is cheap
        self._is_used = torch.zeros(1, dtype=torch.bool, device="cpu")
        nothing = (zeros(0, dtype=kind) for kind in (torch.float64, torch.float32, torch.int64))
        # what kernels of draws take: these, and the empty arrays that stand for draws, numbers, weights and stamps
        state = self.generation, self.num_writes, self.drawn_at, self.draws
        self._draw_views = Views(*state, self.draws[:0].clone(), *nothing)
        self.set_masses(PowerMasses.none(device))

    def set_masses(self, masses: PowerMasses) -> None:
        """Let writes and updates also set the masses d^α of a sum tree."""
        # the first arguments of rows.record, and of rows.update
        self._write_views = Views(
            *(self.generation, self.num_writes, self.drawn_at, self.priority, self.largest), *masses
        )
        self._update_views = Views(
            *(self.generation, self.drawn_at, self.draws, self.priority, self._largest_updated),
            *(self.counts, self.limit, self.eps, self.min_priority, self.td_error == "squared"),
            *masses,
        )

    @property
    def is_empty(self) -> bool:
        """True if no slot is known to hold a transition."""
        if self._is_used.item():
            return False
        # a graph that writes changes only the generations
        self._is_used.fill_(bool(self.generation.any()))
        return not self._is_used.item()

    def stored(self) -> Tensor:
        """Slots that are not empty, int64 [n]."""
        return (self.generation > 0).nonzero().squeeze(1)

    def generations(self) -> Array:
        """The generation of each slot, as kernels take it."""
        return self._draw_views()[0]

    def generation_of(self, slots: Tensor) -> Tensor:
        """The number of the write that filled each of ``slots`` [n], int64 [n]; 0 for empty slots."""
        return gather_in_bounds(self.generation, slots)

    # --- writes, draws and updates

    def record(self, slots: Tensor, *, stays: bool) -> None:
        """Register a write of ``slots`` [n], or their removal if ``stays`` is False."""
        rows_record(*self._write_views(), slots.contiguous(), stays)

    def drawn(
        self,
        slots: Array,
        density: Array | None = None,
        smallest: Array | None = None,
        beta: Array | None = None,
        *,
        is_counted: bool = True,
        is_stamped: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Complete a draw of ``slots`` [n].

        Args:
            slots: int64 [n].
            density: see :func:`~torchrl_replay_ext.kernels.rows.drawn`. Default: None, no weights.
            smallest: likewise. Default: None, the weights are divided by the largest one of the batch.
            beta: likewise.
            is_counted: an update of the rows is expected. Default: True.
            is_stamped: return stamps. Default: False.

        Returns:
            Weights, float32 [n], and stamps, int64 [n]; None if not asked for.
        """
        generation, num_writes, drawn_at, draws, no_draws, nothing, no_weights, no_stamps = self._draw_views()
        count = slots.shape[0]
        weight = empty(generation, count, torch.float32) if density is not None and beta is not None else no_weights
        stamp = empty(generation, count, torch.int64) if is_stamped else no_stamps
        density = nothing if density is None else density
        smallest = nothing if smallest is None else smallest
        beta = nothing if beta is None else beta
        drawn_at = drawn_at if is_counted else no_draws
        rows_drawn(generation, slots, density, smallest, beta, num_writes, drawn_at, draws, weight, stamp)
        return None if weight is no_weights else as_tensor(weight), None if stamp is no_stamps else as_tensor(stamp)

    def update(
        self, slots: Tensor, error: Tensor, stamp: Tensor | None, *, refuses: bool
    ) -> tuple[int, int, Array, Array]:
        """Set priorities from TD errors, except of late rows; see :func:`torchrl_replay_ext.kernels.rows.update`.

        Args:
            slots: int64 [n].
            error: TD errors, float32 [n].
            stamp: generations at the draw, int64 [n]; None if unknown.
            refuses: True if invalid rows refuse the update. The result is then read.

        Returns:
            Why the update is refused, or 0; the row for which it is, or the count of slots that were updated (n if
            nothing is refused); these slots, int64 [n], and their priorities, float32 [n], with -1 and 0 in other rows.
            Where the count is known, they come first.
        """
        state, count, no_stamps = self._update_views(), slots.shape[0], self._draw_views()[-1]
        stamp = no_stamps if stamp is None else stamp.reshape(-1).contiguous()
        kept, d = empty(no_stamps, count, torch.int64), empty(no_stamps, count, torch.float32)
        result = empty(no_stamps, 2, torch.int64)
        rows_update(*state, slots.contiguous(), error.contiguous(), stamp, refuses, kept, d, result)
        reason, row_or_count = result.tolist() if refuses else (0, count)
        return reason, row_or_count, kept, d

    # --- the largest priority

    def largest_so_far(self) -> float:
        """The largest d of a stored or a new transition. O(N)."""
        return max(self.largest.item(), self.priority.abs().max().item())

    def exclude(self, slots: Tensor) -> None:
        """Exclude ``slots`` [n], which are overwritten or become empty, from the largest d ``within_buffer``."""
        if self._updated is not None:
            self._set_bits(self._updated, slots, torch.zeros_like(slots))

    def recount(self, slots: Tensor) -> None:
        """Update the largest d ``within_buffer`` after d of ``slots`` [n] has changed; -1 is skipped."""
        if self._updated is not None:
            slots = slots.clamp_min(0)
            # transitions that were never updated have 0
            bits = gather_in_bounds(self.priority, slots).clamp_min(0.0).view(torch.int32).to(torch.int64)
            self._set_bits(self._updated, slots, bits)

    def _set_bits(self, updated: MaxTree, slots: Tensor, bits: Tensor) -> None:
        scatter_in_bounds(updated.leaves, slots, bits)
        updated.refresh(slots)
        largest = updated.max().reshape(1)
        d = largest.to(torch.int32).view(torch.float32).to(torch.float64)
        self.largest.copy_(torch.where(largest > 0, d, self.largest))

    # --- the ring

    def locate(self, slots: Tensor, seen: int | Tensor = -1, writer_next: int | Tensor = -1) -> RingWrite:
        """Find where a write of ``slots`` [n] lies in the ring.

        Args:
            slots: see :class:`RingWrite`.
            seen: the last step that was seen. Default: -1, the order of the writes does not matter.
            writer_next: see :class:`RingWrite`. Default: -1.
        """
        lanes, index = self.layout.slots_per_step, as_index(slots)
        if isinstance(index, slice):
            numbers = index.start, index.stop - 1, index.start, index.stop - 1, seen, writer_next
        elif isinstance(index, np.ndarray):
            numbers = index[0], index[-1], index.min(), index.max(), seen, writer_next
        else:
            numbers = *to_host(slots[0], slots[-1], *torch.aminmax(slots)), seen, writer_next
        first, last, smallest, largest, seen, writer_next = map(int, numbers)
        own_next = (seen + 1) % self.layout.steps if seen >= 0 else -1
        return RingWrite(slots, index, first // lanes, last // lanes, smallest, largest, own_next, writer_next)

    def is_rewrite(self, slots: Tensor, write: RingWrite) -> bool:
        """True if a write of ``slots`` [n] changed stored rows in place.

        A write of new rows ends at the writer's position, which has moved on since the sampler saw the last write. A
        write of all slots moves it once around.
        """
        has_moved = write.writer_next != write.own_next or slots.shape[0] >= self.size
        is_new = has_moved and (write.last + 1) % self.layout.steps == write.writer_next
        return not is_new and bool((self.generation[slots] > 0).all())

    # --- state

    def clear(self) -> None:
        """Restore the initial state. Write numbers are not reset."""
        for tensor in (self.generation, self.priority, self.counts, self.reweighted):
            tensor.zero_()
        self.last_seen_step.fill_(-1)
        self.largest.fill_(self._first)
        self.rebuild()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        return {
            "generation": self.generation,
            "num_writes": self.num_writes,
            "last_step": self.last_seen_step,
            "priority": self.priority,
            "max_priority": self.largest,
            "update_counts": self.counts,
            "reweight_cursor": self.reweighted,
        }

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of all writes by ``last``, so that batches drawn before a load carry none of them."""
        self.generation.add_(last * (self.generation > 0))
        self.num_writes.add_(last)

    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced."""
        # this counts as a write of all slots, and then a draw of none
        self.drawn_at.abs_().neg_()
        self.draws[:1].add_(1)
        self.draws[1:].copy_(self.num_writes)
        self._is_used.fill_(False)
        self.largest.clamp_min_(self.min_priority)
        if self._updated is not None:
            self._updated.leaves.zero_()
            self._updated.rebuild_()
            self.recount(torch.arange(len(self.priority), device=self.priority.device))


class WriteObserver:
    """State that is updated at each write to the slots of a buffer. The methods do nothing by default."""

    # True if the order of the writes matters: the buffer then needs a round-robin writer
    needs_order = False

    def write(self, slots: Tensor, rows: RowView) -> None:
        """Take in the rows of a write. They replace what was in their slots, for which :meth:`remove` is not called.

        The write is recorded afterwards: generations and priorities are still those before it.

        Args:
            slots: int64 [n], in the order of writing, n <= number of slots.
            rows: the rows at ``slots``.

        Raises:
            KeyError, TypeError, ValueError: if the rows are invalid; nothing is changed then.
        """

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], without duplicates, oldest first."""

    def before_full_overwrite(self) -> None:
        """Called before a write with more rows than slots, of which only the last rows are written."""

    def before_ingest(self, count: int, next_slot: int) -> None:
        """Called before ``count`` rows that the storage already holds are written; ``next_slot`` is written next."""

    def clear(self) -> None:
        """Remove all slots."""

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        return {}

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of writes in :meth:`tensors` by ``last``, before :meth:`rebuild`."""

    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced."""
