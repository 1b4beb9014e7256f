"""Loops over trees of int64 sums, minima and maxima; ``layouts`` describes the arrays.

Indices out of range are skipped. Walks stay in range whatever the arrays hold, also while another thread changes them.
"""

from __future__ import annotations

import math

import numpy as np

from torchrl_replay_ext.kernels.layouts import BITS, CHILDREN, NOTHING, PAGE_BITS, UNIT
from torchrl_replay_ext.kernels.loop import inlined, loop, part


@part
def place_of(leaf, leaves, pages):
    """The position of a leaf in ``leaves``."""
    if pages.shape[0] == 0:
        return leaf
    page = min(max(pages[leaf >> PAGE_BITS], 0), (leaves.shape[0] >> PAGE_BITS) - 1)
    return (page << PAGE_BITS) + (leaf & ((1 << PAGE_BITS) - 1))


@part
def lowest_level(leaves, nodes):
    """Where the lowest level begins in ``nodes``."""
    return nodes.shape[0] - CHILDREN * (((leaves.shape[0] - 1) >> 2 * BITS) + 1)


@loop
def write(leaves, nodes, minima, pages, capacity, index, mass):
    """``leaves[index] = mass``, in order: of duplicates the last one wins. ``mass``: [n], or [1] for all rows.

    ``minima`` is empty if they are not tracked.
    """
    new = np.empty(index.shape[0], np.int64)
    for row in range(index.shape[0]):
        new[row] = mass[min(row, mass.shape[0] - 1)]
    write_all(leaves, nodes, minima, pages, capacity, index, new)


@part
def write_power(leaves, nodes, minima, pages, capacity, index, d, alpha):
    """:func:`write` the masses d^α of ``d`` [n], rounded up to units of 1 / ``UNIT``."""
    mass = np.empty(index.shape[0], np.int64)
    for row in range(index.shape[0]):
        mass[row] = np.int64(math.ceil(np.float64(d[row]) ** alpha[0] * UNIT))
    write_all(leaves, nodes, minima, pages, capacity, index, mass)


@part
def write_all(leaves, nodes, minima, pages, capacity, index, change):
    """Set the leaves ``index`` [n] to ``change`` [n], which holds the changes afterwards.

    Each level of sums is one short loop, so that the cache misses of the rows overlap.
    """
    place, before = np.empty(index.shape[0], np.int64), np.empty(index.shape[0], np.int64)
    for row in range(index.shape[0]):
        if index[row] < 0 or index[row] >= capacity:
            change[row] = 0
            continue
        place[row] = place_of(index[row], leaves, pages)
        old, mass = leaves[place[row]], change[row]
        change[row] -= old
        leaves[place[row]] = mass
        before[row] = old
    if minima.shape[0] > 0:
        _refresh_minima(leaves, minima, capacity, index, before)
    begin = lowest_level(leaves, nodes)
    for row in range(index.shape[0]):
        if change[row] != 0:
            nodes[begin + (place[row] >> BITS)] += change[row]
    shift, last = BITS, (capacity - 1) >> BITS
    while begin > 0:
        shift += BITS
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        for row in range(index.shape[0]):
            if change[row] != 0:
                nodes[begin + (index[row] >> shift)] += change[row]


@part
def put(leaves, nodes, pages, capacity, leaf, mass):
    """``leaves[leaf] = mass``, for a leaf in range; returns the change."""
    place = place_of(leaf, leaves, pages)
    change = mass - leaves[place]
    if change == 0:
        return change
    leaves[place] = mass
    begin = lowest_level(leaves, nodes)
    nodes[begin + (place >> BITS)] += change
    node, last = leaf >> BITS, (capacity - 1) >> BITS
    while begin > 0:
        node >>= BITS
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        nodes[begin + node] += change
    return change


@part
def _smallest(entries, first):
    """The smallest positive one of 16 entries."""
    smallest = NOTHING
    for k in range(first, first + CHILDREN):
        if 0 < entries[k] < smallest:
            smallest = entries[k]
    return smallest


