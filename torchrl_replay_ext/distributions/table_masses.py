"""Writes the masses of the entries of event tables to a sum tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import values_can_be_read
from torchrl_replay_ext.core.sum_tree import SumTree


class TableMasses:
    """Collects the changes of event tables, to write them to a sum tree at once: one write takes less time than many.

    Args:
        tree: a leaf for each position of the tables.
        skips_unchanged: do not write masses that are equal to those in the tree.
    """

    def __init__(self, tree: SumTree, *, skips_unchanged: bool):
        self._tree, self._skips_unchanged = tree, skips_unchanged
        # positions, and the slots that entered there; None: the entries were removed
        self._changes: list[tuple[Tensor, Tensor | None]] = []

    def add(self, positions: Tensor, slots: Tensor | None, *, constant: bool = False) -> None:
        """Remember that ``slots`` [n] entered at ``positions`` [n], or that the entries there were removed (None).

        ``constant``: True if all entries have the same mass, and the tree is complete. Default: False.
        """
        if self._skips_unchanged and slots is not None and values_can_be_read(positions):
            # in a full list new entries replace the oldest ones
            pending = self._changes
            self._changes = [change for change in pending if not torch.equal(change[0], positions)]
            if constant and not self._changes and len(pending) == 1 and pending[0][1] is None:
                # the tree still has the masses of the removed entries
                return
        self._changes.append((positions, slots))

    def flush(self, masses: Callable[[Tensor, Tensor], Tensor | int]) -> None:
        """Write all changes; ``masses(positions, slots)`` are the masses of entries."""
        changes, self._changes = self._changes, []
        values = [0 if slots is None else masses(positions, slots) for positions, slots in changes]
        if len(changes) == 1:
            self._tree.write(changes[0][0], values[0])
        elif changes:
            # of several changes at a position the last one wins
            positions = [positions for positions, _ in changes]
            masses_of_rows = [torch.zeros_like(p) + value for p, value in zip(positions, values, strict=True)]
            self._tree.write(torch.cat(positions), torch.cat(masses_of_rows))

    def clear(self) -> None:
        """Discard all changes."""
        self._changes.clear()
