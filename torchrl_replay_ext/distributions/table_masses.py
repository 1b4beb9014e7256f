"""Writes the masses of the entries of event tables to a sum tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import values_can_be_read
from torchrl_replay_ext.core.sum_tree import SumTree, UpdateMask


class TableMasses:
    """Collects the changes of event tables, to write them to a sum tree at once: one write takes less time than many.

    Args:
        tree: a leaf for each position of the tables.
        may_be_equal: True if new masses are often equal to those in the tree.
    """

    def __init__(self, tree: SumTree, *, may_be_equal: bool):
        self._tree, self._may_be_equal = tree, may_be_equal
        # positions, and the slots that entered there; None: the entries were removed
        self._changes: list[tuple[Tensor, Tensor | None]] = []

    def add(self, positions: Tensor, slots: Tensor | None) -> None:
        """Remember that ``slots`` [n] entered at ``positions`` [n], or that the entries there were removed (None)."""
        if self._may_be_equal and slots is not None and values_can_be_read(positions):
            # in a full list new entries replace the oldest ones
            self._changes = [change for change in self._changes if not torch.equal(change[0], positions)]
        self._changes.append((positions, slots))

    def flush(self, masses: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Write all changes; ``masses(positions, slots)`` are the masses of entries."""
        changes, self._changes = self._changes, []
        if changes:
            positions = [positions for positions, _ in changes]
            values = [torch.zeros_like(p) if slots is None else masses(p, slots) for p, slots in changes]
            # of several changes at a position the last one wins
            several = len(changes) > 1
            self.write(torch.cat(positions) if several else positions[0], torch.cat(values) if several else values[0])

    def clear(self) -> None:
        """Discard all changes."""
        self._changes.clear()

    def write(self, positions: Tensor, mass: Tensor, mask: UpdateMask | None = None) -> None:
        """Set the masses at ``positions`` [n]; see :meth:`SumTree.write`."""
        if self._may_be_equal and values_can_be_read(mass) and torch.equal(self._tree.get(positions), mass):
            return
        self._tree.write(positions, mass, mask=mask)
