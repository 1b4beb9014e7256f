"""What samplers add for draws from several buffers, called shards; see ShardedReplayBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.base import Draw


# Entry of a sample with the generation of each row, which is the number of the write that filled the slot.
STAMP_KEY = "write_stamp"


class Sums(NamedTuple):
    """The sums over one shard, by which batches are divided among shards. Samplers without tables have one table.

    All numbers are plain, here and in :class:`ShardRows`, because arrays and tensors are slow to send.

    Args:
        mass: sum of the densities of each table.
        count: number of transitions of each event table. Default: there are none.
        largest_episode: the largest sum of priorities of an episode, in units of mass. Default: 0.
    """

    mass: Sequence[float]
    count: Sequence[int] = ()
    largest_episode: int = 0


class ShardRows(NamedTuple):
    """The rows of a batch that are drawn in one shard.

    Args:
        rows: number of rows of each table.
        probability: probability that a row of each table lies in this shard.
        eta: proportions of the tables.
        count: number of transitions of each event table in all shards.
        largest_priority: that of new transitions in all shards.
        largest_episode: the largest :attr:`Sums.largest_episode` of all shards.
        schedules: the states of annealed hyperparameters and η, by name.
    """

    rows: Sequence[int]
    probability: Sequence[float]
    eta: Sequence[float]
    count: Sequence[int]
    largest_priority: float
    largest_episode: int
    schedules: dict[str, list[Any]]


class ShardDraws:
    """What samplers add for draws from several shards, in eager code on the CPU."""

    draw: Any
    _rng: torch.Generator | None

    def shard_sums(self) -> Sums | None:
        """The sums of this shard. Default: None, because draws need all transitions in one place."""
        return None

    def draw_of_shard(self, wanted: ShardRows, sums: Sums) -> Draw:
        """Draw the rows of a batch that lie in this shard.

        Args:
            wanted: the rows.
            sums: the present :meth:`shard_sums`; those of one table are > 0.

        Returns:
            The slots. ``density`` and ``smallest`` are probabilities in the whole batch, or None if all slots are
            equally likely.
        """
        drawn: Draw = self.draw(wanted.rows[0], self._rng)
        if drawn.density is None:
            return drawn
        scale = wanted.probability[0] / sums.mass[0]
        smallest: Any = None if drawn.smallest is None else drawn.smallest[0] * scale
        return drawn._replace(density=np.asarray(drawn.density) * scale, smallest=smallest)

    def count_batch(self) -> None:
        """Called once for each batch: advance the schedules that count batches. Default: there are none."""
