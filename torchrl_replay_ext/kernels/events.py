"""Loops over event tables: which table holds which slots, in which order, and the steps before each stored one.

``tables`` are the arrays of :class:`~torchrl_replay_ext.core.event_tables.EventTables`, see its ``arrays``:

* ``slot_at``: the slot at each position of all tables, -1 if there is none. Table k has the positions ``begins[k]`` to
  ``begins[k + 1]`` - 1, and its entries are at the first ``counts[k]`` of them, in any order.
* ``links``: the next older and the next newer entry for each entry, -1 if there is none. They and ``heads``, the oldest
  and the newest entry of each table, count positions from that of the first list.
* ``places``: the position of each slot in each list; ``UNSENT`` if its transition has never been there, ``LEFT`` if it
  has been there before.
* ``number``: the number of each slot's transition, in the order of writing. ``before``: the slot of the step before it
  in the same episode, -1 if there is none.
* ``free``: a queue of the slots that no table holds; empty in a ring, whose default table is no list.
* ``journal``: each position that changed, and the slot that entered or left it.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.events_layout import CHANGES, FREE_HEAD, FREE_TAIL, LEFT, NEXT_SLOT, UNSENT, WRITTEN
from torchrl_replay_ext.kernels.loop import inlined, loop, part
from torchrl_replay_ext.kernels.random_numbers import uniform
from torchrl_replay_ext.kernels.tree import descend, prefix, write_all
from torchrl_replay_ext.kernels.tree_layout import UNIT

# the methods of ``allocate``
SYSTEMATIC, MULTINOMIAL, LARGEST_REMAINDER = range(3)


@part
def _inside(index, size):
    return min(max(index, 0), size - 1)


@part
def _note(position, slot, tables):
    counters, journal = tables[9], tables[10]
    place = counters[CHANGES] % journal.shape[0]
    journal[place, 0], journal[place, 1] = position, slot
    counters[CHANGES] += 1


@part
def _join(k, older, newer, links, heads):
    """Make two entries of a table neighbours."""
    if older >= 0:
        links[1, _inside(older, links.shape[1])] = newer
    else:
        heads[0, k] = newer
    if newer >= 0:
        links[0, _inside(newer, links.shape[1])] = older
    else:
        heads[1, k] = older


@part
def _remove(k, place, tables):
    """Remove the entry ``place`` of a table; the last one moves to its position."""
    slot_at, links, places, heads, counts, begins, _, _, free, counters, _ = tables
    first = counts.shape[0] - places.shape[0]
    base, place = begins[first], _inside(place, links.shape[1])
    slot = _inside(slot_at[base + place], places.shape[1])
    places[k - first, slot] = LEFT
    _join(k, links[0, place], links[1, place], links, heads)
    _note(base + place, slot, tables)
    counts[k] = max(counts[k] - 1, 0)
    last = begins[k] + counts[k] - base
    if last != place:
        moved = _inside(slot_at[base + last], places.shape[1])
        slot_at[base + place], places[k - first, moved] = moved, base + place
        older, newer = links[0, last], links[1, last]
        links[0, place], links[1, place] = older, newer
        _join(k, older, place, links, heads)
        _join(k, place, newer, links, heads)
        _note(base + last, moved, tables)
    slot_at[base + last] = -1
    if free.shape[0] > 0:
        for row in range(places.shape[0]):
            if places[row, slot] >= 0:
                return
        free[counters[FREE_TAIL] % free.shape[0]] = slot
        counters[FREE_TAIL] += 1


@inlined
def _put(k, slot, tables):
    """Make ``slot`` the newest entry of a table that is not full."""
    slot_at, links, places, heads, counts, begins = tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]
    first = counts.shape[0] - places.shape[0]
    position = begins[k] + counts[k]
    place = position - begins[first]
    counts[k] += 1
    slot_at[position] = slot
    places[k - first, slot] = position
    _join(k, heads[1, k], place, links, heads)
    links[1, place], heads[1, k] = -1, place
    _note(position, slot, tables)


@part
def _is_stored(slot, number, tables):
    """True if the default table still holds the transition ``number`` that was written to ``slot``."""
    return tables[6][slot] == number and (tables[8].shape[0] == 0 or tables[2][0, slot] >= 0)


@inlined
def _step_before(slot, tables):
    """The slot of the step before that in ``slot``, -1 if the default table does not hold it."""
    number, before = tables[6], tables[7]
    previous = min(before[slot], before.shape[0] - 1)
    if previous < 0 or number[previous] >= number[slot] or not _is_stored(previous, number[previous], tables):
        return -1
    return previous


@loop
def write(episodes, cut, slots, lane, trajectory, ends, begins_, occurred, table_of, history, *tables):
    """Write rows to the default table, and fill the event tables, row by row.

    Args:
        episodes: slot and number of the last step of each open episode, and its trajectory, int64 [lanes, 3]; slot -1
            if there is none.
        cut: a result, int64 [1]: the number of histories that lack steps which the default table no longer holds.
        slots: the slots, int64 [n]; with pinned tables a result.
        lane: lane of each row, int64 [n].
        trajectory: trajectory id of each row, int64 [n].
        ends: True if the row is the last of an episode, bool [n].
        begins_: True if the row is the first of an episode, bool [n].
        occurred: True if an event occurs in a row, bool [n, events].
        table_of: table of each event.
        history: τ of each event.
        tables: see above.
    """
    _, _, places, heads, counts, begins, number, before, free, counters, _ = tables
    first, num_slots, is_pinned = counts.shape[0] - places.shape[0], places.shape[1], free.shape[0] > 0
    longest = 1
    for event in range(history.shape[0]):
        for row in range(slots.shape[0]):
            if occurred[row, event]:
                longest = max(longest, min(history[event], num_slots))
                break
    path = np.empty(longest, np.int64)
    for row in range(slots.shape[0]):
        episode = episodes[lane[row]]
        previous = min(episode[0], num_slots - 1)
        goes_on = previous >= 0 and not begins_[row] and episode[2] == trajectory[row]
        if not (goes_on and _is_stored(previous, episode[1], tables)):
            previous = -1
        slot = _inside(slots[row], num_slots)
        for k in range(places.shape[0]):
            leaving = places[k, slot] - begins[first]
            if is_pinned:
                # so that a slot is free
                leaving = heads[0, 0] if k == 0 and counts[0] >= begins[1] else -1
            if leaving >= 0:
                _remove(first + k, leaving, tables)
        if is_pinned:
            slot = np.int64(_inside(free[counters[FREE_HEAD] % free.shape[0]], num_slots))
            counters[FREE_HEAD] += 1
        elif slot >= counts[0]:
            counts[0] = slot + 1
            _note(slot, slot, tables)
        places[:, slot] = UNSENT
        slots[row], number[slot], before[slot] = slot, counters[WRITTEN], previous
        counters[WRITTEN] += 1
        for k in range(first, counts.shape[0]):
            reach = 1 if k == 0 else 0
            for event in range(history.shape[0]):
                if occurred[row, event] and table_of[event] == k:
                    reach = max(reach, min(history[event], num_slots))
            length, step = 0, slot
            while length < reach and step >= 0:
                path[length] = step
                length += 1
                step = _step_before(step, tables)
            cut[0] += length < reach and before[path[length - 1]] >= 0
            for at in range(length - 1, -1, -1):
                if places[k - first, path[at]] == UNSENT:
                    if counts[k] >= begins[k + 1] - begins[k]:
                        _remove(k, heads[0, k], tables)
                    _put(k, path[at], tables)
        episode[0], episode[1], episode[2] = -1 if ends[row] else slot, number[slot], trajectory[row]
    if slots.shape[0] > 0:
        counters[NEXT_SLOT] = (slots[slots.shape[0] - 1] + 1) % num_slots


@loop
def remove(slots, *tables):
    """Remove the entries of ``slots`` [n]."""
    places, counts, begins = tables[2], tables[4], tables[5]
    first = counts.shape[0] - places.shape[0]
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= places.shape[1]:
            continue
        for k in range(places.shape[0]):
            if places[k, slot] >= 0:
                _remove(first + k, places[k, slot] - begins[first], tables)


@loop
def order(result, table, *tables):
    """The slots of a table, oldest entry first, [counts[table]]."""
    slot_at, links, places, heads, counts, begins = tables[0], tables[1], tables[2], tables[3], tables[4], tables[5]
    place, size = heads[0, table], links.shape[1]
    for row in range(result.shape[0]):
        place = _inside(place, size)
        result[row] = slot_at[begins[counts.shape[0] - places.shape[0]] + place]
        place = links[1, place]


@loop
def earlier(slots, slot, number, *tables):
    """The steps up to that in ``slot``, transition ``number``, the last one first, in ``slots`` [n]; -1 before them."""
    step = min(max(slot, 0), tables[6].shape[0] - 1)
    if not _is_stored(step, number, tables):
        step = -1
    for row in range(slots.shape[0]):
        slots[row] = step
        if step >= 0:
            step = _step_before(step, tables)


@part
def _mass(slot, d, alpha):
    """The mass of a slot; see :func:`set_masses`."""
    if d.shape[0] == 0:
        return UNIT
    return np.int64(np.ceil(abs(np.float64(d[_inside(slot, d.shape[0])])) ** alpha[0] * UNIT))


@loop
def set_masses(leaves, nodes, pages, d, alpha, slots, slot_at, places, counts, journal, begin, end):
    """Set the masses of the entries that changed with the numbers ``begin`` to ``end`` - 1, and of ``slots``.

    The leaves of the tree are the positions of the tables. The mass of an entry is the power of the absolute ``d`` of
    its slot with the exponent ``alpha[0]``, or 1 unit if ``d`` is empty.
    """
    begin, first, count = max(begin, end - journal.shape[0]), counts.shape[0] - places.shape[0], 0
    size = end - begin + slots.shape[0] * counts.shape[0]
    index, mass = np.full(size, -1), np.empty(size, np.int64)
    for row in range(begin, end):
        at = _inside(journal[row % journal.shape[0], 0], slot_at.shape[0])
        index[count], mass[count] = at, _mass(slot_at[at], d, alpha) if slot_at[at] >= 0 else 0
        count += 1
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= places.shape[1]:
            continue
        new = _mass(slot, d, alpha)
        for k in range(counts.shape[0]):
            index[count], mass[count] = slot if k < first else places[k - first, slot], new
            count += 1
    write_all(leaves, nodes, nodes[:0], pages, slot_at.shape[0], index, mass)


@inlined
def _allocate(eta, allocation, seed, table):
    """Divide the rows of a batch among tables in proportions ``eta``, in random order; see ``allocate``."""
    rows, tables, last = table.shape[0], eta.shape[0], 0
    # the number of rows of each table, which may be a fraction, and the point of the first row
    wanted, fraction, point = np.empty(tables), np.empty(tables), uniform(seed, 3 * rows)
    for k in range(tables):
        wanted[k] = rows * eta[k]
        last = k if eta[k] > 0 else last
    if allocation == LARGEST_REMAINDER:
        point, left = 0.0, rows
        for k in range(tables):
            fraction[k] = wanted[k] % 1.0
            wanted[k] -= fraction[k]
            left -= np.int64(wanted[k])
        for _ in range(left):
            best = 0
            for k in range(tables):
                if fraction[k] > fraction[best]:
                    best = k
            wanted[best] += 1
            fraction[best] = -1.0
    for row in range(rows):
        if allocation == MULTINOMIAL:
            point = rows * uniform(seed, 3 * rows + row)
        k, end = 0, wanted[0]
        while k < last and point >= end:
            k += 1
            end += wanted[k]
        table[row] = k
        point += 1
    for row in range(rows - 1, 0, -1):
        other = min(np.int64(uniform(seed, rows + row) * (row + 1)), row)
        table[row], table[other] = table[other], table[row]


@loop
def mixture(slots, per_mass, leaves, places, probability):
    """The sums of the masses of the entries of each of ``slots`` [n], times ``per_mass`` of their tables."""
    first = per_mass.shape[0] - places.shape[0]
    probability[:] = 0
    for k in range(per_mass.shape[0]):
        for row in range(slots.shape[0]):
            slot = np.int64(_inside(slots[row], places.shape[1]))
            position = slot if k < first else places[k - first, slot]
            if position >= 0:
                probability[row] += per_mass[k] * leaves[_inside(position, leaves.shape[0])]


@loop
def draw(
    seed, shares, min_sizes, allocation, leaves, nodes, pages, is_uniform, counts, begins, slot_at, places, is_mixed,
    table, eta, slots, density, probability,
):  # fmt: skip
    """Draw slots from tables.

    * ``seed``, int64 [1], determines the result.
    * ``shares`` are η of each table, float64. A table is used from ``min_sizes`` entries on; -1 stands for the number
      of rows.
    * ``allocation``: how rows are divided among tables.
    * ``leaves``, ``nodes``, ``pages`` are the tree of the masses of all positions. ``is_uniform``: True if all masses
      are 0 or 1 unit.
    * ``counts``, ``begins``, ``slot_at`` and ``places``: see above.
    * The results are the ``table`` of each row, int64 [n]; ``eta``, η of each table, 0 for tables that are not used,
      with sum 1; ``slots``; the ``probability`` of each slot, and a ``density``, [n] each: the probability if
      ``is_mixed``, else |B_k| q_k(i) for the table k of the row. If nothing can be drawn, both are 0.
    """
    rows, tables, capacity, is_even, share = table.shape[0], counts.shape[0], slot_at.shape[0], is_uniform, 0.0
    ends, total, per_mass = np.empty(tables + 1, np.int64), np.empty(tables, np.int64), np.zeros(tables)
    prefix(leaves, nodes, pages, capacity, begins, ends)
    for k in range(tables):
        total[k] = ends[k + 1] - ends[k]
        is_used = total[k] > 0 and counts[k] >= (rows if min_sizes[k] < 0 else min_sizes[k])
        eta[k] = shares[k] if is_used else 0.0
        share += eta[k]
    for k in range(tables):
        eta[k] = (1.0 if k == 0 else 0.0) if share <= 0 else eta[k] / share
        if total[k] > 0:
            per_mass[k] = eta[k] / total[k]
        is_even &= eta[k] == 0 or total[k] == counts[k] * UNIT
    _allocate(eta, allocation, seed[0], table)
    mass = np.empty(rows, np.int64)
    if is_even:
        # each entry has 1 unit, so the tree need not be walked
        for row in range(rows):
            k = table[row]
            slots[row] = begins[k] + min(np.int64(uniform(seed[0], row) * counts[k]), counts[k] - 1)
            mass[row] = UNIT
    else:
        for row in range(rows):
            k = table[row]
            mass[row] = ends[k] + min(np.int64(uniform(seed[0], row) * total[k]), total[k] - 1)
        descend(leaves, nodes, pages, capacity, slots, mass)
    # short loops, so that the cache misses of the rows overlap
    for row in range(rows):
        slots[row] = _inside(slot_at[_inside(slots[row], capacity)], places.shape[1])
    mixture(slots, per_mass, leaves, places, density)
    for row in range(rows):
        k, probability[row] = table[row], density[row]
        if not is_mixed:
            density[row] = mass[row] * (counts[k] / max(total[k], 1))
