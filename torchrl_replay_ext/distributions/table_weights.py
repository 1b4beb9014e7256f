"""Importance-sampling weights of draws from event tables."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.core.class_counts import ClassCounts
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.core.write_log import Layout
from torchrl_replay_ext.distributions.protocol import RowView
from torchrl_replay_ext.distributions.table_shares import TableShares

Correction = Literal["mixture", "conditional", "lemma2", "priority"]


class TableWeights:
    """The weights of each correction, see :class:`~torchrl_replay_ext.EventTableSampler`, and the counts they need.

    Args:
        layout: the slots.
        tables: the tables.
        shares: η of each table.
        correction: which weights.
        beta: their exponent.
        prioritized: whether draws inside the tables follow priorities.
        pair_keys: where state and action are stored, for the corrections that count pairs.
    """

    def __init__(
        self,
        layout: Layout,
        tables: EventTables,
        *,
        shares: TableShares,
        correction: Correction | None,
        beta: Hyperparameter,
        prioritized: bool,
        pair_keys: tuple[NestedKey, ...],
    ):
        self._layout, self._tables, self._shares = layout, tables, shares
        self._correction, self._beta, self._prioritized, self._pair_keys = correction, beta, prioritized, pair_keys
        size, device, count = layout.size, layout.device, len(tables)
        self._pairs = PairCounts(size, count, device=device) if correction in ("conditional", "lemma2") else None
        # in a ring all that is stored is the default table
        by_class = correction == "mixture" and tables.retention == "pinned"
        self._classes = ClassCounts(size, count, device=device) if by_class else None

    # --- counts

    def insert(self, slots: Tensor, rows: RowView) -> None:
        """``slots`` [n] were written."""
        if self._pairs is not None:
            why = "; pass where state and action are stored as pair_keys=."
            self._pairs.write(slots, [rows.entry(key, why) for key in self._pair_keys])
            # rows that are announced again are where they were; others leave the tables next
            self._count_pairs(slots)

    def move(self, slots: Tensor) -> None:
        """``slots`` [n], all different and in the order of writing, have entered or left a table."""
        self._count_pairs(slots)
        if self._classes is not None:
            self._classes.moved(slots, self._tables.holds(slots), self._tables.num_written)

    def _count_pairs(self, slots: Tensor) -> None:
        if self._pairs is not None:
            slots = slots.unique()
            self._pairs.list(slots, self._tables.holds(slots))

    def remove(self, slots: Tensor) -> None:
        """``slots`` [n] hold nothing."""
        if self._pairs is not None:
            self._pairs.drop(slots)

    def before_ingest(self) -> None:
        """What the storage held before is inserted next."""
        if self._classes is not None:
            self._recount()
            self._classes.adopt(self._tables.index(0), self._tables.num_written)

    def _recount(self) -> None:
        if self._classes is not None:
            everything = torch.arange(self._layout.size, device=self._layout.device)
            self._classes.clear_counts_()
            self._classes.recount(everything, self._tables.holds(everything))

    def clear(self) -> None:
        """Count anew what the tables hold; if nothing was written to them, forget what was."""
        if self._pairs is not None:
            self._pairs.clear_()
        if self._classes is not None and self._tables.num_slots:
            if self._tables.num_written:
                self._recount()
            else:
                self._classes.clear_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        pairs = {} if self._pairs is None else self._pairs.tensors()
        return pairs if self._classes is None else pairs | self._classes.tensors()

    def check_valid(self) -> None:
        """Raise AssertionError if counts and tables contradict each other. O(N)."""
        if self._classes is not None and self._tables.num_slots:
            everything = torch.arange(self._layout.size, device=self._layout.device)
            self._classes.check_valid(self._tables.holds(everything))

    # --- weights

    def of_plain(self, slots: Tensor, probability: Tensor, share: list[float]) -> Tensor:
        """Weights of draws without priorities, float32 [n]; ``probability`` [n]: p(i); ``share``: η_k / |B_k|."""
        if self._correction is None:
            return torch.ones_like(probability)
        weight = 1 / probability
        if self._classes is not None:
            of_table = torch.tensor(share, dtype=torch.float64, device=probability.device)
            weight = self._classes.weight(slots, of_table, self._tables.counts[0])
        return self._normalized(weight).to(torch.float32)

    def of(self, slots: Tensor, probability: Tensor, eta: Tensor, mass: Tensor, total: Tensor, count: Tensor) -> Tensor:
        """Weights, at most 1, float64 [n].

        Args:
            slots: int64 [n].
            probability: p(i), [n].
            eta: of the tables that are drawn from, [tables].
            mass: of each row in its table, [n].
            total: sum of the masses of each row's table, [n].
            count: entries of each row's table, [n].
        """
        if self._correction is None:
            if not self._prioritized:
                return torch.ones_like(probability)
            weight = total / (count * mass)
        elif self._correction == "mixture":
            weight = 1 / probability if self._classes is None else self._by_class(slots, probability, eta)
        elif self._correction == "priority":
            share = 1 - self._shares.current[0]
            weight = 1 / torch.where(self._in_event_table(slots), 1 + share, 1 - share)
        else:
            assert self._pairs is not None
            of_pair = self._pairs.of(slots)
            if self._correction == "conditional":
                per_copy = eta / self._tables.counts.clamp_min(1)
                weight = (of_pair[:-1] * per_copy.unsqueeze(1)).sum(0) / of_pair[0] / probability
            else:
                share = 1 - eta[0]
                outside = 1 - of_pair[-1] / of_pair[0]
                weight = torch.where(self._in_event_table(slots), 1 - share * outside, 1 / (1 - share))
        return self._normalized(weight)

    def _in_event_table(self, slots: Tensor) -> Tensor:
        return self._tables.holds(slots).any(0)

    def _by_class(self, slots: Tensor, probability: Tensor, eta: Tensor) -> Tensor:
        """Weights for what pinned tables keep, up to a factor, float64 [n]."""
        assert self._classes is not None
        share = eta / self._tables.counts.clamp_min(1)
        weight = self._classes.weight(slots, share, self._tables.counts[0])
        if not self._prioritized:
            return weight
        # within a class, as if draws inside the tables were uniform
        return weight * (self._tables.holds(slots) * share.unsqueeze(1)).sum(0) / probability

    def _normalized(self, weight: Tensor) -> Tensor:
        """``weight`` [n] to the power of β, over the largest; 0 where all are 0."""
        weight = weight ** self._beta.current()
        largest = weight.amax()
        return weight / torch.where(largest > 0, largest, 1.0)
