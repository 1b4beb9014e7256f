"""The only file that reads private attributes of TorchRL's and tensordict's objects.

Two kinds of private names cannot be moved here, because they are used through ``self``: hooks of a TorchRL base class
that a subclass overrides, and attributes that a subclass inherits. ruff's rule SLF001 refuses other
private reads outside of this file.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorStorage,
    Transition,
)

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, to_device


def length(storage: Any) -> int:
    """The number of stored transitions. TorchRL declares that ``len`` of a storage returns None."""
    return len(storage)


def set_length(storage: Any, count: int) -> None:
    """Set the number of stored transitions of a tensor storage; a list keeps its items."""
    if isinstance(storage, TensorStorage):
        storage._len = count


def stored_data(storage: Storage | None) -> Any:
    """The content of a storage: a TensorDict, a list, or another tree of tensors; None before the first write."""
    # TorchRL keeps the memory when it loads the state of a storage that never was written
    return getattr(storage, "_storage", None) if getattr(storage, "initialized", True) else None


def is_group(value: Any) -> bool:
    """True for a TensorDict or tensorclass, False for tensors and non-tensor data."""
    return is_tensor_collection(value) and not is_non_tensor(value)


def _entries(data: Any, ndim: int, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The entries of a TensorDict, tensorclass or another tree of tensors, each with its path. It stacks nothing.

    A lazy stack along one of the first ``ndim`` dimensions counts as an entry. Other lazy stacks, such as agents with
    different shapes, are divided into their parts.
    """
    items: Any = None
    if isinstance(data, LazyStackedTensorDict) and not is_non_tensor(data):
        if data.stack_dim >= ndim:
            items = (((data.stack_dim - ndim, number), part) for number, part in enumerate(data.tensordicts))
    elif is_group(data) or isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list | tuple):
        items = enumerate(data)
    if items is None:
        yield path, data
        return
    for name, value in items:
        yield from _entries(value, ndim, (*path, name))


def entries_of(data: Any, keys: Iterable[NestedKey]) -> list[Any]:
    """``data.get(key, None)`` of each key, in a fifth of the time for a TensorDict."""
    entries: list[Any] = []
    for key in keys:
        path: Any = (key,) if isinstance(key, str) else key
        entry: Any = data
        for depth, name in enumerate(path):
            if type(entry) is not TensorDict:
                entry = entry.get(path[depth:], None) if is_tensor_collection(entry) else None
                break
            entry = entry._tensordict.get(name)
        entries.append(entry)
    return entries


def matching_columns(
    stored: Any, data: Any, ndim: int, *, except_for: str = "", stored_ndim: int | None = None
) -> list[tuple[Tensor, Tensor]] | None:
    """The tensors of stored rows, each with the one of new rows; None unless names, dtypes and shapes agree.

    This takes a tenth of the time of a comparison that finds what differs, or that knows stacks and tensorclasses.

    Args:
        stored: the stored TensorDict.
        data: the new rows, a TensorDict.
        ndim: number of batch dimensions of ``data``.
        except_for: an entry that either of them may lack. Default: none.
        stored_ndim: number of batch dimensions of the stored rows. Default: None, those of ``stored``.
    """
    if type(stored) is not TensorDict or type(data) is not TensorDict:
        return None
    stored_ndim = stored.ndim if stored_ndim is None else stored_ndim
    columns, rows, pairs = stored._tensordict, data._tensordict, []
    if columns.keys() != rows.keys() and not columns.keys() ^ rows.keys() <= {except_for}:
        return None
    for name, column in columns.items():
        if name == except_for:
            continue
        row = rows[name]
        if isinstance(column, Tensor):
            is_alike = isinstance(row, Tensor) and row.dtype == column.dtype and not row.is_meta
            if not is_alike or row.shape[ndim:] != column.shape[stored_ndim:]:
                return None
            pairs.append((column, row))
        else:
            inner = matching_columns(column, row, ndim, stored_ndim=stored_ndim)
            if inner is None:
                return None
            pairs += inner
    return pairs


def stored_columns(storage: Any) -> list[Any]:
    """The tensors of a tensor storage, after the first write."""
    return [column for _, column in _entries(stored_data(storage), storage.ndim)]


