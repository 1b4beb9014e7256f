"""Divides joint draws among shards, and puts the drawn rows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_replay_ext.distributions.protocol import Distribution, ShardRows, Sums
from torchrl_replay_ext.sharding.arrays import Arrays, num_rows, split, take
from torchrl_replay_ext.sharding.shard import Report

# more proposals than needed on average, so that a second round is rare
_SPARE, _SPARE_SHARE = 8, 1.15


class Division(NamedTuple):
    """A joint draw, divided.

    Args:
        rows: the rows to draw in each shard; None for shards without rows.
        probability: probability that a row of each table lies in each shard, float64 [shards, tables].
    """

    rows: list[ShardRows | None]
    probability: np.ndarray


class JointDraw:
    """Divides draws of a distribution among shards by their sums.

    A row of table k lies in shard s with probability M_sk / Σ_s M_sk, where M_sk are the sums of the masses. Its slot
    in the shard is drawn in proportion to the masses there. So each transition has the probability that it has in one
    buffer with all transitions. If the sums are out of date, it has the probability M_sk / Σ M_sk · m_i / M'_sk, with
    the sum M'_sk at the time of the draw; importance-sampling weights correct for this probability.

    Args:
        distribution: one like those of the shards; its state is not used. None: draws are uniform.
    """

    def __init__(self, distribution: Distribution | None):
        self._distribution = distribution
        # running mean of the share of proposals that are accepted
        self._acceptance = 1.0

    def proposals(self, rows: int) -> int:
        """Number of proposals to draw for ``rows`` rows."""
        if self._distribution is None or not self._distribution.rejects:
            return rows
        return int(rows / self._acceptance * _SPARE_SHARE) + _SPARE

    def update_acceptance(self, proposed: int, accepted: int) -> None:
        """Update the running mean by the numbers of proposed and of accepted rows of a round."""
        if self._distribution is not None and self._distribution.rejects and proposed:
            self._acceptance += 0.1 * (max(accepted, 1) / proposed - self._acceptance)

    def divide(
        self, reports: Sequence[Report], rows: int, batch_size: int, generator: torch.Generator | None
    ) -> Division | None:
        """Divide a draw of ``rows`` rows or proposals; None if nothing can be drawn.

        Args:
            reports: the newest report of each shard.
            rows: number of rows or proposals.
            batch_size: number of rows of the whole batch.
            generator: source of randomness; None: the global generator.
        """
        tables = max(len(report.mass) for report in reports)
        mass = np.array([report.mass if len(report.mass) == tables else (0.0,) * tables for report in reports])
        total = mass.sum(0)
        if not total.any():
            return None
        counts = [report.count for report in reports if report.count is not None]
        eta = next((report.eta for report in reports if report.eta is not None), None)
        everywhere = Sums(
            torch.from_numpy(total),
            None,
            torch.tensor(counts).sum(0) if counts else None,
            None if eta is None else torch.tensor(eta, dtype=torch.float64),
        )
        if self._distribution is None:
            table, eta = torch.zeros(rows, dtype=torch.int64), torch.ones(1)
            u = torch.rand(rows, dtype=torch.float64, generator=generator)
        else:
            table, u, eta = self._distribution.plan(everywhere, rows, batch_size, generator)
        table, u, eta = table.numpy(), u.numpy(), eta.numpy()
        probability = mass / np.where(total > 0, total, 1.0)
        ends = probability.cumsum(0)
        # the last shard with mass also gets what rounding leaves above the end
        place = (u >= ends[:, table]).sum(0)
        last = len(reports) - 1 - (mass[::-1] > 0).argmax(0)
        place = np.minimum(place, last[table])
        inside = (u - (ends - probability)[place, table]) / probability[place, table]
        inside = inside.clip(0.0, np.nextafter(1.0, 0.0))
        count = None if everywhere.count is None else everywhere.count.tolist()
        divided: list[ShardRows | None] = []
        for number, rows_of_shard in enumerate(split({"u": inside, "table": table}, place, len(reports))):
            # arrays and lists instead of tensors, for transfer to the shard
            row_tables = rows_of_shard["table"] if tables > 1 else None
            parts: list[Any] = [rows_of_shard["u"], row_tables, probability[number].tolist(), eta.tolist(), count]
            divided.append(ShardRows(*parts) if len(parts[0]) else None)
        return Division(divided, probability)

    def smallest(self, probability: np.ndarray, reports: Sequence[Report]) -> float | None:
        """The smallest probability of a stored transition in a draw; None if weights are normalised over the batch.

        Args:
            probability: see :class:`Division`.
            reports: the reports after the draw.
        """
        scaled = []
        for in_shard, report in zip(probability[:, 0], reports, strict=True):
            if report.incarnation and report.mass[0] > 0 and in_shard > 0:
                if report.smallest is None:
                    return None
                scaled.append(report.smallest * in_shard / report.mass[0])
        return min(scaled, default=None)


def weights(density: np.ndarray, beta: float, smallest: float | None) -> np.ndarray:
    """Importance-sampling weights (density / smallest)^−β, at most 1; float32 [n].

    Args:
        density: probability of each row, float64 [n].
        beta: the exponent.
        smallest: the smallest probability. None: that of the batch.
    """
    least = density.min() if smallest is None else smallest
    return np.minimum((density / least) ** -beta, 1.0).astype(np.float32)


def choose(rows: Arrays, wanted: int, unit: int, generator: torch.Generator | None) -> Arrays:
    """``wanted`` units of ``unit`` rows, chosen at random, in random order; all of them if there are not more."""
    kept = torch.randperm(num_rows(rows) // unit, generator=generator)[:wanted].numpy()
    return take(rows, (kept[:, None] * unit + np.arange(unit)).reshape(-1))
