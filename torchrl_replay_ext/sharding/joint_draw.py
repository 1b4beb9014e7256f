"""Divides a batch among shards, and puts the drawn rows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchrl_replay_ext.samplers.base import ReplaySampler
from torchrl_replay_ext.samplers.shard_draws import ShardRows, Sums
from torchrl_replay_ext.sharding.arrays import Arrays, num_rows, take
from torchrl_replay_ext.sharding.shard import Report


def divide(
    sampler: ReplaySampler | None, reports: Sequence[Report], batch_size: int, generator: torch.Generator | None
) -> list[ShardRows] | None:
    """Divide a batch among shards by their sums; None if nothing can be drawn.

    Let M_sk be the mass of table k in shard s. The shard of each row of table k is s with probability M_sk / Σ_s M_sk,
    and the shard draws it from its own table. So each transition has the probability that it has in one buffer with
    all transitions. If the sums are out of date, it has another one, which the shard computes for the weights.

    Args:
        sampler: one like those of the shards, which chooses the number of rows of each table. None: draws are
            uniform.
        reports: the newest report of each shard.
        batch_size: number of rows.
        generator: source of randomness; None: the global generator.
    """
    tables = max(len(report.mass) for report in reports)
    mass = torch.zeros(len(reports), tables, dtype=torch.float64, device="cpu")
    for row, report in zip(mass, reports, strict=True):
        row[: len(report.mass)] = torch.tensor(report.mass, dtype=torch.float64, device="cpu")
    total = mass.sum(0)
    if not total.any():
        return None
    counts = [torch.tensor(report.count, device="cpu") for report in reports if report.count is not None]
    count = torch.stack(counts).sum(0) if counts else None
    rows, eta = torch.tensor([batch_size], device="cpu"), torch.ones(1, dtype=torch.float64, device="cpu")
    if sampler is not None:
        rows, eta = sampler.rows_of_tables(Sums(total, None, count), batch_size, generator)
    probability = mass / torch.where(total > 0, total, 1.0)
    divided = torch.zeros(len(reports), tables, dtype=torch.int64, device="cpu")
    for table, number in enumerate(rows.tolist()):
        if number:
            shard = torch.multinomial(probability[:, table], number, replacement=True, generator=generator)
            divided[:, table] = shard.bincount(minlength=len(reports))
    return [ShardRows(*parts, eta, count) for parts in zip(divided, probability, strict=True)]


def join(parts: list[Arrays], unit: int, generator: torch.Generator | None) -> Arrays:
    """All rows of ``parts``, of which ``unit`` rows each stay together, in random order."""
    rows = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    order = torch.randperm(num_rows(rows) // unit, generator=generator, device="cpu").numpy()
    return take(rows, (order[:, None] * unit + np.arange(unit)).reshape(-1))


def weights(probability: np.ndarray, smallest: Sequence[float | None], beta: Any) -> np.ndarray:
    """(P / smallest)^−β <= 1; the smallest P of all shards, or of the batch if shards do not know theirs."""
    least = min((p for p in smallest if p is not None), default=probability.min())
    return np.minimum((probability / least) ** -float(beta), 1.0).astype(np.float32)
