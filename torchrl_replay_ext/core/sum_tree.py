"""Sum tree with exact int64 sums, for draws in proportion to priorities; and a tree of maxima."""

from __future__ import annotations

import copy
import math
from typing import overload

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import (
    Array,
    as_array,
    gather_in_bounds,
    is_traced,
    scalar,
    stratified_uniform,
    uniform,
)
from torchrl_replay_ext.core import _compiled_tree, _eager_tree
from torchrl_replay_ext.core.reduction_tree import LeafRows, ReductionTree, UpdateMask


def _backend():
    """The module with the tree algorithms for the running code; both modules have the same functions."""
    return _compiled_tree if is_traced() else _eager_tree


class SumTree:
    """Stores a mass for each of ``capacity`` leaves and draws leaves in proportion to their masses.

    Masses are int64 in fixed point, ``SumTree.UNIT`` = 2^23 per unit of priority. Sums are therefore exact and do not
    depend on the order of updates, rounding errors do not accumulate, and a leaf of mass 0 is never drawn.
    ``max_supported_priority`` is the largest priority that a leaf can hold.

    The leaves are divided into rows of ``fanout``. The sums of these rows are again divided into rows, and so on up to
    a dense top level. All shapes are static. Eager code and compiled graphs use the same tensors with different
    algorithms: ``_eager_tree`` processes a row at a time, ``_compiled_tree`` 4 entries at a time. Call :meth:`prepare`
    before the tree becomes part of a compiled graph.

    Args:
        capacity: number of leaves, >= 1.
        fanout: number of entries of a row, a power of two, >= 2. Default: 64.
        top: largest number of entries of the top level, >= 1. Default: 16384.
        track_min: also track the smallest positive mass, for :meth:`min`. Default: False.
        page_table: int64 [capacity // fanout + 1], the row of ``leaves`` that stores each block of ``fanout``
            leaves; for trees over a sparsely used range. The tree reads the page table, its owner writes it. Row
            ``num_pages`` always holds zeros and represents all blocks that are not stored. Default: None, all blocks
            are stored.
        num_pages: number of stored rows; required with ``page_table``. Default: None.
        device: device of the tensors; that of ``page_table`` if given. Default: None, torch's default device.

    Raises:
        ValueError: if an argument is out of range, or ``page_table`` has a wrong shape or comes without ``num_pages``.

    Examples:
        >>> tree = SumTree(4)
        >>> tree.update(torch.tensor([0, 3]), torch.tensor([1.0, 3.0]))
        >>> tree.probability(torch.tensor([0, 1, 3]))
        tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """

    UNIT = 2**23

    def __init__(
        self,
        capacity: int,
        *,
        fanout: int = 64,
        top: int = 16384,
        track_min: bool = False,
        page_table: Tensor | None = None,
        num_pages: int | None = None,
        device: torch.device | str | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"SumTree(capacity={capacity}): capacity must be >= 1.")
        if fanout < 2 or fanout & (fanout - 1):
            raise ValueError(f"SumTree(fanout={fanout}): fanout must be a power of two, >= 2.")
        blocks = capacity // fanout + 1
        if top < 1:
            raise ValueError(f"SumTree(top={top}): top must be >= 1.")
        if page_table is not None:
            if num_pages is None or page_table.shape != (blocks,):
                raise ValueError(f"SumTree: page_table must have shape ({blocks},) and needs num_pages.")
            device = page_table.device
        leaves = LeafRows(blocks, fanout, page_table, num_pages, device)
        self.capacity, self.fanout, self.page_table, self.prepared = capacity, fanout, page_table, False
        # the masses by stored row, int64 [rows · fanout]; call rebuild_() after writing to them directly
        self.leaves, self._leaves = leaves.flat, leaves
        self._sums = ReductionTree(leaves, top=top, kind="sum")
        self._minima = ReductionTree(leaves, top=top, kind="min") if track_min else None
        self._trees = [self._sums] if self._minima is None else [self._sums, self._minima]
        # the sum of all stored leaves must be below 2^62
        self.max_supported_priority = float(2**62 // min(capacity, self.leaves.shape[0]) // self.UNIT)

    @property
    def rows(self) -> Tensor:
        """The masses by stored row, int64 [rows, fanout]; a view, only for eager code."""
        return self.leaves.view(-1, self.fanout)

    def prepare(self) -> None:
        """Change to a layout that compiled graphs can use."""
        if not self.prepared:
            self.prepared = True
            for tree in self._trees:
                tree.prepare()
            self.rebuild_()

    def graph_tensors(self) -> list[Tensor]:
        """The tensors of a prepared tree that compiled graphs read and change."""
        paged = [] if self.page_table is None else [self.page_table]
        return [self.leaves, *(tree.flat for tree in self._trees), *paged]

    @overload
    @classmethod
    def to_mass(cls, priority: float) -> int: ...
    @overload
    @classmethod
    def to_mass(cls, priority: Tensor) -> Tensor: ...
    @overload
    @classmethod
    def to_mass(cls, priority: Array) -> Array: ...
    @classmethod
    def to_mass(cls, priority: Array) -> Array:
        """Convert floating-point priorities >= 0 to int64 masses, rounded up to units of 2^-23; only 0 has mass 0."""
        if isinstance(priority, float):
            return math.ceil(priority * cls.UNIT)
        if isinstance(priority, np.ndarray):
            return np.ceil(priority * cls.UNIT).astype(np.int64)
        return priority.mul(cls.UNIT).ceil_().to(torch.int64)

    @overload
    def get(self, index: Tensor) -> Tensor: ...
    @overload
    def get(self, index: Array) -> Array: ...
    def get(self, index: Array) -> Array:
        """Masses of the leaves ``index`` [n], int64 [n]."""
        place = index if self.page_table is None else self._leaves.address(index)[1]
        return gather_in_bounds(self.leaves, place)

    def total(self) -> Tensor:
        """Sum of all masses, int64 []."""
        return _backend().root(self._sums).sum()

    def min(self) -> int | Tensor:
        """Smallest positive mass; a tensor [] where values cannot be read. Requires ``track_min`` and a total > 0."""
        assert self._minima is not None
        return scalar(_backend().root(self._minima).amin() + 1)

    def update(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of some leaves.

        Args:
            index: the leaves, integers [n] in [0, capacity). Of duplicates the last one wins.
            priority: float [n] in [0, ``max_supported_priority``].

        Raises:
            ValueError: if shapes differ, or an index or a priority is out of range. The tree is then unchanged.
        """
        if index.ndim != 1 or priority.shape != index.shape:
            raise ValueError(
                f"SumTree.update: index and priority must have the same shape [n]; got {tuple(index.shape)} and "
                f"{tuple(priority.shape)}."
            )
        if not bool(((index >= 0) & (index < self.capacity)).all()):
            raise ValueError(f"SumTree.update: index must lie in [0, {self.capacity}).")
        if not bool(((priority >= 0) & (priority <= self.max_supported_priority)).all()):
            raise ValueError(
                f"SumTree.update: priorities must be finite and lie in [0, {self.max_supported_priority}]."
            )
        self.write(index.to(torch.int64), self.to_mass(priority.double()))

    def write(
        self,
        index: Array,
        mass: Array,
        *,
        mask: UpdateMask | None = None,
        distinct: bool = False,
    ) -> None:
        """Set int64 masses without checking arguments.

        Args:
            index: the leaves, int64 [n] in [0, capacity), or a slice.
            mass: int64 [n] or [1], or one number, >= 0. Without ``mask``, the last one of duplicates wins.
            mask: selects the rows to apply. Default: None, all rows.
            distinct: True if no two rows change the same leaf. This saves graphs a comparison of all pairs of rows.
                Default: False.
        """
        if is_traced():
            block, place = self._leaves.address(index)
            _compiled_tree.write(self._leaves, self._trees, place, block, mass, mask, distinct)
            return
        if mask is None:
            index, mass = as_array(index), mass if isinstance(mass, int) else as_array(mass)
        block, place = self._leaves.address(index)
        self._leaves.write(place, mass, mask)
        _eager_tree.refresh(self._trees, place, block)

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Find the leaves i with Σ_{j<i} m_j <= target < Σ_{j<=i} m_j, where m_j are the masses.

        Args:
            target: int64 [n] in [0, total).

        Returns:
            The leaves and their masses, int64 [n] each.
        """
        return _backend().find(self._sums, target)

    def sample(
        self, num: int, *, stratified: bool = False, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw ``num`` leaves with replacement, in proportion to their masses.

        Args:
            num: number of draws.
            stratified: make one draw in each of ``num`` strata of equal mass instead of independent draws. Default:
                False.
            generator: random number generator on the tree's device. Default: None, torch's global generator.

        Returns:
            The leaves and their masses, int64 [num] each. The strata are in random order.

        Raises:
            RuntimeError: if the total is 0. Compiled graphs and accelerators return leaf 0 with mass 0 instead.
        """
        draw_numbers = stratified_uniform if stratified else uniform
        return self.draw(draw_numbers(num, device=self.leaves.device, generator=generator))

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Like :meth:`sample`, with given uniform numbers ``u``, float64 [n] in [0, 1). It may overwrite ``u``."""
        return _backend().draw(self._sums, u)

    def prefix(self, index: Tensor) -> Tensor:
        """Sum of the masses of the leaves 0..i−1 for each i of ``index`` [n] in [0, capacity]; int64 [n]."""
        return _backend().prefix(self._sums, index)

    def probability(self, index: Tensor) -> Tensor:
        """Probability of the leaves ``index`` [n] in one draw, float64 [n]; 0 if all masses are 0."""
        return self.get(index).double() / self.total().clamp_min(1)

    def clear_(self) -> None:
        """Set every mass to 0."""
        self.leaves.zero_()
        self.rebuild_()

    def rebuild_(self) -> None:
        """Recompute all sums from the leaves."""
        for tree in self._trees:
            tree.rebuild()

    def check_valid(self) -> None:
        """Raise AssertionError if a mass is negative, or a sum or a minimum does not agree with the leaves."""
        if int(self.leaves.min()) < 0:
            raise AssertionError("SumTree: a negative mass")
        for tree in self._trees:
            expected = copy.deepcopy(tree)
            expected.rebuild()
            if not torch.equal(tree.flat, expected.flat):
                raise AssertionError(f"SumTree: a {tree.kind} does not agree with the leaves")


class MaxTree:
    """Tracks the maximum of ``capacity`` leaves, int64 values >= 0.

    The owner writes to ``leaves`` and then calls :meth:`refresh` with the changed leaves.

    Args:
        capacity: number of leaves, >= 1.
        fanout: number of entries of a row, a power of two. Default: 64.
        top: largest number of entries of the top level. Default: 16384.
        device: device of the tensors. Default: None, torch's default device.
    """

    def __init__(self, capacity: int, *, fanout: int = 64, top: int = 16384, device: torch.device | str | None = None):
        leaves = LeafRows(-(-capacity // fanout), fanout, None, None, device)
        self.leaves, self._shift = leaves.flat, leaves.shift
        self._maxima = ReductionTree(leaves, top=top, kind="max")

    def prepare(self) -> None:
        """Change to a layout that compiled graphs can use."""
        if not self._maxima.prepared:
            self._maxima.prepare()
            self.rebuild_()

    def graph_tensors(self) -> list[Tensor]:
        """The tensors of a prepared tree that compiled graphs read and change."""
        return [self.leaves, self._maxima.flat]

    def refresh(self, index: Array) -> None:
        """Recompute the maxima above the leaves ``index`` [n]."""
        places = as_array(index)
        _backend().refresh([self._maxima], places, places >> self._shift)

    def max(self) -> Tensor:
        """The largest value, int64 []."""
        return _backend().root(self._maxima).amax()

    def rebuild_(self) -> None:
        """Recompute all maxima from the leaves."""
        self._maxima.rebuild()

    def check_valid(self) -> None:
        """Raise AssertionError if the maximum does not agree with the leaves."""
        if int(self.max()) != int(self.leaves.max()):
            raise AssertionError("MaxTree: the maximum does not agree with the leaves")
