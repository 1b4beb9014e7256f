"""The tree algorithms for eager code, which process a row at a time, with few operations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, gather_in_bounds, scalar, scatter_in_bounds
from torchrl_replay_ext.core.reduction_tree import ReductionTree, ancestors
from torchrl_replay_ext.indices import FEW


def root(tree: ReductionTree) -> Tensor:
    """The last level of the tree, int64 [n]."""
    return tree.levels[-1]


def refresh(trees: list[ReductionTree], place: Array, block: Array) -> None:
    """Recompute the ancestors of some leaves.

    Args:
        trees: trees with the same leaves, and with the same layout unless they are prepared.
        place: positions of the leaves among the stored leaves, int64 [n], or a slice.
        block: blocks of the leaves, int64 [n], or a slice.
    """
    first = trees[0]
    groups = first.groups[0]
    # here ``block`` equals the shifted ``place``, which saves an operation
    is_block = not first.prepared and first.leaves.page_table is None
    if is_block and isinstance(block, np.ndarray) and len(block) > FEW:
        # large writes fill whole blocks
        block = np.unique(block)
    group = block if is_block else ancestors(place, groups.shape[1].bit_length() - 1)
    contents = gather_in_bounds(groups, group)
    for tree in trees:
        if tree.groups[0].shape != groups.shape:
            groups = tree.groups[0]
            group = ancestors(place, groups.shape[1].bit_length() - 1)
            contents = gather_in_bounds(groups, group)
        _refresh(tree, group, tree.of_leaves(contents), block)


def _refresh(tree: ReductionTree, node: Array, values: Array, block: Array) -> None:
    top = tree.row_levels[-1]
    for number in range(1, top + 1):
        if number == tree.row_levels[0]:
            node = block
        scatter_in_bounds(tree.levels[number], node, tree.reduced(values))
        if number < top:
            groups = tree.groups[number]
            node = ancestors(node, groups.shape[1].bit_length() - 1)
            values = gather_in_bounds(groups, node)
    for number in range(top + 1, len(tree.levels)):
        tree.recompute(number)


def draw(sums: ReductionTree, u: Tensor) -> tuple[Tensor, Tensor]:
    """Find the leaves at the fractions ``u`` [n] of the total; returns leaves and masses, and overwrites ``u``."""
    running = _run(sums)
    total = scalar(running[-1])
    if isinstance(total, Tensor):
        # if the total is 0, the target is -1, which finds leaf 0
        return _find(sums, torch.minimum(u.mul_(total).to(torch.int64), total - 1), running)
    if total == 0:
        raise RuntimeError("all priorities are 0, so no transition can be drawn; use eps > 0.")
    target = u.mul_(total).to(torch.int64)
    if total > 2**53:
        # the product may be rounded up to the total
        target = target.clamp_(max=total - 1)
    return _find(sums, target, running)


def find(sums: ReductionTree, target: Tensor) -> tuple[Tensor, Tensor]:
    """Find the leaves whose ranges of the running sum contain ``target`` [n]; returns leaves and masses."""
    return _find(sums, target, _run(sums))


def _run(sums: ReductionTree) -> Tensor:
    """Compute the inclusive running sums of the top level; ``sums.running`` then holds the exclusive sums."""
    return torch.cumsum(sums.top, 0, out=sums.running[1:])


def _find(sums: ReductionTree, target: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    leaves = sums.leaves
    node = torch.searchsorted(running, target, right=True)
    rest = target - sums.running.index_select(0, node)
    of_leaves, *inner = sums.rows
    for rows in reversed(inner):
        children = rows.index_select(0, node)
        running = children.cumsum(1)
        child = torch.searchsorted(running, rest.unsqueeze(1), right=True)
        rest = rest - (running - children).gather(1, child).squeeze(1)
        node = torch.add(child.squeeze(1), node, alpha=leaves.fanout)
    children = of_leaves.index_select(0, leaves.row_of(node))
    child = torch.searchsorted(children.cumsum(1), rest.unsqueeze(1), right=True)
    leaf = torch.add(child.squeeze(1), node, alpha=leaves.fanout)
    return leaf, children.gather(1, child).squeeze(1)


def prefix(sums: ReductionTree, index: Tensor) -> Tensor:
    """Sum of the masses of all leaves before each leaf of ``index`` [n]."""
    leaves = sums.leaves
    if 2 * index.shape[0] > leaves.flat.shape[0]:
        return _prefix_of_many(sums, index)
    block = index >> leaves.shift
    of_leaves, *inner = sums.rows
    result = _before(sums, of_leaves.index_select(0, leaves.row_of(block)), index)
    for rows in inner:
        parent = block >> leaves.shift
        result = result + _before(sums, rows.index_select(0, parent), block)
        block = parent
    _run(sums)
    return result + sums.running.index_select(0, block)


def _prefix_of_many(sums: ReductionTree, index: Tensor) -> Tensor:
    """Compute :func:`prefix` in one pass over all leaves."""
    block, place = sums.leaves.address(index)
    rows = sums.rows[0]
    running = rows.cumsum(1)
    of_blocks = sums.leaves.in_order(running[:, -1])
    ahead = of_blocks.cumsum(0) - of_blocks
    return ahead[block] + (running - rows).view(-1)[place]


def _before(sums: ReductionTree, rows: Tensor, index: Tensor) -> Tensor:
    """For each row of ``rows`` [n, fanout], the sum of the entries before the entry ``index`` [n] modulo fanout."""
    return (rows & sums.first.index_select(0, index & (sums.leaves.fanout - 1))).sum(1)
