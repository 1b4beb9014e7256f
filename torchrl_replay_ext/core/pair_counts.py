"""Count-min sketch: about how often a row was seen, in fixed memory; and counts of state-action pairs in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.core.layout import is_last_occurrence
from torchrl_replay_ext.core.slots import WriteObserver

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import RowView

# the odd constants of SplitMix64, as signed integers
_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _mixed(number: Tensor) -> Tensor:
    """Hashes of int64 numbers by SplitMix64, int64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * factor
    return number ^ ((number >> 31) & (2**33 - 1))


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
    salt = _mixed(torch.arange(1, entries.shape[1] + 1, device=entries.device) * _STEP)
    return _mixed(_mixed(entries + salt).sum(1))


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
        self._begins, self._salts = row * self._width, row * _STEP
        # int32 [tables, rows * width]
        self.counts = torch.zeros((tables, rows * self._width), dtype=torch.int32, device=device)

    def _counters(self, hashes: Tensor) -> Tensor:
        """The counters of ``hashes`` [n], int64 [rows, n]."""
        return self._begins + (_mixed(hashes + self._salts) & (self._width - 1))

    def add(self, first: int, hashes: Tensor, change: Tensor) -> None:
        """Add ``change`` [k, n] to the counts of ``hashes`` [n] in the tables ``first`` to ``first + k - 1``."""
        table = first + torch.arange(len(change), device=hashes.device).view(-1, 1, 1)
        change = change.to(torch.int32).unsqueeze(1).expand(-1, len(self._salts), -1)
        self.counts.index_put_((table, self._counters(hashes)), change, accumulate=True)

    def of(self, hashes: Tensor) -> Tensor:
        """The counts of ``hashes`` [n] in each table, int64 [tables, n]."""
        counters, (tables, size) = self._counters(hashes), self.counts.shape
        table = torch.arange(tables, device=hashes.device).view(-1, 1, 1) * size
        counts = gather_in_bounds(self.counts.view(-1), (table + counters).view(-1))
        return counts.view(-1, *counters.shape).amin(1).to(torch.int64)


# Number of counters of each pair.
_ROWS = 3


class PairCounts(WriteObserver):
    """Counts the stored transitions of each (state, action): in total, in each event table, and in any event table.

    A :class:`~torchrl_replay_ext.core.pair_counts.Sketch` counts hashes of pairs: three rows of at least 2N counters.

    Args:
        size: number of slots, N.
        tables: number of tables, including the default table.
        keys: the entries with the state and the action.
        device: device of the tensors.
    """

    def __init__(self, size: int, tables: int, keys: Sequence[NestedKey], *, device: torch.device):
        self._keys = keys
        # hash of the pair in each slot, -1 if empty
        self._hash = torch.full((size,), -1, dtype=torch.int64, device=device)
        # True where an event table holds a slot
        self._listed = torch.zeros((tables - 1, size), dtype=torch.bool, device=device)
        self._sketch = Sketch(_ROWS, 2 * size, tables + 1, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state to save, without what follows from the tables."""
        return {"pair_hash": self._hash}

    def rebuild(self) -> None:
        """Count again after :meth:`tensors` were replaced; :meth:`set_tables` has to be called for all slots."""
        self._sketch.counts.zero_()
        self._listed.zero_()
        self._sketch.add(0, self._hash, (self._hash >= 0).unsqueeze(0))

    def clear(self) -> None:
        """Remove all transitions."""
        self._hash.fill_(-1)
        self.rebuild()

    def write(self, slots: Tensor, rows: RowView) -> None:
        """Replace the transitions in some slots by new ones, which are in no event table yet."""
        why = "which the correction needs; pass the entries with the state and the action as pair_keys=."
        hashes = hash_rows([rows.entry(key, why) for key in self._keys]) & (2**63 - 1)
        self.remove(slots)
        self._hash[slots] = hashes
        self._sketch.add(0, hashes, is_last_occurrence(slots).unsqueeze(0))

    def remove(self, slots: Tensor) -> None:
        """Remove the transitions in ``slots``, int64 [n], from all counts."""
        self.set_tables(slots, torch.zeros_like(self._listed[:, slots]))
        hashes = self._hash[slots]
        is_counted = (hashes >= 0) & is_last_occurrence(slots)
        self._sketch.add(0, hashes, -is_counted.to(torch.int32).unsqueeze(0))
        self._hash.index_fill_(0, slots, -1)

    def set_tables(self, slots: Tensor, listed: Tensor) -> None:
        """Set which event tables hold some slots.

        Args:
            slots: int64 [n].
            listed: True where an event table holds a slot, bool [tables - 1, n], equal for equal slots.
        """
        before = self._listed[:, slots]
        self._listed[:, slots] = listed
        change = listed.to(torch.int32) - before.to(torch.int32)
        of_any = listed.any(0, keepdim=True).to(torch.int32) - before.any(0, keepdim=True).to(torch.int32)
        self._sketch.add(1, self._hash[slots], torch.cat([change, of_any]) * is_last_occurrence(slots))

    def of(self, slots: Tensor) -> Tensor:
        """Counts for the pairs in ``slots`` [n]: in total, in each event table, in any; float64 [tables + 1, n]."""
        return self._sketch.of(gather_in_bounds(self._hash, slots)).to(torch.float64)
