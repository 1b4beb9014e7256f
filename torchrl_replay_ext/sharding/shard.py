"""One shard of a sharded replay buffer: a buffer in a process of its own."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import RandomSampler, Sampler

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer
from torchrl_replay_ext.samplers.base import ReplaySampler
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, ShardRows
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler
from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, SHARD_KEY, Arrays, describe, from_arrays, take, to_arrays

# A write stamp is the number of a write, plus the number of the shard's process times this.
PROCESS = 2**34


class Report(NamedTuple):
    """The state of a shard after a call. All numbers are plain, because small tensors are slow to send.

    Args:
        process: random number of the process; 0: it has not answered yet. Default: 0.
        length: number of stored transitions.
        written: number of transitions ever written.
        mass, count, largest_episode: see :class:`~torchrl_replay_ext.samplers.shard_draws.Sums`.
        largest_priority: the priority of new transitions; 0 without priorities.
    """

    process: int = 0
    length: int = 0
    written: int = 0
    mass: Sequence[float] = (0.0,)
    count: Sequence[int] | None = None
    largest_episode: int = 0
    largest_priority: float = 0.0


def drawing_sampler(sampler: Sampler) -> ReplaySampler | None:
    """The sampler that draws and has the priorities: for slices, that of the anchors; None for RandomSampler.

    Raises:
        TypeError: if the sampler cannot be used in shards.
    """
    if isinstance(sampler, TrajectoryRetraceSampler):
        return sampler.starts_sampler
    if isinstance(sampler, ReplaySampler) or type(sampler) is RandomSampler:
        return sampler if isinstance(sampler, ReplaySampler) else None
    raise TypeError(
        f"{OWNER}(sampler={type(sampler).__name__}): pass RandomSampler, or a sampler of this package "
        "other than DecoupledSampler, which needs the policy."
    )


def rows_per_draw(sampler: Sampler) -> int:
    """Rows that one draw of a sampler adds to a batch: the length of a slice, otherwise 1."""
    return sampler.slice_len if isinstance(sampler, TrajectoryRetraceSampler) else 1


class ReplayShard:
    """A replay buffer in an actor, with the calls of coordinator and writers.

    If the process ends, Ray starts another one with an empty shard, which reports another number of the process.

    Args:
        number: number of the shard.
        seed: seed of the draws; None: not seeded.
        is_alone: True if there is no other shard: it then draws batches as the buffer itself does.
        **arguments: of :class:`~torchrl_replay_ext.CompilableReplayBuffer`.
    """

    def __init__(self, number: int, *, seed: int | None, is_alone: bool, **arguments: Any):
        torch.set_num_threads(1)
        self._buffer = CompilableReplayBuffer(**arguments)
        if seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(seed))
        self._storage: Any = self._buffer.storage
        self._sampler: Any = self._buffer.sampler
        self._drawing = drawing_sampler(self._sampler)
        # without sums of masses, rows are drawn by the sampler itself
        self._has_sums = self._drawing is not None and not is_alone
        self._number = number
        self._process, self._dropped = 1 + secrets.randbelow(2**27 - 1), 0
        # number of updates that the schedules of hyperparameters have counted
        self._updates = 0

    # --- calls of the coordinator

    def answer(self, method: str, *arguments: Any) -> tuple[Report, Any]:
        """Call a method of this object or of the buffer; return the report after it, and its result."""
        result = getattr(self if hasattr(self, method) else self._buffer, method)(*arguments)
        return self.report(), result

    def report(self) -> Report:
        """The state of the shard."""
        length, drawing = len(self._buffer), self._drawing
        report = Report(self._process, length, self._buffer.write_count, [float(length)])
        if drawing is not None:
            report = report._replace(largest_priority=drawing.slots.largest.item())
        if drawing is None or not self._has_sums or not length:
            return report
        sums = drawing.sums(self._storage)
        count = None if sums.count is None else sums.count.tolist()
        return report._replace(mass=sums.mass.tolist(), count=count, largest_episode=sums.largest_episode)

    def exchange(self, packed: bytes) -> tuple[Arrays, float | None]:
        """Apply TD errors, or draw.

        Args:
            packed: a pickled tuple, because Ray takes 20 us for each array: the rows of an update, or None; the
                :class:`ShardRows` to draw, or None; the largest priority and the largest episode of the other shards;
                the number of updates of the whole buffer.

        Returns:
            The rows, and the smallest probability of a row in the whole batch; None if weights do not need it.
        """
        updates, wanted, largest_priority, largest_episode, num_updates = pickle.loads(packed)
        if (drawing := self._drawing) is not None:
            if updates is not None:
                self._update(updates)
            # schedules advance alike in all shards
            if any(hyperparameter.annealed for hyperparameter in drawing.hyperparameters.values()):
                for _ in range(self._updates, num_updates):
                    drawing.step()
            self._updates = max(self._updates, num_updates)
            drawing.note_other_shards(largest_priority, largest_episode)
        return ({}, None) if wanted is None else self._draw(wanted)

    def _update(self, updates: Arrays) -> None:
        ours = updates[STAMP_KEY] // PROCESS == self._process
        self._dropped += int((~ours).sum())
        if ours.any():
            rows = from_arrays(take(updates, ours))
            rows[STAMP_KEY] %= PROCESS
            self._buffer.update_tensordict_priority(rows)
            self._updates += 1

    def _draw(self, wanted: ShardRows) -> tuple[Arrays, float | None]:
        number, smallest = int(wanted.rows.sum()), None
        if self._drawing is not None and self._has_sums:
            sums = self._drawing.sums(self._storage)
            if not sums.mass.any():
                return {}, None
            if sums.smallest is not None:
                smallest = float(sums.smallest * wanted.probability[0] / sums.mass[0])
        if not number or not len(self._buffer):
            return {}, smallest
        if self._has_sums:
            index, info = self._sampler.sample_in_shard(self._storage, wanted)
        else:
            index, info = self._sampler.sample(self._storage, number * rows_per_draw(self._sampler))
        rows = self._storage.take(index)
        if "density" in info:
            info[DENSITY] = info.pop("density")
        if (stamp := info.get(STAMP_KEY)) is not None:
            info[STAMP_KEY] = stamp + self._process * PROCESS
        for key, column in info.items():
            rows.set(key, column)
        return to_arrays(rows.set("index", index)) | {SHARD_KEY: np.full(len(index), self._number)}, smallest

    def restore(self, source: dict[str, Any] | str, num_updates: int) -> None:
        """Replace the content by a checkpoint.

        Args:
            source: a :meth:`state_dict`, or a file of :meth:`dumps`.
            num_updates: the number of updates that its schedules have counted.
        """
        state = source if isinstance(source, dict) else torch.load(source, map_location="cpu", weights_only=True)
        self._buffer.load_state_dict(state)
        self._updates = num_updates

    def dumps(self, path: str) -> None:
        """Save the state of the buffer as the file ``path``."""
        # not the buffer's dumps(), which writes memory-mapped files: on a full disk, that kills the process
        torch.save(self._buffer.state_dict(), path)

    def stats(self) -> dict[str, float]:
        """Statistics of the sampler."""
        stats = {} if self._drawing is None else {key: value.item() for key, value in self._sampler.stats().items()}
        if "dropped_updates" in stats:
            stats["dropped_updates"] += self._dropped
        return stats

    # --- calls of writers

    def columns(self) -> dict[NestedKey, tuple[tuple[int, ...], str]] | None:
        """The description of stored rows; None before the first write."""
        stored = _torchrl.stored_data(self._storage)
        return None if stored is None else describe(to_arrays(stored[:1].exclude("index")))

    def write(self, rows: Arrays) -> None:
        """Write rows."""
        self._buffer.extend(from_arrays(rows))
