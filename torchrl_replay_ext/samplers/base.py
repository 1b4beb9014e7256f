"""The interface of distributions over the slots of a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.sum_tree import PowerMasses
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.core.write_observer import WriteObserver
from torchrl_replay_ext.kernels.ops import as_tensor
from torchrl_replay_ext.samplers.rows import RowView

__all__ = ["Distribution", "Draw", "RowView", "ShardRows", "Sums", "WriteObserver"]


class Draw(NamedTuple):
    """A batch of slots.

    The rows must be in random order: a row's position must not depend on its slot, because a part of a batch must be a
    sample like the whole. Distributions that draw from strata assign the rows to them in random order.

    Importance-sampling weights are (density / smallest)^−β.

    Args:
        slots: int64 [B], contiguous, also as a NumPy array.
        density: float64 or int64 [B], likewise; proportional to the probability of each slot; 0 if nothing can be
            drawn. Default: None, no weights are computed; those of ``extras`` stay.
        smallest: the smallest positive density of all stored slots, or a tensor that begins with it, [1 or more] in the
            dtype of ``density``. Default: None, weights are divided by the largest weight of the batch.
        extras: further entries of the batch, [B] each. Default: None.
    """

    slots: Array
    density: Array | None = None
    smallest: Tensor | None = None
    extras: dict[str, Tensor] | None = None


class Sums(NamedTuple):
    """The sums over one of several buffers, called shards, by which batches are divided among them.

    Distributions without tables have one table.

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


class Distribution(WriteObserver, ABC):
    """A probability distribution over slots. Only ``insert`` reads stored rows.

    A subclass sets ``self._log`` to its ``log`` and defines :meth:`draw` and :meth:`density`; if draws depend on TD
    errors, :meth:`update`; and for state of its own ``insert``, ``remove``, ``clear`` and ``tensors``, see
    :class:`~torchrl_replay_ext.core.write_observer.WriteObserver`. A short one is
    :class:`~torchrl_replay_ext.samplers.recency.Recency`.

    In graphs (``log.layout.for_graphs``), no method may branch on the values of tensors, because a graph has none;
    ``insert`` may if ``writes_in_graphs`` is False. On accelerators, methods should not read values either: the host
    must wait for the device.
    """

    # True if the writer fills the slots in the order of the ring; False for pinned event tables, which choose the slots
    slots_in_ring_order = True
    # True if writes in a graph have the same result as outside of it
    writes_in_graphs = True
    # True if draws depend on TD errors
    takes_priorities = True
    # entries of tensors() that do not depend on the stored transitions
    settings: tuple[str, ...] = ()
    # masses d^α that the kernels of writes and updates set, so that no method has to; None: there are none
    power_masses: PowerMasses | None = None
    # further state that is updated at each write, before this one
    parts: Sequence[WriteObserver] = ()
    _log: WriteLog

    @property
    def max_supported_priority(self) -> float:
        """The largest d that can be represented. Default: the largest float32 number."""
        return torch.finfo(torch.float32).max

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Update what depends on priorities. Not called if :attr:`takes_priorities` is False. Default: do nothing.

        Args:
            slots: int64 [n], each slot once; rows of slot -1 are skipped (in eager code on the CPU there are none).
            priority: d of each slot, float32 [n].
        """

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slots with replacement.

        Raises:
            RuntimeError: if nothing can be drawn. Where values cannot be read, all rows are then slot 0 with density 0.
        """

    # --- draws from several shards, in eager code on the CPU

    def sums(self) -> Sums:
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

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        """Draw the rows of a batch that lie in this shard.

        Returns:
            The slots. ``density`` is the probability of each slot in the whole batch, or None if all are equally
            likely.
        """
        slots, density, _, extras = self.draw(int(wanted.rows[0]), generator)
        if density is not None:
            density = as_tensor(density) * (wanted.probability[0] / self.sums().mass[0])
        return Draw(slots, density, extras=extras)

    def count_batch(self) -> None:
        """Called once for each batch: advance the schedules that count batches."""

    def note_other_shards(self, largest_episode: int) -> None:
        """Called with the largest :attr:`Sums.largest_episode` of the other shards."""

    @abstractmethod
    def density(self, slots: Tensor) -> Tensor:
        """A number proportional to the probability of each of ``slots`` [n], float64 [n]."""

    def reweight(self, slots: Tensor | None) -> None:
        """Recompute the density of ``slots`` [n], or of all slots if None, after an exponent has changed.

        Default: do nothing, for distributions without exponents.
        """

    def stored_slots(self) -> Tensor:
        """The slots that can be drawn, int64 [n]. Default: all that hold a transition."""
        return self._log.stored_slots()

    def stats(self) -> dict[str, Tensor]:
        """Statistics for logging, scalars."""
        return {}

    def sync(self) -> None:
        """Update state that is shared with a writer. Called outside of graphs before each use, except for writes."""
