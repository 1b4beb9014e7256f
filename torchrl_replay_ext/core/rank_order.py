"""The sorted priorities of rank-based sampling, and the decision when to sort again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import is_traced, read

# Above this number of entries, sorting rounded priorities is several times faster than an exact sort.
_EXACT_SORT = 50_000
# A rounded priority keeps 7 bits of mantissa.
_DROPPED_BITS = 16
# Larger than all keys.
_NONE = torch.iinfo(torch.int64).max


# Mass of the first rank. The unit of a sum tree is too coarse for the last of a million ranks.
_UNIT = 2**36


def masses(rank: Tensor, alpha: Tensor) -> Tensor:
    """Masses proportional to (rank + 1)^−alpha, rounded up; int64 [n]. ``rank``: [n], from 0; ``alpha``: []."""
    return ((rank + 1).to(torch.float64) ** -alpha * _UNIT).ceil().to(torch.int64)


class RankOrder:
    """The priorities of entries at the last sort, ordered by table and in descending order within a table.

    Entries that were never updated have a negative priority. They precede all other entries of their table.

    Args:
        size: the maximum number of entries.
        tables: number of tables. With one table and more than 50,000 entries, priorities after the first eighth of the
            ranks are rounded, unless ``stale_fraction`` is 0.
        stale_fraction: share of the entries that may change before the next sort.
        device: device of the tensors.
    """

    def __init__(self, size: int, *, tables: int, stale_fraction: float, device: torch.device):
        self._stale_fraction = stale_fraction
        self._rounds = tables == 1 and size > _EXACT_SORT and stale_fraction > 0
        # table · 2^32 − the bits of the float32 priority; the bits of positive floats are ordered like the floats
        self._keys = torch.full((size,), _NONE, device=device)
        # smaller priorities are rounded
        self._exact_above = torch.zeros(1, device=device)
        # number of entries that were written or updated since the last sort; incremented by the owner
        self.changes = torch.zeros((), dtype=torch.int64, device=device)

    def _key(self, priority: Tensor, table: Tensor | int) -> Tensor:
        if self._rounds:
            rounded = (priority.view(torch.int32) >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)
            priority = torch.where(priority >= self._exact_above, priority, rounded)
        return (table << 32) - priority.view(torch.int32).to(torch.int64)

    def find(self, priority: Tensor) -> tuple[Tensor, Tensor]:
        """Begin and end of the entries with each ``priority`` [n] >= 0, for one table; int64 [n] each."""
        key = self._key(priority, 0)
        return torch.searchsorted(self._keys, key), torch.searchsorted(self._keys, key, right=True)

    def rank(self, priority: Tensor, table: Tensor) -> Tensor:
        """The number of entries in each ``table`` [n] before each ``priority`` [n]; int64 [n]."""
        ahead = torch.searchsorted(self._keys, self._key(_new_first(priority), table))
        return ahead - torch.searchsorted(self._keys, (table << 32) - 2**31)

    def is_due(self, count: Tensor) -> bool:
        """True if enough of the ``count`` [] entries have changed for a sort; always False in a graph.

        The host waits once for an accelerator.
        """
        if is_traced():
            return False
        changes, num_entries = read(self.changes, count)
        return changes > 0 and changes >= self._stale_fraction * num_entries

    def sort(self, priority: Tensor, table: Tensor | int = 0) -> Tensor:
        """Sort all entries.

        Args:
            priority: priority of each entry, float32 [n].
            table: table of each entry, int64 [n]. Default: 0 for all.

        Returns:
            The indices of the entries in sorted order, int64 [n]. The sort is stable.
        """
        priority, count = _new_first(priority), priority.shape[0]
        self._exact_above.zero_()
        if self._rounds and count > _EXACT_SORT:
            coarse = (priority.view(torch.int32) >> _DROPPED_BITS).to(torch.int16)
            order = coarse.sort(stable=True, descending=True).indices
            # sort the first ranks exactly, because their probabilities differ most; up to the end of a rounded value
            last = order[count // 8 - 1]
            end = torch.where(priority[last].isinf(), count // 8, (coarse >= coarse[last]).sum())
            head = order[: int(end)]
            order[: len(head)] = head[priority[head].sort(stable=True, descending=True).indices]
            self._exact_above.copy_(priority[order[len(head) - 1]])
        else:
            order = self._key(priority, table).argsort(stable=True)
        self._keys.fill_(_NONE)
        self._keys[:count] = self._key(priority, table)[order]
        self.changes.zero_()
        return order

    def clear(self) -> None:
        """Remove all entries."""
        self._keys.fill_(_NONE)
        self._exact_above.zero_()
        self.changes.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        rounded = {"exact_above": self._exact_above} if self._rounds else {}
        return {"keys": self._keys, "changes": self.changes, **rounded}


def _new_first(priority: Tensor) -> Tensor:
    return torch.where(priority < 0, math.inf, priority)
