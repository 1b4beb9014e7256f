"""Ties a sampler to its storage, saves it, and loads states that fit."""

from __future__ import annotations

import copy
import math
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.compilation import is_traced, mark_static, to_device
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.layout import flat_slots, require_capacity
from torchrl_replay_ext.samplers.rows import layout_of, require_fitting_items
from torchrl_replay_ext.samplers.slot_state import SlotState


def require_fitting(call: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state has the keys of ``tensors``, each with the same shape and dtype.

    Args:
        call: the method that error messages name.
        state: the saved state.
        tensors: what it replaces.
    """
    missing, unexpected = tensors.keys() - state.keys(), state.keys() - tensors.keys()
    if missing or unexpected:
        raise ValueError(
            f"{call}: the state was saved by another sampler, or one with other arguments. Missing entries: "
            f"{_some(missing)}; unexpected entries: {_some(unexpected)}."
        )
    for key, tensor in tensors.items():
        expected = f"shape {tuple(tensor.shape)} and {tensor.dtype}"
        saved = state[key]
        actual = f"shape {tuple(saved.shape)} and {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
        if actual != expected:
            raise ValueError(
                f"{call}: the entry {key} has {actual}, expected {expected}; the sampler must have the arguments of "
                "the one that saved the state, such as capacity and num_streams."
            )


def _some(names: set[str]) -> str:
    """At most three names, and the number of the others."""
    shown, others = sorted(names)[:3], max(len(names) - 3, 0)
    return ", ".join(shown) + f" and {others} more" * (others > 0) if shown else "none"


def shape_of(call: str, state: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the storage for which a sampler saved its state; ValueError if there is none."""
    shape, generation = state.get("storage_shape"), state.get("generation")
    if isinstance(shape, Tensor) and isinstance(generation, Tensor) and shape.dtype == torch.int64 and shape.ndim == 1:
        sizes = tuple(shape.tolist())
        if min(sizes, default=0) > 0 and math.prod(sizes) == generation.numel():
            return sizes
    raise ValueError(
        f"{call}: the entries storage_shape and generation must be the sizes of a storage, int64 [ndim], and one "
        "number per slot, int64 [slots]. Pass the state_dict() of a sampler of this package."
    )


def lanes_of(state: Mapping[str, Any]) -> Any:
    """The lanes of flat storage in a state, see :meth:`EpisodeReader.adopt_streams`; None if there are none."""
    return state.get("episodes_lanes", state.get("slices_lanes")) if len(state["storage_shape"]) == 1 else None


def require_fitting_tables(call: str, state: Mapping[str, Any], tables: EventTables, num_slots: int) -> None:
    """Raise ValueError unless a state of event tables fits ``tables`` in a storage of ``num_slots`` slots."""
    if not tables.is_allocated:
        tables = copy.deepcopy(tables)
        tables.allocate(num_slots, torch.device("cpu"))
    if not torch.equal(torch.as_tensor(state["begins"], device="cpu"), tables.begins):
        raise ValueError(
            f"{call}: the state is for tables of other capacities; create the tables with those of the saved ones."
        )
    saved_slots = len(state["number"])
    if not saved_slots == num_slots == tables.num_slots:
        raise ValueError(
            f"{call}: the state of the tables is for {saved_slots} slots instead of {num_slots}; create the buffer "
            "with the storage size of the saved one."
        )
    require_fitting(call, state, tables.tensors())


class BoundState(SlotState):
    """Adopts the shape and the device of a storage, is notified of the writes to it, and can be saved and loaded."""

    # number of slots, or None: that of the storage
    capacity: int | None = None
    _bound_storage: Storage | None = None
    # the counter of writes to that storage, and the number of writes that this sampler knows
    _storage_writes: _torchrl.WriteCount | None = None
    _known_writes = 0
    # True for a copy in a spawned process; its tensors are shared with the learner's process
    _is_spawned = False
    # the process that bound the sampler to its storage
    _process: int | None = None

    # --- the storage

    def _find_parts(self, storage: Storage) -> bool:
        """Called with each new storage; returns True if the state must be allocated again."""
        return False

    def bind(self, storage: Storage | None) -> None:
        """Adopt the shape and the device of the storage as soon as they are known."""
        if storage is None or storage is self._bound_storage:
            return
        name = self.owner
        if self._bound_storage is not None and not self.slots.is_empty:
            raise RuntimeError(f"{name}: this sampler belongs to another storage; create one sampler for each buffer.")
        is_new = self._find_parts(storage)
        layout = layout_of(name, storage, self.capacity)
        if layout is None:
            return
        if not self.slots.is_empty and layout.shape != self.layout.shape:
            raise ValueError(
                f"{name}: the sampler's state is for a storage of shape {self.layout.shape}, not {layout.shape}."
            )
        for reader in self.episode_readers:
            is_new |= reader.count_streams(storage)
        if layout != self.layout._replace(known=True) or is_new:
            if self._is_spawned:
                raise RuntimeError(
                    f"{name}: a process started by the learner cannot create the state for a storage of shape "
                    f"{layout.shape}, because the learner would not see it. Write to the buffer in the learner before "
                    "the process starts (rb.extend(data), then rb.empty())."
                )
            # a state that was loaded before the storage was known
            loaded = None if self.slots.is_empty else self.state_dict()
            # the largest d can be that of another shard
            largest = self.slots.largest.item()
            self._set_up_state(layout)
            self.slots.largest.clamp_min_(largest).clamp_max_(self.slots.limit)
            if loaded is not None:
                self.load_state_dict(loaded)
        self._require_stored(name, self.slots.generation, storage)
        self.layout, self._bound_storage, self._storage_writes = layout, storage, _torchrl.write_count(storage)
        self._process = os.getpid()
        self._know_all_writes()
        mark_static(vars(self))

    def _require_not_forked(self) -> None:
        """Raise RuntimeError in a forked process, whose changes the process that made the state would not see."""
        if self._process not in (None, os.getpid()) and not self.slots.generation.is_shared():
            raise RuntimeError(
                f"{self.owner}: the process that made this buffer would not see the writes and updates of a process "
                "that was forked from it. Start processes with the method 'spawn', or make the buffer in this one."
            )

    def _require_stored(self, call: str, generation: Tensor, storage: Storage) -> None:
        """Raise ValueError if a state has rows, at the slots of positive ``generation``, that the storage lacks."""
        length = _torchrl.length(storage)
        beyond = generation[length:].nonzero()
        if len(beyond):
            raise ValueError(
                f"{call}: the sampler's state has a row in slot {length + int(beyond[0])}, but the storage holds "
                f"{length} rows. Load the states of one buffer, that of the storage first (rb.load_state_dict does)."
            )

    def _require_bound(self, storage: Storage | None) -> None:
        """Raise an error unless storage and sampler are set up and can be used in a graph."""
        name = self.owner
        if storage is not self._bound_storage:
            raise RuntimeError(
                f"{name}: the first write to the buffer must run outside the compiled function, because it sets up "
                "storage and sampler. If the storage already holds data, run the first sample outside."
            )
        if not self.layout.for_graphs:
            other = f"{name}: {type(storage).__name__} cannot be compiled"
            raise TypeError(f"{other}; use CompilableReplayBuffer with CompilableTensorStorage.")

    @abstractmethod
    def synchronize(self, storage: Storage | None) -> bool:
        """Bring the state up to date with the storage before each use; in a graph, only check both."""

    def _require_all_writes(self) -> None:
        """Raise RuntimeError if another sampler was in the buffer while rows were written."""
        missed = self._storage_writes.writes - self._known_writes if self._storage_writes else 0
        if missed > 0:
            raise RuntimeError(
                f"{self.owner}: this sampler has missed {missed} writes, because another sampler was in the buffer. "
                "Pass a new sampler to rb.set_sampler; it takes in all stored rows as new transitions."
            )

    def _know_all_writes(self) -> None:
        self._known_writes = 0 if self._storage_writes is None else self._storage_writes.writes

    def exclusive(self) -> AbstractContextManager[None]:
        """Lock out other threads that draw (``prefetch``), write or update."""
        return _torchrl.exclusive(self._bound_storage)

    # --- writes

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer: give slots that were just written the priority of new transitions."""
        if is_traced():
            self._require_bound(storage)
            if not self.writes_in_graphs:
                raise RuntimeError(
                    f"{self.owner}: a write on {self.layout.device} cannot be part of a graph, because the host finds "
                    "the episodes; call extend outside of the graph."
                )
            slots = to_device(flat_slots(self.owner, index, self.layout), self.layout.device)
            self._insert_rows(slots[-self.layout.size :], storage)
            if self._is_ordered:
                self.slots.last_seen_step.copy_(slots[-1] // self.layout.slots_per_step)
            return
        self.bind(storage)
        self._require_not_forked()
        slots = flat_slots(self.owner, index, self.layout)
        # also counted if the rows are refused below
        self._known_writes += len(slots) > 0
        if isinstance(_torchrl.stored_data(storage), list):
            require_fitting_items(self.owner, storage, slots.tolist(), self.layout.size)
        if slots.numel():
            self._apply_write(slots, storage)
        else:
            # called after a load, so that the first use may be in a graph
            self.synchronize(storage)

    def discard(self, index: Tensor) -> None:
        """Remove rows: they were overwritten by a write that failed."""
        if self._bound_storage is not None:
            slots = to_device(flat_slots(self.owner, index, self.layout), self.layout.device)
            self._remove_all(slots[self.slots.generation_of(slots) > 0])

    def _empty(self) -> None:
        super()._empty()
        self._know_all_writes()

    # --- save and load

    def settings(self) -> dict[str, Any]:
        """What a user sets and a schedule may change, to save: objects with ``state()`` and ``load(state)``.

        Default: the hyperparameters.
        """
        return {**self.hyperparameters}

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on, as tensors.

        TorchRL's tensor storages put no copy of their rows into a state. With them the entry ``latest_write`` is no
        copy either. It counts on, so that a state that was kept in memory while rows were written is refused.
        """
        with self.exclusive():
            state = {key: value.clone() for key, value in self._all_tensors().items()}
            state |= {key: setting.state() for key, setting in self.settings().items()}
            latest = self.slots.num_writes
            state["latest_write"] = latest if _torchrl.state_has_references(self._bound_storage) else latest.clone()
        return state | {"storage_shape": torch.tensor(self.layout.shape, dtype=torch.int64, device="cpu")}

    def require_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit this sampler; rows that the storage does not hold are not found."""
        self._require_fitting(f"{self.owner}.load_state_dict", state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict` in place.

        Load the storage first: a state with rows that the storage does not hold is refused, or, if the sampler was not
        used with its storage yet, the first use is.

        Raises:
            ValueError: if the state does not fit by its entries, their shapes and dtypes, and the number of slots, or
                is not of one moment; nothing is changed then.
        """
        call, num_writes = f"{self.owner}.load_state_dict", int(self.slots.num_writes)
        is_alike, has_rows = self._require_fitting(call, state_dict)
        if self._bound_storage is not None and has_rows:
            self._require_stored(call, state_dict["generation"], self._bound_storage)
        if has_rows and not is_alike:
            self._set_up_like(state_dict, shape_of(call, state_dict))
        for key, setting in self.settings().items():
            setting.load(state_dict[key])
        if is_alike or has_rows:
            for key, tensor in self._all_tensors().items():
                tensor.copy_(state_dict[key])
        else:
            self._empty()
        self._finish_load(num_writes)

    def _finish_load(self, num_writes: int) -> None:
        """Derive the rest of the state after a load, before which there were ``num_writes`` writes."""
        for part in (self.slots, *self._write_observers):
            part.raise_numbers(num_writes)
        for part in (self.slots, *self._write_observers):
            part.rebuild()
        self._knows_storage = True
        self._know_all_writes()
        mark_static(vars(self))

    def _set_up_like(self, saved: dict[str, Any], shape: tuple[int, ...]) -> None:
        """Allocate all state for a storage of ``shape`` and the number of streams of a saved state."""
        for reader in self.episode_readers:
            reader.adopt_streams(lanes_of(saved))
        self._set_up_state(self.layout._replace(shape=shape, known=True))

    def _require_fitting(self, call: str, saved: dict[str, Any]) -> tuple[bool, bool]:
        """ValueError unless a state fits; returns whether it has the shapes of this one, and a transition in any slot.

        The state of an empty sampler fits any storage.
        """
        shape, lanes = shape_of(call, saved), lanes_of(saved)
        has_others = [copy.copy(reader).adopt_streams(lanes) for reader in self.episode_readers]
        is_alike = shape == self.layout.shape and not any(has_others)
        has_rows, expected = bool(saved["generation"].any()), self
        if has_rows:
            self._require_capacity(call, shape)
        if not is_alike:
            expected = copy.deepcopy(self)
            expected._set_up_like(saved, self.layout.shape if self.layout.known and not has_rows else shape)
        tensors = expected._all_tensors()
        if not is_alike and not has_rows:
            # these are not loaded
            tensors = {key: saved.get(key, tensor) for key, tensor in tensors.items()}
        tensors |= {"storage_shape": saved["storage_shape"], "latest_write": self.slots.num_writes}
        require_fitting(call, saved, tensors | {key: s.state() for key, s in self.settings().items()})
        written, latest = int(saved["num_writes"]), int(saved["latest_write"])
        if written != latest:
            raise ValueError(
                f"{call}: the state is not of one moment, or was loaded before: {written} writes were counted when it "
                f"was taken, and {latest} now; loads count too. TorchRL's storages do not copy their rows into a "
                "state, so these may have changed since. Keep copy.deepcopy(rb.state_dict()), or use rb.dumps(path)."
            )
        return is_alike, has_rows

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
        if not (Path(path) / "meta.json").exists():
            raise FileNotFoundError(
                f"{self.owner}.loads: the directory {path} has no state of a sampler of this package. To go on from a "
                "checkpoint with another sampler, load only its storage and writer: a new sampler takes in all rows."
            )
        return {str(key): value.clone() for key, value in TensorDict.load_memmap(str(path)).items()}
