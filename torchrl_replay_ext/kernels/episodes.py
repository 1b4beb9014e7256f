"""Loops that write transitions to the episodes of an :class:`~torchrl_replay_ext.core.episodes.EpisodeIndex`.

``arrays`` are those of :class:`Episodes`, ``e`` in short, and ``memory`` those of :class:`Memory`. Slots out of range
are skipped. Loops stay in range whatever the arrays hold.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from torchrl_replay_ext.kernels.lanes import assign
from torchrl_replay_ext.kernels.loop import inlined, loop, part
from torchrl_replay_ext.kernels.tree import put, refresh_maximum, write_all
from torchrl_replay_ext.kernels.tree_layout import PAGE_BITS, UNIT

_LAST_OF_PAGE = (1 << PAGE_BITS) - 1


class Episodes(NamedTuple):
    """The first arguments of :func:`torchrl_replay_ext.kernels.reaper.reliability` after ``result``.

    A tree over the positions of all lanes holds the masses; ``position_of`` is the position of each slot, empty if it
    follows from the slot. Each lane has ``span`` positions, whose sum is ``lane_total``. ``episode`` is the record of
    each slot. Of each record: ``start_of`` is the position of its first transition, ``is_finished`` and ``updated_at``
    say when its transitions are new, ``totals`` is the sum of its masses; ``maxima`` is the tree above ``totals``.
    """

    leaves: Any
    nodes: Any
    pages: Any
    capacity: Any
    position_of: Any
    num_lanes: Any
    span: Any
    lane_total: Any
    episode: Any
    start_of: Any
    is_finished: Any
    updated_at: Any
    totals: Any
    maxima: Any


class Memory(NamedTuple):
    """What writes and removals change beside the sums.

    ``lane_episode`` [lanes] is the record of the unfinished episode of each lane, or the extra record; ``lane_next``
    [lanes], the offset of the next transition in its lane; ``count``, the number of transitions of each record. The
    last element of ``free_records`` and ``free_pages`` is the number of the free ids before it.
    """

    lane_episode: Any
    lane_next: Any
    count: Any
    free_records: Any
    free_pages: Any


@part
def _take(free):
    """Take one of the free ids."""
    last = free.shape[0] - 1
    free[last] = min(max(free[last] - 1, 0), max(last - 1, 0))
    return free[free[last]]


@part
def _give_back(free, number):
    last = free.shape[0] - 1
    place = min(max(free[last], 0), max(last - 1, 0))
    free[place], free[last] = min(max(number, 0), last), place + 1


@inlined
def _lane_of(position, span, lane_total):
    return min(max(position // span, 0), lane_total.shape[0] - 1)


@part
def position_of_slot(slot, position_of, num_lanes, span):
    """The leaf of a slot in range, in the tree over all lanes.

    A tree over assigned lanes has a page more, so ``num_lanes * span`` is a leaf too.
    """
    if position_of.shape[0] > 0:
        return min(max(np.int64(position_of[slot]), 0), num_lanes * span)
    # unsigned numbers are divided in half the time
    step = np.uint64(slot) // np.uint64(num_lanes)
    return np.int64((np.uint64(slot) - step * np.uint64(num_lanes)) * np.uint64(span) + step)


@part
def _remove(slot, memory, e):
    """Remove the transition in ``slot``, if there is one, from all sums."""
    none, record = e.start_of.shape[0] - 1, np.int64(e.episode[slot])
    if record < 0 or record >= none:
        return
    position = position_of_slot(slot, e.position_of, e.num_lanes, e.span)
    lane = _lane_of(position, e.span, e.lane_total)
    change = put(e.leaves, e.nodes, e.pages, e.capacity, position, np.int64(0))
    e.totals[record] += change
    e.lane_total[lane] += change
    memory.count[record] -= 1
    e.start_of[record] = lane * e.span + (position - lane * e.span + 1) % e.span
    e.episode[slot] = none
    if e.position_of.shape[0] > 0:
        e.position_of[slot] = e.num_lanes * e.span
        if position & _LAST_OF_PAGE == _LAST_OF_PAGE:
            block = position >> PAGE_BITS
            _give_back(memory.free_pages, e.pages[block])
            e.pages[block] = memory.free_pages.shape[0] - 1
    if memory.count[record] == 0 and memory.lane_episode[lane] != record:
        _give_back(memory.free_records, record)
    refresh_maximum(e.totals, e.maxima, none + 1, record)


@part
def _stop(lane, memory, e):
    """Close the unfinished episode of a lane, if there is one; for reliability it stays unfinished."""
    none = e.start_of.shape[0] - 1
    record = min(max(memory.lane_episode[lane], 0), none)
    memory.lane_episode[lane] = none
    if record < none and memory.count[record] == 0:
        _give_back(memory.free_records, record)


@loop
def write(
    lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness,
    finished, d, num_writes, lane_episode, lane_next, count, free_records, free_pages, *arrays,
):  # fmt: skip
    """Write new transitions with the same priority ``d`` [1] to ``slots`` [n], in order; they replace what was there.

    The arguments up to ``strictness`` are those of :func:`torchrl_replay_ext.kernels.lanes.assign`. An episode that
    ended is ``finished`` [n] for reliability; ``num_writes`` [1] is the number of writes before this one.
    """
    lane_of, begins = np.empty(slots.shape[0], np.int64), np.empty(slots.shape[0], np.bool_)
    if not assign(
        lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness, lane_of, begins
    ):
        return
    memory, e = Memory(lane_episode, lane_next, count, free_records, free_pages), Episodes(*arrays)
    none, mass = e.start_of.shape[0] - 1, np.int64(math.ceil(d[0] * UNIT))
    for row in range(slots.shape[0]):
        slot, lane = slots[row], lane_of[row]
        if slot < 0 or slot >= e.episode.shape[0] or lane < 0 or lane >= lane_episode.shape[0]:
            continue
        _remove(slot, memory, e)
        if e.position_of.shape[0] > 0:
            offset = lane_next[lane] % e.span
            lane_next[lane] = offset + 1
            e.position_of[slot] = lane * e.span + offset
            if offset & _LAST_OF_PAGE == 0:
                e.pages[(lane * e.span + offset) >> PAGE_BITS] = _take(free_pages)
        position = position_of_slot(slot, e.position_of, e.num_lanes, e.span)
        if begins[row]:
            _stop(lane, memory, e)
            record = min(max(np.int64(_take(free_records)), 0), none - 1)
            lane_episode[lane], e.start_of[record] = record, position
            count[record], e.totals[record], e.updated_at[record], e.is_finished[record] = 0, 0, 0, False
        record = min(max(lane_episode[lane], 0), none - 1)
        put(e.leaves, e.nodes, e.pages, e.capacity, position, mass)
        e.totals[record] += mass
        e.lane_total[lane] += mass
        count[record] += 1
        e.episode[slot] = record
        refresh_maximum(e.totals, e.maxima, none + 1, record)
        if ended[row]:
            e.is_finished[record], e.updated_at[record] = finished[row], num_writes[0] + 1
            lane_episode[lane] = none


@loop
def remove(slots, stops, lane_episode, lane_next, count, free_records, free_pages, *arrays):
    """Remove the transitions in ``slots`` [n]; if ``stops``, unfinished episodes do not continue."""
    memory, e = Memory(lane_episode, lane_next, count, free_records, free_pages), Episodes(*arrays)
    for row in range(slots.shape[0]):
        if 0 <= slots[row] < e.episode.shape[0]:
            _remove(slots[row], memory, e)
    for lane in range(lane_episode.shape[0] if stops else 0):
        _stop(lane, memory, e)


@loop
def update(
    slots, d, number, leaves, nodes, pages, capacity, position_of, num_lanes, span, lane_total,
    episode, start_of, is_finished, updated_at, totals, maxima,
):  # fmt: skip
    """Set the masses of ``slots`` [n], which are distinct; slots without a transition are skipped.

    ``d``: their priorities, [n], or [1] for all rows. ``number`` is the number of the last write, [1], after which
    transitions of these episodes are new; empty: no change.
    """
    none, count = start_of.shape[0] - 1, slots.shape[0]
    record, position, change = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for row in range(count):
        slot = min(max(slots[row], 0), episode.shape[0] - 1)
        record[row], position[row] = np.int64(episode[slot]), position_of_slot(slot, position_of, num_lanes, span)
        if slot != slots[row] or record[row] < 0 or record[row] >= none:
            position[row] = -1
        change[row] = np.int64(math.ceil(np.float64(d[min(row, d.shape[0] - 1)]) * UNIT))
    write_all(leaves, nodes, nodes[:0], pages, capacity, position, change)
    for row in range(count):
        if position[row] >= 0:
            totals[record[row]] += change[row]
            lane_total[_lane_of(position[row], span, lane_total)] += change[row]
            if number.shape[0] > 0:
                updated_at[record[row]] = number[0]
    for row in range(count):
        if position[row] >= 0:
            refresh_maximum(totals, maxima, none + 1, record[row])
