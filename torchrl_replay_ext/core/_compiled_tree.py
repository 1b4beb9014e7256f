"""The tree algorithms for compiled graphs, which process 4 entries at a time, on one flat tensor per tree.

The functions are the same as in ``_eager_tree``; they require a prepared tree. Loops over levels and children are
unrolled. Writes are in place. A tensor that a graph writes to is never read through a view, because the compiler would
copy the tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, scatter_in_bounds
from torchrl_replay_ext.core.reduction_tree import ReductionTree

_PAIRWISE = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


def root(tree: ReductionTree) -> Tensor:
    """The last level of the tree, int64 with at most 16 entries."""
    return tree.flat[tree.layout()[-1][0] :]


def refresh(trees: list[ReductionTree], place: Tensor, block: Tensor) -> None:
    """Recompute the ancestors of the leaves at the stored positions ``place`` [n], in the blocks ``block`` [n]."""
    for tree in trees:
        _refresh(tree, place, block)


def _refresh(tree: ReductionTree, place: Tensor, block: Tensor) -> None:
    pair = _PAIRWISE[tree.kind]
    layout = tree.layout()
    source = tree.leaves.flat
    for number, (begin, _, children) in enumerate(layout[:-1]):
        first = begin + (place & -children)
        entries = [gather_in_bounds(source, first + k) for k in range(children)]
        if number == 0:
            entries = [tree.of_leaves(entry) for entry in entries]
        value = entries[0]
        for entry in entries[1:]:
            value = pair(value, entry)
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
    block, place = leaves.address(index)
    result = torch.zeros_like(index)
    for number, (begin, _, children) in enumerate(layout[:-1]):
        level = sums.flat if number else leaves.flat
        first = place & -children
        for k in range(children - 1):
            result = result + gather_in_bounds(level, begin + first + k) * (first + k < place)
        place = block if number == sums.row_levels[0] - 1 else place >> (children.bit_length() - 1)
    begin, length, _ = layout[-1]
    for k in range(length - 1):
        result = result + sums.flat[begin + k] * (k < place)
    return result
