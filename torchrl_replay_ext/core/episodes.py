"""The episodes in a ring buffer, for ReaPER: the sum of the priorities of each, and prefix sums along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, to_device
from torchrl_replay_ext.core.slots import Slots, WriteObserver
from torchrl_replay_ext.core.streams import EpisodeMarks, Lanes
from torchrl_replay_ext.core.sum_tree import MaxTree, SumTree
from torchrl_replay_ext.kernels.ops import (
    Views,
    episodes_apply,
    episodes_remove,
    episodes_update,
    episodes_write,
    reaper_reliability,
)

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import EpisodeReader, RowView

_PAGE = SumTree.PAGE


def _free_ids(size: int) -> Tensor:
    """The ids 0..size-1 as a stack of free ids, whose last element is their number."""
    return torch.arange(size + 1, device="cpu").to(torch.int32 if size < 2**31 else torch.int64)


class EpisodeIndex(WriteObserver):
    """The episodes in a ring buffer, and prefix sums of a mass, the priority d, along each episode.

    Each lane holds the transitions of one stream of experience in time order. An episode is a run of consecutive
    positions in its lane, cyclic if the ring has wrapped. One sum tree over all positions gives the prefix sum of any
    transition in O(log N), whatever the length of the episode. Overwritten transitions are removed from the sums, so an
    episode loses its oldest transitions first. Layouts:

    * Fixed lanes: slot t·lanes + e is step t of lane e. One environment in flat storage is a single lane.
    * Assigned lanes, for several environments in one flat storage: the trajectory id determines the lane of a
      transition. Lanes take pages from a common pool and return them, so a lane may have any length.

    The episode and the position of a transition are decided on the CPU. Masses and what follows from them are on the
    device of the storage. If it is an accelerator, it has copies of what draws and updates read, to which changes are
    sent without waiting. All shapes are static.

    Args:
        slots: the generations of the slots, and the priority of new transitions.
        reader: reads the ends of episodes.
    """

    needs_order = True
    # lower limit of the largest total in :meth:`reliability`: the largest total of other shards
    least_largest = 0

    def __init__(self, slots: Slots, reader: EpisodeReader):
        self._slots, self._reader, layout = slots, reader, slots.layout
        steps, size, device = layout.steps, layout.size, layout.device
        self.lanes = Lanes(layout, reader.num_streams)
        num_lanes, assigned = self.lanes.num_lanes, self.lanes.assigned
        self._span, num_pages, self._is_copied = steps, None, device.type != "cpu"
        if assigned:
            blocks = -(-steps // _PAGE) + 2
            self._span = blocks * _PAGE
            num_pages = -(-steps // _PAGE) + 2 * num_lanes
        self._free_pages = _free_ids(num_pages or 0)
        positions = num_lanes * self._span
        # the tree of the masses; unwritten slots point to the last block, which never has a page
        self._prefix_tree = SumTree(positions + (_PAGE if assigned else 0), num_pages=num_pages, device=device)

        def full(count: int, value: int, dtype: torch.dtype = torch.int64, where: Any = "cpu") -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=where)

        narrow = torch.int32 if positions < 2**31 else torch.int64
        # the position of each slot; empty if it follows from the slot
        self._position_of = full(size if assigned else 0, positions, narrow)
        # One record per episode. The extra record at the end is that of empty slots; its total stays 0.
        records = size + num_lanes
        self._none = records
        # the record of each slot
        self._episode = full(size, records, narrow)
        # of each record: the sum of its masses, the position of its first transition, and the number of transitions
        self._totals = MaxTree(records + 1, device=device)
        self._start_of = full(records + 1, 0, narrow)
        self._count = full(records + 1, 0, narrow)
        # the number of writes when the episode was last updated or ended; transitions written later are new
        self._updated_at = full(records + 1, 0, where=device)
        self._is_finished = full(records + 1, 0, torch.bool, device)
        self._free_records = _free_ids(records)
        # per lane: its unfinished episode (the extra record if there is none), sum, and offset of its next transition
        self._lane_episode = full(num_lanes, records)
        self._lane_total = full(num_lanes, 0, where=device)
        self._lane_next = full(num_lanes, 0)
        # what was decided on the CPU, and what draws and updates read on their device: on the CPU the same tensors
        self._pages = self._prefix_tree.pages.cpu()
        self._decided = self._position_of, self._episode, self._start_of, self._pages
        self._read = *(to_device(each, device) for each in self._decided[:3]), self._prefix_tree.pages
        # the arguments ``memory`` and ``arrays`` of kernels.episodes
        memory = self._lane_episode, self._lane_next, self._count, self._free_records, self._free_pages
        # the first one stands for no changes
        self._memory = Views(torch.empty(5, 0, dtype=torch.int64, device="cpu"), *memory)
        tree, totals = self._prefix_tree, self._totals
        of_lanes_and_records = self._lane_total, self._is_finished, self._updated_at
        on_device = tree.leaves, tree.nodes, *of_lanes_and_records, totals.leaves, totals.nodes
        self._sums = self._arguments(self._read, on_device)
        nothing = [torch.empty(0, dtype=each.dtype, device="cpu") for each in on_device]
        self._sums_on_host = self._arguments(self._decided, nothing)
        # a priority and a number of writes, where the loop on the CPU needs none
        self._unused = torch.zeros(1, dtype=torch.float64, device="cpu"), full(1, 0)

    def _arguments(self, decided: Sequence[Tensor], on_device: Sequence[Tensor]) -> Views:
        """The argument ``arrays`` of kernels."""
        position, episode, start, pages = decided
        leaves, nodes, lane_total, finished, updated_at, *totals = on_device
        lanes = position, self.lanes.num_lanes, self._span, lane_total
        return Views(
            leaves, nodes, pages, self._prefix_tree.capacity, *lanes, episode, start, finished, updated_at, *totals
        )

    def largest_total(self) -> int:
        """The largest sum of the masses of an episode."""
        return int(self._totals.max())

    def write(self, slots: Tensor, rows: RowView) -> None:
        """Take in the rows of a write, or the new priorities of rows that were changed in place."""
        marks = self._reader.read(rows, needs_ids=self.lanes.assigned)
        finished = self._reader.finished(rows, marks.ended)
        if rows.is_rewrite:
            # the position of the transition in its episode does not change
            self.update(slots, self._slots.largest, stays_new=True)
        else:
            self.append(rows.slots_on_host, self._slots.largest, marks, finished)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest first.

        In fixed lanes, unfinished episodes do not continue afterwards. In assigned lanes, the trajectory id decides.
        """
        self._remove(slots, stops=not self.lanes.assigned)

    def _remove(self, slots: Tensor, *, stops: bool) -> None:
        """Remove ``slots`` [n]. ``stops``: end all unfinished episodes; for reliability they stay unfinished."""
        if not self._is_copied:
            episodes_remove(slots.contiguous(), stops, *self._memory(), *self._sums())
        else:
            changes = torch.empty(5, len(slots), dtype=torch.int64, device="cpu")
            episodes_remove(slots.cpu(), stops, changes, *self._memory()[1:], *self._sums_on_host())
            self._send_changes(changes, len(slots), self._slots.largest)
        if stops:
            self.lanes.end_all()

    def _send_changes(self, changes: Tensor, num_removed: int, d: Tensor) -> None:
        """Make the changes on an accelerator."""
        if changes.shape[1]:
            sent = to_device(changes, d.device)
            episodes_apply(sent, num_removed, d, self._slots.num_writes, *self._sums())

    def _send(self) -> None:
        """Send all that was decided to an accelerator."""
        for own, decided in zip(self._read, self._decided, strict=True):
            own.copy_(decided)

    def before_full_overwrite(self) -> None:
        """Remove all content and end all episodes before a write of more rows than slots."""
        self._clear_content()
        self.lanes.end_all()

    def append(self, slots: Tensor, d: Tensor, marks: EpisodeMarks, finished: Array) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        Args:
            slots: int64 [n], distinct, on the CPU.
            d: the priority of each new transition, float64 [1]; its mass is that of :meth:`SumTree.to_mass`.
            marks: the ends and beginnings of episodes, and the trajectory ids.
            finished: bool [n]; where an episode ends, whether reliability treats it as finished.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        if not self._is_copied:
            rows = finished, d, self._slots.num_writes
            self.lanes.run_write(episodes_write, slots, marks, *rows, *self._memory(), *self._sums())
            return
        changes = torch.empty(5, 2 * len(slots), dtype=torch.int64, device="cpu")
        rows = finished, *self._unused, changes
        self.lanes.run_write(episodes_write, slots, marks, *rows, *self._memory()[1:], *self._sums_on_host())
        self._send_changes(changes, len(slots), d)

    def update(self, slots: Tensor, d: Tensor, *, stays_new: bool = False) -> None:
        """Set the masses of ``slots`` [n]. Slots that are out of range or empty are skipped.

        Args:
            slots: int64 [n]; those in range are distinct.
            d: their priorities, float [n], or [1] for all slots; see :meth:`SumTree.to_mass`.
            stays_new: if False (default), the transitions of the updated episodes are no longer new.
        """
        number = slots[:0] if stays_new else self._slots.num_writes
        episodes_update(slots.contiguous(), d, number, *self._sums())

    def arrays(self) -> list[Any]:
        """The arguments ``episodes`` of :mod:`torchrl_replay_ext.kernels.reaper`."""
        return [*self._sums(), self.least_largest, self._slots.generations()]

    def reliability(self, slots: Tensor) -> Tensor:
        """Reliability R of ``slots`` [n] that hold transitions, in [0, 1]; 1 for new transitions.

        It is the sum of the masses of its episode up to and including the transition, divided by that of the whole
        episode, or by the largest of all episodes if it is not finished (Pleiss et al., Eqs. 16 and 17); 1 if the
        divisor is 0.

        Returns:
            float64 [n].
        """
        result = slots.new_empty(slots.shape[0], dtype=torch.float64)
        reaper_reliability(slots.contiguous(), result, *self.arrays())
        return result

    @property
    def max_supported_priority(self) -> float:
        """The largest mass a transition may have, as a priority."""
        return self._prefix_tree.max_supported_priority

    def stats(self) -> dict[str, Tensor]:
        """``reliability_mean`` of the stored transitions, 1 if there are none; and ``interrupted`` episodes."""
        slots = self._slots.stored()
        mean = self.reliability(slots).mean() if slots.numel() else torch.ones((), dtype=torch.float64)
        return {"reliability_mean": mean, "interrupted": self.lanes.interrupted.sum()}

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`rebuild` recomputes derived state."""
        state = {
            "masses": self._prefix_tree.leaves,
            "episode": self._episode,
            "totals": self._totals.leaves,
            "start": self._start_of,
            "count": self._count,
            "updated_at": self._updated_at,
            "finished": self._is_finished,
            "records": self._free_records,
            "lane_episode": self._lane_episode,
            "lane_total": self._lane_total,
            "lane_next": self._lane_next,
            **self.lanes.tensors(),
        }
        if self.lanes.assigned:
            state |= {"position": self._position_of, "page_table": self._pages, "pages": self._free_pages}
        return {f"episodes_{name}": tensor for name, tensor in state.items()}

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of all writes by ``last``."""
        self._updated_at.add_(last * (self._updated_at > 0))

    def rebuild(self) -> None:
        """Recompute the trees after their leaves were overwritten, and end episodes that do not continue."""
        self._send()
        self._prefix_tree.rebuild_()
        self._totals.rebuild_()
        # a resumed run begins new episodes
        self._remove(self._free_records.new_empty(0, dtype=torch.int64), stops=True)

    def clear(self) -> None:
        """Remove all content, and forget all trajectories."""
        self._clear_content()
        self.lanes.clear_()

    def _clear_content(self) -> None:
        self._prefix_tree.clear_()
        self._pages.fill_(len(self._free_pages) - 1)
        self._position_of.fill_(self.lanes.num_lanes * self._span)
        zeros = [self._totals.leaves, self._start_of, self._count, self._updated_at, self._is_finished]
        for field in (*zeros, self._lane_total, self._lane_next):
            field.zero_()
        for field in (self._episode, self._lane_episode):
            field.fill_(self._none)
        for free in (self._free_records, self._free_pages):
            free.copy_(torch.arange(len(free), device="cpu"))
        self._totals.rebuild_()
        self._send()
