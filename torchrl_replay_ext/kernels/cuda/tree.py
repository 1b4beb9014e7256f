"""The tree kernels for CUDA; see :mod:`torchrl_replay_ext.kernels.tree`.

Draws and reads use one thread block for every few rows. A write is a single thread block, because each of its steps
needs the results of the step before. The largest writes recompute the whole tree instead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.tree_layout import BITS, CHILDREN, NOTHING, PAGE_BITS, UNIT

_BITS, _CHILDREN, _NOTHING = tl.constexpr(BITS), tl.constexpr(CHILDREN), tl.constexpr(NOTHING)
_UNIT = tl.constexpr(UNIT)
_PAGE_BITS, _PAGE_MASK = tl.constexpr(PAGE_BITS), tl.constexpr((1 << PAGE_BITS) - 1)
# rows of one thread block; rows of a write that are processed together
_ROWS, _WRITTEN = 16, 256
# from this number of rows on, a write recomputes the whole tree
_MANY = 16384


def jit(function: Any) -> Any:
    """``triton.jit``, with a result of any type."""
    return triton.jit(function)


def levels_of(capacity: int) -> int:
    """Number of levels above the leaves."""
    return max(1, -(-(capacity - 1).bit_length() // BITS))


@jit
def place_of(leaf, pages, num_pages, has_pages: tl.constexpr):
    """The position of a leaf in ``leaves``."""
    place = leaf
    if has_pages:
        page = tl.load(pages + (leaf >> _PAGE_BITS))
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        place = (page << _PAGE_BITS) + (leaf & _PAGE_MASK)
    return place


@jit
def _child(entries, first, rest):
    """The child that contains ``rest`` [rows], the sum of the children before it, and the values of the children."""
    children = tl.arange(0, _CHILDREN)
    values = tl.load(entries + first[:, None] + children[None, :])
    running = tl.cumsum(values, axis=1)
    passed = (running <= rest[:, None]) & (children[None, :] < _CHILDREN - 1)
    return tl.sum(passed.to(tl.int64), axis=1), tl.max(tl.where(passed, running, 0), axis=1), values


@jit
def find_leaf(
    leaves, nodes, pages, num_pages, capacity, rest,
    has_pages: tl.constexpr, levels: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    """The leaves whose ranges of the running sum contain ``rest`` [num_rows], and their masses."""
    last_leaf = tl.cast(capacity, tl.int64) - 1
    node = tl.zeros([num_rows], tl.int64)
    begin = tl.cast(0, tl.int64)
    width = tl.cast(_CHILDREN, tl.int64)
    for level in tl.static_range(1, levels):
        begin += width
        width = ((last_leaf >> (_BITS * (levels - level + 1))) + 1) * _CHILDREN
        child, ahead, _ = _child(nodes + begin, node * _CHILDREN, rest)
        rest -= ahead
        node = tl.minimum(node * _CHILDREN + child, last_leaf >> (_BITS * (levels - level)))
    first = place_of(node * _CHILDREN, pages, num_pages, has_pages)
    child, _, values = _child(leaves, first, rest)
    node = tl.minimum(node * _CHILDREN + child, last_leaf)
    is_drawn = tl.arange(0, _CHILDREN)[None, :] == (node & (_CHILDREN - 1))[:, None]
    return node, tl.sum(tl.where(is_drawn, values, 0), axis=1)


@jit
def _walk(
    leaves, nodes, pages, num_pages, capacity, target, leaf, mass, count,
    is_fraction: tl.constexpr, has_pages: tl.constexpr, levels: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    in_batch = rows < count
    rest = tl.load(target + rows, mask=in_batch, other=0)
    if is_fraction:
        total = tl.load(nodes)
        # the product may be rounded up to the total
        rest = tl.minimum((rest * total.to(tl.float64)).to(tl.int64), total - 1)
    node, found = find_leaf(leaves, nodes, pages, num_pages, capacity, rest, has_pages, levels, num_rows)
    tl.store(leaf + rows, node, mask=in_batch)
    tl.store(mass + rows, found, mask=in_batch)


@jit
def sum_before(tree, node):
    """The sum of all leaves before each leaf of ``node`` [n]."""
    children = tl.arange(0, _CHILDREN)
    last = tl.cast(tree.capacity, tl.int64) - 1
    node = tl.minimum(tl.maximum(node, 0), last + 1)
    # ``capacity`` itself may lie in a block that has no leaves, of which nothing is read
    first = place_of(tl.minimum(node & -_CHILDREN, last), tree.pages, tree.num_pages, tree.has_pages)
    before = children[None, :] < (node & (_CHILDREN - 1))[:, None]
    running = tl.load(tree.leaves + first[:, None] + children[None, :], mask=before, other=0)
    begin = tl.cast(tree.size, tl.int64)
    for _ in tl.static_range(tree.levels):
        node = node >> _BITS
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        before = children[None, :] < (node & (_CHILDREN - 1))[:, None]
        entries = tree.nodes + begin + (node & -_CHILDREN)[:, None] + children[None, :]
        running += tl.load(entries, mask=before, other=0)
    return tl.sum(running, axis=1)


@jit
def _prefix(tree, index, total, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    node = tl.load(index + rows, mask=rows < count, other=0)
    tl.store(total + rows, sum_before(tree, node), mask=rows < count)


@jit
def put(tree, leaf, mass, mask):
    """``leaves[leaf] = mass`` where ``mask``, for a single leaf; returns the change."""
    tl.debug_barrier()
    place = place_of(leaf, tree.pages, tree.num_pages, tree.has_pages)
    change = tl.where(mask, mass - tl.load(tree.leaves + place), 0)
    tl.debug_barrier()
    tl.store(tree.leaves + place, mass, mask=mask)
    node, last, begin = leaf, tl.cast(tree.capacity, tl.int64) - 1, tl.cast(tree.size, tl.int64)
    for _ in tl.static_range(tree.levels):
        node = node >> _BITS
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        add(tree.nodes + begin + node, change, mask)
    tl.debug_barrier()
    return change


@jit
def add(pointer, value, mask):
    """Add a number that no other thread changes."""
    tl.store(pointer, tl.load(pointer) + value, mask=mask)


@jit
def _get(leaves, pages, num_pages, capacity, index, mass, count, has_pages: tl.constexpr, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    leaf = tl.load(index + rows, mask=rows < count, other=-1)
    is_leaf = (leaf >= 0) & (leaf < capacity)
    place = place_of(tl.where(is_leaf, leaf, 0), pages, num_pages, has_pages)
    tl.store(mass + rows, tl.load(leaves + place, mask=is_leaf, other=0), mask=rows < count)


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
def refresh(
    leaves, nodes, size, pages, num_pages, capacity, index, count,
    is_min: tl.constexpr, has_pages: tl.constexpr, levels: tl.constexpr, num_together: tl.constexpr,
):  # fmt: skip
    """Compute the smallest positive or largest entries of all nodes above ``index`` again; a single thread block."""
    children = tl.arange(0, _CHILDREN)
    last_leaf = tl.cast(capacity, tl.int64) - 1
    last = last_leaf
    begin = tl.cast(size, tl.int64)
    below = leaves
    for level in tl.static_range(levels):
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        for start in range(0, count, num_together):
            rows = start + tl.arange(0, num_together)
            leaf = tl.load(index + rows, mask=rows < count, other=-1)
            valid = (leaf >= 0) & (leaf <= last_leaf)
            node = tl.where(valid, leaf, 0) >> (_BITS * (level + 1))
            first = place_of(node * _CHILDREN, pages, num_pages, has_pages and level == 0)
            values = tl.load(below + first[:, None] + children[None, :])
            result = tl.min(tl.where(values > 0, values, _NOTHING), axis=1) if is_min else tl.max(values, axis=1)
            tl.store(nodes + begin + node, result, mask=valid)
        below = nodes + begin
        tl.debug_barrier()


@jit
def _write(
    leaves, nodes, minima, size, pages, num_pages, capacity, index, mass, alpha, count,
    is_one_mass: tl.constexpr, is_power: tl.constexpr, track_min: tl.constexpr, has_pages: tl.constexpr,
    levels: tl.constexpr, num_rows: tl.constexpr, num_together: tl.constexpr,
):  # fmt: skip
    last_leaf = tl.cast(capacity, tl.int64) - 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        leaf = tl.load(index + rows, mask=rows < count, other=-1)
        valid = (leaf >= 0) & (leaf <= last_leaf)
        leaf = tl.where(valid, leaf, 0)
        place = place_of(leaf, pages, num_pages, has_pages)
        old = tl.load(leaves + place, mask=valid, other=0)
        new = tl.load(mass + (0 if is_one_mass else 1) * rows, mask=valid, other=0)
        if is_power:
            new = mass_of(power(new.to(tl.float64), tl.load(alpha)))
        tl.debug_barrier()
        # masses are >= 0; of duplicates, the last row leaves the smallest negative number
        mark = -1 - rows.to(tl.int64)
        tl.atomic_min(leaves + place, mark, mask=valid)
        tl.debug_barrier()
        wins = valid & (tl.load(leaves + place, mask=valid, other=0) == mark)
        tl.debug_barrier()
        tl.store(leaves + place, new, mask=wins)
        node, last = leaf, last_leaf
        begin = tl.cast(size, tl.int64)
        for _ in tl.static_range(levels):
            node = node >> _BITS
            last = last >> _BITS
            begin -= ((last >> _BITS) + 1) * _CHILDREN
            tl.atomic_add(nodes + begin + node, new - old, mask=wins & (new != old))
        tl.debug_barrier()
    if track_min:
        refresh(leaves, minima, size, pages, num_pages, capacity, index, count, True, has_pages, levels, num_together)


class Tree(NamedTuple):
    """A tree as one argument of a kernel."""

    leaves: Tensor
    nodes: Tensor
    size: int
    pages: Tensor
    num_pages: int
    capacity: int
    has_pages: Any
    levels: Any


def tree_of(leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int) -> Tree:
    """The tree that a kernel takes, from the arguments of a loop."""
    constants = tl.constexpr(len(pages) > 0), tl.constexpr(levels_of(capacity))
    return Tree(leaves, nodes, len(nodes), pages, _num_pages(leaves), capacity, *constants)


def _num_pages(leaves: Tensor) -> int:
    return leaves.shape[0] >> PAGE_BITS


def in_blocks(kernel: Any, num_rows: int, count: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel with one thread block for every ``num_rows`` of ``count`` rows."""
    if count:
        kernel[(triton.cdiv(count, num_rows),)](*arguments, count, num_rows=num_rows, **constants)


