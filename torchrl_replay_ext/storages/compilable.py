"""A tensor storage for compiled reads and writes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorStorageCheckpointer

from torchrl_replay_ext._torchrl import saved_columns, set_columns, stored_columns, stored_data, take_rows
from torchrl_replay_ext.compilation import (
    Counter,
    is_traced,
    mark_static,
    outside_inference_mode,
    to_device,
    uniform,
    values_can_be_read,
)
from torchrl_replay_ext.core.layout import require_capacity


def positions(cursor: Any, size: int) -> Tensor:
    """The places among ``size`` ones that ``cursor``, an index of any kind, stands for; int64 [n], [] for a number."""
    if isinstance(cursor, slice):
        return torch.arange(*cursor.indices(size), device="cpu")
    numbers = cursor if isinstance(cursor, Tensor) else torch.as_tensor(cursor, device="cpu")
    numbers = numbers.nonzero().squeeze(1) if numbers.dtype == torch.bool else numbers.to(torch.int64)
    return numbers + size * (numbers < 0)


class CompilableTensorStorage(LazyTensorStorage):
    """A :class:`~torchrl.data.LazyTensorStorage` whose length and cursor are tensors that are changed in place.

    A graph that reads or writes the storage therefore stays valid while the storage fills and wraps. In a graph,
    ``len`` returns the capacity. Outside graphs the storage behaves like its base class with these exceptions: a
    :class:`~torchrl.data.replay_buffers.RandomSampler` scales uniform numbers in [0, 1) by the length, both inside and
    outside graphs; the length is the highest written slot + 1; ``state_dict()`` returns a copy; and a state of other
    shapes or dtypes is refused.

    Args:
        max_size: capacity, the number of transitions.
        device: device of the data and of the sampler's state. ``"auto"``: the device of the first data. Default:
            ``"cpu"``.
        ndim: number of index dimensions, as in TorchRL. Default: 1.
        consolidated: allocate the storage as one contiguous block, as in TorchRL. Default: False.

    Examples:
        >>> storage = CompilableTensorStorage(1000)
        >>> len(storage)
        0
    """

    _last_cursor_index_value: Tensor  # narrows TorchRL's type, which includes multiprocessing values

    # True: a state is a copy, and keeps the rows of one moment
    copies_state = True

    @outside_inference_mode()
    def __init__(self, max_size: int, *, device: torch.device | str = "cpu", ndim: int = 1, consolidated: bool = False):
        self._len_value = torch.zeros((), dtype=torch.int64, device="cpu")
        self.known_counters: dict[str, int] | None = {}
        # TorchRL makes its counters on the default device
        with torch.device("cpu"):
            super().__init__(max_size, device=device, ndim=ndim, compilable=True, consolidated=consolidated)

    _len: Any = Counter("_len_value")

    def __len__(self) -> int:
        return self.max_size if is_traced() else self._len

    @property
    def num_rows(self) -> Tensor:
        """The number of stored rows, int64 []; its value can change in place."""
        return self._len_value

    @property
    def counters_device(self) -> torch.device:
        """Device of length and cursor: the device of the data after the first write."""
        return self._len_value.device

    # read by TorchRL's checkpointers and hindsight relabelling
    @property
    def _last_cursor(self) -> int | Tensor | None:
        return self._last_cursor_index

    @_last_cursor.setter
    def _last_cursor(self, value: Any) -> None:
        pass

    def _set_last_cursor(self, cursor: Any) -> None:
        own = self._last_cursor_index_value
        if isinstance(cursor, Tensor):
            own.copy_(cursor.reshape(-1)[-1])
        else:
            super()._set_last_cursor(cursor)

    def _get_new_len(self, data: Any, cursor: Any) -> None:
        # the end of all writes, not the sum of their lengths, because rows may be written again
        shape = data.shape if is_tensor_collection(data) else tree_leaves(data)[0].shape
        is_single = isinstance(cursor, Integral) or getattr(cursor, "ndim", None) == 0
        columns = self._total_shape[1:] if self._total_shape else shape[1 - is_single : self.ndim - is_single]
        lanes = math.prod(columns)
        steps = -(self.max_size // -lanes)
        written = positions(cursor[0] if isinstance(cursor, tuple) else cursor, steps)
        if is_traced():
            last = written.max() if written.numel() else -1
            self._len = self._len_value.clamp_min((last + 1) * lanes)
        elif self._len < self.max_size and written.numel():
            last = int(written.max())
            if last >= steps:
                raise IndexError(f"{type(self).__name__}: step {last} is not in a storage of {steps} steps.")
            # one assignment, so that an interrupted write leaves a valid length
            self._len = max(self._len, (last + 1) * lanes)

    @outside_inference_mode()
    def _init(self, data: Any) -> None:
        super()._init(data)
        for column in stored_columns(self):
            if column.dtype == torch.bool:
                # graphs compute with flags as numbers, and a byte that is neither 0 nor 1 counts as itself there
                column.zero_()
        self._settle()

    def _settle(self) -> None:
        """Move data and counters to the storage's device, and mark their addresses as static for CUDA graphs."""
        if not self.initialized:
            return
        data = stored_data(self)
        if is_tensor_collection(data) and self.device != "auto":
            # TorchRL leaves loaded data on the device of the checkpoint
            self._storage = data.to(self.device)
        # TorchRL sets the length when it first computes the shape; in a graph it would set it to the capacity
        _ = self._total_shape
        columns = stored_columns(self)
        device = columns[0].device if columns else self.device
        for name in ("_len_value", "_last_cursor_index_value", "_mutation_revision_value"):
            setattr(self, name, getattr(self, name).to(device))
        mark_static(vars(self), columns)

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``, without its autograd history.

        In a compiled graph, ``data`` must have the entries of the first write.
        """
        if is_traced():
            self._require_columns()
        if set_columns(self, cursor, data, set_cursor=set_cursor):
            return
        if is_traced():
            rows, columns = (
                sorted(map(str, entries.keys(True, True))) if is_tensor_collection(entries) else type(entries).__name__
                for entries in (data, stored_data(self))
            )
            raise KeyError(
                f"CompilableTensorStorage: the data has the entries {rows}, the storage {columns}; in a graph both "
                "must be the same, without non-tensor data and lazy stacks of rows."
            )
        super().set(cursor, data, set_cursor=set_cursor)

    def _require_columns(self) -> None:
        if not self.initialized:
            raise RuntimeError(
                f"{type(self).__name__}: the first write must run outside the compiled function; it allocates memory."
            )

    def get(self, index: Any) -> Any:
        """Read rows. On an accelerator, an index tensor is not compared with the length, which cannot be read there.

        An index beyond the length then returns rows that were never written.
        """
        columns, data = index if isinstance(index, tuple) else (index,), stored_data(self)
        is_index = len(columns) == self.ndim and all(isinstance(i, Tensor) and i.dtype == torch.int64 for i in columns)
        if not is_index or not is_tensor_collection(data) or values_can_be_read(self.counters_device):
            return super().get(index)  # pyright: ignore[reportArgumentType]: TorchRL's annotation names slices only
        first, *rest = columns
        steps = self._len_value // math.prod(tuple(self._total_shape or ())[1 : self.ndim])
        first = to_device(first, self.counters_device)
        return data[(first + steps * (first < 0), *rest)]

    def take(self, index: Tensor, keys: Sequence[NestedKey] | None = None) -> TensorDictBase:
        """Like :meth:`get`, for an index [n] within bounds, in a one-dimensional storage of TensorDicts.

        Writers store the slot of each row as its entry ``"index"``; ``index`` itself stands for it.
        A :class:`~torchrl_replay_ext.CompilableReplayBuffer` without transforms reads its batches by it.

        Args:
            index: int64 [n]; on any device with ``keys``.
            keys: the entries to read. Default: None, all.
        """
        if keys is None:
            return take_rows(stored_data(self), index, index=index)
        return take_rows(stored_data(self).select(*keys), index.to(self.counters_device))

    def state_dict(self) -> dict[str, Any]:
        """A copy of the stored data and the length. ``dumps`` writes them to the disk without a copy in memory."""
        return copy.deepcopy(super().state_dict())

    def require_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if the data of a ``state_dict`` has another number of slots, other entries or dtypes."""
        call, saved = f"{type(self).__name__}.load_state_dict", saved_columns(state_dict["_storage"])
        if not saved:
            return
        shape = tuple(next(iter(saved.values())).shape[: self.ndim])
        require_capacity(call, shape, self.max_size)
        if not 0 <= state_dict["_len"] <= math.prod(shape):
            raise ValueError(f"{call}: _len is {state_dict['_len']}, expected at most {math.prod(shape)}.")
        data: Any = stored_data(self)
        if not is_tensor_collection(data):
            return
        own = saved_columns(data.state_dict())
        for key in sorted(own.keys() | saved.keys()):
            here, there = (
                f"shape {tuple(each[key].shape)} and {each[key].dtype}" if key in each else "no such entry"
                for each in (own, saved)
            )
            if here != there:
                raise ValueError(
                    f"{call}: the stored rows have {here} at {key}, the state has {there}. Load the state into a new "
                    "buffer, which takes over its entries."
                )

    @outside_inference_mode()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``. That of a storage without data sets the length to 0 and keeps the memory.

        Raises:
            ValueError: if the state does not fit, see :meth:`require_loadable`; nothing is changed then.
        """
        self.require_loadable(state_dict)
        is_allocated, saved = self.initialized, state_dict["_storage"]
        if isinstance(saved, dict) and all(str(key).startswith("__") for key in saved):
            # an empty TensorDict, whose batch size would replace that of the data
            state_dict = {**state_dict, "_storage": {}}
        super().load_state_dict(state_dict)
        self.initialized |= is_allocated
        self._settle()

    def saved_at(self, path: Any) -> dict[str, Any]:
        """What ``dumps`` saved in the directory ``path``, as the argument of :meth:`require_loadable`."""
        metadata = json.loads((Path(path) / "storage_metadata.json").read_text())
        is_plain = type(self.checkpointer) is TensorStorageCheckpointer and not metadata["is_pytree"]
        return {"_storage": TensorDict.load_memmap(path).state_dict() if is_plain else {}, "_len": metadata["len"]}

    @outside_inference_mode()
    def loads(self, path: Any) -> None:
        """Load a state saved by ``dumps``. ValueError if it does not fit; nothing is changed then."""
        self.require_loadable(self.saved_at(path))
        super().loads(path)
        self._settle()

    def _rand_given_ndim(self, batch_size: int) -> Tensor | tuple[Tensor, ...]:
        shape = (self.max_size,) if self.ndim == 1 else tuple(self._total_shape or ())
        # a number is faster on the CPU; elsewhere the host would wait for it
        stored = self.num_rows.item() if values_can_be_read(self.num_rows) else self.num_rows
        steps = stored // math.prod(shape[1:])
        return_index = []
        for length in (steps, *shape[1:]):
            u = uniform(batch_size, device=self._len_value.device, generator=self._rng)
            return_index.append((u * length).to(torch.int64))
        return return_index[0] if self.ndim == 1 else tuple(return_index)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            # the other process shares the tensors
            self.known_counters = None
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # TorchRL pickles the length as a number
        self._len_value = torch.as_tensor(self._len_value, device=self._last_cursor_index_value.device)
