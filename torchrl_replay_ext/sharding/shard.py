"""One shard of a sharded replay buffer: a buffer in a process of its own."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, Sampler

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer
from torchrl_replay_ext.core.event_spec import DEFAULT
from torchrl_replay_ext.samplers.adapter import STAMP_KEY, DistributionSampler
from torchrl_replay_ext.samplers.base import Distribution, ShardRows
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler
from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, SHARD_KEY, Arrays, describe, from_arrays, take, to_arrays
from torchrl_replay_ext.writers.event_table import EventTableWriter

# A write stamp is the number of a write, plus the number of the shard's process times this.
PROCESS = 2**34


def stored_slots(buffer: TensorDictReplayBuffer) -> Tensor:
    """The slots of all stored transitions, or with event tables of those in the default table; oldest first."""
    if isinstance(buffer.writer, EventTableWriter):
        return buffer.writer.tables[DEFAULT].index()
    length = len(buffer)
    return (buffer.write_count - length + torch.arange(length)) % buffer.storage.max_size


class Report(NamedTuple):
    """The state of a shard after a call. All numbers are plain, because small tensors are slow to send.

    Args:
        process: random number of the process; 0: it has not answered yet. Default: 0.
        length: number of stored transitions.
        written: number of transitions ever written.
        mass, smallest, count, eta, largest_episode: see :class:`~torchrl_replay_ext.samplers.base.Sums`.
        largest_priority: the priority of new transitions; 0 without priorities.
        beta: exponent of the weights; None without weights.
        schedules: state of the schedules of annealed hyperparameters; None if there are none.
    """

    process: int = 0
    length: int = 0
    written: int = 0
    mass: Sequence[float] = (0.0,)
    smallest: float | None = None
    count: Sequence[int] | None = None
    eta: Sequence[float] | None = None
    largest_episode: int = 0
    largest_priority: float = 0.0
    beta: float | None = None
    schedules: dict[str, list] | None = None


def drawing_sampler(sampler: Sampler) -> DistributionSampler | None:
    """The sampler that draws and has the priorities: for slices, that of the anchors; None for RandomSampler.

    Raises:
        TypeError: if the sampler cannot be used in shards.
    """
    if isinstance(sampler, TrajectoryRetraceSampler):
        return sampler.starts_sampler
    if isinstance(sampler, DistributionSampler) or type(sampler) is RandomSampler:
        return sampler if isinstance(sampler, DistributionSampler) else None
    raise TypeError(
        f"{OWNER}(sampler={type(sampler).__name__}): pass RandomSampler, or a sampler of this package "
        "other than DecoupledSampler, which needs the policy."
    )


def joint_distribution(sampler: Sampler) -> Distribution | None:
    """The distribution of joint draws; None if the sampler draws in each shard on its own, all rows equally likely."""
    drawing = drawing_sampler(sampler)
    return None if drawing is None or drawing.distribution.why_not_joint is not None else drawing.distribution


def rows_per_draw(sampler: Sampler) -> int:
    """Rows that one draw of a sampler adds to a batch: the length of a slice, otherwise 1."""
    return sampler.slice_len if isinstance(sampler, TrajectoryRetraceSampler) else 1


class ReplayShard:
    """A replay buffer in an actor, with the calls of coordinator and writers.

    If the process ends, Ray starts another one with an empty shard, which reports another number of the process.

    Args:
        number: number of the shard.
        seed: seed of the draws; None: not seeded.
        **arguments: of :class:`~torchrl_replay_ext.CompilableReplayBuffer`.
    """

    def __init__(self, number: int, *, seed: int | None, **arguments: Any):
        torch.set_num_threads(1)
        self._buffer = CompilableReplayBuffer(**arguments)
        if seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(seed))
        self._storage: Any = self._buffer.storage
        self._sampler: Any = self._buffer.sampler
        self._drawing = drawing_sampler(self._sampler)
        self._is_joint = joint_distribution(self._sampler) is not None
        self._number = number
        self._process, self._dropped = 1 + secrets.randbelow(2**27 - 1), 0

    # --- calls of the coordinator

    def answer(self, method: str, *arguments: Any) -> tuple[Report, Any]:
        """Call a method of this object or of the buffer; return the report after it, and its result."""
        result = getattr(self if hasattr(self, method) else self._buffer, method)(*arguments)
        return self.report(), result

    def report(self) -> Report:
        """The state of the shard."""
        length, drawing = len(self._buffer), self._drawing
        parts: dict[str, Any] = {"mass": [float(length)]}
        if length and self._is_joint:
            parts = self._sampler.sums(self._storage)._asdict()
        if drawing is not None:
            largest = drawing.state.priorities.largest.item()
            parts |= {"largest_priority": largest, "schedules": drawing.schedules()}
            parts["beta"] = drawing.hyperparameters["beta"].value if "beta" in drawing.hyperparameters else None
        for key, part in parts.items():
            parts[key] = part.tolist() if isinstance(part, torch.Tensor) else part
        return Report(self._process, length, self._buffer.write_count, **parts)

    def exchange(self, packed: bytes) -> Arrays:
        """Apply TD errors, then draw.

        Args:
            packed: a pickled tuple, because Ray takes 20 us for each array: the rows of an update, or None; the
                :class:`ShardRows` to draw, as arrays, or None; the largest priority and the largest episode of the
                other shards; True for the first draw of a batch.

        Returns:
            The rows.
        """
        updates, wanted, largest_priority, largest_episode, counts_batch = pickle.loads(packed)
        drawing = self._drawing
        if drawing is not None:
            if updates is not None:
                self._update(drawing, updates)
            drawing.note_other_shards(largest_priority, largest_episode)
        rows = {} if wanted is None or not len(self._buffer) else self._draw(wanted)
        if counts_batch and drawing is not None:
            drawing.distribution.count_batch()
        return rows

    def _update(self, drawing: DistributionSampler, updates: Arrays) -> None:
        ours = updates[STAMP_KEY] // PROCESS == self._process
        self._dropped += int((~ours).sum())
        if not ours.any():
            # schedules advance alike in all shards
            drawing.state.step()
            return
        rows = from_arrays(take(updates, ours))
        rows[STAMP_KEY] %= PROCESS
        self._buffer.update_tensordict_priority(rows)

    def _draw(self, wanted: ShardRows) -> Arrays:
        if self._is_joint:
            tensors: list[Any] = [None if part is None else torch.tensor(part) for part in wanted]
            index, info = self._sampler.sample_in_shard(self._storage, ShardRows(*tensors))
        else:
            index, info = self._sampler.sample(self._storage, len(wanted.u) * rows_per_draw(self._sampler))
        if not len(index):
            return {}
        rows = self._storage.take(index)
        if "density" in info:
            info[DENSITY] = info.pop("density")
        if (stamp := info.get(STAMP_KEY)) is not None:
            info[STAMP_KEY] = stamp + self._process * PROCESS
        for key, column in info.items():
            rows.set(key, column)
        return to_arrays(rows.set("index", index)) | {SHARD_KEY: np.full(len(index), self._number)}

    def restore(self, source: dict[str, Any] | str, keep: bool) -> None:
        """Replace the content by a checkpoint.

        Args:
            source: a :meth:`state_dict`, or a file of :meth:`dumps`.
            keep: True to write the present content behind that of the checkpoint.
        """
        state = source if isinstance(source, dict) else torch.load(source, map_location="cpu", weights_only=True)
        rows = self._buffer[stored_slots(self._buffer)].exclude("index") if keep and len(self._buffer) else None
        self._buffer.load_state_dict(state)
        if rows is not None:
            self._buffer.extend(rows)

    def load_schedules(self, schedules: dict[str, list]) -> None:
        """Continue the schedules of another shard."""
        if self._drawing is not None:
            self._drawing.load_schedules(schedules)

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

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the sampler's state contradict each other. O(N)."""
        if self._drawing is not None:
            self._drawing.check_valid()

    # --- calls of writers

    def columns(self) -> dict[NestedKey, tuple[tuple[int, ...], str]] | None:
        """The description of stored rows; None before the first write."""
        stored = _torchrl.stored_data(self._storage)
        return None if stored is None else describe(to_arrays(stored[:1].exclude("index")))

    def write(self, rows: Arrays) -> None:
        """Write rows."""
        self._buffer.extend(from_arrays(rows))