def shape_and_device(storage: Any) -> tuple[tuple[int, ...], torch.device] | None:
    """Shape of the slots and device of the data of a storage; None before the first write.

    TorchRL rounds the size of a storage with ndim >= 2 up to a multiple of the number of columns.
    """
    data = stored_data(storage)
    if data is None:
        return None
    if isinstance(data, list):
        return (storage.max_size,), torch.device("cpu")
    shape = tuple(storage._total_shape)[: storage.ndim]
    device = next((c.device for c in stored_columns(storage) if isinstance(c, Tensor)), torch.device("cpu"))
    return shape, device


def saved_columns(data: Any) -> dict[tuple[str, ...], Tensor]:
    """The tensors of rows by their paths: those of a TensorDict, or of its ``state_dict``."""
    found = {}
    for path, column in _entries(data, 1):
        # entries as "__batch_size" are no data
        if isinstance(column, Tensor) and not any(str(name).startswith("__") for name in path):
            found[tuple(map(str, path))] = column
    return found


def storage_of(sampler: Any, depth: int = 2) -> Any:
    """The storage of the buffer that holds a sampler, maybe inside of ``depth`` other samplers; None if there is none.

    Slow: TorchRL passes the storage with each call, but a sampler that loads a state before its first call must find
    it, because a state of another capacity would be refused too late.
    """
    for holder in gc.get_referrers(sampler):
        owner = holder
        if isinstance(holder, dict):
            owner = next((each for each in gc.get_referrers(holder) if getattr(each, "__dict__", None) is holder), None)
        if isinstance(owner, ReplayBuffer):
            return getattr(owner, "_storage", None)
        if isinstance(owner, Sampler) and owner is not sampler and depth:
            storage = storage_of(owner, depth - 1)
            if storage is not None:
                return storage
    return None


def state_has_references(storage: Any) -> bool:
    """True if the ``state_dict`` of a storage holds its tensors themselves, as those of TorchRL do, and no copies."""
    return isinstance(storage, TensorStorage) and not getattr(storage, "copies_state", False)


def has_size(storage: Any) -> bool:
    """False for a list storage without a maximum size."""
    return storage.max_size < torch.iinfo(torch.int64).max


def step_after_rows(storage: Any) -> int:
    """The step of the ring that a write after the stored rows begins with; 0 in a full storage of unknown order."""
    known = shape_and_device(storage)
    if known is None:
        return 0
    steps, *lanes = known[0]
    stored, last = length(storage) // math.prod(lanes), getattr(storage, "_last_cursor_index", None)
    return stored if stored < steps else 0 if last is None else (int(last) + 1) % steps


def next_step(storage: Any) -> int | Tensor:
    """The step of the ring that the buffer's writer fills next; -1 without a round-robin writer.

    In a graph it is a tensor.
    """
    writer: Any = None
    for buffer in getattr(storage, "_attached_entities_list", ()):
        other = getattr(buffer, "_writer", None)
        # of several buffers, the last one that has written
        if isinstance(other, RoundRobinWriter) and (writer is None or is_traced() or other._write_count):
            writer = other
    return -1 if writer is None else writer._cursor


def is_compilable(storage: Storage) -> bool:
    """True if graphs can read from this storage and write to it."""
    return bool(getattr(storage, "_compilable", False))


def is_stacked(storage: Any, key: NestedKey) -> bool:
    """True if the storage puts the entry together from stored frames; it is then no column of the stored data."""
    return bool(getattr(storage, "is_stacked", lambda key: False)(key))


def rows_of_ring(storage: Any, data: Any) -> int:
    """The number of steps of the ring; ``data``, a batch of steps, is only used before the first write."""
    return storage._max_size_along_dim0(batched_data=data)


def set_rows(storage: Any, index: Tensor, data: Any, *, first: int | None) -> None:
    """Write ``data`` [n] to the steps ``index`` [n] of the ring; ``first``: the first one if they are consecutive."""
    keeps_index = is_compilable(storage) and not hasattr(storage, "num_rows")
    if not isinstance(storage, TensorStorage) or keeps_index:
        storage.set(index, data)  # pyright: ignore[reportArgumentType]: TorchRL's annotation names no tensors
        return
    # a slice takes half the time, but hindsight relabelling and checkpoints of TorchRL need the index
    cursor: Any = index if first is None else slice(first, first + len(index))
    is_overridden = type(storage).set is not TensorStorage.set or "set" in vars(storage)
    if is_overridden or not set_columns(storage, cursor, data):
        storage.set(cursor, data)
    storage._last_cursor = index  # pyright: ignore[reportAttributeAccessIssue]: declared as None