@part
def _largest(entries, first):
    largest = 0
    for k in range(first, first + CHILDREN):
        largest = max(largest, entries[k])
    return largest


@part
def _sum(entries, first):
    total = 0
    for k in range(first, first + CHILDREN):
        total += entries[k]
    return total


@inlined
def _refresh_minima(leaves, minima, capacity, index, before):
    """Bring the minima, which were right before, up to date.

    ``index`` [n] are the leaves that were set, and ``before`` their masses at that time.
    """
    lowest = lowest_level(leaves, minima)
    rows, count = np.empty(index.shape[0], np.int64), 0
    # Nearly all rows change no minimum. This loop finds the others with few branches: their cache misses overlap.
    for row in range(index.shape[0]):
        if index[row] < 0 or index[row] >= capacity:
            continue
        mass, smallest = leaves[index[row]], minima[lowest + (index[row] >> BITS)]
        rows[count] = row
        count += (0 < mass < smallest) | (before[row] == smallest)
    for k in range(count):
        node, last, begin = index[rows[k]], capacity - 1, minima.shape[0]
        old, new = before[rows[k]], leaves[node]
        while begin > 0 and new != old:
            first = node & -CHILDREN
            node >>= BITS
            last >>= BITS
            below, begin = begin, begin - CHILDREN * ((last >> BITS) + 1)
            smallest = minima[begin + node]
            if 0 < new <= smallest:
                minima[begin + node] = new
            elif old == smallest and begin == lowest:
                minima[begin + node] = _smallest(leaves, first)
            elif old == smallest:
                minima[begin + node] = _smallest(minima, below + first)
            old, new = smallest, minima[begin + node]


@loop
def root(nodes, value):
    """The root of a tree."""
    value[0] = nodes[0]


@loop
def get(leaves, pages, capacity, index, mass):
    """The leaves ``index`` [n]; 0 outside [0, capacity)."""
    for row in range(index.shape[0]):
        is_leaf = 0 <= index[row] < capacity
        mass[row] = leaves[place_of(index[row], leaves, pages)] if is_leaf else 0


@loop
def draw(leaves, nodes, pages, capacity, u, leaf, mass):
    """Find the leaves at the fractions ``u`` [n] of the total: leaf 0 if the total is 0."""
    total = nodes[0]
    for row in range(u.shape[0]):
        # the product may be rounded up to the total
        mass[row] = min(np.int64(u[row] * total), total - 1)
    descend(leaves, nodes, pages, capacity, leaf, mass)


@loop
def find(leaves, nodes, pages, capacity, target, leaf, mass):
    """Find the leaves whose ranges of the running sum contain ``target`` [n]."""
    for row in range(target.shape[0]):
        mass[row] = target[row]
    descend(leaves, nodes, pages, capacity, leaf, mass)


@part
def _choose_children(entries, begin, place, rest):
    """Move each ``place`` [n] from a first child to the child that contains ``rest`` [n], and reduce ``rest``.

    Halves the children four times, each time for the whole batch: short loops without branches read ahead, so that the
    cache misses of the rows overlap.
    """
    size = CHILDREN
    while size > 1:
        size //= 2
        for row in range(place.shape[0]):
            # unsigned, because Numba would look for a negative index with each entry
            half, first = 0, np.uint64(begin + place[row])
            for k in range(size):
                half += entries[first + np.uint64(k)]
            is_passed = half <= rest[row]
            rest[row] -= half if is_passed else 0
            place[row] += size if is_passed else 0


