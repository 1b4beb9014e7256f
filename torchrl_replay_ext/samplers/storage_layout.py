"""Finds the layout of a storage, and refuses storages that a sampler cannot use."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from tensordict import is_tensor_collection
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.core.layout import Layout, require_capacity

# devices of torch for which the kernels are not compiled; ROCm calls its devices "cuda"
_WITHOUT_KERNELS = ("mps", "xpu")


def layout_of(owner: str, storage: Storage, capacity: int | None) -> Layout | None:
    """The layout of a storage; None before the first write to the storage.

    Args:
        owner: the class that error messages name.
        storage: the storage.
        capacity: capacity of the sampler. None: that of the storage.

    Raises:
        ValueError: if the storage is on a device without kernels, holds several transitions per slot, has more slots
            than ``capacity``, or has no size and there is no ``capacity``.
    """
    found = _torchrl.shape_and_device(storage)
    if found is None:
        return None
    shape, device = found
    if device.type in _WITHOUT_KERNELS:
        raise ValueError(
            f"{owner}: the storage is on {device}, which has no kernels for samplers. Keep the storage on the CPU, "
            f"LazyTensorStorage(..., device='cpu'), and move the batches: rb.append_transform(lambda td: "
            f"td.to({device.type!r}))."
        )
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
    elif getattr(storage, "max_size", None) is not None:
        # TorchRL's storages take over the rows of a state that was saved with another capacity
        require_capacity(owner, shape, storage.max_size)
    num_slots = math.prod(shape)
    require_fitting_items(owner, storage, range(_torchrl.length(storage)), num_slots)
    # TorchRL rounds the size of a storage of ndim >= 2 up to a multiple of its columns
    if capacity is not None and -(-capacity // math.prod(shape[1:])) < shape[0]:
        raise ValueError(
            f"{owner}(capacity={capacity}): capacity must not be smaller than the storage, which has {num_slots} "
            "slots; omit capacity to use that of the storage."
        )
    return Layout(shape, device, _torchrl.is_compilable(storage), known=True)


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
