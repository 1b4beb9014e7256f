"""Index of the slices of episodes in a ring buffer."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, scatter_in_bounds, values_can_be_read, where_int64
from torchrl_replay_ext.core.lanes import EpisodeMarks, Lanes, at_last, shifted
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.indices import FEW


class SliceIndex:
    """The successor of each transition within its episode, and the slots where slices may begin.

    A ring overwrites the oldest transitions first, so the successor of a stored transition is stored too. The chain of
    successors from any slot contains the later transitions of the episode in time order, up to the last stored one.
    Layouts are those of :class:`~torchrl_replay_ext.core.lanes.Lanes`. All shapes are static, and no operation reads
    from an accelerator, except with ``validate``.

    Args:
        steps: length of the ring: in slots per lane if lanes are fixed, in slots if they are assigned.
        num_lanes: number of lanes. Default: 1.
        length: steps per slice.
        padded: if True, slices may begin at any transition; if False, only where ``length`` steps are stored.
        assigned: lanes are assigned by trajectory id. Default: False.
        device: device of the tensors. Default: None, the CPU.
        validate: see :class:`~torchrl_replay_ext.core.lanes.Lanes`. Default: False.
    """

    def __init__(
        self,
        steps: int,
        num_lanes: int = 1,
        *,
        length: int,
        padded: bool,
        assigned: bool = False,
        device: torch.device | str | None = None,
        validate: bool = False,
    ):
        self.lanes = Lanes(steps, num_lanes, assigned=assigned, device=device, validate=validate)
        self.size = self._none = size = self.lanes.size
        self.length, self._padded = length, padded
        self.device = torch.device(device or "cpu")
        # the successor of each slot, or the slot itself if there is none; the last element receives masked writes
        narrow = torch.int32 if size < 2**31 - 1 else torch.int64
        self._next = torch.arange(size + 1, device=device).to(narrow)
        # per lane: its newest slots, the newest last; the number of steps of its unfinished episode, at most the
        # length of a slice, 0 if there is none
        self._recent = torch.full((num_lanes, length), size, dtype=torch.int64, device=device)
        self._run = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        # mass 1 where a slice may begin
        self.starts = SumTree(size + 1, device=device)

    def write(
        self,
        slots: Tensor,
        write_number: Tensor | int,
        marks: EpisodeMarks,
    ) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        ``slots``, int64 [n], are consecutive in the ring. For the other arguments see
        :meth:`~torchrl_replay_ext.core.lanes.Lanes.register`.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        is_alone = self.lanes.num_lanes == 1 and not self.lanes.assigned
        if is_alone and slots.shape[0] <= FEW and values_can_be_read(slots):
            self._write_alone(slots.tolist(), int(write_number), marks)
            return
        count, oldest = slots.shape[0], slots[:1]
        write_number = torch.as_tensor(write_number, device=slots.device)
        order, lane, first, new, preempted = self.lanes.register(slots, self._run > 0, write_number, marks)
        slots, ended = slots[order], marks.ended[order]
        recent = where_int64((self._recent - oldest) % self.size < count, self._none, self._recent)
        run = self._run if preempted is None else self._run * ~preempted

        rows = torch.arange(count, device=slots.device)
        rank = rows - where_int64(first, rows, torch.zeros_like(rows)).cummax(0).values
        # number of steps of the row's episode up to the row; the episode may have begun in an earlier write
        age = rows - where_int64(new, rows, torch.full_like(rows, -1)).cummax(0).values
        age = 1 + where_int64(age <= rank, age, run[lane] + rank)
        previous = where_int64(new, self._none, where_int64(first, recent[lane, -1], shifted(slots, 0)))
        scatter_in_bounds(self._next, slots, slots.to(self._next.dtype))
        followed = where_int64(previous == self._none, self._none, slots)
        scatter_in_bounds(self._next, previous, followed.to(self._next.dtype))

        if self._padded:
            self.starts.write(slots, torch.ones_like(slots))
        else:
            back = self.length - 1
            start = where_int64(rank >= back, slots.roll(back), recent[lane, (rank + 1).clamp_max(self.length - 1)])
            enough = (age >= self.length) & (start != self._none)
            mass = torch.cat([torch.zeros_like(slots), enough.to(torch.int64)])
            self.starts.write(
                torch.cat([slots, where_int64(enough, start, self._none + torch.zeros_like(start))]), mass
            )

        written = torch.zeros_like(run).index_add_(0, lane, torch.ones_like(lane)).unsqueeze(1)
        place = torch.arange(self.length, device=slots.device).expand_as(recent)
        row = written.cumsum(0) - self.length + place
        kept = recent.gather(1, (place + written).clamp_max(self.length - 1))
        self._recent.copy_(where_int64(self.length - place <= written, slots[row.clamp(0, count - 1)], kept))
        self._run.copy_(at_last(lane, age.clamp_max(self.length) * ~ended, run))

    def _write_alone(self, slots: list[int], write_number: int, marks: EpisodeMarks) -> None:
        """:meth:`write` of a few rows with a single lane, where values can be read."""
        run, length, none = self._run.item(), self.length, self._none
        begins = self.lanes.register_in_single_lane(run > 0, write_number, marks)
        # the slots before the write, and those of the write
        recent = self._recent.view(-1).tolist()
        history = [none if (slot - slots[0]) % self.size < len(slots) else slot for slot in recent] + slots
        following = self._next.numpy()
        following[slots] = slots
        is_first, starts = set(begins), []
        for row, slot in enumerate(slots):
            run = 1 if row in is_first else run + 1
            if row not in is_first and history[length + row - 1] != none:
                following[history[length + row - 1]] = slot
            if run >= length and history[row + 1] != none:
                starts.append(history[row + 1])
        if self._padded:
            self.starts.write(np.array(slots), 1)
        else:
            self.starts.write(np.array(slots + starts), np.repeat([0, 1], [len(slots), len(starts)]))
        self._recent.copy_(torch.tensor([history[-length:]], device="cpu"))
        self._run.fill_(0 if marks.ended[-1] else min(run, length))

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest. Slices do not continue across the removed slots."""
        self.lanes.mark_ends_missed()
        scatter_in_bounds(self._next, slots, slots.to(self._next.dtype))
        self.starts.write(slots, torch.zeros_like(slots))
        self._recent.fill_(self._none)
        if not self.lanes.assigned:
            self._run.zero_()

    def before_full_overwrite(self) -> None:
        """Remove all content before a write of more rows than slots, whose first rows are not inserted."""
        self.remove(torch.arange(self.size, device=self.device))
        self.lanes.mark_ends_missed(self._run > 0)

    def walk(self, starts: Tensor) -> Tensor:
        """The slots of slices from ``starts`` [n], int64 [n, length]. The last slot of an episode is repeated."""
        slots = [starts]
        for _ in range(self.length - 1):
            slots.append(gather_in_bounds(self._next, slots[-1]))
        return torch.stack([slot.to(torch.int64) for slot in slots], 1)

    def newest(self) -> tuple[Tensor, Tensor]:
        """The newest transitions of each lane in time order, across episodes.

        Returns:
            Slots, int64 [lanes, length], the last one repeated; and the number of distinct slots per lane, [lanes].
        """
        count = (self._recent != self._none).sum(1)
        place = self.length - count.unsqueeze(1) + torch.arange(self.length, device=self.device)
        return self._recent.gather(1, place.clamp_max(self.length - 1)) % self.size, count

    def is_followed(self, slots: Tensor) -> Tensor:
        """True where the next column of ``slots`` [n, k] is the successor, bool [n, k - 1]."""
        before, after = slots[:, :-1].reshape(-1), slots[:, 1:].reshape(-1)
        return ((gather_in_bounds(self._next, before) == after) & (before != after)).view(slots.shape[0], -1)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`rebuild_` recomputes derived state."""
        return {"next": self._next, "recent": self._recent, "run": self._run, **self.lanes.tensors()}

    def rebuild_(self, stored: Tensor) -> None:
        """Recompute where slices may begin. ``stored``: bool [size], the slot holds a transition."""
        begins = stored.clone()
        slots = torch.arange(self.size, device=self.device)
        for _ in range(0 if self._padded else self.length - 1):
            following = gather_in_bounds(self._next, slots).to(torch.int64)
            begins &= following != slots
            slots = following
        self.starts.leaves[: self.size] = begins.to(torch.int64)
        self.starts.rebuild_()

    def check_valid(self, stored: Tensor) -> None:
        """Raise AssertionError if successors and starts contradict each other; ``stored`` as in :meth:`rebuild_`."""
        self.starts.check_valid()
        starts = self.starts.leaves.clone()
        expected = copy.deepcopy(self)
        expected.rebuild_(stored)
        if not torch.equal(starts, expected.starts.leaves):
            raise AssertionError("SliceIndex: the starts of slices are wrong")
        slots = torch.arange(self.size, device=self.device)
        following = self._next[:-1].to(torch.int64)
        followed = following != slots
        if not bool(stored[following[followed]].all() and stored[followed].all()):
            raise AssertionError("SliceIndex: an empty slot has a successor or is one")
        if int(following[followed].bincount(minlength=1).max()) > 1:
            raise AssertionError("SliceIndex: a transition is the successor of two others")

    def clear_(self) -> None:
        """Remove all content."""
        self._next.copy_(torch.arange(self.size + 1, device=self.device))
        self._recent.fill_(self._none)
        self._run.zero_()
        self.starts.clear_()
        self.lanes.clear_()