@part
def descend(leaves, nodes, pages, capacity, leaf, mass):
    """Walk from the root to ``leaf`` [n]; ``mass`` [n] is first the rest of the target, at the end that of the leaf."""
    shift, is_paged = BITS, pages.shape[0] > 0
    end = leaves.shape[0] if is_paged else capacity
    block = np.empty(leaf.shape[0] if is_paged else 0, np.int64)
    while (capacity - 1) >> shift:
        shift += BITS
    for row in range(leaf.shape[0]):
        leaf[row] = 0
    begin, width = 0, CHILDREN
    while shift > BITS:
        begin += width
        width = CHILDREN * (((capacity - 1) >> shift) + 1)
        shift -= BITS
        if is_paged and shift == BITS:
            # from here on, positions in the stored blocks
            for row in range(leaf.shape[0]):
                block[row] = leaf[row] >> BITS << PAGE_BITS
                leaf[row] = place_of(block[row], leaves, pages) >> BITS
        _choose_children(nodes, begin, leaf, mass)
        last = ((end if shift == BITS else capacity) - 1) >> shift
        for row in range(leaf.shape[0]):
            leaf[row] = CHILDREN * min(leaf[row], last)
    _choose_children(leaves, np.int64(0), leaf, mass)
    for row in range(leaf.shape[0]):
        place = min(leaf[row], end - 1)
        mass[row] = leaves[place]
        if is_paged:
            place = block[row] + (place & ((1 << PAGE_BITS) - 1))
        leaf[row] = min(place, capacity - 1)


@loop
def prefix(leaves, nodes, pages, capacity, index, total):
    """The sum of all leaves before each leaf of ``index`` [n] in [0, capacity]."""
    for row in range(index.shape[0]):
        node = min(max(index[row], 0), capacity)
        running, first = 0, node & -CHILDREN
        if first < node:
            place = place_of(first, leaves, pages)
            for k in range(node - first):
                running += leaves[place + k]
        node, last, begin = node >> BITS, (capacity - 1) >> BITS, lowest_level(leaves, nodes)
        first = node & -CHILDREN
        if first < node:
            place = begin + (place_of(first << BITS, leaves, pages) >> BITS)
            for k in range(node - first):
                running += nodes[place + k]
        while begin > 0:
            node >>= BITS
            last >>= BITS
            begin -= CHILDREN * ((last >> BITS) + 1)
            for k in range(node & -CHILDREN, node):
                running += nodes[begin + k]
        total[row] = running


@loop
def rebuild(leaves, nodes, minima, pages, capacity):
    """Recompute all sums and minima from the leaves."""
    last, begin = (capacity - 1) >> BITS, lowest_level(leaves, nodes)
    for node in range(leaves.shape[0] >> BITS):
        nodes[begin + node] = _sum(leaves, CHILDREN * node)
        if minima.shape[0] > 0:
            minima[begin + node] = _smallest(leaves, CHILDREN * node)
    is_lowest = True
    while begin > 0:
        last >>= BITS
        below, begin = begin, begin - CHILDREN * ((last >> BITS) + 1)
        for node in range(last + 1):
            first = below + CHILDREN * node
            if is_lowest:
                first = below + (place_of(node << PAGE_BITS, leaves, pages) >> BITS)
            nodes[begin + node] = _sum(nodes, first)
            if minima.shape[0] > 0:
                minima[begin + node] = _smallest(minima, first)
        is_lowest = False


@loop
def refresh_maxima(leaves, maxima, capacity, index):
    """Recompute the maxima above the leaves ``index`` [n]."""
    for row in range(index.shape[0]):
        if 0 <= index[row] < capacity:
            refresh_maximum(leaves, maxima, capacity, index[row])


@part
def refresh_maximum(leaves, maxima, capacity, leaf):
    """Recompute the maxima above a leaf in range."""
    node, last, begin = leaf, capacity - 1, maxima.shape[0]
    largest = _largest(leaves, node & -CHILDREN)
    while begin > 0:
        node >>= BITS
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        if maxima[begin + node] == largest:
            break
        maxima[begin + node] = largest
        largest = _largest(maxima, begin + (node & -CHILDREN))


@loop
def rebuild_maxima(leaves, maxima, capacity):
    """Recompute all maxima from the leaves."""
    last, begin = (capacity - 1) >> BITS, lowest_level(leaves, maxima)
    for node in range(last + 1):
        maxima[begin + node] = _largest(leaves, CHILDREN * node)
    while begin > 0:
        last >>= BITS
        below, begin = begin, begin - CHILDREN * ((last >> BITS) + 1)
        for node in range(last + 1):
            maxima[begin + node] = _largest(maxima, below + CHILDREN * node)
