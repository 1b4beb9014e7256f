"""Sum tree with exact int64 sums, for draws in proportion to priorities; and a tree of maxima."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, values_can_be_read
from torchrl_replay_ext.kernels.layouts import CHILDREN, NOTHING, PAGE_BITS, UNIT, allocate
from torchrl_replay_ext.kernels.ops import (
    Views,
    as_tensor,
    empty,
    tree_draw,
    tree_find,
    tree_get,
    tree_prefix,
    tree_rebuild,
    tree_rebuild_maxima,
    tree_refresh_maxima,
    tree_root,
    tree_write,
)


def read_root(nodes: Tensor) -> Tensor:
    """The root of a tree, [].

    A kernel reads it: a graph may move its own reads after the next write, and must then copy the whole tree.
    """
    value = nodes.new_empty(1)
    tree_root(nodes, value)
    return value[0]


def _numbers(values: Tensor) -> Tensor:
    """int64 numbers [n] as kernels take them."""
    # a conversion that changes nothing takes as long as a kernel of 32 rows
    return (values if values.dtype == torch.int64 else values.to(torch.int64)).contiguous()


class SumTree:
    """Stores a mass for each of ``capacity`` leaves and draws leaves in proportion to their masses.

    Masses are int64 in fixed point, ``SumTree.UNIT`` = 2^23 per unit of priority. Sums are therefore exact and do not
    depend on the order of updates, rounding errors do not accumulate, and a leaf of mass 0 is never drawn.
    ``max_supported_priority`` is the largest priority that a leaf can hold.

    Each node is the sum of its 16 children, up to a single root. Eager code, compiled graphs and CUDA call the same
    kernels, which take O(log capacity) per row.

    Args:
        capacity: number of leaves, >= 1.
        track_min: also track the smallest positive mass, for :meth:`min`. Default: False.
        num_pages: number of pages of ``SumTree.PAGE`` = 256 leaves, for trees over a sparsely used range: ``leaves``
            has pages for so many blocks of leaves only. The owner of the tree writes the page of each block to
            ``pages``. Page ``num_pages`` always holds zeros; at first it is that of all blocks. Such trees have more
            than 16 leaves, and do not track the smallest mass. Default: None, all leaves are stored.
        device: device of the tensors. Default: None, torch's default device.

    Raises:
        ValueError: if ``capacity`` is out of range, or a tree with pages is too small or tracks the smallest mass.

    Examples:
        >>> tree = SumTree(4)
        >>> tree.write(torch.tensor([0, 3]), SumTree.to_mass(torch.tensor([1.0, 3.0])))
        >>> tree.get(torch.tensor([0, 1, 3])) / tree.total()
        tensor([0.2500, 0.0000, 0.7500])
    """

    UNIT = UNIT
    PAGE = 1 << PAGE_BITS

    def __init__(
        self,
        capacity: int,
        *,
        track_min: bool = False,
        num_pages: int | None = None,
        device: torch.device | str | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"SumTree(capacity={capacity}): capacity must be >= 1.")
        is_paged = num_pages is not None
        if is_paged and (track_min or capacity <= CHILDREN):
            raise ValueError(
                f"SumTree(capacity={capacity}, track_min={track_min}, num_pages={num_pages}): a tree with pages has "
                f"more than {CHILDREN} leaves and no minima."
            )
        self.capacity = capacity
        # the masses; call rebuild_() after writing to them directly
        self.leaves, self.nodes = allocate(capacity, device, num_pages + 1 if is_paged else None)
        # the page of each block, int64 [capacity // PAGE + 1]; empty if all leaves are stored
        self.pages = self.leaves.new_full((capacity // self.PAGE + 1 if is_paged else 0,), num_pages or 0)
        # the smallest positive leaf below each node, or the largest int64; empty if not tracked
        self.minima = torch.full_like(self.nodes[: None if track_min else 0], NOTHING)
        # what kernels change: leaves, nodes, minima, pages, and the number of leaves
        self.views = Views(self.leaves, self.nodes, self.minima, self.pages, capacity)
        # what kernels read: leaves, nodes, pages, and the number of leaves
        self.arrays = Views(self.leaves, self.nodes, self.pages, capacity)
        # the sum of all stored leaves must be below 2^62
        self.largest_mass = 2**62 // min(capacity, self.leaves.shape[0])
        self.max_supported_priority = float(self.largest_mass // self.UNIT)

    def powers(self, alpha: Tensor) -> PowerMasses:
        """The masses as powers d^alpha of priorities d; ``alpha``: the exponent first, float64."""
        return PowerMasses(self.leaves, self.nodes, self.minima, self.pages, self.capacity, alpha)

    @classmethod
    def to_mass(cls, priority: Tensor) -> Tensor:
        """Convert priorities >= 0, float32 or float64, to int64 masses: units of 2^-23, rounded up; only 0 has 0."""
        return priority.mul(cls.UNIT).ceil_().to(torch.int64)

    def get(self, index: Tensor) -> Tensor:
        """Masses of the leaves ``index`` [n], int64 [n]; 0 outside [0, capacity)."""
        index = _numbers(index)
        mass = torch.empty_like(index)
        tree_get(self.leaves, self.pages, self.capacity, index, mass)
        return mass

    def total(self) -> Tensor:
        """Sum of all masses, int64 []."""
        return read_root(self.nodes)

    def min(self) -> int | Tensor:
        """Smallest positive mass; a tensor [] where values cannot be read. Requires ``track_min`` and a total > 0."""
        return self.minima.numpy()[0].item() if values_can_be_read(self.minima) else read_root(self.minima)

    def write(self, index: Tensor, mass: Tensor | int) -> None:
        """Set int64 masses without checking arguments.

        Args:
            index: the leaves, int64 [n]. Rows with an index outside [0, capacity) are skipped. Of duplicates the last
                one wins, on CUDA any one.
            mass: int64 [n] or [1], or one number, >= 0.
        """
        mass = _numbers(mass) if isinstance(mass, Tensor) else index.new_full((1,), mass, dtype=torch.int64)
        tree_write(*self.views(), _numbers(index), mass)

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Find the leaves i with Σ_{j<i} m_j <= target < Σ_{j<=i} m_j, where m_j are the masses.

        Args:
            target: int64 [n] in [0, total).

        Returns:
            The leaves and their masses, int64 [n] each.
        """
        leaf, mass = torch.empty_like(target), torch.empty_like(target)
        tree_find(*self.arrays(), target.contiguous(), leaf, mass)
        return leaf, mass

    def raise_if_empty(self, nodes: Array) -> None:
        """Raise RuntimeError if the total is 0; not in compiled graphs and on accelerators. ``nodes``: of the views."""
        if type(nodes) is np.ndarray and not nodes.item(0):
            raise RuntimeError("all priorities are 0, so no transition can be drawn; use eps > 0.")

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Draw leaves with replacement, in proportion to their masses.

        Args:
            u: uniform random numbers, float64 [n] in [0, 1), one for each draw.

        Returns:
            The leaves and their masses, int64 [n] each.

        Raises:
            RuntimeError: if the total is 0. Compiled graphs and accelerators return leaf 0 with mass 0 instead.
        """
        leaf, mass, _ = self.walk(u.contiguous())
        return as_tensor(leaf), as_tensor(mass)

    def walk(self, u: Tensor) -> tuple[Array, Array, Array]:
        """:meth:`draw`, ``u`` is contiguous. The results, and the minima, are as kernels take them."""
        leaves, nodes, minima, pages, capacity = self.views()
        self.raise_if_empty(nodes)
        leaf, mass = empty(leaves, u.shape[0], torch.int64), empty(leaves, u.shape[0], torch.int64)
        tree_draw(leaves, nodes, pages, capacity, u, leaf, mass)
        return leaf, mass, minima

    def prefix(self, index: Tensor) -> Tensor:
        """Sum of the masses of the leaves 0..i−1 for each i of ``index`` [n] in [0, capacity]; int64 [n]."""
        index = _numbers(index)
        total = torch.empty_like(index)
        tree_prefix(*self.arrays(), index, total)
        return total

    def clear_(self) -> None:
        """Set every mass to 0."""
        self.leaves.zero_()
        self.rebuild_()

    def rebuild_(self) -> None:
        """Recompute all sums from the leaves."""
        tree_rebuild(*self.views())


class PowerMasses(NamedTuple):
    """The masses d^alpha of a sum tree, which the kernels of writes and updates change together with the priorities d.

    The fields are arguments of :func:`torchrl_replay_ext.kernels.rows.record` and ``update``.
    """

    leaves: Tensor
    nodes: Tensor
    minima: Tensor
    pages: Tensor
    capacity: int
    alpha: Tensor

    @classmethod
    def none(cls, device: torch.device) -> PowerMasses:
        """What kernels take if there is no such tree: no leaves."""
        leaves, nodes, minima, pages = (torch.empty(0, dtype=torch.int64, device=device) for _ in range(4))
        return cls(leaves, nodes, minima, pages, 0, torch.empty(0, dtype=torch.float64, device=device))


class MaxTree:
    """Tracks the maximum of ``capacity`` leaves, int64 values >= 0.

    The owner writes to ``leaves`` and then calls :meth:`refresh` with the changed leaves.

    Args:
        capacity: number of leaves, >= 1.
        device: device of the tensors. Default: None, torch's default device.
    """

    def __init__(self, capacity: int, *, device: torch.device | str | None = None):
        self.capacity = capacity
        self.leaves, self.nodes = allocate(capacity, device)

    def refresh(self, index: Tensor) -> None:
        """Recompute the maxima above the leaves ``index`` [n]; an index outside [0, capacity) is skipped."""
        tree_refresh_maxima(self.leaves, self.nodes, self.capacity, _numbers(index))

    def max(self) -> Tensor:
        """The largest value, int64 []."""
        return read_root(self.nodes)

    def rebuild_(self) -> None:
        """Recompute all maxima from the leaves."""
        tree_rebuild_maxima(self.leaves, self.nodes, self.capacity)
