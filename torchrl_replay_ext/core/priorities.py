"""The priority of each slot; :func:`torchrl_replay_ext.kernels.rows.update` computes it from TD errors."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import TDError
from torchrl_replay_ext.compilation import gather_in_bounds, scatter_in_bounds
from torchrl_replay_ext.core.sum_tree import MaxTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.core.write_observer import WriteObserver

# Largest relative difference between the maximum in float64 and a float32 priority after several roundings.
_ROUNDING = 4 * torch.finfo(torch.float32).eps


class Priorities(WriteObserver):
    """The priority d = max(|δ| + eps, min_priority) of each slot, and the priority of new transitions.

    New transitions get the largest d seen so far, at least max(1, min_priority). With ``within_buffer`` they get the
    largest d of the stored transitions that have been updated; if there are none, the last such value is kept.

    Args:
        log: the generations of the slots.
        eps: constant added to |δ|.
        td_error: ``"squared"`` if updates contain δ², ``"absolute"`` if they contain |δ|.
        within_buffer: see above.
        min_priority: the smallest d of an updated transition. Default: 0.
    """

    def __init__(
        self,
        log: WriteLog,
        *,
        eps: float,
        td_error: TDError,
        within_buffer: bool,
        min_priority: float = 0.0,
    ):
        self._log, size, device = log, log.layout.size, log.layout.device
        self.eps, self.td_error, self.within_buffer, self.smallest = eps, td_error, within_buffer, min_priority
        # the priority of new transitions before the first update
        self._first = max(1.0, min_priority)
        # d of each slot, float32; negative if the transition was never updated
        self.of_slot = torch.zeros(size, dtype=torch.float32, device=device)
        # shape [1]: in torch 2.13 the writes of a compiled graph to 0-dim float64 tensors are lost
        self.largest = torch.full((1,), self._first, dtype=torch.float64, device=device)
        # what the kernel of updates raises; with within_buffer, ``largest`` follows from the tree below instead
        self.largest_updated = torch.zeros_like(self.largest) if within_buffer else self.largest
        # d of each updated slot, as the bits of the float32 number: positive floats and their bits have the same order
        self._updated = MaxTree(size, device=device) if within_buffer else None

    def largest_so_far(self) -> float:
        """The largest d of a stored or a new transition. O(N)."""
        return max(self.largest.item(), self.of_slot.abs().max().item())

    def insert(self, slots: Tensor, priority: Tensor, rows: object) -> None:
        """Exclude ``slots`` [n] too, until their first update."""
        if self._updated is not None:
            self.remove(slots)

    def remove(self, slots: Tensor) -> None:
        """Exclude ``slots`` [n], which become empty or are overwritten, from the largest priority within the buffer."""
        if self._updated is not None:
            self._set_bits(slots, torch.zeros_like(slots))

    def recount(self, slots: Tensor) -> None:
        """Update the largest priority ``within_buffer`` after d of ``slots`` [n] has changed; -1 is skipped."""
        slots = slots.clamp_min(0)
        self._set_bits(slots, self._bits(gather_in_bounds(self.of_slot, slots)))

    def _set_bits(self, slots: Tensor, bits: Tensor) -> None:
        assert self._updated is not None
        scatter_in_bounds(self._updated.leaves, slots, bits)
        self._updated.refresh(slots)
        largest = self._updated.max().reshape(1)
        d = largest.to(torch.int32).view(torch.float32).to(torch.float64)
        self.largest.copy_(torch.where(largest > 0, d, self.largest))

    @staticmethod
    def _bits(priority: Tensor) -> Tensor:
        """The bits of d [n] as int64, in the same order as d; 0 for transitions that were never updated."""
        return priority.clamp_min(0.0).view(torch.int32).to(torch.int64)

    def clear(self) -> None:
        """Restore the initial state."""
        self.largest.fill_(self._first)
        self.of_slot.zero_()
        self.rebuild()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {"priority": self.of_slot, "max_priority": self.largest}

    def rebuild(self) -> None:
        """Recompute the largest priority after :meth:`tensors` were replaced."""
        self.largest.clamp_min_(self.smallest)
        if self._updated is not None:
            self._updated.leaves.zero_()
            self._updated.rebuild_()
            self.recount(torch.arange(len(self.of_slot), device=self.of_slot.device))
