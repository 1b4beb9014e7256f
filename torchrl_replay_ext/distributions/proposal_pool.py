"""Draws from Ψ = R^ω m on accelerators, where m are the masses of a sum tree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, read, uniform, where_int64
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.distributions.table_rows import TableRows, propose

# One pass over all N leaves takes about as long as N / 32 proposals.
_PASS = 32
# Number of additional proposals per table.
_SPARE = 16
# Above this omega the number of proposals does not increase.
_MAX_OMEGA = 4.0

Count = TypeVar("Count", int, Tensor)


class ProposalPool:
    """Draws leaves from Ψ: proposals for the whole batch follow m and are accepted with probability R^ω.

    If too few proposals are accepted, eager code discards the batch and starts again with twice as many, until one pass
    over all Ψ is cheaper. The accepted rows follow Ψ, because the number of accepted proposals is independent of their
    values. The host waits once to see whether enough proposals were accepted. A graph repeats accepted proposals
    instead; if none is accepted for a table, its rows are drawn from all of its proposals in proportion to R^ω.

    Args:
        tree: the masses m.
        factor: R^ω of leaves [n].
        omega: the largest ω.
        acceptance: see :class:`~torchrl_replay_ext.distributions.rejection.Rejection`.
    """

    def __init__(self, tree: SumTree, factor: Callable[[Tensor], Tensor], omega: float, acceptance: Tensor):
        self._tree, self._factor, self._omega, self._acceptance = tree, factor, omega, acceptance
        self._device, self._num_tables = acceptance.device, acceptance.shape[1]

    def draw(self, batch_size: int, generator: torch.Generator | None, rows: TableRows | None) -> tuple[Tensor, Tensor]:
        """See :meth:`~torchrl_replay_ext.distributions.rejection.Rejection.draw`."""
        traced = is_traced()
        number = 1 + (torch.arange(batch_size, device=self._device) if rows is None else rows.number)
        made, scale, ends = 0, 1, None
        while made <= self._tree.capacity // _PASS:
            num = scale * self._num_proposals(batch_size, self._num_tables)
            if rows is not None:
                tables = torch.arange(1, self._num_tables + 1, device=self._device)
                ends = scale * self._num_proposals(rows.ends, tables)
            leaf, factor, density, accepted = self._propose(num, ends, generator, rows)
            if rows is None or ends is None:
                wanted, missing = number, batch_size - accepted[-1]
            else:
                # number of rows and of accepted proposals before each table
                first, ahead = _with_zero(rows.ends), _with_zero(gather_in_bounds(accepted, ends - 1))
                wanted = number + gather_in_bounds(ahead - first, rows.table)
                missing = (first.diff() - ahead.diff()).clamp_min(0).sum()
            if traced or read(missing)[0] <= 0:
                break
            made, scale = made + num, 2 * scale
        else:
            return self._from_all(generator, rows or self._one_table(batch_size))
        if traced:
            ends = torch.full_like(number[:1], num) if ends is None else ends
            place = self._repeat(factor, accepted, ends, rows or self._one_table(batch_size))
        else:
            place = torch.searchsorted(accepted, wanted)
        return gather_in_bounds(leaf, place), gather_in_bounds(density, place)

    def _num_proposals(self, rows: Count, tables: Count) -> Count:
        """Number of proposals for ``rows`` rows. If R is uniform in (0, 1), one of 1 + ω proposals is accepted."""
        per_16 = math.ceil(20 * (1 + min(self._omega, _MAX_OMEGA)))
        return (rows * per_16 + 15) // 16 + _SPARE * tables

    def _propose(
        self, num: int, ends: Tensor | None, generator: torch.Generator | None, rows: TableRows | None
    ) -> tuple[Tensor, ...]:
        """Propose ``num`` leaves that follow m: leaves, R^ω, Ψ, and the running count of accepted leaves; [num] each.

        ``ends``: number of proposals for tables 0 to k for each k, int64 [tables].
        """
        u, v = uniform(2, num, device=self._device, generator=generator)
        if rows is None or ends is None:
            leaf, mass = self._tree.draw(u)
            factor = self._factor(leaf)
        else:
            table = torch.searchsorted(ends, torch.arange(num, device=self._device), right=True)
            leaf, mass = propose(self._tree, u, gather_in_bounds(rows.low, table), gather_in_bounds(rows.total, table))
            factor = self._factor(leaf)
            sums = torch.zeros_like(self._acceptance[0]).index_add_(0, table, factor.to(torch.float64))
            mean, is_drawn = sums / _with_zero(ends).diff(), (_with_zero(rows.ends).diff() > 0).to(torch.float64)
            self._acceptance.lerp_(torch.stack([mean, torch.ones_like(mean)]), 0.1 * is_drawn)
        return leaf, factor, factor * mass, (v < factor).cumsum(0)

    def _one_table(self, batch_size: int) -> TableRows:
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        number = torch.arange(batch_size, device=self._device)
        return TableRows(zero + batch_size, number, zero.expand(batch_size), zero, self._tree.total().reshape(1))

    def _repeat(self, factor: Tensor, accepted: Tensor, ends: Tensor, rows: TableRows) -> Tensor:
        """Choose a proposal for each row by repeating accepted proposals, see :meth:`draw`; int64 [B]."""
        cumulative = _with_zero(factor.cumsum(0))
        edges = _with_zero(ends)
        ahead, low = gather_in_bounds(_with_zero(accepted), edges), gather_in_bounds(cumulative, edges)
        found, width = gather_in_bounds(ahead.diff(), rows.table), gather_in_bounds(low.diff(), rows.table)
        row = rows.number - gather_in_bounds(_with_zero(rows.ends), rows.table)
        number = gather_in_bounds(ahead, rows.table) + row % found.clamp_min(1) + 1
        target = gather_in_bounds(low, rows.table) + uniform(len(found), device=self._device) * width
        # the target may have been rounded up to the end, and all factors of a table may be 0
        end = torch.searchsorted(cumulative, target, right=True)
        by_factor = torch.minimum(end, gather_in_bounds(ends, rows.table)) - 1
        return where_int64(found > 0, torch.searchsorted(accepted, number), by_factor)

    def _from_all(self, generator: torch.Generator | None, rows: TableRows) -> tuple[Tensor, Tensor]:
        """:meth:`draw` by one pass over all Ψ."""
        leaves = self._tree.leaves.nonzero().squeeze(1)
        mass = self._tree.leaves[leaves]
        density = mass * self._factor(leaves)
        cumulative, running = _with_zero(density.cumsum(0)), mass.cumsum(0)
        begin = torch.searchsorted(running, rows.low, right=True)[rows.table]
        end = torch.searchsorted(running, rows.low + rows.total, right=True)[rows.table]
        u = uniform(len(begin), device=self._device, generator=generator)
        target = cumulative[begin] + u * (cumulative[end] - cumulative[begin])
        # the target may have been rounded up to the end
        place = torch.minimum(torch.searchsorted(cumulative, target, right=True), end) - 1
        return leaves[place], density[place]


def _with_zero(sums: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(sums[:1]), sums])
