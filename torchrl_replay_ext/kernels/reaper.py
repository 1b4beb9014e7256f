"""Loops for ReaPER: the reliability R of transitions, and draws from Ψ = R^ω m, where m are the masses of a tree.

The state of episodes is that of :class:`~torchrl_replay_ext.core.episodes.EpisodeIndex`, see its ``arrays``. All reads
stay in range whatever the arrays hold, also while another thread changes them.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.episodes import position_of_slot
from torchrl_replay_ext.kernels.layouts import BITS, CHILDREN, UNIT
from torchrl_replay_ext.kernels.loop import inlined, loop, part, uniform
from torchrl_replay_ext.kernels.tree import descend, lowest_level, place_of

# Rows that reject so many proposals are drawn by one pass over all Ψ.
ROUNDS = 64
# Random numbers of row i begin at 2^32 i: two for each proposal, and this one for a pass over all Ψ.
LAST = 2**31


@part
def _sum_ends(entries, begin, shift, leaves, pages, last, rows, first, end, total):
    """Add to ``total`` the entries of a level whose parents are not within the range ``first`` to ``end`` - 1.

    ``rows`` are the rows that have such a range, ``last`` the last entry of the level, which is ``shift`` bits above
    the leaves; ``pages`` is empty if all its entries are stored. Returns the number of rows that go on: they come first
    in ``rows``, and their ``first`` and ``end`` become the range of the parents.
    """
    count = 0
    for k in range(rows.shape[0]):
        row = rows[k]
        is_one_block = first[row] >> BITS == end[row] >> BITS
        inner, outer = first[row] & (CHILDREN - 1), end[row] & (CHILDREN - 1)
        first_leaf, last_leaf = (min(first[row], last) & -CHILDREN) << shift, (min(end[row], last) & -CHILDREN) << shift
        left = np.uint64(begin + (place_of(first_leaf, leaves, pages) >> shift))
        right = np.uint64(begin + (place_of(last_leaf, leaves, pages) >> shift))
        below, above = (outer, 0) if is_one_block else (CHILDREN, outer)
        # without branches, which takes less time
        for child in range(CHILDREN):
            total[row] += entries[left + np.uint64(child)] if (child >= inner) & (child < below) else 0
            total[row] += entries[right + np.uint64(child)] if child < above else 0
        first[row], end[row] = (first[row] >> BITS) + 1, end[row] >> BITS
        rows[count] = row
        count += not is_one_block
    return count


@inlined
def _sums_between(leaves, nodes, pages, capacity, first, end, total):
    """Set ``total`` [n] to the sums of the leaves from ``first`` to ``end`` - 1; changes ``first`` and ``end``."""
    for row in range(first.shape[0]):
        first[row] = min(max(first[row], 0), capacity)
        end[row] = min(max(end[row], first[row]), capacity)
        # reads ahead without branches, so that the cache misses of the rows overlap
        total[row] = 0
        for each in (first[row], end[row]):
            place = place_of(min(each, capacity - 1) & -CHILDREN, leaves, pages)
            total[row] += leaves[np.uint64(place)] + leaves[np.uint64(place + CHILDREN // 2)]
    rows, last, begin = np.empty(first.shape[0], np.int64), capacity - 1, lowest_level(leaves, nodes)
    for row in range(first.shape[0]):
        rows[row], total[row] = row, 0
    count = _sum_ends(leaves, np.int64(0), np.int64(0), leaves, pages, last, rows, first, end, total)
    last >>= BITS
    count = _sum_ends(nodes, begin, np.int64(BITS), leaves, pages, last, rows[:count], first, end, total)
    while begin > 0 and count > 0:
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        count = _sum_ends(nodes, begin, np.int64(0), leaves, pages[:0], last, rows[:count], first, end, total)


@inlined
def _part_of_episode(
    slot, record, written_at, position_of, num_lanes, span, start_of, is_finished, updated_at, totals, largest
):
    """Where the TD errors of an episode up to a slot lie in its lane.

    ``record`` is the record of the episode, ``written_at`` the number of the write that filled the slot. Returns the
    range of the positions to sum and -1, or if the episode wraps around the end of its lane, the range to leave out and
    the lane; and the sum by which R divides, 0 if R is 1.
    """
    record = min(max(np.int64(record), 0), start_of.shape[0] - 1)
    divisor = totals[record] if is_finished[record] else largest
    divisor = 0 if written_at > updated_at[record] else max(divisor, 0)
    position, start = position_of_slot(slot, position_of, num_lanes, span), np.int64(start_of[record])
    wraps = position < start
    first, end = position + 1 if wraps else start, start if wraps else position + 1
    return first, end, min(position // span, num_lanes - 1) if wraps else -1, divisor


@loop
def reliability(
    slots, result, leaves, nodes, pages, capacity, position_of, num_lanes, span, lane_total,
    episode, start_of, is_finished, updated_at, totals, maxima, least_largest, generation,
):  # fmt: skip
    """R of ``slots`` [n], in [0, 1]; slots out of range are clamped."""
    count, largest = slots.shape[0], max(maxima[0], least_largest)
    first, end, total = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    lane, divisor = np.empty(count, np.int64), np.empty(count, np.int64)
    record, written_at = np.empty(count, np.int64), np.empty(count, np.int64)
    # a loop of its own, so that the cache misses of the rows overlap
    for row in range(count):
        slot = min(max(slots[row], 0), episode.shape[0] - 1)
        record[row], written_at[row] = episode[slot], generation[slot]
    for row in range(count):
        slot = min(max(slots[row], 0), episode.shape[0] - 1)
        first[row], end[row], lane[row], divisor[row] = _part_of_episode(
            slot, record[row], written_at[row], position_of, num_lanes, span, start_of, is_finished, updated_at, totals,
            largest,
        )  # fmt: skip
    _sums_between(leaves, nodes, pages, capacity, first, end, total)
    for row in range(count):
        if lane[row] >= 0:
            total[row] = lane_total[lane[row]] - total[row]
        result[row] = min(max(total[row] / divisor[row], 0.0), 1.0) if divisor[row] > 0 else 1.0


@loop
def smallest(masses, d, omega, result, *episodes):
    """The smallest Ψ > 0 of all slots, which have the ``masses``; inf if there is none. O(N).

    ``d``: their TD errors, float32; the sign is ignored. R is computed only where it may matter: it is at least d / F,
    with F of Eq. 17, and at most 1, so the smallest Ψ is at most the smallest mass.
    """
    bits, least = d.view(np.int32), np.inf
    for slot in range(masses.shape[0]):
        if 0 < masses[slot] < least:
            least = np.float64(masses[slot])
    # the least R^ω of a slot, by the exponent of the float d: powers take time
    bound, largest = np.empty(256, np.float64), max(episodes[13][0], episodes[14], 1)
    for exponent in range(256):
        bound[exponent] = min(2.0 ** (exponent - 127) * UNIT / largest, 1.0) ** omega[0]
    slots, result[0] = np.empty(masses.shape[0], np.int64), np.inf
    # all slots are tried if nothing is below the smallest mass, because its Ψ is 0
    for limit in (least, np.inf):
        count = 0
        for slot in range(masses.shape[0]):
            if masses[slot] > 0 and masses[slot] * bound[(bits[slot] >> 23) & 255] <= limit:
                slots[count] = slot
                count += 1
        factor = np.empty(count, np.float64)
        _set_factor(slots[:count], omega[0], factor, episodes)
        for k in range(count):
            psi = masses[slots[k]] * factor[k]
            if 0 < psi < result[0]:
                result[0] = psi
        if result[0] <= limit:
            return


@loop
def draw(seed, omega, leaves, nodes, pages, capacity, leaf, density, *episodes):
    """Draw leaves from Ψ.

    Each row proposes leaves in proportion to their masses until one is accepted, with probability R^ω. All rows walk
    through the tree together, so that their cache misses overlap.

    * ``seed``, int64 [1], determines the draws; ``omega`` [1] is ω.
    * ``leaves``, ``nodes``, ``pages``, ``capacity`` are the tree of the masses. Leaf i is slot i.
    * The results are ``leaf`` and its Ψ, ``density``, [n] each; both are 0 if there is no mass.
    * ``episodes`` are the arguments of :func:`reliability` after ``result``.
    """
    size, total = leaf.shape[0], nodes[0]
    rows, mass = np.empty(size, np.int64), np.empty(size, np.int64)
    proposed, factor = np.empty(size, np.int64), np.empty(size, np.float64)
    for row in range(size):
        rows[row], leaf[row], density[row] = row, 0, 0.0
    if total <= 0:
        return
    for attempt in range(ROUNDS):
        for k in range(size):
            u = uniform(seed[0], (rows[k] << 32) + 2 * attempt)
            # the product may be rounded up to the total
            mass[k] = max(min(np.int64(u * total), total - 1), 0)
        descend(leaves, nodes, pages, capacity, proposed[:size], mass[:size])
        _set_factor(proposed[:size], omega[0], factor[:size], episodes)
        kept = 0
        for k in range(size):
            row = rows[k]
            if uniform(seed[0], (row << 32) + 2 * attempt + 1) < factor[k]:
                leaf[row], density[row] = proposed[k], factor[k] * mass[k]
            else:
                rows[kept] = row
                kept += 1
        size = kept
        if size == 0:
            return
    # one pass over all Ψ
    running, sums, factor = 0.0, np.empty(capacity, np.float64), np.empty(capacity, np.float64)
    slots = np.empty(capacity, np.int64)
    for k in range(capacity):
        slots[k] = k
    _set_factor(slots, omega[0], factor, episodes)
    for k in range(capacity):
        running += leaves[place_of(k, leaves, pages)] * factor[k]
        sums[k] = running
    for k in range(size):
        chosen = _choose(sums, uniform(seed[0], (rows[k] << 32) + LAST))
        leaf[rows[k]], density[rows[k]] = chosen, leaves[place_of(chosen, leaves, pages)] * factor[chosen]


@inlined
def _set_factor(slots, omega, factor, episodes):
    """Set ``factor`` [n] to R^ω of ``slots`` [n]."""
    reliability(slots, factor, *episodes)
    for row in range(slots.shape[0]):
        factor[row] **= omega


@inlined
def _choose(sums, u):
    """Choose an index in proportion to the steps of the running ``sums``."""
    low, high = 0, sums.shape[0] - 1
    target = u * sums[high]
    while low < high:
        middle = (low + high) // 2
        if sums[middle] > target:
            high = middle
        else:
            low = middle + 1
    # the target may have been rounded up to the end
    while high > 0 and sums[high] == sums[high - 1]:
        high -= 1
    return high
