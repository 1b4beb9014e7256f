"""A replay buffer whose transitions are spread over several processes, with the draws of a single buffer."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext.arguments import require_integer, shown
from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer
from torchrl_replay_ext.samplers.adapter import STAMP_KEY
from torchrl_replay_ext.sharding.arrays import OWNER, SHARD_KEY, Arrays, from_arrays, num_rows, split
from torchrl_replay_ext.sharding.calls import Lost, RayCalls, warn
from torchrl_replay_ext.sharding.group import Sent, ShardGroup
from torchrl_replay_ext.sharding.joint_draw import Division, JointDraw, choose
from torchrl_replay_ext.sharding.shard import drawing_sampler, joint_distribution, rows_per_draw
from torchrl_replay_ext.sharding.writer import ShardWriter
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage

_MAX_ROUNDS = 50
# marks complete checkpoints
_COMPLETE = "complete"
_LARGEST = float(np.finfo(np.float32).max)


# A batch, or a part of one, that was requested from the shards: how it was divided, and the calls.
Request = tuple[Division, Sent]


class ShardedReplayBuffer:
    r"""A replay buffer split between Ray actors, called shards. Draws follow the distribution of a single buffer.

    Each shard is a :class:`~torchrl_replay_ext.CompilableReplayBuffer`. This object, the coordinator, belongs to the
    learner. It splits each draw between the shards in proportion to the sums of their priorities, so that a transition
    has the probability that it would have in one buffer with all transitions. Importance-sampling weights use the sum,
    the smallest probability and the largest priority of all shards. Batches are fetched from all shards at the same
    time, ahead of use.

    * **Episodes** stay in one shard: a new one goes to the shard to which the fewest transitions were sent. They need
      trajectory ids (``traj_key``) that are unique among all writers, and the ends of episodes (``done_key``).
    * **Collectors** write to the shards directly: pass this object as ``replay_buffer`` to TorchRL's RayCollector, or
      give each process one of :meth:`clients`.
    * **Samplers**: TorchRL's RandomSampler, :class:`~torchrl_replay_ext.ProportionalSampler`,
      :class:`~torchrl_replay_ext.ReaPERSampler` (with the largest sum of an episode of all shards as F),
      :class:`~torchrl_replay_ext.EventTableSampler` (a table is the union of the shards' tables; uniform or
      ``kind="proportional"``; ``correction="mixture"`` with ``retention="ring"``) and
      :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`. Others are refused for more than one shard. Rank-based
      priorities need the order of all priorities: a merge of histograms would only give approximate ranks.
    * **Staleness**: with ``prefetch=n`` and one update per batch, a draw is split by sums that include all but the last
      n + 1 updates. Weights, where the sampler has them, are those of the probability that each row really had. With
      ``prefetch=0`` all sums are read before each draw, in a second round trip; without concurrent writes the draw is
      then exact.
    * **Late updates**, of transitions that were overwritten or whose shard was started again, are dropped.
    * **Lost processes**: if the process of a shard ends, a warning says how many transitions are gone. Draws go on with
      the other shards. Ray starts the process again, and the shard continues from the last :meth:`dumps`, or empty.
      Open episodes begin again with their next step, in another shard or in the new process.

    Args:
        num_shards: number of shards, >= 1.
        storage: constructor of the storage of a shard: ``partial(CompilableTensorStorage, capacity)``.
        sampler: constructor of the sampler of a shard. Default: None, TorchRL's RandomSampler.
        writer: constructor of the writer of a shard. Default: None, the default writer.
        batch_size: number of rows of a batch.
        priority_key: entry with TD errors. Default: ``"td_error"``.
        traj_key: entry with trajectory ids. Default: ``("collector", "traj_ids")``.
        done_key: entry that marks the end of an episode. Default: ``("next", "done")``.
        prefetch: number of batches that are requested ahead while the learner works on one; see above. Default: 1.
        device: device of batches. Default: ``"cpu"``.
        seed: seed of the draws. Default: None, not seeded.
        remote_config: options of ``ray.remote`` for each actor. Default: None, ``{"num_cpus": 1}``.
        restored: called with the number of a shard that was started again; returns its :meth:`state_dict`, or None for
            an empty shard. Default: None, the shard continues from the last :meth:`dumps`.
        on_loss: called with a message about each loss. Default: None, a UserWarning.
        timeout: the longest time to wait, in seconds, until Ray has started lost processes again: draws and writes
            wait if all are lost, checkpoints if one is. Default: 60.
        calls: starts and calls the shards. Default: None, Ray with ``remote_config``.

    Raises:
        TypeError: if a constructor makes an object of the wrong type.
        ValueError: if a number is out of range, or the sampler cannot draw from several shards.

    Examples:
        See the section "A buffer on several hosts" of the package's README.md.
    """

    # read by TorchRL's RayCollector
    service_backend = "ray"

    def __init__(
        self,
        num_shards: int,
        *,
        storage: Callable[[], Any],
        sampler: Callable[[], Any] | None = None,
        writer: Callable[[], Any] | None = None,
        batch_size: int,
        priority_key: str = "td_error",
        traj_key: NestedKey = ("collector", "traj_ids"),
        done_key: NestedKey = ("next", "done"),
        prefetch: int = 1,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        remote_config: dict[str, Any] | None = None,
        restored: Callable[[int], dict[str, Any] | None] | None = None,
        on_loss: Callable[[str], None] | None = None,
        timeout: float = 60.0,
        calls: RayCalls | None = None,
    ):
        require_integer(OWNER, "num_shards", num_shards)
        require_integer(OWNER, "batch_size", batch_size)
        require_integer(OWNER, "prefetch", prefetch, least=0)
        # like those of the shards; made to check the arguments before a process is started, and to divide draws
        parts = {
            "storage": storage,
            "sampler": sampler or RandomSampler,
            "writer": writer,
            "priority_key": priority_key,
        }
        # a copy, because event tables belong to one storage
        buffer = CompilableReplayBuffer(**deepcopy(parts))
        made, drawing, name = buffer.storage, drawing_sampler(buffer.sampler), f"{OWNER}(num_shards={num_shards})"
        if not isinstance(made, CompilableTensorStorage) or made.ndim != 1 or str(made.device) not in ("cpu", "auto"):
            raise ValueError(f"{OWNER}(storage=...): shards need a CompilableTensorStorage with ndim=1 on the CPU.")
        if drawing is not None and num_shards > 1:
            if drawing.distribution.why_not_joint is not None:
                raise ValueError(f"{name}: {type(buffer.sampler).__name__}: {drawing.distribution.why_not_joint}")
            if drawing.state.priorities.within_buffer:
                raise ValueError(f"{name}: max_priority_within_buffer=True needs the priorities of all shards.")
        self._unit = rows_per_draw(buffer.sampler)
        if batch_size % self._unit:
            raise ValueError(f"{OWNER}(batch_size={batch_size}): must be a multiple of slice_len={self._unit}.")
        self._joint = JointDraw(joint_distribution(buffer.sampler))
        self._takes_priorities = bool(getattr(buffer.sampler, "takes_priorities", False))
        self._largest_td_error = _LARGEST if drawing is None else min(_LARGEST, drawing.largest_td_error)
        self.batch_size, self.priority_key, self.prefetch = batch_size, priority_key, prefetch
        self._device = torch.device(device)
        self._rng = None if seed is None else torch.Generator().manual_seed(seed)
        keys: dict[str, Any] = {"traj_key": unravel_key(traj_key), "done_key": unravel_key(done_key)}
        calls = calls or RayCalls({"num_cpus": 1, **(remote_config or {})})
        shards = [{**parts, "number": n, "seed": None if seed is None else seed + 1 + n} for n in range(num_shards)]
        # the last checkpoint of the present content
        self._checkpoint: Path | None = None
        self._group = ShardGroup(calls, shards, restored or self._saved, on_loss or warn, timeout)
        self._make_writer = partial(ShardWriter, self._group.handles, calls, **keys, timeout=timeout)
        self._writer = self._make_writer(on_loss=on_loss)
        self._requests = deque[Request]()

    # --- writes

    def client(self) -> ShardWriter:
        """A writer for one more process, which can be sent there."""
        return self._make_writer()

    def clients(self, num_clients: int) -> list[ShardWriter]:
        """A writer for each of ``num_clients`` processes."""
        return [self.client() for _ in range(num_clients)]

    def extend(self, data: TensorDictBase) -> None:
        """Write transitions [n], those of each episode in time order; see :meth:`ShardWriter.extend`."""
        self._writer.extend(data)

    # --- draws

    def sample(self) -> TensorDictBase:
        """Draw a batch.

        Returns:
            ``batch_size`` rows in random order, with the stored entries, ``"index"`` and ``"shard"``, int64
            [B], and the entries of the sampler, such as ``"priority_weight"``.

        Raises:
            RuntimeError: if no transition can be drawn; :class:`Lost`, a RuntimeError, if processes have ended before.
        """
        while len(self._requests) <= self.prefetch:
            self._requests.append(self._request())
        (first, sent), wanted = self._requests.popleft(), self.batch_size // self._unit
        division, parts, found = first, list[Arrays](), 0
        for _ in range(_MAX_ROUNDS):
            rows = [part for part in self._group.receive(sent) if part]
            new = sum(map(num_rows, rows)) // self._unit
            self._joint.count(division, new)
            parts, found = parts + rows, found + new
            if found >= wanted:
                break
            division, sent = self._request(rows=wanted - found)
        else:
            raise RuntimeError(f"{OWNER}.sample: found only {found} of {wanted} rows in {_MAX_ROUNDS} rounds.")
        batch = choose(parts, wanted, self._unit, self._rng)
        self._joint.add_weights(batch, first, self._group.reports)
        return from_arrays(batch).to(self._device)

    def _request(self, updates: list[Arrays] | None = None, *, rows: int | None = None) -> Request:
        """Send updates, and request rows: a whole batch if ``rows`` is None."""
        group, batch = self._group, self.batch_size // self._unit
        if not self.prefetch or not group.can_draw:
            group.call("report")
        if not group.can_draw:
            # if the processes of all shards have ended
            group.wait(1)
        division = self._joint.divide(group.reports, batch if rows is None else rows, batch, self._rng)
        if division is None:
            lost = f"; {group.lost_shards} processes of shards have ended so far" if group.lost_shards else ""
            raise (Lost if group.lost_shards else RuntimeError)(
                f"{OWNER}.sample: no transition can be drawn: the buffer is empty, or all priorities are 0{lost}."
            )
        return division, group.exchange(division.rows, updates, counts_batch=rows is None)

    # --- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Send the TD errors of a sample to its shards, and request the next batch.

        Args:
            data: a sample, whole or in part, with TD errors.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if a TD error is negative, not finite or too large, or a number of a shard is out of range.
                Nothing is changed then.
        """
        if not self._takes_priorities:
            return
        name, group = f"{OWNER}.update_tensordict_priority", self._group
        needed = ("index", SHARD_KEY, STAMP_KEY, self.priority_key)
        if missing := [key for key in needed if data.get(key, None) is None]:
            raise KeyError(
                f"{name}: the sample has no entry {missing[0]!r}; pass the batch of sample() to which the loss has "
                f"written TD errors as {self.priority_key!r}."
            )
        if data.ndim != 1:
            data = data.reshape(-1)
        columns: Arrays = {key: data[key].detach().cpu().numpy() for key in needed[:-1]}
        columns[self.priority_key] = data[self.priority_key].detach().to("cpu", torch.float32).numpy()
        error, shard = columns[self.priority_key], columns.pop(SHARD_KEY)
        valid = (error >= 0) & (error <= self._largest_td_error)
        if not valid.all():
            raise ValueError(
                f"{name}: TD errors must lie in [0, {shown(self._largest_td_error)}]; the entry "
                f"{self.priority_key!r} has {error[~valid][0]}."
            )
        if len(shard) and not 0 <= shard.min() <= shard.max() < len(group):
            raise ValueError(
                f"{name}: the entry {SHARD_KEY!r} must lie in [0, {len(group) - 1}], but has {shard.min()} to "
                f"{shard.max()}; pass a batch of this buffer."
            )
        # all shards are called, also those without rows, so that their schedules advance alike
        updates = split(columns, shard, len(group))
        if self.prefetch and len(self._requests) <= self.prefetch and group.can_draw:
            self._requests.append(self._request(updates))
        else:
            group.receive(group.exchange(None, updates))

    # --- the rest of a buffer

    def __len__(self) -> int:
        self._group.call("report")
        return sum(report.length for report in self._group.reports)

    @property
    def write_count(self) -> int:
        """Sum of the shards' write counts; it falls if a shard is started again."""
        self._group.call("report")
        return sum(report.written for report in self._group.reports)

    def stats(self) -> dict[str, float]:
        """Statistics for logging. O(N) in each shard.

        Those of the sampler's ``stats()``, over all shards: numbers of things are added, ``max_priority`` and other
        maxima are the largest, minima the smallest, and the rest is averaged by the numbers of transitions. And
        ``shards``: shards whose process has not ended; ``lost_shards``: processes that have ended so far;
        ``lost_rows``: transitions that they had by their last reports, and those that this process lost on the way.
        """
        group = self._group
        answers = zip(group.call("stats"), group.reports, strict=True)
        found = [(stats, report.length) for stats, report in answers if stats is not None]
        lost = {"lost_shards": group.lost_shards, "lost_rows": group.lost_rows + self._writer.lost_rows}
        return {**combine(found), "shards": len(found), **lost}

    def check_valid(self) -> None:
        """Raise AssertionError if the state of a shard is inconsistent. O(N)."""
        self._group.call("check_valid")

    def empty(self) -> None:
        """Remove all transitions. Late updates of their rows are dropped.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds; nothing is changed then.
        """
        self._discard()
        self._group.call_all("empty")
        self._checkpoint = None

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, copied to this process.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        return {"shards": self._group.call_all("state_dict")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Late updates of replaced rows are dropped.

        Raises:
            ValueError: if it has another number of shards; nothing is changed then.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.

        After another error, some shards may have been restored: load again, or call :meth:`empty`.
        """
        self._load(state_dict["shards"], None)

    def dumps(self, path: str | Path) -> None:
        """Save all shards under the directory ``path``, which all hosts must share, as one unit.

        The checkpoint becomes valid when the last shard has been written; an earlier checkpoint at this path remains
        valid until then. Shards that are lost later continue from this checkpoint.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds. The old checkpoint remains.
        """
        directory = Path(path).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        before = [*directory.glob("[0-9]*")]
        new = directory / str(1 + max((int(entry.name) for entry in before), default=0))
        new.mkdir()
        self._group.call_all("dumps", lambda number: (file_of(new, number),))
        (new / _COMPLETE).touch()
        self._checkpoint = new
        for entry in before:
            shutil.rmtree(entry, ignore_errors=True)

    def loads(self, path: str | Path) -> None:
        """Restore a checkpoint of :meth:`dumps`; see :meth:`load_state_dict`.

        Raises:
            FileNotFoundError: if there is no complete checkpoint.
            ValueError: if it has another number of shards.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        directory = Path(path).absolute()
        complete = [mark.parent for mark in directory.glob(f"[0-9]*/{_COMPLETE}")]
        if not complete:
            raise FileNotFoundError(f"{directory} has no complete checkpoint of a {OWNER}.")
        newest = max(complete, key=lambda entry: int(entry.name))
        self._load([file_of(newest, number) for number in range(len([*newest.glob("*.pt")]))], newest)

    def _load(self, sources: list[Any], checkpoint: Path | None) -> None:
        """Replace the content of all shards; ``sources``: for each, see :meth:`ReplayShard.restore`."""
        self._discard()
        if len(sources) != len(self._group):
            raise ValueError(
                f"{OWNER}: the checkpoint has {len(sources)} shards, this buffer has {len(self._group)}; use "
                f"num_shards={len(sources)}."
            )
        self._group.call_all("restore", lambda number: (sources[number], False))
        self._checkpoint = checkpoint

    def _saved(self, number: int) -> str | None:
        """The file of a shard in the last checkpoint; None if there is none."""
        return self._checkpoint and file_of(self._checkpoint, number)

    def _discard(self) -> None:
        """Forget the batches that were requested ahead."""
        while self._requests:
            self._group.receive(self._requests.popleft()[1])

    def shutdown(self) -> None:
        """End all shards."""
        self._requests.clear()
        self._group.stop()


def file_of(checkpoint: Path, number: int) -> str:
    """The file of a shard in a checkpoint."""
    return str(checkpoint / f"shard{number}.pt")


def combine(parts: list[tuple[dict[str, float], int]]) -> dict[str, float]:
    """The statistics of several shards, each with its length, as those of one buffer."""
    combined, length = dict[str, float](), np.array([length for _, length in parts])
    for key in parts[0][0] if parts else ():
        values = np.array([stats[key] for stats, _ in parts])
        if key.startswith(("num_", "size_", "dropped", "rejected", "interrupted", "repeated")):
            combined[key] = float(values.sum())
        elif key.endswith("max") or key.startswith("max_"):
            combined[key] = float(values.max())
        elif key.endswith("min"):
            combined[key] = float(values.min())
        else:
            combined[key] = float(np.average(values, weights=length if length.any() else None))
    return combined
