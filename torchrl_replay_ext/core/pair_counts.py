"""Counts of stored transitions by state and action, in all tables and in each table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.core.sketch import Sketch, hash_rows
from torchrl_replay_ext.core.write_observer import WriteObserver
from torchrl_replay_ext.indices import is_last_occurrence

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import RowView

# Number of counters of each pair.
_ROWS = 3


class PairCounts(WriteObserver):
    """Counts the stored transitions of each (state, action): in total, in each event table, and in any event table.

    A :class:`~torchrl_replay_ext.core.sketch.Sketch` counts hashes of pairs: three rows of at least 2N counters.

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
