"""The state of a sampler, and what a write to the buffer changes in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import shown
from torchrl_replay_ext.compilation import Array, gather_in_bounds, is_traced, to_device
from torchrl_replay_ext.core.layout import Layout, out_of_range
from torchrl_replay_ext.core.priorities import Priorities, as_float32
from torchrl_replay_ext.core.sum_tree import PowerMasses
from torchrl_replay_ext.core.write_log import RingWrite, WriteLog
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.kernels.ops import Views, rows_record
from torchrl_replay_ext.samplers import saved_state
from torchrl_replay_ext.samplers.base import Distribution, WriteObserver
from torchrl_replay_ext.samplers.priority_updates import PriorityUpdates
from torchrl_replay_ext.samplers.rows import RowView

MakePriorities = Callable[[WriteLog], Priorities]
MakeDistribution = Callable[[WriteLog, Priorities], Distribution]
MakeObserver = Callable[[WriteLog], WriteObserver]


class SamplerState:
    """The write log, the priorities, the distribution and further state that follows the writes to one buffer.

    Args:
        owner: class name of the sampler, for error messages.
        layout: the slots.
        make_priorities: creates the priorities.
        make: creates the distribution.
        make_observers: create further state that must be updated at each write.
        hyperparameters: hyperparameters of the sampler, by name.
    """

    # True once rows were written, or those of the storage were ingested: then the storage holds no unknown rows
    _knows_storage = False

    def __init__(
        self,
        owner: str,
        layout: Layout,
        make_priorities: MakePriorities,
        make: MakeDistribution,
        make_observers: Sequence[MakeObserver],
        hyperparameters: dict[str, Hyperparameter],
    ):
        self.owner, self.layout, self._hyperparameters = owner, layout, hyperparameters
        for hyperparameter in hyperparameters.values():
            hyperparameter.to(layout.counters, layout.device)
        self.log = WriteLog(layout)
        self.priorities = make_priorities(self.log)
        self.distribution = make(self.log, self.priorities)
        masses = self.distribution.power_masses or PowerMasses.none(layout.device)
        self.updates = PriorityUpdates(owner, self.log, self.priorities, self.distribution, masses, hyperparameters)
        # the first arguments of rows.record
        state = self.log.generation, self.log.num_writes, self.log.draws, self.log.num_draws
        self._views = Views(*state, self.priorities.of_slot, self.priorities.largest, *masses)
        self.observers = [observe(self.log) for observe in make_observers]
        restrictions = [part.restricts_to for part in self.observers if part.restricts_to is not None]
        self.distribution.restricted_to = restrictions[0] if restrictions else None
        # All parts that are updated at each write. Parts may reject rows, and those before then remove them again. Sums
        # of episodes lose only their oldest rows, so the parts of the distribution follow the observers.
        parts = self.priorities, *self.observers, *self.distribution.parts, self.distribution
        self._parts: list[WriteObserver] = [*parts]
        # True if the order of the writes matters to a part
        self.needs_order = any(part.needs_order for part in self._parts)
        self.updates.hyperparameters_changed()
        if self.priorities.largest.item() > self.distribution.max_supported_priority:
            raise ValueError(
                f"{owner}(min_priority={shown(self.priorities.smallest)}): must be <= "
                f"{shown(self.distribution.max_supported_priority)} for {layout.size} slots and this alpha."
            )

    def set_hyperparameter(self, name: str, value: float | Tensor | Anneal) -> None:
        """Assign a number or a schedule.

        Raises:
            ValueError: if alpha is too large for the largest priority; nothing is changed then.
        """
        hyperparameter = self._hyperparameters[name]
        before, saved = float(hyperparameter.value), hyperparameter.state()
        hyperparameter.set(value)
        if name == "alpha":
            largest, bound = self.priorities.largest_so_far(), hyperparameter.bound
            if largest > self.distribution.max_supported_priority:
                hyperparameter.load(saved)
                raise ValueError(
                    f"{self.owner}(alpha={shown(bound)}): alpha is too large for the largest priority so far, "
                    f"{shown(largest)}; use a smaller alpha."
                )
            if float(hyperparameter.value) != before:
                self.distribution.reweight(None)
        self.updates.hyperparameters_changed()

    # --- writes

    def ingest(self, storage: Storage, following: int) -> None:
        """Insert the rows that a storage held before this sampler was attached as new transitions, oldest first.

        Args:
            storage: the storage.
            following: the step that is written next, or -1 if it is unknown. In a full ring it is the oldest one.
        """
        self._knows_storage = True
        count, oldest = _torchrl.length(storage), max(following, 0)
        for part in self._parts:
            part.before_ingest(count, oldest * self.layout.slots_per_step)
        self.insert(self.layout.slots_from(oldest if count == self.layout.size else 0, count), storage)
        if following >= 0 and self.needs_order:
            self.log.last_seen_step.fill_((following - 1) % self.layout.steps)

    def synchronize(self, storage: Storage | None) -> None:
        """Bring the state up to date before it is used, outside of graphs."""
        self.distribution.sync()
        if not self._knows_storage and storage is not None and self.log.is_empty and _torchrl.length(storage):
            self.ingest(storage, int(_torchrl.next_step(storage)))

    def write(self, index: int | Tensor | None, slots: Tensor, storage: Storage | None) -> None:
        """Update the state after a write. Not usable in graphs.

        If the order of the rows matters, stored rows that are not those before the cursor of the buffer's writer were
        changed in place. All others are new, and slots between them and the last write were lost and are removed.

        Args:
            index: the index of the rows, in TorchRL's format; None: no update for these rows is expected.
            slots: the same as slots, int64 [n]. On the CPU they can be read without waiting.
            storage: the storage.

        Raises:
            KeyError, TypeError, ValueError: if a part rejects the rows. These slots are then empty.
            IndexError: if a slot is out of range.
        """
        if not slots.numel():
            self.distribution.sync()
            return
        write = self.log.locate(slots, _torchrl.next_step(storage) if self.needs_order else None)
        if write.smallest < 0 and len(self.layout.shape) == 1:
            # TensorDictMaxValueWriter returns -1 for transitions that it does not store
            self.write(None, slots[slots >= 0], storage)
            return
        if write.smallest < 0 or write.largest >= self.layout.size:
            wrong = write.smallest if write.smallest < 0 else write.largest
            raise out_of_range(self.owner, wrong, self.layout.shape)
        if slots.device != self.layout.device:
            slots = to_device(slots, self.layout.device)
            write = write._replace(slots_as_index=as_index(slots))
        is_first = not self._knows_storage and self.log.is_empty
        self._knows_storage = True
        if is_first and storage is not None and _torchrl.length(storage) > slots.shape[0]:
            self.ingest(storage, (write.last + 1) % self.layout.steps)
        elif self.needs_order and self.log.is_rewrite(slots, write):
            self.insert(slots, storage, write.slots_as_index, is_rewrite=True)
        else:
            self._append(slots, write, storage)
        self.log.announce(index, write.slots_as_index)

    def _append(self, slots: Tensor, write: RingWrite, storage: Storage | None) -> None:
        """Insert new rows, ``slots`` [n]. If n exceeds the number of slots, the first ones were overwritten."""
        if self.needs_order:
            self._require_ring_order(slots, write)
            if write.expected not in (-1, write.first):
                lost = (write.first - write.expected) % self.layout.steps
                self.remove(self.layout.slots_from(write.expected, lost * self.layout.slots_per_step))
        index = write.slots_as_index
        if slots.shape[0] > self.layout.size:
            # all earlier rows are overwritten, and also the first rows of this write
            for part in self._parts:
                part.before_full_overwrite()
            slots = slots[-self.layout.size :]
            index = as_index(slots)
        self.insert(slots, storage, index)
        if self.needs_order:
            # last, because the write may be rejected
            self.log.last_seen_step.fill_(write.last)

    def _require_ring_order(self, slots: Tensor, write: RingWrite) -> None:
        """Raise ValueError if the writer does not fill one slot of the ring after the other."""
        is_ring = isinstance(write.slots_as_index, slice)
        is_ring = is_ring or torch.equal(slots, self.layout.slots_from(write.first, slots.shape[0]))
        if not is_ring or write.cursor < 0:
            raise ValueError(
                f"{self.owner}: slots must be written one after the other, by a buffer with a round-robin writer, the "
                "default."
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
        rows = RowView(self.owner, storage, slots, index, self.layout.size, is_rewrite)
        inserted: list[WriteObserver] = []
        try:
            for part in self._parts:
                part.insert(slots, self.priorities.largest, rows)
                inserted.append(part)
        except BaseException:
            self._undo(slots, inserted)
            raise
        rows_record(*self._views(), slots.contiguous(), True)
        self.distribution.leave_out(slots)

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

    def generation(self, slots: Tensor) -> Tensor:
        """The number of the write that filled each of ``slots`` [n], int64 [n]; 0 for empty slots."""
        return gather_in_bounds(self.log.generation, slots)

    # --- state

    def clear(self) -> None:
        """Restore the initial state."""
        for part in (self.log, *self._parts):
            part.clear()
        for counter in self.updates.tensors().values():
            counter.zero_()
        self._knows_storage = False

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        tensors = self.updates.tensors()
        for part in (self.log, *self._parts):
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
        self.updates.hyperparameters_changed()
        self._knows_storage = True
        for part in (self.log, *self._parts):
            part.raise_numbers(num_writes)
        for part in (self.log, *self._parts):
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
        largest = self.priorities.largest_so_far()
        if largest > as_float32(self.distribution.max_supported_priority):
            raise AssertionError(f"the largest priority is {shown(largest)}, which is too large for this alpha")
        for part in (self.log, *self._parts):
            part.check_valid()
