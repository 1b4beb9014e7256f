"""One shard of a sharded replay buffer: a buffer in a process of its own."""

from __future__ import annotations

import pickle
import secrets
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from torchrl.data.replay_buffers import RandomSampler, Sampler

from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.samplers.base import ReplaySampler
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, Sums
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler

# The class that error messages name.
OWNER = "ShardedReplayBuffer"
# Entries of samples that are not stored: the number of the shard, and the probability of the row in the whole batch.
SHARD_KEY, DENSITY = "shard", "_probability_of_draw"
# A write stamp is the number of a write, plus the number of the shard's process times this.
PROCESS = 2**34
# Batches are sent as arrays: Ray needs 2.3 ms of CPU time to pack and unpack a batch of tensors, 0.1 ms for arrays.
Arrays = dict[NestedKey, np.ndarray]


def to_arrays(data: TensorDictBase) -> Arrays:
    """The entries of a batch on the CPU. Raises TypeError for entries that are not tensors, and dtypes NumPy lacks."""
    columns: Arrays = {}
    for key, column in data.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(column, Tensor):
            raise TypeError(f"{OWNER}: the entry {key!r} must be a tensor, not {type(column).__name__}.")
        try:
            columns[key] = column.detach().cpu().numpy()
        except TypeError as error:
            raise TypeError(f"{OWNER}: the entry {key!r} has {column.dtype}, which NumPy lacks; convert it.") from error
    return columns


def from_arrays(columns: Arrays) -> TensorDict:
    """The inverse of :func:`to_arrays`. Arrays that Ray has received are copied: they are read-only."""
    data = {
        key: torch.from_numpy(column) if column.flags.writeable else torch.tensor(column)
        for key, column in columns.items()
    }
    return TensorDict(data, [num_rows(columns)], device="cpu")


def split(columns: Arrays, part: np.ndarray, num_parts: int) -> list[Arrays]:
    """Divide rows into ``num_parts`` batches; ``part``: the batch of each row, int64 [n]. The order of rows is kept."""
    order = np.argsort(part, kind="stable")
    ends = np.searchsorted(part[order], np.arange(num_parts + 1))
    sorted_columns = take(columns, order)
    return [take(sorted_columns, slice(begin, end)) for begin, end in pairwise(ends)]


def num_rows(columns: Arrays) -> int:
    """The number of rows."""
    return len(next(iter(columns.values()))) if columns else 0


def take(columns: Arrays, rows: np.ndarray | slice) -> Arrays:
    """Some rows, by index, mask or slice."""
    return {key: column[rows] for key, column in columns.items()}


class Report(NamedTuple):
    """The state of a shard after a call.

    Args:
        process: random number of the process; 0: it has ended, or has not answered yet. Default: 0.
        length: number of stored transitions.
        written: number of transitions ever written.
        largest_priority: the priority of new transitions; 0 without priorities.
        sums: see :class:`~torchrl_replay_ext.samplers.shard_draws.Sums`.
    """

    process: int = 0
    length: int = 0
    written: int = 0
    largest_priority: float = 0.0
    sums: Sums = Sums()


