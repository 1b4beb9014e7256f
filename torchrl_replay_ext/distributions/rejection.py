"""Exact draws from Ψ = R^ω m, with m the masses of a sum tree."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import EagerFallback, gather_in_bounds, is_traced, scalar, uniform, where_int64
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.distributions.reliability import Reliability

# A pass over all N leaves costs about as much as N / 32 proposals.
_PASS = 32
# Proposals per group beyond the multiple of its rows that is expected to be enough.
_SPARE = 16
# Above this omega the number of proposals no longer grows.
_MAX_OMEGA = 4.0
# Weight of the latest proposals in the running means.
_STEP = 0.1


class Rows(NamedTuple):
    """The tables that the rows of a batch are drawn from; rows stand in the order of their tables.

    Args:
        ends: the row behind the last one of each table, int64 [tables].
        table: of each row, int64 [B].
        low: sum of all masses ahead of each table, int64 [tables].
        total: sum of the masses of each table, int64 [tables].
    """

    ends: Tensor
    table: Tensor
    low: Tensor
    total: Tensor


class Rejection:
    """Draws leaves of a sum tree from Ψ: proposes them in proportion to m and accepts them with probability R^ω.

    Leaf i is slot i, or with ``tables`` an entry of a table; each row of a batch is then drawn from one table.

    Args:
        tree: the masses m.
        reliability: the model of R.
        exact: whether all TD errors of an episode may be 0. If not, a cheaper form of R is enough.
        for_graphs: whether draws become part of graphs.
        tables: the tables.
        begins: the first leaf of each table, and the leaf behind the last table, int64 [tables + 1].
    """

    def __init__(
        self,
        tree: SumTree,
        reliability: Reliability,
        *,
        exact: bool,
        for_graphs: bool,
        tables: EventTables | None = None,
        begins: Tensor | None = None,
    ):
        self._tree, self._reliability, self._tables = tree, reliability, tables
        self._device = tree.leaves.device
        self._begins = torch.tensor([0, tree.capacity], device=self._device) if begins is None else begins
        self._exact, self._for_graphs = exact or for_graphs, for_graphs
        # running mean of R^ω of the proposals for each table, and the sum of its weights
        self._num_tables = len(self._begins) - 1
        self._acceptance = torch.zeros(2, self._num_tables, dtype=torch.float64, device=self._device)
        self._ones = torch.ones_like(self._acceptance[0])
        self._repeated = torch.zeros((), dtype=torch.int64, device=self._device)
        self._fallback: EagerFallback | None = None
        self._make_fallback()

    def _make_fallback(self) -> None:
        if self._for_graphs:
            state = [*self._tree.graph_tensors(), *self._reliability.graph_tensors()]
            self._fallback = EagerFallback(self._draw_anew, state)

    def _draw_anew(self, drawn: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return list(self.draw(len(drawn[0]), None, Rows(*inputs) if inputs else None))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_fallback": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._make_fallback()

    def _factor(self, leaves: Tensor, *, exact: bool = True) -> Tensor:
        """R^ω of ``leaves`` [n], [n]."""
        slots = leaves if self._tables is None else gather_in_bounds(self._tables.slot_at, leaves).to(torch.int64)
        return self._reliability.factor(slots, exact=exact)

    def draw(
        self, batch_size: int, generator: torch.Generator | None, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw leaves from Ψ, each from the table of its row.

        If too few proposals are accepted, eager code makes twice as many, until one pass over all Ψ costs less. How
        many proposals are accepted says nothing about which, so each row follows Ψ. A graph on the CPU has eager code
        draw the batch anew. A graph on another device would have to read from it for that: there, accepted proposals
        are repeated, and if none is accepted for a table, proposals are drawn in proportion to R^ω.

        Args:
            batch_size: number of rows, B.
            generator: source of randomness.
            rows: the tables of the rows, if there are tables.

        Returns:
            The leaves, int64 [B], and Ψ of each, [B].
        """
        traced, repeats = is_traced(), is_traced() and self._device.type != "cpu"
        number = torch.arange(1, batch_size + 1, device=self._device)
        made, scale = 0, 1
        while made <= self._tree.capacity // _PASS:
            num = scale * self._num_proposals(batch_size, self._num_tables)
            ends = None
            if rows is not None:
                tables = torch.arange(1, self._num_tables + 1, device=self._device)
                ends = scale * self._num_proposals(rows.ends, tables)
            leaf, factor, density, accepted = self._propose(num, ends, generator, rows)
            if rows is None or ends is None:
                wanted, missing = number, batch_size - scalar(accepted[-1])
            else:
                # rows and accepted proposals ahead of each table
                first, ahead = _with_zero(rows.ends), _with_zero(gather_in_bounds(accepted, ends - 1))
                wanted = number + gather_in_bounds(ahead - first, rows.table)
                missing = scalar((first.diff() - ahead.diff()).clamp_min(0).sum())
            if traced or missing <= 0:
                break
            made, scale = made + num, 2 * scale
        else:
            return self._from_all(batch_size, generator, rows)
        if repeats:
            self._repeated.add_(missing.clamp_min(0))
            place = self._repeat(number - 1, factor, accepted, ends, rows)
        else:
            place = torch.searchsorted(accepted, wanted)
        drawn = [gather_in_bounds(leaf, place), gather_in_bounds(density, place)]
        if traced and not repeats:
            assert self._fallback is not None
            short = (missing > 0) & (self._tree.total() > 0)
            drawn = self._fallback.replace(short, drawn, [] if rows is None else [*rows])
        return drawn[0], drawn[1]

    def _num_proposals(self, rows: int | Tensor, tables: int | Tensor) -> int | Tensor:
        """Proposals for the first ``rows`` rows, which are those of the first ``tables`` tables.

        Where R is evenly spread over (0, 1), one of 1 + ω is accepted.
        """
        per_16 = math.ceil(20 * (1 + min(self._reliability.omega.bound, _MAX_OMEGA)))
        return (rows * per_16 + 15) // 16 + _SPARE * tables

    def _propose(
        self, num: int, ends: Tensor | None, generator: torch.Generator | None, rows: Rows | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Propose ``num`` leaves in proportion to m.

        Args:
            num: number of proposals, the first ones for the first table.
            ends: the proposal behind the last one for each table, int64 [tables].
            generator, rows: see :meth:`draw`.

        Returns:
            Leaves, R^ω, Ψ, and how many of the proposals so far are accepted; [num] each.
        """
        u, v = uniform(2, num, device=self._device, generator=generator)
        if rows is None or ends is None:
            leaf, mass = self._tree.draw(u)
            factor = self._factor(leaf, exact=self._exact)
            mean, step = factor.mean(0, keepdim=True, dtype=torch.float64), _STEP
        else:
            table = torch.searchsorted(ends, torch.arange(num, device=self._device), right=True)
            leaf, mass = propose(self._tree, u, gather_in_bounds(rows.low, table), gather_in_bounds(rows.total, table))
            factor = self._factor(leaf, exact=self._exact)
            sums = torch.zeros_like(self._acceptance[0]).index_add_(0, table, factor.to(torch.float64))
            mean, step = sums / _with_zero(ends).diff(), _STEP * (_with_zero(rows.ends).diff() > 0).to(torch.float64)
        self._acceptance.lerp_(torch.stack([mean, self._ones]), step)
        return leaf, factor, factor * mass, (v < factor).cumsum(0)

    def _repeat(self, row: Tensor, factor: Tensor, accepted: Tensor, ends: Tensor | None, rows: Rows | None) -> Tensor:
        """The proposal that each row takes where too few may be accepted, see :meth:`draw`."""
        if rows is None or ends is None:
            first, edges, table = torch.zeros_like(row[:1]), row.new_tensor([0, len(factor)]), torch.zeros_like(row)
        else:
            first, edges, table = _with_zero(rows.ends), _with_zero(ends), rows.table
        share = _with_zero(factor.cumsum(0))
        ahead, low = gather_in_bounds(_with_zero(accepted), edges), gather_in_bounds(share, edges)
        found, width = gather_in_bounds(ahead.diff(), table), gather_in_bounds(low.diff(), table)
        number = (row - gather_in_bounds(first, table)) % found.clamp_min(1) + 1
        place = torch.searchsorted(accepted, gather_in_bounds(ahead, table) + number)
        target = gather_in_bounds(low, table) + uniform(len(row), device=self._device) * width
        by_factor = torch.searchsorted(share, target, right=True) - 1
        return where_int64(found > 0, place, by_factor)

    def _from_all(self, batch_size: int, generator: torch.Generator | None, rows: Rows | None) -> tuple[Tensor, Tensor]:
        """:meth:`draw` by one pass over all Ψ."""
        leaves = self._tree.leaves.nonzero().squeeze(1)
        density = self._tree.leaves[leaves] * self._factor(leaves)
        running = _with_zero(density.cumsum(0))
        table = torch.zeros(batch_size, dtype=torch.int64, device=self._device) if rows is None else rows.table
        begins = torch.searchsorted(leaves, self._begins)
        low, high = running[begins[table]], running[begins[table + 1]]
        u = uniform(batch_size, device=self._device, generator=generator)
        place = torch.searchsorted(running, low + u * (high - low), right=True) - 1
        # the sum may have been rounded up
        place = torch.minimum(place, begins[table + 1] - 1)
        return leaves[place], density[place]

    def acceptance(self) -> Tensor:
        """The mean of R^ω over the latest proposals for each table, [tables]; 1 before the first."""
        mean, weight = self._acceptance.unbind()
        return torch.where(weight > 0, mean / torch.where(weight > 0, weight, 1.0), 1.0)

    def clear(self) -> None:
        """Forget the means."""
        self._acceptance.zero_()
        self._repeated.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {"acceptance": self._acceptance, "repeated": self._repeated}

    def stats(self, eta: Tensor | float = 1.0) -> dict[str, Tensor]:
        """Numbers worth logging; ``eta``: η of each table, [tables]."""
        return {"acceptance_rate": (self.acceptance() * eta).sum(), "repeated_draws": self._repeated}


def propose(tree: SumTree, u: Tensor, low: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves drawn by ``u`` [n], and their masses, in ranges that begin at ``low`` [n] and are ``total`` [n] long."""
    target = torch.minimum((u * total).to(torch.int64), total - 1)
    return tree.find((low + target).clamp_min(0))


def _with_zero(sums: Tensor) -> Tensor:
    """A 0 and ``sums`` [n], [n + 1]."""
    return torch.cat([torch.zeros_like(sums[:1]), sums])
