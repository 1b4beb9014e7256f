"""The state of a sampler for the slots of its buffer, updated at each write and priority update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import TDError
from torchrl_replay_ext.compilation import gather_in_bounds, to_device
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.write_log import OUT_OF_ORDER, UNKNOWN, RingWrite, WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, WriteObserver
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.samplers.rows import StoredRows
from torchrl_replay_ext.samplers.slot_index import require_in_range
from torchrl_replay_ext.samplers.slot_updates import SlotUpdates

# Errors that reject a write before any change. A warning is included: a filter can turn it into an error.
REFUSALS = (KeyError, TypeError, ValueError, Warning)

MakeDistribution = Callable[[WriteLog, Priorities], Distribution]
MakeObserver = Callable[[WriteLog], WriteObserver]


class PriorityArguments(TypedDict):
    """Arguments of :class:`~torchrl_replay_ext.core.priorities.Priorities`."""

    eps: float
    td_error: TDError
    within_buffer: bool
    min_priority: float


class SlotState:
    """The write log, the priorities, the distribution and the updates of the slots of one buffer.

    Args:
        owner: class name of the sampler, for error messages.
        layout: the slots.
        make: creates the distribution.
        make_observers: create further state that must be updated at each write.
        hyperparameters: hyperparameters of the sampler, by name.
        priority_arguments: how priorities are computed from TD errors.
    """

    # True if the storage contains only rows of a rejected first write
    holds_only_rejected_write = False
    # True if the oldest slot was unknown when the content of a full storage was ingested
    _order_is_unknown = False
    # True if the current write has already changed a part, so that its rejection requires recovery
    _write_has_effects = False

    def __init__(
        self,
        owner: str,
        layout: Layout,
        make: MakeDistribution,
        make_observers: Sequence[MakeObserver],
        hyperparameters: dict[str, Hyperparameter],
        priority_arguments: PriorityArguments,
    ):
        self.owner, self.layout, self._hyperparameters = owner, layout, hyperparameters
        for hyperparameter in hyperparameters.values():
            hyperparameter.to(layout.counters)
        self.log = WriteLog(layout)
        self.priorities = Priorities(layout.size, layout.device, **priority_arguments)
        # number of writes to the storage, counted by the storage, at the last comparison of storage and log; on the CPU
        self._seen_sets = torch.full((), -1, dtype=torch.int64, device="cpu")
        self.distribution = make(self.log, self.priorities)
        self.updates = SlotUpdates(owner, self.log, self.priorities, self.distribution, hyperparameters)
        # all parts that are updated at each write; observers first, since they may reject rows
        self._parts: list[WriteObserver] = [self.distribution]
        for observe in make_observers:
            self.observe(observe)
        self.hyperparameters_changed()
        if self.priorities.largest.item() > self.distribution.max_supported_priority:
            raise ValueError(
                f"{owner}(min_priority={priority_arguments['min_priority']:g}): must be <= "
                f"{self.distribution.max_supported_priority:g} for {layout.size} slots and this alpha."
            )

    @property
    def observers(self) -> list[WriteObserver]:
        """Further state that is updated at each write."""
        return self._parts[:-1]

    @property
    def _needs_order(self) -> bool:
        return any(part.needs_order for part in self._parts)

    def observe(self, make: MakeObserver) -> None:
        """Add state that must be updated at each write."""
        self._parts.insert(len(self._parts) - 1, make(self.log))
        if not self.log.is_empty:
            self.log.mark_dirty()

    def hyperparameters_changed(self) -> None:
        """Called after hyperparameters were changed."""
        self.updates.hyperparameters_changed()

    def set_hyperparameter(self, name: str, value: float | Tensor | Anneal) -> None:
        """Assign a number or a schedule.

        Raises:
            ValueError: if alpha is too large for the largest priority; nothing is changed then.
        """
        hyperparameter = self._hyperparameters[name]
        before, saved = float(hyperparameter.value), hyperparameter.state()
        hyperparameter.set(value)
        largest = 0.0
        if name == "alpha":
            largest = max(self.priorities.largest.item(), self.priorities.of_slot.abs().max().item())
        if largest > self.distribution.max_supported_priority:
            bound = hyperparameter.bound
            hyperparameter.load(saved)
            raise ValueError(
                f"{self.owner}(alpha={bound:g}): alpha is too large for the largest priority so far, {largest:g}; "
                "use a smaller alpha."
            )
        self.hyperparameters_changed()
        if name == "alpha" and float(hyperparameter.value) != before:
            self.reweight()

    # --- writes

    def ingest(self, storage: Storage) -> None:
        """Insert the rows that a storage held before this sampler was attached as new transitions, oldest first."""
        steps = torch.arange(_torchrl.length(storage) // self.layout.slots_per_step, device=self.layout.device)
        last = _torchrl.last_step(storage)
        if last is not None:
            steps = (steps + last + 1) % len(steps)
        # the ring position of a loaded storage is unknown until the next write
        self._order_is_unknown = last is None and len(steps) == self.layout.steps
        slots = self.layout.slots_at(steps).reshape(-1)
        with self.log.transaction():
            for part in self._parts:
                part.before_ingest(len(slots), None if last is None else (last + 1) * self.layout.slots_per_step - 1)
            self.insert(slots, storage)

    def discard_unseen_writes(self, storage: Storage | None) -> None:
        """Remove slots written after the last write that the sampler was notified of; they may be incomplete."""
        self.recover(storage)
        sets = _torchrl.num_sets(storage)
        if sets is not None and sets == self._seen_sets.item():
            return
        last, last_seen = _torchrl.last_step(storage), self.log.last_seen_step.item()
        if last is not None and last_seen >= 0 and last != last_seen:
            with self.log.transaction():
                self.remove(self.log.unannounced(last))
                self.log.see_step(last)
        if sets is not None:
            self._seen_sets.fill_(sets)

    def recover(self, storage: Storage | None, being_written: Tensor | None = None) -> None:
        """Rebuild the state from the log and the stored rows if a change was interrupted.

        Stored transitions keep their last priorities. Two things are lost: the alpha of each transition while alpha is
        annealed, and the order in which transitions that were never updated were written.
        """
        if storage is None:
            return
        if being_written is None:
            self.distribution.sync(lambda: self._next_slot(storage))
        if not self.log.needs_recovery:
            return
        last = _torchrl.last_step(storage)
        runs, priority = self.log.known_runs(last, being_written), self.priorities.of_slot.clone()
        unseen = self.log.unannounced(last)
        if unseen.numel():
            self.distribution.remove(unseen)
        for part in self._parts:
            part.clear()
        self.log.forget_contents()
        if not self.priorities.within_buffer:
            self.priorities.largest.copy_(torch.maximum(self.priorities.largest, priority.abs().max()))
        self.priorities.clear()
        for run in runs:
            self.insert(run, storage)
        updated = ((self.log.generation > 0) & (priority > 0)).nonzero().squeeze(1)
        if updated.numel():
            self.priorities.update(updated, priority[updated], 0.0)
            self.distribution.update(updated, priority[updated], None)
        self.log.announce(None)
        self.log.mark_clean()

    def _next_slot(self, storage: Storage) -> int | None:
        last = _torchrl.last_step(storage)
        return None if last is None else (last + 1) * self.layout.slots_per_step

    def _locate(self, slots: Tensor, storage: Storage | None) -> RingWrite:
        newest = _torchrl.last_step_value(storage) if self.distribution.slots_in_ring_order else None
        return self.log.locate(slots, newest)

    def write(self, index: int | Tensor, slots: Tensor, storage: Storage | None) -> None:
        """Update the state after a write. Not usable in graphs.

        Args:
            index: the index of the rows, in TorchRL's format.
            slots: the same as slots, int64 [n]. On the CPU they can be read without waiting.
            storage: the storage.

        Raises:
            KeyError, TypeError, ValueError: if a part rejects the rows; nothing is changed then.
            IndexError: if a slot is out of range.
        """
        if not slots.numel():
            return
        count, sets = slots.numel(), _torchrl.num_sets(storage)
        write = self._locate(slots, storage)
        if write.smallest < 0 and len(self.layout.shape) == 1:
            # TensorDictMaxValueWriter returns -1 for transitions that it does not store
            slots = slots[slots >= 0]
            if not slots.numel():
                return
            write = self._locate(slots, storage)
        if write.smallest < 0 or write.largest >= self.layout.num_slots:
            require_in_range(self.owner, slots, self.layout.num_slots, self.layout.shape)
        if slots.device != self.layout.device:
            slots = to_device(slots, self.layout.device)
            write = write._replace(slots_as_index=as_index(slots))
        self.recover(storage, slots)
        self._write_has_effects = False
        try:
            with self.log.transaction():
                end = self._apply_write(slots, write, storage)
        except REFUSALS:
            if not self._write_has_effects:
                self.log.mark_clean()
            self.holds_only_rejected_write |= storage is not None and _torchrl.length(storage) <= slots.numel()
            raise
        if sets is not None and end == write.newest:
            self._seen_sets.fill_(sets)
        self.log.announce(index if slots.numel() == count else None, write.slots_as_index)

    def _apply_write(self, slots: Tensor, write: RingWrite, storage: Storage | None) -> int:
        """Apply a write of ``slots`` [n]; returns the ring position after it, as :meth:`WriteLog.place_write`.

        If n exceeds the number of slots, the first rows were overwritten.
        """
        log = self.log
        if self._needs_order and self._order_is_unknown and write.newest >= 0:
            self.clear()
            log.mark_dirty()
            write = write._replace(last_seen=UNKNOWN)
        is_first = log.is_empty and not self.holds_only_rejected_write
        if is_first and storage is not None and _torchrl.length(storage) > slots.numel():
            self.ingest(storage)
            end, _ = self._place(len(slots), write, storage)
            log.see_step(end)
            return end
        end, skipped = self._place(len(slots), write, storage)
        if skipped is not None:
            self.remove(skipped)
        if slots.numel() > self.layout.num_slots:
            # all earlier rows are overwritten, and also the first rows of this write
            self._write_has_effects = True
            for part in self._parts:
                part.before_full_overwrite()
            self.log.invalidate(torch.arange(self.layout.num_slots, device=self.layout.device))
            slots = slots[-self.layout.num_slots :]
            write = write._replace(slots_as_index=as_index(slots))
        self.insert(slots, storage, write)
        # last, because the write may be rejected
        log.see_step(end)
        return end

    def _place(self, count: int, write: RingWrite, storage: Storage | None) -> tuple[int, Tensor | None]:
        """Find the ring position after a write of ``count`` rows, and the slots that it skipped, if any.

        Raises:
            ValueError: if the write is not consecutive in the ring, but the order of slots is needed.
        """
        end, skipped = self.log.place_write(
            count,
            write,
            lambda: any(part.treats_gaps_as_lost for part in self._parts) or _torchrl.has_round_robin_writer(storage),
        )
        if end == OUT_OF_ORDER and self._needs_order:
            raise ValueError(
                f"{self.owner}: slots must be written one after the other; use a round-robin writer, the default."
            )
        return end, skipped

    def insert(self, slots: Tensor, storage: Storage | None, write: RingWrite | None = None) -> None:
        """Insert the transitions in ``slots`` [n]. Without ``write``, all of them count as new."""
        index = as_index(slots) if write is None else write.slots_as_index
        rows = StoredRows(self.owner, storage, slots, index, self.log, write)
        largest = self.priorities.largest.clone() if self.priorities.within_buffer else None
        self.priorities.exclude(slots)
        accepted = False
        try:
            for part in self._parts:
                part.insert(slots, self.priorities.largest, rows)
                accepted = True
        except REFUSALS:
            self._write_has_effects |= accepted
            if largest is not None:
                self.priorities.undo_exclude(slots, largest)
            raise
        self.log.record(index)
        self.priorities.insert(index)

    def remove(self, slots: Tensor) -> None:
        """Mark ``slots`` [n], without duplicates, as empty."""
        if slots.numel():
            for part in self._parts:
                part.remove(slots)
            self.log.invalidate(slots)
            self.priorities.remove(slots)

    def generation(self, slots: Tensor) -> Tensor:
        """The number of the write that filled each of ``slots`` [n], int64 [n]; 0 for empty slots."""
        return gather_in_bounds(self.log.generation, slots)

    def reweight(self) -> None:
        """Recompute all densities after an exponent was changed."""
        with self.log.transaction():
            self.distribution.reweight(None)

    # --- state

    def clear(self) -> None:
        """Restore the initial state."""
        for part in self._parts:
            part.clear()
        self.log.clear()
        self.priorities.reset()
        for counter in self.updates.counters.values():
            counter.zero_()
        self.holds_only_rejected_write = self._order_is_unknown = False
        # updates of batches drawn before are dropped
        self.updates.pending.forget_contents()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        tensors = {**self.log.tensors(), **self.priorities.tensors(), **self.updates.counters}
        for part in self._parts:
            tensors |= part.tensors()
        return tensors

    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced."""
        self.hyperparameters_changed()
        # a restored state knows its order
        self.holds_only_rejected_write = self._order_is_unknown = False
        self.log.rebuild()
        self.priorities.rebuild()
        self.updates.pending.forget_contents()
        for part in self._parts:
            part.rebuild()

    def stats(self) -> dict[str, Tensor]:
        """Statistics for logging, scalars."""
        slots = self.distribution.stored_slots()
        density, count = self.distribution.density(slots), len(slots)
        if not count or not bool(density.sum() > 0):
            density = torch.ones(1, dtype=torch.float64, device=density.device)
        relative = density / density.mean()
        return {
            "num_items": torch.tensor(count),
            "effective_sample_size": 1 / (relative**2).mean(),
            "priority_min": relative.min(),
            "priority_median": relative.median(),
            "priority_max": relative.max(),
            "never_updated": (gather_in_bounds(self.priorities.of_slot, slots) < 0).sum() / max(count, 1),
            "max_priority": self.priorities.largest,
            **{name: self.updates.counters[name] for name in ("dropped_updates", "rejected_updates")},
            **{name: hyperparameter.value for name, hyperparameter in self._hyperparameters.items()},
            **self.distribution.stats(),
        }

    def check_valid(self) -> None:
        """Raise AssertionError if the state is inconsistent. O(N)."""
        self.log.check_valid()
        self.priorities.check_valid(self.log.generation)
        for part in self._parts:
            part.check_valid()
