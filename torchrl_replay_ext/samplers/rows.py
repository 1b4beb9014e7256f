"""Reads entries, ends of episodes and trajectory ids of the rows that were just written, for samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import require_choice, require_nested_keys
from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.core.mixed_streams import check_streams
from torchrl_replay_ext.core.streams import Episodes, require_episodes
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
            :attr:`~torchrl_replay_ext.core.write_observer.WriteObserver.needs_order`.
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


Truncated = Literal["finished", "ongoing"]
# the fewest and the most streams in flat storage with trajectory ids, if their number was not passed
_FEWEST, _MOST = 16, 64


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
    episodes: Episodes | None
    _: KW_ONLY
    truncated: Truncated = "finished"
    terminated_key: NestedKey = ("next", "terminated")

    def __post_init__(self):
        require_choice(self.owner, "truncated", self.truncated, get_args(Truncated))
        require_nested_keys(self.owner, terminated_key=self.terminated_key)
        keys = require_episodes(self.owner, self.episodes)
        self._done_key, self._traj_key, self._init_key = keys.done_key, keys.traj_key, keys.init_key
        # the number of streams in flat storage; decided at the first write, or by a loaded state, if it is not fixed
        self.is_fixed, self.num_streams = keys.num_streams is not None, keys.num_streams or 1

    def count_streams(self, storage: Storage) -> bool:
        """Decide the number of streams from the entries of the storage; True if it has changed."""
        data = _torchrl.stored_data(storage)
        if self.is_fixed or self._traj_key is None or not is_tensor_collection(data):
            return False
        before, self.num_streams = self.num_streams, 1
        ids, done = _torchrl.entries_of(data, [self._traj_key, self._done_key])
        if ids is not None:
            # as many as there are unfinished trajectories in the first rows
            ids = ids.reshape(-1)[: _torchrl.length(storage)]
            ended = ids[:0] if done is None else ids[done.reshape(-1)[: len(ids)] != 0]
            self.num_streams = min(max(len(ids.unique()) - len(ended.unique()), _FEWEST), _MOST)
        return self.num_streams != before

    def adopt_streams(self, lanes: Any) -> bool:
        """Decide the number of streams by the saved ``lanes`` [4, n]; True if it has changed."""
        is_saved = isinstance(lanes, Tensor) and lanes.ndim == 2 and len(lanes) == 4
        if self.is_fixed or not is_saved or self.num_streams == lanes.shape[1]:
            return False
        self.num_streams = lanes.shape[1]
        return True

    def read(self, rows: RowView, *, needs_ids: bool) -> EpisodeMarks:
        """Read the entries of ``rows``.

        Raises:
            KeyError: if the end of episodes is not stored, or trajectory ids are not stored although ``needs_ids``.
        """
        keys = [self._done_key, self._init_key]
        ended, initial, *ids = rows.columns(keys if self._traj_key is None else [*keys, self._traj_key])
        trajectory = ids[0] if ids else None
        if ended is None:
            why = "which the environment writes; pass its name: episodes=Episodes(done_key=...)."
            raise rows.missing(self._done_key, why)
        if trajectory is None and needs_ids:
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
