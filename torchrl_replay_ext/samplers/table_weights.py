"""Importance-sampling weights of draws from event tables."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.core.class_counts import ClassCounts
from torchrl_replay_ext.core.event_tables import EventTables, TableView
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.samplers.base import RowView
from torchrl_replay_ext.samplers.table_shares import TableShares

Correction = Literal["mixture", "conditional", "lemma2", "priority"]


class TableWeights:
    """Importance-sampling weights for each ``correction`` of :class:`~torchrl_replay_ext.EventTableSampler`.

    Args:
        layout: the slots.
        tables: the tables.
        view: the same, on the device of the layout.
        shares: η of each table.
        correction: the type of weights.
        beta: the exponent of the weights; None without ``correction`` and priorities, when all weights are 1.
        prioritized: True if draws inside the tables follow priorities.
        pair_keys: entries with the state and the action, for corrections that count pairs of them.
    """

    def __init__(
        self,
        layout: Layout,
        tables: EventTables,
        view: TableView,
        *,
        shares: TableShares,
        correction: Correction | None,
        beta: Hyperparameter | None,
        prioritized: bool,
        pair_keys: tuple[NestedKey, ...],
    ):
        self._layout, self._tables, self._view, self._shares = layout, tables, view, shares
        self._correction, self._beta, self._prioritized, self._pair_keys = correction, beta, prioritized, pair_keys
        size, device, count = layout.size, layout.device, len(tables)
        self._pairs = PairCounts(size, count, device=device) if correction in ("conditional", "lemma2") else None
        # classes are not needed in a ring, where the default table holds all stored transitions
        by_class = correction == "mixture" and tables.retention == "pinned"
        self._classes = ClassCounts(size, count, device=device) if by_class else None

    # --- counts

    def insert(self, slots: Tensor, rows: RowView) -> None:
        """Count the pairs of new rows at ``slots`` [n]."""
        if self._pairs is not None:
            why = "which the correction needs; pass the entries with the state and the action as pair_keys=."
            self._pairs.write(slots, [rows.entry(key, why) for key in self._pair_keys])
            self._pairs.set_tables(slots, self._view.holds(slots))

    @property
    def counts_moves(self) -> bool:
        """True if :meth:`move` has to be called."""
        return self._pairs is not None or self._classes is not None

    def move(self, slots: Tensor, number: Tensor) -> None:
        """Update the counts after ``slots`` [n], distinct, with transitions ``number`` [n], moved between tables."""
        if self._pairs is not None:
            self._pairs.set_tables(slots, self._view.holds(slots))
        if self._classes is not None:
            self._classes.moved(slots, self._view.places.index_select(1, slots), number)

    def remove(self, slots: Tensor) -> None:
        """Remove the pairs of ``slots`` [n]."""
        if self._pairs is not None:
            self._pairs.remove(slots)

    def before_ingest(self) -> None:
        """Called before the rows that the storage already holds are inserted."""
        if self._classes is not None:
            self._classes.adopt(self._tables.num_written - self._tables.size(0))

    def recount(self) -> None:
        """Count the content of all tables again."""
        everything = torch.arange(self._layout.size, device=self._layout.device)
        self.move(everything, self._tables.number.to(self._layout.device, non_blocking=True))

    def clear(self) -> None:
        """Clear all counts, until :meth:`recount`."""
        if self._pairs is not None:
            self._pairs.clear_()
        if self._classes is not None:
            self._classes.clear_(keep_history=self._tables.num_written > 0)

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        pairs = {} if self._pairs is None else self._pairs.tensors()
        return pairs if self._classes is None else pairs | self._classes.tensors()

    def rebuild(self) -> None:
        """Count again after :meth:`tensors` were replaced."""
        for counts in (self._pairs, self._classes):
            if counts is not None:
                counts.rebuild()

    def check_valid(self) -> None:
        """Raise AssertionError if the counts do not match the tables. O(N)."""
        if self._classes is not None:
            everything = torch.arange(self._layout.size, device=self._layout.device)
            self._classes.check_valid(self._view.holds(everything))

    # --- weights

    def of_draw(
        self, slots: Tensor, probability: Tensor, eta: Tensor, mass: Tensor, table: Tensor, total: Tensor
    ) -> Tensor:
        """Weights, at most 1, [n]; 0 where nothing can be drawn, which has mass 0.

        Args:
            slots: int64 [n].
            probability: p(i), [n].
            eta: η of each table, 0 for tables that are not used, [tables].
            mass: mass of each row in the table that it was drawn from, [n].
            table: this table, int64 [n].
            total: sum of the masses of each table, [tables].
        """
        if self._correction is None:
            if not self._prioritized:
                return (mass > 0).to(torch.float32)
            mean = total / self._view.counts.clamp_min(1)
            weight = gather_in_bounds(mean, table) / mass
        elif self._correction == "mixture":
            weight = 1 / probability if self._classes is None else self._by_class(slots, probability, eta)
        elif self._correction == "priority":
            event_share = 1 - self._shares.current[0]
            weight = 1 / torch.where(self._in_event_table(slots), 1 + event_share, 1 - event_share)
        else:
            assert self._pairs is not None
            of_pair = self._pairs.of(slots)
            if self._correction == "conditional":
                per_copy = eta / self._view.counts.clamp_min(1)
                weight = (of_pair[:-1] * per_copy.unsqueeze(1)).sum(0) / of_pair[0] / probability
            else:
                event_share = 1 - eta[0]
                outside = 1 - of_pair[-1] / of_pair[0]
                inside = 1 - event_share * outside
                weight = torch.where(self._in_event_table(slots), inside, 1 / (1 - event_share))
        return self._normalized(torch.where(mass > 0, weight, 0.0))

    def _in_event_table(self, slots: Tensor) -> Tensor:
        return self._view.holds(slots).any(0)

    def _by_class(self, slots: Tensor, probability: Tensor, eta: Tensor) -> Tensor:
        """Weights for pinned tables, up to a factor, float64 [n]."""
        assert self._classes is not None
        per_entry = eta / self._view.counts.clamp_min(1)
        weight = self._classes.weight(slots, per_entry, self._view.counts[0])
        if not self._prioritized:
            return weight
        # within a class, correct for the priorities inside the tables
        return weight * (self._view.holds(slots) * per_entry.unsqueeze(1)).sum(0) / probability

    def _normalized(self, weight: Tensor) -> Tensor:
        """``weight`` [n] to the power of β, divided by the largest; 0 if all are 0."""
        assert self._beta is not None
        weight = weight ** self._beta.current()
        largest = weight.amax()
        # a graph may compute numerator and denominator with different roundings
        return (weight / torch.where(largest > 0, largest, 1.0)).clamp_max(1.0)
