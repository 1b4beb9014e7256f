"""The kernels of episodes for CUDA; see :mod:`torchrl_replay_ext.kernels.episodes`. One program does all rows.

Writes go row by row: each step may read what the step before has stored, so barriers separate them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.lanes import assign
from torchrl_replay_ext.kernels.cuda.tree import Tree, add, jit, levels_of, mass_of, place_of, put, refresh, tree_of
from torchrl_replay_ext.kernels.tree_layout import BITS, CHILDREN, PAGE_BITS

_BITS, _CHILDREN = tl.constexpr(BITS), tl.constexpr(CHILDREN)
_PAGE_BITS, _LAST_OF_PAGE = tl.constexpr(PAGE_BITS), tl.constexpr((1 << PAGE_BITS) - 1)


class Episodes(NamedTuple):
    """The state of an ``EpisodeIndex`` as one argument of a kernel; see :func:`episodes_of`."""

    tree: Tree
    position_of: Tensor
    num_lanes: int
    span: int
    lane_total: Tensor
    episode: Tensor
    start_of: Tensor
    is_finished: Tensor
    updated_at: Tensor
    totals: Tensor
    maxima: Tensor
    num_slots: int
    none: int
    num_maxima: int
    levels: Any
    # of draws only
    least_largest: int = 0
    generation: Any = None


class _Memory(NamedTuple):
    """What writes and removals change beside the sums, as one argument of a kernel."""

    lane_episode: Tensor
    lane_next: Tensor
    count: Tensor
    free_records: Tensor
    free_pages: Tensor
    num_free_pages: int


def episodes_of(leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, *arrays: Any) -> Episodes:
    """The argument of a kernel, from the arguments of a loop with or without ``least_largest`` and ``generation``."""
    _, _, _, _, episode, start_of, _, _, _, maxima = arrays[:10]
    sizes = len(episode), len(start_of) - 1, len(maxima), tl.constexpr(levels_of(len(start_of)))
    fields: Any = (tree_of(leaves, nodes, pages, capacity), *arrays[:10], *sizes, *arrays[10:])
    return Episodes(*fields)


def _memory_of(*arrays: Any) -> _Memory:
    fields: Any = (*arrays, len(arrays[-1]) - 1)
    return _Memory(*fields)


@jit
def _refresh_maximum(episodes, record, mask):
    children = tl.arange(0, _CHILDREN)
    node, last, begin = record, tl.cast(episodes.none, tl.int64), tl.cast(episodes.num_maxima, tl.int64)
    below = episodes.totals
    for _ in tl.static_range(episodes.levels):
        tl.debug_barrier()
        node = node >> _BITS
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        largest = tl.max(tl.load(below + node * _CHILDREN + children), axis=0)
        tl.store(episodes.maxima + begin + node, largest, mask=mask)
        below = episodes.maxima + begin


@jit
def _take(free, num_free, mask):
    """Take one of the free ids; ``num_free`` is the length of ``free`` without the last element."""
    tl.debug_barrier()
    left = tl.minimum(tl.maximum(tl.load(free + num_free).to(tl.int64) - 1, 0), tl.maximum(num_free - 1, 0))
    number = tl.load(free + left).to(tl.int64)
    tl.debug_barrier()
    tl.store(free + num_free, left, mask=mask)
    return number


@jit
def _give_back(free, num_free, number, mask):
    tl.debug_barrier()
    place = tl.minimum(tl.maximum(tl.load(free + num_free).to(tl.int64), 0), tl.maximum(num_free - 1, 0))
    tl.debug_barrier()
    tl.store(free + place, tl.minimum(tl.maximum(number, 0), num_free), mask=mask)
    tl.store(free + num_free, place + 1, mask=mask)


@jit
def _position_of(episodes, slot):
    num_lanes = tl.cast(episodes.num_lanes, tl.int64)
    position = slot % num_lanes * episodes.span + slot // num_lanes
    if episodes.tree.has_pages:
        position = tl.load(episodes.position_of + slot).to(tl.int64)
    return tl.minimum(tl.maximum(position, 0), tl.cast(episodes.tree.capacity, tl.int64) - 1)


@jit
def _remove(episodes, memory, slot, mask):
    num_lanes, none = tl.cast(episodes.num_lanes, tl.int64), tl.cast(episodes.none, tl.int64)
    span = episodes.span
    record = tl.load(episodes.episode + slot).to(tl.int64)
    is_stored = mask & (record >= 0) & (record < none)
    record = tl.where(is_stored, record, none)
    position = _position_of(episodes, slot)
    lane = tl.minimum(position // span, num_lanes - 1)
    change = put(episodes.tree, position, tl.full((), 0, tl.int64), is_stored)
    add(episodes.totals + record, change, is_stored)
    add(episodes.lane_total + lane, change, is_stored)
    left = tl.load(memory.count + record) - 1
    tl.debug_barrier()
    tl.store(memory.count + record, left, mask=is_stored)
    tl.store(episodes.start_of + record, lane * span + (position - lane * span + 1) % span, mask=is_stored)
    tl.store(episodes.episode + slot, none, mask=is_stored)
    if episodes.tree.has_pages:
        tl.store(episodes.position_of + slot, num_lanes * span, mask=is_stored)
        is_end = is_stored & ((position & _LAST_OF_PAGE) == _LAST_OF_PAGE)
        page = episodes.tree.pages + (position >> _PAGE_BITS)
        _give_back(memory.free_pages, memory.num_free_pages, tl.load(page), is_end)
        tl.store(page, memory.num_free_pages, mask=is_end)
    is_free = is_stored & (left == 0) & (tl.load(memory.lane_episode + lane) != record)
    _give_back(memory.free_records, none, record, is_free)
    _refresh_maximum(episodes, record, is_stored)
    tl.debug_barrier()


@jit
def _stop(episodes, memory, lane, mask):
    none = tl.cast(episodes.none, tl.int64)
    tl.debug_barrier()
    record = tl.minimum(tl.maximum(tl.load(memory.lane_episode + lane), 0), none)
    is_empty = mask & (record < none) & (tl.load(memory.count + record) == 0)
    tl.debug_barrier()
    tl.store(memory.lane_episode + lane, none, mask=mask)
    _give_back(memory.free_records, none, record, is_empty)


@jit
def _write(slots, lane_of, begins, ended, finished, d, number, num_rows, memory, episodes):
    num_lanes, none = tl.cast(episodes.num_lanes, tl.int64), tl.cast(episodes.none, tl.int64)
    span = episodes.span
    new, now = mass_of(tl.load(d)), tl.load(number) + 1
    for row in range(num_rows):
        tl.debug_barrier()
        slot, lane = tl.load(slots + row), tl.load(lane_of + row)
        mask = (slot >= 0) & (slot < episodes.num_slots) & (lane >= 0) & (lane < num_lanes)
        slot, lane = tl.where(mask, slot, 0), tl.where(mask, lane, 0)
        _remove(episodes, memory, slot, mask)
        if episodes.tree.has_pages:
            offset = tl.load(memory.lane_next + lane) % span
            is_page = mask & ((offset & _LAST_OF_PAGE) == 0)
            page = _take(memory.free_pages, memory.num_free_pages, is_page)
            tl.store(memory.lane_next + lane, offset + 1, mask=mask)
            tl.store(episodes.position_of + slot, lane * span + offset, mask=mask)
            tl.store(episodes.tree.pages + ((lane * span + offset) >> _PAGE_BITS), page, mask=is_page)
            tl.debug_barrier()
        position = _position_of(episodes, slot)
        is_new = mask & (tl.load(begins + row) != 0)
        _stop(episodes, memory, lane, is_new)
        record = tl.minimum(tl.maximum(_take(memory.free_records, none, is_new), 0), none - 1)
        tl.store(memory.lane_episode + lane, record, mask=is_new)
        tl.store(episodes.start_of + record, position, mask=is_new)
        tl.store(memory.count + record, 0, mask=is_new)
        tl.store(episodes.totals + record, 0, mask=is_new)
        tl.store(episodes.updated_at + record, 0, mask=is_new)
        tl.store(episodes.is_finished + record, tl.full((), 0, tl.int1), mask=is_new)
        tl.debug_barrier()
        record = tl.minimum(tl.maximum(tl.load(memory.lane_episode + lane), 0), none - 1)
        put(episodes.tree, position, new, mask)
        add(episodes.totals + record, new, mask)
        add(episodes.lane_total + lane, new, mask)
        add(memory.count + record, 1, mask)
        tl.store(episodes.episode + slot, record, mask=mask)
        _refresh_maximum(episodes, record, mask)
        is_end = mask & (tl.load(ended + row) != 0)
        tl.store(episodes.is_finished + record, tl.load(finished + row) != 0, mask=is_end)
        tl.store(episodes.updated_at + record, now, mask=is_end)
        tl.store(memory.lane_episode + lane, none, mask=is_end)


@jit
def _remove_all(slots, num_rows, memory, episodes, stops: tl.constexpr):
    for row in range(num_rows):
        tl.debug_barrier()
        slot = tl.load(slots + row)
        mask = (slot >= 0) & (slot < episodes.num_slots)
        _remove(episodes, memory, tl.where(mask, slot, 0), mask)
    if stops:
        for lane in range(episodes.num_lanes):
            _stop(episodes, memory, lane, lane >= 0)


@jit
def _update(
    slots, d, number, records, count, episodes,
    is_one: tl.constexpr, has_number: tl.constexpr, num_rows: tl.constexpr, num_together: tl.constexpr,
):  # fmt: skip
    """All rows at once: exchanges and sums of integers give the same result in any order."""
    none = tl.cast(episodes.none, tl.int64)
    last_lane = tl.cast(episodes.num_lanes, tl.int64) - 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        in_range = (slot >= 0) & (slot < episodes.num_slots)
        slot = tl.where(in_range, slot, 0)
        record = tl.load(episodes.episode + slot).to(tl.int64)
        mask = in_range & (record >= 0) & (record < none)
        record = tl.where(mask, record, none)
        position = _position_of(episodes, slot)
        place = place_of(position, episodes.tree.pages, episodes.tree.num_pages, episodes.tree.has_pages)
        tl.store(records + rows, tl.where(mask, record, -1), mask=rows < count)
        new = mass_of(tl.load(d + (0 if is_one else 1) * rows, mask=mask, other=0.0))
        change = tl.where(mask, new - tl.atomic_xchg(episodes.tree.leaves + place, new, mask=mask), 0)
        node, last = position, tl.cast(episodes.tree.capacity, tl.int64) - 1
        begin = tl.cast(episodes.tree.size, tl.int64)
        for _ in tl.static_range(episodes.tree.levels):
            node = node >> _BITS
            last = last >> _BITS
            begin -= ((last >> _BITS) + 1) * _CHILDREN
            tl.atomic_add(episodes.tree.nodes + begin + node, change, mask=mask)
        tl.atomic_add(episodes.totals + record, change, mask=mask)
        tl.atomic_add(episodes.lane_total + tl.minimum(position // episodes.span, last_lane), change, mask=mask)
        if has_number:
            tl.store(episodes.updated_at + record, tl.load(number) + tl.zeros([num_rows], tl.int64), mask=mask)
    tl.debug_barrier()
    refresh(
        episodes.totals, episodes.maxima, episodes.num_maxima, records, 1, none + 1, records, count,
        False, False, episodes.levels, num_together,
    )  # fmt: skip


def write(*arguments: Any) -> None:
    """See the loop of the same name."""
    assigned = assign(*arguments[:9])
    if assigned is None:
        return
    slots, ended, (finished, d, num_writes) = arguments[3], arguments[5], arguments[9:12]
    rows = slots, *assigned, ended, finished, d, num_writes, len(slots)
    _write[(1,)](*rows, _memory_of(*arguments[12:17]), episodes_of(*arguments[17:]), num_warps=1)


def remove(slots, stops, *state):
    """See the loop of the same name."""
    memory, episodes = _memory_of(*state[:5]), episodes_of(*state[5:])
    _remove_all[(1,)](slots, len(slots), memory, episodes, stops=stops, num_warps=1)


def update(slots, d, number, *episodes):
    """See the loop of the same name."""
    if len(slots):
        rows = min(256, triton.next_power_of_2(len(slots)))
        _update[(1,)](
            slots, d, number, torch.empty_like(slots), len(slots), episodes_of(*episodes),
            is_one=len(d) == 1, has_number=len(number) > 0, num_rows=rows, num_together=min(64, rows), num_warps=8,
        )  # fmt: skip
