"""Exact draws from Ψ = R^ω m by rejection, where m are the masses of a sum tree."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, random_seed
from torchrl_replay_ext.core.event_tables import TableView
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.distributions.reliability import Reliability
from torchrl_replay_ext.kernels.ops import Views, empty, reaper_draw


class Rejection:
    """Draws leaves of a sum tree from Ψ: each row proposes leaves that follow m until one is accepted.

    The probability to accept a proposal is R^ω.

    Args:
        tree: the masses m. Leaf i is slot i, or an entry of ``tables``.
        reliability: the model of R.
        tables: the event tables. None (default): all rows are drawn from the whole tree.
    """

    def __init__(self, tree: SumTree, reliability: Reliability, tables: TableView | None = None):
        self._tree, self._reliability, self._tables = tree, reliability, tables
        device = tree.leaves.device
        # per table: running mean of R^ω over its proposals, and the sum of the weights of this mean
        self._acceptance = torch.zeros(
            2, 0 if tables is None else len(tables.counts), dtype=torch.float64, device=device
        )
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self._constants = Views(zero[:0].clone(), zero)

    def draw(
        self, batch_size: int, generator: torch.Generator | None, rows: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> tuple[Array, Array]:
        """Draw leaves from Ψ, independently, each from the table of its row.

        One random number from ``generator`` determines all draws.

        Args:
            batch_size: number of rows, B.
            generator: source of randomness; None: the global generator. A compiled graph ignores it.
            rows: the table of each row, and the sums of the masses before each table and in it, int64. None (default):
                there are no tables.

        Returns:
            The leaves, int64 [B], and Ψ of each, float64 [B].
        """
        arrays, none, zero = self._tree.arrays(), *self._constants()
        if rows is None:
            self._tree.raise_if_empty(arrays[1])
            rows = none, zero, arrays[1][:1]
        leaf, density = empty(none, batch_size, torch.int64), empty(none, batch_size, torch.float64)
        reaper_draw(
            random_seed(self._acceptance.device, generator),
            *rows,
            self._reliability.exponent(),
            none if self._tables is None else self._tables.slot_at,
            *arrays,
            leaf,
            density,
            self._acceptance,
            *self._reliability.arrays(),
        )
        return leaf, density

    def acceptance(self) -> Tensor:
        """Running mean of R^ω over the proposals for each table, float64 [tables]; 1 before the first proposal."""
        mean, weight = self._acceptance.unbind()
        return torch.where(weight > 0, mean / weight, 1.0)

    def check_valid(self) -> None:
        """Raise AssertionError if a running mean is out of range."""
        mean, weight = self._acceptance.unbind()
        if not bool(((mean >= 0) & (mean <= weight) & (weight <= 1)).all()):
            raise AssertionError("the acceptance of a table is out of range")

    def clear(self) -> None:
        """Reset the running means."""
        self._acceptance.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The state to save."""
        return {} if self._tables is None else {"acceptance": self._acceptance}
