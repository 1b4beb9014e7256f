"""The tree kernels for CUDA; see :mod:`torchrl_replay_ext.kernels.tree`.

Draws and reads use one thread block for every few rows. A write is a single thread block, because each of its steps
needs the results of the step before. The largest writes recompute the whole tree instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.launch import add, for_each, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.layouts import BITS, CHILDREN, NOTHING, PAGE_BITS, UNIT, lowest_width

_BITS, _CHILDREN, _NOTHING = tl.constexpr(BITS), tl.constexpr(CHILDREN), tl.constexpr(NOTHING)
_UNIT = tl.constexpr(UNIT)
_PAGE_BITS, _PAGE_MASK = tl.constexpr(PAGE_BITS), tl.constexpr((1 << PAGE_BITS) - 1)
# rows of one thread block; rows of a write that are processed together
_ROWS, _WRITTEN = 16, 256
# rows whose minima or maxima are recomputed together
_REFRESHED = tl.constexpr(64)
# from this number of rows on, a write recomputes the whole tree
_MANY = 16384


class Tree(NamedTuple):
    """A tree as one argument of a kernel; see :func:`tree_of`."""

    leaves: Tensor
    nodes: Tensor
    # where the lowest level begins in ``nodes``
    lowest: int
    pages: Tensor | None
    num_pages: int
    capacity: int
    # above the leaves
    levels: Any


def tree_of(leaves: Tensor, nodes: Tensor, pages: Tensor | None, capacity: int) -> Tree:
    """The tree that a kernel takes, from the arguments of a loop."""
    levels = tl.constexpr(max(1, -(-(capacity - 1).bit_length() // BITS)))
    lowest = len(nodes) - lowest_width(len(leaves))
    return Tree(leaves, nodes, lowest, pages, len(leaves) >> PAGE_BITS, capacity, levels)


@jit
def place_of(tree, leaf):
    """The position of a leaf in ``leaves``."""
    place = leaf
    if tree.pages is not None:
        page = within(tl.load(tree.pages + (leaf >> _PAGE_BITS)), tree.num_pages)
        place = (page << _PAGE_BITS) + (leaf & _PAGE_MASK)
    return place


@jit
def _place_of_node(tree, node, is_lowest: tl.constexpr):
    """The position of a node in its level."""
    return place_of(tree, node << _BITS) >> _BITS if is_lowest else node


@jit
def _lowest(tree):
    """The last node of the lowest level, and where the level begins in ``nodes``."""
    return (tl.cast(tree.capacity, tl.int64) - 1) >> _BITS, tl.cast(tree.lowest, tl.int64)


@jit
def _above(last, begin):
    """The same of the level above."""
    last = last >> _BITS
    return last, begin - ((last >> _BITS) + 1) * _CHILDREN


@jit
def _child(entries, first, rest):
    """The child that contains ``rest`` [rows], the sum of the children before it, and the values of the children."""
    children = tl.arange(0, _CHILDREN)
    values = tl.load(entries + first[:, None] + children[None, :])
    running = tl.cumsum(values, axis=1)
    passed = (running <= rest[:, None]) & (children[None, :] < _CHILDREN - 1)
    return tl.sum(passed.to(tl.int64), axis=1), tl.max(tl.where(passed, running, 0), axis=1), values


@jit
def find_leaf(tree, rest):
    """The leaves whose ranges of the running sum contain ``rest`` [n], and their masses."""
    last_leaf = tl.cast(tree.capacity, tl.int64) - 1
    node, begin, width = tl.zeros_like(rest), tl.cast(0, tl.int64), tl.cast(_CHILDREN, tl.int64)
    for level in tl.static_range(1, tree.levels):
        begin += width
        width = ((last_leaf >> (_BITS * (tree.levels - level + 1))) + 1) * _CHILDREN
        first = _place_of_node(tree, node * _CHILDREN, level == tree.levels - 1)
        child, ahead, _ = _child(tree.nodes + begin, first, rest)
        rest -= ahead
        node = tl.minimum(node * _CHILDREN + child, last_leaf >> (_BITS * (tree.levels - level)))
    child, _, values = _child(tree.leaves, place_of(tree, node * _CHILDREN), rest)
    node = tl.minimum(node * _CHILDREN + child, last_leaf)
    is_drawn = tl.arange(0, _CHILDREN)[None, :] == (node & (_CHILDREN - 1))[:, None]
    return node, tl.sum(tl.where(is_drawn, values, 0), axis=1)


@jit
def _find(tree, target):
    """:func:`find_leaf`; ``target`` may be fractions of the total."""
    if target.dtype == tl.float64:
        total = tl.load(tree.nodes)
        # the product may be rounded up to the total
        target = tl.minimum((target * total.to(tl.float64)).to(tl.int64), total - 1)
    return find_leaf(tree, target)


@jit
def sum_before(tree, node):
    """The sum of all leaves before each leaf of ``node`` [n]."""
    children = tl.arange(0, _CHILDREN)
    end = tl.cast(tree.capacity, tl.int64)
    node = within(node, end + 1)
    # ``capacity`` itself may lie in a block that has no leaves, of which nothing is read
    first = place_of(tree, tl.minimum(node & -_CHILDREN, end - 1))
    before = children[None, :] < (node & (_CHILDREN - 1))[:, None]
    running = tl.load(tree.leaves + first[:, None] + children[None, :], mask=before, other=0)
    last, begin = _lowest(tree)
    for level in tl.static_range(tree.levels):
        node = node >> _BITS
        before = children[None, :] < (node & (_CHILDREN - 1))[:, None]
        first = _place_of_node(tree, tl.minimum(node & -_CHILDREN, last), level == 0)
        entries = tree.nodes + begin + first[:, None] + children[None, :]
        running += tl.load(entries, mask=before, other=0)
        last, begin = _above(last, begin)
    return tl.sum(running, axis=1)


@jit
def _add_above(tree, leaf, change, mask):
    """Add ``change`` to all nodes above ``leaf``."""
    last, begin = _lowest(tree)
    for level in tl.static_range(tree.levels):
        leaf = leaf >> _BITS
        add(tree.nodes + begin + _place_of_node(tree, leaf, level == 0), change, mask)
        last, begin = _above(last, begin)


@jit
def put(tree, leaf, mass, mask=None):
    """``leaves[leaf] = mass``, for one leaf or several ones that are distinct; returns the change where ``mask``."""
    change = mass - tl.atomic_xchg(tree.leaves + place_of(tree, leaf), mass, mask=mask, sem="relaxed")
    _add_above(tree, leaf, change, mask)
    return change


@jit
def _get(tree, leaf):
    is_leaf = (leaf >= 0) & (leaf < tree.capacity)
    return tl.load(tree.leaves + place_of(tree, tl.where(is_leaf, leaf, 0)), mask=is_leaf, other=0)


@jit
def mass_of(number):
    """A number >= 0 in units of masses, rounded up."""
    return tl.ceil(number.to(tl.float64) * _UNIT).to(tl.int64)


@jit
def power(base, exponent):
    """``base`` [n] to the power of ``exponent``, both >= 0; 0^0 = 1."""
    result = tl.exp2(exponent * tl.log2(tl.where(base > 0, base, 1.0)))
    return tl.where(base > 0, result, tl.where(exponent == 0, 1.0, 0.0))


@jit
def refresh(tree, nodes, index, count, is_min: tl.constexpr, num_rows: tl.constexpr):
    """Recompute the smallest positive or largest leaves in all ``nodes`` above ``index``; a single thread block."""
    children = tl.arange(0, _CHILDREN)
    last, begin = _lowest(tree)
    below = tree.leaves
    for level in tl.static_range(tree.levels):
        for start in range(0, count, num_rows):
            rows = start + tl.arange(0, num_rows)
            leaf = tl.load(index + rows, mask=rows < count, other=-1)
            valid = (leaf >= 0) & (leaf < tree.capacity)
            node = tl.where(valid, leaf, 0) >> (_BITS * (level + 1))
            values = tl.load(below + node[:, None] * _CHILDREN + children[None, :])
            result = tl.min(tl.where(values > 0, values, _NOTHING), axis=1) if is_min else tl.max(values, axis=1)
            tl.store(nodes + begin + node, result, mask=valid)
        below = nodes + begin
        last, begin = _above(last, begin)
        tl.debug_barrier()


@jit
def _write(tree, minima, index, mass, alpha, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        leaf = tl.load(index + rows, mask=rows < count, other=-1)
        valid = (leaf >= 0) & (leaf < tree.capacity)
        leaf = tl.where(valid, leaf, 0)
        place = tree.leaves + place_of(tree, leaf)
        old = tl.load(place, mask=valid, other=0)
        new = tl.load(mass + (0 if is_one else 1) * rows, mask=valid, other=0)
        if alpha is not None:
            new = mass_of(power(new.to(tl.float64), tl.load(alpha)))
        tl.debug_barrier()
        # masses are >= 0; of duplicates, the last row leaves the smallest negative number
        mark = -1 - rows.to(tl.int64)
        tl.atomic_min(place, mark, mask=valid)
        tl.debug_barrier()
        wins = valid & (tl.load(place, mask=valid, other=0) == mark)
        tl.debug_barrier()
        tl.store(place, new, mask=wins)
        _add_above(tree, leaf, new - old, wins & (new != old))
        tl.debug_barrier()
    if minima is not None:
        refresh(tree, minima, index, count, True, _REFRESHED if num_rows > _REFRESHED else num_rows)


def root(nodes, value):
    """See the loop of the same name."""
    value.copy_(nodes[:1])


def get(leaves, pages, capacity, index, mass):
    """See the loop of the same name."""
    for_each(_get, tree_of(leaves, leaves, some(pages), capacity), index, mass)


def draw(leaves, nodes, pages, capacity, target, leaf, mass):
    """See the loop of the same name, and ``find``: a target in [0, 1) is a fraction of the total."""
    for_each(_find, tree_of(leaves, nodes, some(pages), capacity), target, leaf, mass, num_rows=_ROWS)


find = draw


def prefix(leaves, nodes, pages, capacity, index, total):
    """See the loop of the same name."""
    for_each(sum_before, tree_of(leaves, nodes, some(pages), capacity), index, total)


def write(leaves, nodes, minima, pages, capacity, index, mass, alpha=None):
    """See the loop of the same name; with ``alpha`` that of ``write_power``."""
    tree, count = tree_of(leaves, nodes, some(pages), capacity), len(index)
    if count >= _MANY:
        # the leaves only
        tree = tree._replace(levels=tl.constexpr(0))
    rows = some(minima), index, mass, alpha
    in_one_block(_write, _WRITTEN, count, tree, *rows, is_one=len(mass) == 1, num_warps=8)
    if count >= _MANY:
        rebuild(leaves, nodes, minima, pages, capacity)


write_power = write


def rebuild(leaves, nodes, minima, pages, capacity):
    """See the loop of the same name."""
    _reduce_levels(leaves, nodes, lambda groups: groups.sum(1), pages[: ((capacity - 1) >> PAGE_BITS) + 1])
    if len(minima):
        _reduce_levels(torch.where(leaves > 0, leaves, NOTHING), minima, lambda groups: groups.amin(1), pages)


def refresh_maxima(leaves, maxima, capacity, index):
    """See the loop of the same name."""
    tree = tree_of(leaves, maxima, None, capacity)
    in_one_block(refresh, _REFRESHED.value, len(index), tree, maxima, index, is_min=False)


def rebuild_maxima(leaves, maxima, capacity):
    """See the loop of the same name."""
    _reduce_levels(leaves, maxima, lambda groups: groups.amax(1), leaves[:0])


def _reduce_levels(values: Tensor, nodes: Tensor, reduce: Any, pages: Tensor) -> None:
    """Write one entry to ``nodes`` for 16 entries of each level."""
    begin = len(nodes)
    while begin > 0:
        values = reduce(values.view(-1, CHILDREN))
        width = -(-len(values) // CHILDREN) * CHILDREN
        level = nodes[begin - width : begin]
        level[: len(values)] = values
        is_lowest, begin = begin == len(nodes), begin - width
        values = level.view(-1, CHILDREN)[pages].flatten() if is_lowest and len(pages) else level
