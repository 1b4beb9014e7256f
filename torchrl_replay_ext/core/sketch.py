"""Count-min sketch: about how often a row was seen, in fixed memory; for Novel and PairCounts."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.kernels.splitmix import STEP, mixed


def hash_rows(columns: list[Tensor]) -> Tensor:
    """Hash the bits of each row.

    Args:
        columns: tensors [n, ...]; a row consists of the entries of all columns.

    Returns:
        int64 [n].
    """
    parts = []
    for column in columns:
        column = column.reshape(column.shape[0], -1)
        if column.dtype.is_floating_point:
            # adding 0.0 turns -0.0 into 0.0, so that both have the same hash
            column = (column.to(torch.float64) + 0.0).view(torch.int64)
        parts.append(column.to(torch.int64))
    entries = torch.cat(parts, 1)
    salt = mixed(torch.arange(1, entries.shape[1] + 1, device=entries.device) * STEP)
    return mixed(mixed(entries + salt).sum(1))


class Sketch:
    """A count-min sketch (Cormode and Muthukrishnan 2005): counts of hashes in several tables.

    A hash has one counter in each row, and its count is the smallest of them. It is too large only if the hash shares
    all its counters with others, and never too small.

    Args:
        rows: number of counters of each hash.
        width: number of counters in each row, rounded up to a power of 2.
        tables: number of tables. Default: 1.
        device: device of the counters.
    """

    def __init__(self, rows: int, width: int, tables: int = 1, *, device: torch.device):
        self._width = 1 << (width - 1).bit_length()
        row = torch.arange(rows, device=device).unsqueeze(1)
        # not computed in graphs: Triton rejects the product of an int32 index and such a constant
        self._begins, self._salts = row * self._width, row * STEP
        # int32 [tables, rows * width]
        self.counts = torch.zeros((tables, rows * self._width), dtype=torch.int32, device=device)

    def _counters(self, hashes: Tensor) -> Tensor:
        """The counters of ``hashes`` [n], int64 [rows, n]."""
        return self._begins + (mixed(hashes + self._salts) & (self._width - 1))

    def add(self, first: int, hashes: Tensor, change: Tensor) -> None:
        """Add ``change`` [k, n] to the counts of ``hashes`` [n] in the tables ``first`` to ``first + k - 1``."""
        table = first + torch.arange(len(change), device=hashes.device).view(-1, 1, 1)
        change = change.to(torch.int32).unsqueeze(1).expand(-1, len(self._salts), -1)
        self.counts.index_put_((table, self._counters(hashes)), change, accumulate=True)

    def of(self, hashes: Tensor) -> Tensor:
        """The counts of ``hashes`` [n] in each table, int64 [tables, n]."""
        counters, (tables, size) = self._counters(hashes), self.counts.shape
        table = torch.arange(tables, device=hashes.device).view(-1, 1, 1) * size
        found = gather_in_bounds(self.counts.view(-1), (table + counters).view(-1))
        return found.view(-1, *counters.shape).amin(1).to(torch.int64)
