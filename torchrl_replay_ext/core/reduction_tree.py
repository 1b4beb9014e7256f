"""Rows of int64 leaves, and trees of their sums, minima or maxima, for eager code and compiled graphs."""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, gather_in_bounds, scatter_in_bounds, where_int64
from torchrl_replay_ext.indices import write_last

_INT64_MAX = torch.iinfo(torch.int64).max
# Trees for compiled graphs: number of entries that are reduced to one, and largest number of entries of the last level.
# A draw reads the children of a node one by one, and a sum changes by an addition: few children are best for sums.
# Minima and maxima are recomputed: few levels and a whole cache line per node are best for them.
_COMPILED = {"sum": (4, 16), "min": (8, 256), "max": (8, 256)}
# The same number for the levels above the top of an eager tree.
_ABOVE_TOP = 4


class UpdateMask(NamedTuple):
    """Masks for an update whose rows cannot be selected by value, as in compiled graphs.

    Args:
        valid: bool [n], True where the row is applied. All rows of the same leaf have the same mask and value.
        is_last: bool [n], True for one row of each leaf: of duplicates, this row wins.
    """

    valid: Tensor
    is_last: Tensor


def ancestors(nodes: Array, bits: int) -> Array:
    """The ancestors of ``nodes`` [n], where 2^bits nodes have the same one; of a slice, a slice without duplicates."""
    if isinstance(nodes, slice):
        return slice(nodes.start >> bits, (nodes.stop - 1 >> bits) + 1)
    return nodes >> bits


class LeafRows:
    """int64 leaves in blocks of ``fanout``, one block per row. With a page table, only some of the blocks are stored.

    Args:
        blocks: number of blocks.
        fanout: number of leaves of a block, a power of two.
        page_table: the row of each block, int64 [blocks]. None: block i is row i.
        num_pages: number of stored blocks if there is a page table. The table has ``num_pages + 1`` rows, and the last
            row always holds zeros.
        device: device of the tensor.
    """

    def __init__(self, blocks: int, fanout: int, page_table: Tensor | None, num_pages: int | None, device: Any):
        self.blocks, self.fanout, self.shift = blocks, fanout, fanout.bit_length() - 1
        self.page_table = page_table
        self.stored = blocks if page_table is None or num_pages is None else num_pages + 1
        # one-dimensional, because a graph that writes to a view of a tensor copies the whole tensor
        self.flat = torch.zeros(self.stored * fanout, dtype=torch.int64, device=device)

    def row_of(self, block: Tensor) -> Tensor:
        """The rows that store the blocks ``block`` [n]."""
        return block if self.page_table is None else self.page_table[block]

    def address(self, index: Array) -> tuple[Array, Array]:
        """The blocks of the leaves ``index`` [n], and the positions of the leaves in ``flat``."""
        if self.page_table is None:
            return ancestors(index, self.shift), index
        if isinstance(index, slice):
            index = np.arange(index.start, index.stop)
        block = index >> self.shift
        return block, (gather_in_bounds(self.page_table, block) << self.shift) + (index & (self.fanout - 1))

    def in_order(self, of_rows: Tensor) -> Tensor:
        """Reorder one entry per stored row to one entry per block."""
        return of_rows if self.page_table is None else of_rows[self.page_table]

    def write(self, place: Array, values: Array, mask: UpdateMask | None) -> None:
        """Write ``values`` [n], [1] or one number to positions ``place`` [n] of ``flat``.

        Without ``mask``, the last one of duplicates wins.
        """
        if mask is None:
            write_last(self.flat, place, values)
        else:
            values = where_int64(mask.valid, values, gather_in_bounds(self.flat, place))
            scatter_in_bounds(self.flat, place, values)