def set_columns(storage: Any, cursor: Any, data: Any, *, set_cursor: bool = True) -> bool:
    """:meth:`TensorStorage.set` by columns, which graphs can trace; it takes a third of the time.

    Returns False, and writes nothing, unless data and storage have the same entries, all tensors.
    """
    stored = stored_data(storage)
    pairs = None if torch.compiler.is_dynamo_compiling() else matching_columns(stored, data, getattr(data, "ndim", 0))
    if pairs is None:
        rows, columns = (dict(_entries(each, getattr(each, "ndim", 0))) for each in (data, stored))
        are_tensors = all(isinstance(each, Tensor) for each in (*rows.values(), *columns.values()))
        # TorchRL takes the elements of a list as rows
        if rows.keys() != columns.keys() or not are_tensors or isinstance(data, list):
            return False
        pairs = [(column, rows[key]) for key, column in columns.items()]
    if set_cursor:
        storage._set_last_cursor(cursor)
        storage._get_new_len(data, cursor)
    for column, row in pairs:
        column[cursor] = to_device(row, column.device)
    storage._bump_mutation_revision()
    return True


class WriteCount:
    """Counts the writes to a storage outside of graphs: writers notify all entities that are attached to it."""

    writes = 0

    def mark_update(self, index: Any) -> None:
        self.writes += not isinstance(index, Tensor) or index.numel() > 0


def write_count(storage: Any) -> WriteCount:
    """The counter of a storage, which all samplers share. Samplers count their notifications, and compare both."""
    entities = attached_entities(storage)
    count = next((each for each in entities if isinstance(each, WriteCount)), None) or WriteCount()
    if count in entities:
        entities.remove(count)
    # last, so that a sampler is notified of a write before it is counted here
    storage.attach(count)
    return count


def attached_entities(storage: Any) -> list[Any]:
    """What is notified of each write to this storage: its buffers, and the counter of writes."""
    # not the public property, which torch.compile cannot trace
    return storage._attached_entities_list


def attached_buffers(storage: Any) -> list[Any]:
    """The buffers that read from this storage or write to it."""
    return [each for each in attached_entities(storage) if not isinstance(each, WriteCount)]


@contextmanager
def locked(buffer: Any) -> Iterator[None]:
    """Lock out other threads and processes that use the buffer. A graph takes no locks."""
    if is_traced():
        yield
    else:
        with buffer._replay_lock, buffer._write_lock:
            yield


@contextmanager
def exclusive(storage: Any) -> Iterator[None]:
    """Hold the locks of all buffers of this storage, so no other thread can use them."""
    buffers = attached_buffers(storage) if isinstance(storage, Storage) else ()
    with _held([lock for buffer in buffers if (lock := getattr(buffer, "_replay_lock", None)) is not None]):
        yield


@contextmanager
def _held(locks: Sequence[Any]) -> Iterator[None]:
    """Hold all locks; an ExitStack would keep them if Ctrl-C arrives in its own code."""
    if locks:
        with locks[0], _held(locks[1:]):
            yield
    else:
        yield


def take_rows(data: TensorDictBase, index: Tensor, /, **known: Tensor) -> Any:
    """The rows ``index`` [n], within bounds, of a TensorDict with one batch dimension.

    In eager code, stored entries that are ``known``, [n] each, are not read.
    """
    if torch.compiler.is_dynamo_compiling() or not isinstance(data, TensorDict) or data._has_names():
        return data._fast_apply(lambda column: gather_in_bounds(column, index), batch_size=index.shape)
    parts = {}
    for key, part in data._tensordict.items():
        if key in known:
            parts[key] = known[key]
        elif isinstance(part, Tensor):
            parts[key] = part.index_select(0, index)
        else:
            parts[key] = take_rows(part, index) if type(part) is TensorDict else part[index]
    return TensorDict._new_unsafe(parts, batch_size=index.shape, device=data.device)


