"""Ray's part of a recipe: collectors and a replay buffer as actors, on this host or on many.

Everything here can be imported without Ray; whether it is installed is checked by :func:`runtime`.
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

from recipes.config import EVENT_TABLES, EnvConfig, RunConfig
from recipes.environment import make_discrete_env
from recipes.replay import (
    PRIORITIZED,
    end_episodes,
    make_event_tables,
    make_replay,
    make_sampler,
    written_slots,
)
from recipes.run import ConfigError, LostProcess
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, EventTableWriter
from torchrl_replay_ext._torchrl import ray_actor
from torchrl_replay_ext.samplers.adapter import STAMP_KEY

# How batches travel: Ray takes 2.3 ms of CPU time to pack and unpack a batch of tensors, and 0.1 ms for arrays.
Arrays = dict[NestedKey, np.ndarray]

TRAJECTORY = ("collector", "traj_ids")


def from_arrays(columns: Arrays) -> TensorDict:
    """A batch that has travelled; copied, since what Ray hands out cannot be written to."""
    data = {key: torch.tensor(column) for key, column in columns.items()}
    return TensorDict(data, next(iter(data.values())).shape[:1], device="cpu")


@contextmanager
def runtime(address: str | None, num_actors: int) -> Iterator[None]:
    """Ray for the length of a run; one that runs in this process already is used, and left running.

    Args:
        address: of a running cluster, "auto" to look for it; None: start Ray on this host, and stop it at the end.
        num_actors: each takes one of the cluster's CPUs, but on this host they may share what there is.

    Raises:
        ConfigError: Ray is not installed, there is no cluster at that address, or it is too small.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed, which collects and keeps the buffer here: pip install 'ray>=2.9'")
    import ray  # pyright: ignore[reportMissingImports]: an extra, not needed by the checks

    if ray.is_initialized():
        yield
        return
    # Ray's workers would give way to all else on this host, but here they are the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    local = {"num_cpus": max(num_actors, os.cpu_count() or 1), "include_dashboard": False} if address is None else {}
    try:
        # What actors print would tear the progress bar; their errors arrive where their results are awaited.
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"address={address}: {error}") from error
    try:
        available = ray.cluster_resources().get("CPU", 0)
        if available < num_actors:
            raise ConfigError(
                f"num_collectors={num_actors - 1}: with the buffer that takes {num_actors} CPUs, the cluster has "
                f"{available:g}"
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def noticing_lost_actors(buffer: Any) -> Iterator[None]:
    """For what is asked of actors; an error of the user's own code in one of them passes as it is.

    Args:
        buffer: handle of the buffer's actor.

    Raises:
        LostProcess: the process of the buffer or of a collector was killed, ran out of memory or crashed.
    """
    try:
        yield
    except Exception as error:
        import ray.exceptions  # pyright: ignore[reportMissingImports]: likewise

        # The second is what comes of sending weights to it.
        if not isinstance(error, ray.exceptions.RayActorError) and "/gloo/" not in str(error):
            raise
        lost = "a collector"
        try:
            # Collectors cannot be asked: after an error in one, TorchRL ends all of them.
            ray.get(buffer.__ray_ready__.remote(), timeout=10)
        except ray.exceptions.GetTimeoutError:
            pass
        except ray.exceptions.RayActorError:
            lost = "the replay buffer"
        raise LostProcess(f"the process of {lost} has ended (killed, or out of memory?)") from error


class ReplayActor(CompilableReplayBuffer):
    """The buffer as it lives in its actor, with what a learner cannot reach from afar."""

    def draw(self) -> Arrays:
        """A batch."""
        return {key: column.numpy() for key, column in self.sample().items(True, True)}

    def exchange(self, errors: Arrays) -> Arrays:
        """Takes the TD errors of one batch and gives another."""
        self.update_tensordict_priority(from_arrays(errors))
        return self.draw()

    def sampler_stats(self) -> dict[str, float]:
        """The sampler's stats(), if it has any."""
        sampler = self.sampler
        return {key: value.item() for key, value in sampler.stats().items()} if isinstance(sampler, PRIORITIZED) else {}

    def end_open_episodes(self) -> None:
        """Marks the newest transition of each episode that goes on as truncated: a resumed run begins new ones."""
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
    """The learner's end of a buffer in an actor, which collectors write to by themselves.

    Calls go out in turn, from a thread of their own: TD errors of one batch, and with the answer comes another, while
    the learner works on those drawn before. Batches carry the number of each row's write, so that the buffer drops
    updates of rows it has overwritten since.

    Args:
        config: the run's configuration.
        num_streams: environments that write to it.
        device: where batches go.
        prefetch: batches on their way while the learner works on one; draws do not know the last ``prefetch`` updates.
        td_error: what the loss writes, "squared" or "absolute".

    Raises:
        ConfigError: as :func:`~recipes.replay.make_replay`.
    """

    # it is with the buffer
    sampler = None

    def __init__(self, config: RunConfig, num_streams: int, device: torch.device, *, prefetch: int, td_error: str):
        learning, name = config.learning, config.sampler["name"]
        # Made and thrown away: what is wrong with the settings is found before an actor is.
        local = make_replay(config, torch.device("cpu"), td_error=td_error)
        self._prioritized = isinstance(local.sampler, PRIORITIZED)
        # Sampler and writer are made apart, where the buffer is, and find the same tables through the storage.
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

    def extend(self, data: TensorDictBase) -> None:
        """Nothing: the collectors have written it."""

    def sample(self) -> TensorDictBase:
        """The next batch."""
        while len(self._batches) <= self._prefetch:
            self._batches.append(self._calls.submit(self._remote.draw))
        return from_arrays(self._answer(self._batches.popleft())).to(self._device)

    def update_tensordict_priority(self, sample: TensorDictBase) -> None:
        """Sends the TD errors of a sample, and asks for another."""
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
        """The state of the whole buffer, after all updates so far; it travels to the learner."""
        return self._answer(self._calls.submit(self.buffer.state_dict))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._answer(self._calls.submit(self.buffer.load_state_dict, state))

    def shutdown(self) -> None:
        """End the actor."""
        self._calls.shutdown(cancel_futures=True)
        self.buffer.shutdown()


class FlagReader(BaseInfoDictReader):
    """Copies bools from a Gymnasium environment's ``info`` to ``("events", <name>)``; False where there is none."""

    def __init__(self, flags: Sequence[str]):
        self._flags = flags

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the flags into ``tensordict``."""
        flags = {name: torch.tensor([bool(info_dict.get(name, False))]) for name in self._flags}
        return tensordict.set("events", TensorDict(flags, []))

    @property
    def info_spec(self) -> dict[str, Any]:
        """What :meth:`__call__` writes."""
        return {"events": Composite({name: Binary(1, dtype=torch.bool) for name in self._flags})}


def make_remote_env(config: EnvConfig, num_envs: int) -> EnvBase:
    """Called where a collector lives: its environment, or several that are stepped one after the other."""

    def make() -> EnvBase:
        env = GymWrapper(make_discrete_env(config), categorical_action_encoding=True, device=None)
        if config.flags:
            env.set_info_dict_reader(FlagReader(config.flags))
        return env

    return make() if num_envs == 1 else SerialEnv(num_envs, make)


def stored_rows(worker: int, num_workers: int, keys: tuple[NestedKey, ...], data: TensorDictBase) -> TensorDictBase:
    """Called by a collector before it writes: what is stored, flat, with trajectory ids that no other one uses."""
    rows = data.reshape(-1).select(*keys)
    rows[TRAJECTORY] = rows[TRAJECTORY] * num_workers + worker
    return rows


class RemoteCollector:
    """TorchRL's collectors as actors that write to a buffer; each gets the newest weights ahead of each batch.

    While the learner works on the batch of one, the others collect theirs; none is more than a batch ahead, so that the
    ratio of updates to steps is what the configuration says.

    Args:
        config: the run's configuration; each collector steps ``num_envs`` environments.
        policy: on the CPU; its state when a batch is asked for is what collects.
        replay: what they write to.
        num_collectors: number of actors.
        frames_per_batch: transitions per batch of a collector.
        keys: what is stored of each transition.
    """

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
        self._policy, self._frames = policy, frames_per_batch
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
        """Batches without entries: what was collected is in the buffer."""
        self._collector.set_seed(self._seed + self._starts)
        with noticing_lost_actors(self._replay.actor):
            self._collector.update_policy_weights_(self._policy)
            for _ in self._collector:
                yield TensorDict({}, [self._frames])

    def resume(self) -> list[int]:
        """For a resumed run: its collectors begin new episodes, and those in the buffer end here."""
        self._starts += 1
        self._replay.end_open_episodes()
        return []

    def state_dict(self) -> dict[str, Any]:
        """How often the run was resumed: each time goes on with other seeds."""
        return {"starts": self._starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._starts = state["starts"]

    def shutdown(self) -> None:
        """End the actors, that of the buffer too."""
        self._collector.shutdown()
        self._replay.shutdown()
