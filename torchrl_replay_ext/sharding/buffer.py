"""A replay buffer whose transitions are spread over several processes, with the draws of a single buffer."""

from __future__ import annotations

import pickle
import shutil
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
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY
from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, SHARD_KEY, Arrays, from_arrays, num_rows, split
from torchrl_replay_ext.sharding.calls import Lost, RayCalls, warn
from torchrl_replay_ext.sharding.group import ShardGroup
from torchrl_replay_ext.sharding.joint_draw import divide, join, weights
from torchrl_replay_ext.sharding.shard import drawing_sampler, rows_per_draw
from torchrl_replay_ext.sharding.writer import ShardWriter
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage

# files of a checkpoint: what the coordinator counts, and the mark that all files are complete
_COUNTS, _COMPLETE = "counts", "complete"
_LARGEST = float(np.finfo(np.float32).max)


class ShardedReplayBuffer:
    r"""A replay buffer split between Ray actors, called shards. Draws follow the distribution of a single buffer.

    Each shard is a :class:`~torchrl_replay_ext.CompilableReplayBuffer`. This object, the coordinator, belongs to the
    learner. It divides each batch by one multinomial draw over the sums of the shards' priorities, so that a transition
    has the probability that it would have in one buffer with all transitions, and it computes the importance-sampling
    weights. All shards draw at the same time.

    * **Episodes** stay in one shard: a new one goes to the shard to which the fewest transitions were sent. They need
      trajectory ids (``traj_key``) that are unique among all writers, and the ends of episodes (``done_key``).
    * **Collectors** write to the shards directly: pass this object as ``replay_buffer`` to TorchRL's RayCollector, or
      give each process one of :meth:`clients`.
    * **Samplers**: TorchRL's RandomSampler, :class:`~torchrl_replay_ext.ProportionalSampler`,
      :class:`~torchrl_replay_ext.ReaPERSampler` (with the largest sum of an episode of all shards as F; the sum of a
      shard is that of d^α times a running mean of R^ω),
      :class:`~torchrl_replay_ext.EventTableSampler` (a table is the union of the shards' tables; uniform or
      ``kind="proportional"``; ``correction="mixture"`` with ``retention="ring"``) and
      :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`. Others are refused for more than one shard. Rank-based
      priorities need the order of all priorities: a merge of histograms would only give approximate ranks.
    * **Sums** are those of the last draw or update of this process, and read anew after a write by it. If other
      processes write meanwhile, transitions have slightly other probabilities than in one buffer. Weights, where the
      sampler has them, are those of the probability that each row really had.
    * **Late updates**, of transitions that were overwritten or whose shard was started again, are dropped.
    * **Lost processes**: if the process of a shard ends, a warning says how many transitions are gone. Draws go on with
      the other shards. Ray starts the process again, with an empty shard. Open episodes begin again with their next
      step, in another shard or in the new process.

    Args:
        num_shards: number of shards, >= 1.
        storage: constructor of the storage of a shard: ``partial(CompilableTensorStorage, capacity)``.
        sampler: constructor of the sampler of a shard. Default: None, TorchRL's RandomSampler.
        writer: constructor of the writer of a shard. Default: None, the default writer.
        batch_size: number of rows of a batch.
        priority_key: entry with TD errors. Default: ``"td_error"``.
        traj_key: entry with trajectory ids. Default: ``("collector", "traj_ids")``.
        done_key: entry that marks the end of an episode. Default: ``("next", "done")``.
        device: device of batches. Default: ``"cpu"``.
        seed: seed of the draws. Default: None, not seeded.
        remote_config: options of ``ray.remote`` for each actor. Default: None, ``{"num_cpus": 1}``.
        on_loss: called with a message about each loss. Default: None, a UserWarning.
        timeout: the longest time to wait, in seconds, until Ray has started lost processes again: draws and writes
            wait if all are lost, checkpoints if one is. Default: 60.
        calls: starts and calls the shards. Default: None, Ray with ``remote_config``.

    Raises:
        TypeError: if a constructor makes an object of the wrong type.
        ValueError: if a number is out of range, or the sampler cannot draw from several shards.

    Examples:
        See guide/several_hosts.md in the package.
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
        device: torch.device | str = "cpu",
        seed: int | None = None,
        remote_config: dict[str, Any] | None = None,
        on_loss: Callable[[str], None] | None = None,
        timeout: float = 60.0,
        calls: RayCalls | None = None,
    ):
        require_integer(OWNER, "num_shards", num_shards)
        require_integer(OWNER, "batch_size", batch_size)
        # like those of the shards; made to check the arguments before a process is started, to divide batches, and to
        # keep the schedules of hyperparameters
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
            try:
                drawing.shard_sums()
            except ValueError as error:
                raise ValueError(f"{name}: {type(buffer.sampler).__name__}: {error}") from error
            if drawing.slots.within_buffer:
                raise ValueError(f"{name}: max_priority_within_buffer=True needs the priorities of all shards.")
        self._unit = rows_per_draw(buffer.sampler)
        if batch_size % self._unit:
            raise ValueError(f"{OWNER}(batch_size={batch_size}): must be a multiple of slice_len={self._unit}.")
        self._model = drawing if num_shards > 1 else None
        # number of updates, and whether this process has written since the last report of the shards
        self._updates, self._has_written = 0, False
        self._takes_priorities = bool(getattr(buffer.sampler, "takes_priorities", False))
        self._largest_td_error = _LARGEST if drawing is None else min(_LARGEST, drawing.largest_td_error)
        self.batch_size, self.priority_key = batch_size, priority_key
        self._device = torch.device(device)
        self._rng = None if seed is None else torch.Generator().manual_seed(seed)
        keys: dict[str, Any] = {"traj_key": unravel_key(traj_key), "done_key": unravel_key(done_key)}
        calls = calls or RayCalls({"num_cpus": 1, **(remote_config or {})})
        seeds = [None if seed is None else seed + 1 + number for number in range(num_shards)]
        shards = [{**parts, "number": n, "seed": s, "is_alone": num_shards == 1} for n, s in enumerate(seeds)]
        self._group = ShardGroup(calls, shards, on_loss or warn, timeout)
        self._make_writer = partial(ShardWriter, self._group.handles, calls, **keys, timeout=timeout)
        self._writer = self._make_writer(on_loss=on_loss)

    # --- writes

    def client(self) -> ShardWriter:
        """A writer for one more process, which can be sent there."""
        return self._make_writer()

    def clients(self, num_clients: int) -> list[ShardWriter]:
        """A writer for each of ``num_clients`` processes."""
        return [self.client() for _ in range(num_clients)]

    def extend(self, data: TensorDictBase) -> None:
        """Write transitions [n], those of each episode in time order; see :meth:`ShardWriter.extend`."""
        self._has_written = True
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
        group, model, wanted = self._group, self._model, self.batch_size // self._unit
        # again if a process ends during the draw
        for _ in range(1 + len(group)):
            division = self._divide(wanted)
            answers = [answer for answer in self._exchange(None, division) if answer is not None]
            parts = [rows for rows, _ in answers if rows]
            if sum(map(num_rows, parts)) == self.batch_size:
                break
            self._has_written = True
        else:
            raise Lost(f"{OWNER}.sample: processes of shards have ended during each of {1 + len(group)} draws.")
        batch = join(parts, self._unit, self._rng)
        if model is not None:
            probability = batch.pop(DENSITY, None)
            if probability is not None and "beta" in model.hyperparameters:
                smallest, beta = [least for _, least in answers], model.hyperparameters["beta"].value
                batch["priority_weight"] = weights(probability, smallest, beta)
            model.count_batch()
        return from_arrays(batch).to(self._device)

    def _divide(self, num_draws: int) -> list[Any]:
        """Divide a batch, by sums that include the writes of this process. RuntimeError if nothing can be drawn."""
        group = self._group
        if self._has_written or not group.can_draw:
            group.call("report")
            self._has_written = False
        if not group.can_draw:
            # if the processes of all shards have ended
            group.wait(1)
        if (division := divide(self._model, group.reports, num_draws, self._rng)) is not None:
            return division
        lost = f"; {group.lost_shards} processes of shards have ended so far" if group.lost_shards else ""
        raise (Lost if group.lost_shards else RuntimeError)(
            f"{OWNER}.sample: no transition can be drawn: the buffer is empty, or all priorities are 0{lost}."
        )

    def _exchange(self, updates: list[Arrays] | None, division: list[Any] | None) -> list[Any]:
        """Send each shard its part of an update or of a batch; see :meth:`ReplayShard.exchange`."""
        reports = self._group.reports

        def arguments(number: int) -> tuple[bytes]:
            others = [report for other, report in enumerate(reports) if other != number]
            call = (
                None if updates is None else updates[number],
                None if division is None else division[number],
                max((report.largest_priority for report in others), default=0.0),
                max((report.largest_episode for report in others), default=0),
                self._updates,
            )
            return (pickle.dumps(call, protocol=5),)

        return self._group.call("exchange", arguments)

    # --- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Send the TD errors of a sample to its shards.

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
        self._updates += 1
        if self._model is not None:
            self._model.step()
        self._exchange(split(columns, shard, len(group)), None)

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
        shares = {f"eta_{name}": share for name, share in getattr(self._model, "eta", {}).items()}
        return {**combine(found), **shares, "shards": len(found), **lost}

    def empty(self) -> None:
        """Remove all transitions. Late updates of their rows are dropped.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds; nothing is changed then.
        """
        self._group.call_all("empty")

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, copied to this process.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        return {"shards": self._group.call_all("state_dict"), **self._counts()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Late updates of replaced rows are dropped.

        Raises:
            ValueError: if it has another number of shards; nothing is changed then.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.

        After another error, some shards may have been restored: load again, or call :meth:`empty`.
        """
        self._load(state_dict["shards"], state_dict)

    def dumps(self, path: str | Path) -> None:
        """Save all shards under the directory ``path``, which all hosts must share, as one unit.

        The checkpoint becomes valid when the last shard has been written; an earlier checkpoint at this path remains
        valid until then.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds. The old checkpoint remains.
        """
        directory = Path(path).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        before = [*directory.glob("[0-9]*")]
        new = directory / str(1 + max((int(entry.name) for entry in before), default=0))
        new.mkdir()
        self._group.call_all("dumps", lambda number: (file_of(new, number),))
        torch.save(self._counts(), new / _COUNTS)
        (new / _COMPLETE).touch()
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
        files = [file_of(newest, number) for number in range(len([*newest.glob("*.pt")]))]
        self._load(files, torch.load(newest / _COUNTS))

    def _counts(self) -> dict[str, Any]:
        """The number of updates, and the state of the schedules that count updates and batches."""
        return {"updates": self._updates, "model": self._model.state_dict() if self._model else {}}

    def _load(self, sources: list[Any], state: dict[str, Any]) -> None:
        """Replace the content of all shards; ``sources``: for each, see :meth:`ReplayShard.restore`."""
        if len(sources) != len(self._group):
            raise ValueError(
                f"{OWNER}: the checkpoint has {len(sources)} shards, this buffer has {len(self._group)}; use "
                f"num_shards={len(sources)}."
            )
        self._group.call_all("restore", lambda number: (sources[number], state["updates"]))
        self._updates = state["updates"]
        if self._model is not None:
            self._model.load_state_dict(state["model"])

    def shutdown(self) -> None:
        """End all shards."""
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
