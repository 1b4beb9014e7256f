"""Memory for the frames of stacked observations that stores each frame once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced
from torchrl_replay_ext.kernels.ops import frames_write


class FramePool:
    """Stores the frames of stacked observations, each frame once.

    A transition needs k + 1 frames: the k frames of its observation and the newest frame of the next observation. The
    other k - 1 frames of the next observation are shared. The pool stores k + 1 frame ids for each slot, and frees a
    frame when its reference count is 0. A transition shares frames with the previous transition of its trajectory, and
    within its stack, only if they are equal byte by byte. So reads return exactly the written bytes, for any layout of
    environments, any padding by wrappers, and in a full ring.

    Args:
        size: number of slots.
        capacity: number of frames. A transition needs one new frame. The first transition of a trajectory needs all
            its distinct frames; a frame of zeros needs no space. A frame is kept while a stored transition needs it.
        num_stacked: k.
        shape: shape of a frame.
        dtype: dtype of a frame. Default: ``torch.uint8``.
        num_streams: number of trajectories whose last transition is remembered, the most recently written ones.
            Default: 64.
        device: device of the tensors. Default: None, the CPU.
    """

    def __init__(
        self,
        size: int,
        capacity: int,
        *,
        num_stacked: int,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.uint8,
        num_streams: int = 64,
        device: torch.device | str | None = None,
    ):
        self.capacity, self.num_stacked, self.shape, self.dtype = capacity, num_stacked, shape, dtype
        self.device = torch.device(device or "cpu")

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        # see kernels/frames.py; not initialised, so that the operating system allocates memory only as the pool fills
        bytes_of_frame = math.prod(shape) * dtype.itemsize
        word = torch.uint8 if bytes_of_frame % 8 else torch.int64
        words = (capacity + 1) * bytes_of_frame // word.itemsize
        self._words = torch.empty(words, dtype=word, device=device)
        self.frames[0] = 0
        self._ids = zeros(size, num_stacked + 1, dtype=torch.int32)
        self._references, self._free = (zeros(capacity + 1, dtype=torch.int32) for _ in range(2))
        self._streams, self.counts = zeros(3, num_streams), zeros(3)
        self._refused = zeros(1)
        self.clear_()

    @property
    def frames(self) -> Tensor:
        """All frames, [capacity + 1, ...]; the first one is that of zeros."""
        return self._words.view(self.dtype).view(-1, *self.shape)

    def write(self, slots: Tensor, before: Tensor, after: Tensor, trajectory: Tensor | None = None) -> None:
        """Write the stacks of new transitions, in the order of writing. They replace the content of their slots.

        Args:
            slots: int64 [n], distinct.
            before: frames of the observation, [n, k, ...], the newest last.
            after: frames of the next observation, [n, k, ...], the newest last.
            trajectory: int64 [n], trajectory ids. None (default): all rows belong to one trajectory.

        Raises:
            ValueError: if the two stacks of a transition are not one step apart.
            RuntimeError: if there is no place for all new frames. The pool is unchanged after both errors. A graph
                counts such transitions and such frames instead, and stores blank frames for the latter.
        """
        trajectory = torch.zeros_like(slots) if trajectory is None else trajectory.contiguous()
        refuses = not is_traced()
        state = self._words, self._ids, self._references, self._free, self._streams, self.counts, self._refused
        frames_write(slots.contiguous(), self._as_words(before), self._as_words(after), trajectory, refuses, *state)
        refused = int(self._refused) if refuses else -1
        if refused == len(slots):
            raise RuntimeError(
                f"FrameStackStorage: stored transitions need all {self.capacity} frames, because the trajectories are "
                "too short. Pass a larger frame_capacity=; a trajectory of L steps needs L + 1 frames. If there are "
                f"more than {self._streams.shape[1]} simultaneous trajectories, also pass "
                "episodes=Episodes(num_streams=<their number>)."
            )
        if refused >= 0:
            raise ValueError(
                f"FrameStackStorage: row {refused} of the data: the next observation is not the observation shifted by "
                "one frame. Frames must be stacked along the first dimension of an observation, the newest last, and "
                "transitions must be single steps."
            )

    def _as_words(self, stacks: Tensor) -> Tensor:
        flat = stacks.contiguous().view(-1)
        if not is_traced() and flat.storage_offset() * flat.itemsize % self._words.itemsize:
            flat = flat.clone()
        return flat.view(self._words.dtype)

    def read(self, slots: Tensor) -> Tensor:
        """The k + 1 frames of each of ``slots`` [...], [..., k + 1, *shape], the newest last."""
        ids = gather_in_bounds(self._ids, slots.reshape(-1)).view(-1)
        words = gather_in_bounds(self._words.view(self.capacity + 1, -1), ids)
        return words.view(self.dtype).view(*slots.shape, self.num_stacked + 1, *self.shape)

    @property
    def num_used(self) -> int:
        """Number of frames that stored transitions need."""
        return self.capacity - int(self._free[-1])

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`restore_` recomputes derived state."""
        # frames after the largest id in use are not needed
        frames = self.frames[: int(self._ids.max()) + 1]
        return {"ids": self._ids, "streams": self._streams, "counts": self.counts, "frames": frames}

    def restore_(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`tensors`. ValueError if the state does not fit; the pool is then unchanged."""
        own = {**self.tensors(), "frames": self.frames}
        for name, tensor in own.items():
            saved = state.get(name)
            least = 0 if name == "frames" else len(tensor)
            if saved is None or saved.shape[1:] != tensor.shape[1:] or not least <= len(saved) <= len(tensor):
                raise ValueError(
                    f"FrameStackStorage.load_state_dict: the saved entry {name!r} is missing or has another shape; "
                    "other sizes were saved."
                )
        for name, tensor in own.items():
            tensor[: len(state[name])] = state[name]
        self._rebuild()

    def _counted(self) -> tuple[Tensor, Tensor]:
        """The number of references to each frame, and the ids of the others."""
        references = self._ids.view(-1).bincount(minlength=self.capacity + 1).to(torch.int32)
        references[0] += 1
        # the lowest id is taken first
        return references, (references == 0).nonzero().squeeze(1).flip(0).to(torch.int32)

    def _rebuild(self) -> None:
        references, free = self._counted()
        self._references.copy_(references)
        self._free[: len(free)] = free
        self._free[-1] = len(free)

    def clear_(self) -> None:
        """Remove all content."""
        for tensor in (self._ids, self._streams, self.counts):
            tensor.zero_()
        self._rebuild()
