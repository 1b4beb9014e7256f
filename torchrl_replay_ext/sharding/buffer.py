"""A replay buffer whose transitions are spread over several processes, with the draws of a single buffer."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext.arguments import require_integer, shown
from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.samplers.event_table import EventTableSampler
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, ShardRows
from torchrl_replay_ext.sharding.processes import Shards, start_shards, warn
from torchrl_replay_ext.sharding.shard import (
    DENSITY,
    OWNER,
    SHARD_KEY,
    Arrays,
    drawing_sampler,
    from_arrays,
    num_rows,
    split,
    take,
)
from torchrl_replay_ext.sharding.writer import ShardWriter
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage

# the last file of a checkpoint: the state of the schedules
_SETTINGS = "settings"
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
        traj_key: entry with trajectory ids. Default: ``("collector", "traj_ids")``.
        done_key: entry that marks the end of an episode. Default: ``("next", "done")``.
        device: device of batches. Default: ``"cpu"``.
        seed: seed of the draws. Default: None, not seeded.
        remote_config: options of ``ray.remote`` for each actor. Default: None, ``{"num_cpus": 1}``.
        on_loss: called with a message about each loss. Default: None, a UserWarning.
        timeout: the longest time to wait, in seconds, until Ray has started lost processes again: draws and writes
            wait if all are lost, checkpoints if one is. Default: 60.

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
    ):
        require_integer(OWNER, "num_shards", num_shards)
        require_integer(OWNER, "batch_size", batch_size)
        parts = {
            "storage": storage,
            "sampler": sampler or RandomSampler,
            "writer": writer,
            "priority_key": priority_key,
        }
        # like those of the shards, made to check the arguments before a process is started, to divide batches, and to
        # keep the schedules of hyperparameters; of a copy, because event tables belong to one storage
        buffer = CompilableReplayBuffer(**deepcopy(parts))
        made, model, name = buffer.storage, drawing_sampler(buffer.sampler), f"{OWNER}(num_shards={num_shards})"
        if not isinstance(made, CompilableTensorStorage) or made.ndim != 1 or str(made.device) not in ("cpu", "auto"):
            raise ValueError(f"{OWNER}(storage=...): shards need a CompilableTensorStorage with ndim=1 on the CPU.")
        if model is not None and num_shards > 1:
            if model.shard_sums() is None:
                raise ValueError(
                    f"{name}: {buffer.sampler!r} needs all transitions in one place; use RandomSampler, "
                    "ProportionalSampler, ReaPERSampler or EventTableSampler with correction=None or 'mixture'."
                )
            if model.slots.within_buffer:
                raise ValueError(f"{name}: max_priority_within_buffer=True needs the priorities of all shards.")
        self._unit = getattr(buffer.sampler, "slice_len", 1)
        if batch_size % self._unit:
            raise ValueError(f"{OWNER}(batch_size={batch_size}): must be a multiple of slice_len={self._unit}.")
        self._model, self._largest_td_error = model, _LARGEST
        if model is not None:
            limit = max(model.max_supported_priority - model.slots.eps, 0.0)
            self._largest_td_error = min(_LARGEST, limit**2 if model.slots.td_error == "squared" else limit)
        self.batch_size, self.priority_key = batch_size, priority_key
        self._device, self._rng = torch.device(device), np.random.default_rng(seed)
        self._keys: dict[str, Any] = {"traj_key": traj_key, "done_key": done_key}
        seeds = [None if seed is None else seed + 1 + number for number in range(num_shards)]
        shards = [{**parts, "number": n, "seed": s} for n, s in enumerate(seeds)]
        self._shards = start_shards(shards, remote_config or {}, timeout, on_loss or warn)
        self._writer = ShardWriter(self._shards, **self._keys)

    # --- writes

    def client(self) -> ShardWriter:
        """A writer for one more process, which can be sent there."""
        shards = self._shards
        return ShardWriter(Shards(shards.handles, shards.timeout, reports=shards.reports), **self._keys)

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
        parts, smallest, model = list[Arrays](), list[float](), self._model
        # again if a process ends during the draw
        while sum(map(num_rows, parts)) < self.batch_size:
            answers = [answer for answer in self._shards.call("draw", self._divide().__getitem__) if answer]
            parts = [rows for rows, _ in answers if rows]
            smallest = [least for _, least in answers if least is not None]
        columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        order = self._rng.permutation(self.batch_size // self._unit)[:, None] * self._unit + np.arange(self._unit)
        batch = take(columns, order.reshape(-1))
        probability = batch.pop(DENSITY, None)
        if model is not None:
            if probability is not None and "beta" in model.hyperparameters:
                # relative to the smallest one of all shards, or of the batch if shards do not know theirs
                relative = probability / min(smallest, default=probability.min())
                weight = np.minimum(relative ** -float(model.hyperparameters["beta"].value), 1.0)
                batch["priority_weight"] = weight.astype(np.float32)
            model.count_batch()
        return from_arrays(batch).to(self._device)

    def _divide(self) -> list[tuple[bytes]]:
        """Divide a batch among shards by their sums; returns the argument of each :meth:`ReplayShard.draw`.

        Let M_sk be the mass of table k in shard s. The shard of each row of table k is s with probability M_sk / Σ_s
        M_sk, and the shard draws it from its own table. So each transition has the probability that it has in one
        buffer with all transitions. If the sums are out of date, it has another one, which the shard computes for the
        weights.

        Raises:
            RuntimeError: if nothing can be drawn.
        """
        shards, model, number = self._shards, self._model, self.batch_size // self._unit
        if not any(any(report.sums.mass) for report in shards.reports):
            # other processes may have written the first transitions, or started
            shards.wait(1)
            shards.call("report")
        sums = [report.sums for report in shards.reports]
        mass = np.zeros((len(sums), max(len(each.mass) for each in sums)))
        for row, each in zip(mass, sums, strict=True):
            row[:] = each.mass
        total = mass.sum(0)
        if not total.any():
            lost = f"; {shards.lost_shards} processes of shards have ended so far" if shards.lost_shards else ""
            raise RuntimeError(
                f"{OWNER}.sample: no transition can be drawn: the buffer is empty, or all priorities are 0{lost}."
            )
        counts, rows, eta = [each.count for each in sums if each.count is not None], [number], np.ones(1)
        count = np.sum(counts, 0) if counts else None
        if count is not None and isinstance(model, EventTableSampler):
            rows, eta = model.rows_of_tables(total, count, number, self._rng.random(number))
        probability = mass / np.where(total > 0, total, 1.0)
        divided = np.stack([self._rng.multinomial(*each) for each in zip(rows, probability.T, strict=True)], 1)
        states = {name: each.state().numpy() for name, each in self._settings().items() if each.annealed}
        largest, packed = max(report.largest_priority for report in shards.reports), []
        for shard, part in enumerate(zip(divided, probability, strict=True)):
            episodes = [each.largest_episode for other, each in enumerate(sums) if other != shard]
            message = ShardRows(*part, eta, count), states, largest, max(episodes, default=0)
            packed.append((pickle.dumps(message),))
        return packed

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
        model, num_shards, name = self._model, len(self._shards), f"{OWNER}.update_tensordict_priority"
        if model is None or not model.takes_priorities:
            return
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
        if len(shard) and not 0 <= shard.min() <= shard.max() < num_shards:
            raise ValueError(
                f"{name}: the entry {SHARD_KEY!r} must lie in [0, {num_shards - 1}], but has {shard.min()} to "
                f"{shard.max()}; pass a batch of this buffer."
            )
        parts = split(columns, shard, num_shards)
        self._shards.call("update", lambda number: (pickle.dumps(parts[number]),) if num_rows(parts[number]) else None)
        model.step()

    # --- the rest of a buffer

    def __len__(self) -> int:
        self._shards.call("report")
        return sum(report.length for report in self._shards.reports)

    @property
    def write_count(self) -> int:
        """Sum of the shards' write counts; it falls if a shard is started again."""
        self._shards.call("report")
        return sum(report.written for report in self._shards.reports)

    def stats(self) -> dict[str, float]:
        """Statistics for logging. O(N) in each shard.

        Those of the sampler's ``stats()``, over all shards: numbers of things are added, ``max_priority`` and other
        maxima are the largest, minima the smallest, and the rest is averaged by the numbers of transitions. And
        ``shards``: shards whose process has not ended; ``lost_shards``: processes that have ended so far;
        ``lost_rows``: transitions that they had by their last reports, and those that this process lost on the way.
        """
        shards, model = self._shards, self._model
        answers = zip(shards.call("stats"), shards.reports, strict=True)
        found = [(stats, report.length) for stats, report in answers if stats is not None]
        stats: dict[str, float] = combine(found)
        if model is not None:
            # not those of the shards' last draws
            stats |= {name: float(exponent.value) for name, exponent in model.hyperparameters.items()}
            stats |= {f"eta_{name}": share for name, share in getattr(model, "eta", {}).items()}
        lost_rows = shards.lost_rows + self._writer.lost_rows
        return stats | {"shards": len(found), "lost_shards": shards.lost_shards, "lost_rows": lost_rows}

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
        return {"shards": self._shards.call_all("state_dict"), _SETTINGS: self._saved_settings()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Late updates of replaced rows are dropped.

        Raises:
            ValueError: if it has another number of shards; nothing is changed then.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.

        After another error, some shards may have been restored: load again, or call :meth:`empty`.
        """
        self._load(state_dict["shards"], state_dict[_SETTINGS])

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
        self._shards.call_all("dumps", lambda number: (file_of(new, number),))
        torch.save(self._saved_settings(), new / "unfinished")
        (new / "unfinished").rename(new / _SETTINGS)
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
        complete = [last.parent for last in directory.glob(f"[0-9]*/{_SETTINGS}")]
        if not complete:
            raise FileNotFoundError(f"{directory} has no complete checkpoint of a {OWNER}.")
        newest = max(complete, key=lambda entry: int(entry.name))
        files = [file_of(newest, number) for number in range(len([*newest.glob("*.pt")]))]
        self._load(files, torch.load(newest / _SETTINGS))

    def _settings(self) -> dict[str, Any]:
        """The hyperparameters; this object counts updates and batches for all shards."""
        return {} if self._model is None else self._model.settings()

    def _saved_settings(self) -> dict[str, torch.Tensor]:
        return {name: setting.state() for name, setting in self._settings().items()}

    def _load(self, sources: list[Any], settings: dict[str, torch.Tensor]) -> None:
        """Replace the content of all shards; ``sources``: for each, see :meth:`ReplayShard.restore`."""
        if len(sources) != len(self._shards):
            raise ValueError(
                f"{OWNER}: the checkpoint has {len(sources)} shards, this buffer has {len(self._shards)}; use "
                f"num_shards={len(sources)}."
            )
        self._shards.call_all("restore", lambda number: (sources[number],))
        for name, setting in self._settings().items():
            setting.load(settings[name])

    def shutdown(self) -> None:
        """End all shards."""
        self._shards.stop()


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
