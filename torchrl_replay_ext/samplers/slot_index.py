"""Conversion between flat slots and TorchRL's indices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.compilation import raise_if
from torchrl_replay_ext.core.layout import Layout


def row_major(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert an index [n, ndim] into a storage of shape ``shape`` to flat slots [n], in row-major order."""
    slots = index[:, 0]
    for dim, length in enumerate(shape[1:], start=1):
        slots = slots * length + index[:, dim]
    return slots


def unravel(slots: Tensor, shape: tuple[int, ...]) -> Tensor | tuple[Tensor, ...]:
    """Convert flat ``slots`` [n] to TorchRL's index: [n], or a tuple of ndim tensors [n] if ndim > 1."""
    if len(shape) == 1:
        return slots
    index = []
    for length in reversed(shape[1:]):
        index.append(slots % length)
        slots = slots // length
    return (slots, *reversed(index))


def flat_slots(owner: str, index: int | Tensor | tuple, layout: Layout) -> Tensor:
    """Convert TorchRL's index to flat slots, int64 [n], on the device of the index.

    Args:
        owner: the class that error messages name.
        index: an int, a tensor [n] or [n, ndim], or a tuple of ndim tensors.
        layout: the layout of the storage.

    Raises:
        TypeError: if the index does not hold integers.
        ValueError: if the last dimension of the index is not ndim > 1.
        IndexError: if ndim > 1 and an index is out of range. For ndim = 1 the caller must check the range. In graphs
            and on accelerators, such a row becomes slot -1, unless ``layout.validate``.
    """
    shape = layout.shape
    if len(shape) == 1 and isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64:
        return index
    coordinates = torch.stack([torch.as_tensor(i) for i in index], -1) if isinstance(index, tuple) else index
    coordinates = torch.as_tensor(coordinates)
    if coordinates.dtype.is_floating_point or coordinates.dtype == torch.bool:
        raise TypeError(f"{owner}: index must hold integers, got {coordinates.dtype}.")
    coordinates = coordinates.to(torch.int64)
    if len(shape) == 1:
        return coordinates.reshape(-1)
    if coordinates.ndim < 1 or coordinates.shape[-1] != len(shape):
        raise ValueError(
            f"{owner}: index has shape {tuple(coordinates.shape)}; a storage of shape {shape} needs [n, {len(shape)}]."
        )
    coordinates = coordinates.reshape(-1, len(shape))
    outside = torch.stack([(i < 0) | (i >= n) for i, n in zip(coordinates.unbind(1), shape, strict=True)]).any(0)
    raise_if(
        outside.any, lambda: out_of_range(owner, coordinates[outside][0].tolist(), shape), skip_on=layout.skip_checks_on
    )
    return row_major(coordinates, shape).masked_fill(outside, -1)


def out_of_range(owner: str, index: int | list[int], shape: tuple[int, ...]) -> IndexError:
    """The error for an index outside of a storage of shape ``shape``."""
    return IndexError(f"{owner}: index {index} is out of range for a storage of shape {shape}.")


def layout_of(owner: str, storage: Storage, capacity: int | None, *, validate: bool) -> Layout | None:
    """The layout of a storage; None before the first write to the storage.

    Args:
        owner: the class that error messages name.
        storage: the storage.
        capacity: capacity of the sampler. None: that of the storage.
        validate: see :class:`~torchrl_replay_ext.core.layout.Layout`.

    Raises:
        ValueError: if the storage holds several transitions per slot, has more slots than ``capacity``, or has no size
            and there is no ``capacity``.
    """
    found = _torchrl.shape_and_device(storage)
    if found is None:
        return None
    shape, device = found
    data: Any = _torchrl.stored_data(storage)
    if is_tensor_collection(data) and data.ndim > len(shape):
        raise _several_transitions(owner, data.shape[len(shape) :], data.ndim)
    if not _torchrl.has_size(storage):
        kind = type(storage).__name__
        if capacity is None:
            raise ValueError(
                f"{owner}: the {kind} has no size. Pass a size to the storage, {kind}(1000), or to the sampler, "
                f"{owner}(capacity=1000)."
            )
        shape = (capacity,)
    num_slots = math.prod(shape)
    require_fitting_items(owner, storage, range(_torchrl.length(storage)), num_slots)
    # TorchRL rounds the size of a storage of ndim >= 2 up to a multiple of its columns
    if capacity is not None and -(-capacity // math.prod(shape[1:])) < shape[0]:
        raise ValueError(
            f"{owner}(capacity={capacity}): capacity must not be smaller than the storage, which has {num_slots} "
            "slots; omit capacity to use that of the storage."
        )
    return Layout(shape, device, _torchrl.is_compilable(storage), known=True, validate=validate)


def _several_transitions(owner: str, shape: tuple[int, ...], ndim: int) -> ValueError:
    return ValueError(
        f"{owner}: each slot of the storage holds entries of shape {tuple(shape)} instead of a single transition. Use "
        f"LazyTensorStorage(..., ndim={ndim}), or flatten the data before the write: "
        "rb.append_transform(lambda td: td.reshape(-1), invert=True)."
    )


def require_fitting_items(owner: str, storage: Storage | None, slots: Iterable[int], num_slots: int) -> None:
    """Check the items of a list storage, of which each can have another shape; other storages pass.

    Raises:
        ValueError: if one of ``slots`` holds several transitions, or is not one of the ``num_slots`` of the sampler.
    """
    items = _torchrl.stored_data(storage)
    if not isinstance(items, list):
        return
    for slot in slots:
        if slot >= num_slots and not _torchrl.has_size(storage):
            kind = type(storage).__name__
            raise ValueError(
                f"{owner}(capacity={num_slots}): the {kind} has no size and holds {len(items)} rows, more than the "
                f"sampler's capacity. Pass a size to the storage, {kind}({num_slots}), which then overwrites the "
                "oldest rows, or pass a larger capacity to the sampler."
            )
        if 0 <= slot < len(items) and is_tensor_collection(items[slot]) and items[slot].ndim:
            raise _several_transitions(owner, items[slot].shape, items[slot].ndim + 1)
