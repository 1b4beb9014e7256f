"""Loops over trees of int64 sums, minima and maxima; ``tree_layout`` describes the arrays.

Indices out of range are skipped. Walks stay in range whatever the arrays hold, also while another thread changes them.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part
from torchrl_replay_ext.kernels.tree_layout import BITS, CHILDREN, NOTHING, PAGE_BITS


@part
def place_of(leaf, leaves, pages):
    """The position of a leaf in ``leaves``."""
    if pages.shape[0] == 0:
        return leaf
    page = min(max(pages[leaf >> PAGE_BITS], 0), (leaves.shape[0] >> PAGE_BITS) - 1)
    return (page << PAGE_BITS) + (leaf & ((1 << PAGE_BITS) - 1))


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


@part
def _refresh_minima(leaves, minima, pages, capacity, leaf):
    smallest = _smallest(leaves, place_of(leaf & -CHILDREN, leaves, pages))
    node, last, begin = leaf, capacity - 1, minima.shape[0]
    while begin > 0:
        node >>= BITS
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        if minima[begin + node] == smallest:
            break
        minima[begin + node] = smallest
        smallest = _smallest(minima, begin + (node & -CHILDREN))


@part
def set_leaf(leaves, nodes, minima, pages, capacity, leaf, new):
    """``leaves[leaf] = new``, for a leaf in [0, capacity)."""
    place = place_of(leaf, leaves, pages)
    change = new - leaves[place]
    if change == 0:
        return
    leaves[place] = new
    node, last, begin = leaf, capacity - 1, nodes.shape[0]
    while begin > 0:
        node >>= BITS
        last >>= BITS
        begin -= CHILDREN * ((last >> BITS) + 1)
        nodes[begin + node] += change
    if minima.shape[0] > 0:
        _refresh_minima(leaves, minima, pages, capacity, leaf)


@loop
def write(leaves, nodes, minima, pages, capacity, index, mass):
    """``leaves[index] = mass``, in order: of duplicates the last one wins. ``mass``: [n], or [1] for all rows.

    ``minima`` is empty if they are not tracked.
    """
    for row in range(index.shape[0]):
        if 0 <= index[row] < capacity:
            set_leaf(leaves, nodes, minima, pages, capacity, index[row], mass[min(row, mass.shape[0] - 1)])


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
def _child(entries, first, rest):
    """The child that contains ``rest``, and the rest within this child."""
    child, running, ahead = 0, 0, 0
    for k in range(CHILDREN - 1):
        running += entries[first + k]
        is_passed = running <= rest
        child += is_passed
        ahead = running if is_passed else ahead
    return child, rest - ahead


@part
def descend(leaves, nodes, pages, capacity, leaf, mass):
    """Walk from the root to ``leaf`` [n]; ``mass`` [n] is first the rest of the target, at the end that of the leaf.

    The whole batch walks level by level, so that the cache misses of its rows overlap.
    """
    shift = BITS
    while (capacity - 1) >> shift:
        shift += BITS
    leaf[:] = 0
    begin, width = 0, CHILDREN
    while shift > BITS:
        begin += width
        width = CHILDREN * (((capacity - 1) >> shift) + 1)
        shift -= BITS
        last = (capacity - 1) >> shift
        for row in range(leaf.shape[0]):
            child, rest = _child(nodes, begin + CHILDREN * leaf[row], mass[row])
            leaf[row] = min(CHILDREN * leaf[row] + child, last)
            mass[row] = rest
    for row in range(leaf.shape[0]):
        first = place_of(CHILDREN * leaf[row], leaves, pages)
        child, _ = _child(leaves, first, mass[row])
        leaf[row] = min(CHILDREN * leaf[row] + child, capacity - 1)
        mass[row] = leaves[first + (leaf[row] & (CHILDREN - 1))]


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
        last, begin = capacity - 1, nodes.shape[0]
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
    last, begin = (capacity - 1) >> BITS, nodes.shape[0] - CHILDREN * (((capacity - 1) >> 2 * BITS) + 1)
    for node in range(last + 1):
        first = place_of(CHILDREN * node, leaves, pages)
        nodes[begin + node] = _sum(leaves, first)
        if minima.shape[0] > 0:
            minima[begin + node] = _smallest(leaves, first)
    while begin > 0:
        last >>= BITS
        below, begin = begin, begin - CHILDREN * ((last >> BITS) + 1)
        for node in range(last + 1):
            first = below + CHILDREN * node
            nodes[begin + node] = _sum(nodes, first)
            if minima.shape[0] > 0:
                minima[begin + node] = _smallest(minima, first)


@loop
def refresh_maxima(leaves, maxima, capacity, index):
    """Recompute the maxima above the leaves ``index`` [n]."""
    for row in range(index.shape[0]):
        node = index[row]
        if node < 0 or node >= capacity:
            continue
        largest = _largest(leaves, node & -CHILDREN)
        last, begin = capacity - 1, maxima.shape[0]
        while begin > 0:
            node >>= BITS
            last >>= BITS
            begin -= CHILDREN * ((last >> BITS) + 1)
            maxima[begin + node] = largest
            largest = _largest(maxima, begin + (node & -CHILDREN))


@loop
def rebuild_maxima(leaves, maxima, capacity):
    """Recompute all maxima from the leaves."""
    last, begin = (capacity - 1) >> BITS, maxima.shape[0] - CHILDREN * (((capacity - 1) >> 2 * BITS) + 1)
    for node in range(last + 1):
        maxima[begin + node] = _largest(leaves, CHILDREN * node)
    while begin > 0:
        last >>= BITS
        below, begin = begin, begin - CHILDREN * ((last >> BITS) + 1)
        for node in range(last + 1):
            maxima[begin + node] = _largest(maxima, below + CHILDREN * node)
