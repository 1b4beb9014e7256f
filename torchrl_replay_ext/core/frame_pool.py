"""Memory for the frames of stacked observations that stores each frame once."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    is_traced,
    raise_if,
    rows_where,
    scatter_in_bounds,
    where_int64,
)

# The id of the frame of zeros.
_BLANK = 0


def _shifted(values: Tensor) -> Tensor:
    """``values`` [n] shifted by one place to the right; the first value is 0."""
    return torch.cat([values.new_zeros(1), values[:-1]])


class FramePool:
    """Stores the frames of stacked observations, each frame once.

    A transition needs k + 1 frames: the k frames of its observation and the newest frame of the next observation. The
    other k - 1 frames of the next observation are shared. The pool stores k + 1 frame ids for each slot, and frees a
    frame when its reference count is 0. A transition shares frames with the previous transition of its trajectory only
    if they are equal byte by byte. So reads return exactly the written bytes, for any layout of environments, any
    padding by wrappers, and in a full ring. All shapes are static, and a graph does not read from the device.

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
        self.size, self.capacity, self.num_stacked = size, capacity, num_stacked
        # place 0 is the blank frame, places 1 to capacity hold frames, the last place receives masked writes
        self._nowhere = capacity + 1
        # not initialised, so that the operating system allocates memory only as the pool fills
        self.frames = torch.empty((capacity + 2, *shape), dtype=dtype, device=device)
        self.frames[_BLANK] = 0

        def zeros(*sizes: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        self._ids = zeros(size, num_stacked + 1, dtype=torch.int32)
        self._references = zeros(capacity + 2, dtype=torch.int32)
        # a queue of the free frames: a ring, and one place that receives masked writes
        self._free = zeros(capacity + 1, dtype=torch.int32)
        self._head, self._num_free = zeros(1), zeros(1)
        self._mark = zeros(capacity + 2, dtype=torch.int32)
        # per remembered trajectory: id, slot of its last transition (-1: none), time of that write
        self._tail_trajectory, self._tail_slot, self._tail_time = (zeros(num_streams) for _ in range(3))
        self._time = zeros(1)
        # number of new frames that found no place; counted in graphs, which cannot raise errors
        self.lost = zeros(1)
        # number of transitions whose two stacks are not one step apart; counted in graphs
        self.mismatched = zeros(1)
        self.clear_()

    def write(self, slots: Tensor, before: Tensor, after: Tensor, trajectory: Tensor | None = None) -> None:
        """Write the stacks of new transitions, in the order of writing. They replace the content of their slots.

        Args:
            slots: int64 [n], distinct.
            before: frames of the observation, [n, k, ...], the newest last.
            after: frames of the next observation, [n, k, ...], the newest last.
            trajectory: int64 [n], trajectory ids. None (default): all rows belong to one trajectory.

        Raises:
            RuntimeError: if there is no place for all new frames; the pool is unchanged then. A graph counts such
                frames instead and stores blank frames for them. It also counts transitions that
                :func:`require_one_step` refuses, which callers check outside graphs.
        """
        if trajectory is None:
            trajectory = torch.zeros_like(slots)
        if is_traced():
            self.mismatched.add_(require_one_step(before, after).sum())
        wanted, new, newest = self._link(before, after, trajectory)
        ids = self._allocate(slots, wanted, new.sum().reshape(1))
        self._store(ids, new, before, after)
        scatter_in_bounds(self._ids, slots, ids.to(torch.int32))
        self._remember(slots, trajectory, newest)

    def read(self, slots: Tensor) -> Tensor:
        """The k + 1 frames of each of ``slots`` [n], [n, k + 1, ...], the newest last."""
        ids = gather_in_bounds(self._ids, slots)
        frames = gather_in_bounds(self.frames, ids.reshape(-1))
        return frames.view(*ids.shape, *frames.shape[1:])

    def _link(self, before: Tensor, after: Tensor, trajectory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The frames that the rows of a write need.

        Returns:
            The ids of stored frames, and -1, -2, ... for new frames, int64 [n, k + 1]; where a new frame occurs first,
            bool [n, k + 1]; and which rows are the last of their trajectory, bool [n].
        """
        count, depth = trajectory.shape[0], self.num_stacked
        rows = torch.arange(count, device=trajectory.device)
        # the previous row of the same trajectory, or -1
        order = trajectory.argsort(stable=True)
        sorted_ids = trajectory[order]
        goes_on = _shifted(sorted_ids) == sorted_ids
        goes_on = goes_on & (rows > 0)
        none = torch.full_like(rows, -1)
        previous = torch.empty_like(rows).index_copy_(0, order, where_int64(goes_on, _shifted(order), none))
        is_last = ~torch.cat([goes_on[1:], torch.zeros_like(goes_on[:1])])
        newest = torch.empty_like(is_last).index_copy_(0, order, is_last)
        follows_row = previous >= 0
        previous = previous.clamp_min(0)
        # for the first row of a trajectory, its last stored transition
        match = (trajectory.unsqueeze(1) == self._tail_trajectory) & (self._tail_slot >= 0)
        stored = match.any(1) & ~follows_row
        stored_ids = gather_in_bounds(self._ids, (self._tail_slot.clamp_min(0) * match).sum(1)).to(torch.int64)[:, 1:]
        # frames are shared only if they are equal
        follows_row = follows_row & _same(before, after[previous])
        chosen = rows_where(stored)
        frames = gather_in_bounds(self.frames, stored_ids[chosen].reshape(-1)).view(-1, *before.shape[1:])
        stored = stored.index_copy(0, chosen, stored[chosen] & _same(before[chosen], frames))

        # a row without predecessor shares frames only within its own stack
        alone = ~(follows_row | stored)
        chosen = rows_where(alone)
        found = torch.stack(_different(before[chosen])) & alone[chosen].unsqueeze(1)
        new, blank = alone.new_zeros(2, count, depth).index_copy(1, chosen, found)
        new = torch.cat([new, torch.ones_like(new[:, :1])], 1)
        own = -new.reshape(-1).cumsum(0).view_as(new)
        ids = where_int64(blank, _BLANK, own[:, :-1])
        ids = where_int64(stored.unsqueeze(1), stored_ids, ids)
        ids = torch.cat([ids, own[:, -1:]], 1)
        # each round copies the ids of a row to the next row; after k rounds all ids are known
        follows = follows_row.unsqueeze(1)
        for _ in range(depth):
            ids = torch.cat([where_int64(follows, ids[previous][:, 1:], ids[:, :-1]), ids[:, -1:]], 1)
        return ids, new, newest

    def _allocate(self, slots: Tensor, linked: Tensor, wanted: Tensor) -> Tensor:
        """Update reference counts, free unused frames and assign places to new frames; return the ids [n, k + 1]."""
        ids = linked.reshape(-1)
        known = ids > _BLANK
        dropped = gather_in_bounds(self._ids, slots).reshape(-1).to(torch.int64)
        held = dropped > _BLANK
        self._references.index_add_(0, ids.clamp_min(_BLANK), known.to(torch.int32))
        self._references.index_add_(0, dropped, -held.to(torch.int32))
        # if several rows drop the same frame, free it once
        order = torch.arange(dropped.shape[0], device=slots.device)
        scatter_in_bounds(self._mark, dropped, order.to(torch.int32))
        freed = (
            held & (gather_in_bounds(self._references, dropped) == 0) & (gather_in_bounds(self._mark, dropped) == order)
        )

        def undone() -> RuntimeError:
            self._references.index_add_(0, dropped, held.to(torch.int32))
            self._references.index_add_(0, ids.clamp_min(_BLANK), -known.to(torch.int32))
            return RuntimeError(
                f"stored transitions need all {self.capacity} frames, because the trajectories are too short. Pass a "
                "larger frame_capacity=; a trajectory of L steps needs L + 1 frames. If there are more than "
                f"num_streams={len(self._tail_slot)} simultaneous trajectories, also pass a larger num_streams=."
            )

        raise_if(lambda: wanted > self._num_free + freed.sum(), undone)
        place = (self._head + self._num_free + freed.to(torch.int64).cumsum(0) - 1) % self.capacity
        scatter_in_bounds(
            self._free, where_int64(freed, place, self.capacity + torch.zeros_like(place)), dropped.to(torch.int32)
        )
        self._num_free.add_(freed.sum())

        served = torch.minimum(wanted, self._num_free)
        given = gather_in_bounds(self._free, (self._head + order) % self.capacity) * (order < served)
        self.lost.add_(wanted - served)
        self._head.add_(served).remainder_(self.capacity)
        self._num_free.sub_(served)
        asking = ids < _BLANK
        ids = where_int64(asking, gather_in_bounds(given, (-1 - ids).clamp_min(0)).to(torch.int64), ids)
        self._references.index_add_(0, ids, (asking & (ids > _BLANK)).to(torch.int32))
        return ids.view_as(linked)

    def _store(self, ids: Tensor, new: Tensor, before: Tensor, after: Tensor) -> None:
        place = where_int64(new & (ids > _BLANK), ids, torch.full_like(ids, self._nowhere))
        scatter_in_bounds(self.frames, place[:, -1], after[:, -1])
        chosen = rows_where(new[:, :-1].reshape(-1))
        scatter_in_bounds(self.frames, place[:, :-1].reshape(-1)[chosen], before.flatten(0, 1)[chosen])

    def _remember(self, slots: Tensor, trajectory: Tensor, newest: Tensor) -> None:
        """Remember the last transitions of the most recently written trajectories."""
        count, kept = slots.shape[0], self._tail_slot.shape[0]
        continued = (trajectory.unsqueeze(1) == self._tail_trajectory).any(0)
        written = self._time + torch.arange(1, count + 1, device=slots.device)
        time = torch.cat([self._tail_time * ~continued, written * newest])
        last = time.argsort(descending=True, stable=True)[:kept]
        slot = torch.cat([self._tail_slot, slots])[last]
        ids = torch.cat([self._tail_trajectory, trajectory])[last]
        time = time[last]
        self._tail_slot.copy_(where_int64(time > 0, slot, torch.full_like(slot, -1)))
        self._tail_trajectory.copy_(ids)
        self._tail_time.copy_(time)
        self._time.add_(count)

    @property
    def num_used(self) -> int:
        """Number of frames that stored transitions need."""
        return self.capacity - int(self._num_free)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`restore_` recomputes derived state."""
        names = ("ids", "tail_trajectory", "tail_slot", "tail_time", "time")
        state = {name: getattr(self, f"_{name}") for name in names}
        # frames after the largest id in use are not needed
        frames = self.frames[: int(self._ids.max()) + 1]
        return {**state, "lost": self.lost, "mismatched": self.mismatched, "frames": frames}

    def restore_(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`tensors`. ValueError if the state does not fit; the pool is then unchanged."""
        own = self.tensors()
        frames = state.get("frames")
        if frames is None or frames.shape[1:] != self.frames.shape[1:] or len(frames) > self._nowhere:
            raise ValueError(f"the saved frames do not fit into a pool of {self.capacity} frames.")
        for name, tensor in own.items():
            if name not in state or (name != "frames" and state[name].shape != tensor.shape):
                raise ValueError(f"the saved entry {name!r} is missing or has another shape; other sizes were saved.")
        for name, tensor in own.items():
            if name != "frames":
                tensor.copy_(state[name])
        self.frames[: len(frames)] = frames
        self._rebuild()

    def _rebuild(self) -> None:
        """Recompute references and free places from the ids."""
        self._references.copy_(self._counted())
        free = (self._references[1 : self._nowhere] == 0).nonzero().squeeze(1) + 1
        self._free.zero_()[: len(free)] = free.to(torch.int32)
        self._head.zero_()
        self._num_free.fill_(len(free))

    def _counted(self) -> Tensor:
        """The number of references to each frame."""
        ids = self._ids.reshape(-1).to(torch.int64)
        return torch.zeros_like(self._references).index_add_(0, ids, (ids > _BLANK).to(torch.int32))

    def clear_(self) -> None:
        """Remove all content."""
        for tensor in (self._ids, self._tail_trajectory, self._tail_time, self._time, self.lost, self.mismatched):
            tensor.zero_()
        self._tail_slot.fill_(-1)
        self._rebuild()

    def check_valid(self) -> None:
        """Raise AssertionError if reference counts, free places and ids contradict each other. O(size)."""
        references = self._counted()
        if not torch.equal(references[1:], self._references[1:]):
            raise AssertionError("FramePool: the reference counts are wrong.")
        places = (self._head + torch.arange(int(self._num_free), device=references.device)) % self.capacity
        free = torch.zeros_like(self._references).index_add_(
            0, self._free[places].to(torch.int64), torch.ones_like(places, dtype=torch.int32)
        )
        if not torch.equal(free[1 : self._nowhere], (references[1 : self._nowhere] == 0).to(torch.int32)):
            raise AssertionError("FramePool: the free places are wrong.")


def require_one_step(before: Tensor, after: Tensor, *, first_row: int = 0) -> Tensor:
    """True where the two stacks [n, k, ...] of a transition are not one step apart, bool [n].

    Outside graphs such a row raises ValueError. ``first_row``: number of the first of these rows in the data.
    """
    apart = ~_same(before[:, 1:], after[:, :-1])
    raise_if(
        apart.any,
        lambda: ValueError(
            f"row {first_row + int(apart.nonzero()[0])} of the data: the next observation is not the observation "
            "shifted by one frame. Frames must be stacked along the first dimension of an observation, the newest "
            "last, and transitions must be single steps."
        ),
    )
    return apart


def _bits(values: Tensor) -> Tensor:
    """Floating-point ``values`` as integers: NaN equals itself, and -0.0 differs from 0.0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.itemsize]) if values.is_floating_point() else values


def _same(first: Tensor, second: Tensor) -> Tensor:
    """True where ``first`` and ``second`` [n, ...] are equal byte by byte, bool [n]."""
    return (_bits(first) == _bits(second)).flatten(1).all(1)


def _different(stack: Tensor) -> tuple[Tensor, Tensor]:
    """Masks of the frames of stacks [n, k, ...]: differs from the previous frame and is not zero; is zero."""
    stack = _bits(stack)
    repeated = (stack[:, 1:] == stack[:, :-1]).flatten(2).all(2)
    blank = (stack == 0).flatten(2).all(2)
    first = torch.ones_like(blank[:, :1])
    return torch.cat([first, ~repeated], 1) & ~blank, blank
