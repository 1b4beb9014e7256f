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
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, outside_inference_mode, to_device
from torchrl_replay_ext.core.layout import is_last_occurrence
from torchrl_replay_ext.core.streams import DEFAULT_STREAMS, Episodes, check_streams, require_episodes, require_ids
from torchrl_replay_ext.kernels.ops import frames_write
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage, positions

_OWNER = "FrameStackStorage"


class FrameStackStorage(CompilableTensorStorage):
    """A :class:`CompilableTensorStorage` for stacked frames that stores each frame once.

    Write and read transitions as with any other storage, with whole stacks at ``frame_key`` and ``("next",
    frame_key)``, [n, k, ...], the newest frame last. Gymnasium's ``FrameStackObservation`` and TorchRL's ``CatFrames``
    (of frames with one channel) produce such stacks. A million transitions of four 84 x 84 bytes take 8 GB instead of
    56. The two stacks of a sample are views of the same frames: do not change them in place.

    **What is shared.** A frame is not stored again if it is equal, byte by byte, to the frame before it in its
    transition, or to one of the k + 2n - 2 frames of its trajectory that were seen last, with the n of n-step
    transitions. Frames of zeros are not stored at all. So an episode of L steps takes L + 1 frames. Reads return
    exactly the bytes that were written, for any layout of environments and after the ring has overwritten earlier
    steps: a frame is freed when it is neither needed by a stored transition nor one of those that were seen last in the
    last ``num_streams`` trajectories.

    **On an accelerator** the frames are there, and their ids are counted on the CPU: the host waits in each write, and
    writes cannot be part of a graph. On the CPU they can.

    Args:
        max_size: capacity, the number of transitions.
        frame_capacity: the number of frames, at least ``max_size``. None (default): 9/8 of ``max_size``, and more for
            small storages (5 times ``max_size`` up to 1024 transitions), which is enough for episodes of 8 steps on
            average. Memory for a frame is allocated when the frame is first needed.
        frame_key: entry with the observations. Default: ``"observation"``.
        n_step: the next observation of a transition is at most so many steps after its observation, >= 1; with 1,
            exactly one step. Default: 1.
        episodes: the key of the trajectory ids; without ids, all rows are taken for one trajectory. The last frames of
            ``num_streams`` trajectories are remembered, 64 if it is None. Default: None, as
            :class:`~torchrl_replay_ext.Episodes` says.
        device: device of the data. ``"auto"``: the device of the first data. Default: ``"cpu"``.

    Raises:
        KeyError: at a write, if stacks are missing, or trajectory ids although their entry was named.
        TypeError: at a write, if trajectory ids are not integers.
        ValueError: at a write, if the stacks of a transition are not one step apart and ``n_step`` is 1, or their shape
            or dtype differs from the stored stacks.
        RuntimeError: at a write, if there is no space for new frames, or in a graph on an accelerator.

    The storage is unchanged after these errors, except in a compiled step: it raises the same errors, but may be half
    done. A sampler may drop the rows that the write would have overwritten.
    If other entries do not fit the stored ones, our writers change nothing; with TorchRL's, stacks may be replaced.

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
        n_step: int = 1,
        episodes: Episodes | None = None,
        device: torch.device | str = "cpu",
    ):
        max_size = require_integer(_OWNER, "max_size", max_size)
        require_nested_keys(_OWNER, frame_key=frame_key)
        if frame_capacity is None:
            frame_capacity = max_size + max(max_size // 8, min(4 * max_size, 4096))
        self._frame_capacity = require_integer(_OWNER, "frame_capacity", frame_capacity, least=max_size)
        self._n_step = require_integer(_OWNER, "n_step", n_step)
        self._frame_keys = key_path(frame_key), ("next", *key_path(frame_key))
        self._episodes = require_episodes(_OWNER, episodes)
        # [k, ...], from the first write on
        self._stack_shape: Any = None
        super().__init__(max_size, device=device)

    @outside_inference_mode()
    def _allocate(self, stacks: Tensor) -> None:
        """Allocate memory for stacks like ``stacks`` [n, k, ...]; for the tensors see ``kernels/frames.py``."""
        if self.device == "auto":
            self.device = stacks.device
        self._stack_shape, self._frame_dtype = tuple(stacks.shape[1:]), stacks.dtype
        depth, num_streams = stacks.shape[1], self._episodes.num_streams or DEFAULT_STREAMS
        # each frame is there until the last observation that has it, in whatever order the first frames come
        held = num_streams, depth + 2 * self._n_step - 2
        bytes_of_frame = stacks[0, 0].numel() * stacks.itemsize
        count = self._frame_capacity + held[0] * held[1] + 1
        word = torch.uint8 if bytes_of_frame % 8 else torch.int64
        # not initialised, so that the operating system allocates memory only as it is needed
        self._words = torch.empty(count, bytes_of_frame // word.itemsize, dtype=word, device=self.device)
        self._words[0] = 0
        self._recent = torch.zeros(*held, self._words.shape[1], dtype=word, device="cpu")
        self._streams = torch.zeros(2, num_streams, dtype=torch.int64, device="cpu")
        self._seen = torch.zeros(held, dtype=torch.int64, device="cpu")
        sizes = (self.max_size, self._width(depth)), held, (count,), (count,)
        numbers = (torch.zeros(size, dtype=torch.int32, device="cpu") for size in sizes)
        self._ids, self._held, self._references, self._free = numbers
        # for reads; on the CPU the ids themselves
        self._ids_there = self._ids.to(self.device)
        self._count_references()

    def _width(self, depth: int) -> int:
        """The number of frames that a transition needs: of the next observation the newest one, or all."""
        return depth + 1 if self._n_step == 1 else 2 * depth

    def _count_references(self) -> None:
        """Count the references of ids that were set, and forget the trajectories."""
        for tensor in (self._streams, self._recent, self._held, self._seen):
            tensor.zero_()
        self._ids_there.copy_(self._ids)
        self._references.copy_(self._ids.view(-1).bincount(minlength=len(self._references)))
        # the frame of zeros always stays
        self._references[0] += 1 + self._held.numel()
        # the lowest one is taken first
        free = (self._references == 0).nonzero().squeeze(1).flip(0)
        self._free[: len(free)] = free
        self._free[-1] = len(free)

    def is_stacked(self, key: NestedKey) -> bool:
        """True if the entry ``key`` is a frame stack. Frame stacks are not stored as columns."""
        return key_path(key) in self._frame_keys

    @property
    def num_frames(self) -> int:
        """Number of frames that the stored transitions need."""
        return 0 if self._stack_shape is None else int((self._ids.view(-1).bincount()[1:] > 0).sum())

    # --- writing

    @torch.no_grad()
    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write ``data`` at ``cursor``."""
        if not is_tensor_collection(data):
            raise TypeError(f"{_OWNER}: the data must be a TensorDict, not {type(data).__name__}.")
        slots, episodes = positions(cursor, self.max_size), self._episodes
        if is_traced():
            self._require_columns()
            if self.counters_device.type != "cpu":
                raise RuntimeError(
                    f"{_OWNER}.set: a graph on an accelerator cannot write frames; call extend outside of it."
                )
            slots = slots.clamp(0, self.max_size - 1)
        elif slots.ndim == 0:
            cursor = slots = slots.reshape(1)
            data = data.unsqueeze(0)
        if data.ndim != 1 or len(data) != len(slots):
            raise ValueError(
                f"{_OWNER}: data of shape {tuple(data.shape)} does not fit {len(slots)} slots of a storage of one "
                "dimension. Flatten it: rb.append_transform(lambda td: td.reshape(-1), invert=True)."
            )
        trajectory = None if episodes.traj_key is None else data.get(episodes.traj_key, None)
        if trajectory is not None:
            require_ids(_OWNER, episodes.traj_key, trajectory)
        elif episodes.requires_ids:
            raise KeyError(f"{_OWNER}: the data has no entry {episodes.traj_key!r} with trajectory ids.")
        trajectory = torch.zeros_like(slots) if trajectory is None else trajectory.reshape(-1).to(slots)
        if not slots.is_cpu:
            slots, trajectory = torch.stack([slots, trajectory]).cpu()
        if not (is_traced() or isinstance(cursor, slice)):
            if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < self.max_size:
                raise IndexError(f"{_OWNER}: the slots {cursor} are not all in a storage of {self.max_size} slots.")
            last = is_last_occurrence(slots)
            if not bool(last.all()):
                # of rows with the same slot only the last one
                cursor, slots, trajectory = slots[last], slots[last], trajectory[last]
                data = data[last.to(data.device or last.device)]
        self._set_frames(slots, *self._stacks(data), trajectory)
        super().set(cursor, data.exclude(*self._frame_keys), set_cursor=set_cursor)
        # otherwise the rows cannot be read yet
        if set_cursor:
            check_streams(self, slots, episodes.done_key, episodes.traj_key)

    def _stacks(self, data: TensorDictBase) -> tuple[Tensor, Tensor]:
        """The stacks [n, k, ...] of rows."""
        before, after = (data.get(key, None) for key in self._frame_keys)
        if before is None or after is None:
            raise KeyError(
                f"{_OWNER}: the data has no entry {self._frame_keys[before is not None]!r} with stacked frames; each "
                "write needs it. If the environment writes the frames to another entry, pass its name as frame_key=."
            )
        is_first = self._stack_shape is None or not self.initialized
        found: Any = [(tuple(stacks.shape[1:]), stacks.dtype) for stacks in (before, after)]
        expected = found[0] if is_first else (self._stack_shape, self._frame_dtype)
        if before.ndim < 3 or found != [expected] * 2:
            raise ValueError(
                f"{_OWNER}: the entries {self._frame_keys} of a row are {found}; both must be stacks [frames, ...] of "
                f"the shape and dtype {expected}."
            )
        if is_first:
            self._allocate(before)
        return before, after

    def _set_frames(self, slots: Tensor, before: Tensor, after: Tensor, trajectory: Tensor) -> None:
        """Store stacks [n, k, ...] for ``slots`` [n]. Nothing is changed after an error."""
        if not before.is_cpu:
            before, after = torch.stack([before, after]).cpu()
        before, after, device = self._as_words(before), self._as_words(after), self._words.device
        frames, targets = self._words, slots.new_zeros(0 if self._words.is_cpu else len(slots) * self._ids.shape[1])
        if len(targets):
            frames = before.new_empty(len(targets), before.shape[2])
        state = self._ids, self._references, self._free
        memory = self._streams, self._recent, self._held, self._seen
        frames_write(slots, trajectory, before, after, *memory, frames, *state, targets)
        if len(targets):
            targets = targets[targets > 0]
            self._words[to_device(targets, device)] = to_device(frames[: len(targets)], device)
            self._ids_there[to_device(slots, device)] = to_device(self._ids[slots], device)

    def _as_words(self, stacks: Tensor) -> Tensor:
        """Stacks [n, k, ...] as [n, k, words]."""
        flat = stacks.contiguous().view(-1)
        if not is_traced() and flat.storage_offset() * flat.itemsize % self._words.itemsize:
            flat = flat.clone()
        return flat.view(self._words.dtype).view(*stacks.shape[:2], -1)

    # --- reading

    def _with_frames(self, rows: TensorDictBase, slots: Tensor) -> TensorDictBase:
        """Add the stacks of ``slots`` to ``rows``."""
        (depth, *shape), slots = self._stack_shape, to_device(slots, self._words.device)
        ids = gather_in_bounds(self._ids_there, slots.reshape(-1))
        frames = gather_in_bounds(self._words, ids.view(-1)).view(self._frame_dtype)
        width = self._ids.shape[1]
        frames = frames.view(*slots.shape, width, *shape)
        for first, key in zip((0, width - depth), self._frame_keys, strict=True):
            rows.set(key, frames.narrow(slots.ndim, first, depth))
        return rows

    def get(self, index: Any) -> Any:
        """The transitions at ``index``. If ``index`` is a key, this entry of all transitions.

        The result is a new TensorDict: entries that you add to it, and changes of stacks, are not stored.
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

    def take(self, index: Tensor, keys: Sequence[NestedKey] | None = None) -> TensorDictBase:
        """Like :meth:`get`, for an index [n] within bounds; ``keys``: only these entries."""
        if keys is None:
            return self._with_frames(super().take(index), index)
        columns = [key for key in keys if not self.is_stacked(key)]
        rows = super().take(index, columns)
        return rows if len(columns) == len(keys) else self._with_frames(rows, index).select(*keys)

    def __repr__(self) -> str:
        # without the stacks: those of a large buffer take gigabytes
        data = super().get(slice(None)) if self.initialized else "<empty>"
        sizes = f"len={len(self)}, max_size={self.max_size}, num_frames={self.num_frames}, stacks={self._stack_shape}"
        return f"{type(self).__name__}({sizes},\n" + indent(f"data={data})", " " * 4)

    # --- saving

    def _empty(self) -> None:
        super()._empty()
        if self._stack_shape is not None:
            self._ids.zero_()
            self._count_references()

    @property
    def _frames(self) -> Tensor:
        """All frames, [frames, ...]."""
        return self._words.view(self._frame_dtype).view(-1, *self._stack_shape[1:])

    def _saved(self) -> dict[str, Tensor]:
        """Ids, the frames up to the last one that they name, and the number of frames of a stack."""
        if self._stack_shape is None:
            return {}
        depth = torch.tensor(self._stack_shape[0], device="cpu")
        return {"ids": self._ids, "frames": self._frames[: self._ids.max() + 1], "depth": depth}

    def _restore(self, saved: dict[str, Tensor]) -> None:
        """Restore what :meth:`_saved` returned. ValueError, before any change, if it does not fit."""
        ids, frames, depth = saved["ids"], saved["frames"], int(saved["depth"])
        stacks = (depth, *frames.shape[1:]), frames.dtype
        expected = stacks if self._stack_shape is None else (self._stack_shape, self._frame_dtype)
        shape_of_ids = self.max_size, self._width(expected[0][0])
        fits = stacks == expected and ids.shape == shape_of_ids
        if fits and self._stack_shape is None:
            self._allocate(frames[:1].unsqueeze(1).repeat_interleave(depth, 1))
        if not fits or not 0 <= ids.min() <= ids.max() < len(frames) <= len(self._words):
            raise ValueError(
                f"{_OWNER}.load_state_dict: the state has {len(frames)} frames of stacks with the shape and dtype "
                f"{stacks}, and ids {tuple(ids.shape)}; expected {expected} and ids {shape_of_ids}, for "
                f"n_step={self._n_step}."
            )
        self._ids.copy_(ids)
        self._frames[: len(frames)] = frames
        self._count_references()

    def state_dict(self) -> dict[str, Any]:
        """The stored data. Frames after the last one in use are left out."""
        frames = {name: tensor.clone() for name, tensor in self._saved().items()}
        return {**super().state_dict(), "frames": frames}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``; RuntimeError, before any change, if its rows have no frames."""
        frames = state_dict.get("frames", {})
        if state_dict.get("_len", 0) and not frames:
            raise RuntimeError(f"{_OWNER}: the loaded state has no frames; load a state saved by a FrameStackStorage.")
        self.require_loadable(state_dict)
        self._restore(frames) if frames else self._empty()
        super().load_state_dict(state_dict)

    def dumps(self, path: Any) -> None:
        """Save everything under the directory ``path``, as memory-mapped tensors."""
        super().dumps(path)
        TensorDict(self._saved()).memmap(str(Path(path) / "frames"), copy_existing=True)

    def loads(self, path: Any) -> None:
        """Load a state saved by ``dumps``."""
        self.require_loadable(self.saved_at(path))
        self._restore(TensorDict.load_memmap(str(Path(path) / "frames")).to_dict())
        super().loads(path)
