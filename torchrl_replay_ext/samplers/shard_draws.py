"""Draws of a batch from several buffers, called shards; see ShardedReplayBuffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext.core.slots import Slots
from torchrl_replay_ext.kernels.ops import as_tensor

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.base import Draw


# Entry of a sample with the generation of each row, which is the number of the write that filled the slot.
STAMP_KEY = "write_stamp"


class Sums(NamedTuple):
    """The sums over one of several buffers, called shards, by which batches are divided among them.

    Samplers without tables have one table.

    Args:
        mass: sum of the densities of each table, float64 [tables].
        smallest: the smallest positive density, or inf if there is none, float64 []. Default: None, weights are divided
            by the largest weight of the batch.
        count: number of transitions of each event table, int64 [tables]. Default: None, there are no event tables.
        largest_episode: the largest sum of priorities of an episode, in units of mass. Default: 0.
    """

    mass: Tensor
    smallest: Tensor | None = None
    count: Tensor | None = None
    largest_episode: int = 0


class ShardRows(NamedTuple):
    """The rows of a batch that are drawn in one shard.

    Args:
        rows: number of rows of each table, int64 [tables].
        probability: probability that a row of each table lies in this shard, float64 [tables].
        eta: proportions of the tables, float64 [tables].
        count: number of transitions of each event table in all shards, int64 [tables]; None without event tables.
    """

    rows: Tensor
    probability: Tensor
    eta: Tensor
    count: Tensor | None


class ShardDraws:
    """What samplers add for draws from several shards, in eager code on the CPU.

    Methods of prioritized replay override the methods without a storage.
    """

    slots: Slots
    max_supported_priority: Any
    synchronize: Any
    draw: Any
    _rng: torch.Generator | None

    def shard_sums(self) -> Sums:
        """The sums of this shard. ValueError if its rows cannot be drawn without knowing all shards (the default)."""
        raise ValueError(
            "draws from several shards need sums of masses, which this sampler does not have; use RandomSampler, "
            "ProportionalSampler, ReaPERSampler or EventTableSampler."
        )

    def rows_of_tables(
        self, everywhere: Sums, batch_size: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The number of rows of each table in a batch from all shards, int64 [tables], and η, float64 [tables].

        Args:
            everywhere: the sums of all shards together.
            batch_size: number of rows.
            generator: source of randomness; None: the global generator.
        """
        return torch.tensor([batch_size], device="cpu"), torch.ones(1, dtype=torch.float64, device="cpu")

    def draw_of_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        """Draw the rows of a batch that lie in this shard.

        Returns:
            The slots. ``density`` is the probability of each slot in the whole batch, or None if all are equally
            likely.
        """
        drawn: Draw = self.draw(int(wanted.rows[0]), generator)
        if drawn.density is None:
            return drawn
        return drawn._replace(density=as_tensor(drawn.density) * (wanted.probability[0] / self.shard_sums().mass[0]))

    def count_batch(self) -> None:
        """Called once for each batch: advance the schedules that count batches."""

    def note_largest_episode(self, total: int) -> None:
        """Called with the largest :attr:`Sums.largest_episode` of the other shards."""

    # --- called by the shard

    def sums(self, storage: Storage) -> Sums:
        """The sums of this shard, after the writes so far."""
        self.synchronize(storage)
        return self.shard_sums()

    def note_other_shards(self, largest_priority: float, largest_episode: int) -> None:
        """Take over the largest priority and the largest sum of an episode of the other shards."""
        self.slots.largest.clamp_min_(min(largest_priority, self.max_supported_priority))
        self.note_largest_episode(largest_episode)

    @property
    def largest_td_error(self) -> float:
        """The largest TD error that an update may contain."""
        limit = max(self.max_supported_priority - self.slots.eps, 0.0)
        return limit**2 if self.slots.td_error == "squared" else limit

    @torch.no_grad()
    def sample_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[Tensor, dict[str, Any]]:
        """Draw the rows of a batch that lie in this shard.

        Returns:
            The index, [n], and a dict with further columns: write stamps, and ``"density"``, float64 [n], the
            probability of each row in the whole batch, unless all rows are equally likely.
        """
        slots, info = self.draw_in_shard(storage, wanted)
        return slots, {STAMP_KEY: self.slots.generation_of(slots), **info}

    def draw_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[Tensor, dict[str, Any]]:
        """:meth:`sample_in_shard` without stamps."""
        self.synchronize(storage)
        slots, density, _, extras = self.draw_of_shard(wanted, self._rng)
        return as_tensor(slots), {**({} if density is None else {"density": density}), **(extras or {})}
