"""Access of distributions to the rows that were just written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import OnLoad, require_choice, require_integer, require_nested_keys
from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.core.mixed_streams import check_streams
from torchrl_replay_ext.kernels.ops import cast


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
            :func:`~torchrl_replay_ext.indices.as_index`.
        num_slots: number of slots of the storage.
        is_rewrite: True if the rows were stored before and changed in place (``rb.mark_update``). Only known if a part
            :attr:`~torchrl_replay_ext.samplers.base.WriteObserver.needs_order`.
    """

    owner: str
    storage: Storage | None
    slots: Tensor
    slots_as_index: Array
    num_slots: int
    is_rewrite: bool

    def columns(self, keys: Sequence[NestedKey]) -> list[Array | None]:
        """One number per row of each entry, [n], as kernels take them; None for entries that are missing."""
        found = _torchrl.entries_of(stored_tensordict(self.owner, self.storage), keys)
        # in NumPy it takes a third of the time
        in_numpy, columns = not isinstance(self.slots_as_index, Tensor), []
        for key, column in zip(keys, found, strict=True):
            if column is None:
                columns.append(None)
            elif column.numel() != self.num_slots:
                shape = tuple(column.shape)
                raise ValueError(
                    f"{self.owner}: the entry {key!r} has shape {shape}; one number per transition is needed."
                )
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

    def entry(self, key: NestedKey, why: str) -> Tensor:
        """An entry with any number of values per row, [n, d]. Raises KeyError if it is missing."""
        storage: Any = self.storage
        if _torchrl.is_stacked(storage, key):
            return storage.take(self.slots, [key]).get(key).flatten(1)
        return self.require(key, why).reshape(self.num_slots, -1)[self.slots]


Truncated = Literal["finished", "ongoing"]


@dataclass(eq=False)
class EpisodeReader:
    """Reads the ends of episodes, the trajectory ids and the first transitions of episodes.

    Args:
        owner: class name of the sampler, for error messages.
        num_streams, truncated, done_key, terminated_key, traj_key, init_key, on_load: see
            :class:`~torchrl_replay_ext.ReaPERSampler`.

    Raises:
        TypeError, ValueError: if an argument is invalid.
    """

    owner: str
    _: KW_ONLY
    num_streams: int
    done_key: NestedKey
    traj_key: NestedKey
    init_key: NestedKey
    on_load: OnLoad
    truncated: Truncated = "finished"
    terminated_key: NestedKey = ("next", "terminated")

    def __post_init__(self):
        require_integer(self.owner, "num_streams", self.num_streams)
        require_choice(self.owner, "truncated", self.truncated, get_args(Truncated))
        require_choice(self.owner, "on_load", self.on_load, get_args(OnLoad))
        for name in ("done_key", "traj_key", "init_key", "terminated_key"):
            require_nested_keys(self.owner, **{name: getattr(self, name)})

    def read(self, rows: RowView, *, needs_ids: bool) -> EpisodeMarks:
        """Read the entries of ``rows``.

        Raises:
            KeyError: if the end of episodes is not stored, or trajectory ids are not stored although ``needs_ids``.
        """
        ended, trajectory, initial = rows.columns((self.done_key, self.traj_key, self.init_key))
        if ended is None:
            raise rows.missing(self.done_key, "which the environment writes; pass its name as done_key=.")
        if trajectory is None and needs_ids:
            why = "which collectors write to identify trajectories; pass its name as traj_key=, or use num_streams=1."
            raise rows.missing(self.traj_key, why)
        check_streams(rows.storage, rows.slots, self.done_key, self.traj_key)
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
