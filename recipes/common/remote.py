"""Collectors and a replay buffer as Ray actors, on one host or several.

This module can be imported without Ray; :func:`runtime` checks whether Ray is installed.
"""

import importlib.util
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.distributed import RayCollector
from torchrl.data import Binary, Composite, RayReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import EnvBase, GymWrapper, SerialEnv
from torchrl.envs.gym_like import BaseInfoDictReader

from recipes.common.cli import ConfigError, LostProcess
from recipes.common.config import EVENT_TABLES, EnvConfig, RunConfig
from recipes.common.environment import make_discrete_env
from recipes.common.replay import (
    PRIORITIZED,
    end_episodes,
    make_event_tables,
    make_replay,
    make_sampler,
    written_slots,
)
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, EventTableWriter
from torchrl_replay_ext._torchrl import ray_actor
from torchrl_replay_ext.samplers.adapter import STAMP_KEY

# Batches are sent as arrays: Ray takes 2.3 ms of CPU time to pack and unpack a batch of tensors, and 0.1 ms for arrays.
Arrays = dict[NestedKey, np.ndarray]

TRAJECTORY = ("collector", "traj_ids")


def from_arrays(columns: Arrays) -> TensorDict:
    """The batch that was sent as arrays. The data is copied, because arrays from Ray are read-only."""
    data = {key: torch.tensor(column) for key, column in columns.items()}
    return TensorDict(data, next(iter(data.values())).shape[:1], device="cpu")


@contextmanager
def runtime(address: str | None, num_actors: int) -> Iterator[None]:
    """Connect to Ray or start it, for the duration of the block.

    If Ray is already initialized in this process, it is used and not shut down.

    Args:
        address: address of a running cluster, or "auto" to search for one; None: start Ray on this host and stop it at
            the end.
        num_actors: number of actors. Each needs one CPU of the cluster; on this host, they may share the CPUs.

    Raises:
        ConfigError: if Ray is not installed, no cluster is found at `address`, or the cluster has too few CPUs.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed, but recipes.distributed needs it: pip install 'ray>=2.9'")
    import ray  # pyright: ignore[reportMissingImports]: an extra, not needed by the checks

    if ray.is_initialized():
        yield
        return
    # By default, Ray's workers run at low priority, but they do most of the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    local = {"num_cpus": max(num_actors, os.cpu_count() or 1), "include_dashboard": False} if address is None else {}
    try:
        # Output of actors would break the progress bar. Their errors are raised where their results are awaited.
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"address={address}: {error}") from error
    try:
        available = ray.cluster_resources().get("CPU", 0)
        if available < num_actors:
            raise ConfigError(
                f"num_collectors={num_actors - 1}: collectors and buffer need {num_actors} CPUs, the cluster has "
                f"{available:g}; reduce num_collectors"
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def noticing_lost_actors(buffer: Any) -> Iterator[None]:
    """Raise LostProcess if a call of an actor fails because its process has ended. Other errors are not changed.

    Args:
        buffer: handle of the buffer's actor.

    Raises:
        LostProcess: if the process of the buffer or of a collector was killed, ran out of memory or crashed.
    """
    try:
        yield
    except Exception as error:
        import ray.exceptions  # pyright: ignore[reportMissingImports]: an extra, not needed by the checks

        # Sending weights to a lost process raises a Gloo error.
        if not isinstance(error, ray.exceptions.RayActorError) and "/gloo/" not in str(error):
            raise
        lost = "a collector"
        try:
            # Only the buffer can be checked: after an error in one collector, TorchRL ends all collectors.
            ray.get(buffer.__ray_ready__.remote(), timeout=10)
        except ray.exceptions.GetTimeoutError:
            pass
        except ray.exceptions.RayActorError:
            lost = "the replay buffer"
        raise LostProcess(f"the process of {lost} has ended (killed, or out of memory?)") from error


class ReplayActor(CompilableReplayBuffer):
    """The buffer inside its actor, with methods for the remote learner."""

    def draw(self) -> Arrays:
        """Draw a batch, as arrays."""
        return {key: column.numpy() for key, column in self.sample().items(True, True)}

    def exchange(self, errors: Arrays) -> Arrays:
        """Apply the TD errors of one batch and draw another."""
        self.update_tensordict_priority(from_arrays(errors))
        return self.draw()

    def sampler_stats(self) -> dict[str, float]:
        """The sampler's stats(); empty if it has none."""
        sampler = self.sampler
        return {key: value.item() for key, value in sampler.stats().items()} if isinstance(sampler, PRIORITIZED) else {}

    def end_open_episodes(self) -> None:
        """Truncate all episodes that have not ended: a resumed run starts new ones."""
        slots = written_slots(self)
        if not len(slots):
            return
        trajectories = self[slots][TRAJECTORY].reshape(-1)
        _, which = trajectories.unique(return_inverse=True)
        last = torch.zeros(int(which.max()) + 1, dtype=torch.int64)
        last.scatter_reduce_(0, which, torch.arange(len(slots)), "amax")
        end_episodes(self, slots[last.sort().values])


