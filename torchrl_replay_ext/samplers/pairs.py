"""How often each pair of state and action is stored, and in which tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.tracing import take

# Odd constants of splitmix64, as signed integers.
_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)


def _mixed(number: Tensor) -> Tensor:
    """A hash of int64 numbers (splitmix64); int64."""
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * factor
    return number ^ ((number >> 31) & (2**33 - 1))


def hash_rows(columns: list[Tensor]) -> Tensor:
    """A hash of each row of ``columns``, [n, ...] each, by the bits they hold; int64 [n]."""
    result = torch.zeros(columns[0].shape[0], dtype=torch.int64, device=columns[0].device)
    for column in columns:
        column = column.reshape(column.shape[0], -1)
        if column.dtype.is_floating_point:
            # -0.0 is 0.0
            column = (column.to(torch.float64) + 0.0).view(torch.int64)
        for entry in column.to(torch.int64).unbind(1):
            result = _mixed(result * 31 + entry + _MIX[0])
    return result


class PairCounts:
    """Counts of stored transitions by (state, action): of all, in each event table, and in any of them.

    Args:
        size: number of slots.
        tables: number of tables, the default one included.
        device: where the tensors live.
    """

    def __init__(self, size: int, tables: int, *, device: torch.device):
        buckets = 1 << (4 * size - 1).bit_length()
        self._tables = tables
        self._bucket = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._inside = torch.zeros(size, dtype=torch.int64, device=device)
        self._counts = torch.zeros((tables + 1, buckets), dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state."""
        return {"pair_bucket": self._bucket, "pair_inside": self._inside, "pair_counts": self._counts}

    def clear_(self) -> None:
        """Nothing is stored."""
        self._bucket.fill_(-1)
        self._inside.zero_()
        self._counts.zero_()

    def _add(self, row: Tensor | int, buckets: Tensor, change: Tensor | int) -> None:
        row = torch.as_tensor(row, device=buckets.device).expand_as(buckets)
        change = torch.as_tensor(change, dtype=torch.int32, device=buckets.device).expand_as(buckets)
        self._counts.index_put_((row, buckets), change, accumulate=True)

    def write(self, slots: Tensor, columns: list[Tensor], listed: Tensor) -> None:
        """``slots`` [n], all different, hold new transitions.

        Args:
            slots: int64 [n].
            columns: states and actions, [n, ...].
            listed: in which event tables what was there before is, bool [tables - 1, n]; it has left them now.
        """
        before = self._bucket[slots]
        known = before >= 0
        self._add(0, before[known], -1)
        for table, member in enumerate(listed, start=1):
            self._add(table, before[member], -1)
        self._add(self._tables, before[self._inside[slots] > 0], -1)
        self._inside[slots] = 0
        buckets = hash_rows(columns) & (self._counts.shape[1] - 1)
        self._bucket[slots] = buckets
        self._add(0, buckets, 1)

    def enter(self, slots: Tensor, tables: Tensor) -> None:
        """``slots`` [n] have entered ``tables`` [n]."""
        buckets = self._bucket[slots]
        self._add(tables, buckets, 1)
        self._add(self._tables, buckets, (self._inside[slots] == 0).to(torch.int32))
        self._inside.index_add_(0, slots, torch.ones_like(slots))

    def leave(self, slots: Tensor, tables: Tensor) -> None:
        """``slots`` [n] have left ``tables`` [n]."""
        known = self._inside[slots] > 0
        slots, tables = slots[known], tables[known]
        buckets = self._bucket[slots]
        self._add(tables, buckets, -1)
        self._inside.index_add_(0, slots, -torch.ones_like(slots))
        self._add(self._tables, buckets, -(self._inside[slots] == 0).to(torch.int32))

    def of(self, slots: Tensor) -> Tensor:
        """Counts of the pairs of ``slots`` [n]: of all, in each event table, in any; int64 [tables + 1, n]."""
        buckets = take(self._bucket, slots)
        rows = torch.arange(self._tables + 1, device=slots.device).unsqueeze(1) * self._counts.shape[1]
        flat = take(self._counts.view(-1), (rows + buckets).view(-1))
        return flat.view(-1, slots.shape[0]).to(torch.int64)
