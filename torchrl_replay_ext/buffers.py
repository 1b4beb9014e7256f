"""A replay buffer whose every step can be part of one compiled graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, Sequence, TensorDictRoundRobinWriter

from torchrl_replay_ext.samplers.base import STAMP_KEY
from torchrl_replay_ext.tracing import is_traced, mark_static, scalar, take, uniform

_NO_SEQUENCES = (
    "CompilableReplayBuffer(sample_unit=Sequence(...)): TorchRL's Sequence cannot be part of a graph. Call sample() "
    "and update_tensordict_priority() outside the compiled function and pass the sample to it, or use "
    "TrajectoryRetraceSampler, which draws sequences in a graph."
)


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

    # read by TorchRL's checkpointers and hindsight relabelling
    @property
    def _last_cursor(self) -> int | None:
        return self._last_cursor_index  # pyright: ignore[reportReturnType]: an int outside graphs

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
        if not is_traced():
            super()._get_new_len(data, cursor)
            return
        shape = data.shape if is_tensor_collection(data) else tree_leaves(data)[0].shape
        self._len_value.add_(shape[: self.ndim].numel()).clamp_(max=self.max_size)

    def _init(self, data: Any) -> None:
        if is_traced():
            raise RuntimeError(
                "CompilableTensorStorage: the first write must run outside the compiled function: it makes the storage."
            )
        super()._init(data)
        self._settle()

    def _settle(self) -> None:
        """Bring the counters to where the data is, and tell CUDA graphs that all of it stays there."""
        if not self.initialized:
            return
        # TorchRL sets the length where it first needs the shape: in a graph, to the capacity
        _ = self._total_shape
        device = _columns(self._storage)[0].device
        for name in ("_len_value", "_last_cursor_index_value", "_mutation_revision_value"):
            setattr(self, name, getattr(self, name).to(device))
        mark_static(vars(self), _columns(self._storage))

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``; in a graph, TensorDicts with the entries of the first write."""
        if not is_traced():
            super().set(cursor, data, set_cursor=set_cursor)
            return
        if not self.initialized:
            self._init(data)
        stored: Any = self._storage
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

    def take(self, index: Tensor) -> TensorDictBase:
        """:meth:`get` for an index [n] within bounds, in a storage of one dimension that holds TensorDicts."""
        stored: Any = self._storage
        return stored._fast_apply(lambda column: take(column, index), batch_size=index.shape)

    def take_columns(self, keys: list[NestedKey], index: Tensor) -> TensorDictBase:
        """:meth:`take` of some entries."""
        stored: Any = self._storage
        return stored.select(*keys)._fast_apply(lambda column: take(column, index), batch_size=index.shape)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._settle()

    def loads(self, path: Any) -> None:
        """Restore what ``dumps`` saved."""
        super().loads(path)
        self._settle()

    def _rand_given_ndim(self, batch_size: int) -> Tensor | tuple[Tensor, ...]:
        shape = (self.max_size,) if self.ndim == 1 else tuple(self._total_shape)
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


def _columns(data: Any) -> list[Any]:
    return list(data.values(True, True)) if is_tensor_collection(data) else tree_leaves(data)


