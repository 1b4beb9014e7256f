"""The only file that reads private attributes of TorchRL's and tensordict's objects.

Two uses of private names cannot move here, because they are made through ``self``: hooks of a TorchRL base class that a
subclass overrides, and attributes that a subclass inherits. ``tests/test_torchrl.py`` lists all of them, with those
that are read here, and fails if a release of TorchRL drops one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import ImmutableDatasetWriter, RoundRobinWriter, Sampler, Sequence, Storage


def length(storage: Storage) -> int:
    """The number of stored transitions."""
    return len(storage)  # pyright: ignore[reportArgumentType]: the abstract class declares no __len__


def stored_data(storage: Storage | None) -> Any:
    """What the storage holds: a TensorDict, a list, or another tree of tensors; None before the first write."""
    return getattr(storage, "_storage", None)


def stored_columns(storage: Storage) -> list[Any]:
    """The tensors of a tensor storage that was written to."""
    data = stored_data(storage)
    return list(data.values(True, True)) if is_tensor_collection(data) else tree_leaves(data)


def shape_and_device(storage: Any) -> tuple[tuple[int, ...], torch.device] | None:
    """Shape of the storage's slots and device of its data; None before the first write.

    TorchRL rounds the size of a storage of ndim >= 2 up to a multiple of its columns.
    """
    data = stored_data(storage)
    if data is None:
        return None
    if isinstance(data, list):
        return (storage.max_size,), torch.device("cpu")
    shape = tuple(storage._total_shape)[: storage.ndim]
    device = next((c.device for c in stored_columns(storage) if isinstance(c, Tensor)), torch.device("cpu"))
    return shape, device


def last_step(storage: Storage | None) -> int | None:
    """The step of the ring that was written last; None if the storage does not know it."""
    last = getattr(storage, "_last_cursor_index", None)
    return None if last is None else int(last)


def is_compilable(storage: Storage) -> bool:
    """Whether graphs may read from this storage and write to it."""
    return bool(getattr(storage, "_compilable", False))


def rows_of_ring(storage: Any, data: Any) -> int:
    """The number of steps that the ring holds; ``data``, a batch of steps, tells it before the first write."""
    return storage._max_size_along_dim0(batched_data=data)


def attached_buffers(storage: Any) -> list[Any]:
    """The buffers that read from this storage or write to it."""
    # the list itself: torch.compile does not trace the property that returns it
    return storage._attached_entities_list


def exclusive(storage: Any) -> ExitStack:
    """Holds the locks under which the buffers of this storage write, draw and update, also in other threads."""
    locks = ExitStack()
    for buffer in attached_buffers(storage) if isinstance(storage, Storage) else ():
        locks.enter_context(getattr(buffer, "_replay_lock", None) or ExitStack())
    return locks


def map_tensors(data: TensorDictBase, function: Callable[[Tensor], Tensor], batch_size: torch.Size) -> Any:
    """``function`` of each tensor: ``apply`` without its checks, which take longer than reading a few rows."""
    return data._fast_apply(function, batch_size=batch_size)


def ray_actor(client: Any) -> Any:
    """Ray's handle of the actor in which a remote buffer lives, from the buffer's ``client()``."""
    return client._actor


def has_round_robin_writer(storage: Any) -> bool:
    """Whether a single buffer writes to this storage, slot after slot."""
    buffers = storage._attached_entities
    return len(buffers) == 1 and isinstance(getattr(buffers[0], "_writer", None), RoundRobinWriter)


def draws_sequences(sampler: Sampler, storage: Any) -> bool:
    """Whether a buffer expands this sampler's draws to windows (TorchRL's ``sample_unit=Sequence(...)``)."""
    for buffer in storage._attached_entities:
        own = getattr(buffer, "_sampler", None)
        if sampler in (own, getattr(own, "critic_sampler", None)):
            return isinstance(getattr(buffer, "_sample_unit", None), Sequence)
    return False


def with_sampler(buffer: Any, sampler: Any) -> Any:
    """The same buffer, locks and transforms included, except that ``sampler`` draws, without prefetching."""
    view = object.__new__(type(buffer))
    vars(view).update(vars(buffer))
    view._sampler, view._prefetch, view._batch_size = sampler, False, None
    return view


def is_in_this_process(buffer: Any) -> bool:
    """Whether this is a buffer, and not the handle of one in another process."""
    return getattr(buffer, "_sampler", None) is not None


def transform_of(buffer: Any) -> Any:
    """The transforms of a buffer."""
    return buffer._transform


def default_batch_size(buffer: Any) -> int | None:
    """The batch size that was passed to a buffer, if any."""
    return buffer._batch_size


def read_only_buffer(buffer: Any, sampler: Sampler, batch_size: int) -> Any:
    """A buffer over the same storage, with the same transforms and ``collate_fn``, that cannot be written to."""
    return type(buffer)(
        storage=buffer._storage,
        writer=ImmutableDatasetWriter(),
        sampler=sampler,
        batch_size=batch_size,
        collate_fn=buffer._collate_fn,
        transform=buffer._transform,
        generator=buffer._rng,
    )


def sampler_generator(sampler: Sampler) -> torch.Generator | None:
    """The generator that a sampler draws from; None: the global one."""
    return sampler._rng


def set_sampler_generator(sampler: Sampler, generator: torch.Generator | None) -> None:
    """Let a sampler draw from ``generator``."""
    sampler._rng = generator


def empty_sampler(sampler: Sampler) -> None:
    """Let a sampler forget everything, because its buffer was emptied."""
    sampler._empty()
