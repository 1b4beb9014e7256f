"""Priorities in the order of their last sort, and when to sort anew."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Above this number of entries a sort that rounds is several times faster than an exact one.
_EXACT_SORT = 50_000
# A rounded priority has 7 bits of mantissa left.
_DROPPED_BITS = 16
# Larger than all keys.
_NONE = torch.iinfo(torch.int64).max


class RankOrder:
    """The priorities of entries as of the last sort, the largest first, table after table.

    Entries that were never updated, whose priority is negative, come before all others of their table.

    Args:
        size: the largest number of entries.
        tables: number of tables. With one, and above 50,000 entries, priorities behind the first eighth of the ranks
            are rounded, unless ``stale_fraction`` is 0.
        stale_fraction: share of the entries that may change before the next sort.
        device: where the tensors live.
    """

    def __init__(self, size: int, *, tables: int, stale_fraction: float, device: torch.device):
        self._stale_fraction = stale_fraction
        self._rounds = tables == 1 and size > _EXACT_SORT and stale_fraction > 0
        # table · 2^32 − the bits of the float32 priority, which have its order
        self._keys = torch.full((size,), _NONE, device=device)
        # smaller priorities are rounded
        self._exact_above = torch.zeros(1, device=device)
        # entries that were written or updated since the last sort; the owner counts them
        self.changes = torch.zeros((), dtype=torch.int64, device=device)

    def _key(self, priority: Tensor, table: Tensor | int) -> Tensor:
        if self._rounds:
            rounded = (priority.view(torch.int32) >> _DROPPED_BITS << _DROPPED_BITS).view(torch.float32)
            priority = torch.where(priority >= self._exact_above, priority, rounded)
        return (table << 32) - priority.view(torch.int32).to(torch.int64)

    def find(self, priority: Tensor) -> tuple[Tensor, Tensor]:
        """Where the entries with each ``priority`` [n] >= 0 begin and end, if there is one table; int64 [n] each."""
        key = self._key(priority, 0)
        return torch.searchsorted(self._keys, key), torch.searchsorted(self._keys, key, right=True)

    def rank(self, priority: Tensor, table: Tensor) -> Tensor:
        """How many entries of each ``table`` [n] were ahead of each ``priority`` [n]; int64 [n]."""
        ahead = torch.searchsorted(self._keys, self._key(_new_first(priority), table))
        return ahead - torch.searchsorted(self._keys, (table << 32) - 2**31)

    def is_due(self, count: Tensor) -> bool:
        """Whether enough of the ``count`` [] entries have changed for a sort."""
        changes = self.changes.item()
        return changes > 0 and changes >= self._stale_fraction * count.item()

    def sort(self, priority: Tensor, table: Tensor | int = 0) -> Tensor:
        """Sort all entries.

        Args:
            priority: of each entry, float32 [n].
            table: of each entry, int64 [n].

        Returns:
            The numbers of the entries in their order, int64 [n]; equal ones stay in the order that they are given in.
        """
        priority, count = _new_first(priority), priority.shape[0]
        self._exact_above.zero_()
        if self._rounds and count > _EXACT_SORT:
            coarse = (priority.view(torch.int32) >> _DROPPED_BITS).to(torch.int16)
            order = coarse.sort(stable=True, descending=True).indices
            # the first ranks differ most in probability
            head = order[: count // 8]
            order[: len(head)] = head[priority[head].sort(stable=True, descending=True).indices]
            self._exact_above.copy_(priority[order[len(head) - 1]])
        else:
            order = self._key(priority, table).argsort(stable=True)
        self._keys.fill_(_NONE)
        self._keys[:count] = self._key(priority, table)[order]
        self.changes.zero_()
        return order

    def clear(self) -> None:
        """There are no entries."""
        self._keys.fill_(_NONE)
        self._exact_above.zero_()
        self.changes.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        rounded = {"exact_above": self._exact_above} if self._rounds else {}
        return {"keys": self._keys, "changes": self.changes, **rounded}


def _new_first(priority: Tensor) -> Tensor:
    return torch.where(priority < 0, math.inf, priority)