class CompilableWriter(TensorDictRoundRobinWriter):
    """TorchRL's round-robin writer with a cursor that is a tensor, changed in place.

    It is the default writer of :class:`CompilableReplayBuffer`.
    """

    # True while the storage holds only rows of rejected writes; such rows do not fix the set of entries
    _only_refused = False

    def __init__(self, *, track_generations: bool = False):
        self._cursor_value = torch.zeros((), dtype=torch.int64)
        self._write_count_value = torch.zeros((), dtype=torch.int64)
        super().__init__(compilable=True, track_generations=track_generations)

    @property
    def _cursor(self) -> Any:
        return scalar(self._cursor_value)

    @_cursor.setter
    def _cursor(self, value: int | Tensor) -> None:
        self._cursor_value.copy_(torch.as_tensor(value))

    @property
    def _write_count(self) -> Any:
        return scalar(self._write_count_value)

    @_write_count.setter
    def _write_count(self, value: int | Tensor) -> None:
        self._write_count_value.copy_(torch.as_tensor(value))

    def add(self, data: Any) -> Any:
        """Write a single row over the oldest one, and tell the samplers."""
        if is_tensor_collection(data):
            self._check(data, 0)
        return self._undone_if_refused(super().add, data)

    def _check(self, data: TensorDictBase, ndim: int) -> None:
        """Refuse rows that cannot be stored beside what is stored, before anything is changed.

        The entries are settled by the first write that was accepted. An entry that comes later would be zero in all
        earlier rows, and every row without it could no longer be written.

        Args:
            data: the rows.
            ndim: number of its batch dimensions.

        Raises:
            KeyError: if an entry is missing, or is not among those that are stored.
            TypeError: if an entry has another dtype.
            ValueError: if an entry has another shape.
        """
        storage: Any = self._storage
        stored: Any = getattr(storage, "_storage", None)
        if not is_tensor_collection(stored):
            return
        name = type(self).__name__
        columns = dict(data.items(True, True))
        columns.pop("index", None)
        for key, known in stored.items(True, True):
            if key == "index":
                continue
            column = columns.pop(key, None)
            if column is None:
                raise KeyError(
                    f"{name}: the data has no entry {key!r}, which is stored; the environment, policy or transform "
                    "that wrote it before must write it into every row. For rows of other entries use a new storage."
                )
            if known.shape[stored.ndim :] != column.shape[ndim:]:
                raise ValueError(
                    f"{name}: the entry {key!r} has shape {tuple(column.shape)}; what is stored needs "
                    f"{(*data.shape[:ndim], *known.shape[stored.ndim :])}."
                )
            if known.dtype != column.dtype:
                raise TypeError(
                    f"{name}: the entry {key!r} has dtype {column.dtype}; what is stored has {known.dtype}. Convert it "
                    f"where it is written: data[{key!r}] = data[{key!r}].to({known.dtype})."
                )
        if columns and len(storage) and not self._only_refused:
            is_stacked = getattr(storage, "is_stacked", lambda key: False)
            surplus = [key for key in columns if not is_stacked(key)]
            if surplus:
                raise KeyError(
                    f"{name}: the data has the entries {surplus}, which the rows stored before do not have. Write them "
                    "from the first row on, leave them out (data.exclude(...)), or empty the buffer first (rb.empty())."
                )

    def _undone_if_refused(self, write: Callable[[Any], Any], data: Any) -> Any:
        """``write(data)``; where the storage has refused it before it wrote anything, the cursor stays where it was."""
        storage: Any = self._storage
        before = storage._last_cursor_index, int(self._cursor_value), int(self._write_count_value)
        try:
            return write(data)
        except BaseException:
            if storage._last_cursor_index == before[0] and int(self._write_count_value) - before[2] < storage.max_size:
                self._cursor, self._write_count = before[1:]
            raise

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write ``data`` [n, ...] over the oldest rows, and tell the samplers.

        Raises:
            KeyError: if the entries are not those of the rows stored before. Nothing is written then, as in the next
                cases.
            TypeError: if an entry has another dtype than what is stored.
            ValueError: if an entry has another shape than what is stored.
        """
        storage: Any = self._storage
        if is_tensor_collection(data) and 0 in data.shape:
            return torch.empty((0, storage.ndim) if storage.ndim > 1 else 0, dtype=torch.int64)
        if not is_traced():
            if is_tensor_collection(data):
                self._check(data, storage.ndim)
            index = self._undone_if_refused(super().extend, data)
            length = getattr(storage, "_len_value", None)
            device = length.device if isinstance(length, Tensor) else self._cursor_value.device
            if device != self._cursor_value.device:
                self._cursor_value = self._cursor_value.to(device)
                self._write_count_value = self._write_count_value.to(device)
                mark_static(vars(self))
            return index
        if self._track_generations or not isinstance(storage, CompilableTensorStorage):
            raise TypeError("CompilableWriter: a graph needs a CompilableTensorStorage, and no track_generations.")
        rows, count = storage._max_size_along_dim0(batched_data=data), len(data)
        index = (self._cursor_value + torch.arange(count, device=self._cursor_value.device)) % rows
        data.set("index", expand_as_right(index.to(data.device or index.device), data))
        self._cursor_value.add_(count).remainder_(rows)
        self._write_count_value.add_(count)
        # rows that later ones would overwrite are not written at all: the order of writes is undefined in a graph
        kept = data[-rows:] if count > rows else data
        storage.set(index[-rows:], kept)
        index = self._replicate_index(index)
        self._mark_update_entities(index)
        return index

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write at given slots, and tell the samplers."""
        if is_tensor_collection(data):
            self._check(data, data.ndim)
        return super().write_at(index, data)

    def _mark_update_entities(self, index: Tensor) -> None:
        storage: Any = self._storage
        if is_traced():
            for entity in storage._attached_entities_list:
                entity.mark_update(index)
            return
        try:
            for entity in storage._attached_entities_list:
                entity.mark_update(index)
        except BaseException:
            self._only_refused |= len(storage) <= torch.as_tensor(index).reshape(-1, storage.ndim).shape[0]
            raise
        self._only_refused = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._only_refused = False

    def loads(self, path: Any) -> None:
        """Restore what ``dumps`` saved."""
        super().loads(path)
        self._only_refused = False

    def __getstate__(self) -> dict[str, Any]:
        # as tensors, which are shared with spawned processes
        state = vars(self).copy()
        state["_rng"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class CompilableReplayBuffer(TensorDictReplayBuffer):
    """A :class:`~torchrl.data.TensorDictReplayBuffer` that can be part of one compiled graph.

    ``extend``, ``sample`` and ``update_tensordict_priority`` run under ``torch.compile(fullgraph=True)``, and are
    compiled once for the whole life of the buffer: from a nearly empty one until long after the ring has wrapped, with
    annealed exponents. In CUDA graphs (``mode="reduce-overhead"``, or tensordict's ``CudaGraphModule``) nothing waits
    for the device. Outside graphs it behaves like its base class. It takes the same arguments; ``storage`` must be a
    :class:`CompilableTensorStorage`.

    * The first write must run outside the graph: it sets up storage and sampler.
    * A graph draws from torch's global generator (``torch.manual_seed``) and does not use a generator that was given to
      the buffer, since generators cannot be traced.
    * A graph takes no locks. Do not let other threads write, sample or update while it runs; ``prefetch`` has no effect
      in it.
    * What eager mode refuses cannot be an error in a graph: TD errors that are negative, not finite or too large change
      nothing and are counted in ``sampler.stats()`` as ``rejected_updates``; draws from an empty buffer are slot 0 with
      weight 0.
    * Samples of our prioritized samplers carry ``"write_stamp"``, int64 [B]: the number of the write of each row.
      ``update_tensordict_priority`` drops the rows whose slot was overwritten since, however late it comes.
    * ``sample_unit=Sequence(...)`` works outside graphs only.

    Raises:
        TypeError: if the storage is of another class.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_replay_ext import ProportionalSampler
        >>> rb = CompilableReplayBuffer(
        ...     storage=CompilableTensorStorage(1000), sampler=ProportionalSampler(1000), batch_size=4
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> @torch.compile(fullgraph=True)
        ... def step():
        ...     batch = rb.sample()
        ...     batch["td_error"] = batch["obs"].square().sum(-1)
        ...     rb.update_tensordict_priority(batch)
        ...     return batch
        >>> step()["obs"].shape
        torch.Size([4, 3])
    """

    # True while add() runs: TorchRL then calls update_tensordict_priority for the new row, which has no TD error yet
    _adding = False

    def __init__(self, **arguments: Any):
        if arguments.get("writer") is None:
            arguments["writer"] = CompilableWriter
        super().__init__(**arguments)

    def _init(self) -> None:
        super()._init()
        if not isinstance(self._storage, CompilableTensorStorage):
            raise TypeError(
                f"CompilableReplayBuffer(storage={type(self._storage).__name__}): pass storage="
                "CompilableTensorStorage(capacity); for other storages use torchrl's TensorDictReplayBuffer."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` gave; a graph may then be the first to write or sample."""
        super().load_state_dict(state_dict)
        if self._storage.initialized:
            # the sampler takes shape and device from the storage, as at a write
            columns = (self._storage.ndim,) if self._storage.ndim > 1 else ()
            self._sampler.mark_update(torch.empty(0, *columns, dtype=torch.int64), storage=self._storage)

    def sample(self, batch_size: int | None = None, return_info: bool = False, include_info: bool | None = None) -> Any:
        """Draw a batch; see :meth:`torchrl.data.TensorDictReplayBuffer.sample`."""
        if not is_traced():
            return super().sample(batch_size, return_info, include_info)
        batch_size = self._batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise RuntimeError("CompilableReplayBuffer.sample: pass batch_size= to the buffer or to sample().")
        if isinstance(self._sample_unit, Sequence):
            raise NotImplementedError(_NO_SEQUENCES)
        data, info = self._sample(batch_size)
        for key, value in info.items():
            value = torch.stack(value, -1) if isinstance(value, tuple) else value
            data.set(key, expand_as_right(value, data) if value.ndim < data.ndim else value)
        return (data, info) if return_info else data

    def _sample(self, batch_size: int) -> tuple[Any, dict]:
        storage: Any = self._storage
        simple = storage.ndim == 1 and is_tensor_collection(storage._storage) and self._sample_unit is None
        if not is_traced() or not simple or (self._transform is not None and len(self._transform)):
            return super()._sample(batch_size)
        index, info = self._sampler.sample(storage, batch_size)
        info["index"] = index
        return self._collate_fn(storage.take(index)), info

    def update_priority(self, index: int | Tensor | tuple[Tensor, ...], priority: float | Tensor) -> None:
        """Set priorities by index; see :meth:`torchrl.data.ReplayBuffer.update_priority`."""
        if not is_traced():
            super().update_priority(index, priority)
            return
        index = torch.stack(index, -1) if isinstance(index, tuple) else index
        priority = torch.as_tensor(priority)
        if self.dim_extend > 0 and priority.ndim > 1:
            priority = self._transpose(priority).flatten()
        self._sampler.update_priority(index, priority, storage=self._storage)

    def add(self, data: TensorDictBase) -> int:
        """Write a single row; without a TD error it gets the default priority of a new one."""
        self._adding = True
        try:
            return super().add(data)
        finally:
            self._adding = False

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample from its TD errors (the entry ``priority_key``).

        Rows whose slot was overwritten since they were drawn are dropped. With ``sample_unit=Sequence(...)``, only the
        anchors of the windows are updated, each with the largest TD error of the valid rows of its windows.

        Args:
            data: a sample, whole or in part, with its TD errors [B] or [B, ...]. What they must be, squared or
                absolute, depends on the sampler.

        Raises:
            KeyError: if there is no entry ``priority_key``. Nothing is changed then.
            NotImplementedError: in a graph, if the buffer draws sequences.
        """
        sampler: Any = self._sampler
        if not isinstance(sampler, PrioritizedSampler):
            return
        if data.get(self.priority_key, None) is None and getattr(sampler, "takes_priorities", True):
            if self._adding:
                return
            raise KeyError(
                f"CompilableReplayBuffer.update_tensordict_priority: the sample has no entry {self.priority_key!r} "
                f"with TD errors, only {list(data.keys(True, True))}. Pass the batch to which the loss has "
                "written them, or pass the name that the loss uses as priority_key= to the buffer."
            )
        traced = is_traced()
        anchored = isinstance(self._sample_unit, Sequence) and data.get("anchor_index", None) is not None
        if anchored:
            if traced:
                raise NotImplementedError(_NO_SEQUENCES)
            needed = ("anchor_index", "validity_mask", "index", STAMP_KEY, self.priority_key)
            data = data.select(*needed, strict=False).reshape(-1)
        stamp = data.get(STAMP_KEY, None) if getattr(sampler, "takes_stamps", False) and data.ndim == 1 else None
        if stamp is None:
            super().update_tensordict_priority(data)
            return
        index, priority = data["index"], self._get_priority_vector(data)
        if anchored:
            index, stamp, priority = _largest_of_anchors(data["anchor_index"], stamp, priority, data["validity_mask"])
        with nullcontext() if traced else self._replay_lock, nullcontext() if traced else self._write_lock:
            sampler.update_priority(index, priority, storage=self._storage, stamp=stamp)


def _largest_of_anchors(
    anchor: Tensor, stamp: Tensor, priority: Tensor, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct pairs of anchor and write stamp of rows [n], and the largest priority of each pair's valid rows.

    Args:
        anchor: index of the row's anchor, int64 [n] or [n, ndim].
        stamp: number of the write of the anchor, int64 [n].
        priority: float [n].
        valid: bool [n].

    Returns:
        Index [m] or [m, ndim], stamps [m], priorities [m].
    """
    pairs = torch.cat([anchor.reshape(len(stamp), -1), stamp.unsqueeze(1)], 1)[valid]
    distinct, place = torch.unique(pairs, dim=0, return_inverse=True)
    largest = torch.zeros_like(distinct[:, 0], dtype=priority.dtype)
    largest.scatter_reduce_(0, place, priority[valid], reduce="amax", include_self=False)
    return distinct[:, :-1].reshape(-1, *anchor.shape[1:]), distinct[:, -1], largest
