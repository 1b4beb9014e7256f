"""P(i) by the rank of the priority (Schaul et al. 2016, rank-based variant)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.arguments import WeightNorm
from torchrl_replay_ext.compilation import gather_in_bounds, stratified_uniform, uniform
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.rank_buckets import RankBuckets
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView
from torchrl_replay_ext.kernels.ops import Views, rank_tabulate

# An annealed alpha is applied in steps of this size.
STEP = 0.01

Segments = Literal["exact", "piecewise"]


def check_alpha(table_alpha: Tensor, alpha: Hyperparameter) -> None:
    """Raise AssertionError if the exponent of a table of r^-alpha is none that ``alpha`` has had."""
    if not 0 <= table_alpha.item() <= alpha.bound:
        raise AssertionError(f"alpha of the ranks, {table_alpha.item()}, is not in [0, {alpha.bound}]")


class RankBased(Distribution):
    """P(i) = rank(i)^−α / Σ_r r^−α; see :class:`~torchrl_replay_ext.RankBasedSampler`.

    Args:
        log, priorities: the state of the slots.
        alpha: the exponent.
        stratified: draw one slot from each of B segments of equal probability.
        segments: ``"exact"``: segments follow P exactly. ``"piecewise"``: the paper's approximation.
        weight_norm: ``"buffer"`` or ``"batch"``: weights are divided by the largest weight of the buffer or batch.
    """

    why_not_joint = "ranks need the priorities of all shards; use ProportionalSampler or ReaPERSampler."

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        *,
        alpha: Hyperparameter,
        stratified: bool,
        segments: Segments,
        weight_norm: WeightNorm,
    ):
        self._log, self._priorities, self._alpha = log, priorities, alpha
        self._stratified, self._segments, self._weight_norm = stratified, segments, weight_norm
        self._size, self._device = size, device = log.layout.size, log.layout.device
        self._ranks = RankBuckets(size, device)
        # Σ_{r≤k} r^-alpha, and the alpha of this table
        self._cumulative = torch.zeros(size, dtype=torch.float64, device=device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=device)
        self._views = Views(self._cumulative, self._table_alpha)
        self._tabulate(alpha.tensor, 0.0)
        # piecewise: size of the last batch, which is the number of segments; 0 (exact probabilities) before the first
        self._num_segments = 0

    def _tabulate(self, alpha: Tensor, step: float) -> None:
        rank_tabulate(self._cumulative, self._table_alpha, alpha, step)

    def _prepare(self) -> None:
        """Bring ranks and alpha up to date before a draw."""
        self._ranks.refresh()
        if self._alpha.annealed:
            self._tabulate(self._alpha.tensor, STEP)

    def clear(self) -> None:
        self._ranks.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {"table_alpha": self._table_alpha, **self._ranks.tensors()}

    def check_valid(self) -> None:
        check_alpha(self._table_alpha, self._alpha)
        self._ranks.check_valid(self._priorities.of_slot, self._log.generation > 0)

    def rebuild(self) -> None:
        self._ranks.rebuild(self._priorities.of_slot, self._log.generation > 0)
        self._tabulate(self._table_alpha.clone(), 0.0)

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        self._ranks.insert(slots)

    def remove(self, slots: Tensor) -> None:
        self._ranks.remove(slots)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._ranks.update(slots, priority)

    def reweight(self, slots: Tensor | None) -> None:
        if slots is None:
            self._tabulate(self._alpha.tensor, 0.0)

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        self._prepare()
        draw_numbers = stratified_uniform if self._stratified else uniform
        u = draw_numbers(batch_size, device=self._device, generator=generator)
        if self._segments == "exact":
            slots, density, smallest = self._ranks.draw(u, *self._views())
        else:
            slots, density, smallest = self._draw_piecewise(u)
        return Draw(slots, density, None if self._weight_norm == "batch" else smallest)

    def _draw_piecewise(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num, count = self._ranks.total(), u.shape[0]
        self._num_segments = count
        bounds = begin, width = self._bounds(num, count)
        scaled = u * count
        segment = scaled.to(torch.int64).clamp_max(count - 1)
        within = (scaled - segment) * gather_in_bounds(width, segment)
        rank = gather_in_bounds(begin, segment) + within.to(torch.int64)
        # if nothing can be drawn, the rank is -1, which finds slot 0
        density = self._density(rank.clamp_min(0), bounds) * (num > 0)
        return self._ranks.find(rank), density, self._density(begin, bounds).amin().reshape(1)

    def _mass_of(self, num: Tensor) -> Tensor:
        """Σ_{r≤num} r^-alpha, float64 [1]."""
        return gather_in_bounds(self._cumulative, (num - 1).clamp_min(0).reshape(1))

    def _bounds(self, num: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each of ``count`` segments, the first rank, counted from 0, and the number of ranks; int64 [count]."""
        parts = torch.arange(1, count + 1, dtype=torch.float64, device=self._device) / count
        # a boundary that lies on the end of a rank must not include the next rank because of rounding
        ends = torch.searchsorted(self._cumulative, parts * self._mass_of(num) * (1 - 1e-12)) + 1
        # the last segment ends with the last rank, however small its probability
        ends = torch.maximum(torch.minimum(ends, num), num * (parts == 1))
        begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return torch.minimum(begins, ends - 1), (ends - begins).clamp_min(1)

    def _density(self, rank: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Tensor:
        """A number proportional to the probability of each ``rank`` [n], counted from 0; float64 [n].

        ``bounds``: the segments of :meth:`_bounds`, or None for exact probabilities.
        """
        if bounds is None:
            return (rank + 1).to(torch.float64) ** -self._table_alpha
        begin, width = bounds
        # a rank lies in consecutive segments: the first has any width, the others contain only this rank
        first = torch.searchsorted(begin + width, rank, right=True)
        end = torch.searchsorted(begin, rank, right=True)
        first_width = gather_in_bounds(width, first.clamp_max(len(width) - 1))
        return 1 / first_width.to(torch.float64) + (end - first - 1)

    def density(self, slots: Tensor) -> Tensor:
        self._prepare()
        rank = self._ranks.rank_of(slots)
        bounds = self._bounds(self._ranks.total(), self._num_segments) if self._num_segments else None
        return self._density(rank.clamp_min(0), bounds) * (rank >= 0)
