"""A storage for frame stacks that stores each frame once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from torchrl_replay_ext.arguments import is_key, key_path, require_integer, require_nested_keys
from torchrl_replay_ext.compilation import is_traced, outside_inference_mode, to_device
from torchrl_replay_ext.core.frame_pool import FramePool
from torchrl_replay_ext.core.layout import is_last_occurrence
from torchrl_replay_ext.core.streams import Episodes, check_streams, require_episodes
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage, positions

_OWNER = "FrameStackStorage"


class FrameStackStorage(CompilableTensorStorage):
    """A :class:`CompilableTensorStorage` for stacked frames that stores each frame once.

    Write and read transitions as with any other storage, with whole stacks at ``frame_key`` and ``("next",
    frame_key)``, [n, k, ...], the newest frame last. Gymnasium's ``FrameStackObservation`` and TorchRL's ``CatFrames``
    (of frames with one channel) produce such stacks. The storage holds k + 1 frame ids per transition, and L + 1 frames
    for an episode of L steps. A million transitions of four 84 x 84 bytes take 8 GB instead of 56. Reads return exactly
    the bytes that were written: for any layout of environments, at the beginning and the end of episodes, and after the
    ring has overwritten earlier steps. A frame is kept as long as a stored transition needs it.

    The two stacks of a sample are views of the same k + 1 frames: do not change them in place.

    Args:
        max_size: capacity, the number of transitions.
        frame_capacity: the number of frames, at least ``max_size``. None (default): 9/8 of ``max_size``, and more for
            small storages (5 times ``max_size`` up to 1024 transitions), which is enough for episodes of 8 steps on
            average. Memory for a frame is allocated when the frame is first needed.
        frame_key: entry with the observations. Default: ``"observation"``.
        episodes: trajectory ids are used, if present, to find frames that are already stored; without ids, each row is
            compared with the previous row. The last transitions of ``num_streams`` trajectories are remembered, 64 if
            it is None. Default: None, as :class:`~torchrl_replay_ext.Episodes` says.
        device: device of the data. ``"auto"``: the device of the first data. Default: ``"cpu"``.

    Raises:
        KeyError: at a write, if stacks are missing.
        ValueError: at a write, if the stacks of a transition are not one step apart, or their shape or dtype differs
            from the stored stacks.
        RuntimeError: at a write, if there is no space for new frames. In a graph such frames are replaced by zeros and
            counted in ``lost_frames``; stacks that are not one step apart are counted in ``mismatched``.

    Examples:
        >>> from torchrl.data import TensorDictReplayBuffer
        >>> frames = torch.arange(1, 8, dtype=torch.uint8).view(7, 1, 1).expand(7, 2, 2)
        >>> stacks = frames.unfold(0, 3, 1).movedim(-1, 1)  # [5, 3, 2, 2]
        >>> rb = TensorDictReplayBuffer(storage=FrameStackStorage(100), batch_size=8)
        >>> index = rb.extend(TensorDict({"observation": stacks[:-1], "next": {"observation": stacks[1:]}}, [4]))
        >>> rb[1]["observation"][:, 0, 0], rb[1]["next", "observation"][:, 0, 0], rb.storage.num_frames
        (tensor([2, 3, 4], dtype=torch.uint8), tensor([3, 4, 5], dtype=torch.uint8), 7)
        >>> rb.sample()["observation"].shape
        torch.Size([8, 3, 2, 2])
    """

    def __init__(
        self,
        max_size: int,
        *,
        frame_capacity: int | None = None,
        frame_key: NestedKey = "observation",
        episodes: Episodes | None = None,
        device: torch.device | str = "cpu",
    ):
        max_size = require_integer(_OWNER, "max_size", max_size)
        require_nested_keys(_OWNER, frame_key=frame_key)
        episodes = require_episodes(_OWNER, episodes)
        if frame_capacity is None:
            frame_capacity = max_size + max(max_size // 8, min(4 * max_size, 4096))
        self._frame_capacity = require_integer(_OWNER, "frame_capacity", frame_capacity, least=max_size)
        self._num_streams = episodes.num_streams or 64
        self._frame_keys = key_path(frame_key), ("next", *key_path(frame_key))
        self._traj_key, self._done_key = episodes.traj_key, episodes.done_key
        self._pool: FramePool | None = None
        super().__init__(max_size, device=device)

    def is_stacked(self, key: NestedKey) -> bool:
        """True if the entry ``key`` is a frame stack. Frame stacks are not stored as columns."""
        return key_path(key) in self._frame_keys

    @property
    def num_frames(self) -> int:
        """Number of frames that the stored transitions need."""
        return 0 if self._pool is None else self._pool.num_used

    @property
    def lost_frames(self) -> int:
        """Number of frames that a graph could not store; reads return zeros for these frames."""
        return 0 if self._pool is None else int(self._pool.counts[0])

    @property
    def mismatched(self) -> int:
        """Number of transitions written by a graph with stacks not one step apart; their next observation is wrong."""
        return 0 if self._pool is None else int(self._pool.counts[1])

    def _stacks(self, data: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The stacks [n, k, ...] of rows."""
        for key in self._frame_keys:
            if data.get(key, None) is None:
                raise KeyError(
                    f"{_OWNER}: the data has no entry {key!r} with stacked frames. The environment writes this entry; "
                    "pass its name as frame_key=. Every write must contain all entries of the transitions."
                )
        before, after = (data.get(key) for key in self._frame_keys)
        pool = self._pool if self.initialized else None
        expected: Any = (tuple(before.shape), before.dtype)
        if pool is not None:
            expected = ((len(before), pool.num_stacked, *pool.shape), pool.dtype)
        found = [(tuple(stacks.shape), stacks.dtype) for stacks in (before, after)]
        if before.ndim < 3 or found != [expected] * 2:
            raise ValueError(
                f"{_OWNER}: the entries {self._frame_keys} are {found}; both must be stacks of frames [transitions, "
                f"frames, ...], of the shape and dtype {expected}."
            )
        if pool is None:
            self._make_pool(before.shape[1], before.flatten(0, 1))
        return before, after

    @outside_inference_mode()
    def _make_pool(self, num_stacked: int, frames: Tensor) -> None:
        """Make the pool for frames like ``frames`` [n, ...]."""
        if self.device == "auto":
            self.device = frames.device
        kind: dict[str, Any] = {"num_stacked": num_stacked, "shape": tuple(frames.shape[1:]), "dtype": frames.dtype}
        kind |= {"num_streams": self._num_streams, "device": self.device}
        self._pool = FramePool(self.max_size, self._frame_capacity, **kind)

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``."""
        if isinstance(data, list):
            data = torch.stack(data)
        if not is_tensor_collection(data):
            raise TypeError(f"{_OWNER}: the data must be a TensorDict, not {type(data).__name__}.")
        slots = cursor
        if is_traced():
            self._require_columns()
        else:
            cursor, slots, data = self._distinct(cursor, data)
        before, after = self._stacks(data)
        pool, trajectory = self._pool, None if self._traj_key is None else data.get(self._traj_key, None)
        assert pool is not None
        if trajectory is not None:
            trajectory = trajectory.reshape(-1).to(pool.device, torch.int64)
        pool.write(slots.to(pool.device), before.to(pool.device), after.to(pool.device), trajectory)
        super().set(cursor, data.exclude(*self._frame_keys), set_cursor=set_cursor)
        # otherwise the rows cannot be read yet
        if set_cursor:
            check_streams(self, slots, self._done_key, self._traj_key)

    def _distinct(self, cursor: Any, data: Any) -> tuple[Any, Tensor, Any]:
        """Cursor, slots [n] and data [n] of a write; of rows with the same slot only the last one."""
        slots = positions(cursor, self.max_size)
        if slots.ndim == 0:
            slots, data = slots.reshape(1), data.unsqueeze(0)
        if data.ndim != 1 or len(data) != len(slots):
            raise ValueError(
                f"{_OWNER}: data of shape {tuple(data.shape)} does not fit {len(slots)} slots of a storage of one "
                "dimension. Flatten it: rb.append_transform(lambda td: td.reshape(-1), invert=True)."
            )
        if isinstance(cursor, slice):
            return cursor, slots, data
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.max_size:
            raise IndexError(f"{_OWNER}: the slots {cursor} are not all in a storage of {self.max_size} slots.")
        last = is_last_occurrence(slots)
        if not bool(last.all()):
            slots, data = slots[last], data[last.to(data.device or last.device)]
        return slots, slots, data

    def _with_frames(self, rows: TensorDictBase, slots: Tensor) -> TensorDictBase:
        """Add the stacks of ``slots`` to ``rows``."""
        pool = self._pool
        assert pool is not None
        frames = pool.read(slots.to(pool.device))
        for first, key in enumerate(self._frame_keys):
            rows.set(key, frames.narrow(slots.ndim, first, pool.num_stacked))
        return rows

    def get(self, index: Any) -> Any:
        """The transitions at ``index``. If ``index`` is a key, this entry of all transitions.

        The result is a new TensorDict: entries that you add to it are not stored.
        """
        if is_key(index):
            column = None if self.is_stacked(index) else super().get(index)
            # a nested TensorDict may contain stacks, which are not columns of the storage
            return column if isinstance(column, Tensor) else self.get(slice(None))[index]
        rows = super().get(index)
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.ndim:
            slots = to_device(index, self.counters_device)
            return self._with_frames(rows, slots + self._len_value * (slots < 0))
        # a slice of a full storage is the stored TensorDict itself, which must not get the stacks
        return self._with_frames(rows.copy(), torch.arange(len(self), device="cpu")[index])

    def __repr__(self) -> str:
        data: Any = "<empty>"
        if self.initialized and self._pool is not None:
            data = super().get(slice(None)).copy()
            for key in self._frame_keys:
                # of the right shape: building the stacks of a large buffer takes gigabytes
                data.set(key, self._pool.frames[0].expand(len(self), self._pool.num_stacked, *self._pool.shape))
        sizes = f"len={len(self)}, max_size={self.max_size}, num_frames={self.num_frames}"
        return f"{type(self).__name__}({sizes},\n" + indent(f"data={data})", " " * 4)

    def take(self, index: Tensor, keys: Sequence[NestedKey] | None = None) -> TensorDictBase:
        """Like :meth:`get`, for an index [n] within bounds; ``keys``: only these entries."""
        if keys is None:
            return self._with_frames(super().take(index), index)
        columns = [key for key in keys if not self.is_stacked(key)]
        rows = super().take(index, columns)
        return rows if len(columns) == len(keys) else self._with_frames(rows, index).select(*keys)

    def _empty(self) -> None:
        super()._empty()
        if self._pool is not None:
            self._pool.clear_()

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """The stored data. Places of the frame pool after the last one in use are left out."""
        return {**super().state_dict(), "frames": {key: tensor.clone() for key, tensor in self._frames().items()}}

    def _frames(self) -> dict[str, Tensor]:
        return {} if self._pool is None else self._pool.tensors()

    def _restore(self, frames: dict[str, Tensor]) -> None:
        if frames and self._pool is None:
            self._make_pool(frames["ids"].shape[1] - 1, frames["frames"])
        if self._pool is not None:
            self._pool.restore_(frames) if frames else self._pool.clear_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``; RuntimeError, before any change, if its rows have no frames."""
        frames = state_dict.get("frames", {})
        if state_dict.get("_len", 0) and not frames:
            raise RuntimeError(f"{_OWNER}: the loaded state has no frames; load a state saved by a FrameStackStorage.")
        self.require_loadable(state_dict)
        self._restore(frames)
        super().load_state_dict(state_dict)

    def dumps(self, path: Any) -> None:
        """Save everything under the directory ``path``, as memory-mapped tensors."""
        super().dumps(path)
        TensorDict(self._frames()).memmap(str(Path(path) / "frames"), copy_existing=True)

    def loads(self, path: Any) -> None:
        """Load a state saved by ``dumps``."""
        self.require_loadable(self.saved_at(path))
        state = TensorDict.load_memmap(str(Path(path) / "frames"))
        self._restore({str(key): value for key, value in state.items()})
        super().loads(path)
