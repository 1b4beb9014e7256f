"""What samplers add for draws from several buffers, called shards; see ShardedReplayBuffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from torchrl_replay_ext.core.slots import Slots

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.base import Draw


# Entry of a sample with the generation of each row, which is the number of the write that filled the slot.
STAMP_KEY = "write_stamp"


class Sums(NamedTuple):
    """The sums over one shard, by which batches are divided among shards. Samplers without tables have one table.

    All numbers are plain, because small tensors are slow to send.

    Args:
        mass: sum of the densities of each table. Default: one table without transitions.
        smallest: the smallest positive density, or inf if there is none. Default: None, weights are divided by the
            largest weight of the batch.
        count: number of transitions of each event table. Default: None, there are no event tables.
        largest_episode: the largest sum of priorities of an episode, in units of mass. Default: 0.
    """

    mass: Sequence[float] = (0.0,)
    smallest: float | None = None
    count: Sequence[int] | None = None
    largest_episode: int = 0


class ShardRows(NamedTuple):
    """The rows of a batch that are drawn in one shard.

    Args:
        rows: number of rows of each table, int64 [tables].
        probability: probability that a row of each table lies in this shard, float64 [tables].
        eta: proportions of the tables, float64 [tables].
        count: number of transitions of each event table in all shards, int64 [tables]; None without event tables.
    """

    rows: np.ndarray
    probability: np.ndarray
    eta: np.ndarray
    count: np.ndarray | None


class ShardDraws:
    """What samplers add for draws from several shards, in eager code on the CPU."""

    slots: Slots
    max_supported_priority: Any
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
            The slots. ``density`` is the probability of each slot in the whole batch, or None if all are equally
            likely.
        """
        drawn: Draw = self.draw(int(wanted.rows[0]), self._rng)
        if drawn.density is None:
            return drawn
        return drawn._replace(density=np.asarray(drawn.density) * (wanted.probability[0] / sums.mass[0]))

    def count_batch(self) -> None:
        """Called once for each batch: advance the schedules that count batches. Default: there are none."""

    def note_other_shards(self, largest_priority: float, largest_episode: int) -> None:
        """Take over the largest priority and the largest sum of an episode of the other shards."""
        self.slots.largest.clamp_min_(min(largest_priority, self.max_supported_priority))
