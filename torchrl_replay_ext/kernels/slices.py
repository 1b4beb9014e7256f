"""Loops over the slices of episodes; :class:`~torchrl_replay_ext.samplers.slice_starts.SliceStarts` has the arrays.

Slots out of range are skipped. Loops stay in range whatever the arrays hold.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.lanes import assign
from torchrl_replay_ext.kernels.loop import loop, part
from torchrl_replay_ext.kernels.tree import put

# the rows of ``changes``
START, MASS, FOLLOWED = range(3)


@part
def _set_mass(slot, mass, entry, changes, leaves, nodes, pages, capacity):
    if entry < changes.shape[1]:
        changes[START, entry], changes[MASS, entry] = slot, mass
    else:
        put(leaves, nodes, pages, capacity, slot, mass)


@part
def _may_begin(slot, firsts):
    return firsts.shape[0] == 0 or firsts[min(slot, firsts.shape[0] - 1)]


@loop
def write(
    lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness,
    changes, is_padded, newest, following, recent, num_rows, episode_len, firsts, leaves, nodes, pages, capacity,
):  # fmt: skip
    """Write new transitions to ``slots`` [n], in order.

    The arguments up to ``strictness`` are those of :func:`torchrl_replay_ext.kernels.lanes.assign`. If ``is_padded``,
    slices may be shorter than the columns of ``recent``. They may begin at the transitions that ``firsts`` marks as the
    first ones of their episodes, or at all if it is empty.

    ``changes`` [3, 0] is empty, or if the tree of the masses is on an accelerator, [3, 2n] gets what to change there:
    slots of starts, in order, and their masses; and slots whose successors have changed. Other entries stay.
    """
    lane_of, is_first = np.empty(slots.shape[0], np.int64), np.empty(slots.shape[0], np.bool_)
    if not assign(
        lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness, lane_of, is_first
    ):
        return
    size, length = following.shape[0], recent.shape[1]
    for row in range(slots.shape[0]):
        slot, lane = slots[row], lane_of[row]
        if slot < 0 or slot >= min(size, capacity) or lane < 0 or lane >= recent.shape[0]:
            continue
        newest[0] += (slot - newest[0] - 1) % size + 1
        last = recent[lane, (num_rows[lane] - 1) % length]
        following[slot], before = slot, slot
        if not is_first[row] and newest[0] - last < size:
            before = last % size
            following[before] = slot
        if changes.shape[1] > 0:
            changes[FOLLOWED, 2 * row], changes[FOLLOWED, 2 * row + 1] = slot, before
        recent[lane, num_rows[lane] % length] = newest[0]
        num_rows[lane] += 1
        episode_len[lane] = 1 if is_first[row] else episode_len[lane] + 1
        if firsts.shape[0] > 0:
            firsts[slot] = is_first[row]
        mass = 1 if is_padded and _may_begin(slot, firsts) else 0
        _set_mass(slot, mass, 2 * row, changes, leaves, nodes, pages, capacity)
        oldest = recent[lane, num_rows[lane] % length]
        if not is_padded and episode_len[lane] >= length and newest[0] - oldest < size:
            start = min(oldest % size, capacity - 1)
            mass = 1 if _may_begin(start, firsts) else 0
            _set_mass(start, mass, 2 * row + 1, changes, leaves, nodes, pages, capacity)
        if ended[row]:
            episode_len[lane] = 0


@loop
def walk(start, following, leaves, slots, mask):
    """The slots of slices from ``start`` [n] and whether they belong to them, [n, length] each.

    The last slot of an episode is repeated. The mask is False where no slice may begin.
    """
    size = min(following.shape[0], leaves.shape[0])
    for row in range(start.shape[0]):
        slot = min(max(start[row], 0), size - 1)
        is_part = leaves[slot] > 0
        for step in range(slots.shape[1]):
            slots[row, step], mask[row, step] = slot, is_part
            next_slot = min(max(np.int64(following[slot]), 0), size - 1)
            is_part = is_part and next_slot != slot
            slot = next_slot
