"""Draws from event tables by rank, and by Ψ of ReaPER."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds, uniform, where_int64
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.rank_buckets import RankBuckets
from torchrl_replay_ext.kernels.ops import as_tensor, rank_tabulate
from torchrl_replay_ext.samplers.event_table_mixture import EventTableMixture
from torchrl_replay_ext.samplers.rank import STEP
from torchrl_replay_ext.samplers.reaper import Rejection
from torchrl_replay_ext.samplers.rows import EpisodeReader


class ByRank(EventTableMixture):
    """q_k(i) ∝ rank^−α, for the rank of d_i in table k.

    Args:
        arguments, keywords: those of :class:`EventTableMixture`.
    """

    draws_by_mass = False
    reads_changes = True
    _alpha: Hyperparameter

    def __init__(self, *arguments: Any, **keywords: Any):
        super().__init__(*arguments, **keywords)
        # one unit for each entry, also if its priority is 0
        self._power = self._power[0][:0].clone(), self._power[1]
        # the positions of each table, and the ranks of the entries there
        tables = [slice(*ends) for ends in pairwise(self._view.begins.tolist())]
        self._ranks = [(table, RankBuckets(table.stop - table.start, self._device)) for table in tables]
        # Σ_{r≤k} r^-alpha, and the alpha of this table
        largest = max(table.stop - table.start for table in tables)
        self._cumulative = torch.zeros(largest, dtype=torch.float64, device=self._device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=self._device)
        self.reweight(None)

    def reweight(self, slots: Tensor | None) -> None:
        rank_tabulate(self._cumulative, self._table_alpha, self._alpha.tensor, 0.0)

    def _refresh(self) -> None:
        for _, ranks in self._ranks:
            ranks.refresh()
        if self._alpha.annealed:
            rank_tabulate(self._cumulative, self._table_alpha, self._alpha.tensor, STEP)

    def _entries_changed(self, slots: Tensor, entries: Tensor | None, is_all: bool) -> None:
        if is_all:
            for table, ranks in self._ranks:
                ranks.rebuild(*self._state(table))
            rank_tabulate(self._cumulative, self._table_alpha, self._table_alpha.clone(), 0.0)
            return
        positions = where_int64(slots >= 0, self._view.positions(slots.clamp_min(0)), -1).reshape(-1)
        positions = positions if entries is None else torch.cat([entries, positions])
        slots = gather_in_bounds(self._view.slot_at, positions.clamp_min(0)).to(torch.int64)
        priority = gather_in_bounds(self._priorities.of_slot, slots.clamp_min(0))
        for table, ranks in self._ranks:
            # rows out of range are skipped
            ranks.update(positions - table.start, priority, kept=slots >= 0)

    def _state(self, table: slice) -> tuple[Tensor, Tensor]:
        """The priority at each position of a table, and whether there is an entry."""
        slots = self._view.slot_at[table].to(torch.int64)
        return self._priorities.of_slot[slots.clamp_min(0)], (slots >= 0) & (self._tree.leaves[table] > 0)

    def _table_sums(self, total: Tensor) -> Tensor:
        counts = torch.stack([ranks.total() for _, ranks in self._ranks])
        return gather_in_bounds(self._cumulative, (counts - 1).clamp_min(0)) * (counts > 0)

    def _draw_entries(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        u = uniform(table.shape[0], device=table.device, generator=generator)
        position, density = torch.zeros_like(table), torch.zeros_like(u)
        for number, (entries, ranks) in enumerate(self._ranks):
            found, of_found, _ = map(as_tensor, ranks.draw(u, self._cumulative, self._table_alpha))
            position = where_int64(table == number, found + entries.start, position)
            density = torch.where(table == number, of_found, density)
        return position, density, self._table_sums(total)

    def _mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        positions, result = self._view.positions(slots), per_mass.new_zeros(slots.shape[0])
        for number, (table, ranks) in enumerate(self._ranks):
            result = result + per_mass[number] * ranks.density(positions[number] - table.start, self._table_alpha)
        return result

    def clear(self) -> None:
        super().clear()
        for _, ranks in self._ranks:
            ranks.clear()

    def tensors(self) -> dict[str, Tensor]:
        places = {f"place_{number}": ranks.tensors()["place"] for number, (_, ranks) in enumerate(self._ranks)}
        return super().tensors() | {"table_alpha": self._table_alpha, **places}


class ByReliability(EventTableMixture):
    """q_k(i) ∝ Ψ_i = R_i^ω d_i^α: proposals follow d^α and are accepted with probability R^ω.

    The sum of Ψ over a table is estimated from the proposals of the last batches.

    Args:
        arguments, keywords: those of :class:`EventTableMixture`.
        omega: the exponent of R.
        reader: reads the ends of episodes.
    """

    draws_by_mass = False

    def __init__(self, *arguments: Any, omega: Hyperparameter, reader: EpisodeReader, **keywords: Any):
        super().__init__(*arguments, **keywords)
        self._episodes = EpisodeIndex(self._log, reader)
        self._rejection = Rejection(self._tree, self._episodes, omega, self._view)
        self.parts = self._episodes, self._rejection

    @property
    def max_supported_priority(self) -> float:
        return min(super().max_supported_priority, self._episodes.max_supported_priority)

    def _draw_entries(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        position, mass = map(as_tensor, self._rejection.draw(table.shape[0], generator, (table, low, total)))
        return position, mass, total * self._rejection.acceptance()

    def _mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        return super()._mixture(slots, per_mass) * self._rejection.factor(slots)

    def _table_sums(self, total: Tensor) -> Tensor:
        stored, one = self._log.stored_slots(), torch.eye(len(total), dtype=torch.float64, device=total.device)
        return torch.stack([self._mixture(stored, only).sum() for only in one])

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._episodes.update(slots, priority)
        super().update(slots, priority)

    def stats(self) -> dict[str, Tensor]:
        rate = (self._rejection.acceptance() * self._eta).sum()
        return super().stats() | {"acceptance_rate": rate, **self._episodes.stats()}
