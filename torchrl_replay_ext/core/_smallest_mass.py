"""The smallest positive mass of a tree in eager code."""

from __future__ import annotations

import copy
import sys

import numpy as np
import torch

from torchrl_replay_ext.compilation import Array, increase
from torchrl_replay_ext.core import _eager_tree
from torchrl_replay_ext.core.reduction_tree import ReductionTree
from torchrl_replay_ext.indices import FEW

# Number of lazy writes after which the minima are recomputed.
_MAX_STALE = 64


class SmallestMass:
    """Caches the smallest positive mass between calls, and updates the tree of minima lazily.

    If a write changes no leaf of the smallest mass, the new smallest mass is the minimum of the old one and the written
    masses. So the minima above the written leaves may stay stale until a leaf of the smallest mass is written.

    Processes that share the memory of the tree count their writes in it. A process discards its cached value when
    another process has written. If another process has stale minima, all minima are recomputed. A tree that was
    prepared for compiled graphs does not count its writes; its smallest mass is not cached, and its minima are never
    stale.

    Args:
        minima: the tree of minima.
    """

    def __init__(self, minima: ReductionTree):
        self._minima = minima
        # in shared memory: the number of writes, and the number of processes with stale minima
        self._writes = torch.zeros((), dtype=torch.int64)
        self._late = torch.zeros((), dtype=torch.int64)
        # in this process: the number of writes that the cache includes, the cached value or None, and the leaves below
        # stale minima
        self._noticed = 0
        self._value: int | None = None
        self._stale: list[Array] = []

    def value(self) -> int:
        """The smallest positive mass; requires a positive total."""
        writes = self._writes.item()
        if writes != self._noticed:
            self._noticed, self._value = int(writes), None
            self.catch_up()
            if self._late.item():
                self._minima.rebuild()
        if self._value is None:
            self.catch_up()
            self._value = int(_eager_tree.root(self._minima).amin()) + 1
        return self._value

    def catch_up(self) -> None:
        """Recompute the minima that are stale because of writes of this process."""
        if self._stale:
            # np.r_ concatenates arrays and slices
            block, place = self._minima.leaves.address(np.r_[tuple(self._stale)])
            _eager_tree.refresh([self._minima], place, block)
            self._stale = []
            self._late.sub_(1)

    def may_be_late(self, index: Array) -> bool:
        """Whether a write to the leaves ``index`` may leave their minima stale."""
        count = index.stop - index.start if isinstance(index, slice) else len(index)
        return self._value is not None and count <= FEW

    def written(self, value: int | None = None) -> None:
        """Count a write and cache ``value``, the smallest mass after it; None if it must be read from the minima."""
        increase(self._writes, 1)
        self._noticed += 1
        self._value = value

    def written_lazily(self, index: Array, before: list[int], mass: np.ndarray | int) -> None:
        """Count a write of ``mass`` [n] to the leaves ``index`` [n] that leaves their minima stale.

        Args:
            index: int64 [n], or a slice.
            before: the masses of the leaves before the write.
            mass: int64 [n], or one number.
        """
        # of duplicates, the last one wins
        after = [mass] if isinstance(mass, int) else dict(zip(index.tolist(), mass.tolist(), strict=True)).values()
        smallest, value = min(filter(None, after), default=sys.maxsize), self._value
        if not self._stale:
            self._late.add_(1)
        # a copy, because the caller may change an array in place
        self._stale.append(copy.copy(index))
        if value is None or smallest <= value:
            value = smallest
        elif value in before or len(self._stale) > _MAX_STALE:
            value = None
        self.written(value)
