"""Distributions over the entries of an event table: uniform, by priority, by rank, and by Ψ of ReaPER."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds, uniform, where_int64
from torchrl_replay_ext.core.event_tables import TableView
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.rank_buckets import RankBuckets
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.kernels.ops import as_tensor, events_mixture, rank_tabulate
from torchrl_replay_ext.samplers.base import WriteObserver
from torchrl_replay_ext.samplers.proportional import MAX_PRIORITY, largest_priority
from torchrl_replay_ext.samplers.rank import STEP, check_alpha
from torchrl_replay_ext.samplers.reaper import Rejection, Reliability
from torchrl_replay_ext.samplers.table_shares import TableShares


class ByMass:
    """q_k(i) ∝ d_i^α, or q_k(i) = 1 / |B_k| without ``alpha``. Base class of the other distributions.

    Args:
        log, priorities: the state of the slots.
        tree: the mass of each entry of each table; the entries of a table are consecutive leaves.
        view: the event tables.
        alpha: the exponent. Default: None, all entries of a table have the same mass.
    """

    # True if :meth:`move` has to be called
    follows = False
    # True if an entry is drawn in proportion to its mass
    draws_by_mass = True
    # True if the mass of an entry depends on the tables that hold the slot
    depends_on_tables = False
    # why joint draws from several shards are not possible; None: they are
    why_not_joint: str | None = None
    # see :attr:`Distribution.parts`
    parts: Sequence[WriteObserver] = ()

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        tree: SumTree,
        view: TableView,
        alpha: Hyperparameter | None = None,
    ):
        self._log, self._priorities, self._tree, self._view, self._alpha = log, priorities, tree, view, alpha
        # numbers and an exponent, whose power is the mass of each slot; no numbers if all masses are 0 or 1 unit
        nothing = priorities.of_slot[:0].clone(), priorities.of_slot[:0].to(torch.float64)
        self.power = nothing if alpha is None else (priorities.of_slot, alpha.tensor)

    @property
    def max_supported_priority(self) -> float:
        """The largest d that can be represented."""
        return MAX_PRIORITY if self._alpha is None else largest_priority(self._tree, self._alpha)

    def mark(self, slots: Tensor) -> None:
        """Called if :attr:`depends_on_tables`, for ``slots`` [n] that are new or have moved; -1 is skipped."""

    def refresh(self) -> None:
        """Bring what draws read up to date."""

    def move(self, positions: Tensor) -> None:
        """Called with the ``positions`` [n] whose entries or priorities have changed; negative ones are skipped."""

    def draw(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw an entry for each row, from its ``table`` [B]; only called if not :attr:`draws_by_mass`.

        ``low`` and ``total``: the sums of the masses before each table and in it, int64 [tables].

        Returns:
            The positions, int64 [B]; numbers in proportion to q_k of each, [B]; their sums over each table, [tables].
        """
        raise NotImplementedError

    def mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        """The sum over the tables of ``per_mass`` [tables] times the number in proportion to q_k(i), [n]."""
        probability = per_mass.new_empty(slots.shape[0])
        events_mixture(slots.contiguous(), per_mass, self._tree.leaves, self._view.places, probability)
        return probability

    def totals(self, total: Tensor) -> Tensor:
        """The sums over each table of what :meth:`mixture` adds up; the masses have the sums ``total``. O(N)."""
        return total

    def reweight(self) -> None:
        """Called after the exponent was changed."""

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """See :meth:`Distribution.update`. The masses are updated by the caller."""

    def clear(self) -> None:
        """Called when all tables are emptied."""

    def tensors(self) -> dict[str, Tensor]:
        """The state to save, without what follows from the tables and the priorities."""
        return {}

    def rebuild(self) -> None:
        """Recompute derived state after masses or :meth:`tensors` were replaced."""

    def check_valid(self) -> None:
        """Raise AssertionError if the state is inconsistent. O(N)."""

    def stats(self, eta: Tensor) -> dict[str, Tensor]:
        """Statistics for logging, scalars; ``eta``: η of each table, [tables]."""
        return {}


class ByMembership(ByMass):
    """q_k(i) ∝ 1 + η inside of the union of the event tables, 1 − η outside, for η = Σ_{k>0} η_k (SSET, Sec. 4).

    Args:
        arguments: those of :class:`ByMass`.
        shares: η of each table.
    """

    depends_on_tables = True

    def __init__(self, *arguments: Any, shares: TableShares):
        super().__init__(*arguments)
        self._shares, numbers = shares, torch.ones_like(self._priorities.of_slot)
        self.power = numbers, torch.ones(1, dtype=torch.float64, device=numbers.device)

    def mark(self, slots: Tensor) -> None:
        slots, event_share = slots.clamp_min(0), 1 - self._shares.current[0].float()
        inside = (self._view.find(slots) >= 0).any(0)
        self.power[0].index_copy_(0, slots, torch.where(inside, 1 + event_share, 1 - event_share))


