"""One shard of a sharded replay buffer: a buffer in a process of its own."""

from __future__ import annotations

import pickle
import secrets
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor
from torchrl.data.replay_buffers import Sampler

from torchrl_replay_ext._torchrl import set_entries
from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.samplers.base import ReplaySampler
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, ShardRows, Sums

# The class that error messages name.
OWNER = "ShardedReplayBuffer"
# Entries of samples that are not stored: the number of the shard, and the probability of the row in the whole batch.
SHARD_KEY, DENSITY = "shard", "_probability_of_draw"
# Batches are sent as arrays: Ray needs 2.3 ms of CPU time to pack and unpack a batch of tensors, 0.1 ms for arrays.
Arrays = dict[NestedKey, np.ndarray]


def to_arrays(data: TensorDictBase) -> Arrays:
    """The entries of a batch on the CPU. Raises TypeError for entries that are not tensors, and dtypes NumPy lacks."""
    columns: Arrays = {}
    for key, column in data.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(column, Tensor):
            raise TypeError(f"{OWNER}: the entry {key!r} must be a tensor, not {type(column).__name__}.")
        columns[key] = column.detach().cpu().numpy()
    return columns


def from_arrays(columns: Arrays) -> TensorDict:
    """The inverse of :func:`to_arrays`. Arrays that Ray has received are copied: they are read-only."""
    data = {
        key: torch.from_numpy(column) if column.flags.writeable else torch.tensor(column)
        for key, column in columns.items()
    }
    return TensorDict(data, [len(next(iter(columns.values())))], device="cpu")


def take(columns: Arrays, rows: np.ndarray) -> Arrays:
    """Some rows, by index or mask."""
    return {key: column[rows] for key, column in columns.items()}


def split(columns: Arrays, shard: np.ndarray) -> dict[int, Arrays]:
    """The rows of each shard, in the same order; ``shard``: the number of the shard of each row, int64 [n]."""
    return {number: take(columns, shard == number) for number in np.unique(shard).tolist()}


class Report(NamedTuple):
    """The state of a shard after a call.

    Args:
        process: random number of the process.
        length: number of stored transitions.
        written: number of transitions ever written.
        largest_priority: the priority of new transitions; 0 without priorities.
        sums: see :class:`~torchrl_replay_ext.samplers.shard_draws.Sums`.
    """

    process: int
    length: int
    written: int
    largest_priority: float
    sums: Sums


def dividing_sampler(sampler: Sampler) -> ReplaySampler | None:
    """The sampler that draws one shard's part of a batch: for slices, that of the anchors.

    None if the sampler needs all transitions in one place, or has no sums: it then draws as in any other buffer.
    """
    drawing: Any = getattr(sampler, "starts_sampler", sampler)
    is_divisible = isinstance(drawing, ReplaySampler) and not drawing.slots.within_buffer and drawing.shard_sums()
    return drawing if is_divisible else None


class ReplayShard:
    """A replay buffer in an actor, with the calls of coordinator and writers.

    If the process ends, Ray starts another one with an empty shard, which reports another number of the process.

    Args:
        number: number of the shard.
        seed: seed of the draws of all shards; None: not seeded.
        **arguments: of :class:`~torchrl_replay_ext.CompilableReplayBuffer`.
    """

    def __init__(self, number: int, *, seed: int | None, **arguments: Any):
        self._buffer = CompilableReplayBuffer(**arguments)
        if seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(seed + number))
        self._storage: Any = self._buffer.storage
        self._sampler: Any = self._buffer.sampler
        self._drawing = dividing_sampler(self._sampler)
        # Added to the write stamps of samples: those of another process then differ from all stamps of this one, and
        # the sampler drops updates with them.
        self._process = 1 + secrets.randbelow(2**62)
        self._number = number

    def answer(self, method: str, *arguments: Any) -> tuple[Report, Any]:
        """Call a method of this object or of the buffer; return the report after it, and its result."""
        result = getattr(self if hasattr(self, method) else self._buffer, method)(*arguments)
        return self.report(), result

    def report(self) -> Report:
        """The state of the shard."""
        sampler, length = self._drawing, len(self._buffer)
        largest, sums = 0.0, None
        if sampler is not None:
            if length:
                sampler.synchronize(self._storage)
            largest, sums = sampler.slots.largest.item(), sampler.shard_sums()
        return Report(self._process, length, self._buffer.write_count, largest, sums or Sums([float(length)]))

    def write(self, rows: Arrays) -> None:
        """Write rows."""
        self._buffer.extend(from_arrays(rows))

    def update(self, packed: bytes) -> None:
        """Apply TD errors; ``packed``: pickled rows of :meth:`draw`, because Ray takes 20 us for each array."""
        if len(self._buffer):
            rows = from_arrays(pickle.loads(packed))
            rows[STAMP_KEY] -= self._process
            self._buffer.update_tensordict_priority(rows)

    @torch.no_grad()
    def draw(self, wanted: ShardRows) -> tuple[Arrays, float]:
        """Draw the rows of a batch that lie in this shard.

        Returns:
            The rows, and the smallest probability of a row in the whole batch; 0 if weights do not need it.
        """
        sampler, storage, number, smallest = self._drawing, self._storage, sum(wanted.rows), None
        if sampler is not None:
            for name, state in wanted.schedules.items():
                sampler.settings()[name].load(torch.tensor(state, dtype=torch.float64))
            sampler.slots.largest.clamp_min_(min(wanted.largest_priority, sampler.max_supported_priority))
        sums = self.report().sums
        if not any(sums.mass):
            return {}, 0.0
        index, info = torch.empty(0), dict[Any, Tensor]()
        if sampler is not None:
            # also without rows, for the smallest probability; it is 0 if rows were written since the batch was divided
            index, density, smallest, extras = sampler.draw_of_shard(wanted, sums)
            index, info = torch.as_tensor(index), {**(extras or {})}
            if density is not None:
                info[DENSITY] = torch.as_tensor(density)
            if self._sampler is sampler:
                info[STAMP_KEY] = sampler.slots.generation_of(index)
            elif number:
                index, info = self._sampler.slices(storage, index, info)
        elif number:
            index, info = self._sampler.sample(storage, number * getattr(self._sampler, "slice_len", 1))
        least = 0.0 if smallest is None else float(smallest)
        if not len(index):
            return {}, least
        if STAMP_KEY in info:
            info[STAMP_KEY] += self._process
        rows = storage.take(index)
        set_entries(rows, {**info, "index": index, SHARD_KEY: torch.full_like(index, self._number)})
        return to_arrays(rows), least

    def restore(self, source: dict[str, Any] | str) -> None:
        """Replace the content by a :meth:`state_dict`, or by a file of :meth:`save`."""
        state = source if isinstance(source, dict) else torch.load(source, map_location="cpu", weights_only=True)
        self._buffer.load_state_dict(state)

    def save(self, path: str) -> None:
        """Save the state of the buffer as the file ``path``."""
        # not the buffer's dumps(), which writes memory-mapped files: on a full disk, that kills the process
        torch.save(self._buffer.state_dict(), path)

    def stats(self) -> dict[str, float]:
        """Statistics of the sampler."""
        return {key: value.item() for key, value in getattr(self._sampler, "stats", dict)().items()}
