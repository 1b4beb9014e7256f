"""The kernels of episodes for CUDA; see :mod:`torchrl_replay_ext.kernels.episodes`. One program does all rows.

Writes go row by row: each step may read what the step before has stored, so barriers separate them. The largest totals
are recomputed at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.lanes import assign
from torchrl_replay_ext.kernels.cuda.launch import add, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import Tree, mass_of, put, refresh, tree_of
from torchrl_replay_ext.kernels.episodes import Memory
from torchrl_replay_ext.kernels.tree_layout import PAGE_BITS

_PAGE_BITS, _LAST_OF_PAGE = tl.constexpr(PAGE_BITS), tl.constexpr((1 << PAGE_BITS) - 1)


class Episodes(NamedTuple):
    """The state of an ``EpisodeIndex`` as one argument of a kernel; see :func:`episodes_of`."""

    # the sums and the largest entries of the totals of all records
    totals: Tree
    tree: Tree
    num_slots: int
    position_of: Tensor
    num_lanes: int
    span: int
    lane_total: Tensor
    episode: Tensor
    start_of: Tensor
    is_finished: Tensor
    updated_at: Tensor
    # of draws only
    least_largest: int = 0
    generation: Any = None


def episodes_of(leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, *arrays: Any) -> Episodes:
    """The argument of a kernel, from the arguments of a loop with or without ``least_largest`` and ``generation``."""
    episode, start_of, _, _, totals, maxima = arrays[4:10]
    trees = tree_of(totals, maxima, None, len(start_of)), tree_of(leaves, nodes, some(pages), capacity)
    return Episodes(*trees, len(episode), *arrays[:8], *arrays[10:])


@jit
def _none(episodes):
    """The record of empty slots."""
    return tl.cast(episodes.totals.capacity, tl.int64) - 1


@jit
def _take(free, num_free):
    """Take one of the free ids; ``num_free`` is the length of ``free`` without the last element."""
    tl.debug_barrier()
    left = within(tl.load(free + num_free) - 1, tl.maximum(num_free, 1))
    number = tl.load(free + left).to(tl.int64)
    tl.debug_barrier()
    tl.store(free + num_free, left)
    return number


@jit
def _give_back(free, num_free, number):
    tl.debug_barrier()
    place = within(tl.load(free + num_free), tl.maximum(num_free, 1))
    tl.debug_barrier()
    tl.store(free + place, within(number, num_free + 1))
    tl.store(free + num_free, place + 1)


@jit
def position_of(episodes, slot):
    """The position, perhaps out of range, of a slot in range."""
    position = slot % episodes.num_lanes * episodes.span + slot // episodes.num_lanes
    if episodes.tree.pages is not None:
        position = tl.load(episodes.position_of + slot).to(tl.int64)
    return position


@jit
def _find(episodes, slot):
    """The record of ``slot``, that of empty slots if it is out of range; its position and its lane, in range."""
    record = tl.load(episodes.episode + slot).to(tl.int64)
    record = tl.where(record >= 0, tl.minimum(record, _none(episodes)), _none(episodes))
    position = within(position_of(episodes, slot), episodes.tree.capacity)
    return record, position, within(position // episodes.span, episodes.num_lanes)


@jit
def _add_to(episodes, record, lane, change, mask=None):
    add(episodes.totals.leaves + record, change, mask)
    add(episodes.lane_total + lane, change, mask)


@jit
def _remove(episodes, memory, slot):
    """Remove the transition in ``slot``, and return its record."""
    tl.debug_barrier()
    none, span = _none(episodes), episodes.span
    record, position, lane = _find(episodes, slot)
    if record < none:
        _add_to(episodes, record, lane, put(episodes.tree, position, 0))
        left = tl.load(memory.count + record) - 1
        tl.debug_barrier()
        tl.store(memory.count + record, left)
        tl.store(episodes.start_of + record, lane * span + (position - lane * span + 1) % span)
        tl.store(episodes.episode + slot, none)
        if episodes.tree.pages is not None:
            tl.store(episodes.position_of + slot, tl.cast(episodes.num_lanes, tl.int64) * span)
            if (position & _LAST_OF_PAGE) == _LAST_OF_PAGE:
                page, no_page = episodes.tree.pages + (position >> _PAGE_BITS), episodes.tree.num_pages - 1
                _give_back(memory.free_pages, no_page, tl.load(page))
                tl.store(page, no_page)
        if (left == 0) & (tl.load(memory.lane_episode + lane) != record):
            _give_back(memory.free_records, none, record)
        tl.debug_barrier()
    return record


@jit
def _stop(episodes, memory, lane):
    tl.debug_barrier()
    none = _none(episodes)
    record = within(tl.load(memory.lane_episode + lane), none + 1)
    is_empty = (record < none) & (tl.load(memory.count + record) == 0)
    tl.debug_barrier()
    tl.store(memory.lane_episode + lane, none)
    if is_empty:
        _give_back(memory.free_records, none, record)


@jit
def _write(
    memory, episodes, slots, lane_of, begins, ended, finished, d, number, records, count, num_rows: tl.constexpr
):
    none, span = _none(episodes), episodes.span
    new, now = mass_of(tl.load(d)), tl.load(number) + 1
    for row in range(count):
        slot, lane = tl.load(slots + row), tl.load(lane_of + row)
        if (slot >= 0) & (slot < episodes.num_slots) & (lane >= 0) & (lane < episodes.num_lanes):
            tl.store(records + 2 * row, _remove(episodes, memory, slot))
            if episodes.tree.pages is not None:
                offset = tl.load(memory.lane_next + lane) % span
                tl.debug_barrier()
                tl.store(memory.lane_next + lane, offset + 1)
                tl.store(episodes.position_of + slot, lane * span + offset)
                if (offset & _LAST_OF_PAGE) == 0:
                    page = _take(memory.free_pages, episodes.tree.num_pages - 1)
                    tl.store(episodes.tree.pages + ((lane * span + offset) >> _PAGE_BITS), page)
                tl.debug_barrier()
            _, position, _ = _find(episodes, slot)
            if tl.load(begins + row) != 0:
                _stop(episodes, memory, lane)
                record = within(_take(memory.free_records, none), none)
                tl.store(memory.lane_episode + lane, record)
                tl.store(episodes.start_of + record, position)
                tl.store(memory.count + record, 0)
                tl.store(episodes.totals.leaves + record, 0)
                tl.store(episodes.updated_at + record, 0)
                tl.store(episodes.is_finished + record, False)
                tl.debug_barrier()
            record = within(tl.load(memory.lane_episode + lane), none)
            put(episodes.tree, position, new)
            _add_to(episodes, record, lane, new)
            add(memory.count + record, 1)
            tl.store(episodes.episode + slot, record)
            tl.store(records + 2 * row + 1, record)
            if tl.load(ended + row) != 0:
                tl.store(episodes.is_finished + record, tl.load(finished + row) != 0)
                tl.store(episodes.updated_at + record, now)
                tl.store(memory.lane_episode + lane, none)
    tl.debug_barrier()
    refresh(episodes.totals, episodes.totals.nodes, records, 2 * count, False, num_rows)


@jit
def _remove_all(memory, episodes, slots, records, stops, count, num_rows: tl.constexpr):
    for row in range(count):
        slot = tl.load(slots + row)
        if (slot >= 0) & (slot < episodes.num_slots):
            tl.store(records + row, _remove(episodes, memory, slot))
    if stops:
        for lane in range(episodes.num_lanes):
            _stop(episodes, memory, lane)
    tl.debug_barrier()
    refresh(episodes.totals, episodes.totals.nodes, records, count, False, num_rows)


@jit
def _update(episodes, slots, d, number, records, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    """All rows at once: for distinct slots, exchanges and sums give the same result in any order."""
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        in_range = (slot >= 0) & (slot < episodes.num_slots)
        record, position, lane = _find(episodes, tl.where(in_range, slot, 0))
        mask = in_range & (record < _none(episodes))
        tl.store(records + rows, tl.where(mask, record, -1), mask=rows < count)
        new = mass_of(tl.load(d + (0 if is_one else 1) * rows, mask=mask, other=0.0))
        _add_to(episodes, record, lane, put(episodes.tree, position, new, mask), mask)
        if number is not None:
            tl.store(episodes.updated_at + record, tl.load(number), mask=mask)
    tl.debug_barrier()
    refresh(episodes.totals, episodes.totals.nodes, records, count, False, 64 if num_rows > 64 else num_rows)


def write(*arguments: Any) -> None:
    """See the loop of the same name."""
    slots, ended, (finished, d, num_writes) = arguments[3], arguments[5], arguments[9:12]
    state = Memory(*arguments[12:17]), episodes_of(*arguments[17:])
    rows = slots, *assign(*arguments[:9]), ended, finished, d, num_writes
    # the records that have changed
    records = slots.new_full((2 * len(slots),), -1)
    in_one_block(_write, 16, len(slots), *state, *rows, records, num_warps=1)


def remove(slots, stops, *state):
    """See the loop of the same name."""
    records = torch.full_like(slots, -1)
    state = Memory(*state[:5]), episodes_of(*state[5:])
    in_one_block(_remove_all, 16, len(slots), *state, slots, records, stops, num_warps=1)


def update(slots, d, number, *episodes):
    """See the loop of the same name."""
    rows = slots, d, some(number), torch.empty_like(slots)
    in_one_block(_update, 256, len(slots), episodes_of(*episodes), *rows, is_one=len(d) == 1, num_warps=8)