def root(nodes, value):
    """See the loop of the same name."""
    value.copy_(nodes[:1])


def get(leaves, pages, capacity, index, mass):
    """See the loop of the same name."""
    state = leaves, pages, _num_pages(leaves), capacity
    in_blocks(_get, 256, len(index), *state, index, mass, has_pages=len(pages) > 0)


def _descend(leaves, nodes, pages, capacity, target, leaf, mass):
    in_blocks(
        _walk, _ROWS, len(target), leaves, nodes, pages, _num_pages(leaves), capacity, target, leaf, mass,
        is_fraction=target.is_floating_point(), has_pages=len(pages) > 0, levels=levels_of(capacity),
    )  # fmt: skip


# a target in [0, 1) is a fraction of the total
draw = find = _descend


def prefix(leaves, nodes, pages, capacity, index, total):
    """See the loop of the same name."""
    in_blocks(_prefix, _ROWS, len(index), tree_of(leaves, nodes, pages, capacity), index, total)


def write(leaves, nodes, minima, pages, capacity, index, mass, alpha=None):
    """See the loop of the same name; with ``alpha`` that of ``write_power``."""
    count = index.shape[0]
    # marks of rows and their masses; the largest writes change only the leaves here
    levels = levels_of(capacity) if count < _MANY else 0
    if count:
        rows = min(_WRITTEN, triton.next_power_of_2(count))
        _write[(1,)](
            leaves, nodes, minima, len(nodes), pages, _num_pages(leaves), capacity, index, mass,
            index if alpha is None else alpha, count,
            is_one_mass=len(mass) == 1, is_power=alpha is not None, track_min=len(minima) > 0,
            has_pages=len(pages) > 0, levels=levels, num_rows=rows, num_together=min(64, rows), num_warps=8,
        )  # fmt: skip
    if count >= _MANY:
        rebuild(leaves, nodes, minima, pages, capacity)


