"""Distributions over the entries of an event table: uniform, by priority, by rank, and by Ψ of ReaPER."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds, rows_where
from torchrl_replay_ext.core.event_tables import TableView
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.rank_order import RankOrder, masses
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.proportional import MAX_PRIORITY, largest_priority
from torchrl_replay_ext.distributions.protocol import RowView, WriteObserver
from torchrl_replay_ext.distributions.rejection import Rejection
from torchrl_replay_ext.distributions.reliability import Reliability
from torchrl_replay_ext.distributions.table_rows import TableRows, propose


class Uniform(WriteObserver):
    """q_k(i) = 1 / |B_k|: all entries of a table have the same mass. Base class of the other distributions.

    Args:
        log, priorities: the state of the slots.
        tree: the mass of each entry of each table; the entries of a table are consecutive leaves.
        view: the event tables.
    """

    # True if draws depend on TD errors
    takes_priorities = False
    # see WriteObserver.needs_order
    needs_order = False
    # True if masses are computed by sorting
    sorts = False
    # True if an entry is drawn in proportion to its mass
    draws_by_mass = True
    # why joint draws from several shards are not possible; None: they are
    why_not_joint: str | None = None

    def __init__(self, log: WriteLog, priorities: Priorities, tree: SumTree, view: TableView):
        self._log, self._priorities, self._tree, self._view = log, priorities, tree, view

    @property
    def max_supported_priority(self) -> float:
        """The largest d that can be represented."""
        return MAX_PRIORITY

    def power(self) -> tuple[Tensor, Tensor] | None:
        """Numbers and the exponent [1] whose power is the mass of each slot; no numbers if all masses are 1 unit.

        None: masses depend on more than the slot.
        """
        return self._tree.leaves[:0], self._tree.leaves[:0]

    def masses(self, positions: Tensor, slots: Tensor) -> Tensor | int:
        """Masses of ``slots`` [n] at ``positions`` [n], or one number for all."""
        return SumTree.UNIT

    def draw(self, u: Tensor, rows: TableRows, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Draw an entry for each of ``rows``, from uniform numbers ``u`` [B].

        Returns:
            The positions, int64 [B]; their masses, [B]; the sum of the masses of each table, [tables]. With
            reliability, masses and sums are those of Ψ.
        """
        low, total = gather_in_bounds(rows.low, rows.table), gather_in_bounds(rows.total, rows.table)
        return *propose(self._tree, u, low, total), rows.total

    def density(self, mass: Tensor, slots: Tensor) -> Tensor:
        """Numbers in proportion to q_k(i) of ``slots`` [n], which have the masses ``mass`` [tables, n]."""
        return mass

    def exact_totals(self, total: Tensor) -> Tensor:
        """The sum of :meth:`density` over each table, whose masses have the sums ``total`` [tables]. O(N)."""
        return total

    def sort(self) -> None:
        """Sort the entries, if :attr:`sorts`."""

    def sort_if_due(self) -> None:
        """Sort if enough entries have changed."""

    def count_changes(self, count: int) -> None:
        """Count entries that were written or updated since the last sort."""

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        pass

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """See :meth:`Distribution.update`. The masses are updated by the caller."""

    def remove(self, slots: Tensor) -> None:
        pass

    def clear(self) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def raise_numbers(self, last: int) -> None:
        """See :meth:`WriteObserver.raise_numbers`."""

    def rebuild(self) -> None:
        pass

    def check_valid(self) -> None:
        pass

    def stats(self, eta: Tensor) -> dict[str, Tensor]:
        """Statistics for logging, scalars; ``eta``: η of each table, [tables]."""
        return {}


class ByPriority(Uniform):
    """q_k(i) ∝ d_i^α.

    Args:
        arguments: those of :class:`Uniform`.
        alpha: the exponent.
    """

    takes_priorities = True

    def __init__(self, *arguments: Any, alpha: Hyperparameter):
        super().__init__(*arguments)
        self._alpha = alpha

    @property
    def max_supported_priority(self) -> float:
        return largest_priority(self._tree, self._alpha)

    def power(self) -> tuple[Tensor, Tensor] | None:
        return self._priorities.of_slot, self._alpha.tensors()[0]

    def masses(self, positions: Tensor, slots: Tensor) -> Tensor:
        priority = gather_in_bounds(self._priorities.of_slot, slots)
        return SumTree.to_mass(priority.abs().to(torch.float64) ** self._alpha.current())


