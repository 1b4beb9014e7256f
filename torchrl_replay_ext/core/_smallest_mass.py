"""The smallest positive mass outside graphs."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from torchrl_replay_ext.core import _eager_tree
from torchrl_replay_ext.core.reduction_tree import ReductionTree
from torchrl_replay_ext.functional.priorities import FEW

# Number of lazy writes after which the minima are brought up to date.
_MAX_STALE = 64


class SmallestMass:
    """The smallest positive mass, remembered from one call to the next, with minima that may be updated lazily.

    After a write that changed no leaf of the smallest mass, the smallest mass is the old one or one of the written
    ones. The minima of the written blocks are then needed only when a leaf of the smallest mass is written.

    Processes that share the tree's memory count their writes. What one process remembers is discarded when another one
    has written; if that one has late minima, all minima are recomputed. In a tree that was prepared for graphs, whose
    writes are not counted, nothing is remembered and no minimum is late.

    Args:
        minima: the minima of the leaves.
    """

    def __init__(self, minima: ReductionTree):
        self._minima = minima
        # in shared memory: numbers of writes, and of processes with late minima
        self._writes = torch.zeros((), dtype=torch.int64)
        self._late = torch.zeros((), dtype=torch.int64)
        # of this process: number of writes made or noticed; the smallest mass, if known; leaves with late minima
        self._noticed = 0
        self._value: int | None = None
        self._stale: list[Tensor] = []

    def value(self) -> int:
        """The smallest positive mass; needs a positive total."""
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
        """Recompute the late minima of this process."""
        if self._stale:
            block, place = self._minima.leaves.address(torch.cat(self._stale))
            _eager_tree.refresh([self._minima], place, block)
            self._stale = []
            self._late.sub_(1)

    def may_be_late(self, index: Tensor) -> bool:
        """Whether the minima of the leaves ``index`` [n] may be recomputed later if these are written."""
        return self._value is not None and index.shape[0] <= FEW

    def written(self, value: int | None = None) -> None:
        """Count a write, whose minima were recomputed if ``value``, the smallest mass after it, is not known."""
        self._writes.add_(1)
        self._noticed += 1
        self._value = value

    def written_lazily(self, index: Tensor, before: list[int], mass: Tensor) -> None:
        """Count a write of ``mass`` [n] to the leaves ``index`` [n], whose masses were ``before``."""
        # of duplicates, the last one
        after = dict(zip(index.tolist(), mass.tolist(), strict=True)).values()
        smallest, value = min(filter(None, after), default=sys.maxsize), self._value
        if not self._stale:
            self._late.add_(1)
        self._stale.append(index)
        if value is None or smallest <= value:
            value = smallest
        elif value in before or len(self._stale) > _MAX_STALE:
            value = None
        self.written(value)
