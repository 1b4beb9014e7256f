"""One shard of a sharded replay buffer: a buffer in a process of its own."""

from __future__ import annotations

import math
import pickle
import secrets
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torchrl.data.replay_buffers import RandomSampler, Sampler, Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer
from torchrl_replay_ext.buffers.open_episodes import stored_slots, truncate_at
from torchrl_replay_ext.distributions.protocol import ShardRows, Sums
from torchrl_replay_ext.samplers.adapter import STAMP_KEY, DistributionSampler
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler
from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, Arrays, describe, from_arrays, take, to_arrays
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.writers.event_table import EventTableWriter

# A write stamp is the number of a write, plus the number of the shard's incarnation times this.
INCARNATION = 2**34


def _new_incarnation() -> int:
    return 1 + secrets.randbelow(2**27 - 1)


class Report(NamedTuple):
    """The state of a shard after a call. All numbers are plain, because small tensors are slow to send.

    Args:
        incarnation: number of the incarnation; 0: the shard has not answered yet.
        number: number of the report; a larger number is newer. Default: 0.
        length: number of stored transitions.
        written: number of transitions ever written.
        mass, smallest, count, eta, largest_episode: see :class:`~torchrl_replay_ext.distributions.protocol.Sums`.
        largest_priority: the priority of new transitions; 0 without priorities.
        beta: exponent of the weights; None without weights.
        dropped: number of rows of updates that were dropped because they belong to an earlier incarnation.
        lost: number of rows that writers have lost with other shards, and reported to this one.
        largest_td_error: the largest TD error that an update may contain.
        schedules: state of the schedules of annealed hyperparameters; None if there are none.
    """

    incarnation: int
    number: int = 0
    length: int = 0
    written: int = 0
    mass: tuple[float, ...] = (0.0,)
    smallest: float | None = None
    count: tuple[int, ...] | None = None
    eta: tuple[float, ...] | None = None
    largest_episode: int = 0
    largest_priority: float = 0.0
    beta: float | None = None
    dropped: int = 0
    lost: int = 0
    largest_td_error: float = math.inf
    schedules: dict[str, list] | None = None


class Exchange(NamedTuple):
    """A call of :meth:`ReplayShard.exchange`.

    Args:
        updates: the entries ``"index"``, ``"write_stamp"``, the TD errors and, for slices, the mask; no rows if the
            update has none of this shard. None: there is no update.
        wanted: the rows to draw, with arrays and lists instead of tensors. None: none.
        largest_priority, largest_episode: those of the other shards.
        counts_batch: True for the first draw of a batch.
    """

    updates: Arrays | None
    wanted: ShardRows | None
    largest_priority: float
    largest_episode: int
    counts_batch: bool

    def pack(self) -> bytes:
        """The call in one piece, because Ray takes 20 us for each array."""
        return pickle.dumps(self, protocol=5)


class UniformDraw:
    """Joint draws with TorchRL's RandomSampler, as those of a sampler with a distribution."""

    def sums(self, storage: Storage) -> Sums:
        """The sums of this shard that joint draws use."""
        return Sums(torch.tensor([float(_torchrl.length(storage))], dtype=torch.float64), None)

    def sample_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[torch.Tensor, dict[str, Any]]:
        """The rows of a joint draw that lie in this shard."""
        length = _torchrl.length(storage)
        return (wanted.u * length).to(torch.int64) if length else torch.zeros(0, dtype=torch.int64), {}


class WholeDraw(UniformDraw):
    """The draws of a sampler that cannot draw from several shards, for a single one."""

    def __init__(self, sampler: Any):
        self._sampler = sampler

    def sample_in_shard(self, storage: Storage, wanted: ShardRows) -> tuple[torch.Tensor, dict[str, Any]]:
        """All rows of a draw."""
        return self._sampler.sample(storage, len(wanted.u) * rows_per_unit(self._sampler))


def rows_per_unit(sampler: Sampler) -> int:
    """Rows that one draw of a sampler adds to a batch: the length of a slice, otherwise 1."""
    return sampler.slice_len if isinstance(sampler, TrajectoryRetraceSampler) else 1


def joint_sampler(sampler: Sampler) -> DistributionSampler | TrajectoryRetraceSampler | UniformDraw:
    """The object that makes the joint draws of a sampler.

    Raises:
        TypeError: if there is none.
    """
    if type(sampler) is RandomSampler:
        return UniformDraw()
    if isinstance(sampler, (DistributionSampler, TrajectoryRetraceSampler)):
        drawing = drawing_sampler(sampler)
        return sampler if drawing is None or drawing.distribution.why_not_joint is None else WholeDraw(sampler)
    raise TypeError(
        f"{OWNER}(sampler={type(sampler).__name__}): pass RandomSampler, or a sampler of this package "
        "other than DecoupledSampler, which needs the policy."
    )