class ReductionTree:
    """Sums, minima or maxima of the leaves of each block, of each row of ``fanout`` blocks, and so on to a dense top.

    There are two layouts. In eager code, the time depends on the number of operations. So each level has one entry per
    row of the level below, and the top is the last level. In compiled code, the time depends on the arithmetic. So a
    prepared tree (:meth:`prepare`) has further levels between these and above the top, with one entry for 4 entries of
    the level below, up to a root of at most 16 entries. Eager code can use both layouts. ``_eager_tree`` and
    ``_compiled_tree`` contain the algorithms. An update recomputes every ancestor from its children, so duplicates are
    safe.

    Args:
        leaves: the leaves.
        top: largest number of entries of the top level.
        kind: ``"sum"``, ``"min"`` or ``"max"``. The entries of ``"min"`` are the smallest positive leaf minus 1, or the
            largest int64 where no leaf is positive.
    """

    def __init__(self, leaves: LeafRows, *, top: int, kind: Literal["sum", "min", "max"]):
        self.leaves, self.kind, self.prepared = leaves, kind, False
        self._largest_top = top
        self._allocate()

    def prepare(self) -> None:
        """Change to the layout for compiled graphs; call :meth:`rebuild` afterwards."""
        self.prepared = True
        self._allocate()

    def _allocate(self) -> None:
        sizes, row_levels = self._plan()
        # the indices of the levels with one entry per row; the last of them is the top
        self.row_levels = tuple(row_levels)
        begins = [0, 0, *itertools.accumulate(length for length, _ in sizes[1:])]
        self._layout = tuple((begin, *size) for begin, size in zip(begins, sizes, strict=False))
        # one tensor for all levels, because each additional tensor makes a graph slower
        self.flat = torch.zeros(begins[-1], dtype=torch.int64, device=self.leaves.flat.device)
        if self.kind == "min":
            self.flat.fill_(_INT64_MAX)
        # for each level of ``flat``: its first position, the bits by which the number of a leaf is shifted to find its
        # ancestor, 1 if leaves are counted by block there, 0 if by stored position, and its reduction factor minus 1
        shifts = [*itertools.accumulate(children.bit_length() - 1 for *_, children in self._layout[:-1])]
        in_blocks = [int(number >= row_levels[0]) for number in range(1, len(sizes))]
        masks = [children - 1 for *_, children in self._layout[1:]]
        # one row per level, because the compiler vectorizes along contiguous dimensions
        paths = [*zip(begins[1:-1], shifts, in_blocks, masks, strict=True)]
        self.paths = torch.tensor(paths, dtype=torch.int64, device=self.flat.device)
        self._make_views()

    def _plan(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Plan the levels.

        Returns:
            For the leaves and each level, its length and the number of entries that are reduced to one of the next
            level; and the indices of the levels with one entry per row.
        """
        fanout = self.leaves.fanout
        group, root = _COMPILED[self.kind] if self.prepared else (fanout, 0)
        above = group if self.prepared else _ABOVE_TOP
        rows, nodes = self.leaves.stored, self.leaves.blocks
        sizes, row_levels = [(rows * fanout, min(fanout, group))], []
        while True:
            width = fanout // group
            while width > 1:
                sizes.append((rows * width, min(width, group)))
                width //= group
            row_levels.append(len(sizes))
            if nodes <= self._largest_top:
                break
            rows = nodes = -(-nodes // fanout)
            sizes.append((rows * fanout, min(fanout, group)))
        while True:
            nodes = -(-nodes // above)
            sizes.append((nodes * above, above))
            if not self.prepared or sizes[-1][0] <= root:
                return sizes, row_levels

    def _make_views(self) -> None:
        """Make the views and buffers that only eager code uses; each process needs its own."""
        self.levels = [self.leaves.flat, *(self.flat[begin : begin + size] for begin, size, _ in self._layout[1:])]
        self.groups = [level.view(-1, n) for level, (*_, n) in zip(self.levels, self._layout, strict=True)]
        # the leaves and all levels of rows below the top
        self.rows = [self.levels[number].view(-1, self.leaves.fanout) for number in (0, *self.row_levels[:-1])]
        self.top = self.levels[self.row_levels[-1]]
        if self.kind == "sum":
            # 0, followed by the running sums of the top; each draw recomputes them
            self.running = self.top.new_zeros(self.top.shape[0] + 1)
            # row k is a bit mask of the first k entries of a row
            self.first = -self.top.new_ones((self.leaves.fanout, self.leaves.fanout)).tril(-1)

    def __getstate__(self) -> dict[str, Any]:
        remade = ("levels", "groups", "rows", "top", "running", "first")
        return {name: value for name, value in vars(self).items() if name not in remade}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._make_views()

    @torch._dynamo.assume_constant_result
    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """For the leaves and each level of ``flat``: its first position, its length, and its reduction factor.

        The result is a constant in compiled graphs. Otherwise a graph would check each number at each call.
        """
        if not self.prepared:
            raise RuntimeError("SumTree, MaxTree: call prepare() before the tree becomes part of a graph.")
        return self._layout

    def of_leaves(self, leaves: Array) -> Array:
        """The values to reduce for ``leaves``: for ``"min"``, the leaf minus 1, or the largest int64 if it is 0."""
        return (leaves - 1) & _INT64_MAX if self.kind == "min" else leaves

    def reduced(self, groups: Array) -> Array:
        """Reduce the last dimension of ``groups`` to its sum, minimum or maximum."""
        if self.kind == "sum":
            return groups.sum(-1)
        if isinstance(groups, np.ndarray):
            return groups.min(-1) if self.kind == "min" else groups.max(-1)
        # aminmax is several times faster than amin for int64
        return torch.aminmax(groups, dim=-1).min if self.kind == "min" else groups.amax(-1)

    def recompute(self, number: int) -> None:
        """Recompute all entries of a level from the level below."""
        groups = self.groups[number - 1]
        values = self.reduced(self.of_leaves(groups) if number == 1 else groups)
        if number == self.row_levels[0]:
            values = self.leaves.in_order(values)
        self.levels[number][: values.shape[0]] = values

    def rebuild(self) -> None:
        """Recompute everything from the leaves."""
        for number in range(1, len(self.levels)):
            self.recompute(number)
