"""The only file that reads private attributes of TorchRL's storages and buffers."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import RoundRobinWriter, Sampler, Sequence, Storage


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
