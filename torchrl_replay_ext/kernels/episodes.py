"""Loops that write transitions to the episodes of an :class:`~torchrl_replay_ext.core.episodes.EpisodeIndex`.

``arrays`` are those of :class:`Episodes`, ``e`` in short, and ``memory`` those of :class:`Memory`. Slots out of range
are skipped. Loops stay in range whatever the arrays hold.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from torchrl_replay_ext.kernels.lanes import assign
from torchrl_replay_ext.kernels.layouts import PAGE_BITS, UNIT
from torchrl_replay_ext.kernels.loop import inlined, loop, part
from torchrl_replay_ext.kernels.tree import put, refresh_maximum, write_all

_LAST_OF_PAGE = (1 << PAGE_BITS) - 1
# The rows of ``changes``: a slot, its position before a removal or after it was added, or -1, and its record; the new
# page of the block of the position, or -1; and the first position of the record after all removals, or marks.
SLOT, POSITION, RECORD, PAGE, REST = range(5)
# the marks of a transition: its episode begins or ends with it, and is then finished
BEGINS, ENDS, FINISHED = 1, 2, 4


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
def _give_back(free, freed_id):
    last = free.shape[0] - 1
    top = min(max(free[last], 0), max(last - 1, 0))
    free[top], free[last] = min(max(freed_id, 0), last), top + 1


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
def _remove(slot, entry, changes, memory, e):
    """Find what the removal of the transition in ``slot`` changes; no position if there is no transition."""
    none, record = e.start_of.shape[0] - 1, np.int64(e.episode[slot])
    changes[POSITION, entry] = -1
    if record < 0 or record >= none:
        return
    position = position_of_slot(slot, e.position_of, e.num_lanes, e.span)
    lane = _lane_of(position, e.span, memory.lane_episode)
    memory.count[record] -= 1
    e.start_of[record] = lane * e.span + (position - lane * e.span + 1) % e.span
    page = -1
    if e.position_of.shape[0] > 0 and position & _LAST_OF_PAGE == _LAST_OF_PAGE:
        _give_back(memory.free_pages, e.pages[position >> PAGE_BITS])
        page = memory.free_pages.shape[0] - 1
    if memory.count[record] == 0 and memory.lane_episode[lane] != record:
        _give_back(memory.free_records, record)
    changes[SLOT, entry], changes[POSITION, entry], changes[RECORD, entry] = slot, position, record
    changes[PAGE, entry] = page


@part
def _add_to_sums(change, position, record, e):
    e.totals[record] += change
    e.lane_total[_lane_of(position, e.span, e.lane_total)] += change


@part
def _apply(changes, num_removed, mass, now, e):
    none, has_masses = e.start_of.shape[0] - 1, e.leaves.shape[0] > 0
    # in fixed lanes, the positions of the rows that are removed by a write get new masses below
    is_replaced = e.position_of.shape[0] == 0 and num_removed < changes.shape[1]
    for k in range(num_removed if has_masses else 0):
        position = changes[POSITION, k]
        if position >= 0 and is_replaced:
            _add_to_sums(-e.leaves[position], position, changes[RECORD, k], e)
        elif position >= 0:
            change = put(e.leaves, e.nodes, e.pages, e.capacity, position, np.int64(0))
            _add_to_sums(change, position, changes[RECORD, k], e)
    # after all removals, which need the pages before; the last one of a record comes last
    for k in range(changes.shape[1]):
        slot, position, record = changes[SLOT, k], changes[POSITION, k], changes[RECORD, k]
        if position < 0:
            continue
        is_removed = k < num_removed
        e.episode[slot] = none if is_removed else record
        if e.position_of.shape[0] > 0:
            e.position_of[slot] = e.num_lanes * e.span if is_removed else position
            if changes[PAGE, k] >= 0:
                e.pages[position >> PAGE_BITS] = changes[PAGE, k]
        if is_removed or changes[REST, k] & BEGINS:
            e.start_of[record] = changes[REST, k] if is_removed else position
        if has_masses and not is_removed:
            if changes[REST, k] & BEGINS:
                e.updated_at[record], e.is_finished[record] = 0, False
            if changes[REST, k] & ENDS:
                e.updated_at[record], e.is_finished[record] = now, changes[REST, k] & FINISHED > 0
            put(e.leaves, e.nodes, e.pages, e.capacity, position, mass)
            _add_to_sums(mass, position, record, e)
    for k in range(changes.shape[1] if has_masses else 0):
        if changes[POSITION, k] >= 0:
            refresh_maximum(e.totals, e.maxima, none + 1, changes[RECORD, k])


@part
def _stop(lane, memory, e):
    """Close the unfinished episode of a lane, if there is one; for reliability it stays unfinished."""
    none = e.start_of.shape[0] - 1
    record = min(max(memory.lane_episode[lane], 0), none)
    memory.lane_episode[lane] = none
    if record < none and memory.count[record] == 0:
        _give_back(memory.free_records, record)


@part
def _note_starts(changes, num_removed, e):
    for k in range(num_removed):
        if changes[POSITION, k] >= 0:
            changes[REST, k] = e.start_of[changes[RECORD, k]]


@loop
def write(
    lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness,
    finished, d, num_writes, changes, lane_episode, lane_next, count, free_records, free_pages, *arrays,
):  # fmt: skip
    """Write new transitions with the same priority ``d`` [1] to ``slots`` [n], in order; they replace what was there.

    The arguments up to ``strictness`` are those of :func:`torchrl_replay_ext.kernels.lanes.assign`. An episode that
    ended is ``finished`` [n] for reliability; ``num_writes`` [1] is the number of writes before this one.

    If the masses are on an accelerator, the arrays of what depends on them are empty here, and ``changes`` [5, 2n] gets
    the arguments of :func:`apply`. If not, it is empty.
    """
    lane_of, is_first = np.empty(slots.shape[0], np.int64), np.empty(slots.shape[0], np.bool_)
    if not assign(
        lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness, lane_of, is_first
    ):
        return
    memory, e = Memory(lane_episode, lane_next, count, free_records, free_pages), Episodes(*arrays)
    none, num_rows = e.start_of.shape[0] - 1, slots.shape[0]
    if changes.shape[1] == 0:
        changes = np.empty((5, 2 * num_rows), np.int64)
    for row in range(num_rows):
        slot, lane, added = slots[row], lane_of[row], num_rows + row
        changes[POSITION, row] = changes[POSITION, added] = -1
        if slot < 0 or slot >= e.episode.shape[0] or lane < 0 or lane >= lane_episode.shape[0]:
            continue
        _remove(slot, row, changes, memory, e)
        position, page = position_of_slot(slot, e.position_of, e.num_lanes, e.span), -1
        if e.position_of.shape[0] > 0:
            offset = lane_next[lane] % e.span
            lane_next[lane], position = offset + 1, lane * e.span + offset
            if offset & _LAST_OF_PAGE == 0:
                page = _take(free_pages)
        if is_first[row]:
            _stop(lane, memory, e)
            record = min(max(np.int64(_take(free_records)), 0), none - 1)
            lane_episode[lane], e.start_of[record], count[record] = record, position, 0
        record = min(max(lane_episode[lane], 0), none - 1)
        count[record] += 1
        changes[SLOT, added], changes[POSITION, added], changes[RECORD, added] = slot, position, record
        changes[PAGE, added] = page
        changes[REST, added] = BEGINS * is_first[row] | ENDS * ended[row] | FINISHED * finished[row]
        if ended[row]:
            lane_episode[lane] = none
    _note_starts(changes, num_rows, e)
    _apply(changes, num_rows, np.int64(math.ceil(d[0] * UNIT)), num_writes[0] + 1, e)


@loop
def remove(slots, stops, changes, lane_episode, lane_next, count, free_records, free_pages, *arrays):
    """Remove the transitions in ``slots`` [n]; if ``stops``, unfinished episodes do not continue.

    ``changes`` [5, n] as for :func:`write`, or empty.
    """
    memory, e = Memory(lane_episode, lane_next, count, free_records, free_pages), Episodes(*arrays)
    if changes.shape[1] == 0:
        changes = np.empty((5, slots.shape[0]), np.int64)
    for row in range(slots.shape[0]):
        changes[POSITION, row] = -1
        if 0 <= slots[row] < e.episode.shape[0]:
            _remove(slots[row], row, changes, memory, e)
    for lane in range(lane_episode.shape[0] if stops else 0):
        _stop(lane, memory, e)
    _note_starts(changes, slots.shape[0], e)
    _apply(changes, slots.shape[0], np.int64(0), np.int64(0), e)


@loop
def apply(changes, num_removed, d, num_writes, *arrays):
    """Apply the changes of a write, or of a removal, that the loop on the host has found.

    The first ``num_removed`` of ``changes`` [5, n] are transitions that are removed, the others are added. For the rows
    of ``changes`` see :data:`SLOT`; changes without a position are skipped.
    """
    _apply(changes, num_removed, np.int64(math.ceil(d[0] * UNIT)), num_writes[0] + 1, Episodes(*arrays))


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
