"""Joint draws from the event tables of several shards."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import uniform
from torchrl_replay_ext.core.event_tables import TableView
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.distributions.protocol import Draw, ShardRows, Sums
from torchrl_replay_ext.distributions.table_rows import propose
from torchrl_replay_ext.distributions.table_shares import TableShares
from torchrl_replay_ext.functional.allocation import Allocation, table_ends

# reasons why some settings need all transitions in one buffer
_PAIRS = "this correction counts outcomes, which may lie in several shards; use correction=None or 'mixture'."
_CLASSES = (
    "correction='mixture' with retention='pinned' counts combinations of tables, which needs all of them; use "
    "retention='ring'."
)


def why_not_joint(correction: str | None, retention: str) -> str | None:
    """Why joint draws are not possible with these settings of EventTableSampler; None: they are."""
    if correction not in (None, "mixture"):
        return _PAIRS
    return _CLASSES if correction == "mixture" and retention == "pinned" else None


class JointTables:
    """Draws the rows of joint draws from the event tables of one shard.

    A table of the whole buffer is the union of the tables of the same name of all shards. Its minimum size refers to
    this union.

    Args:
        tree: the masses of all entries of all tables.
        view: the event tables.
        shares: η of each table.
        min_sizes: minimum number of entries of each table, int64 [tables]; -1 stands for the batch size.
        allocation: how rows are divided among tables.
        corrects_for: the quantity that weights correct for: ``"mixture"``: p(i); ``"priority"``: the priorities inside
            the table of the row; None: nothing.
    """

    def __init__(
        self,
        tree: SumTree,
        view: TableView,
        shares: TableShares,
        min_sizes: Tensor,
        allocation: Allocation,
        corrects_for: str | None,
    ):
        self._tree, self._view, self._shares = tree, view, shares
        self._min_sizes, self._allocation, self._corrects_for = min_sizes, allocation, corrects_for

    def _masses(self) -> Tensor:
        return self._tree.prefix(self._view.begins).diff().double()

    def sums(self) -> Sums:
        """The sums of this shard."""
        return Sums(self._masses(), None, self._view.counts.clone(), self._shares.current.clone())

    def plan(
        self, everywhere: Sums, num_rows: int, batch_size: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`Distribution.plan`."""
        assert everywhere.count is not None and everywhere.eta is not None
        needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
        eta = self._shares.among((everywhere.count >= needed) & (everywhere.mass > 0), everywhere.eta)
        first = uniform(num_rows if self._allocation == "multinomial" else 1, device=eta.device, generator=generator)
        ends = table_ends(eta, num_rows, self._allocation, first)
        table = torch.searchsorted(ends, torch.arange(num_rows), right=True)
        return table, uniform(num_rows, device=eta.device, generator=generator), eta

    def draw_in_shard(self, wanted: ShardRows) -> Draw:
        """See :meth:`Distribution.draw_in_shard`."""
        assert wanted.table is not None and wanted.count is not None
        ends = self._tree.prefix(self._view.begins)
        totals = ends.diff()
        kept = totals[wanted.table] > 0
        table, u = wanted.table[kept], wanted.u[kept]
        total = totals[table]
        position, mass = propose(self._tree, u, ends[table], total)
        slots = self._view.slot_at[position].to(torch.int64)
        # q_k(i) = probability · mass / total in the whole buffer
        scale = wanted.probability / totals.clamp_min(1)
        positions = self._view.positions(slots)
        masses = self._tree.get(positions.reshape(-1)).view(positions.shape)
        probability = (masses * (wanted.eta * scale).unsqueeze(1)).sum(0)
        extras = {"table": table, "sample_probability": probability.float()}
        density = None
        if self._corrects_for == "mixture":
            density = probability
        elif self._corrects_for == "priority":
            density = wanted.count[table] * mass * scale[table]
        else:
            extras["priority_weight"] = torch.ones(len(slots), dtype=torch.float32)
        return Draw(slots, density, extras=extras)
