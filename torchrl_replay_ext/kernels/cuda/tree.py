"""The tree kernels for CUDA; see :mod:`torchrl_replay_ext.kernels.tree`.

Draws and reads use one thread block for every few rows. A write is a single thread block, because the minima need all
leaves of the rows. The largest writes use several, and recompute all minima.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.launch import add, for_each, in_blocks, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.layouts import BITS, CHILDREN, NOTHING, PAGE_BITS, UNIT, lowest_width

_BITS, _CHILDREN, _NOTHING = tl.constexpr(BITS), tl.constexpr(CHILDREN), tl.constexpr(NOTHING)
_UNIT, _PAGE_BITS = tl.constexpr(UNIT), tl.constexpr(PAGE_BITS)
# rows of one thread block; rows of a write that are processed together
_ROWS, _WRITTEN = 16, 256
# rows whose minima or maxima are recomputed together
_REFRESHED = tl.constexpr(64)
# from this number of rows on, a write recomputes all minima
_MANY = 2048


class Tree(NamedTuple):
    """A tree as one argument of a kernel; see :func:`tree_of`."""

    leaves: Tensor
    nodes: Tensor
    # where the lowest level of ``nodes`` ends, or would end without pages
    end: int
    pages: Tensor | None
    num_pages: int
    capacity: int
    # above the leaves
    levels: Any


def tree_of(leaves: Tensor, nodes: Tensor, pages: Tensor | None, capacity: int) -> Tree:
    """The tree that a kernel takes, from the arguments of a loop."""
    levels = tl.constexpr(max(1, -(-(capacity - 1).bit_length() // BITS)))
    end = len(nodes) - lowest_width(len(leaves)) + lowest_width(capacity)
    return Tree(leaves, nodes, end, pages, len(leaves) >> PAGE_BITS, capacity, levels)


@jit
def place_of(tree, node, level: tl.constexpr = 0):
    """The position of a node among those of its level that are stored; the leaves are level 0."""
    place = node
    # the other levels are stored as a whole
    if level < 2 and tree.pages is not None:
        bits: tl.constexpr = _PAGE_BITS - level * _BITS
        block = node >> bits
        page = within(tl.load(tree.pages + block), tree.num_pages)
        place = node + ((page - block) << bits)
    return place


@jit
def _last(tree, level: tl.constexpr):
    """The last node of a level."""
    return (tl.cast(tree.capacity, tl.int64) - 1) >> (_BITS * level)


@jit
def _begin(tree, level: tl.constexpr):
    """Where a level above the leaves begins in ``nodes``."""
    begin = tl.cast(tree.end, tl.int64)
    for above in tl.static_range(2, level + 2):
        begin -= (_last(tree, above) + 1) * _CHILDREN
    return begin


@jit
def find_leaf(tree, rest):
    """The leaves whose ranges of the running sum contain ``rest`` [n], or fractions of the total; and their masses."""
    if rest.dtype == tl.float64:
        total = tl.load(tree.nodes)
        # the product may be rounded up to the total
        rest = tl.minimum((rest * total.to(tl.float64)).to(tl.int64), total - 1)
    children, node = tl.arange(0, _CHILDREN)[None, :], tl.zeros_like(rest)
    for level in tl.static_range(tree.levels - 1, -1, -1):
        entries = tree.nodes + _begin(tree, level) if level > 0 else tree.leaves
        values = tl.load(entries + place_of(tree, node * _CHILDREN, level)[:, None] + children)
        running = tl.cumsum(values, axis=1)
        passed = (running <= rest[:, None]) & (children < _CHILDREN - 1)
        rest -= tl.max(tl.where(passed, running, 0), axis=1)
        node = tl.minimum(node * _CHILDREN + tl.sum(passed.to(tl.int64), axis=1), _last(tree, level))
    return node, tl.sum(tl.where(children == (node & (_CHILDREN - 1))[:, None], values, 0), axis=1)


@jit
def sum_before(tree, node):
    """The sum of all leaves before each leaf of ``node`` [n]."""
    children, node = tl.arange(0, _CHILDREN)[None, :], within(node, tree.capacity + 1)
    total = tl.zeros_like(node)
    for level in tl.static_range(tree.levels + 1):
        entries = tree.nodes + _begin(tree, level) if level > 0 else tree.leaves
        before = children < (node & (_CHILDREN - 1))[:, None]
        # the node after the last one may lie in a block that is not stored, of which nothing is read
        first = place_of(tree, tl.minimum(node & -_CHILDREN, _last(tree, level)), level)
        total += tl.sum(tl.load(entries + first[:, None] + children, mask=before, other=0), axis=1)
        node = node >> _BITS
    return total


@jit
def put(tree, leaf, mass, mask):
    """``leaves[leaf] = mass`` where ``mask``; returns the changes. Of rows of the same leaf, any one wins."""
    change = mass - tl.atomic_xchg(tree.leaves + place_of(tree, leaf), mass, mask=mask, sem="relaxed")
    for level in tl.static_range(1, tree.levels + 1):
        leaf = leaf >> _BITS
        add(tree.nodes + _begin(tree, level) + place_of(tree, leaf, level), change, mask & (change != 0))
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
    step: tl.constexpr = num_rows if num_rows < _REFRESHED else _REFRESHED
    children, below = tl.arange(0, _CHILDREN)[None, :], tree.leaves
    for level in tl.static_range(1, tree.levels + 1):
        for start in range(0, count, step):
            rows = start + tl.arange(0, step)
            leaf = tl.load(index + rows, mask=rows < count, other=-1)
            valid = (leaf >= 0) & (leaf < tree.capacity)
            node = tl.where(valid, leaf, 0) >> (_BITS * level)
            values = tl.load(below + node[:, None] * _CHILDREN + children)
            result = tl.min(tl.where(values > 0, values, _NOTHING), axis=1) if is_min else tl.max(values, axis=1)
            tl.store(nodes + _begin(tree, level) + node, result, mask=valid)
        below = nodes + _begin(tree, level)
        tl.debug_barrier()


@jit
def _write(tree, minima, index, mass, alpha, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    for start in range(tl.program_id(0) * num_rows, count, tl.num_programs(0) * num_rows):
        rows = start + tl.arange(0, num_rows)
        leaf = tl.load(index + rows, mask=rows < count, other=-1)
        valid = (leaf >= 0) & (leaf < tree.capacity)
        new = tl.load(mass + (0 if is_one else 1) * rows, mask=valid, other=0)
        if alpha is not None:
            new = mass_of(power(new.to(tl.float64), tl.load(alpha)))
        put(tree, tl.where(valid, leaf, 0), new, valid)
    if minima is not None:
        tl.debug_barrier()
        refresh(tree, minima, index, count, True, num_rows)


def root(nodes, value):
    """See the loop of the same name."""
    value.copy_(nodes[:1])


def get(leaves, pages, capacity, index, mass):
    """See the loop of the same name."""
    for_each(_get, tree_of(leaves, leaves, some(pages), capacity), index, mass)


def draw(leaves, nodes, pages, capacity, target, leaf, mass):
    """See the loop of the same name, and ``find``: a target in [0, 1) is a fraction of the total."""
    for_each(find_leaf, tree_of(leaves, nodes, some(pages), capacity), target, leaf, mass, num_rows=_ROWS)


find = draw


def prefix(leaves, nodes, pages, capacity, index, total):
    """See the loop of the same name."""
    for_each(sum_before, tree_of(leaves, nodes, some(pages), capacity), index, total)


def write(leaves, nodes, minima, pages, capacity, index, mass, alpha=None):
    """See the loop of the same name; with ``alpha`` that of ``write_power``. Of duplicates, any one wins."""
    tree, is_large = tree_of(leaves, nodes, some(pages), capacity), len(index) >= _MANY
    rows = None if is_large else some(minima), index, mass, alpha
    launch = in_blocks if is_large else in_one_block
    launch(_write, _WRITTEN, len(index), tree, *rows, is_one=len(mass) == 1, num_warps=8)
    if is_large:
        _rebuild_minima(leaves, minima)


write_power = write


def rebuild(leaves, nodes, minima, pages, capacity):
    """See the loop of the same name."""
    _reduce_levels(leaves, nodes, lambda groups: groups.sum(1), pages[: ((capacity - 1) >> PAGE_BITS) + 1])
    _rebuild_minima(leaves, minima)


def _rebuild_minima(leaves: Tensor, minima: Tensor) -> None:
    if len(minima):
        _reduce_levels(torch.where(leaves > 0, leaves, NOTHING), minima, lambda groups: groups.amin(1), leaves[:0])


def refresh_maxima(leaves, maxima, capacity, index):
    """See the loop of the same name."""
    tree = tree_of(leaves, maxima, None, capacity)
    in_one_block(refresh, _REFRESHED.value, len(index), tree, maxima, index, is_min=False)


def rebuild_maxima(leaves, maxima, _capacity):
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
