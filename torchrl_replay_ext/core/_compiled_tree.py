"""The tree algorithms for compiled graphs, which process 4 or 8 entries at a time, on one flat tensor per tree.

The functions are the same as in ``_eager_tree``; they require a prepared tree. Loops over levels and children are
unrolled. Writes are in place. A tensor that a graph writes to is never read through a view, because the compiler would
copy the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import add_in_bounds, gather_in_bounds, materialized, scatter_in_bounds, where_int64
from torchrl_replay_ext.core.reduction_tree import LeafRows, ReductionTree, UpdateMask
from torchrl_replay_ext.indices import last_occurrence


def root(tree: ReductionTree) -> Tensor:
    """The last level of the tree, int64 with at most 16 entries for sums, and 256 for minima and maxima."""
    return tree.flat[tree.layout()[-1][0] :]


def write(
    leaves: LeafRows,
    trees: list[ReductionTree],
    place: Tensor,
    block: Tensor,
    values: Tensor,
    mask: UpdateMask | None,
    distinct: bool,
) -> None:
    """Write ``values`` [n] to the leaves at the stored positions ``place`` [n], and update their ancestors.

    See :meth:`SumTree.write`. ``block``: the blocks of the leaves, int64 [n].
    """
    before = gather_in_bounds(leaves.flat, place)
    if mask is not None:
        values = where_int64(mask.valid, values, before)
        change = (values - before) * mask.is_last
    elif distinct:
        change = values - before
    else:
        last = last_occurrence(place)
        values = gather_in_bounds(values, last)
        change = (values - before) * (last == torch.arange(last.shape[0], device=last.device))
    scatter_in_bounds(leaves.flat, place, values)
    for tree in trees:
        if tree.kind == "sum":
            _add(tree, place, block, change)
        else:
            _refresh(tree, place, block)


def _add(tree: ReductionTree, place: Tensor, block: Tensor, change: Tensor) -> None:
    """Add ``change`` [n] to all ancestors of leaves."""
    entry = tree.paths[:, 0] + _ancestors(tree, place, block)
    add_in_bounds(tree.flat, entry.reshape(-1), change.unsqueeze(1).expand_as(entry).reshape(-1))


def _ancestors(tree: ReductionTree, place: Tensor, block: Tensor) -> Tensor:
    """The ancestors of leaves, as numbers within each level of ``flat``; int64 [n, levels]."""
    _, shifts, in_blocks, _ = tree.paths.unbind(1)
    leaf, shift = place.unsqueeze(1), tree.leaves.shift
    if tree.leaves.page_table is not None:
        leaf = leaf + in_blocks * ((block - (place >> shift)) << shift).unsqueeze(1)
    return leaf >> shifts


def refresh(trees: list[ReductionTree], place: Tensor, block: Tensor) -> None:
    """Recompute the ancestors of the leaves at the stored positions ``place`` [n], in the blocks ``block`` [n]."""
    for tree in trees:
        _refresh(tree, place, block)


def _refresh(tree: ReductionTree, place: Tensor, block: Tensor) -> None:
    layout = tree.layout()
    source = tree.leaves.flat
    place, block = materialized(place), materialized(block)
    for number, (begin, _, children) in enumerate(layout[:-1]):
        first = begin + (place & -children)
        entries = gather_in_bounds(source, first.unsqueeze(1) + torch.arange(children, device=place.device))
        value = tree.reduced(tree.of_leaves(entries) if number == 0 else entries)
        place = block if number == tree.row_levels[0] - 1 else place >> (children.bit_length() - 1)
        source = tree.flat
        scatter_in_bounds(source, layout[number + 1][0] + place, value)


def _child(entry: Callable[[int], Tensor], children: int, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Find the child of a node that contains the target ``rest`` [n], and the rest of the target within the child.

    One addition per child replaces the cumulative sum, so that the compiler generates a single loop over the targets.
    """
    running = entry(0)
    number = torch.zeros_like(rest)
    ahead = torch.zeros_like(rest)
    for k in range(1, children):
        passed = (running <= rest).to(torch.int64)
        number = number + passed
        ahead = torch.maximum(ahead, running * passed)
        if k < children - 1:
            running = running + entry(k)
    return number, rest - ahead


def draw(sums: ReductionTree, u: Tensor) -> tuple[Tensor, Tensor]:
    """Find the leaves at the fractions ``u`` [n] of the total, and their masses; leaf 0 with mass 0 if it is 0."""
    total = root(sums).sum()
    # the product may be rounded up to the total
    return find(sums, torch.minimum((u * total).to(torch.int64), total - 1))


def find(sums: ReductionTree, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find the leaves whose ranges of the running sum contain ``target`` [n]; returns leaves and masses."""
    layout, leaves = sums.layout(), sums.leaves
    begin, length, _ = layout[-1]
    node, rest = _child(lambda k: sums.flat[begin + k], length, target)
    block = node
    for number in reversed(range(len(layout) - 1)):
        begin, _, children = layout[number]
        if number == sums.row_levels[0] - 1:
            block, node = node, leaves.row_of(node)
        level = sums.flat if number else leaves.flat
        first = begin + node * children
        child, rest = _child(lambda k, level=level, first=first: gather_in_bounds(level, first + k), children, rest)
        node = node * children + child
    mass = gather_in_bounds(leaves.flat, node)
    # Masses are below 2^62, so ``mass >> 62`` is 0. The addition makes the leaf depend on the read of its mass.
    # Otherwise the compiler may move the read after an update, and must then copy the whole tree.
    return (block << leaves.shift) + (node & (leaves.fanout - 1)) + (mass >> 62), mass


def prefix(sums: ReductionTree, index: Tensor) -> Tensor:
    """Sum of the masses of all leaves before each leaf of ``index`` [n]."""
    layout, leaves = sums.layout(), sums.leaves
    block, place = leaves.address(materialized(index))
    children, first = layout[0][2], place & -layout[0][2]
    result = torch.zeros_like(index)
    for k in range(children - 1):
        result = result + gather_in_bounds(leaves.flat, first + k) * (first + k < place)
    nodes = _ancestors(sums, place, block)
    begin, length, _ = layout[-1]
    if len(layout) > 2:
        # the leaves are the last dimension, along which the compiler then vectorizes
        begins, _, _, masks = sums.paths[:-1].view(-1, 4, 1, 1).unbind(1)
        node = nodes[:, :-1].T.unsqueeze(1)
        sibling = torch.arange(max(children for *_, children in layout[1:-1]) - 1, device=index.device).unsqueeze(1)
        entry = begins + (node & ~masks) + sibling
        result = result + (gather_in_bounds(sums.flat, entry) * (sibling < (node & masks))).sum((0, 1))
    entry = torch.arange(length - 1, device=index.device).unsqueeze(1)
    return result + (gather_in_bounds(sums.flat, begin + entry) * (entry < nodes[:, -1])).sum(0)