def drawing_sampler(sampler: Sampler) -> ReplaySampler | None:
    """The sampler that draws and has the priorities: for slices, that of the anchors; None for RandomSampler.

    Raises:
        TypeError: if the sampler cannot be used in shards.
    """
    drawing = sampler.starts_sampler if isinstance(sampler, TrajectoryRetraceSampler) else sampler
    if isinstance(drawing, ReplaySampler) or type(drawing) is RandomSampler:
        return drawing if isinstance(drawing, ReplaySampler) else None
    raise TypeError(
        f"{OWNER}(sampler={type(sampler).__name__}): pass RandomSampler, or a sampler of this package "
        "other than DecoupledSampler, which needs the policy."
    )


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
        self._number, self._process = number, 1 + secrets.randbelow(2**27 - 1)

    def answer(self, method: str, *arguments: Any) -> tuple[Report, Any]:
        """Call a method of this object or of the buffer; return the report after it, and its result."""
        result = getattr(self if hasattr(self, method) else self._buffer, method)(*arguments)
        return self.report(), result

    def report(self) -> Report:
        """The state of the shard."""
        length, sampler = len(self._buffer), self._drawing
        largest = 0.0 if sampler is None else sampler.slots.largest.item()
        sums = self._sums() or Sums([float(length)])
        return Report(self._process, length, self._buffer.write_count, largest, sums)

    def _sums(self) -> Sums | None:
        """The sums of the sampler; None if rows are drawn by the sampler itself."""
        if self._drawing is not None and len(self._buffer):
            self._drawing.synchronize(self._storage)
        return None if self._drawing is None else self._drawing.shard_sums()

    def write(self, rows: Arrays) -> int:
        """Write rows; return their number."""
        self._buffer.extend(from_arrays(rows))
        return num_rows(rows)

    def update(self, packed: bytes) -> None:
        """Apply TD errors; ``packed``: see :meth:`draw`."""
        rows = pickle.loads(packed)
        ours = rows[STAMP_KEY] // PROCESS == self._process
        if ours.any():
            updates = from_arrays(take(rows, ours))
            updates[STAMP_KEY] %= PROCESS
            self._buffer.update_tensordict_priority(updates)

    @torch.no_grad()
    def draw(self, packed: bytes) -> tuple[Arrays, float | None]:
        """Draw the rows of a batch that lie in this shard.

        Args:
            packed: a pickled tuple, because Ray takes 20 us for each array: the :class:`ShardRows`, the states of
                the annealed hyperparameters, and the largest priority and episode of the other shards.

        Returns:
            The rows, and the smallest probability of a row in the whole batch; None if weights do not need it.
        """
        wanted, settings, *largest = pickle.loads(packed)
        sampler, storage, number, smallest = self._drawing, self._storage, int(wanted.rows.sum()), None
        if sampler is not None:
            for name, state in settings.items():
                sampler.settings()[name].load(torch.from_numpy(state))
            sampler.note_other_shards(*largest)
        sums = self._sums()
        # what was written since the batch was divided cannot be drawn
        if sums is not None and sums.smallest is not None and sums.mass[0] * wanted.probability[0] > 0:
            smallest = float(sums.smallest * wanted.probability[0] / sums.mass[0])
        if not number or not (len(self._buffer) if sums is None else any(sums.mass)):
            return {}, smallest
        if sampler is None or sums is None:
            index, info = self._sampler.sample(storage, number * getattr(self._sampler, "slice_len", 1))
        else:
            slots, density, _, extras = sampler.draw_of_shard(wanted, sums)
            index, info = torch.as_tensor(slots), {**(extras or {})}
            if density is not None:
                info[DENSITY] = torch.as_tensor(density)
            if isinstance(self._sampler, TrajectoryRetraceSampler):
                index, info = self._sampler.slices(storage, index, info)
            else:
                info[STAMP_KEY] = sampler.slots.generation_of(index)
        rows = storage.take(index)
        for key, column in info.items():
            rows.set(key, column + self._process * PROCESS if key == STAMP_KEY else column)
        return to_arrays(rows.set("index", index)) | {SHARD_KEY: np.full(len(index), self._number)}, smallest

    def restore(self, source: dict[str, Any] | str) -> None:
        """Replace the content by a :meth:`state_dict`, or by a file of :meth:`dumps`."""
        state = source if isinstance(source, dict) else torch.load(source, map_location="cpu", weights_only=True)
        self._buffer.load_state_dict(state)

    def dumps(self, path: str) -> None:
        """Save the state of the buffer as the file ``path``."""
        # not the buffer's dumps(), which writes memory-mapped files: on a full disk, that kills the process
        torch.save(self._buffer.state_dict(), path)

    def stats(self) -> dict[str, float]:
        """Statistics of the sampler."""
        return {} if self._drawing is None else {key: value.item() for key, value in self._sampler.stats().items()}
