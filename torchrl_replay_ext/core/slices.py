"""Index of the slices of episodes in a ring buffer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.core.lanes import EpisodeMarks, Lanes
from torchrl_replay_ext.core.layout import check_counts
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.kernels.ops import Views, slices_walk, slices_write

# a time long before all others
_NEVER = -(2**62)


class SliceIndex:
    """The successor of each transition within its episode, and the slots where slices may begin.

    A ring overwrites the oldest transitions first, so the successor of a stored transition is stored too. The chain of
    successors from any slot contains the later transitions of the episode in time order, up to the last stored one.
    Layouts are those of :class:`~torchrl_replay_ext.core.lanes.Lanes`.

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
        self.size = size = self.lanes.size
        self.length, self._padded = length, padded
        self.device = torch.device(device or "cpu")

        def full(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        # the successor of each slot, or the slot itself if there is none
        self._next = torch.arange(size, device=device).to(torch.int32 if size < 2**31 else torch.int64)
        # Times count slots, so that time t is in slot t % size. The time of the last row, -1 before the first; and the
        # times of the newest rows of each lane: the n-th row of a lane is in column n % length
        self.time, self._recent = full(1, value=-1), full(num_lanes, length, value=_NEVER)
        # per lane: its number of rows, and the number of steps of its unfinished episode
        self._rows, self._run = full(num_lanes), full(num_lanes)
        # mass 1 where a slice may begin
        self.starts = SumTree(size, device=device)
        state = self.time, self._next, self._recent, self._rows, self._run
        self._views = Views(*state, self.starts.leaves, self.starts.nodes, self.starts.pages, size)

    def write(self, slots: Tensor, marks: EpisodeMarks) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        ``slots``, int64 [n], are consecutive in the ring. For the other arguments see
        :meth:`~torchrl_replay_ext.core.lanes.Lanes.write`.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        self.lanes.write(slices_write, slots, marks, self._padded, *self._views())

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest or the newest. Slices do not continue across the removed slots.

        In fixed lanes, unfinished episodes do not continue afterwards. In assigned lanes, the trajectory id decides.
        """
        removed = torch.zeros_like(self._next, dtype=torch.bool).index_fill_(0, slots, True)
        own = torch.arange(self.size, dtype=self._next.dtype, device=self.device)
        self._next.copy_(torch.where(removed | removed[self._next.to(torch.int64)], own, self._next))
        self.rebuild_((self.starts.leaves[: self.size] > 0) & ~removed)
        self._recent.fill_(_NEVER)
        if not self.lanes.assigned:
            self.lanes.end_all()

    def before_full_overwrite(self) -> None:
        """Remove all content and end all episodes before a write of more rows than slots; see :meth:`remove`."""
        self.remove(torch.arange(self.size, device=self.device))
        self.lanes.end_all()

    def walk(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The slots of slices from ``starts`` [n], and whether they belong to them.

        Returns:
            Slots, int64 [n, length], where the last slot of an episode is repeated; and the mask, bool [n, length],
            all False where no slice may begin.
        """
        slots = starts.new_empty(starts.shape[0], self.length)
        mask = torch.empty_like(slots, dtype=torch.bool)
        slices_walk(starts.contiguous(), self._next, self.starts.leaves, slots, mask)
        return slots, mask

    def newest(self) -> tuple[Tensor, Tensor]:
        """The newest transitions of each lane in time order, across episodes.

        Returns:
            Slots, int64 [lanes, length], the last one repeated, or slot 0 if there is none; and the number of distinct
            slots per lane, [lanes].
        """
        count = (self.time - self._recent < self.size).sum(1)
        place = torch.arange(self.length, device=self.device).minimum((count - 1).unsqueeze(1))
        place = ((self._rows - count).unsqueeze(1) + place) % self.length
        return self._recent.gather(1, place) % self.size * (count > 0).unsqueeze(1), count

    def is_followed(self, slots: Tensor) -> Tensor:
        """True where the next column of ``slots`` [n, k] is the successor, bool [n, k - 1]."""
        before, after = slots[:, :-1].reshape(-1), slots[:, 1:].reshape(-1)
        return ((gather_in_bounds(self._next, before) == after) & (before != after)).view(slots.shape[0], -1)

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`rebuild_` recomputes derived state."""
        lanes = {"recent": self._recent, "rows": self._rows, "run": self._run}
        return {"next": self._next, "time": self.time, **lanes, **self.lanes.tensors()}

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
        self.lanes.check_valid()
        check_counts("SliceIndex", self.time + 1, self._rows, self._run)
        starts = self.starts.leaves.clone()
        expected = copy.deepcopy(self)
        expected.rebuild_(stored)
        if not torch.equal(starts, expected.starts.leaves):
            raise AssertionError("SliceIndex: the starts of slices are wrong")
        slots = torch.arange(self.size, device=self.device)
        following = self._next.to(torch.int64)
        followed = following != slots
        if not bool(stored[following[followed]].all() and stored[followed].all()):
            raise AssertionError("SliceIndex: an empty slot has a successor or is one")
        if int(following[followed].bincount(minlength=1).max()) > 1:
            raise AssertionError("SliceIndex: a transition is the successor of two others")
        age = (self.time - slots) % self.size
        if not bool((age[following] < age)[followed].all()):
            raise AssertionError("SliceIndex: a successor was written before its predecessor")
        # the newest rows of each lane, the oldest first; those that are still stored follow one another
        order = (self._rows.unsqueeze(1) + torch.arange(self.length, device=self.device)) % self.length
        times = self._recent.gather(1, order)
        is_live = (self.time - times >= 0) & (self.time - times < self.size)
        rows, successor = times % self.size, following[times % self.size]
        goes_on, both = successor[:, :-1] == rows[:, 1:], is_live[:, :-1] & is_live[:, 1:]
        in_run = self._run.unsqueeze(1) >= torch.arange(self.length, 1, -1, device=self.device)
        is_right = goes_on | (~in_run & (successor[:, :-1] == rows[:, :-1]))
        is_right &= times[:, 1:] > times[:, :-1]
        is_last = (successor == rows)[:, -1] & stored[rows[:, -1]]
        if not bool((is_right | ~both).all() & (is_last | ~is_live[:, -1]).all() & (times <= self.time).all()):
            raise AssertionError("SliceIndex: the newest transitions of a lane do not follow one another")

    def clear_(self) -> None:
        """Remove all content."""
        self._next.copy_(torch.arange(self.size, device=self.device))
        self.time.fill_(-1)
        self._recent.fill_(_NEVER)
        for counter in (self._rows, self._run):
            counter.zero_()
        self.starts.clear_()
        self.lanes.clear_()