def _event_sampler(*arguments: Any) -> Sampler:
    return make_event_tables(*arguments)[1]


def _event_writer(*arguments: Any) -> EventTableWriter:
    return EventTableWriter(make_event_tables(*arguments)[0])


class RemoteReplay:
    """The learner's interface to a replay buffer in an actor. The collectors write to the buffer directly.

    A background thread makes the calls one after the other. Each call sends the TD errors of one batch and receives a
    new batch, while the learner works on batches drawn earlier. Batches carry the number of each row's write; the
    buffer ignores updates of rows that have been overwritten.

    Args:
        config: the run's configuration.
        num_streams: number of environments that write to the buffer.
        device: device of the batches.
        prefetch: batches requested ahead while the learner works on one. A batch may be drawn before the last
            ``prefetch`` updates are applied.
        td_error: the kind of TD errors that the loss writes: "squared" or "absolute".

    Raises:
        ConfigError: see :func:`~recipes.common.replay.make_replay`.
    """

    # the sampler is in the actor
    sampler = None

    def __init__(self, config: RunConfig, num_streams: int, device: torch.device, *, prefetch: int, td_error: str):
        learning, name = config.learning, config.sampler["name"]
        # Built only to check the settings before an actor is started.
        local = make_replay(config, torch.device("cpu"), td_error=td_error)
        self._prioritized = isinstance(local.sampler, PRIORITIZED)
        # The actor builds sampler and writer separately; they find their common tables through the storage.
        arguments = dict(config.sampler), learning.buffer_size, learning.num_updates(), num_streams, td_error
        if name in EVENT_TABLES:
            sampler = partial(_event_sampler, config.env, *arguments)
            writer = partial(_event_writer, config.env, *arguments)
        else:
            sampler, writer = partial(make_sampler, *arguments), None
        self.buffer = RayReplayBuffer(
            replay_buffer_cls=ReplayActor,
            storage=partial(CompilableTensorStorage, learning.buffer_size),
            sampler=sampler,
            writer=writer,
            batch_size=learning.batch_size,
            priority_key="td_error",
            remote_config={"num_cpus": 1},
        )
        self.buffer.set_rng(torch.Generator().manual_seed(config.seed))
        self._remote: Any = self.buffer.client()
        self.actor = ray_actor(self._remote)
        self._device, self._prefetch = device, prefetch
        self._calls = ThreadPoolExecutor(1)
        self._batches: deque[Future[Arrays]] = deque()

    def _answer(self, call: Future[Any]) -> Any:
        with noticing_lost_actors(self.actor):
            return call.result()

    def sample(self) -> TensorDictBase:
        """Return the next batch."""
        while len(self._batches) <= self._prefetch:
            self._batches.append(self._calls.submit(self._remote.draw))
        return from_arrays(self._answer(self._batches.popleft())).to(self._device)

    def update_tensordict_priority(self, sample: TensorDictBase) -> None:
        """Send the TD errors of a sample and request another."""
        if not self._prioritized:
            return
        errors: Arrays = {key: sample[key].cpu().numpy() for key in ("index", STAMP_KEY, "td_error")}
        self._batches.append(self._calls.submit(self._remote.exchange, errors))

    def sampler_stats(self) -> dict[str, float]:
        """The sampler's stats()."""
        return self._answer(self._calls.submit(self._remote.sampler_stats))

    def end_open_episodes(self) -> None:
        """See :class:`ReplayActor`."""
        self._answer(self._calls.submit(self._remote.end_open_episodes))

    def state_dict(self) -> dict[str, Any]:
        """The state of the whole buffer after all updates so far, copied to the learner."""
        return self._answer(self._calls.submit(self.buffer.state_dict))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._answer(self._calls.submit(self.buffer.load_state_dict, state))

    def shutdown(self) -> None:
        """End the actor."""
        self._calls.shutdown(cancel_futures=True)
        self.buffer.shutdown()