def set_entries(data: Any, entries: dict[NestedKey, Tensor]) -> None:
    """Set entries of a batch, as TorchRL's buffers do. In eager code a TensorDict [n] takes them without checks."""
    is_plain = type(data) is TensorDict and not is_traced()
    for key, value in entries.items():
        if is_plain and isinstance(key, str) and value.shape[:1] == data.shape and data.device in (None, value.device):
            data._set_str(key, value, validated=True, inplace=False, non_blocking=False)
        else:
            data.set(key, expand_as_right(value, data) if value.ndim < data.ndim else value)


def expands_draws(buffer: Any) -> bool:
    """True if a buffer expands each draw to several rows (TorchRL's ``sample_unit=Sequence(...)``)."""
    unit = getattr(buffer, "_sample_unit", None)
    return unit is not None and not isinstance(unit, Transition)


def _buffer_of(sampler: Sampler, storage: Any) -> Any:
    """The buffer of this sampler; None if there is none in this process."""
    for buffer in getattr(storage, "_attached_entities_list", ()):
        own = getattr(buffer, "_sampler", None)
        if sampler in (own, getattr(own, "critic_sampler", None)):
            return buffer
    return None


def draws_sequences(sampler: Sampler, storage: Any) -> bool:
    """:func:`expands_draws` of the buffer of this sampler."""
    return expands_draws(_buffer_of(sampler, storage))


def count_sample(buffer: Any, num_rows: int) -> None:
    """Add a sample to the counters of the buffer's ``stats()``, which torchrl 0.14 does not have."""
    if count := getattr(buffer, "_increment_counter", None):
        count("_sample_call_count_value", 1)
        count("_sampled_item_count_value", num_rows)


def with_sampler(buffer: Any, sampler: Any) -> Any:
    """A view of a buffer with the same locks and transforms, but with another sampler and without prefetching."""
    view = object.__new__(type(buffer))
    vars(view).update(vars(buffer))
    view._sampler, view._prefetch, view._batch_size = sampler, False, None
    return view


@cache
def _without_index(base: Any) -> Any:
    """A class of buffers whose samples have no entry ``"index"``."""

    class ReadOnlyBuffer(base):
        def sample(self, *arguments: Any, **keywords: Any) -> Any:
            with locked(self._origin):
                drawn = super().sample(*arguments, **keywords)
            if isinstance(drawn, tuple):
                return drawn[0].exclude("index"), *drawn[1:]
            return drawn.exclude("index")

        def update_priority(self, *_: Any, **__: Any) -> None:
            raise ValueError("The actor's buffer takes no priorities; pass the critic's batch to the critic's buffer.")

        update_tensordict_priority = update_priority

        def __reduce_ex__(self, protocol: Any) -> Any:
            # pickles do not find a class that a function makes
            return _new_without_index, (base,), self.__getstate__()

    return ReadOnlyBuffer


def _new_without_index(base: Any) -> Any:
    return object.__new__(_without_index(base))


def read_only_buffer(buffer: Any, sampler: Sampler, batch_size: int) -> Any:
    """A read-only buffer with the same storage, transforms, ``collate_fn`` and generator, but another sampler.

    Its samples have no entry ``"index"``, so they cannot update priorities. Draws hold the locks of ``buffer``.
    """
    made = _without_index(type(buffer))(
        storage=buffer._storage,
        writer=ImmutableDatasetWriter(),
        sampler=sampler,
        batch_size=batch_size,
        collate_fn=buffer._collate_fn,
        transform=buffer._transform,
        generator=buffer._rng,
    )
    made._origin = buffer
    return made


def sampler_generator(sampler: Sampler) -> torch.Generator | None:
    """The random generator of a sampler; None is the global one."""
    return sampler._rng


def set_sampler_generator(sampler: Sampler, generator: torch.Generator | None) -> None:
    """Set the random generator of a sampler; None is the global one."""
    sampler._rng = generator


def empty_sampler(sampler: Sampler) -> None:
    """Reset a sampler after its buffer was emptied."""
    sampler._empty()
