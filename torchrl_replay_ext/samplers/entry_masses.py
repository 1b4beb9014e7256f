"""The masses of the entries of event tables, in proportion to which the rows of a table are drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, where_int64
from torchrl_replay_ext.core.event_tables import EventTables, TableView
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.core.slots import Slots
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.kernels.layouts import CHANGES
from torchrl_replay_ext.kernels.ops import events_mixture, events_set_masses
from torchrl_replay_ext.samplers.table_shares import TableShares


class EntryMasses:
    """A sum tree with the mass of each entry of each event table. The entries of a table are consecutive leaves.

    Args:
        slots: the slots of the storage.
        tables: the event tables; they are allocated if the storage is known.
        alpha: exponent of the priorities, whose powers are the masses, float64 [1]. None: all masses are 1 unit.
        shares: η of each table, if masses depend on it: 1 + Σ_{k>0} η_k inside of the union of the event tables, and
            1 − Σ_{k>0} η_k outside (SSET, Sec. 4). None: they do not.
        pairs: counts of pairs that must know which event tables hold a slot; None: there are none.
    """

    def __init__(
        self,
        slots: Slots,
        tables: EventTables,
        *,
        alpha: Tensor | None,
        shares: TableShares | None,
        pairs: PairCounts | None,
    ):
        self._slots, self._tables, self._shares, self._pairs = slots, tables, shares, pairs
        self._size, self._device = slots.layout.size, slots.layout.device
        self._is_bound = slots.layout.known
        if self._is_bound:
            tables.allocate(self._size, self._device)
        # the arrays of the tables on the device
        self.view = TableView(tables, self._device)
        self.tree = SumTree(len(self.view.slot_at), device=self._device)
        # numbers and an exponent, whose power is the mass of each slot; no numbers if all masses are 0 or 1 unit
        one = torch.ones(1, dtype=torch.float64, device=self._device)
        if shares is not None:
            self._power = torch.ones_like(slots.priority), one
        else:
            self._power = (slots.priority[:0].clone(), one) if alpha is None else (slots.priority, alpha)
        self.is_uniform = not len(self._power[0])
        # the counter of changes of the tables that were applied; -1: none
        self._seen = torch.full((1,), -1, dtype=torch.int64, device="cpu")

    def sync(self) -> None:
        """Apply the changes of the tables since the last call. Not usable in graphs."""
        if self._is_bound and self._seen.item() != self._tables.counters.numpy()[CHANGES]:
            self.follow(self.view.begins[:0])

    def follow(self, slots: Tensor) -> None:
        """Update the masses of what has changed in the tables, and of ``slots`` [n]; negative slots are skipped."""
        tables, view, begin, end, changes, is_new = self._tables, self.view, 0, 0, None, False
        if self._is_bound and not is_traced():
            begin, end = int(self._seen), int(tables.counters[CHANGES])
            self._seen.fill_(end)
            if not tables.has_changes_since(begin):
                is_new, begin = True, end
                # those that are being inserted are not stored yet
                slots = torch.cat([self.stored(torch.arange(self._size, device=self._device)), slots])
                view.send()
                self.tree.clear_()
            elif begin != end and (view.is_copy or self._pairs or self._shares):
                changes = view.changes(begin)
        if self._shares is not None:
            slots = slots if changes is None else torch.cat([slots, self.stored(changes[:, 1])])
            self._set_numbers(self._shares, slots.clamp_min(0))
        slot_at, position_of, counts, journal = view.views()
        if view.is_copy:
            begin, end, journal = (0, 0, journal) if changes is None else (0, len(changes), changes)
        leaves, nodes, pages, _ = self.tree.arrays()
        masses = *self._power, slots.contiguous()
        events_set_masses(leaves, nodes, pages, *masses, slot_at, position_of, counts, journal, begin, end)
        if self._pairs is not None and not is_traced():
            moved = slots if changes is None else torch.cat([changes[:, 1], slots])
            moved = torch.arange(self._size, device=self._device) if is_new else moved
            self._pairs.set_tables(moved, view.find(moved) >= 0)

    def _set_numbers(self, shares: TableShares, slots: Tensor) -> None:
        """Set the numbers of ``slots`` [n] that depend on η."""
        event_share, inside = 1 - shares.current[0].float(), self.in_events(slots)
        self._power[0].index_copy_(0, slots, torch.where(inside, 1 + event_share, 1 - event_share))

    def in_events(self, slots: Tensor) -> Tensor:
        """True where an event table holds a slot of ``slots`` [n], in ring tables; bool [n]."""
        return (self.view.find(slots) >= 0).any(0)

    def stored(self, slots: Tensor) -> Tensor:
        """``slots`` [n]; -1 for those without a transition."""
        return where_int64(gather_in_bounds(self._slots.generation, slots) > 0, slots, -1)

    def of_tables(self) -> Tensor:
        """The sum of the masses of each table, int64 [tables]."""
        return self.tree.prefix(self.view.begins).diff()

    def mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        """The sum over the tables of ``per_mass`` [tables] times the mass of each of ``slots`` [n], float64 [n]."""
        probability = per_mass.new_empty(slots.shape[0])
        events_mixture(slots.contiguous(), per_mass, self.tree.leaves, self.view.position_of, probability)
        return probability

    def rebuild(self) -> None:
        """Let all masses be set again: they follow from tables and priorities, and the tables may be loaded later."""
        self._seen.fill_(-1)

    def clear(self) -> None:
        """Remove all entries."""
        self.rebuild()
        self.tree.clear_()