class FlagReader(BaseInfoDictReader):
    """Copies bools from a Gymnasium environment's ``info`` to ``("events", <name>)``; missing bools are False."""

    def __init__(self, flags: Sequence[str]):
        self._flags = flags

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the flags into ``tensordict``."""
        flags = {name: torch.tensor([bool(info_dict.get(name, False))]) for name in self._flags}
        return tensordict.set("events", TensorDict(flags, []))

    @property
    def info_spec(self) -> dict[str, Any]:
        """The spec of the entries that :meth:`__call__` writes."""
        return {"events": Composite({name: Binary(1, dtype=torch.bool) for name in self._flags})}


def make_remote_env(config: EnvConfig, num_envs: int) -> EnvBase:
    """Make the environment of a collector, inside its actor; several are stepped one after the other."""

    def make() -> EnvBase:
        env = GymWrapper(make_discrete_env(config, training=True), categorical_action_encoding=True, device=None)
        if config.flags:
            env.set_info_dict_reader(FlagReader(config.flags))
        return env

    return make() if num_envs == 1 else SerialEnv(num_envs, make)


def stored_rows(worker: int, num_workers: int, keys: tuple[NestedKey, ...], data: TensorDictBase) -> TensorDictBase:
    """The rows that a collector writes to the buffer: flat, with trajectory ids that are unique among collectors.

    Args:
        worker: index of the collector.
        num_workers: number of collectors.
        keys: entries to store.
        data: the collected batch.
    """
    rows = data.reshape(-1).select(*keys)
    rows[TRAJECTORY] = rows[TRAJECTORY] * num_workers + worker
    return rows


class RemoteCollector:
    """TorchRL collectors as actors that write to a buffer. Each gets the newest weights before each batch.

    While the learner works on the batch of one collector, the others collect. No collector is more than one batch
    ahead, so the ratio of updates to steps is the configured one.

    Args:
        config: the run's configuration; each collector steps ``num_envs`` environments.
        policy: the policy, on the CPU. A collector uses the weights at the time when its batch is requested.
        replay: the buffer that the collectors write to.
        num_collectors: number of actors.
        frames_per_batch: transitions per batch of a collector.
        keys: entries to store for each transition.
    """

    # collectors write each batch to the buffer
    holds_newest = False

    def __init__(
        self,
        config: RunConfig,
        policy: TensorDictModuleBase,
        replay: RemoteReplay,
        *,
        num_collectors: int,
        frames_per_batch: int,
        keys: tuple[NestedKey, ...],
    ):
        self._seed, self._starts, self._replay = config.seed, 0, replay
        self._policy, self.steps_of_batch = policy, frames_per_batch
        self._collector = RayCollector(
            [partial(make_remote_env, config.env, config.num_envs)] * num_collectors,
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=sys.maxsize,
            replay_buffer=replay.buffer,
            sync=False,
            update_after_each_batch=True,
            remote_configs={"num_cpus": 1},
            collector_kwargs=[
                {
                    "postproc": partial(stored_rows, worker, num_collectors, keys),
                    "auto_register_policy_transforms": False,
                }
                for worker in range(num_collectors)
            ],
        )

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches without entries; the collectors write the data to the buffer."""
        self._collector.set_seed(self._seed + self._starts)
        with noticing_lost_actors(self._replay.actor):
            self._collector.update_policy_weights_(self._policy)
            for _ in self._collector:
                yield TensorDict({}, [self.steps_of_batch])

    def resume(self) -> list[int]:
        """After a resume: collectors start new episodes, so the open episodes in the buffer are truncated."""
        self._starts += 1
        self._replay.end_open_episodes()
        return []

    def state_dict(self) -> dict[str, Any]:
        """The number of resumes; each resume uses new seeds."""
        return {"starts": self._starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._starts = state["starts"]

    def shutdown(self) -> None:
        """End the actors, including the buffer's."""
        self._collector.shutdown()
        self._replay.shutdown()