class ByRank(ByMass):
    """q_k(i) ∝ rank^−α, for the rank of d_i in table k.

    Args:
        arguments: those of :class:`ByMass`.
        alpha: the exponent.
    """

    follows = True
    draws_by_mass = False
    why_not_joint = "ranks need the priorities of all shards; use priority=dict(kind='proportional')."

    def __init__(self, *arguments: Any, alpha: Hyperparameter):
        super().__init__(*arguments)
        self._exponent, begins, device = alpha, self._view.begins.tolist(), self._view.begins.device
        self._ranges = [*pairwise(begins)]
        self._ranks = [RankBuckets(end - begin, device) for begin, end in self._ranges]
        # Σ_{r≤k} r^-alpha, and the alpha of this table
        largest = max(end - begin for begin, end in self._ranges)
        self._cumulative = torch.zeros(largest, dtype=torch.float64, device=device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=device)
        self.reweight()

    def reweight(self) -> None:
        rank_tabulate(self._cumulative, self._table_alpha, self._exponent.tensor, 0.0)

    def refresh(self) -> None:
        for ranks in self._ranks:
            ranks.refresh()
        if self._exponent.annealed:
            rank_tabulate(self._cumulative, self._table_alpha, self._exponent.tensor, STEP)

    def move(self, positions: Tensor) -> None:
        slots = gather_in_bounds(self._view.slot_at, positions.clamp_min(0)).to(torch.int64)
        priority = gather_in_bounds(self._priorities.of_slot, slots.clamp_min(0))
        for ranks, (begin, _) in zip(self._ranks, self._ranges, strict=True):
            # rows out of range are skipped
            ranks.update(positions - begin, priority, kept=slots >= 0)

    def totals(self, total: Tensor) -> Tensor:
        counts = torch.stack([ranks.total() for ranks in self._ranks])
        return gather_in_bounds(self._cumulative, (counts - 1).clamp_min(0)) * (counts > 0)

    def draw(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        u = uniform(table.shape[0], device=table.device, generator=generator)
        position, density = torch.zeros_like(table), torch.zeros_like(u)
        for number, (ranks, (begin, _)) in enumerate(zip(self._ranks, self._ranges, strict=True)):
            found, of_found, _ = map(as_tensor, ranks.draw(u, self._cumulative, self._table_alpha))
            position = where_int64(table == number, found + begin, position)
            density = torch.where(table == number, of_found, density)
        return position, density, self.totals(total)

    def mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        positions, result = self._view.positions(slots), per_mass.new_zeros(slots.shape[0])
        for number, (ranks, (begin, _)) in enumerate(zip(self._ranks, self._ranges, strict=True)):
            rank = ranks.rank_of(positions[number] - begin)
            mass = (rank + 1).clamp_min(1).to(torch.float64) ** -self._table_alpha * (rank >= 0)
            result = result + per_mass[number] * mass
        return result

    def clear(self) -> None:
        for ranks in self._ranks:
            ranks.clear()

    def tensors(self) -> dict[str, Tensor]:
        places = {f"place_{number}": ranks.tensors()["place"] for number, ranks in enumerate(self._ranks)}
        return {"table_alpha": self._table_alpha, **places}

    def _state(self, number: int) -> tuple[Tensor, Tensor]:
        entries = slice(*self._ranges[number])
        slots = self._view.slot_at[entries].to(torch.int64)
        return self._priorities.of_slot[slots.clamp_min(0)], (slots >= 0) & (self._tree.leaves[entries] > 0)

    def rebuild(self) -> None:
        for number, ranks in enumerate(self._ranks):
            ranks.rebuild(*self._state(number))
        rank_tabulate(self._cumulative, self._table_alpha, self._table_alpha.clone(), 0.0)

    def check_valid(self) -> None:
        check_alpha(self._table_alpha, self._exponent)
        for number, ranks in enumerate(self._ranks):
            ranks.check_valid(*self._state(number))


class ByReliability(ByMass):
    """q_k(i) ∝ Ψ_i = R_i^ω d_i^α: proposals follow d^α and are accepted with probability R^ω.

    The sum of Ψ over a table is estimated from the proposals of the last batches.

    Args:
        arguments: those of :class:`ByMass`.
        alpha: the exponent of d.
        make_reliability: creates the model of R from the log.
    """

    draws_by_mass = False
    why_not_joint = "the sums of Ψ over tables are estimated in one buffer; use priority=dict(kind='proportional')."

    def __init__(self, *arguments: Any, alpha: Hyperparameter, make_reliability: Callable[[WriteLog], Reliability]):
        super().__init__(*arguments, alpha=alpha)
        self._reliability = make_reliability(self._log)
        self.parts = (self._reliability,)
        self._rejection = Rejection(self._tree, self._reliability, self._view)

    @property
    def max_supported_priority(self) -> float:
        return min(super().max_supported_priority, self._reliability.max_supported_priority)

    def draw(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        position, mass = map(as_tensor, self._rejection.draw(table.shape[0], generator, (table, low, total)))
        return position, mass, total * self._rejection.acceptance()

    def mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        return super().mixture(slots, per_mass) * self._reliability.factor(slots)

    def totals(self, total: Tensor) -> Tensor:
        stored, one = self._log.stored_slots(), torch.eye(len(total), dtype=torch.float64, device=total.device)
        return torch.stack([self.mixture(stored, only).sum() for only in one])

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._reliability.update(slots, priority)

    def clear(self) -> None:
        self._rejection.clear()

    def tensors(self) -> dict[str, Tensor]:
        return self._rejection.tensors()

    def check_valid(self) -> None:
        self._rejection.check_valid()

    def stats(self, eta: Tensor) -> dict[str, Tensor]:
        return {
            "acceptance_rate": (self._rejection.acceptance() * eta).sum(),
            "reliability_mean": self._reliability.mean(),
            "interrupted": self._reliability.interrupted(),
        }
