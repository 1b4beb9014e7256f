"""A round-robin writer for compiled graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection, is_tensorclass
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter, TensorStorage

from torchrl_replay_ext._torchrl import (
    attached_buffers,
    is_stacked,
    last_step,
    last_step_value,
    num_sets,
    rows_of_ring,
    set_rows,
    shape_and_device,
    stored_data,
)
from torchrl_replay_ext.compilation import increase, is_traced, mark_static, scalar, values_can_be_read
from torchrl_replay_ext.samplers.slot_index import unravel
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage


def _counter(name: str) -> Any:
    """A number that is held in the tensor ``name``."""

    def set_(self: Any, value: int | Tensor) -> None:
        own = getattr(self, name)
        own.copy_(value) if isinstance(value, Tensor) else own.fill_(value)

    def get(self: Any) -> int | Tensor:
        value = getattr(self, name)
        return value if is_traced() else value.item()

    return property(get, set_)


def _copy(value: int | Tensor | None) -> int | Tensor:
    """A number, -1 for None; a copy of a tensor that cannot be read without waiting."""
    if not isinstance(value, Tensor):
        return -1 if value is None else value
    return int(value) if values_can_be_read(value) else value.clone()


def bind_samplers(storage: Any) -> None:
    """Let samplers take shape and device from a storage that holds data, as they do at a write."""
    columns = (storage.ndim,) if storage.ndim > 1 else ()
    # a list always has its shape
    for buffer in attached_buffers(storage) if getattr(storage, "initialized", True) else ():
        buffer.mark_update(torch.empty(0, *columns, dtype=torch.int64))


class CompilableWriter(TensorDictRoundRobinWriter):
    """TorchRL's round-robin writer with its cursor in a tensor that is changed in place.

    It is the default writer of :class:`CompilableReplayBuffer`.

    Args:
        track_generations: as in TorchRL's writer; not supported in compiled graphs. Default: False.
    """

    # True while the storage holds only rows of rejected writes; such rows do not fix the set of entries
    _holds_only_rejected_writes = False

    def __init__(self, *, track_generations: bool = False):
        self._cursor_value = torch.zeros((), dtype=torch.int64)
        self._write_count_value = torch.zeros((), dtype=torch.int64)
        super().__init__(compilable=True, track_generations=track_generations)

    _cursor = _counter("_cursor_value")
    _write_count = _counter("_write_count_value")

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
        columns = dict(data.items(True, True))
        columns.pop("index", None)
        for key, known in stored.items(True, True):
            if key == "index":
                continue
            column = columns.pop(key, None)
            if column is None:
                raise KeyError(
                    f"{name}: the data has no entry {key!r}, but the stored rows have it. The environment, policy or "
                    "transform that wrote it must write it into every row. For rows with other entries use a new "
                    "storage."
                )
            if column.is_meta and not known.is_meta:
                raise ValueError(f"{name}: the entry {key!r} is on the meta device and has no values.")
            if known.shape[stored.ndim :] != column.shape[ndim:]:
                raise ValueError(
                    f"{name}: the entry {key!r} has shape {tuple(column.shape)}; the storage needs "
                    f"{(*data.shape[:ndim], *known.shape[stored.ndim :])}."
                )
            if known.dtype != column.dtype:
                raise TypeError(
                    f"{name}: the entry {key!r} has dtype {column.dtype}; the storage needs {known.dtype}. Convert it "
                    f"before the write: data[{key!r}] = data[{key!r}].to({known.dtype})."
                )
        surplus = [key for key in columns if not is_stacked(storage, key)]
        if surplus and len(storage) and not self._holds_only_rejected_writes:
            raise KeyError(
                f"{name}: the data has the entries {surplus}, but the stored rows do not have them. Write them from "
                "the first row on, leave them out (data.exclude(...)), or empty the buffer first (rb.empty())."
            )

    def _undone_if_refused(self, write: Callable[[Any], Any], data: Any) -> Any:
        """Call ``write(data)``; after an error, let the cursor follow the rows that the storage has written, if any.

        A :class:`~torchrl_replay_ext.FrameStackStorage` writes many rows in parts, and may run out of frames between
        them.
        """
        storage: Any = self._storage
        # on an accelerator these are tensors, which are read only after an error
        sets = num_sets(storage)
        last, cursor, write_count = map(_copy, (last_step_value(storage), self._cursor_value, self._write_count_value))
        try:
            return write(data)
        except BaseException:
            known, now = shape_and_device(storage), last_step(storage)
            steps = storage.max_size if known is None else known[0][0]
            before, first, moved = int(last), int(cursor), int(self._write_count_value - write_count)
            written = 0 if now is None or now == before else (now + 1 - first) % steps
            # a write of the whole ring ends where the one before it has ended
            if (sets is not None and num_sets(storage) == sets) or written <= moved < steps:
                self._cursor, self._write_count = (first + written) % steps, int(write_count) + written
            raise

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
            return torch.empty((0, storage.ndim) if storage.ndim > 1 else 0, dtype=torch.int64)
        if is_traced():
            if not isinstance(storage, CompilableTensorStorage) or self._track_generations:
                raise TypeError(
                    "CompilableWriter: compiled graphs need a CompilableTensorStorage and track_generations=False."
                )
            return self._extend(data)
        self._check(data, storage.ndim)
        index = self._undone_if_refused(self._extend, data)
        device = storage.counters_device if isinstance(storage, CompilableTensorStorage) else None
        if device not in (None, self._cursor_value.device):
            self._cursor_value = self._cursor_value.to(device)
            self._write_count_value = self._write_count_value.to(device)
            mark_static(vars(self))
        return index

    def _extend(self, data: TensorDictBase) -> Tensor:
        """:meth:`extend` after the checks. On accelerators it does not read the cursor."""
        storage: Any = self._storage
        steps, count = rows_of_ring(storage, data), len(data)
        first: Any = scalar(self._cursor_value)
        is_known = values_can_be_read(self._cursor_value)
        fits = is_known and first + count <= steps
        device = (getattr(data, "device", None) or "cpu") if is_known else first.device
        index = first + torch.arange(count, device=device)
        index = index if fits else index % steps
        if not is_tensorclass(data):
            data.set("index", expand_as_right(index.to(data.device or index.device), data))
        # before the data, so that other processes do not write to the same slots
        if is_known:
            self._cursor_value.fill_((first + count) % steps)
        else:
            self._cursor_value.add_(count).remainder_(steps)
        increase(self._write_count_value, count)
        if fits:
            set_rows(storage, index, data, first=first)
        elif count > steps and isinstance(storage, TensorStorage):
            # skip rows that later rows would overwrite, because the order of writes is undefined in a compiled graph
            storage.set(index[-steps:], data[-steps:])
        else:
            storage.set(index, data)
        if not is_traced():
            self._bump_generation(index, data)
        known = shape_and_device(storage) if storage.ndim > 1 else None
        if known is not None:
            # not _replicate_index of TorchRL, which reads the length of the storage
            lanes = torch.arange(math.prod(known[0][1:]), device=index.device)
            slots = (index.unsqueeze(1) * len(lanes) + lanes).reshape(-1)
            index = torch.stack([*unravel(slots, known[0])], 1)
        self._mark_update_entities(index)
        return index

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write ``data`` to the slots ``index``, and notify the samplers."""
        if is_tensor_collection(data):
            self._check(data, data.ndim)
        return super().write_at(index, data)

    def _mark_update_entities(self, index: Tensor) -> None:
        storage: Any = self._storage
        try:
            for buffer in attached_buffers(storage):
                buffer.mark_update(index)
        except BaseException:
            # a sampler has rejected the rows
            self._holds_only_rejected_writes |= (
                len(storage) <= torch.as_tensor(index).reshape(-1, storage.ndim).shape[0]
            )
            raise
        self._holds_only_rejected_writes = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        super().load_state_dict(state_dict)
        self._holds_only_rejected_writes = False

    def loads(self, path: Any) -> None:
        """Restore a state that ``dumps`` saved."""
        super().loads(path)
        self._holds_only_rejected_writes = False

    def __getstate__(self) -> dict[str, Any]:
        # keep the tensors of TorchRL's counters: spawned processes share them
        state = vars(self).copy()
        state["_rng"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
