"""A storage for frame stacks that stores each frame once."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from torchrl_replay_ext.arguments import is_key, key_path, require_integer, require_nested_keys
from torchrl_replay_ext.compilation import is_traced, to_device
from torchrl_replay_ext.core.frame_pool import FramePool, require_one_step
from torchrl_replay_ext.indices import is_last_occurrence
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage

_OWNER = "FrameStackStorage"
# The number of rows that are compared at once outside graphs.
_ROWS = 1024


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
        traj_key: entry with trajectory ids, int64; used if present to find frames that are already stored. Without
            ids, each row is compared with the previous row. Default: ``("collector", "traj_ids")``.
        num_streams: number of trajectories whose last transition is remembered; at least the number of environments.
            Default: 64.
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
        traj_key: NestedKey = ("collector", "traj_ids"),
        num_streams: int = 64,
        device: torch.device | str = "cpu",
    ):
        require_integer(_OWNER, "max_size", max_size)
        require_nested_keys(_OWNER, frame_key=frame_key, traj_key=traj_key)
        if frame_capacity is None:
            frame_capacity = max_size + max(max_size // 8, min(4 * max_size, 4096))
        for name, value, least in (("frame_capacity", frame_capacity, max_size), ("num_streams", num_streams, 1)):
            require_integer(_OWNER, name, value, least=least)
        self._frame_capacity, self._num_streams = frame_capacity, num_streams
        path = key_path(frame_key)
        self._frame_key, self._next_key, self._traj_key = path, ("next", *path), traj_key
        self._pool: FramePool | None = None
        super().__init__(max_size, device=device)

    @property
    def _frame_keys(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self._frame_key, self._next_key

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
        return 0 if self._pool is None else int(self._pool.lost)

    @property
    def mismatched(self) -> int:
        """Number of transitions written by a graph with stacks not one step apart; their next observation is wrong."""
        return 0 if self._pool is None else int(self._pool.mismatched)

    def _stacks(self, data: TensorDictBase) -> tuple[Tensor, Tensor]:
        stacks = []
        for key in self._frame_keys:
            stack = data.get(key, None)
            if stack is None:
                raise KeyError(
                    f"{_OWNER}: the data has no entry {key!r} with stacked frames. The environment writes this entry; "
                    "pass its name as frame_key=. Every write must contain all entries of the transitions."
                )
            stacks.append(stack)
        before, after = stacks
        if before.ndim < 3 or before.shape != after.shape or before.dtype != after.dtype:
            raise ValueError(
                f"{_OWNER}: the entries {self._frame_key!r} and {self._next_key!r} have shapes {tuple(before.shape)} "
                f"({before.dtype}) and {tuple(after.shape)} ({after.dtype}); both must be stacks of frames "
                "[transitions, frames, ...]."
            )
        pool = self._pool
        if pool is not None:
            expected, dtype = (pool.num_stacked, *pool.frames.shape[1:]), pool.frames.dtype
            if tuple(before.shape[1:]) != expected or before.dtype != dtype:
                raise ValueError(
                    f"{_OWNER}: the entry {self._frame_key!r} has shape {tuple(before.shape)} ({before.dtype}); the "
                    f"stored stacks require {(len(before), *expected)} ({dtype})."
                )
        return before, after

    def _make_pool(self, num_stacked: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._pool = FramePool(
            self.max_size,
            self._frame_capacity,
            num_stacked=num_stacked,
            shape=shape,
            dtype=dtype,
            num_streams=self._num_streams,
            device=device,
        )

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``."""
        if isinstance(data, list):
            data = torch.stack(data)
        if not is_tensor_collection(data):
            raise TypeError(f"{_OWNER}: the data must be a TensorDict, not {type(data).__name__}.")
        if is_traced():
            self._require_columns()
            self._write(cursor, data, set_cursor=set_cursor)
            return
        cursor, data = self._rows(cursor, data)
        before, after = self._stacks(data)
        parts = [slice(first, first + _ROWS) for first in range(0, len(data), _ROWS)]
        # all rows before the first is written
        for part in parts:
            try:
                require_one_step(before[part], after[part], first_row=part.start)
            except ValueError as error:
                raise ValueError(f"{_OWNER}: {error}") from error
        for part in parts:
            self._write(cursor[part], data[part], set_cursor=set_cursor)

    def _write(self, cursor: Any, data: TensorDictBase, *, set_cursor: bool) -> None:
        """Write at most 1,024 rows; in a graph, any number."""
        before, after = self._stacks(data)
        rest = data.exclude(*self._frame_keys)
        if self._pool is None or not self.initialized:
            if self.device == "auto":
                self.device = before.device
            self._make_pool(before.shape[1], tuple(before.shape[2:]), before.dtype, torch.device(self.device))
        pool = self._pool
        assert pool is not None
        trajectory = data.get(self._traj_key, None)
        device = pool.frames.device
        slots, before, after = (tensor.to(device) for tensor in (cursor, before, after))
        if trajectory is not None:
            trajectory = trajectory.reshape(-1).to(device, torch.int64)
        try:
            pool.write(slots, before, after, trajectory)
        except RuntimeError as error:
            raise RuntimeError(f"{_OWNER}: {error}") from error
        super().set(cursor, rest, set_cursor=set_cursor)

    def _rows(self, cursor: Any, data: Any) -> tuple[Tensor, Any]:
        """Distinct slots [n] and their data [n]; if a slot occurs several times, the last row wins."""
        slots = cursor
        if not isinstance(slots, Tensor):
            slots = torch.arange(*slots.indices(self.max_size)) if isinstance(slots, slice) else torch.as_tensor(slots)
        if slots.dtype == torch.bool:
            slots = slots.nonzero().squeeze(1)
        if slots.ndim == 0:
            slots, data = slots.reshape(1), data.unsqueeze(0)
        if data.ndim != 1 or len(data) != len(slots):
            raise ValueError(
                f"{_OWNER}: data of shape {tuple(data.shape)} does not fit {len(slots)} slots of a storage of one "
                "dimension. Flatten it: rb.append_transform(lambda td: td.reshape(-1), invert=True)."
            )
        slots = slots.to(torch.int64)
        last = is_last_occurrence(slots)
        if bool(last.all()):
            return slots, data
        distinct: Any = data[last.to(data.device or last.device)]
        return slots[last], distinct

    def _with_frames(self, rows: TensorDictBase, slots: Tensor, keys: Any = None) -> TensorDictBase:
        pool = self._pool
        assert pool is not None
        slots = slots.to(pool.frames.device)
        frames = pool.read(slots.reshape(-1))
        frames = frames.view(*slots.shape, *frames.shape[1:])
        for key, stack in (
            (self._frame_key, frames.narrow(slots.ndim, 0, pool.num_stacked)),
            (self._next_key, frames.narrow(slots.ndim, 1, pool.num_stacked)),
        ):
            if keys is None or key in keys:
                rows.set(key, stack)
        return rows

    def _columns_at(self, index: Any) -> Any:
        """All entries except the frame stacks, at ``index``."""
        return super().get(index)

    def get(self, index: Any) -> Any:
        """The transitions at ``index``. If ``index`` is a key, this entry of all transitions.

        The result is a new TensorDict: entries that you add to it are not stored.
        """
        if is_key(index):
            column = None if self.is_stacked(index) else self._columns_at(index)
            # A nested TensorDict may contain stacks, which are not columns of the storage.
            return column if isinstance(column, Tensor) else self.get(slice(None))[index]
        rows = self._columns_at(index)
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.ndim:
            slots = to_device(index, self.counters_device)
            slots = slots + self._len_value * (slots < 0)
        else:
            # A slice of a full storage is the stored TensorDict itself; do not add the stacks to it.
            rows = rows.copy()
            slots = torch.arange(len(self))[index]
        return self._with_frames(rows, slots)

    def __repr__(self) -> str:
        fields: dict[str, Any] = {"len": len(self), "max_size": self.max_size, "num_frames": self.num_frames}
        fields["data"] = "<empty>"
        pool = self._pool
        if self.initialized and pool is not None:
            rows = self._columns_at(slice(None)).copy()
            # A placeholder of the right shape: building the stacks of a large buffer takes gigabytes.
            stack = pool.frames.new_zeros(()).expand(len(self), pool.num_stacked, *pool.frames.shape[1:])
            for key in self._frame_keys:
                rows.set(key, stack)
            fields["data"] = rows
        body = ", \n".join(indent(f"{name}={value}", " " * 4) for name, value in fields.items())
        return f"{type(self).__name__}(\n{body})"

    def take(self, index: Tensor) -> TensorDictBase:
        """Like :meth:`get`, for an index [n] within bounds."""
        return self._with_frames(super().take(index), index)

    def take_columns(self, keys: list[NestedKey], index: Tensor) -> TensorDictBase:
        """Like :meth:`take`, for the entries ``keys`` only."""
        stacked = [key_path(key) for key in keys if self.is_stacked(key)]
        columns = [key for key in keys if not self.is_stacked(key)]
        rows = super().take_columns(columns, index)
        return self._with_frames(rows, index, stacked) if stacked else rows

    def _settle(self) -> None:
        super()._settle()
        pool = self._pool
        if pool is None and self.initialized:
            raise _no_frames()

    def _empty(self) -> None:
        super()._empty()
        if self._pool is not None:
            self._pool.clear_()

    # --- saving

    def state_dict(self) -> dict[str, Any]:
        """The stored data. Places of the frame pool after the last one in use are left out."""
        return {**super().state_dict(), "frames": {} if self._pool is None else self._saved()}

    def _saved(self) -> dict[str, Tensor]:
        assert self._pool is not None
        return self._pool.tensors()

    def _restore(self, state: dict[str, Tensor]) -> None:
        if "frames" not in state:
            if self._pool is not None:
                self._pool.clear_()
            return
        if self._pool is None:
            frames = state["frames"]
            device = frames.device if self.device == "auto" else torch.device(self.device)
            self._make_pool(state["ids"].shape[1] - 1, tuple(frames.shape[1:]), frames.dtype, device)
        assert self._pool is not None
        try:
            self._pool.restore_(state)
        except ValueError as error:
            raise ValueError(f"{_OWNER}.load_state_dict: {error}") from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``; RuntimeError, before any change, if its rows have no frames."""
        frames = state_dict.get("frames", {})
        if state_dict.get("_len", 0) and not frames:
            raise _no_frames()
        self._restore(frames)
        super().load_state_dict(state_dict)

    def dumps(self, path: Any) -> None:
        """Save everything under the directory ``path``, as memory-mapped tensors."""
        super().dumps(path)
        TensorDict(self._saved()).memmap(str(Path(path) / "frames"), copy_existing=True)

    def loads(self, path: Any) -> None:
        """Load a state saved by ``dumps``."""
        state = TensorDict.load_memmap(str(Path(path) / "frames"))
        self._restore({str(key): value for key, value in state.items()})
        super().loads(path)


def _no_frames() -> RuntimeError:
    return RuntimeError(f"{_OWNER}: the loaded state has no frames; load a state saved by a FrameStackStorage.")