write_power = write


def rebuild(leaves, nodes, minima, pages, capacity):
    """See the loop of the same name."""
    stored = leaves
    if len(pages):
        stored = leaves.view(-1, 1 << PAGE_BITS)[pages].view(-1)[: -(-capacity // CHILDREN) * CHILDREN]
    _reduce_levels(stored, nodes, lambda groups: groups.sum(1))
    if len(minima):
        _reduce_levels(torch.where(stored > 0, stored, NOTHING), minima, lambda groups: groups.amin(1))


def refresh_maxima(leaves, maxima, capacity, index):
    """See the loop of the same name."""
    count = index.shape[0]
    if count:
        refresh[(1,)](
            leaves, maxima, len(maxima), index, 1, capacity, index, count, is_min=False, has_pages=False,
            levels=levels_of(capacity), num_together=min(64, triton.next_power_of_2(count)),
        )  # fmt: skip


def rebuild_maxima(leaves, maxima, capacity):
    """See the loop of the same name."""
    _reduce_levels(leaves, maxima, lambda groups: groups.amax(1))


def _reduce_levels(values: Tensor, nodes: Tensor, reduce: Any) -> None:
    """Write one entry to ``nodes`` for 16 entries of each level."""
    begin = len(nodes)
    while begin > 0:
        values = reduce(values.view(-1, CHILDREN))
        width = -(-len(values) // CHILDREN) * CHILDREN
        begin -= width
        level = nodes[begin : begin + width]
        level[: len(values)] = values
        values = level
