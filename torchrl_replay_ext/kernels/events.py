"""Loops over event tables: which table holds which slots, in which order, and the steps before each stored one.

The arrays of :class:`~torchrl_replay_ext.core.event_tables.EventTables`:

* ``slot_at``: the slot at each position of all tables, -1 if there is none. Table k has the positions ``begins[k]`` to
  ``begins[k + 1]`` - 1, and its entries are at the first ``counts[k]`` of them, in any order.
* ``links``: the next older and the next newer entry for each entry, -1 if there is none. They and ``heads``, the oldest
  and the newest entry of each table, count positions from that of the first list.
* ``position_of``: the position of each slot in each list; ``NEVER_LISTED`` if its transition has never been there,
  ``LEFT`` if it has been there before.
* ``number``: the number of each slot's transition, in the order of writing. ``step_before``: the slot of the step
  before it in the same episode, -1 if there is none.
* ``free``: a queue of the slots that no table holds; empty in a ring, whose default table is no list.
* ``journal``: each position that changed, and the slot that entered or left it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torchrl_replay_ext.kernels.layouts import (
    CHANGES,
    FREE_HEAD,
    FREE_TAIL,
    LEFT,
    NEVER_LISTED,
    NEXT_SLOT,
    UNIT,
    WRITTEN,
)
from torchrl_replay_ext.kernels.loop import inlined, loop, part, uniform
from torchrl_replay_ext.kernels.tree import descend, prefix, write_all

# the methods of ``allocate``
SYSTEMATIC, MULTINOMIAL, LARGEST_REMAINDER = range(3)


@part
def _inside(index, size):
    return min(max(index, 0), size - 1)


class Tables(NamedTuple):
    """The arrays of all tables, which every loop on the CPU takes last, ``t`` in short."""

    slot_at: Any
    links: Any
    position_of: Any
    heads: Any
    counts: Any
    begins: Any
    number: Any
    step_before: Any
    free: Any
    counters: Any
    journal: Any


@part
def _note(position, slot, t):
    """Write a change to the journal."""
    row = t.counters[CHANGES] % t.journal.shape[0]
    t.journal[row, 0], t.journal[row, 1] = position, slot
    t.counters[CHANGES] += 1


@inlined
def _first_list(t):
    """The first table that is a list, and its first position."""
    first = t.counts.shape[0] - t.position_of.shape[0]
    return first, t.begins[first]


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
def _remove(k, entry, t):
    """Remove an entry of a table; the last one moves to its position."""
    first, base = _first_list(t)
    entry = _inside(entry, t.links.shape[1])
    slot = _inside(t.slot_at[base + entry], t.position_of.shape[1])
    t.position_of[k - first, slot] = LEFT
    _join(k, t.links[0, entry], t.links[1, entry], t.links, t.heads)
    _note(base + entry, slot, t)
    t.counts[k] = max(t.counts[k] - 1, 0)
    last = t.begins[k] + t.counts[k] - base
    if last != entry:
        moved = _inside(t.slot_at[base + last], t.position_of.shape[1])
        t.slot_at[base + entry], t.position_of[k - first, moved] = moved, base + entry
        older, newer = t.links[0, last], t.links[1, last]
        t.links[0, entry], t.links[1, entry] = older, newer
        _join(k, older, entry, t.links, t.heads)
        _join(k, entry, newer, t.links, t.heads)
        _note(base + last, moved, t)
    t.slot_at[base + last] = -1
    if t.free.shape[0] > 0:
        for each_list in range(t.position_of.shape[0]):
            if t.position_of[each_list, slot] >= 0:
                return
        t.free[t.counters[FREE_TAIL] % t.free.shape[0]] = slot
        t.counters[FREE_TAIL] += 1


@inlined
def _put(k, slot, t):
    """Make ``slot`` the newest entry of a table that is not full."""
    first, base = _first_list(t)
    position = t.begins[k] + t.counts[k]
    entry = position - base
    t.counts[k] += 1
    t.slot_at[position] = slot
    t.position_of[k - first, slot] = position
    _join(k, t.heads[1, k], entry, t.links, t.heads)
    t.links[1, entry], t.heads[1, k] = -1, entry
    _note(position, slot, t)


@part
def _is_stored(slot, number, t):
    """True if the default table still holds the transition ``number`` that was written to ``slot``."""
    return t.number[slot] == number and (t.free.shape[0] == 0 or t.position_of[0, slot] >= 0)


@inlined
def _step_before(slot, t):
    """The slot of the step before that in ``slot``, -1 if the default table does not hold it."""
    previous = min(t.step_before[slot], t.step_before.shape[0] - 1)
    if previous < 0 or t.number[previous] >= t.number[slot] or not _is_stored(previous, t.number[previous], t):
        return -1
    return previous


@loop
def write(last_steps, cut, slots, stream, trajectory, is_last, is_first, occurred, table_of, history, *tables):
    """Write rows to the default table, and fill the event tables, row by row.

    Args:
        last_steps: slot and number of the last step of the open episode of each stream, and its trajectory, int64
            [streams, 3]; slot -1 if there is none.
        cut: a result, int64 [1]: the number of histories that lack steps which the default table no longer holds.
        slots: the slots, int64 [n]; with pinned tables a result.
        stream: the stream of each row, as its row of ``last_steps``, int64 [n].
        trajectory: trajectory id of each row, int64 [n].
        is_last: True if the row is the last of an episode, bool [n].
        is_first: True if the row is the first of an episode, bool [n].
        occurred: True if an event occurs in a row, bool [n, events].
        table_of: table of each event.
        history: τ of each event.
        tables: the arrays of :class:`Tables`.
    """
    t = Tables(*tables)
    first, base = _first_list(t)
    num_slots, is_pinned = t.position_of.shape[1], t.free.shape[0] > 0
    longest = 1
    for event in range(history.shape[0]):
        for row in range(slots.shape[0]):
            if occurred[row, event]:
                longest = max(longest, min(history[event], num_slots))
                break
    path = np.empty(longest, np.int64)
    for row in range(slots.shape[0]):
        last_step = last_steps[stream[row]]
        previous = min(last_step[0], num_slots - 1)
        goes_on = previous >= 0 and not is_first[row] and last_step[2] == trajectory[row]
        if not (goes_on and _is_stored(previous, last_step[1], t)):
            previous = -1
        slot = _inside(slots[row], num_slots)
        for k in range(t.position_of.shape[0]):
            leaving = t.position_of[k, slot] - base
            if is_pinned:
                # so that a slot is free
                leaving = t.heads[0, 0] if k == 0 and t.counts[0] >= t.begins[1] else -1
            if leaving >= 0:
                _remove(first + k, leaving, t)
        if is_pinned:
            slot = np.int64(_inside(t.free[t.counters[FREE_HEAD] % t.free.shape[0]], num_slots))
            t.counters[FREE_HEAD] += 1
        elif slot >= t.counts[0]:
            t.counts[0] = slot + 1
            _note(slot, slot, t)
        t.position_of[:, slot] = NEVER_LISTED
        slots[row], t.number[slot], t.step_before[slot] = slot, t.counters[WRITTEN], previous
        t.counters[WRITTEN] += 1
        for k in range(first, t.counts.shape[0]):
            reach = 1 if k == 0 else 0
            for event in range(history.shape[0]):
                if occurred[row, event] and table_of[event] == k:
                    reach = max(reach, min(history[event], num_slots))
            path_len, step = 0, slot
            while path_len < reach and step >= 0:
                path[path_len] = step
                path_len += 1
                step = _step_before(step, t)
            cut[0] += path_len < reach and t.step_before[path[path_len - 1]] >= 0
            for at in range(path_len - 1, -1, -1):
                if t.position_of[k - first, path[at]] == NEVER_LISTED:
                    if t.counts[k] >= t.begins[k + 1] - t.begins[k]:
                        _remove(k, t.heads[0, k], t)
                    _put(k, path[at], t)
        last_step[0], last_step[1], last_step[2] = -1 if is_last[row] else slot, t.number[slot], trajectory[row]
    if slots.shape[0] > 0:
        t.counters[NEXT_SLOT] = (slots[slots.shape[0] - 1] + 1) % num_slots


@loop
def remove(slots, *tables):
    """Remove the entries of ``slots`` [n]."""
    t = Tables(*tables)
    first, base = _first_list(t)
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= t.position_of.shape[1]:
            continue
        for k in range(t.position_of.shape[0]):
            if t.position_of[k, slot] >= 0:
                _remove(first + k, t.position_of[k, slot] - base, t)


@loop
def order(result, table, *tables):
    """The slots of a table, oldest entry first, [counts[table]]."""
    t = Tables(*tables)
    _, base = _first_list(t)
    entry = t.heads[0, table]
    for row in range(result.shape[0]):
        entry = _inside(entry, t.links.shape[1])
        result[row] = t.slot_at[base + entry]
        entry = t.links[1, entry]


@loop
def earlier(slots, slot, number, *tables):
    """The steps up to that in ``slot``, transition ``number``, the last one first, in ``slots`` [n]; -1 before them."""
    t = Tables(*tables)
    step = min(max(slot, 0), t.number.shape[0] - 1)
    if not _is_stored(step, number, t):
        step = -1
    for row in range(slots.shape[0]):
        slots[row] = step
        if step >= 0:
            step = _step_before(step, t)


@part
def _mass(slot, d, alpha):
    """The mass of a slot; see :func:`set_masses`."""
    if d.shape[0] == 0:
        return UNIT
    return np.int64(np.ceil(abs(np.float64(d[_inside(slot, d.shape[0])])) ** alpha[0] * UNIT))


@loop
def set_masses(leaves, nodes, pages, d, alpha, slots, slot_at, position_of, counts, journal, begin, end):
    """Set the masses of the entries that changed with the numbers ``begin`` to ``end`` - 1, and of ``slots``.

    The leaves of the tree are the positions of the tables. The mass of an entry is the power of the absolute ``d`` of
    its slot with the exponent ``alpha[0]``, or 1 unit if ``d`` is empty.
    """
    begin, first, count = max(begin, end - journal.shape[0]), counts.shape[0] - position_of.shape[0], 0
    size = end - begin + slots.shape[0] * counts.shape[0]
    index, mass = np.full(size, -1), np.empty(size, np.int64)
    for row in range(begin, end):
        at = _inside(journal[row % journal.shape[0], 0], slot_at.shape[0])
        index[count], mass[count] = at, _mass(slot_at[at], d, alpha) if slot_at[at] >= 0 else 0
        count += 1
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= position_of.shape[1]:
            continue
        new = _mass(slot, d, alpha)
        for k in range(counts.shape[0]):
            index[count], mass[count] = slot if k < first else position_of[k - first, slot], new
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
def mixture(slots, per_mass, leaves, position_of, probability):
    """The sums of the masses of the entries of each of ``slots`` [n], times ``per_mass`` of their tables."""
    first = per_mass.shape[0] - position_of.shape[0]
    probability[:] = 0
    for k in range(per_mass.shape[0]):
        for row in range(slots.shape[0]):
            slot = np.int64(_inside(slots[row], position_of.shape[1]))
            position = slot if k < first else position_of[k - first, slot]
            if position >= 0:
                probability[row] += per_mass[k] * leaves[_inside(position, leaves.shape[0])]


@loop
def draw(
    seed, shares, min_sizes, allocation, leaves, nodes, pages, is_uniform, counts, begins, slot_at, position_of,
    is_mixed, table, eta, slots, density, probability,
):  # fmt: skip
    """Draw slots from tables.

    * ``seed``, int64 [1], determines the result.
    * ``shares`` are η of each table, float64. A table is used from ``min_sizes`` entries on; -1 stands for the number
      of rows.
    * ``allocation``: how rows are divided among tables.
    * ``leaves``, ``nodes``, ``pages`` are the tree of the masses of all positions. ``is_uniform``: True if all masses
      are 0 or 1 unit.
    * ``counts``, ``begins``, ``slot_at`` and ``position_of``: see above.
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
        slots[row] = _inside(slot_at[_inside(slots[row], capacity)], position_of.shape[1])
    mixture(slots, per_mass, leaves, position_of, density)
    for row in range(rows):
        k, probability[row] = table[row], density[row]
        if not is_mixed:
            density[row] = mass[row] * (counts[k] / max(total[k], 1))
