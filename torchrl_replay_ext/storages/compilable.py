"""A tensor storage that graphs read and write."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage

from torchrl_replay_ext._torchrl import map_tensors, stored_columns, stored_data
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, mark_static, scalar, uniform


class CompilableTensorStorage(LazyTensorStorage):
    """A :class:`~torchrl.data.LazyTensorStorage` whose length and cursor are tensors, changed in place.

    A graph that reads from it or writes to it therefore serves the whole life of the buffer. Outside graphs it behaves
    like its base class, but that a :class:`~torchrl.data.replay_buffers.RandomSampler` makes its draws of uniform
    numbers in [0, 1), as inside, where the length is not known. There, ``len`` gives the capacity.

    Args:
        max_size: capacity, the number of transitions.
        device: where the data lives; the sampler's state follows it. ``"auto"``: that of the first data.
        ndim: number of dimensions to index, as in TorchRL.
        consolidated: make the storage one contiguous block, as in TorchRL.

    Examples:
        >>> storage = CompilableTensorStorage(1000)
        >>> len(storage)
        0
    """

    _last_cursor_index_value: Tensor  # in TorchRL, also a number shared by processes

    def __init__(self, max_size: int, *, device: torch.device | str = "cpu", ndim: int = 1, consolidated: bool = False):
        self._len_value = torch.zeros((), dtype=torch.int64)
        super().__init__(max_size, device=device, ndim=ndim, compilable=True, consolidated=consolidated)

    @property
    def _len(self) -> int:
        return int(self._len_value)

    @_len.setter
    def _len(self, value: int) -> None:
        self._len_value.fill_(value)

    def __len__(self) -> int:
        return self.max_size if is_traced() else self._len

    @property
    def counters_device(self) -> torch.device:
        """Where length and cursor are: with the data, once something was written."""
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
        shape = data.shape if is_tensor_collection(data) else tree_leaves(data)[0].shape
        is_single = isinstance(cursor, Integral) or getattr(cursor, "ndim", None) == 0
        self._len_value.add_(shape[: self.ndim - is_single].numel()).clamp_(max=self.max_size)

    def _init(self, data: Any) -> None:
        super()._init(data)
        self._settle()

    def _settle(self) -> None:
        """Bring data and counters to the storage's device, and tell CUDA graphs that all of it stays there."""
        if not self.initialized:
            return
        data = stored_data(self)
        if is_tensor_collection(data) and self.device != "auto":
            # TorchRL leaves loaded data on the device of the checkpoint
            self._storage = data.to(self.device)
        # TorchRL sets the length where it first needs the shape: in a graph, to the capacity
        _ = self._total_shape
        columns = stored_columns(self)
        device = columns[0].device
        for name in ("_len_value", "_last_cursor_index_value", "_mutation_revision_value"):
            setattr(self, name, getattr(self, name).to(device))
        mark_static(vars(self), columns)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``; in a graph, TensorDicts with the entries of the first write."""
        if not is_traced():
            super().set(cursor, data, set_cursor=set_cursor)
            return
        self._require_columns()
        stored = stored_data(self)
        keys = set(stored.keys(True, True))
        if set(data.keys(True, True)) != keys:
            raise KeyError(
                f"CompilableTensorStorage: the data has the entries {sorted(map(str, data.keys(True, True)))}, the "
                f"storage {sorted(map(str, keys))}; in a graph they must be the same."
            )
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        for key in stored.keys(True, True):
            column = stored.get(key)
            column[cursor] = data.get(key).to(column.device)
        self._bump_mutation_revision()

    def _require_columns(self) -> None:
        if not self.initialized:
            raise RuntimeError(
                f"{type(self).__name__}: the first write must run outside the compiled function: it makes the storage."
            )

    def take(self, index: Tensor) -> TensorDictBase:
        """:meth:`get` for an index [n] within bounds, in a storage of one dimension that holds TensorDicts."""
        return map_tensors(stored_data(self), lambda column: gather_in_bounds(column, index), index.shape)

    def take_columns(self, keys: list[NestedKey], index: Tensor) -> TensorDictBase:
        """:meth:`take` of some entries, for an index on any device."""
        stored = stored_data(self).select(*keys)
        return map_tensors(stored, lambda column: gather_in_bounds(column, index.to(column.device)), index.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._settle()

    def loads(self, path: Any) -> None:
        """Restore what ``dumps`` saved."""
        super().loads(path)
        self._settle()

    def _rand_given_ndim(self, batch_size: int) -> Tensor | tuple[Tensor, ...]:
        total = torch.Size([self.max_size]) if self.ndim == 1 else self._total_shape
        assert total is not None
        shape = tuple(total)
        steps = scalar(self._len_value) // math.prod(shape[1:])
        return_index = []
        for length in (steps, *shape[1:]):
            u = uniform(batch_size, device=self._len_value.device, generator=self._rng)
            return_index.append((u * length).to(torch.int64))
        return return_index[0] if self.ndim == 1 else tuple(return_index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        length = state.pop("len__context", None)
        super().__setstate__(state)
        if length is not None:
            self._len_value = torch.tensor(length, dtype=torch.int64, device=self._last_cursor_index_value.device)
