"""Divides joint draws among shards, and puts the drawn rows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchrl_replay_ext.samplers.base import Distribution, ShardRows, Sums
from torchrl_replay_ext.sharding.arrays import DENSITY, Arrays, num_rows, split, take
from torchrl_replay_ext.sharding.shard import Report

# more proposals than needed on average, so that a second round is rare
_SPARE, _SPARE_SHARE = 8, 1.15


class Division(NamedTuple):
    """A joint draw, divided.

    Args:
        rows: the rows to draw in each shard; None for shards without rows.
        probability: probability that a row of each table lies in each shard, float64 [shards, tables].
        num_rows: number of rows or proposals.
    """

    rows: list[ShardRows | None]
    probability: np.ndarray
    num_rows: int


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

    def count(self, division: Division, found: int) -> None:
        """Count the rows that were found by a division."""
        self._acceptance += 0.1 * (max(found, 1) / division.num_rows - self._acceptance)

    def divide(
        self, reports: Sequence[Report], rows: int, batch_size: int, generator: torch.Generator | None
    ) -> Division | None:
        """Divide a draw; None if nothing can be drawn.

        Args:
            reports: the newest report of each shard.
            rows: number of rows. If some are rejected, more are proposed.
            batch_size: number of rows of the whole batch.
            generator: source of randomness; None: the global generator.
        """
        if self._distribution is not None and self._distribution.rejects:
            rows = int(rows / self._acceptance * _SPARE_SHARE) + _SPARE
        tables = max(len(report.mass) for report in reports)
        mass = np.zeros((len(reports), tables))
        for number, report in enumerate(reports):
            mass[number, : len(report.mass)] = report.mass
        total = mass.sum(0)
        if not total.any():
            return None
        counts = [report.count for report in reports if report.count is not None]
        count = np.sum(counts, axis=0) if counts else None
        eta = next((np.array(report.eta) for report in reports if report.eta is not None), None)
        if self._distribution is None:
            table, eta = np.zeros(rows, dtype=np.int64), np.ones(1)
            u = torch.rand(rows, dtype=torch.float64, generator=generator).numpy()
        else:
            parts: list[Any] = [None if part is None else torch.from_numpy(part) for part in (count, eta)]
            everywhere = Sums(torch.from_numpy(total), None, *parts)
            plan = self._distribution.plan(everywhere, rows, batch_size, generator)
            table, u, eta = (part.numpy() for part in plan)
        probability = mass / np.where(total > 0, total, 1.0)
        ends = probability.cumsum(0)
        # the last shard with mass also gets what rounding leaves above the end
        last = len(reports) - 1 - (mass[::-1] > 0).argmax(0)
        place = np.minimum((u >= ends[:, table]).sum(0), last[table])
        inside = (u - (ends - probability)[place, table]) / probability[place, table]
        inside = inside.clip(0.0, np.nextafter(1.0, 0.0))
        divided: list[ShardRows | None] = []
        for in_shard, part in zip(probability, split({"u": inside, "table": table}, place, len(reports)), strict=True):
            # arrays instead of tensors, for transfer to the shard
            wanted: list[Any] = [part["u"], part["table"] if tables > 1 else None, in_shard, eta, count]
            divided.append(ShardRows(*wanted) if len(part["u"]) else None)
        return Division(divided, probability, rows)

    def add_weights(self, batch: Arrays, division: Division, reports: Sequence[Report]) -> None:
        """Replace the probabilities of rows, if the sampler gives them, by weights (probability / smallest)^−β <= 1.

        Args:
            batch: the rows.
            division: how they were divided.
            reports: the reports after the draw.
        """
        density, betas = batch.pop(DENSITY, None), [report.beta for report in reports if report.beta is not None]
        if density is not None and betas:
            # no shard reports its smallest probability if weights are normalised over the batch
            in_shards = zip(division.probability[:, 0], reports, strict=True)
            drawn = [(p, report) for p, report in in_shards if p > 0 and report.mass[0] > 0]
            smallest = [report.smallest * p / report.mass[0] for p, report in drawn if report.smallest is not None]
            least = min(smallest, default=density.min())
            batch["priority_weight"] = np.minimum((density / least) ** -betas[0], 1.0).astype(np.float32)


def choose(parts: list[Arrays], wanted: int, unit: int, generator: torch.Generator | None) -> Arrays:
    """``wanted`` units of ``unit`` rows, chosen at random, in random order; all of them if there are not more."""
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    kept = torch.randperm(num_rows(rows) // unit, generator=generator)[:wanted].numpy()
    return take(rows, (kept[:, None] * unit + np.arange(unit)).reshape(-1))
