"""Applies the TD errors of a priority update."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.arguments import shown
from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.layout import out_of_range
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import PowerMasses
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.kernels.ops import Views, empty, rows_update
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, OUT_OF_RANGE, WINDOW
from torchrl_replay_ext.samplers.base import Distribution

# Stands for a TD error that is missing. TorchRL's buffers pass it for rows that they add and for samples without TD
# errors. It is negative, and no TD error.
NO_TD_ERROR = -(2.0**-100)
# In graphs, each update applies an annealed alpha to this number of slots, in turns through the whole buffer.
_REWEIGHTED = 64


def td_errors(owner: str, given: Any, count: int, device: torch.device) -> Tensor:
    """Convert TD errors to one for each slot.

    Args:
        owner: the class that error messages name.
        given: TD errors, one for each slot, or a scalar for all slots.
        count: number of slots.
        device: device of the result.

    Returns:
        float32 [count].

    Raises:
        ValueError: if ``given`` has another number of elements.
    """
    if isinstance(given, Tensor) and given.dtype == torch.float32 and given.device == device:
        # conversions that change nothing take as long as the rest
        error = given.detach() if given.requires_grad else given
    else:
        error = torch.as_tensor(given, dtype=torch.float32, device=device).detach()
    if error.ndim != 1:
        error = error.reshape(-1)
    if error.shape[0] == count:
        return error
    if torch.as_tensor(given).ndim != 0:
        raise ValueError(
            f"{owner}.update_priority: there are {error.shape[0]} TD errors for {count} indices; pass one TD error per "
            "transition."
        )
    return error.expand(count)


class PriorityUpdates:
    """Applies TD errors to the slots of one buffer, except rows whose slot was overwritten after the draw.

    In eager code on the CPU, and on accelerators with ``layout.validate``, invalid rows raise errors. In graphs and on
    other accelerators they are left out and counted.

    Args:
        owner: class name of the sampler, for error messages.
        log, priorities, distribution: the state to update.
        masses: see :attr:`Distribution.power_masses`.
        hyperparameters: hyperparameters of the sampler, by name; their schedules count updates.
    """

    def __init__(
        self,
        owner: str,
        log: WriteLog,
        priorities: Priorities,
        distribution: Distribution,
        masses: PowerMasses,
        hyperparameters: dict[str, Hyperparameter],
    ):
        self._owner, self._layout, self._log = owner, log.layout, log
        self._priorities, self._distribution, self._hyperparameters = priorities, distribution, hyperparameters
        # the numbers of late and of invalid rows
        self.counts = torch.zeros(2, dtype=torch.int64, device=log.layout.device)
        self._cursor = torch.zeros((), dtype=torch.int64, device=log.layout.device)
        self._limit = torch.zeros(1, dtype=torch.float64, device=log.layout.device)
        # the first arguments of rows.update, and an array that stands for those that are missing
        self._views = Views(
            *(log.generation, log.draws, log.num_draws, priorities.of_slot, priorities.largest_updated),
            *(self.counts, self._limit, priorities.eps, priorities.smallest, priorities.td_error == "squared"),
            *masses,
            self.counts[:0].clone(),
        )
        # True if more than the kernel changes has to follow priorities
        self._has_followers = priorities.within_buffer or type(distribution).update is not Distribution.update
        # the slots of the last padded draws, and their real rows
        self._padded: deque[tuple[Tensor, Tensor]] = deque(maxlen=WINDOW)

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {"update_counts": self.counts, "reweight_cursor": self._cursor}

    def stats(self) -> dict[str, Tensor]:
        """Statistics for logging, scalars."""
        return dict(zip(("dropped_updates", "rejected_updates"), self.counts.unbind(), strict=True))

    def hyperparameters_changed(self) -> None:
        """Called after hyperparameters were changed."""
        self._limit.fill_(min(self._distribution.max_supported_priority, torch.finfo(torch.float32).max))

    def remember_padding(self, slots: Tensor, is_real: Tensor) -> None:
        """Remember a draw of ``slots`` [n], of whose updates the rows that are not ``is_real`` [n] are left out."""
        self._padded.append((slots, is_real))

    def _real_rows(self, slots: Tensor) -> Tensor | None:
        """False for padded rows of an update of ``slots`` [n] without stamps, bool [n]; None: no row is padded."""
        memory = slots.untyped_storage().data_ptr()
        # a copy, because another thread may draw at the same time
        padded = [*self._padded][::-1]
        for drawn, is_real in padded:
            if drawn.untyped_storage().data_ptr() == memory:
                begin = slots.storage_offset() - drawn.storage_offset()
                return is_real.as_strided(slots.shape, slots.stride(), begin).contiguous()
        return next((is_real for drawn, is_real in padded if torch.equal(drawn, slots)), None)

    def apply(self, index: Any, slots: Tensor, error: Tensor, stamp: Tensor | None) -> None:
        """Set priorities from TD errors.

        Args:
            index: the index of the update, in TorchRL's format.
            slots: int64 [n].
            error: TD errors, float32 [n].
            stamp: generations at the draw, int64 [n]; -1 for padded rows. None if unknown.

        Raises:
            ValueError: if a TD error is invalid; nothing is changed then.
            IndexError: likewise, if a slot is out of range, or is empty and was never drawn.
        """
        in_graph = is_traced()
        refuses = not in_graph and (self._layout.validate or slots.is_cpu)
        is_own = stamp is None and not in_graph and self._log.is_last_write(index, slots)
        # on accelerators only a number that was expanded is read, as TorchRL's buffers do
        is_expanded = slots.shape[0] == 1 or error.stride(0) == 0
        if is_expanded and not refuses and not in_graph and error[0] == NO_TD_ERROR:
            self._ignore(index, slots)
            return
        *state, nothing = self._views()
        real, count = nothing, slots.shape[0]
        if stamp is None and self._padded and not in_graph and not is_own:
            real = self._real_rows(slots)
            real = nothing if real is None else real
        stamp = nothing if stamp is None else stamp.reshape(-1).contiguous()
        kept, d = empty(nothing, count, torch.int64), empty(nothing, count, torch.float32)
        result = empty(nothing, 2, torch.int64)
        rows = slots.contiguous(), error.contiguous(), stamp, real
        # a graph has draws only where they are stamped
        rows_update(*state, *rows, not in_graph, refuses, is_own, kept, d, result)
        if refuses:
            # why the update is refused, and the row; or 0, and the number of rows that are kept
            reason, number = result.tolist()
            if reason == INVALID and float(error[number]) == NO_TD_ERROR:
                self._ignore(index, slots)
                return
            if reason:
                raise self._refusal(reason, slots, error, row=number)
            count = number
        if count and (self._has_followers or self._distribution.restricted_to is not None):
            if not isinstance(kept, Tensor):
                # on the CPU, the rows that are kept come first
                kept, d = torch.from_numpy(kept[:count]), torch.from_numpy(d[:count])
            if self._priorities.within_buffer:
                self._priorities.recount(kept)
            self._distribution.update(kept, d)
            self._distribution.leave_out(kept)
        if not in_graph:
            self._log.announce(None)
        self.step()

    def _ignore(self, index: Any, slots: Tensor) -> None:
        """Ignore an update without TD errors. A sample is counted, with a warning; not rows that were just stored."""
        # a single row may be added as a batch
        if self._log.is_last_write(slots[0] if len(slots) == 1 else index, slots):
            self._log.announce(None)
        elif self._log.num_draws.item():
            self.counts[1].add_(len(slots))
            warnings.warn(
                f"{self._owner}: the batch has no TD errors in the entry that the buffer's priority_key names "
                '(default: "td_error"), so priorities stay as they are. The loss must write this entry, or pass '
                "priority_key=.",
                stacklevel=2,
            )

    def _refusal(self, reason: int, slots: Tensor, error: Tensor, row: int) -> Exception:
        """The error for a row of an update; ``reason``: see :mod:`~torchrl_replay_ext.kernels.reasons`."""
        slot = int(slots[row])
        if reason == OUT_OF_RANGE:
            return out_of_range(self._owner, slot, self._layout.shape)
        if reason == EMPTY:
            return IndexError(f"{self._owner}.update_priority: slot {slot} is out of range: it is empty.")
        limit, wrong = self._distribution.max_supported_priority, np.float32(float(error[row]))
        return ValueError(
            f"{self._owner}.update_priority: TD error {shown(wrong)} at index {slot} (position {row} "
            f"of the update); TD errors must be >= 0 and finite, and the priority |δ| + eps at most {shown(limit)}."
        )

    def step(self) -> None:
        """Count an update, advance the schedules, and apply an annealed alpha to stored transitions."""
        for hyperparameter in self._hyperparameters.values():
            if hyperparameter.annealed:
                hyperparameter.step()
        alpha = self._hyperparameters.get("alpha")
        if alpha is None or not alpha.annealed:
            return
        if not self._layout.for_graphs:
            if alpha.just_ended():
                self._distribution.reweight(None)
        else:
            slots = (self._cursor + torch.arange(_REWEIGHTED, device=self._layout.device)) % self._layout.size
            self._cursor.add_(_REWEIGHTED)
            self._distribution.reweight(slots)

    def __getstate__(self) -> dict[str, Any]:
        # draws belong to this process only
        return {**vars(self), "_padded": deque(maxlen=WINDOW)}
