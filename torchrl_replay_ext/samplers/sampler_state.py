"""The state of a sampler, and what writes to the buffer and priority updates change in it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import shown
from torchrl_replay_ext.compilation import Array, gather_in_bounds, is_traced, to_device
from torchrl_replay_ext.core.layout import Layout, out_of_range
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import PowerMasses
from torchrl_replay_ext.core.write_log import RingWrite, WriteLog
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.kernels.ops import Views, empty, rows_record, rows_update
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, OUT_OF_RANGE
from torchrl_replay_ext.samplers import saved_state
from torchrl_replay_ext.samplers.base import Distribution, WriteObserver
from torchrl_replay_ext.samplers.rows import RowView

# Stands for a TD error that is missing. TorchRL's buffers pass it for rows that they add and for samples without TD
# errors.
NO_TD_ERROR = -math.inf
# In graphs, each update applies an annealed alpha to this number of slots, in turns through the whole buffer.
_REWEIGHTED = 64

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
        hyperparameters: hyperparameters of the sampler, by name; their schedules count updates.
    """

    # True once rows were written, or those of the storage were ingested: then the storage holds no unknown rows
    _knows_storage = False

    def __init__(
        self,
        owner: str,
        layout: Layout,
        make_priorities: Callable[[WriteLog], Priorities],
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
        # the numbers of late and of invalid rows of updates; in a graph, the slot that alpha is applied to next
        self._counts = torch.zeros(2, dtype=torch.int64, device=layout.device)
        self._cursor = torch.zeros((), dtype=torch.int64, device=layout.device)
        # the largest d that updates may contain
        self._limit = torch.zeros(1, dtype=torch.float64, device=layout.device)
        log, priorities = self.log, self.priorities
        # the first arguments of rows.record
        state = log.generation, log.num_writes, log.drawn_at
        self._views = Views(*state, priorities.of_slot, priorities.largest, *masses)
        # the first arguments of rows.update, and an array that stands for those that are missing
        self._update_views = Views(
            *(log.generation, log.drawn_at, log.draws, priorities.of_slot, priorities.largest_updated),
            *(self._counts, self._limit, priorities.eps, priorities.smallest, priorities.td_error == "squared"),
            *masses,
            self._counts[:0].clone(),
        )
        # True if more than the kernel changes has to follow priorities
        self._has_followers = priorities.within_buffer or type(self.distribution).update is not Distribution.update
        self.observers = [observe(self.log) for observe in make_observers]
        # All parts that are updated at each write. Parts may reject rows, and those before then remove them again. Sums
        # of episodes lose only their oldest rows, so the parts of the distribution follow the observers.
        parts = self.priorities, *self.observers, *self.distribution.parts, self.distribution
        self._parts: list[WriteObserver] = [*parts]
        # True if the order of the writes matters to a part
        self.needs_order = any(part.needs_order for part in self._parts)
        self.refresh_limit()
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
        self.refresh_limit()

    def refresh_limit(self) -> None:
        """Compute the largest d that updates may contain, after hyperparameters have changed."""
        self._limit.fill_(min(self.distribution.max_supported_priority, torch.finfo(torch.float32).max))

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

    def write(self, slots: Tensor, storage: Storage | None) -> None:
        """Update the state after a write. Not usable in graphs.

        If the order of the rows matters, stored rows that are not those before the cursor of the buffer's writer were
        changed in place. All others are new, and slots between them and the last write were lost and are removed.

        Args:
            slots: int64 [n]. On the CPU they can be read without waiting.
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
            self.write(slots[slots >= 0], storage)
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

    def generation(self, slots: Tensor) -> Tensor:
        """The number of the write that filled each of ``slots`` [n], int64 [n]; 0 for empty slots."""
        return gather_in_bounds(self.log.generation, slots)

    # --- priority updates

    def _td_errors(self, given: Any, count: int) -> Tensor:
        """Convert TD errors, one for each of ``count`` slots or a scalar for all of them, to float32 [count].

        ValueError if ``given`` has another number of elements.
        """
        device = self.layout.device
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
                f"{self.owner}.update_priority: there are {error.shape[0]} TD errors for {count} indices; pass one TD "
                "error per transition."
            )
        return error.expand(count)

    def update(self, slots: Tensor, td_error: float | Tensor, stamp: Tensor | None) -> None:
        """Set priorities from TD errors, except of late rows; see :func:`torchrl_replay_ext.kernels.rows.update`.

        In eager code on the CPU, and on accelerators with ``layout.validate``, invalid rows raise errors. In graphs and
        on other accelerators they are left out and counted.

        Args:
            slots: int64 [n].
            td_error: TD errors, one for each slot, or a scalar for all slots.
            stamp: generations at the draw, int64 [n]; None if unknown.

        Raises:
            ValueError: if a TD error is invalid, or their number is not n; nothing is changed then.
            IndexError: likewise, if a slot is out of range, or is empty and was never drawn.
        """
        count = slots.shape[0]
        error = self._td_errors(td_error, count)
        if not count:
            return
        in_graph = is_traced()
        refuses = not in_graph and (self.layout.validate or slots.is_cpu)
        # on accelerators only a number that was expanded is read, as TorchRL's buffers do
        is_expanded = count == 1 or error.stride(0) == 0
        if is_expanded and not refuses and not in_graph and error[0] == NO_TD_ERROR:
            self._ignore(slots)
            return
        *state, nothing = self._update_views()
        stamp = nothing if stamp is None else stamp.reshape(-1).contiguous()
        kept, d = empty(nothing, count, torch.int64), empty(nothing, count, torch.float32)
        result = empty(nothing, 2, torch.int64)
        rows_update(*state, slots.contiguous(), error.contiguous(), stamp, refuses, kept, d, result)
        if refuses:
            # why the update is refused, and the row; or 0, and the number of rows that are kept
            reason, number = result.tolist()
            if reason == INVALID and bool((error == NO_TD_ERROR).all()):
                self._ignore(slots)
                return
            if reason:
                raise self._refusal(reason, slots, error, row=number)
            count = number
        if count and self._has_followers:
            if not isinstance(kept, Tensor):
                # on the CPU, the rows that are kept come first
                kept, d = torch.from_numpy(kept[:count]), torch.from_numpy(d[:count])
            if self.priorities.within_buffer:
                self.priorities.recount(kept)
            self.distribution.update(kept, d)
        self.step()

    def _ignore(self, slots: Tensor) -> None:
        """Ignore an update without TD errors. A sample is counted, with a warning; not rows that were just stored."""
        slots_in_range = slots.clamp(0, self.layout.size - 1)
        if bool((gather_in_bounds(self.log.drawn_at, slots_in_range) > 0).any()):
            self._counts[1].add_(len(slots))
            warnings.warn(
                f"{self.owner}: the batch has no TD errors in the entry that the buffer's priority_key names "
                '(default: "td_error"), so priorities stay as they are. The loss must write this entry, or pass '
                "priority_key=.",
                stacklevel=2,
            )

    def _refusal(self, reason: int, slots: Tensor, error: Tensor, row: int) -> Exception:
        """The error for a row of an update; ``reason``: see :mod:`~torchrl_replay_ext.kernels.reasons`."""
        slot = int(slots[row])
        if reason == OUT_OF_RANGE:
            return out_of_range(self.owner, slot, self.layout.shape)
        if reason == EMPTY:
            return IndexError(f"{self.owner}.update_priority: slot {slot} is out of range: it is empty.")
        limit, wrong = self.distribution.max_supported_priority, np.float32(float(error[row]))
        return ValueError(
            f"{self.owner}.update_priority: TD error {shown(wrong)} at index {slot} (position {row} "
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
        if not self.layout.for_graphs:
            if alpha.just_ended():
                self.distribution.reweight(None)
        else:
            slots = (self._cursor + torch.arange(_REWEIGHTED, device=self.layout.device)) % self.layout.size
            self._cursor.add_(_REWEIGHTED)
            self.distribution.reweight(slots)

    # --- state

    def clear(self) -> None:
        """Restore the initial state."""
        for part in (self.log, *self._parts):
            part.clear()
        self._counts.zero_()
        self._cursor.zero_()
        self._knows_storage = False

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        tensors = {"update_counts": self._counts, "reweight_cursor": self._cursor}
        for part in (self.log, *self._parts):
            tensors |= part.tensors()
        return tensors

    def require_fitting(self, call: str, state: Mapping[str, Any], keys: Iterable[str] | None) -> None:
        """Raise ValueError unless a state has the entries of this one; of these, only ``keys`` must have its shapes.

        ``call`` names the method in errors. ``keys``: None for all entries.
        """
        tensors = self.tensors()
        if keys is not None:
            tensors = {key: tensor if key in keys else state.get(key, tensor) for key, tensor in tensors.items()}
        tensors |= {"storage_shape": state["storage_shape"], "latest_write": self.log.num_writes}
        exponents = {key: hyperparameter.state() for key, hyperparameter in self._hyperparameters.items()}
        saved_state.require_fitting(call, state, tensors | exponents)

    def load(self, state: Mapping[str, Tensor], keys: Iterable[str], num_writes: int) -> None:
        """Restore the entries ``keys`` and the hyperparameters; there were ``num_writes`` writes before."""
        for key, tensor in self.tensors().items():
            if key in keys:
                tensor.copy_(state[key])
        for key, hyperparameter in self._hyperparameters.items():
            hyperparameter.load(state[key])
        self.refresh_limit()
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
            "num_items": torch.tensor(count, device="cpu"),
            "effective_sample_size": 1 / (relative**2).mean(),
            "priority_min": relative.min(),
            "priority_median": relative.median(),
            "priority_max": relative.max(),
            "never_updated": (gather_in_bounds(self.priorities.of_slot, slots) < 0).sum() / max(count, 1),
            "max_priority": self.priorities.largest,
            "dropped_updates": self._counts[0],
            "rejected_updates": self._counts[1],
            **{name: hyperparameter.value for name, hyperparameter in self._hyperparameters.items()},
            **self.distribution.stats(),
        }