def drawing_sampler(sampler: Any) -> DistributionSampler | None:
    """The sampler that draws and has the priorities: for slices, that of the anchors; None with uniform draws."""
    if isinstance(sampler, TrajectoryRetraceSampler):
        return sampler.starts_sampler
    return sampler if isinstance(sampler, DistributionSampler) else None


class ReplayShard:
    """A replay buffer in an actor, with the calls of coordinator and writers.

    If the process ends, Ray starts another one with an empty shard. Writers and the coordinator see this by the number
    of the incarnation, which is random.

    Args:
        traj_key: entry with trajectory ids.
        done_key: entry that marks the end of an episode.
        seed: seed of the draws; None: not seeded.
        **arguments: of :class:`~torchrl_replay_ext.CompilableReplayBuffer`.
    """

    def __init__(self, *, traj_key: NestedKey, done_key: tuple[str, ...], seed: int | None, **arguments: Any):
        torch.set_num_threads(1)
        self._buffer = CompilableReplayBuffer(**arguments)
        if seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(seed))
        self._sampler = joint_sampler(self._buffer.sampler)
        self._traj_key, self._done_key = traj_key, done_key
        self._incarnation, self._num_reports, self._dropped, self._lost = _new_incarnation(), 0, 0, 0
        self._columns: Any = None
        self._staged: dict[str, Any] | None = None

    # --- life

    def stage(self, source: dict[str, Any] | str) -> None:
        """Read a checkpoint, for :meth:`restore`; ``source``: a :meth:`state_dict`, or a file of :meth:`dumps`."""
        is_file = isinstance(source, str)
        self._staged = torch.load(source, map_location="cpu", weights_only=True) if is_file else source

    def restore(self, keep: bool = False) -> None:
        """Replace the content by that of the staged checkpoint, and truncate its open episodes: a new incarnation.

        Args:
            keep: afterwards, write the rows that the shard held before, and truncate their episodes. Default: False.

        Raises:
            RuntimeError: if nothing is staged, because the process was started again in between.
        """
        state, self._staged = self._staged, None
        if state is None:
            raise RuntimeError("the process of a shard was started again while a checkpoint was loaded; load it again.")
        rows = self._buffer[stored_slots(self._buffer)].exclude("index") if keep and len(self._buffer) else None
        self._buffer.load_state_dict(state)
        self._incarnation = _new_incarnation()
        self.end_open_episodes()
        if rows is not None:
            self._buffer.extend(rows)
            self.end_open_episodes()

    def answer(self, method: str, *arguments: Any) -> tuple[Report, Any]:
        """Call a method; return its result after the report."""
        result = getattr(self, method)(*arguments)
        return self.report(), result

    def report(self) -> Report:
        """The state of the shard."""
        buffer, drawing = self._buffer, drawing_sampler(self._buffer.sampler)
        sums, length = Sums(torch.zeros(1, dtype=torch.float64), None), len(self._buffer)
        if length:
            sums = self._sampler.sums(buffer.storage)
        beta = None if drawing is None else drawing.hyperparameters.get("beta")
        self._num_reports += 1
        return Report(
            self._incarnation,
            self._num_reports,
            length,
            buffer.write_count,
            mass=tuple(sums.mass.tolist()),
            smallest=None if sums.smallest is None else float(sums.smallest),
            count=None if sums.count is None else tuple(sums.count.tolist()),
            eta=None if sums.eta is None else tuple(sums.eta.tolist()),
            largest_episode=sums.largest_episode,
            largest_priority=0.0 if drawing is None else drawing.largest_priority,
            beta=None if beta is None else float(beta.value),
            dropped=self._dropped,
            lost=self._lost,
            largest_td_error=math.inf if drawing is None else drawing.largest_td_error,
            schedules=None if drawing is None else drawing.schedules(),
        )

    # --- data

    def stored_columns(self) -> Any:
        """The description of the stored rows; None if there are none."""
        return (
            describe(to_arrays(self._buffer[stored_slots(self._buffer)[:1]].exclude("index")))
            if len(self._buffer)
            else None
        )

    def fix_columns(self, columns: Any) -> Any:
        """The description of the first rows written to any shard; the first call decides. Called for one shard only."""
        if self._columns is None:
            self._columns = columns
        return self._columns

    def forget_columns(self) -> None:
        """Forget the first rows: they were refused."""
        self._columns = None

    def write(self, rows: Arrays, incarnation: int | None, lost: int) -> tuple[bool, Report]:
        """Write rows, unless the shard has another incarnation.

        Args:
            rows: the rows.
            incarnation: the incarnation that the writer knows; None: any.
            lost: number of rows that the writer has lost since its last report.

        Returns:
            True if the rows were written, and the report.
        """
        self._lost += lost
        if incarnation not in (None, self._incarnation):
            return False, self.report()
        self._buffer.extend(from_arrays(rows))
        return True, self.report()

    def exchange(self, packed: bytes) -> tuple[Report, Arrays]:
        """Apply TD errors, then draw; ``packed``: see :class:`Exchange`.

        Returns:
            The report after the draw, and the rows.
        """
        call: Exchange = pickle.loads(packed)
        drawing = drawing_sampler(self._buffer.sampler)
        if call.updates is not None and drawing is not None:
            self._update(drawing, call.updates)
        if drawing is not None:
            drawing.note_other_shards(call.largest_priority, call.largest_episode)
        rows = {} if call.wanted is None or not len(self._buffer) else self._draw(call.wanted)
        if call.counts_batch and drawing is not None:
            drawing.distribution.count_batch()
        return self.report(), rows

    def _update(self, drawing: DistributionSampler, updates: Arrays) -> None:
        stamps = updates[STAMP_KEY]
        is_current = (stamps // INCARNATION == self._incarnation) | (stamps < 0)
        self._dropped += int((~is_current).sum())
        if not (is_current & (stamps >= 0)).any():
            drawing.count_update()
            return
        rows = from_arrays(take(updates, is_current))
        rows[STAMP_KEY] = torch.where(rows[STAMP_KEY] < 0, -1, rows[STAMP_KEY] % INCARNATION)
        self._buffer.update_tensordict_priority(rows)

    def _draw(self, wanted: ShardRows) -> Arrays:
        tensors = ShardRows(
            torch.tensor(wanted.u),
            None if wanted.table is None else torch.tensor(wanted.table),
            torch.tensor(wanted.probability, dtype=torch.float64),
            torch.tensor(wanted.eta, dtype=torch.float64),
            None if wanted.count is None else torch.tensor(wanted.count),
        )
        storage = self._buffer.storage
        assert isinstance(storage, CompilableTensorStorage)
        index, info = self._sampler.sample_in_shard(storage, tensors)
        if not len(index):
            return {}
        rows = storage.take(index)
        if (density := info.pop("density", None)) is not None:
            info[DENSITY] = density
        for key, column in info.items():
            rows.set(key, column)
        rows["index"] = index
        if STAMP_KEY in info:
            rows[STAMP_KEY] = torch.where(info[STAMP_KEY] < 0, -1, info[STAMP_KEY] + self._incarnation * INCARNATION)
        return to_arrays(rows)

    # --- the rest of a buffer

    def end_open_episodes(self) -> None:
        """Truncate all episodes that have not ended, by copies of their newest transitions."""
        buffer, storage = self._buffer, self._buffer.storage
        assert isinstance(storage, CompilableTensorStorage)
        if not len(self._buffer) or self._column(self._done_key) is None:
            return
        slots = stored_slots(buffer)
        # only these columns: the others may be large
        done = storage.take_columns([self._done_key], slots)[self._done_key].reshape(len(slots), -1).any(1)
        ids = torch.zeros(len(slots), dtype=torch.int64)
        if self._column(self._traj_key) is not None:
            ids = storage.take_columns([self._traj_key], slots)[self._traj_key].reshape(len(slots))
        _, which = ids.unique(return_inverse=True)
        last = torch.zeros(int(which.max()) + 1, dtype=torch.int64)
        last.scatter_reduce_(0, which, torch.arange(len(slots)), "amax")
        last = last.sort().values
        truncate_at(buffer, slots[last[~done[last]]], self._done_key, self._flags())

    def _column(self, key: NestedKey) -> torch.Tensor | None:
        """A stored entry; None if it is missing."""
        return _torchrl.stored_data(self._buffer.storage).get(key, None)

    def _flags(self) -> list[NestedKey]:
        """The entries that flag events."""
        writer = self._buffer.writer
        specs = writer.tables.specs if isinstance(writer, EventTableWriter) else ()
        return [spec.condition for spec in specs if isinstance(spec.condition, (str, tuple))]

    def empty(self) -> None:
        """Remove all transitions. This is a new incarnation."""
        self._buffer.empty()
        self._incarnation = _new_incarnation()

    def state_dict(self) -> dict[str, Any]:
        """The state of the buffer."""
        return self._buffer.state_dict()

    def dumps(self, path: str) -> None:
        """Save the state of the buffer as the file ``path``."""
        # not the buffer's dumps(), which writes memory-mapped files: on a full disk, that kills the process
        torch.save(self._buffer.state_dict(), path)

    def load_schedules(self, schedules: dict[str, list]) -> None:
        """Continue the schedules of another shard."""
        if drawing := drawing_sampler(self._buffer.sampler):
            drawing.load_schedules(schedules)

    def stats(self) -> dict[str, float]:
        """Statistics of the sampler."""
        stats = getattr(self._buffer.sampler, "stats", None)
        return {key: value.item() for key, value in stats().items()} if stats is not None else {}

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the sampler's state contradict each other. O(N)."""
        if drawing := drawing_sampler(self._buffer.sampler):
            drawing.check_valid()
