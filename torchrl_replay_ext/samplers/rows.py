"""Reads the layout of a storage, and entries, ends of episodes and ids of its newest rows, for samplers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import require_choice, require_nested_keys
from torchrl_replay_ext.compilation import Array, to_host
from torchrl_replay_ext.core.layout import Layout, require_capacity
from torchrl_replay_ext.core.streams import (
    DEFAULT_STREAMS,
    EpisodeMarks,
    Episodes,
    check_streams,
    require_ids,
)
from torchrl_replay_ext.kernels.ops import as_tensor, cast

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
    known = _torchrl.shape_and_device(storage)
    if known is None:
        return None
    shape, device = known
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


def stored_tensordict(owner: str, storage: Storage | None) -> Any:
    """The stored TensorDict. Raises TypeError if the storage holds other data."""
    data = _torchrl.stored_data(storage)
    if not is_tensor_collection(data):
        raise TypeError(
            f"{owner}: the storage must hold a TensorDict, not {type(data).__name__}; use LazyTensorStorage and write "
            "TensorDicts."
        )
    return data


@dataclass(eq=False)
class RowView:
    """The rows at ``slots`` [n] of a storage.

    Args:
        owner: class name of the sampler, for error messages.
        storage: the storage.
        slots: int64 [n].
        slots_as_index: the same slots as a slice or NumPy array where values can be read, see
            :func:`~torchrl_replay_ext.core.layout.as_index`.
        num_slots: number of slots of the storage.
        is_rewrite: True if the rows were stored before and changed in place (``rb.mark_update``). Only known if a part
            :attr:`~torchrl_replay_ext.core.slots.WriteObserver.needs_order`.
        slots_on_host: the slots on the CPU, if a part needs their order.
        known: on an accelerator, entries that were read ahead, see :func:`read_ahead`.
    """

    owner: str
    storage: Storage | None
    slots: Tensor
    slots_as_index: Array
    num_slots: int
    is_rewrite: bool
    slots_on_host: Tensor
    known: dict[NestedKey, Array] | None = None

    def columns(self, keys: Sequence[NestedKey]) -> list[Array | None]:
        """One number per row of each entry, [n], as loops on the CPU take them; None for entries that are missing."""
        stored = _torchrl.entries_of(stored_tensordict(self.owner, self.storage), keys)
        # in NumPy it takes a third of the time
        in_numpy, columns = not isinstance(self.slots_as_index, Tensor), []
        known = self.known
        if known is not None and not known.keys() >= {*keys}:
            _, known = read_ahead(self.storage, self.slots, keys)
        for key, column in zip(keys, stored, strict=True):
            if column is None:
                columns.append(None)
            elif column.numel() != self.num_slots:
                shape = tuple(column.shape)
                raise ValueError(
                    f"{self.owner}: the entry {key!r} has shape {shape}; one number per transition is needed."
                )
            elif known is not None:
                columns.append(known[key])
            else:
                # NumPy has no bfloat16
                flat = column.numpy() if in_numpy and column.dtype != torch.bfloat16 else column
                rows = flat.reshape(-1)[self.slots_as_index if in_numpy else self.slots]
                columns.append(rows.float().numpy() if in_numpy and isinstance(rows, Tensor) else rows)
        return columns

    def missing(self, key: NestedKey, why: str) -> KeyError:
        """The error for an entry that is not stored; ``why`` says who should have written it."""
        return KeyError(f"{self.owner}: the stored data has no entry {key!r}, {why}")

    def require(self, key: NestedKey, why: str) -> Any:
        """The stored entry ``key``. Raises KeyError if it is missing."""
        column = stored_tensordict(self.owner, self.storage).get(key, None)
        if column is None:
            raise self.missing(key, why)
        return column

    def entry(self, key: NestedKey, why: str = "which the sampler reads.") -> Tensor:
        """An entry with any number of values per row, [n, d].

        Args:
            key: its name.
            why: the end of the error message, who should have written it. Default: "which the sampler reads."

        Raises:
            KeyError: if it is missing.
        """
        storage: Any = self.storage
        if _torchrl.is_stacked(storage, key):
            return storage.take(self.slots, [key]).get(key).flatten(1)
        return self.require(key, why).reshape(self.num_slots, -1)[self.slots]


def read_ahead(
    storage: Any, slots: Tensor | slice, keys: Sequence[NestedKey], *numbers: Tensor | int
) -> tuple[list[Any], dict[NestedKey, Array]]:
    """Read all that the host needs of a write to an accelerator; it waits at most once.

    Args:
        storage: the storage.
        slots: a slice, or int64 [n] on the accelerator; perhaps out of range.
        keys: entries with one number per row.
        *numbers: tensors, and numbers that need not be read.

    Returns:
        ``numbers`` on the CPU, and the entries as arrays [n]; None for those that are missing.
    """
    data, rows = _torchrl.stored_data(storage), []
    stored = _torchrl.entries_of(data, keys) if is_tensor_collection(data) else [None] * len(keys)
    for column in stored:
        if column is not None:
            column = column.reshape(-1)
            if isinstance(slots, slice):
                column = column[slots]
            else:
                column = column.index_select(0, slots.clamp(0, column.shape[0] - 1))
            # NumPy has no bfloat16
            column = column.float() if column.dtype == torch.bfloat16 else column
        rows.append(column)
    on_host = to_host(*numbers, *rows)
    columns = [each if each is None else each.numpy() for each in on_host[len(numbers) :]]
    return on_host[: len(numbers)], dict(zip(keys, columns, strict=True))


Truncated = Literal["finished", "ongoing"]


@dataclass(eq=False)
class EpisodeReader:
    """Reads the ends of episodes, the trajectory ids and the first transitions of episodes.

    Args:
        owner: class name of the sampler, for error messages.
        episodes, truncated, terminated_key: see :class:`~torchrl_replay_ext.ReaPERSampler`.

    Raises:
        TypeError, ValueError: if an argument is invalid.
    """

    owner: str
    episodes: Episodes
    _: KW_ONLY
    truncated: Truncated = "finished"
    terminated_key: NestedKey = ("next", "terminated")

    def __post_init__(self):
        require_choice(self.owner, "truncated", self.truncated, get_args(Truncated))
        require_nested_keys(self.owner, terminated_key=self.terminated_key)
        keys = self.episodes
        self._done_key, self._traj_key, self._init_key = keys.done_key, keys.traj_key, keys.init_key
        # the number of streams in flat storage; without a fixed one, the first write or a loaded state decides
        self.is_fixed, self.num_streams = keys.num_streams is not None, keys.num_streams or 1

    def count_streams(self, storage: Storage) -> bool:
        """Decide the number of streams by whether the storage has trajectory ids; True if it has changed."""
        data: Any = _torchrl.stored_data(storage)
        # the columns of a storage with ndim >= 2 are the streams
        if self.is_fixed or self._traj_key is None or not is_tensor_collection(data) or storage.ndim > 1:
            return False
        (ids,) = _torchrl.entries_of(data, [self._traj_key])
        before, self.num_streams = self.num_streams, 1 if ids is None else DEFAULT_STREAMS
        return self.num_streams != before

    def adopt_streams(self, lanes: Any) -> bool:
        """Decide the number of streams by the saved ``lanes`` [4, n]; True if it has changed."""
        is_saved = isinstance(lanes, Tensor) and lanes.ndim == 2 and len(lanes) == 4
        if self.is_fixed or not is_saved or self.num_streams == lanes.shape[1]:
            return False
        self.num_streams = lanes.shape[1]
        return True

    @property
    def keys(self) -> list[NestedKey]:
        """The entries that are read."""
        keys = [self._done_key, self._init_key]
        if self._traj_key is not None:
            keys.append(self._traj_key)
        return keys if self.truncated == "finished" else [*keys, self.terminated_key]

    def read(self, rows: RowView, *, needs_ids: bool) -> EpisodeMarks:
        """Read the entries of ``rows``.

        Raises:
            KeyError: if the end of episodes is not stored, or trajectory ids are not stored although ``needs_ids`` or
                their entry was named.
            TypeError: if trajectory ids are not integers.
        """
        keys = [self._done_key, self._init_key]
        ended, initial, *ids = rows.columns(keys if self._traj_key is None else [*keys, self._traj_key])
        trajectory = ids[0] if ids else None
        if ended is None:
            why = "which the environment writes; pass its name: episodes=Episodes(done_key=...)."
            raise rows.missing(self._done_key, why)
        if trajectory is not None:
            require_ids(self.owner, self._traj_key, as_tensor(trajectory))
        elif needs_ids or self.episodes.requires_ids:
            why = (
                "which collectors write to identify trajectories; pass its name: episodes=Episodes(traj_key=...), or "
                "episodes=Episodes(num_streams=1)."
            )
            raise rows.missing(self._traj_key or "", why)
        check_streams(rows.storage, rows.slots, self._done_key, self._traj_key)
        return EpisodeMarks(
            cast(ended, torch.bool),
            None if trajectory is None else cast(trajectory, torch.int64),
            None if initial is None else cast(initial, torch.bool),
        )

    def finished(self, rows: RowView, ended: Array) -> Array:
        """Where reliability treats an episode as finished, of those that ``ended`` [n], bool [n].

        Raises:
            KeyError: if truncated episodes are ongoing, and termination is not stored.
        """
        if self.truncated == "finished":
            return ended
        (terminated,) = rows.columns([self.terminated_key])
        if terminated is None:
            why = "which truncated='ongoing' needs. The environment should write it; pass its name as terminated_key=."
            raise rows.missing(self.terminated_key, why)
        return cast(terminated, torch.bool)
