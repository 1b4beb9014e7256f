"""Exact draws from R^ω d^α inside each of several tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import EagerFallback, gather_in_bounds, is_traced, uniform, where_int64
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.distributions.reliability import Reliability

# Proposals per row, and rounds until every Ψ is computed.
_TRIES = 4
_MAX_ROUNDS = 8


class TableRejection:
    """Proposals are drawn by d^α inside a table and accepted with probability R^ω.

    Args:
        tree: the masses d^α of all entries, table after table.
        begins: where each table's entries begin in the tree, and the end, int64 [tables + 1].
        tables: the tables.
        reliability: the model of R.
        for_graphs: whether draws become part of graphs.
    """

    def __init__(
        self, tree: SumTree, begins: Tensor, tables: EventTables, reliability: Reliability, *, for_graphs: bool
    ):
        self._tree, self._begins, self._tables, self._reliability = tree, begins, tables, reliability
        self._device = begins.device
        # running mean of R^ω of the proposals for each table, and the sum of its weights
        self._acceptance = torch.zeros(2, len(tables), dtype=torch.float64, device=self._device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=self._device)
        self._for_graphs = for_graphs
        self._fallback: EagerFallback | None = None
        self._make_fallback()

    def _make_fallback(self) -> None:
        if self._for_graphs:
            state = [*self._tree.graph_tensors(), *self._reliability.graph_tensors()]
            self._fallback = EagerFallback(self._draw_anew, state)

    def _draw_anew(self, drawn: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        table, low, total = inputs
        return list(self.draw(table, low, total, None))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_fallback": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._make_fallback()

    def factor(self, slots: Tensor) -> Tensor:
        """R^ω of ``slots`` [n]."""
        return self._reliability.factor(slots)

    def draw(
        self, table: Tensor, low: Tensor, total: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Positions drawn from Ψ inside the table of each row, and Ψ of each.

        The rows of a table get its accepted proposals in their order. If there are fewer, more are drawn; a graph on
        the CPU has eager code draw the rows anew. A graph on another device would have to read from it for that: there,
        accepted proposals are given out again from the first on, and proposals are taken as they are if none is
        accepted.
        """
        batch_size = table.shape[0]
        rows = torch.arange(batch_size, device=self._device)
        numbers = torch.arange(len(total), device=self._device)
        first_row = torch.searchsorted(table, numbers)
        rows_of_table = torch.searchsorted(table, numbers, right=True) - first_row
        tries = _TRIES
        for _ in range(_MAX_ROUNDS):
            of_proposal = table.repeat_interleave(tries, output_size=tries * batch_size)
            u, v = uniform(2, tries * batch_size, device=self._device, generator=generator)
            position, mass = propose(
                self._tree, u, gather_in_bounds(low, of_proposal), gather_in_bounds(total, of_proposal)
            )
            factor = self.factor(gather_in_bounds(self._tables.slot_at, position).to(torch.int64))
            running = (v < factor).cumsum(0)
            # accepted ahead of each table's proposals, and among them
            ends = gather_in_bounds(running, (tries * (first_row + rows_of_table) - 1).clamp_min(0))
            ends = ends * (first_row + rows_of_table > 0)
            ahead = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
            found = ends - ahead
            missing = (rows_of_table - found).clamp_min(0).sum()
            if is_traced() or not missing.item():
                break
            tries *= 2
        else:
            return self._from_all(table, generator)
        sums = torch.zeros_like(self._acceptance[0]).index_add_(0, of_proposal, factor.to(torch.float64))
        mean = sums / (tries * rows_of_table).clamp_min(1)
        latest = torch.stack([mean, torch.ones_like(mean)])
        self._acceptance.copy_(torch.where(rows_of_table > 0, 0.9 * self._acceptance + 0.1 * latest, self._acceptance))
        in_table = rows - gather_in_bounds(first_row, table)
        wanted = in_table % gather_in_bounds(found, table).clamp_min(1)
        place = torch.searchsorted(running, gather_in_bounds(ahead, table) + wanted + 1)
        # where none is accepted, proposals are taken as they are
        place = where_int64(gather_in_bounds(found, table) > 0, place, tries * rows)
        drawn = [gather_in_bounds(position, place), gather_in_bounds(mass * factor, place)]
        if is_traced() and self._device.type == "cpu":
            assert self._fallback is not None
            drawn = self._fallback.replace((missing > 0) & (total.sum() > 0), drawn, [table, low, total])
        else:
            self._repeated.add_(missing)
        return drawn[0], drawn[1]

    def accepted_share(self) -> Tensor:
        """The mean of R^ω over each table's proposals; 1 before the first."""
        mean, weight = self._acceptance.unbind()
        return torch.where(weight > 0, mean / torch.where(weight > 0, weight, 1.0), 1.0)

    def _from_all(self, table: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """:meth:`draw` from all Ψ, where hardly a proposal is accepted."""
        nowhere = int(self._begins[-1])
        density = self._tree.leaves[:nowhere].to(torch.float64)
        listed = density.nonzero().squeeze(1)
        density[listed] *= self.factor(self._tables.slot_at[listed].to(torch.int64))
        running = torch.cat([density.new_zeros(1), density.cumsum(0)])
        low, high = running[self._begins[:-1][table]], running[self._begins[1:][table]]
        u = uniform(len(table), device=self._device, generator=generator)
        position = torch.searchsorted(running, low + u * (high - low), right=True).clamp_max(nowhere) - 1
        return position, density[position]

    def clear(self) -> None:
        """Forget the means."""
        self._acceptance.zero_()
        self._repeated.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {"acceptance": self._acceptance, "repeated": self._repeated}

    def stats(self, eta: Tensor) -> dict[str, Tensor]:
        """Numbers worth logging; ``eta``: η of each table, [tables]."""
        return {"acceptance_rate": (self.accepted_share() * eta).sum(), "repeated_draws": self._repeated}


def propose(tree: SumTree, u: Tensor, low: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves drawn by ``u`` [n], and their masses, in ranges that begin at ``low`` [n] and are ``total`` [n] long."""
    target = torch.minimum((u * total).to(torch.int64), total - 1)
    return tree.find((low + target).clamp_min(0))
