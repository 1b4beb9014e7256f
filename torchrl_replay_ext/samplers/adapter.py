"""The adapter between TorchRL's sampler interface and distributions over slots."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Sampler, Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import Anneal, Hyperparameter, make_exponents
from torchrl_replay_ext.arguments import TDError, require_bool, require_choice, require_finite, require_integer
from torchrl_replay_ext.compilation import (
    is_traced,
    mark_static,
    outside_inference_mode,
    raise_if,
    to_device,
    values_can_be_read,
)
from torchrl_replay_ext.core.layout import Layout, flat_slots, require_capacity, unravel
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.kernels.ops import as_tensor
from torchrl_replay_ext.samplers import saved_state
from torchrl_replay_ext.samplers.base import ShardRows, Sums
from torchrl_replay_ext.samplers.rows import EpisodeReader
from torchrl_replay_ext.samplers.sampler_state import NO_TD_ERROR, MakeDistribution, MakeObserver, SamplerState
from torchrl_replay_ext.samplers.storage_layout import layout_of, require_fitting_items
from torchrl_replay_ext.samplers.wrapper import ShowsArguments, delegated

# Entry of a sample with the generation of each row, which is the number of the write that filled the slot.
STAMP_KEY = "write_stamp"


class _Entries(dict):
    """Entries of a batch that lie on the device of the storage.

    TorchRL moves those of a plain dict there, with torch's pytrees, which do not look into subclasses. This saves as
    much time as the draw of 32 rows takes.
    """


class DistributionSampler(ShowsArguments, Sampler):
    """A sampler for TorchRL's replay buffers that draws from a distribution over slots.

    The sampler converts TorchRL's indices to flat slots (a storage of shape [T, E, ...] has T·E·... slots in row-major
    order), validates arguments and logs writes. It computes priorities from TD errors, and importance-sampling weights
    from densities. Subclasses choose the distribution and declare the arguments.

    * A new transition gets the largest d = |δ| + eps seen so far, at least 1. With ``max_priority_within_buffer`` it
      gets the largest d of the stored transitions that have been updated.
    * If an update contains a slot several times, the largest TD error counts.
    * Rows of an update are dropped and counted if their slot was overwritten after the draw, see
      :meth:`update_priority`. The write stamps of a :class:`~torchrl_replay_ext.CompilableReplayBuffer` identify such
      rows exactly.
    * A compiled step keeps no Python state and reads no tensor values. It counts input that is an error in eager mode.
    * On an accelerator, eager code reads no values of updates either, because the host would have to wait for the
      device. It counts invalid rows like a compiled step, or raises errors with
      :func:`~torchrl_replay_ext.validate_on_accelerators`.

    Args:
        capacity: number of slots, at least the capacity of the storage. None: the capacity of the storage.
        make: creates the distribution from a log and priorities; must be picklable.
        hyperparameters: by name, a number, an :class:`~torchrl_replay_ext.Anneal`, or the
            :class:`~torchrl_replay_ext.annealing.Hyperparameter` that the distribution reads; their schedules count
            updates. ``"beta"`` is the exponent of the weights; without it, batches have none.
        eps, min_priority, td_error, max_priority_within_buffer: see :class:`~torchrl_replay_ext.ProportionalSampler`.
            Defaults: 0.0, 0.0, ``"squared"`` and False.
    """

    # the class that errors name
    owner = "DistributionSampler"
    # False in subclasses whose distributions do not take priorities: buffers then pass no TD errors
    expects_td_errors = True
    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = "max"
    # read by CompilableReplayBuffer: samples carry the generation of each row
    takes_stamps = True
    # what TorchRL's buffers pass for rows without TD errors; such rows keep their priorities
    default_priority = NO_TD_ERROR  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    # True if draws depend on TD errors. If False, update_priority does nothing
    takes_priorities = delegated("distribution", "takes_priorities", read_only=True)
    # True if writes have the same effect in a graph as outside
    writes_in_graphs = delegated("distribution", "writes_in_graphs", read_only=True)
    _bound: Storage | None = None
    # the counter of writes to that storage, and the number of writes that this sampler knows
    _count: _torchrl.WriteCount | None = None
    _known_writes = 0
    # True for a copy in a spawned process; its tensors are shared with the learner's process
    _is_spawned = False

    def __init__(
        self,
        capacity: int | None,
        make: MakeDistribution,
        *,
        hyperparameters: Mapping[str, float | Anneal | Hyperparameter],
        eps: float = 0.0,
        min_priority: float = 0.0,
        td_error: TDError = "squared",
        max_priority_within_buffer: bool = False,
    ):
        name = self.owner
        if capacity is not None:
            capacity = require_integer(name, "capacity", capacity)
        require_choice(name, "td_error", td_error, get_args(TDError))
        require_bool(name, "max_priority_within_buffer", max_priority_within_buffer)
        self.capacity, self.make, self._make_observers = capacity, make, list[MakeObserver]()
        # what reads the episodes of rows
        self.readers = list[EpisodeReader]()
        self._make_priorities = partial(
            Priorities,
            eps=require_finite(name, "eps", eps),
            td_error=td_error,
            within_buffer=max_priority_within_buffer,
            min_priority=require_finite(name, "min_priority", min_priority),
        )
        self.hyperparameters = {
            key: value if isinstance(value, Hyperparameter) else make_exponents(name, **{key: value})[key]
            for key, value in hyperparameters.items()
        }
        self._set_up(Layout((capacity or 1,), torch.device("cpu")))

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.owner = vars(cls).get("owner", cls.__name__)
        if cls.expects_td_errors:
            # TorchRL's buffers pass TD errors to this class alone
            PrioritizedSampler.register(cls)
        elif issubclass(cls, PrioritizedSampler):
            raise TypeError(f"{cls.__name__}: a subclass of a sampler with TD errors expects them too.")

    def _set_up(self, layout: Layout) -> None:
        self._use(self._make_state(layout))

    @outside_inference_mode()
    def _make_state(self, layout: Layout) -> SamplerState:
        make = self._make_priorities, self.make, self._make_observers
        return SamplerState(self.owner, layout, *make, self.hyperparameters)

    def _use(self, state: SamplerState) -> None:
        self.state, self.layout, self.distribution = state, state.layout, state.distribution

    def observe(self, make: MakeObserver) -> None:
        """Add an observer of writes. Its state is saved and restored with the sampler."""
        if not self.state.log.is_empty:
            raise RuntimeError(f"{self.owner}: this sampler belongs to another buffer; create one sampler for each.")
        self._make_observers.append(make)
        self._bound = None
        self._set_up(self.layout)

    # --- the storage

    def _find_parts(self, storage: Storage) -> bool:
        """Called with each new storage; returns True if the distribution must be created again."""
        return False

    def bind(self, storage: Storage | None) -> None:
        """Adopt the shape and the device of the storage as soon as they are known."""
        if storage is None or storage is self._bound:
            return
        name = self.owner
        if self._bound is not None and not self.state.log.is_empty:
            raise RuntimeError(f"{name}: this sampler belongs to another storage; create one sampler for each buffer.")
        is_new = self._find_parts(storage)
        layout = layout_of(name, storage, self.capacity)
        if layout is None:
            return
        if not self.state.log.is_empty and layout.shape != self.layout.shape:
            raise ValueError(
                f"{name}: the sampler's state is for a storage of shape {self.layout.shape}, not {layout.shape}."
            )
        for reader in self.readers:
            is_new |= reader.count_streams(storage)
        if layout != self.layout._replace(known=True) or is_new:
            if self._is_spawned:
                raise RuntimeError(
                    f"{name}: a process started by the learner cannot create the state for a storage of shape "
                    f"{layout.shape}, because the learner would not see it. Write to the buffer in the learner before "
                    "the process starts (rb.extend(data), then rb.empty())."
                )
            state = None if self.state.log.is_empty else self.state_dict()
            self._set_up(layout)
            if state is not None:
                self.load_state_dict(state)
        self._require_stored(name, self.state.log.generation, storage)
        self.layout, self._bound, self._count = layout, storage, _torchrl.write_count(storage)
        self._known_writes = self._count.writes
        # named separately, because a distribution may be defined outside this package
        mark_static(vars(self), vars(self.distribution))

    def _require_stored(self, call: str, generation: Tensor, storage: Storage) -> None:
        """Raise ValueError if a state has rows, at the slots of positive ``generation``, that the storage lacks."""
        length = _torchrl.length(storage)
        beyond = generation[length:].nonzero()
        if len(beyond):
            raise ValueError(
                f"{call}: the sampler's state has a row in slot {length + int(beyond[0])}, but the storage holds "
                f"{length} rows. Load the states of one buffer, that of the storage first (rb.load_state_dict does)."
            )

    def require_bound(self, storage: Storage | None) -> None:
        """Raise an error unless storage and sampler are set up and can be used in a graph."""
        name = self.owner
        if storage is not self._bound:
            raise RuntimeError(
                f"{name}: the first write to the buffer must run outside the compiled function, because it sets up "
                "storage and sampler. If the storage already holds data, run the first sample outside."
            )
        if not self.layout.for_graphs:
            other = f"{name}: {type(storage).__name__} cannot be compiled"
            raise TypeError(f"{other}; use CompilableReplayBuffer with CompilableTensorStorage.")

    def synchronize(self, storage: Storage | None) -> bool:
        """Bring the state up to date with the storage; in a graph, only check both. Returns True in a graph."""
        in_graph = is_traced()
        if in_graph:
            self.require_bound(storage)
        else:
            if storage is not self._bound:
                self.bind(storage)
            if self._count is not None and self._count.writes > self._known_writes:
                self._require_all_writes()
            self.state.synchronize(storage)
        return in_graph

    def _require_all_writes(self) -> None:
        """Raise RuntimeError if another sampler was in the buffer while rows were written."""
        missed = self._count.writes - self._known_writes if self._count else 0
        if missed > 0:
            raise RuntimeError(
                f"{self.owner}: this sampler has missed {missed} writes, because another sampler was in the buffer. "
                "Pass a new sampler to rb.set_sampler; it takes in all stored rows as new transitions."
            )

    # --- writes

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer: give slots that were just written the priority of new transitions."""
        if is_traced():
            self.require_bound(storage)
            slots = self.flat_slots(index)
            self.state.insert(slots[-self.layout.size :], storage)
            if self.state.needs_order:
                self.state.log.last_seen_step.copy_(slots[-1] // self.layout.slots_per_step)
            return
        self.bind(storage)
        slots = flat_slots(self.owner, index, self.layout)
        # also counted if the rows are refused below
        self._known_writes += len(slots) > 0
        if isinstance(_torchrl.stored_data(storage), list):
            require_fitting_items(self.owner, storage, slots.tolist(), self.layout.size)
        self.state.write(slots, storage)

    def discard(self, index: Tensor) -> None:
        """Remove rows: they were overwritten by a write that failed."""
        if self._bound is not None:
            slots = self.flat_slots(index)
            self.state.remove(slots[self.state.generation(slots) > 0])

    # --- draws

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` slots.

        Returns:
            The index, [B], or a tuple of [B] for a storage of more dimensions, and a dict with further columns:
            ``priority_weight``, float32 [B], at most 1, and those of the distribution.

        Raises:
            RuntimeError: if the buffer is empty, or all priorities are 0. A traced step raises no error: all rows are
                slot 0, with weight 0. Likewise an accelerator, if all priorities are 0.
            ValueError: if the buffer has ``sample_unit=Sequence(...)`` and slots are not in time order.
        """
        slots, info = self.draw(storage, batch_size, is_complete=True)
        return unravel(slots, self.layout.shape), info if self.layout.for_graphs else _Entries(info)

    def draw(self, storage: Storage, batch_size: int, *, is_complete: bool = False) -> tuple[Tensor, dict[str, Any]]:
        """Draw flat slots, [B], and further columns: weights and, if the draw ``is_complete``, write stamps.

        A complete draw is counted, since updates of its rows are expected.
        """
        name = self.owner
        if type(batch_size) is not int or batch_size < 1:
            batch_size = require_integer(f"{name}.sample", "batch_size", batch_size)
        if not self.synchronize(storage) and self.state.log.is_empty:
            raise RuntimeError(f"Cannot sample from an empty storage. {name}: write to the buffer first.")
        if not self.distribution.slots_in_ring_order and _torchrl.draws_sequences(self, storage):
            raise ValueError(
                f"{name}: the buffer has sample_unit=Sequence(...), which reads consecutive slots; with "
                "retention='pinned' consecutive slots are not consecutive steps. Use retention='ring'."
            )
        slots, density, smallest, extras = self.distribution.draw(batch_size, self._rng)
        if self.layout.validate and density is not None and not values_can_be_read(self.layout.device):
            message = f"{name}: all priorities are 0, so no transition can be drawn; use eps > 0."
            raise_if(lambda: density.amax() == 0, lambda: RuntimeError(message))
        beta = self.hyperparameters.get("beta")
        weight, stamp = self.state.log.drawn(
            slots,
            density,
            smallest,
            None if beta is None else beta.views()[0],
            is_counted=is_complete and self.distribution.takes_priorities,
            is_stamped=is_complete and self.layout.for_graphs,
        )
        slots = as_tensor(slots)
        info = {} if weight is None else {"priority_weight": weight}
        if stamp is not None:
            info[STAMP_KEY] = stamp
        return slots, info if extras is None else info | extras

    # --- draws from several shards; see ShardedReplayBuffer

    def sums(self, storage: Storage) -> Sums:
        """The sums of this shard."""
        self.synchronize(storage)
        return self.distribution.sums()

    def note_other_shards(self, largest_priority: float, largest_episode: int) -> None:
        """Take over the largest priority and the largest sum of an episode of the other shards."""
        largest = self.state.priorities.largest
        largest.clamp_min_(min(largest_priority, self.distribution.max_supported_priority))
        self.distribution.note_other_shards(largest_episode)

    @property
    def largest_td_error(self) -> float:
        """The largest TD error that an update may contain."""
        priorities = self.state.priorities
        limit = max(self.distribution.max_supported_priority - priorities.eps, 0.0)
        return limit**2 if priorities.td_error == "squared" else limit

    @torch.no_grad()
    def sample_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[Tensor, dict[str, Any]]:
        """Draw the rows of a batch that lie in this shard.

        Returns:
            The index, [n], and a dict with further columns: write stamps, and ``"density"``, float64 [n], the
            probability of each row in the whole batch, unless all rows are equally likely.
        """
        slots, info = self.draw_in_shard(storage, wanted)
        return slots, {STAMP_KEY: self.state.generation(slots), **info}

    def draw_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[Tensor, dict[str, Any]]:
        """:meth:`sample_in_shard` without stamps."""
        self.synchronize(storage)
        slots, density, _, extras = self.distribution.draw_in_shard(wanted, self._rng)
        return as_tensor(slots), {**({} if density is None else {"density": density}), **(extras or {})}

    def flat_slots(self, index: int | Tensor | tuple) -> Tensor:
        """Flat slots, in row-major order, of TorchRL's index; int64 [n]."""
        slots = flat_slots(self.owner, index, self.layout)
        return slots if slots.device == self.layout.device else to_device(slots, self.layout.device)

    # --- priorities

    def update_priority(
        self,
        index: int | Tensor | tuple,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        stamp: Tensor | None = None,
    ) -> None:
        """Set the priorities of slots from their TD errors.

        Args:
            index: slots, in TorchRL's format: int, [n], or [n, ndim] for a storage of more dimensions.
            priority: TD errors, one per slot or a single number: δ² if ``td_error="squared"``, |δ| if ``"absolute"``.
            storage: the buffer's storage. Default: None.
            stamp: the entry ``"write_stamp"`` of the sample, [B]. Rows whose slot was overwritten after the draw are
                dropped. None (default): a row is dropped if its slot was drawn and then overwritten within the last 64
                draws, and has not been drawn since. An update all of whose rows were written since the last draw is
                always applied.

        Raises:
            ValueError: if a TD error is negative, not finite or too large, or the shapes do not match.
            IndexError: if a slot is out of range, or empty and never drawn. After an error the state is unchanged. A
                traced step, and an accelerator, raise no error: such rows change nothing and are
                counted in :meth:`stats`.
        """
        if not self.distribution.takes_priorities:
            return
        if stamp is not None:
            stamp = stamp.to(self.layout.device)
        self.synchronize(storage)
        if not self.layout.known and self.state.log.is_empty:
            raise IndexError(f"{self.owner}.update_priority: the storage is empty; write to the buffer first.")
        self.state.update(self.flat_slots(index), priority, stamp)

    # --- inspection and state

    def exclusive(self) -> ExitStack:
        """Lock out other threads that draw (``prefetch``), write or update."""
        return _torchrl.exclusive(self._bound)

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot in one draw, float64 [len(storage)], slots in row-major order. O(N)."""
        with _torchrl.exclusive(storage):
            self.synchronize(storage)
            density = self.distribution.density(torch.arange(_torchrl.length(storage), device=self.layout.device))
        return density / density.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def stats(self) -> TensorDict:
        """Statistics for logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: stored transitions. ``effective_sample_size``: (Σp)²/Σp² as a share of ``num_items``; 1 if all p
        are equal. ``priority_min``, ``priority_median``, ``priority_max``: of the density of draws, relative to its
        mean. ``never_updated``: share of transitions that still have the priority of a new one. ``max_priority``: d of
        new transitions. ``dropped_updates``: rows not updated because their slot was overwritten. ``rejected_updates``:
        rows not updated for one of two reasons. In a graph or on an accelerator, the TD error is negative, not finite
        or too large, or the slot does not exist (errors in eager code on the CPU, or with validation). In TorchRL's
        TensorDictReplayBuffer, the sample has no entry ``priority_key`` (an error in CompilableReplayBuffer). And the
        value of each hyperparameter.

        To print the numbers, call ``to_dict()``: a TensorDict prints only shapes.

        Examples:
            >>> from torchrl_replay_ext import ProportionalSampler
            >>> {name: round(number.item(), 2) for name, number in ProportionalSampler(8).stats().to_dict().items()}
            {'num_items': 0.0, 'effective_sample_size': 1.0, 'priority_min': 1.0, 'priority_median': 1.0,
             'priority_max': 1.0, 'never_updated': 0.0, 'max_priority': 1.0, 'dropped_updates': 0.0,
             'rejected_updates': 0.0, 'alpha': 0.6, 'beta': 0.4}
        """
        with self.exclusive():
            self.distribution.sync()
            values = self.state.stats()
        scalars = {key: value.to(self.layout.device, torch.float32).reshape(()) for key, value in values.items()}
        return TensorDict(scalars, device=self.layout.device)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on, as tensors.

        TorchRL's tensor storages put no copy of their rows into a state. With them the entry ``latest_write`` is no
        copy either. It counts on, so that a state that was kept in memory while rows were written is refused.
        """
        with self.exclusive():
            self.distribution.sync()
            state = {key: value.clone() for key, value in self.state.tensors().items()}
            state |= {key: hyperparameter.state() for key, hyperparameter in self.hyperparameters.items()}
            latest = self.state.log.num_writes
            state["latest_write"] = latest if _torchrl.state_has_references(self._bound) else latest.clone()
        return state | {"storage_shape": torch.tensor(self.layout.shape, dtype=torch.int64, device="cpu")}

    def require_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit this sampler; rows that the storage does not hold are not found."""
        self._fitting(state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict` in place.

        Load the storage first: a state with rows that the storage does not hold is refused, or, if the sampler was not
        used with its storage yet, the first use is.

        Raises:
            ValueError: if the state does not fit by its entries, their shapes and dtypes, and the number of slots, or
                is not of one moment; nothing is changed then.
        """
        num_writes = int(self.state.log.num_writes)
        state, is_empty = self._fitting(state_dict)
        if self._bound is not None and not is_empty:
            self._require_stored(f"{self.owner}.load_state_dict", state_dict["generation"], self._bound)
        self._use(state)
        if is_empty:
            state.clear()
        state.load(state_dict, state.distribution.settings if is_empty else state.tensors(), num_writes)
        self._know_all_writes()
        mark_static(vars(self), vars(self.distribution))

    def _fitting(self, saved: dict[str, Any]) -> tuple[SamplerState, bool]:
        """What to load a state into, and whether it is that of an empty sampler, which fits any storage."""
        call, state = f"{self.owner}.load_state_dict", self.state
        shape = saved_state.shape_of(call, saved)
        is_alike, has_rows = shape == self.layout.shape, bool(saved["generation"].any())
        is_empty = not is_alike and not has_rows
        if has_rows:
            self._require_capacity(call, shape)
            lanes = [saved[key] for key in ("episodes_lanes", "slices_lanes") if key in saved]
            has_others = [reader.adopt_streams(lanes[0]) for reader in self.readers if lanes]
            if not is_alike or any(has_others):
                state = self._make_state(self.layout._replace(shape=shape, known=True))
        state.require_fitting(call, saved, state.distribution.settings if is_empty else None)
        written, latest = int(saved["num_writes"]), int(saved["latest_write"])
        if written != latest:
            raise ValueError(
                f"{call}: the state is not of one moment: it was taken after {written} writes, and its part of the "
                f"storage has changed until write {latest}, because TorchRL's storages do not copy their rows into a "
                "state. Keep copy.deepcopy(rb.state_dict()), or use rb.dumps(path)."
            )
        return state, is_empty

    def _require_capacity(self, call: str, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a state for a storage of ``shape`` has another number of slots than this buffer."""
        if self.layout.known:
            if shape == self.layout.shape:
                return
            size = self.layout.size
        else:
            storage = _torchrl.storage_of(self)
            size = self.capacity or math.prod(shape)
            if storage is not None and _torchrl.has_size(storage):
                size = storage.max_size
            elif math.prod(shape) <= size:
                return
        require_capacity(call, shape, size)

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``, as memory-mapped tensors."""
        TensorDict(self.state_dict(), device="cpu").memmap(str(path), copy_existing=True)

    def loads(self, path: str | Path) -> None:
        """Load a state saved by :meth:`dumps`."""
        self.load_state_dict(self.saved_at(path))

    def saved_at(self, path: str | Path) -> dict[str, Any]:
        """What :meth:`dumps` saved in the directory ``path``, as a :meth:`state_dict`."""
        return {str(key): value.clone() for key, value in TensorDict.load_memmap(str(path)).items()}

    def _empty(self) -> None:
        self.state.clear()
        self._know_all_writes()

    def _know_all_writes(self) -> None:
        self._known_writes = 0 if self._count is None else self._count.writes

    def __getstate__(self) -> dict[str, Any]:
        # the buffer pickles the storage
        return {
            **super().__getstate__(),
            "_bound": None,
            "_count": None,
            "_is_spawned": get_spawning_popen() is not None,
        }

    def __repr__(self) -> str:
        values = [f"capacity={self.capacity}", *self._repr_values()]
        if self.takes_priorities:
            values.append(f"td_error={self.state.priorities.td_error!r}")
        return f"{type(self).__name__}({', '.join(values)})"

    def _repr_values(self) -> list[str]:
        """The hyperparameters in the representation of this sampler."""
        return [f"{name}={float(h.value):g}" for name, h in self.hyperparameters.items()]
