"""A replay buffer whose transitions are spread over several processes, with the draws of a single buffer."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext.arguments import key_path, require_bool, require_integer, shown
from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer
from torchrl_replay_ext.samplers.adapter import STAMP_KEY
from torchrl_replay_ext.samplers.trajectory import MASK_KEY
from torchrl_replay_ext.sharding.arrays import (
    DENSITY,
    OWNER,
    SHARD_KEY,
    Arrays,
    concatenate,
    from_arrays,
    num_rows,
    split,
)
from torchrl_replay_ext.sharding.calls import Calls, Lost, RayCalls
from torchrl_replay_ext.sharding.group import ShardGroup
from torchrl_replay_ext.sharding.joint_draw import Division, JointDraw, choose, weights
from torchrl_replay_ext.sharding.shard import drawing_sampler, joint_sampler, rows_per_unit
from torchrl_replay_ext.sharding.writer import ShardWriter

_MAX_ROUNDS = 50
_LARGEST = float(np.finfo(np.float32).max)


class Request(NamedTuple):
    """A batch that was requested from the shards.

    Args:
        division: how it was divided.
        rows: number of rows or proposals that were requested.
        answers: reference to the answer of each shard; None for lost shards.
        incarnations: the incarnation of each shard.
        updates: number of updates that the shards apply before they draw.
        stale_updates: number of these updates that the sums did not include.
        written: number of transitions ever written, by these sums.
    """

    division: Division
    rows: int
    answers: list[Any]
    incarnations: list[int]
    updates: int
    stale_updates: int
    written: int


class ShardedReplayBuffer:
    r"""A replay buffer split between Ray actors, called shards. Draws follow the distribution of a single buffer.

    Each shard is a :class:`~torchrl_replay_ext.CompilableReplayBuffer`. This object, the coordinator, belongs to the
    learner. It splits each draw between the shards in proportion to the sums of their priorities, so that a transition
    has the probability that it would have in one buffer with all transitions. Importance-sampling weights use the sum,
    the smallest probability and the largest priority of all shards. Batches are fetched from all shards at the same
    time, ahead of use.

    * **Episodes** stay in one shard: a new one goes to the shard with the fewest transitions. This needs
      trajectory ids (``traj_key``) that are unique among all writers, unless there is a single environment.
    * **Collectors** write to the shards directly: pass this object as ``replay_buffer`` to TorchRL's RayCollector, or
      give each process one of :meth:`clients`.
    * **Samplers**: TorchRL's RandomSampler, :class:`~torchrl_replay_ext.ProportionalSampler`,
      :class:`~torchrl_replay_ext.ReaPERSampler` (with the largest sum of an episode of all shards as F),
      :class:`~torchrl_replay_ext.EventTableSampler` (a table is the union of the shards' tables; uniform or
      ``kind="proportional"``; ``correction="mixture"`` with ``retention="ring"``) and
      :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`. Others are refused for more than one shard. Rank-based
      priorities need the order of all priorities: a merge of histograms would only give approximate ranks.
    * **Staleness**: with ``prefetch=n`` and one update per batch, a draw is split by sums that include all but the last
      n + 1 updates. Weights, where the sampler has them, are those of the probability that each row really had.
      :meth:`stats` reports how many updates and writes the sums of the last batch had missed. ``two_phase=True`` reads
      all sums before each draw instead, in a second round trip; without concurrent writes the draw is then exact.
    * **Late updates**, of transitions that were overwritten or whose shard was started again, are dropped.
    * **Lost processes**: if the process of a shard ends, a warning says how many transitions are gone. Draws go on with
      the other shards. Ray starts the process again, and the shard continues from the last :meth:`dumps`, or empty.

    Args:
        num_shards: number of shards, >= 1.
        storage: constructor of the storage of a shard: ``partial(CompilableTensorStorage, capacity)``.
        sampler: constructor of the sampler of a shard. Default: None, TorchRL's RandomSampler.
        writer: constructor of the writer of a shard. Default: None, the default writer.
        batch_size: number of rows of a batch.
        priority_key: entry with TD errors. Default: ``"td_error"``.
        traj_key: entry with trajectory ids. Default: ``("collector", "traj_ids")``.
        done_key: entry that marks the end of an episode. Default: ``("next", "done")``.
        prefetch: number of batches that are requested ahead while the learner works on one, >= 0. Default: 1.
        two_phase: see above; needs ``prefetch=0``. Default: False.
        device: device of batches. Default: ``"cpu"``.
        seed: seed of the draws. Default: None, not seeded.
        remote_config: options of ``ray.remote`` for each actor. Default: None, ``{"num_cpus": 1}``.
        restored: called with the number of a shard that was started again; returns its :meth:`state_dict`, or None for
            an empty shard. Default: None, the shard continues from the last :meth:`dumps`.
        on_loss: called with a message if the process of a shard has ended. Default: None, a UserWarning.
        timeout: the longest time to wait, in seconds, until Ray has started lost processes again: draws and writes
            wait if all are lost, checkpoints if one is. Default: 60.
        calls: starts and calls the shards. Default: None, Ray.

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
        two_phase: bool = False,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        remote_config: dict[str, Any] | None = None,
        restored: Callable[[int], dict[str, Any] | None] | None = None,
        on_loss: Callable[[str], None] | None = None,
        timeout: float = 60.0,
        calls: Calls | None = None,
    ):
        require_integer(OWNER, "num_shards", num_shards)
        require_integer(OWNER, "batch_size", batch_size)
        require_integer(OWNER, "prefetch", prefetch, least=0)
        require_bool(OWNER, "two_phase", two_phase)
        if two_phase and prefetch:
            raise ValueError(f"{OWNER}(two_phase=True): pass prefetch=0; batches drawn ahead miss updates.")
        # like those of the shards; made to check the arguments before a process is started, and to divide draws
        parts = {
            "storage": storage,
            "sampler": sampler or RandomSampler,
            "writer": writer,
            "priority_key": priority_key,
        }
        # a copy, because event tables belong to one storage
        buffer = CompilableReplayBuffer(**deepcopy(parts))
        joint_sampler(buffer.sampler)
        if buffer.storage.ndim != 1 or str(getattr(buffer.storage, "device", "cpu")) not in ("cpu", "auto"):
            raise ValueError(f"{OWNER}(storage=...): shards need a storage with ndim=1 on the CPU.")
        drawing = drawing_sampler(buffer.sampler)
        reason = None if drawing is None else drawing.distribution.why_not_joint
        if reason is not None and num_shards > 1:
            raise ValueError(f"{OWNER}(num_shards={num_shards}): {type(buffer.sampler).__name__}: {reason}")
        if drawing is not None and num_shards > 1 and drawing.state.priorities.within_buffer:
            raise ValueError(
                f"{OWNER}(num_shards={num_shards}): max_priority_within_buffer=True needs the priorities of all "
                "shards; leave it out."
            )
        self._unit = rows_per_unit(buffer.sampler)
        if batch_size % self._unit:
            raise ValueError(f"{OWNER}(batch_size={batch_size}): must be a multiple of slice_len={self._unit}.")
        # the sampler itself makes the draws of a single shard, with weights
        self._is_whole = reason is not None
        self._joint = JointDraw(None if drawing is None or self._is_whole else drawing.distribution)
        self._takes_priorities = bool(getattr(buffer.sampler, "takes_priorities", False))
        self.batch_size, self.priority_key, self.prefetch = batch_size, priority_key, prefetch
        self._two_phase, self._device = two_phase, torch.device(device)
        self._rng = None if seed is None else torch.Generator().manual_seed(seed)
        self._calls: Calls = RayCalls({"num_cpus": 1, **(remote_config or {})}) if calls is None else calls
        self._writer_settings: dict[str, Any] = {"traj_key": traj_key, "done_key": done_key, "timeout": timeout}
        parts |= {"traj_key": traj_key, "done_key": key_path(done_key)}
        shards = [{**parts, "seed": None if seed is None else seed + 1 + number} for number in range(num_shards)]
        self._group = ShardGroup(self._calls, shards, restored, on_loss or _warn, timeout)
        self._num_writers = 0
        self._writer = self.client()
        self._requests: deque[Request] = deque()
        # answers to updates that were sent without a request
        self._sent: deque[tuple[list[Any], list[int], int]] = deque()
        # number of updates, and of those that the newest sums include
        self._num_updates = self._included = 0
        self._stale = {"stale_updates": 0, "stale_writes": 0}

    # --- writes

    def client(self) -> ShardWriter:
        """A writer for one more process, which can be sent there."""
        self._num_writers += 1
        return ShardWriter(self._group.handles, self._calls, number=self._num_writers, **self._writer_settings)

    def clients(self, num_clients: int) -> list[ShardWriter]:
        """A writer for each of ``num_clients`` processes."""
        return [self.client() for _ in range(num_clients)]

    def extend(self, data: TensorDictBase) -> None:
        """Write transitions [n], those of each episode in time order; see :meth:`ShardWriter.extend`."""
        self._group.restore_lost()
        self._writer.note(self._group.reports, self._group.incarnations)
        self._writer.extend(data, while_waiting=self._group.restore_lost)
        self._group.note(self._writer.reports)

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
            self._requests.append(self._request(None))
        request, wanted = self._requests.popleft(), self.batch_size // self._unit
        parts, found, first = list[Arrays](), 0, request
        for _ in range(_MAX_ROUNDS):
            rows = self._receive(request)
            parts += rows
            new = sum(map(num_rows, rows)) // self._unit
            self._joint.update_acceptance(request.rows, new)
            found += new
            if found >= wanted:
                break
            request = self._request(None, rows=wanted - found)
        else:
            raise RuntimeError(f"{OWNER}.sample: found only {found} of {wanted} rows in {_MAX_ROUNDS} rounds.")
        batch = choose(concatenate(parts), wanted, self._unit, self._rng)
        self._weigh(batch, first.division)
        return from_arrays(batch).to(self._device)

    def _request(self, updates: list[Arrays] | None, *, rows: int | None = None) -> Request:
        """Send updates, and request rows: a whole batch if ``rows`` is None."""
        group, batch = self._group, self.batch_size // self._unit
        # a second time if it only turns out now that all shards are lost
        for _ in range(2):
            group.restore_lost()
            if group.num_lost == len(group):
                group.wait(num_lost=len(group) - 1)
            if self._two_phase or not any(report.mass[0] for report in group.reports):
                # the sums are unknown, or must include the updates
                self._send(updates)
                self._receive_updates()
                updates = None
            count = self._joint.proposals(batch if rows is None else rows)
            reports = group.reports
            division = self._joint.divide(reports, count, batch, self._rng)
            if division is not None or not group.num_lost:
                break
        if division is None:
            lost = f"; {group.lost_shards} processes of shards have ended so far" if group.lost_shards else ""
            raise (Lost if group.lost_shards else RuntimeError)(
                f"{OWNER}.sample: no transition can be drawn: the buffer is empty, or all priorities are 0{lost}."
            )
        answers, incarnations = group.exchange(division.rows, updates, counts_batch=rows is None)
        written = sum(report.written for report in reports)
        stale = self._num_updates - self._included
        return Request(division, count, answers, incarnations, self._num_updates, stale, written)

    def _send(self, updates: list[Arrays] | None) -> None:
        """Send updates without a draw."""
        self._sent.append((*self._group.exchange(None, updates), self._num_updates))

    def _receive_updates(self) -> None:
        """Wait for the answers to :meth:`_send`."""
        while self._sent:
            answers, incarnations, updates = self._sent.popleft()
            self._group.collect_rows(answers, incarnations)
            self._included = max(self._included, updates)

    def _receive(self, request: Request) -> list[Arrays]:
        self._receive_updates()
        rows = self._group.collect_rows(request.answers, request.incarnations)
        self._included = max(self._included, request.updates)
        written = sum(report.written for report in self._group.reports)
        self._stale = {
            "stale_updates": request.stale_updates,
            "stale_writes": max(written - request.written, 0),
        }
        return rows

    def _weigh(self, batch: Arrays, division: Division) -> None:
        """Replace the probabilities of the rows by weights."""
        beta = next((report.beta for report in self._group.reports if report.beta is not None), None)
        density = batch.pop(DENSITY, None)
        if beta is None or self._is_whole:
            return
        if density is None:
            batch["priority_weight"] = np.ones(num_rows(batch), dtype=np.float32)
        else:
            batch["priority_weight"] = weights(
                density, beta, self._joint.smallest(division.probability, self._group.reports)
            )

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
        needed = ["index", SHARD_KEY, STAMP_KEY, self.priority_key]
        for key in needed:
            if data.get(key, None) is None:
                raise KeyError(
                    f"{OWNER}.update_tensordict_priority: the sample has no entry {key!r}; pass the batch of sample() "
                    f"to which the loss has written TD errors as {self.priority_key!r}."
                )
        if data.ndim != 1:
            data = data.reshape(-1)
        columns: Arrays = {key: data[key].detach().cpu().numpy() for key in needed[:-1]}
        error = columns[self.priority_key] = data[self.priority_key].detach().to("cpu", torch.float32).numpy()
        padding = columns[STAMP_KEY] < 0
        if padding.any():
            # the TD errors of padded rows are not used
            of_row = padding.reshape(-1, *(1,) * (error.ndim - 1))
            error = columns[self.priority_key] = np.where(of_row, np.float32(0), error)
        limit = min(_LARGEST, *(report.largest_td_error for report in self._group.reports))
        valid = (error >= 0) & (error <= limit)
        if not valid.all():
            raise ValueError(
                f"{OWNER}.update_tensordict_priority: TD errors must lie in [0, {shown(limit)}]; the entry "
                f"{self.priority_key!r} has {error[~valid].reshape(-1)[0]}."
            )
        if data.get(MASK_KEY, None) is not None:
            columns[MASK_KEY] = data[MASK_KEY].cpu().numpy()
        shard = columns.pop(SHARD_KEY)
        if len(shard) and not 0 <= shard.min() <= shard.max() < len(self._group):
            raise ValueError(
                f"{OWNER}.update_tensordict_priority: the entry {SHARD_KEY!r} must lie in [0, {len(self._group) - 1}], "
                f"but has {shard.min()} to {shard.max()}; pass a batch of this buffer."
            )
        # all shards are called, also those without rows, so that their schedules advance alike
        updates = split(columns, shard, len(self._group))
        self._num_updates += 1
        can_draw = any(report.mass[0] for report in self._group.reports)
        if self._two_phase or len(self._requests) > self.prefetch or not can_draw:
            self._send(updates)
        else:
            self._requests.append(self._request(updates))

    # --- the rest of a buffer

    def __len__(self) -> int:
        return sum(report.length for report, _ in self._group.call("report"))

    @property
    def write_count(self) -> int:
        """Sum of the shards' write counts; it falls if a shard is started again."""
        return sum(report.written for report, _ in self._group.call("report"))

    def stats(self) -> dict[str, float]:
        """Statistics for logging. O(N) in each shard.

        Those of the sampler's ``stats()``, over all shards: numbers of things are added, ``max_priority`` and other
        maxima are the largest, minima the smallest, and the rest is averaged by the numbers of transitions. And
        ``shards``: shards whose process has not ended; ``lost_shards`` and ``lost_rows``: lost processes so far, and
        the transitions that they had; ``stale_updates`` and ``stale_writes``: updates and writes that the sums for
        the last batch did not include.
        """
        group = self._group
        answers = group.call("stats")
        reports = [report for report, _ in answers]
        combined = combine([stats for _, stats in answers], [report.length for report in reports])
        if self._takes_priorities and "dropped_updates" in combined:
            combined["dropped_updates"] += sum(report.dropped for report in reports)
        lost = {"lost_shards": group.lost_shards, "lost_rows": group.lost_rows + sum(report.lost for report in reports)}
        return {**combined, "shards": len(reports), **lost, **self._stale}

    def check_valid(self) -> None:
        """Raise AssertionError if the state of a shard is inconsistent. O(N)."""
        self._group.call("check_valid")

    def empty(self) -> None:
        """Remove all transitions. Late updates of their rows are dropped.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds; nothing is changed then.
        """
        self._discard()
        self._group.empty()

    def end_open_episodes(self) -> None:
        """Truncate all episodes that have not ended: a resumed run starts new ones."""
        self._group.call("end_open_episodes")

    def state_dict(self) -> dict[str, Any]:
        """The state of all shards, copied to this process.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        return {"shards": self._group.call_all("state_dict")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`. Batches drawn before cannot update priorities any more.

        Raises:
            ValueError: if it has another number of shards; nothing is changed then.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        self._discard()
        self._group.load(state_dict["shards"])

    def dumps(self, path: str | Path) -> None:
        """Save all shards under the directory ``path``, which all hosts must share, as one unit.

        Each shard writes a directory of its own. The checkpoint becomes valid at once when the last one has been
        written; an earlier checkpoint at this path remains valid until then. Shards that are lost later continue from
        this checkpoint.

        Raises:
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds. The old checkpoint remains.
        """
        self._group.dumps(Path(path).absolute())

    def loads(self, path: str | Path) -> None:
        """Restore a checkpoint of :meth:`dumps`.

        Raises:
            FileNotFoundError: if there is no complete checkpoint.
            ValueError: if it has another number of shards.
            RuntimeError: if a shard is lost and not started again in ``timeout`` seconds.
        """
        self._discard()
        self._group.loads(Path(path).absolute())

    def _discard(self) -> None:
        """Forget the batches that were requested ahead."""
        self._receive_updates()
        while self._requests:
            self._receive(self._requests.popleft())

    def shutdown(self) -> None:
        """End all shards."""
        self._requests.clear()
        self._group.stop()


def _warn(message: str) -> None:
    warnings.warn(f"{OWNER}: {message}.", stacklevel=2)


def combine(each: list[dict[str, float]], lengths: list[int]) -> dict[str, float]:
    """The statistics of several shards as those of one buffer; see :meth:`ShardedReplayBuffer.stats`."""
    if not each:
        return {}
    combined = {}
    share = np.array(lengths) / max(sum(lengths), 1)
    for key in each[0]:
        values = np.array([stats[key] for stats in each])
        if key.startswith(("num_", "size_", "dropped", "rejected", "interrupted", "repeated")):
            combined[key] = float(values.sum())
        elif key.endswith("max") or key.startswith("max_"):
            combined[key] = float(values.max())
        elif key.endswith("min"):
            combined[key] = float(values.min())
        else:
            combined[key] = float((values * share).sum()) if share.any() else float(values.mean())
    return combined