class ByRank(Uniform):
    """q_k(i) ∝ rank^−α, for the rank of d_i in table k at the last sort.

    Args:
        arguments: those of :class:`Uniform`.
        alpha: the exponent.
        stale_fraction: share of the entries that may change before the next sort.
    """

    takes_priorities = sorts = True
    why_not_joint = "ranks need the priorities of all shards; use priority=dict(kind='proportional')."

    def __init__(self, *arguments: Any, alpha: Hyperparameter, stale_fraction: float):
        super().__init__(*arguments)
        self._alpha, view, leaves = alpha, self._view, self._tree.leaves
        self._order = RankOrder(
            len(view.slot_at), tables=len(view.counts), stale_fraction=stale_fraction, device=leaves.device
        )

    def power(self) -> tuple[Tensor, Tensor] | None:
        return None

    def _table_of(self, positions: Tensor) -> Tensor:
        return (positions.unsqueeze(1) >= self._view.begins[1:-1]).sum(1)

    def masses(self, positions: Tensor, slots: Tensor) -> Tensor:
        priority = gather_in_bounds(self._priorities.of_slot, slots)
        return masses(self._order.rank(priority, self._table_of(positions)), self._alpha.value)

    def count_changes(self, count: int) -> None:
        self._order.changes.add_(count)

    def sort_if_due(self) -> None:
        if self._order.is_due(self._view.counts.sum()):
            self.sort()

    @torch.no_grad()
    def sort(self) -> None:
        with self._log.transaction():
            self._sort()

    def _sort(self) -> None:
        count = len(self._view.counts)
        slots = self._view.slot_at.to(torch.int64)
        positions = torch.arange(len(slots), device=slots.device)
        table = self._table_of(positions)
        held = slots >= 0
        slots = slots.clamp_min(0)
        held &= self._log.generation[slots] > 0
        # on an accelerator, which cannot leave out positions, those without an entry come last
        table = torch.where(held, table, count)
        kept = rows_where(held)
        positions, slots, table = positions[kept], slots[kept], table[kept]
        order = self._order.sort(self._priorities.of_slot[slots], table)
        positions, table = positions[order], table[order]
        begins = torch.searchsorted(table, torch.arange(count + 1, device=table.device))
        rank = torch.arange(len(order), device=table.device) - begins[table]
        leaves = self._tree.leaves
        leaves.zero_()
        leaves[positions] = masses(rank, self._alpha.value) * (table < count)
        self._tree.rebuild_()

    def clear(self) -> None:
        self._order.clear()

    def tensors(self) -> dict[str, Tensor]:
        return self._order.tensors()


class ByReliability(ByPriority):
    """q_k(i) ∝ Ψ_i = R_i^ω d_i^α: proposals follow d^α and are accepted with probability R^ω.

    The sum of Ψ over a table is estimated from the proposals of the last batches.

    Args:
        arguments: those of :class:`Uniform`.
        alpha: the exponent of d.
        make_reliability: creates the model of R from the log.
    """

    needs_order = True
    draws_by_mass = False
    why_not_joint = "the sums of Ψ over tables are estimated in one buffer; use priority=dict(kind='proportional')."

    def __init__(self, *arguments: Any, alpha: Hyperparameter, make_reliability: Callable[[WriteLog], Reliability]):
        super().__init__(*arguments, alpha=alpha)
        self._reliability = make_reliability(self._log)
        self._rejection = Rejection(self._tree, self._reliability, self._view)

    @property
    def max_supported_priority(self) -> float:
        return min(super().max_supported_priority, self._reliability.max_supported_priority)

    def draw(self, u: Tensor, rows: TableRows, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        position, mass = self._rejection.draw(len(u), generator, rows)
        return position, mass, rows.total * self._rejection.acceptance()

    def density(self, mass: Tensor, slots: Tensor) -> Tensor:
        return mass * self._reliability.factor(slots)

    def exact_totals(self, total: Tensor) -> Tensor:
        stored = self._log.stored_slots()
        positions = self._view.positions(stored)
        mass = self._tree.get(positions.reshape(-1)).view(positions.shape)
        return self.density(mass, stored).sum(1)

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        self._reliability.insert(slots, priority, rows)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._reliability.update(slots, priority)

    def remove(self, slots: Tensor) -> None:
        self._reliability.remove(slots)

    def before_full_overwrite(self) -> None:
        self._reliability.before_full_overwrite()

    def clear(self) -> None:
        self._reliability.clear()
        self._rejection.clear()

    def tensors(self) -> dict[str, Tensor]:
        return self._rejection.tensors() | self._reliability.tensors()

    def limits(self) -> Mapping[str, tuple[float, float]]:
        return {"acceptance": (0.0, 1.0), **self._reliability.limits()}

    def raise_numbers(self, last: int) -> None:
        self._reliability.raise_numbers(last)

    def rebuild(self) -> None:
        self._reliability.rebuild()

    def check_valid(self) -> None:
        self._reliability.check_valid()

    def stats(self, eta: Tensor) -> dict[str, Tensor]:
        return {
            "acceptance_rate": (self._rejection.acceptance() * eta).sum(),
            "reliability_mean": self._reliability.mean(),
            "interrupted": self._reliability.interrupted(),
        }
