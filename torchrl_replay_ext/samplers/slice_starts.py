"""Where the slices of a TrajectoryRetraceSampler may begin, and which step follows which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, raise_if, to_device, where_int64
from torchrl_replay_ext.core.slots import Slots
from torchrl_replay_ext.core.streams import EpisodeMarks, Lanes
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.kernels.ops import Views, slices_walk, slices_write
from torchrl_replay_ext.samplers.rows import EpisodeReader, RowView
from torchrl_replay_ext.samplers.slot_state import Follower

# where slices begin: at any transition, or at the first ones of episodes
Starts = Literal["any", "episode"]
# the class that errors name
OWNER = "TrajectoryRetraceSampler"
BEHAVIOUR = (
    "the statistics of the behaviour policy. The policy in the collector writes this entry: torchrl's "
    "ProbabilisticActor writes the parameters of its distribution ('logits', or 'loc' and 'scale'), and with "
    "return_log_prob=True the log-probability. Pass the names of these entries as behaviour_keys=."
)
# a time long before all others
_NEVER = -(2**62)


class SliceStarts(Follower):
    """Keeps the successor of each transition within its episode, and marks where slices may begin.

    A ring overwrites the oldest transitions first, so the successor of a stored transition is stored too. The chain of
    successors from any slot contains the later transitions of the episode in time order, up to the last stored one.
    Layouts are those of :class:`~torchrl_replay_ext.core.streams.Lanes`. The state is on the CPU. If the storage is on
    an accelerator, draws read copies there, to which changes are sent without waiting.

    Args:
        slice_len: steps per slice.
        reader: reads the ends of episodes.
        behaviour_keys: entries that rows must have.
        pad: if True, slices may be shorter than ``slice_len``.
        starts: "any", or "episode": slices begin at the first transitions of episodes.
    """

    needs_order = True
    # True after a draw that found a transition where a slice may begin
    _had_starts = False

    def __init__(
        self,
        *,
        slice_len: int,
        reader: EpisodeReader,
        behaviour_keys: Sequence[NestedKey],
        pad: bool,
        starts: Starts,
    ):
        self._reader, self._behaviour_keys = reader, behaviour_keys
        self._slice_len, self._pad, self._starts_at = slice_len, pad, starts

    def allocate(self, slots: Slots) -> None:
        self._slots, layout = slots, slots.layout
        self.lanes = Lanes(layout, self._reader.num_streams)
        self._size, self._device, slice_len = layout.size, layout.device, self._slice_len
        size = self._size
        num_lanes = self.lanes.num_lanes

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device="cpu")

        # the successor of each slot, or the slot itself if there is none
        self._next = torch.arange(size, device="cpu").to(torch.int32 if size < 2**31 else torch.int64)
        # Times count slots, so that time t is in slot t % size. The time of the last row, -1 before the first; and the
        # times of the newest rows of each lane: the n-th row of a lane is in column n % slice_len
        self._newest_time, self._recent = full(1, value=-1), full(num_lanes, slice_len, value=_NEVER)
        # per lane: its number of rows, and the number of steps of its unfinished episode
        self._num_rows, self._episode_len = full(num_lanes), full(num_lanes)
        # True for the first transition of each episode; empty if slices may begin anywhere
        self._firsts = torch.zeros(size if self._starts_at == "episode" else 0, dtype=torch.bool, device="cpu")
        # mass 1 where a slice may begin
        self.starts = SumTree(size, device=self._device)
        # what draws read, on their device; on the CPU the successors are the same tensor
        self._is_copied = self._device.type != "cpu"
        self._drawn_next, self._drawn_newest = (
            to_device(each, self._device) for each in (self._next, self._newest_rows())
        )
        tree = SumTree(1, device="cpu") if self._is_copied else self.starts
        state = self._newest_time, self._next, self._recent, self._num_rows, self._episode_len, self._firsts
        # the first one stands for no changes
        self._views = Views(full(3, 0), self._pad, *state, tree.leaves, tree.nodes, tree.pages, size)

    # --- writes

    def write(self, slots: Tensor, rows: RowView) -> None:
        for key in self._behaviour_keys:
            rows.require(key, BEHAVIOUR)
        marks = self._reader.read(rows, needs_ids=self.lanes.assigned)
        if not rows.is_rewrite:
            self.append(rows.slots_on_host, marks)

    def append(self, slots: Tensor, marks: EpisodeMarks) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        ``slots``, int64 [n] on the CPU, are consecutive in the ring. For ``marks`` and errors see
        :meth:`~torchrl_replay_ext.core.streams.Lanes.run_write`.
        """
        if not self._is_copied:
            self.lanes.run_write(slices_write, slots, marks, *self._views())
            return
        changes = torch.full((3, 2 * len(slots)), -1, device="cpu")
        self.lanes.run_write(slices_write, slots, marks, changes, *self._views()[1:])
        followed = changes[2].clamp_min_(0)
        sent = to_device(torch.cat([changes, self._next[followed].unsqueeze(0)]), self._device)
        start, mass, followed, following = sent.unbind(0)
        self._drawn_next.index_copy_(0, followed, following.to(self._next.dtype))
        self.starts.write(start, mass)
        self._drawn_newest.copy_(self._newest_rows(), non_blocking=True)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest or the newest. Slices do not continue across the removed slots.

        In fixed lanes, unfinished episodes do not continue afterwards. In assigned lanes, the trajectory id decides.
        """
        removed = torch.zeros_like(self._next, dtype=torch.bool).index_fill_(0, slots.cpu(), True)
        own = torch.arange(self._size, dtype=self._next.dtype, device="cpu")
        self._next.copy_(torch.where(removed | removed[self._next.to(torch.int64)], own, self._next))
        self._recent.fill_(_NEVER)
        self._set_starts((self.starts.leaves[: self._size] > 0).cpu() & ~removed)
        if not self.lanes.assigned:
            self.lanes.end_all()

    def before_full_overwrite(self) -> None:
        self.remove(torch.arange(self._size, device="cpu"))
        self.lanes.end_all()

    def _set_starts(self, stored: Tensor) -> None:
        """Find all slots where slices may begin, and send the whole state. ``stored``: bool [size], on the CPU."""
        begins = stored & self._firsts if len(self._firsts) else stored.clone()
        slots = torch.arange(self._size, device="cpu")
        for _ in range(0 if self._pad else self._slice_len - 1):
            following = gather_in_bounds(self._next, slots).to(torch.int64)
            begins &= following != slots
            slots = following
        self.starts.leaves[: self._size].copy_(begins)
        self.starts.rebuild_()
        self._send()

    def _send(self) -> None:
        if self._is_copied:
            self._drawn_next.copy_(self._next)
            self._drawn_newest.copy_(self._newest_rows())

    def _newest_rows(self) -> Tensor:
        """What :meth:`newest` reads: the times of the newest rows, the number of rows, and the time of the last row."""
        return torch.cat(
            [self._recent, self._num_rows.unsqueeze(1), self._newest_time.expand_as(self._num_rows).unsqueeze(1)], 1
        )

    # --- draws

    def require_start(self) -> None:
        """Raise RuntimeError if no slice can begin. Not usable in graphs."""
        raise_if(
            lambda: self.starts.total() == 0,
            lambda: RuntimeError(
                f"{OWNER}(slice_len={self._slice_len}): no slice can begin. With pad=False, no stored episode has "
                f"{self._slice_len} consecutive steps; wait for longer episodes, or pass a smaller slice_len=, or "
                "pad=True. With starts='episode', no first step of such an episode is stored; use a larger buffer."
            ),
            # on an accelerator only until there is a start for the first time
            skip_on=self._slots.layout.skip_checks_on if self._had_starts else None,
        )
        self._had_starts = True

    def walk(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of slices from ``starts`` [n], and whether they belong to them.

        Returns:
            Slots, int64 [n, slice_len], where the last slot of an episode is repeated; and the mask,
            bool [n, slice_len], all False where no slice may begin.
        """
        slots = starts.new_empty(starts.shape[0], self._slice_len)
        mask = torch.empty_like(slots, dtype=torch.bool)
        slices_walk(starts.contiguous(), self._drawn_next, self.starts.leaves, slots, mask)
        return slots, mask

    def episode(self, slot: int) -> Tensor:
        """The slots of the stored transitions of an episode, int64 [n], in time order; ``slot``: one of them. O(N)."""
        following, before = self._next.numpy(), np.arange(self._size)
        (followed,) = (following != before).nonzero()
        before[following[followed]] = followed
        while before[slot] != slot:
            slot = before[slot]
        slots = [slot]
        while following[slots[-1]] != slots[-1]:
            slots.append(following[slots[-1]])
        return torch.tensor(np.array(slots, np.int64), device=self._device)

    def newest(self) -> tuple[Tensor, Tensor]:
        """The newest transitions of each lane in time order, across episodes.

        Returns:
            Slots, int64 [lanes, slice_len], the last one repeated, and the mask, bool [lanes, slice_len], False where a
            lane has fewer transitions. A lane without transitions repeats the newest one of all lanes, or is left out
            in eager code if the number of streams was not passed.
        """
        newest = self._drawn_newest if self._is_copied else self._newest_rows()
        recent, rows, time = newest.split((self._slice_len, 1, 1), 1)
        count = (time - recent < self._size).sum(1, keepdim=True)
        step = torch.arange(self._slice_len, device=self._device)
        column = (rows - count + step.minimum(count - 1)) % self._slice_len
        times = where_int64(count > 0, recent.gather(1, column), time)
        slots, mask = times % self._size, step < count
        if self._reader.is_fixed or not self.lanes.assigned or is_traced():
            return slots, mask
        return slots[mask[:, 0]], mask[mask[:, 0]]

    def is_followed(self, slots: Tensor) -> Tensor:
        """True where the next column of ``slots`` [n, k] is the successor, bool [n, k - 1]."""
        before, after = slots[:, :-1].reshape(-1), slots[:, 1:].reshape(-1)
        return ((gather_in_bounds(self._drawn_next, before) == after) & (before != after)).view(slots.shape[0], -1)

    # --- state

    def clear(self) -> None:
        self._next.copy_(torch.arange(self._size, device="cpu"))
        self._newest_time.fill_(-1)
        self._recent.fill_(_NEVER)
        for counter in (self._num_rows, self._episode_len, self._firsts):
            counter.zero_()
        self.starts.clear_()
        self._send()
        self.lanes.clear_()
        self._had_starts = False

    def tensors(self) -> dict[str, Tensor]:
        lanes = {"recent": self._recent, "rows": self._num_rows, "run": self._episode_len, **self.lanes.tensors()}
        tensors = {"next": self._next, "time": self._newest_time, **lanes}
        if len(self._firsts):
            tensors["firsts"] = self._firsts
        return {f"slices_{name}": tensor for name, tensor in tensors.items()}

    def rebuild(self) -> None:
        self._set_starts((self._slots.generation > 0).cpu())
        # a resumed run begins new episodes
        self.lanes.end_all()

    def stats(self) -> dict[str, Tensor]:
        """``num_items``, ``num_starts`` and ``interrupted``; see TrajectoryRetraceSampler."""
        return {
            "num_items": (self._slots.generation > 0).sum(),
            "num_starts": self.starts.leaves.sum(),
            "interrupted": self.lanes.interrupted.sum(),
        }
