"""The state of a sampler for the slots of its buffer, updated at each write and priority update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import TDError, shown
from torchrl_replay_ext.compilation import Array, gather_in_bounds, is_traced, to_device
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.priorities import Priorities, as_float32
from torchrl_replay_ext.core.write_log import RingWrite, WriteLog
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.kernels.ops import Views, rows_record
from torchrl_replay_ext.samplers import saved_state
from torchrl_replay_ext.samplers.base import Distribution, WriteObserver
from torchrl_replay_ext.samplers.rows import RowView
from torchrl_replay_ext.samplers.slot_index import require_in_range
from torchrl_replay_ext.samplers.slot_updates import SlotUpdates

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

    # True once rows were written, or those of the storage were ingested: then the storage holds no unknown rows
    _knows_storage = False

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
            hyperparameter.to(layout.counters, layout.device)
        self.log = WriteLog(layout)
        self.priorities = Priorities(layout.size, layout.device, **priority_arguments)
        self.distribution = make(self.log, self.priorities)
        # the tree of d^α that the kernels of writes and updates change too; no leaves if there is none
        nothing = (torch.empty(0, dtype=torch.int64, device=layout.device) for _ in range(4))
        no_tree = *nothing, 0, torch.empty(0, dtype=torch.float64, device=layout.device)
        tree = self.distribution.power_parts or no_tree
        self.updates = SlotUpdates(owner, self.log, self.priorities, self.distribution, tree, hyperparameters)
        state = self.log.generation, self.log.num_writes, self.log.draws, self.log.num_draws
        self._views = Views(*state, self.priorities.of_slot, self.priorities.largest, *tree)
        # all parts that are updated at each write; the distribution is last, since the others may reject rows
        self._parts: list[WriteObserver] = [*self.distribution.parts, self.distribution]
        # True if the order of the writes matters to a part
        self.needs_order = any(part.needs_order for part in self._parts)
        for observe in make_observers:
            self.observe(observe)
        self.hyperparameters_changed()
        if self.priorities.largest.item() > self.distribution.max_supported_priority:
            raise ValueError(
                f"{owner}(min_priority={shown(priority_arguments['min_priority'])}): must be <= "
                f"{shown(self.distribution.max_supported_priority)} for {layout.size} slots and this alpha."
            )

    @property
    def observers(self) -> list[WriteObserver]:
        """What :meth:`observe` has added."""
        return self._parts[len(self.distribution.parts) : -1]

    def observe(self, make: MakeObserver) -> None:
        """Add state that must be updated at each write."""
        self._parts.insert(len(self._parts) - 1, make(self.log))
        self.needs_order = any(part.needs_order for part in self._parts)

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
                f"{self.owner}(alpha={shown(bound)}): alpha is too large for the largest priority so far, "
                f"{shown(largest)}; use a smaller alpha."
            )
        self.hyperparameters_changed()
        if name == "alpha" and float(hyperparameter.value) != before:
            self.reweight()

    # --- writes

    def ingest(self, storage: Storage, following: int | None = None) -> None:
        """Insert the rows that a storage held before this sampler was attached as new transitions, oldest first.

        Rows are in the order of their slots, beginning with the step ``following`` that will be written next. Default:
        None, where the buffer's writer is.
        """
        self._knows_storage = True
        count = _torchrl.length(storage)
        following = _torchrl.next_step(storage) if following is None else following
        steps = torch.arange(count // self.layout.slots_per_step, device=self.layout.device)
        slots = self.layout.slots_at((steps + (following or 0)) % len(steps)).reshape(-1)
        for part in self._parts:
            part.before_ingest(count, (following or 0) * self.layout.slots_per_step)
        self.insert(slots, storage)
        if following is not None and self.needs_order:
            self.log.see_step((following - 1) % self.layout.steps)

    def synchronize(self, storage: Storage | None) -> bool:
        """Ingest the rows of a storage that nothing is known of; True if there were such rows."""
        self.distribution.sync()
        if storage is None or self._knows_storage or not self.log.is_empty or not _torchrl.length(storage):
            return False
        self.ingest(storage)
        return True

    def write(self, index: int | Tensor, slots: Tensor, storage: Storage | None) -> None:
        """Update the state after a write. Not usable in graphs.

        If the order of the rows matters, stored rows that are not those before the cursor of the buffer's writer were
        changed in place. All others are new, and slots between them and the last write were lost and are removed.

        Args:
            index: the index of the rows, in TorchRL's format.
            slots: the same as slots, int64 [n]. On the CPU they can be read without waiting.
            storage: the storage.

        Raises:
            KeyError, TypeError, ValueError: if a part rejects the rows. These slots are then empty.
            IndexError: if a slot is out of range.
        """
        if not slots.numel():
            self.distribution.sync()
            return
        count = slots.numel()
        in_order = self.needs_order
        cursor = _torchrl.next_step_value(storage) if in_order else None
        write = self.log.locate(slots, cursor, in_order=in_order)
        if write.smallest < 0 and len(self.layout.shape) == 1:
            # TensorDictMaxValueWriter returns -1 for transitions that it does not store
            slots = slots[slots >= 0]
            if not slots.numel():
                return
            write = self.log.locate(slots, cursor, in_order=in_order)
        if write.smallest < 0 or write.largest >= self.layout.num_slots:
            require_in_range(self.owner, slots, self.layout.num_slots, self.layout.shape)
        if slots.device != self.layout.device:
            slots = to_device(slots, self.layout.device)
            write = write._replace(slots_as_index=as_index(slots))
        is_first = not self._knows_storage and self.log.is_empty
        self._knows_storage = True
        if is_first and storage is not None and _torchrl.length(storage) > count:
            self.ingest(storage, (write.last + 1) % self.layout.steps)
        else:
            self._apply_write(slots, write, storage)
        self.log.announce(index if slots.numel() == count else None, write.slots_as_index)

    def _apply_write(self, slots: Tensor, write: RingWrite, storage: Storage | None) -> None:
        """Apply a write of ``slots`` [n]. If n exceeds the number of slots, the first rows were overwritten."""
        if self.needs_order:
            if self.log.is_rewrite(slots.numel(), write):
                self.insert(slots, storage, write.slots_as_index, is_rewrite=True)
                return
            self._require_ring_order(slots, write, storage)
            if write.expected not in (-1, write.first):
                lost = self.log.steps_between(write.expected, write.first)
                self.remove(self.layout.slots_at(lost).reshape(-1))
        index = write.slots_as_index
        if slots.numel() > self.layout.num_slots:
            # all earlier rows are overwritten, and also the first rows of this write
            for part in self._parts:
                part.before_full_overwrite()
            self._forget(torch.arange(self.layout.num_slots, device=self.layout.device))
            slots = slots[-self.layout.num_slots :]
            index = as_index(slots)
        self.insert(slots, storage, index)
        if self.needs_order:
            # last, because the write may be rejected
            self.log.see_step(write.last)

    def _require_ring_order(self, slots: Tensor, write: RingWrite, storage: Storage | None) -> None:
        """Raise ValueError if the writer does not fill one slot of the ring after the other."""
        consecutive = isinstance(write.slots_as_index, slice)
        if not consecutive:
            order = torch.arange(slots.shape[0], device=slots.device)
            consecutive = bool((slots == (slots[0] + order) % self.layout.num_slots).all())
        # where the cursor is known, the writer fills the ring
        if not consecutive or (write.cursor < 0 and not _torchrl.has_round_robin_writers(storage)):
            raise ValueError(
                f"{self.owner}: slots must be written one after the other; use a round-robin writer, the default."
            )

    def insert(
        self, slots: Tensor, storage: Storage | None, index: Array | None = None, *, is_rewrite: bool = False
    ) -> None:
        """Insert the transitions in ``slots`` [n].

        Args:
            slots: int64 [n].
            storage: the storage.
            index: the slots as :attr:`RingWrite.slots_as_index`. Default: None, derived from ``slots``.
            is_rewrite: True if the rows were stored before and changed in place. Default: False.
        """
        index = as_index(slots) if index is None else index
        rows = RowView(self.owner, storage, slots, index, self.layout.num_slots, is_rewrite)
        self.priorities.exclude(slots)
        inserted: list[WriteObserver] = []
        try:
            for part in self._parts:
                part.insert(slots, self.priorities.largest, rows)
                inserted.append(part)
        except BaseException:
            self._undo(slots, inserted)
            raise
        rows_record(*self._views(), slots.contiguous(), True)

    def _undo(self, slots: Tensor, inserted: list[WriteObserver]) -> None:
        """Empty ``slots`` [n] after an error: the rows before were overwritten, and those of the write are refused."""
        if is_traced():
            return
        before = slots[self.log.generation.index_select(0, slots) > 0]
        for part in self._parts:
            rows = slots if part in inserted else before
            if rows.numel():
                part.remove(rows)
        if before.numel():
            self._forget(before)

    def remove(self, slots: Tensor) -> None:
        """Mark ``slots`` [n], without duplicates, as empty."""
        if slots.numel():
            for part in self._parts:
                part.remove(slots)
            self._forget(slots)

    def _forget(self, slots: Tensor) -> None:
        rows_record(*self._views(), slots.contiguous(), False)
        self.log.announce(None)
        if self.priorities.within_buffer:
            self.priorities.recount(slots)

    def discard(self, slots: Tensor) -> None:
        """Mark those of ``slots`` [n], in the order of a failed write, as empty that hold a transition."""
        slots = slots[-self.layout.num_slots :]
        self.remove(slots[self.log.generation.index_select(0, slots) > 0])

    def generation(self, slots: Tensor) -> Tensor:
        """The number of the write that filled each of ``slots`` [n], int64 [n]; 0 for empty slots."""
        return gather_in_bounds(self.log.generation, slots)

    def reweight(self) -> None:
        """Recompute all densities after an exponent was changed."""
        self.distribution.reweight(None)

    # --- state

    def clear(self) -> None:
        """Restore the initial state."""
        for part in self._parts:
            part.clear()
        self.log.clear()
        self.priorities.reset()
        for counter in self.updates.tensors().values():
            counter.zero_()
        self._knows_storage = False

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        tensors = {**self.log.tensors(), **self.priorities.tensors(), **self.updates.tensors()}
        for part in self._parts:
            tensors |= part.tensors()
        return tensors

    def load(self, call: str, state: Mapping[str, Tensor], keys: Iterable[str], num_writes: int) -> None:
        """Restore the entries ``keys`` and the hyperparameters; there were ``num_writes`` writes before.

        ValueError if one of them cannot be loaded. Then a part may have been loaded.
        """
        tensors = self.tensors()
        tensors = {key: tensors[key] for key in keys}
        exponents = {key: hyperparameter.state() for key, hyperparameter in self._hyperparameters.items()}
        saved_state.require_fitting(call, state, tensors | exponents)
        for key, tensor in tensors.items():
            tensor.copy_(state[key])
        for key, hyperparameter in self._hyperparameters.items():
            hyperparameter.load(state[key])
        self.hyperparameters_changed()
        self._knows_storage = True
        for part in (self.log, *self._parts):
            part.raise_numbers(num_writes)
        self.log.rebuild()
        self.priorities.rebuild()
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
            **self.updates.stats(),
            **{name: hyperparameter.value for name, hyperparameter in self._hyperparameters.items()},
            **self.distribution.stats(),
        }

    def check_valid(self) -> None:
        """Raise AssertionError if the state is inconsistent. O(N)."""
        self.log.check_valid()
        self.priorities.check_valid(self.log.generation)
        largest = max(self.priorities.largest.item(), self.priorities.of_slot.abs().max().item())
        if largest > as_float32(self.distribution.max_supported_priority):
            raise AssertionError(f"the largest priority is {shown(largest)}, which is too large for this alpha")
        for part in self._parts:
            part.check_valid()
