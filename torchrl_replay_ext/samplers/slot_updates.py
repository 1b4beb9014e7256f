"""Priority updates of the slots of a buffer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, raise_if, scalar, values_can_be_read
from torchrl_replay_ext.core.pending_draws import PendingDraws
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution
from torchrl_replay_ext.indices import UpdateMask, last_occurrence
from torchrl_replay_ext.kernels.reasons import EMPTY, LATE, OUT_OF_RANGE, PADDING
from torchrl_replay_ext.samplers.slot_index import out_of_range
from torchrl_replay_ext.samplers.td_errors import invalid_td_error

# In graphs, each update applies an annealed alpha to this number of slots, in turns through the whole buffer.
_REWEIGHTED = 64
_NO_STAMPS, _NO_MARKS = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
_EMPTY = "{owner}.update_priority: slot {slot} is out of range: it is empty."


class SlotUpdates:
    """Applies TD errors to the slots of one buffer, except rows whose slot was overwritten after the draw.

    There are two ways. Where values can be read, invalid rows raise errors and late rows are removed. In graphs and on
    accelerators, both are masked and counted.

    Args:
        owner: class name of the sampler, for error messages.
        log, priorities, distribution: the state to update.
        hyperparameters: hyperparameters of the sampler, by name; their schedules count updates.
    """

    def __init__(
        self,
        owner: str,
        log: WriteLog,
        priorities: Priorities,
        distribution: Distribution,
        hyperparameters: dict[str, Hyperparameter],
    ):
        self._owner, self._layout, self._log = owner, log.layout, log
        self._priorities, self._distribution, self._hyperparameters = priorities, distribution, hyperparameters
        self.pending = PendingDraws(log)
        self.counters = {
            name: torch.zeros((), dtype=torch.int64, device=log.layout.device)
            for name in ("dropped_updates", "rejected_updates", "reweight_cursor")
        }
        # shape [1]: in torch 2.13 the writes of a compiled graph to 0-dim float64 tensors are lost
        self._max_supported_priority = torch.zeros(1, dtype=torch.float64, device=log.layout.device)

    def hyperparameters_changed(self) -> None:
        """Called after hyperparameters were changed."""
        self._max_supported_priority.fill_(self._distribution.max_supported_priority)

    def remember_draw(self, slots: Tensor, *, is_unpadded: Tensor | None = None, expects_update: bool = True) -> None:
        """Outside graphs, record a draw.

        Args:
            slots: int64 [n].
            is_unpadded: which rows are not padding, bool [n]; None (default): all.
            expects_update: True (default) if an update of the rows is expected.
        """
        if not is_traced():
            self.pending.add(slots, self._num_writes(), is_unpadded=is_unpadded, expects_update=expects_update)

    def _num_writes(self) -> int | Tensor:
        number = scalar(self._log.num_writes)
        return number.clone() if isinstance(number, Tensor) else number

    def _real_rows(self, slots: Tensor, stamp: Tensor | None, *, is_own_write: bool) -> Tensor | None:
        """False for padded rows of an update of ``slots`` [n], bool [n]; None if no row is padded."""
        if stamp is not None:
            real = stamp.reshape(-1) >= 0
        else:
            real = None if is_traced() or is_own_write else self.pending.unpadded_rows(slots)
        return None if real is not None and values_can_be_read(real) and bool(real.all()) else real

    def _generation(self, slots: Tensor) -> Tensor:
        return gather_in_bounds(self._log.generation, slots)

    def apply(self, index: Any, slots: Tensor, error: Tensor, stamp: Tensor | None) -> None:
        """Set priorities from TD errors, outside graphs.

        Args:
            index: the index of the update, in TorchRL's format.
            slots: int64 [n].
            error: TD errors, float32 [n].
            stamp: generations at the draw, int64 [n]; -1 for padded rows. None if unknown.

        Raises:
            ValueError: if a TD error is invalid; nothing is changed then. See :meth:`apply_masked` for accelerators.
            IndexError: likewise, if a slot is out of range, or is empty and was never drawn.
        """
        is_own_write = self._log.is_last_write(index, slots)
        if values_can_be_read(slots):
            self._apply_readable(slots, error, stamp, is_own_write=is_own_write)
        else:
            self.apply_masked(slots, error, stamp, is_own_write=is_own_write)
        self._log.announce(None)

    def _apply_readable(self, slots: Tensor, error: Tensor, stamp: Tensor | None, *, is_own_write: bool) -> None:
        """Set priorities from TD errors where values can be read; the arguments are those of :meth:`apply_masked`."""
        real = self._real_rows(slots, stamp, is_own_write=is_own_write)
        mark = _NO_MARKS if real is None else PADDING * (~real).to(torch.uint8)
        stamps = _NO_STAMPS if stamp is None else stamp.reshape(-1).contiguous()
        rows = slots.contiguous(), error.detach().contiguous(), stamps
        limit = self._distribution.max_supported_priority
        refused, row = self._priorities.check(*rows, mark, self._layout.size, limit)
        is_drawn, late = True, None
        if stamp is not None:
            if not refused:
                self.pending.register_update(slots)
        elif not refused and not is_own_write:
            is_drawn, late = self.pending.find_late_rows(slots, self._num_writes())
        if late is not None:
            mark = torch.where(late, LATE, 0).to(torch.uint8) if real is None else mark + late * (mark == 0)
        if not refused:
            with self._log.transaction():
                dropped = self.counters["dropped_updates"]
                refused, row, kept, priority = self._priorities.update(
                    *rows, mark, self._log.generation, dropped, is_drawn=is_drawn
                )
                if kept.shape[0]:
                    self._distribution.update(kept, priority, None)
        if refused:
            raise self._refusal(refused, slots, error, row)
        self.step()

    def _refusal(self, reason: int, slots: Tensor, error: Tensor, row: int) -> Exception:
        """The error for a row of an update; ``reason``: see :mod:`~torchrl_replay_ext.kernels.rows`."""
        slot = int(slots[row])
        if reason == OUT_OF_RANGE:
            return out_of_range(self._owner, slot, self._layout.shape)
        if reason == EMPTY:
            return IndexError(_EMPTY.format(owner=self._owner, slot=slot))
        return invalid_td_error(self._owner, float(error[row]), slot, row, self._distribution.max_supported_priority)

    def apply_masked(self, slots: Tensor, error: Tensor, stamp: Tensor | None, *, is_own_write: bool = False) -> None:
        """Set priorities from TD errors where values cannot be read. Invalid rows are left out and counted.

        Args:
            slots: int64 [n].
            error: TD errors, one number or [n].
            stamp: generations at the draw, int64 [n]; -1 for padded rows. None if unknown.
            is_own_write: True if the rows are those of the last write. Default: False.

        Raises:
            ValueError: on accelerators, if a TD error is invalid and ``layout.validate``; nothing is changed then.
            IndexError: likewise, if a slot is out of range, or is empty and was never drawn.
        """
        error = error.to(torch.float32).reshape(-1).expand(slots.shape[0])
        priority = self._priorities.from_td_error(error)
        given, slots = slots, slots.clamp(0, self._layout.num_slots - 1)
        # also False for NaN
        valid = (error >= 0) & (priority <= self._max_supported_priority) & (given == slots)
        generation = self._generation(slots)
        is_current, is_drawn, late = generation > 0, True, None
        real = self._real_rows(given, stamp, is_own_write=is_own_write)
        # padded rows are not counted
        valid = valid if real is None else valid & real
        wrong = ~valid if real is None else valid ^ real
        if stamp is not None:
            is_current = is_current & (generation == stamp.reshape(-1))
            if not is_traced():
                self.pending.register_update(given)
        elif not is_traced() and not is_own_write:
            is_drawn, late = self.pending.find_late_rows(given, self._num_writes())
        if late is not None:
            is_current = is_current & ~late
        self._require_valid(given, error, wrong if is_drawn else wrong | (generation == 0))
        applied = valid & is_current
        self.counters["rejected_updates"].add_(wrong.sum())
        self.counters["dropped_updates"].add_((valid ^ applied).sum())
        priority = torch.where(applied, priority, 0.0)
        source = last_occurrence(slots, applied)
        is_last = source == torch.arange(slots.shape[0], device=slots.device)
        applied = gather_in_bounds(applied, source)
        with nullcontext() if is_traced() else self._log.transaction():
            largest = priority.amax()
            priority = gather_in_bounds(priority, source)
            self._priorities.update_masked(slots, priority, applied, largest)
            self._distribution.update(slots, priority, UpdateMask(applied, is_last))
        self.step()

    def _require_valid(self, slots: Tensor, error: Tensor, wrong: Tensor) -> None:
        """With ``layout.validate``, raise an error outside graphs if a row of an update is ``wrong``, bool [n]."""

        def refused() -> Exception:
            row = int(wrong.nonzero()[0])
            slot, size = int(slots[row]), self._layout.num_slots
            if not 0 <= slot < size:
                return out_of_range(self._owner, slot, self._layout.shape)
            if self._log.generation[slot] == 0:
                return IndexError(_EMPTY.format(owner=self._owner, slot=slot))
            return invalid_td_error(
                self._owner, float(error[row]), slot, row, self._distribution.max_supported_priority
            )

        raise_if(wrong.any, refused, skip_on=self._layout.skip_checks_on)

    def step(self) -> None:
        """Count an update, advance the schedules, and apply an annealed alpha to stored transitions."""
        for hyperparameter in self._hyperparameters.values():
            hyperparameter.step()
        alpha = self._hyperparameters.get("alpha")
        if alpha is None:
            return
        if not self._layout.for_graphs:
            if alpha.just_ended():
                with self._log.transaction():
                    self._distribution.reweight(None)
        elif alpha.annealed:
            cursor, size = self.counters["reweight_cursor"], self._layout.size
            slots = (cursor + torch.arange(_REWEIGHTED, device=self._layout.device)) % size
            cursor.add_(_REWEIGHTED)
            self._distribution.reweight(slots)

    def __getstate__(self) -> dict[str, Any]:
        # pending draws belong to this process only
        return {**vars(self), "pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.pending = PendingDraws(self._log)
