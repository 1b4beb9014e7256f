"""The tables that the rows of a batch are drawn from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.core.sum_tree import SumTree


class TableRows(NamedTuple):
    """The tables that the rows of a batch are drawn from.

    Args:
        table: table of each row, int64 [B].
        low: sum of the masses of all earlier tables, for each table, int64 [tables].
        total: sum of the masses of each table, int64 [tables].
    """

    table: Tensor
    low: Tensor
    total: Tensor


def propose(tree: SumTree, u: Tensor, low: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Leaves (and masses) that uniform ``u`` [n] select in mass ranges from ``low`` [n] of length ``total`` [n].

    Leaf 0 where ``total`` is 0.
    """
    target = torch.minimum((u * total).to(torch.int64), total - 1)
    return tree.find(low + target)
