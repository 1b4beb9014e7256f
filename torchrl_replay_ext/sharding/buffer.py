"""A replay buffer whose transitions are spread over several processes, with the draws of a single buffer."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext.arguments import require_integer
from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.core.streams import Episodes, require_episodes
from torchrl_replay_ext.samplers.base import ReplaySampler
from torchrl_replay_ext.samplers.event_table import EventTableSampler
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, ShardRows
from torchrl_replay_ext.sharding.processes import Shards, ray_module, warn
from torchrl_replay_ext.sharding.shard import (
    DENSITY,
    OWNER,
    SHARD_KEY,
    ReplayShard,
    dividing_sampler,
    from_arrays,
    split,
    take,
    to_arrays,
)
from torchrl_replay_ext.sharding.writer import ShardWriter

# the last file of a checkpoint: the names of the others, and the state of the schedules
_INDEX = "checkpoint.pt"


class ShardedReplayBuffer:
    r"""A replay buffer split between Ray actors, called shards. Draws follow the distribution of a single buffer.

    Each shard is a :class:`~torchrl_replay_ext.CompilableReplayBuffer`. This object, the coordinator, belongs to the
    learner. It divides each batch by one multinomial draw over the sums of the shards' priorities, so that a transition
    has the probability that it would have in one buffer with all transitions, and it computes the importance-sampling
    weights. All shards draw at the same time.

    * **Episodes** stay in one shard: a new one goes to the shard to which the fewest transitions were sent. They need
      trajectory ids that are unique among all writers, and the ends of episodes.
    * **Collectors** write to the shards directly: pass this object as ``replay_buffer`` to TorchRL's RayCollector, or
      give each process one of :meth:`clients`.
    * **Samplers**: TorchRL's RandomSampler, :class:`~torchrl_replay_ext.ProportionalSampler`,
      :class:`~torchrl_replay_ext.ReaPERSampler` (with the largest sum of an episode of all shards as F; the sum of a
      shard is that of d^α times a running mean of R^ω),
      :class:`~torchrl_replay_ext.EventTableSampler` (a table is the union of the shards' tables; uniform or
      ``kind="proportional"``; ``correction="mixture"`` with ``retention="ring"``) and
      :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`. Others are refused for more than one shard. Rank-based
      priorities need the order of all priorities: a merge of histograms would only give approximate ranks.
    * **Sums** are those after the last draw, update or write of this process. If other processes write meanwhile,
      transitions have slightly other probabilities than in one buffer. Weights, where the sampler has them, are
      those of the probability that each row really had.
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
        episodes: the entries with trajectory ids and with the ends of episodes. Default: None, as
            :class:`~torchrl_replay_ext.Episodes` says.
        device: device of batches. Default: ``"cpu"``.
        seed: seed of the draws. Default: None, not seeded.
        remote_config: options of ``ray.remote`` for each actor. Default: None, ``{"num_cpus": 1}``.
        on_loss: called with a message about each loss. Default: None, a UserWarning.
        timeout: the longest time to wait, in seconds, until Ray has started processes: at first, and when it starts
            lost ones again. Draws and writes wait if all are lost, checkpoints if one is. Default: 60.

    Raises:
        TypeError: if the storage is of another class, or a number is not an integer.
        ValueError: if a number is out of range, or the storage or the sampler cannot be used in shards.
        RuntimeError: if the shards are not started in ``timeout`` seconds.

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
        episodes: Episodes | None = None,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        remote_config: dict[str, Any] | None = None,
        on_loss: Callable[[str], None] | None = None,
        timeout: float = 60.0,
    ):
        require_integer(OWNER, "num_shards", num_shards)
        require_integer(OWNER, "batch_size", batch_size)
        arguments = {"storage": storage, "sampler": sampler or RandomSampler, "writer": writer}
        arguments |= {"priority_key": priority_key}
        # like those of the shards, made to check the arguments before a process is started, to divide batches, and to
        # keep the schedules of hyperparameters; of a copy, because event tables belong to one storage
        buffer = CompilableReplayBuffer(**deepcopy(arguments))
        made: Any = buffer.storage
        if made.ndim != 1 or str(made.device) not in ("cpu", "auto"):
            raise ValueError(f"{OWNER}(storage=...): shards need a CompilableTensorStorage with ndim=1 on the CPU.")
        drawing, self._model = (
            getattr(buffer.sampler, "starts_sampler", buffer.sampler),
            dividing_sampler(buffer.sampler),
        )
        is_whole = num_shards == 1 and isinstance(drawing, ReplaySampler)
        if self._model is None and type(drawing) is not RandomSampler and not is_whole:
            raise ValueError(
                f"{OWNER}(num_shards={num_shards}): {buffer.sampler!r} needs all transitions in one place, or the "
                "policy; use RandomSampler, ProportionalSampler, ReaPERSampler or EventTableSampler with correction="
                "None or 'mixture', without max_priority_within_buffer=True."
            )
        self._takes_priorities = getattr(buffer.sampler, "takes_priorities", False)
        # hyperparameters, whose schedules count the updates and batches of all shards here; a shard that draws as any
        # other buffer keeps them itself
        self._settings: dict[str, Any] = {} if self._model is None else self._model.settings()
        # rows that are drawn together
        self._unit = getattr(buffer.sampler, "slice_len", 1)
        if batch_size % self._unit:
            raise ValueError(f"{OWNER}(batch_size={batch_size}): must be a multiple of slice_len={self._unit}.")
        self.batch_size, self.priority_key = batch_size, priority_key
        self._device, self._rng = torch.device(device), np.random.default_rng(seed)
        self._episodes = require_episodes(OWNER, episodes)
        options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, **(remote_config or {})}
        actor = ray_module().remote(ReplayShard).options(**options)
        handles = [actor.remote(number=number, seed=seed, **arguments) for number in range(num_shards)]
        self._shards = Shards(handles, timeout, on_loss=on_loss or warn)
        # wait until they have started
        self._shards.call_all("report")
        self._writer = ShardWriter(self._shards, self._episodes)

    # --- writes

    def client(self) -> ShardWriter:
        """A writer for one more process, which can be sent there."""
        shards = self._shards
        return ShardWriter(Shards(shards.handles, shards.timeout, reports=shards.reports), self._episodes)

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
            RuntimeError: if no transition can be drawn.
        """
        parts, smallest = [], []
        # again if a process ends during the draw
        while sum(len(rows[SHARD_KEY]) for rows in parts) < self.batch_size:
            answers = self._shards.call("draw", self._divide()).values()
            parts = [rows for rows, _ in answers if rows]
            smallest = [least for _, least in answers if least]
        columns = {key: np.concatenate([rows[key] for rows in parts]) for key in parts[0]}
        order = self._rng.permutation(self.batch_size // self._unit)[:, None] * self._unit + np.arange(self._unit)
        batch = take(columns, order.reshape(-1))
        probability = batch.pop(DENSITY, None)
        if probability is not None and "beta" in self._settings:
            # relative to the smallest one of all shards, or of the batch if shards do not know theirs
            relative = probability / min(smallest, default=probability.min())
            weight = np.minimum(relative ** -self._settings["beta"].value.item(), 1.0)
            batch["priority_weight"] = weight.astype(np.float32)
        if self._model is not None:
            self._model.count_batch()
        return from_arrays(batch).to(self._device)

    def _divide(self) -> dict[int, ShardRows]:
        """Divide a batch among shards by their sums; returns the argument of :meth:`ReplayShard.draw`, by shard.

        Let M_sk be the mass of table k in shard s. The shard of each row of table k is s with probability M_sk / Σ_s
        M_sk, and the shard draws it from its own table. So each transition has the probability that it has in one
        buffer with all transitions. If the sums are out of date, it has another one, which the shard computes for the
        weights.

        Raises:
            RuntimeError: if nothing can be drawn.
        """
        shards, model, number = self._shards, self._model, self.batch_size // self._unit
        if not any(any(report.sums.mass) for report in shards.reports.values()):
            # other processes may have written the first transitions, or started
            shards.wait(1)
            shards.call("report")
        reports = shards.reports.values()
        mass = np.array([report.sums.mass for report in reports])
        total = mass.sum(0)
        if not total.any():
            raise RuntimeError(
                f"{OWNER}.sample: no transition can be drawn: the buffer is empty, or all priorities are 0."
            )
        count, rows, eta = np.sum([report.sums.count for report in reports], 0), np.array([number]), np.ones(1)
        if isinstance(model, EventTableSampler):
            rows, eta = model.rows_of_tables(total, count, number, self._rng.random(number))
        probability = mass / np.where(total > 0, total, 1.0)
        divided = np.stack([self._rng.multinomial(*each) for each in zip(rows, probability.T, strict=True)], 1)
        common = (
            eta.tolist(),
            count.tolist(),
            max(report.largest_priority for report in reports),
            max(report.sums.largest_episode for report in reports),
            {name: setting.state().tolist() for name, setting in self._settings.items() if setting.annealed},
        )
        parts = zip(divided.tolist(), probability.tolist(), strict=True)
        return {shard: ShardRows(*part, *common) for shard, part in zip(shards.reports, parts, strict=True)}

    # --- priorities

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Send the TD errors of a sample to its shards.

        Args:
            data: a sample, whole or in part, with TD errors.

        Raises:
            KeyError: if an entry is missing. Nothing is changed then.
            ValueError: if a TD error is negative, not finite or too large. Other shards may have applied theirs then.
        """
        if not self._takes_priorities:
            return
        # TD errors may have a dtype that NumPy lacks
        data = data.select("index", SHARD_KEY, STAMP_KEY, self.priority_key).reshape(-1)
        rows = to_arrays(data.set(self.priority_key, data[self.priority_key].float()))
        shard = rows.pop(SHARD_KEY)
        self._shards.call("update", {number: pickle.dumps(part) for number, part in split(rows, shard).items()})
        if self._model is not None:
            self._model.step()

    # --- the rest of a buffer

    def __len__(self) -> int:
        return sum(report.length for report in self._shards.call("report").values())

    @property
    def write_count(self) -> int:
        """Sum of the shards' write counts; it falls if a shard is started again."""
        return sum(report.written for report in self._shards.call("report").values())

    def stats(self) -> dict[str, float]:
        """Statistics for logging. O(N) in each shard.

        Those of the sampler's ``stats()``, over all shards: numbers of things are added, ``max_priority`` and other
        maxima are the largest, minima the smallest, and the rest is averaged by the numbers of transitions. And
        ``shards``: shards whose process has not ended; ``lost_shards``: processes that have ended so far;
        ``lost_rows``: transitions that they had by their last reports.
        """
        shards = self._shards
        answers = shards.call("stats")
        lengths = [shards.reports[number].length for number in answers]
        keys = next(iter(answers.values()), {}).keys()
        combined = {key: combine(key, [stats[key] for stats in answers.values()], lengths) for key in keys}
        # not those of the shards' last draws
        combined |= {name: setting.value.item() for name, setting in self._settings.items() if name in combined}
        lost = {"lost_shards": shards.lost_shards, "lost_rows": shards.lost_rows}
        return {**combined, "shards": len(answers), **lost}

    def empty(self) -> None:
        """Remove all transitions. Late updates of their rows are dropped.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds; nothing is changed then.
        """
        self._shards.call_all("empty")

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, copied to this process.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        return {"shards": self._shards.call_all("state_dict"), "settings": self._saved_settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Late updates of replaced rows are dropped.

        Raises:
            ValueError: if it has another number of shards; nothing is changed then.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.

        After another error, some shards may have been restored: load again, or call :meth:`empty`.
        """
        sources = state_dict["shards"]
        if len(sources) != len(self._shards):
            raise ValueError(f"{OWNER}: the checkpoint needs a buffer with num_shards={len(sources)}.")
        self._shards.call_all("restore", sources)
        for name, setting in self._settings.items():
            setting.load(state_dict["settings"][name])

    def dumps(self, path: str | Path) -> None:
        """Save all shards under the directory ``path``, which all hosts must share, as one unit.

        The checkpoint becomes valid when the last shard has been written; an earlier checkpoint at this path remains
        valid until then.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds. The old checkpoint remains.
        """
        directory, unique = Path(path).absolute(), secrets.token_hex(8)
        directory.mkdir(parents=True, exist_ok=True)
        names = [f"shard{number}-{unique}.pt" for number in range(len(self._shards))]
        self._shards.call_all("save", [str(directory / name) for name in names])
        torch.save({"shards": names, "settings": self._saved_settings()}, directory / unique)
        (directory / unique).replace(directory / _INDEX)
        for file in directory.glob("shard[0-9]*-*.pt"):
            if file.name not in names:
                file.unlink()

    def loads(self, path: str | Path) -> None:
        """Restore a checkpoint of :meth:`dumps`; see :meth:`load_state_dict`. FileNotFoundError if there is none."""
        directory = Path(path).absolute()
        index = torch.load(directory / _INDEX)
        self.load_state_dict({**index, "shards": [str(directory / name) for name in index["shards"]]})

    def _saved_settings(self) -> dict[str, torch.Tensor]:
        return {name: setting.state() for name, setting in self._settings.items()}

    def shutdown(self) -> None:
        """End all shards."""
        for handle in self._shards.handles:
            ray_module().kill(handle, no_restart=True)


def combine(key: str, values: list[float], lengths: list[int]) -> float:
    """A number of the statistics of several shards, each with its length, as that of one buffer."""
    if key.startswith(("num_", "size_", "dropped", "rejected", "interrupted", "repeated")):
        return sum(values)
    if "max" in key or "min" in key:
        return max(values) if "max" in key else min(values)
    return float(np.average(values, weights=lengths if any(lengths) else None))
