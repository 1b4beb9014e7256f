"""A round-robin writer for compiled graphs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection, is_tensorclass
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import Storage, TensorDictRoundRobinWriter, TensorStorage

from torchrl_replay_ext._torchrl import (
    attached_buffers,
    attached_entities,
    is_stacked,
    length,
    matching_columns,
    rows_of_ring,
    set_length,
    set_rows,
    shape_and_device,
    step_after_rows,
    stored_data,
)
from torchrl_replay_ext.compilation import Counter, is_traced, mark_static, outside_inference_mode, to_device
from torchrl_replay_ext.core.layout import unravel
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.writers.entries import new_entries


def _with_columns(index: Tensor, columns: Sequence[int]) -> Tensor:
    """The index of all rows of the steps ``index`` [n]: [n], or [n · columns, ndim] if steps have several columns."""
    if not columns:
        return index
    lanes = torch.arange(math.prod(columns), device=index.device)
    slots = (index.unsqueeze(1) * len(lanes) + lanes).reshape(-1)
    return torch.stack([*unravel(slots, (0, *columns))], 1)


def bind_samplers(storage: Any) -> None:
    """Let samplers take shape and device from a storage that holds data, as they do at a write."""
    columns = (storage.ndim,) if storage.ndim > 1 else ()
    # a list always has its shape
    for buffer in attached_buffers(storage) if getattr(storage, "initialized", True) else ():
        buffer.mark_update(torch.empty(0, *columns, dtype=torch.int64, device="cpu"))


class CompilableWriter(TensorDictRoundRobinWriter):
    """TorchRL's round-robin writer with its cursor in a tensor that is changed in place.

    It is the default writer of :class:`~torchrl_replay_ext.CompilableReplayBuffer`.
    """

    # True if rows are written to one slot of the ring after the other
    _follows_ring = True

    @outside_inference_mode()
    def __init__(self):
        self.cursor_value = torch.zeros((), dtype=torch.int64, device="cpu")
        self._write_count_value = torch.zeros((), dtype=torch.int64, device="cpu")
        self.known_counters: dict[str, int] | None = {}
        super().__init__(compilable=True)

    _cursor: Any = Counter("cursor_value")
    _write_count: Any = Counter("_write_count_value")

    def register_storage(self, storage: Storage) -> None:
        """Called by the buffer. A new writer goes on after the rows that the storage holds."""
        super().register_storage(storage)
        if not self._write_count and not self._cursor:
            self._cursor = step_after_rows(storage)

    def add(self, data: Any) -> Any:
        """Write a single row over the oldest row, and notify the samplers."""
        self._require_tensordict("add", data)
        self._check(data, 0)
        return self._undone_if_refused(super().add, data)

    def _require_tensordict(self, call: str, data: Any) -> None:
        if not is_tensor_collection(data):
            raise TypeError(
                f"{type(self).__name__}.{call}: the data must be a TensorDict, not {type(data).__name__}; write "
                "TensorDict(data) or TensorDict(data, [n])."
            )

    def _check(self, data: TensorDictBase, ndim: int) -> None:
        """Reject rows that do not fit the stored rows, before anything is changed.

        The first accepted write determines the entries. A later additional entry would be zero in all earlier rows, and
        rows without it could no longer be written.

        Args:
            data: the rows.
            ndim: number of batch dimensions of ``data``.

        Raises:
            KeyError: if an entry is missing, or the storage does not have it.
            TypeError: if an entry has another dtype than in the storage.
            ValueError: if an entry has another shape than in the storage.
        """
        storage: Any = self._storage
        stored = stored_data(storage)
        if not is_tensor_collection(stored):
            return
        name = type(self).__name__
        if stored.ndim >= ndim > 1 and data.shape[1:ndim] != stored.shape[1:ndim]:
            raise ValueError(
                f"{name}: data of shape {tuple(data.shape)} does not fit a storage of shape {tuple(stored.shape)}; "
                f"each step needs {tuple(stored.shape[1:ndim])} rows."
            )
        if matching_columns(stored, data, ndim, except_for="index") is not None:
            return
        surplus = [key for key in new_entries(name, stored, data, ndim) if not is_stacked(storage, key)]
        if surplus and len(storage):
            raise KeyError(
                f"{name}: the data has the entries {surplus}, but the stored rows do not have them. Write them from "
                "the first row on, leave them out (data.exclude(...)), or empty the buffer first (rb.empty())."
            )

    def _undone_if_refused(self, write: Callable[[Any], Any], data: Any) -> Any:
        """Call ``write(data)``; after an error, undo it and remove the overwritten rows from the samplers."""
        storage: Any = self._storage
        first, write_count, length_before = self._cursor, self._write_count, length(storage)
        try:
            return write(data)
        except BaseException:
            self._cursor, self._write_count = first, write_count
            self._discard(first, data, length_before)
            raise

    def _discard(self, first: int, data: Any, length_before: int) -> None:
        """Remove the rows of a failed write, ``data``, from storage and samplers; it began at the step ``first``."""
        storage: Any = self._storage
        set_length(storage, length_before)
        known = shape_and_device(storage)
        if known is None:
            return
        steps, *columns = known[0]
        count = len(data) if is_tensor_collection(data) and data.ndim else 1
        index = (first + torch.arange(min(count, steps), device=known[1])) % steps
        for buffer in attached_buffers(storage):
            if discard := getattr(buffer.sampler, "discard", None):
                discard(_with_columns(index, columns))

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write ``data`` [n, ...] over the oldest rows, and notify the samplers. After an error nothing is written.

        Args:
            data: the rows.

        Returns:
            The indices of the rows, int64 [n], or [n, ndim] for a storage with several dimensions.

        Raises:
            KeyError: if the entries are not those of the stored rows.
            TypeError: if an entry has another dtype than in the storage, or if a compiled graph uses another storage
                than :class:`~torchrl_replay_ext.CompilableTensorStorage`.
            ValueError: if an entry has another shape than in the storage.
        """
        storage: Any = self._storage
        self._require_tensordict("extend", data)
        if 0 in data.shape:
            return torch.empty((0, storage.ndim) if storage.ndim > 1 else 0, dtype=torch.int64, device="cpu")
        if is_traced():
            if not isinstance(storage, CompilableTensorStorage):
                raise TypeError("CompilableWriter: compiled graphs need a CompilableTensorStorage.")
            return self._extend(data)
        self._check(data, storage.ndim)
        index = self._undone_if_refused(self._extend, data)
        device = storage.counters_device if isinstance(storage, CompilableTensorStorage) else None
        if device not in (None, self.cursor_value.device):
            with outside_inference_mode():
                self.cursor_value = self.cursor_value.to(device)
                self._write_count_value = self._write_count_value.to(device)
            mark_static(vars(self))
        return index

    def _extend(self, data: TensorDictBase) -> Tensor:
        """:meth:`extend` after the checks."""
        index, on_host = self._store(data)
        self._mark_update_entities(on_host)
        return index

    def _store(self, data: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Write ``data`` to the storage; returns the index, and outside of graphs also a copy of it on the CPU."""
        storage: Any = self._storage
        steps, count, device = rows_of_ring(storage, data), len(data), self.cursor_value.device
        first, device_of_data = self._cursor, getattr(data, "device", None)
        if is_traced():
            fits, on_host = False, (first + torch.arange(count, device=device)) % steps
        else:
            fits, on_host = first + count <= steps, torch.arange(first, first + count, device="cpu")
            on_host = on_host if fits else on_host % steps
            device = device_of_data or device if device.type == "cpu" else device
        index: Any = to_device(on_host, device)
        if not is_tensorclass(data):
            is_far = device_of_data is not None and device_of_data.type != device.type
            data.set("index", expand_as_right(on_host.to(device_of_data) if is_far else index, data))
        # before the data, so that other processes do not write to the same slots
        self._cursor = (first + count) % steps
        self._write_count = self._write_count + count
        if fits:
            set_rows(storage, index, data, first=first)
        elif count > steps and isinstance(storage, TensorStorage):
            # skip rows that later rows would overwrite, because the order of writes is undefined in a compiled graph
            storage.set(index[-steps:], data[-steps:])
        else:
            storage.set(index, data)
        known = shape_and_device(storage) if storage.ndim > 1 else None
        if known is not None:
            # not _replicate_index of TorchRL, which reads the length of the storage
            on_host = _with_columns(on_host, known[0][1:])
            index = to_device(on_host, device)
        return index, on_host

    def require_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if the counters of a state do not fit the storage."""
        call, storage = f"{type(self).__name__}.load_state_dict", self._storage
        for name in ("_cursor", "_write_count"):
            value = {"_write_count": 0, **state_dict}.get(name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{call}: {name} is {value!r}, expected an integer >= 0.")
        known = None if storage is None else shape_and_device(storage)
        steps: Any = known[0][0] if known else getattr(storage, "max_size", math.inf)
        if state_dict["_cursor"] >= steps:
            raise ValueError(
                f"{call}: the next row is at step {state_dict['_cursor']}, but the storage has {steps} steps. Create "
                "the buffer with the capacity with which the state was saved."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; load that of the storage first.

        Raises:
            ValueError: if a counter is negative, not an integer or beyond the storage, or the next row does not follow
                those of a storage that is not full; nothing is changed then.
        """
        self.require_loadable(state_dict)
        self._require_no_gap(state_dict)
        super().load_state_dict(state_dict)

    def _require_no_gap(self, state_dict: dict[str, Any]) -> None:
        known = None if self._storage is None else shape_and_device(self._storage)
        if known is not None and self._follows_ring and 0 < length(self._storage) < math.prod(known[0]):
            following = step_after_rows(self._storage)
            if state_dict["_cursor"] != following:
                raise ValueError(
                    f"{type(self).__name__}.load_state_dict: _cursor is {state_dict['_cursor']}, but the rows of the "
                    f"storage end before step {following}. Load the states of one buffer, that of the storage first "
                    "(rb.load_state_dict does)."
                )

    def saved_at(self, path: Any) -> dict[str, Any]:
        """What ``dumps`` saved in the directory ``path``, as the argument of :meth:`require_loadable`."""
        metadata = json.loads((Path(path) / "metadata.json").read_text())
        return {"_cursor": metadata["cursor"], "_write_count": metadata.get("write_count", 0)}

    def loads(self, path: Any) -> None:
        """Restore a state that ``dumps`` saved; see :meth:`load_state_dict`."""
        saved = self.saved_at(path)
        self.require_loadable(saved)
        self._require_no_gap(saved)
        super().loads(path)

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write ``data`` to the slots ``index``, and notify the samplers."""
        if is_tensor_collection(data):
            self._check(data, data.ndim)
        return super().write_at(index, data)

    def _mark_update_entities(self, index: Tensor) -> None:
        for each in attached_buffers(self._storage) if is_traced() else attached_entities(self._storage):
            each.mark_update(index)

    def __getstate__(self) -> dict[str, Any]:
        # keep the tensors of TorchRL's counters: spawned processes share them
        if get_spawning_popen() is not None:
            self.known_counters = None
        state = vars(self).copy()
        state["_rng"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
