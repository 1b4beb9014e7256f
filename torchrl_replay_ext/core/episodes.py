"""Index of the episodes in a ring buffer: the sum of the priorities of each episode, and prefix sums along it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.lanes import EpisodeMarks, Lanes
from torchrl_replay_ext.core.layout import check_counts
from torchrl_replay_ext.core.sum_tree import MaxTree, SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.core.write_observer import WriteObserver
from torchrl_replay_ext.kernels.ops import Views, episodes_remove, episodes_update, episodes_write, reaper_reliability

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import EpisodeReader, RowView

_PAGE = SumTree.PAGE


def _free_ids(size: int, device: torch.device | str | None) -> Tensor:
    """The ids 0..size-1 as a stack of free ids, whose last element is their number."""
    return torch.arange(size + 1, device=device).to(torch.int32 if size < 2**31 else torch.int64)


def _is_free(ids: Tensor) -> Tensor:
    """True for each free id, bool [size]; AssertionError if an id is in the stack twice."""
    check_counts("EpisodeIndex", ids[-1])
    times = _times(ids[: int(ids[-1])], len(ids) - 1)
    if int(times.max()) > 1:
        raise AssertionError("EpisodeIndex: a free id is in the stack twice")
    return times > 0


def _times(ids: Tensor, size: int) -> Tensor:
    """How often each of the ids 0..size-1 occurs, int64 [size]; IndexError for other ids."""
    ids = ids.to(torch.int64)
    return torch.zeros(size, dtype=torch.int64, device=ids.device).index_add_(0, ids, torch.ones_like(ids))


class EpisodeIndex(WriteObserver):
    """The episodes in a ring buffer, and prefix sums of a mass, the priority d, along each episode.

    Each lane holds the transitions of one stream of experience in time order. An episode is a run of consecutive
    positions in its lane, cyclic if the ring has wrapped. One sum tree over all positions gives the prefix sum of any
    transition in O(log N), whatever the length of the episode. Overwritten transitions are removed from the sums, so an
    episode loses its oldest transitions first. Layouts:

    * Fixed lanes: slot t·lanes + e is step t of lane e. One environment in flat storage is a single lane.
    * Assigned lanes, for several environments in one flat storage: the trajectory id determines the lane of a
      transition. Lanes take pages from a common pool and return them, so a lane may have any length.

    All shapes are static, and no operation reads from an accelerator, except with ``validate``.

    Args:
        log: the generations of the slots.
        reader: reads the ends of episodes.
    """

    needs_order = True
    # lower limit of the largest total in :meth:`reliability`: the largest total of other shards
    least_largest = 0

    def __init__(self, log: WriteLog, reader: EpisodeReader):
        self._log, self._reader = log, reader
        steps, size, device = log.layout.steps, log.layout.size, log.layout.device
        self.lanes = Lanes(log.layout, reader.num_streams)
        num_lanes, assigned = self.lanes.num_lanes, self.lanes.assigned
        self._device, self._span, num_pages = device, steps, None
        if assigned:
            blocks = -(-steps // _PAGE) + 2
            self._span = blocks * _PAGE
            num_pages = -(-steps // _PAGE) + 2 * num_lanes
        self._pages = _free_ids(num_pages or 0, device)
        positions = num_lanes * self._span
        # the tree of the masses; unwritten slots point to the last block, which never has a page
        self._tree = SumTree(positions + (_PAGE if assigned else 0), num_pages=num_pages, device=device)

        def full(count: int, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        narrow = torch.int32 if positions < 2**31 else torch.int64
        # the position of each slot; empty if it follows from the slot
        self._position = full(size if assigned else 0, positions, narrow)
        # One record per episode. The extra record at the end is that of empty slots; its total stays 0.
        records = size + num_lanes
        self._none = records
        # the record of each slot
        self._episode = full(size, records, narrow)
        # of each record: the sum of its masses, the position of its first transition, and the number of transitions
        self._episode_sums = MaxTree(records + 1, device=device)
        self._start = full(records + 1, 0, narrow)
        self._count = full(records + 1, 0, narrow)
        # the number of writes when the episode was last updated or ended; transitions written later are new
        self._updated_at = full(records + 1, 0)
        self._finished = full(records + 1, 0, torch.bool)
        self._records = _free_ids(records, device)
        # per lane: its unfinished episode (the extra record if there is none), sum, and offset of its next transition
        self._lane_episode = full(num_lanes, records)
        self._lane_total = full(num_lanes, 0)
        self._lane_next = full(num_lanes, 0)
        # the arguments ``memory`` and ``arrays`` of kernels.episodes
        self._memory = Views(self._lane_episode, self._lane_next, self._count, self._records, self._pages)
        self._sums = Views(
            *(self._tree.leaves, self._tree.nodes, self._tree.pages, self._tree.capacity),
            *(self._position, num_lanes, self._span, self._lane_total),
            *(self._episode, self._start, self._finished, self._updated_at),
            *(self._episode_sums.leaves, self._episode_sums.nodes),
        )

    def largest_total(self) -> int:
        """The largest sum of the masses of an episode."""
        return int(self._episode_sums.max())

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        """Insert the rows of a write, or the new priorities of rows that were changed in place."""
        marks = self._reader.read(rows, needs_ids=self.lanes.assigned)
        finished = self._reader.finished(rows, marks.ended)
        if rows.is_rewrite:
            # the position of the transition in its episode does not change
            self.update(slots, priority, stays_new=True)
        else:
            self.write(slots, priority, marks, finished)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], the oldest first.

        In fixed lanes, unfinished episodes do not continue afterwards. In assigned lanes, the trajectory id decides.
        """
        self._remove(slots, stops=not self.lanes.assigned)

    def _remove(self, slots: Tensor, *, stops: bool) -> None:
        """Remove ``slots`` [n]. ``stops``: end all unfinished episodes; for reliability they stay unfinished."""
        episodes_remove(slots.contiguous(), stops, *self._memory(), *self._sums())
        if stops:
            self.lanes.end_all()

    def before_full_overwrite(self) -> None:
        """Remove all content and end all episodes before a write of more rows than slots."""
        self._clear_content()
        self.lanes.end_all()

    def write(self, slots: Tensor, d: Tensor, marks: EpisodeMarks, finished: Array) -> None:
        """Insert new transitions, in the order of writing. They replace the content of their slots.

        Args:
            slots: int64 [n], distinct.
            d: the priority of each new transition, float64 [1]; its mass is that of :meth:`SumTree.to_mass`.
            marks: the ends and beginnings of episodes, and the trajectory ids.
            finished: bool [n]; where an episode ends, whether reliability treats it as finished.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        rows = finished, d, self._log.num_writes
        self.lanes.write(episodes_write, slots, marks, *rows, *self._memory(), *self._sums())

    def update(self, slots: Tensor, d: Tensor, *, stays_new: bool = False) -> None:
        """Set the masses of ``slots`` [n]. Slots that are out of range or empty are skipped.

        Args:
            slots: int64 [n]. Of duplicates the last one wins.
            d: their priorities, float [n], or [1] for all slots; see :meth:`SumTree.to_mass`.
            stays_new: if False (default), the transitions of the updated episodes are no longer new.
        """
        number = slots[:0] if stays_new else self._log.num_writes
        episodes_update(slots.contiguous(), d, number, *self._sums())

    def arrays(self) -> list[Any]:
        """The arguments ``episodes`` of :mod:`torchrl_replay_ext.kernels.reaper`."""
        return [*self._sums(), self.least_largest, self._log.views()[0]]

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
        return self._tree.max_supported_priority

    def stats(self) -> dict[str, Tensor]:
        """``reliability_mean`` of the stored transitions, 1 if there are none; and ``interrupted`` episodes."""
        slots = self._log.stored_slots()
        mean = self.reliability(slots).mean() if slots.numel() else torch.ones((), dtype=torch.float64)
        return {"reliability_mean": mean, "interrupted": self.lanes.interrupted.sum()}

    def tensors(self) -> dict[str, Tensor]:
        """The state by name; :meth:`rebuild` recomputes derived state."""
        state = {
            "masses": self._tree.leaves,
            "episode": self._episode,
            "totals": self._episode_sums.leaves,
            "start": self._start,
            "count": self._count,
            "updated_at": self._updated_at,
            "finished": self._finished,
            "records": self._records,
            "lane_episode": self._lane_episode,
            "lane_total": self._lane_total,
            "lane_next": self._lane_next,
            **self.lanes.tensors(),
        }
        if self.lanes.assigned:
            state |= {"position": self._position, "page_table": self._tree.pages, "pages": self._pages}
        return {f"episodes_{name}": tensor for name, tensor in state.items()}

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of all writes by ``last``."""
        self._updated_at.add_(last * (self._updated_at > 0))

    def rebuild(self) -> None:
        """Recompute the trees after their leaves were overwritten, and end episodes that do not continue."""
        self._tree.rebuild_()
        self._episode_sums.rebuild_()
        if self._reader.on_load == "truncate":
            self._remove(self._records.new_empty(0, dtype=torch.int64), stops=True)

    def clear(self) -> None:
        """Remove all content, and forget all trajectories."""
        self._clear_content()
        self.lanes.clear_()

    def _clear_content(self) -> None:
        self._tree.clear_()
        self._tree.pages.fill_(len(self._pages) - 1)
        self._position.fill_(self.lanes.num_lanes * self._span)
        zeros = [self._episode_sums.leaves, self._start, self._count, self._updated_at, self._finished]
        for field in (*zeros, self._lane_total, self._lane_next):
            field.zero_()
        for field in (self._episode, self._lane_episode):
            field.fill_(self._none)
        for free in (self._records, self._pages):
            free.copy_(torch.arange(len(free), device=self._device))
        self._episode_sums.rebuild_()

    def check_valid(self) -> None:
        """Raise AssertionError if sums, counts, records, positions or pages contradict each other. O(size)."""
        self._tree.check_valid()
        self._episode_sums.check_valid()
        self.lanes.check_valid()
        check_counts("EpisodeIndex", self._lane_next, self._updated_at)
        if bool((self._updated_at > self._log.num_writes).any()):
            raise AssertionError("EpisodeIndex: an episode was updated after the last write")
        # from the slot after the last write on, the slots of the ring are in time order
        layout, num_lanes, span = self._log.layout, self.lanes.num_lanes, self._span
        slots = layout.slots_from((int(self._log.last_seen_step) + 1) % layout.steps, layout.size)
        is_held = self._episode[slots] != self._none
        if not torch.equal(is_held, self._log.generation[slots] > 0):
            raise AssertionError("EpisodeIndex: an empty slot is in an episode, or a stored transition is in none")
        slots = slots[is_held]
        record, position = self._episode[slots].to(torch.int64), slots % num_lanes * span + slots // num_lanes
        if self.lanes.assigned:
            position = self._position[slots].to(torch.int64)
        count = _times(record, self._none + 1)
        if not torch.equal(count[:-1], self._count[:-1].to(torch.int64)):
            raise AssertionError("EpisodeIndex: the number of transitions of an episode is wrong")
        # of each transition, the number of earlier ones in its episode
        number, order = torch.arange(len(slots), device=self._device), record.argsort(stable=True)
        earlier = torch.empty_like(record).index_copy_(0, order, number - (count.cumsum(0) - count)[record[order]])
        start = self._start[record].to(torch.int64)
        if not torch.equal(position, start // span * span + (start + earlier) % span):
            raise AssertionError("EpisodeIndex: the transitions of an episode are not consecutive")
        if position.unique().numel() != position.numel():
            raise AssertionError("EpisodeIndex: two slots have the same position")
        mass = self._tree.get(position)
        per_record = torch.zeros_like(self._episode_sums.leaves).index_add_(0, record, mass)
        per_lane = torch.zeros_like(self._lane_total).index_add_(0, position // span, mass)
        if not torch.equal(per_record, self._episode_sums.leaves) or not torch.equal(per_lane, self._lane_total):
            raise AssertionError("EpisodeIndex: a sum differs from the sum over its transitions")
        if int(self._tree.total()) != int(mass.sum()):
            raise AssertionError("EpisodeIndex: an empty position has mass")
        going_on = self._lane_episode[self._lane_episode != self._none]
        in_use = (count[:-1] > 0).index_fill(0, going_on, True)
        if not torch.equal(_is_free(self._records), ~in_use):
            raise AssertionError("EpisodeIndex: the free records are wrong")
        if not torch.equal(self._lane_episode != self._none, self.lanes.is_open()):
            raise AssertionError("EpisodeIndex: the lanes with unfinished episodes are wrong")
        # the position after the last transition of each lane
        following = torch.arange(num_lanes, device=self._device) * span + self._lane_next % span
        last = torch.full_like(following, -1).scatter_reduce_(0, position // span, number, "amax")
        lanes = (last >= 0).nonzero().squeeze(1)
        after = lanes * span + (position[last[lanes]] + 1) % span
        if self.lanes.assigned and not torch.equal(following[lanes], after):
            raise AssertionError("EpisodeIndex: the next position of a lane is wrong")
        following[lanes] = after
        start = self._start[going_on].to(torch.int64)
        end = start // span * span + (start + count[going_on]) % span
        if not torch.equal(end, following[self._lane_episode != self._none]):
            raise AssertionError("EpisodeIndex: an unfinished episode is not the last one of its lane")
        if self.lanes.assigned:
            num_pages = len(self._pages) - 1
            held = _times(self._tree.pages, num_pages + 1)[:-1]
            if int(held.max()) > 1 or not torch.equal(_is_free(self._pages), held == 0):
                raise AssertionError("EpisodeIndex: the free pages are wrong")
            in_use = torch.cat([position, following[following % _PAGE != 0]]) // _PAGE
            has_page = torch.zeros_like(self._tree.pages, dtype=torch.bool).index_fill_(0, in_use, True)
            if not torch.equal(self._tree.pages != num_pages, has_page):
                raise AssertionError("EpisodeIndex: the pages do not cover the positions in use")
