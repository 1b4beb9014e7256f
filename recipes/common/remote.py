"""Collectors and a replay buffer as Ray actors, on one host or several.

This module can be imported without Ray; :func:`runtime` checks whether Ray is installed.
"""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from gymnasium.spaces import Discrete
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torchrl.collectors.distributed import RayCollector
from torchrl.data import Binary, Bounded, Categorical, Composite
from torchrl.envs import EnvBase, GymWrapper, SerialEnv
from torchrl.envs.gym_like import BaseInfoDictReader
from torchrl.modules import AdditiveGaussianModule, EGreedyModule

from recipes.common.collector import EpsilonRandom, environment_seed
from recipes.common.config import EVENT_TABLES, EnvConfig
from recipes.common.environment import make_env
from recipes.common.errors import ConfigError
from recipes.common.progress import warn
from recipes.common.replay import FLAGS, make_sampler, make_writer
from recipes.common.schemas import DistributedRun
from torchrl_replay_ext import CompilableTensorStorage, EventTableWriter, ShardedReplayBuffer

TRAJECTORY = ("collector", "traj_ids")
# Entries that the losses and samplers read. `truncated` ends an episode, but only `terminated` stops the bootstrap.
NEXT = ("observation", "reward", "done", "terminated", "truncated")
STORED_KEYS = ("observation", "action", TRAJECTORY, *(("next", name) for name in NEXT))


@contextmanager
def runtime(address: str | None, num_collectors: int, num_shards: int) -> Iterator[None]:
    """Connect to Ray or start it, for the duration of the block.

    If Ray is already initialized in this process, it is used and not shut down.

    Args:
        address: address of a running cluster, or "auto" to search for one; None: start Ray on this host and stop it at
            the end.
        num_collectors: number of collectors. Each actor needs one CPU of the cluster; on this host, they may share
            the CPUs.
        num_shards: number of actors of the replay buffer.

    Raises:
        ConfigError: if Ray is not installed, no cluster is found at `address`, or the cluster has too few CPUs.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("Ray is not installed, but recipes.distributed needs it: pip install 'ray>=2.9'")
    import ray

    num_actors = num_collectors + num_shards
    with ExitStack() as started:
        if not ray.is_initialized():
            # By default, Ray's workers run at low priority, but they do most of the work.
            os.environ.setdefault("RAY_worker_niceness", "0")
            # Output of actors would break the progress bar. Their errors are raised where results are awaited.
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            if address is None:
                options |= {"num_cpus": max(num_actors, os.cpu_count() or 1), "include_dashboard": False}
            try:
                ray.init(address=address or "local", **options)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(f"address={address}: {error}") from error
            started.callback(ray.shutdown)
        if (available := ray.cluster_resources().get("CPU", 0)) < num_actors:
            text = f"they need {num_actors} CPUs, the cluster has {available:g}; reduce num_collectors"
            raise ConfigError(f"num_collectors={num_collectors} num_shards={num_shards}: {text}")
        yield


def _event_writer(config: DistributedRun, **options: Any) -> EventTableWriter | None:
    return make_writer(make_sampler(config, **options))


class RemoteReplay(ShardedReplayBuffer):
    """The replay buffer of a run, in `num_shards` Ray actors. Collectors write to them directly.

    If the process of a shard ends, the run goes on with the others, and with the shard when Ray has started it again.

    Args:
        config: the run's configuration. The shards share the capacity.
        device: device of the batches.
        td_error: the kind of TD errors that the loss writes to "td_error": "squared" or "absolute".

    Raises:
        ConfigError: see :func:`~recipes.common.replay.make_sampler`; also if the sampler cannot draw from several
            shards.
    """

    # the samplers are in the actors
    sampler = None

    def __init__(self, config: DistributedRun, device: torch.device, td_error: str):
        learning, name = config.learning, config.sampler["name"]
        capacity, streams = learning.buffer_size // config.num_shards, config.num_collectors * config.num_envs
        # The actor builds sampler and writer separately; they find their common tables through the storage.
        sampler = partial(make_sampler, config, td_error=td_error, capacity=capacity, num_streams=streams)
        sampler()  # only to check the settings before an actor is started
        try:
            super().__init__(
                config.num_shards,
                storage=partial(CompilableTensorStorage, capacity),
                sampler=sampler,
                writer=partial(_event_writer, config, **sampler.keywords) if name in EVENT_TABLES else None,
                batch_size=learning.batch_size,
                device=device,
                seed=config.seed,
                on_loss=warn,
            )
        except ValueError as error:
            raise ConfigError(f"num_shards={config.num_shards} sampler={name}: {error}") from error


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
        env = GymWrapper(make_env(config, training=True), categorical_action_encoding=True, device=None)
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
        actor: the policy. A collector uses the weights at the time when its batch is requested.
        noise_scale: standard deviation of the Gaussian noise that is added to continuous actions; 0: no noise.
        behaviour: its ``epsilon`` is the probability of a random action.
        replay: the buffer that the collectors write to.
    """

    def __init__(
        self,
        config: DistributedRun,
        actor: TensorDictModuleBase,
        noise_scale: float,
        behaviour: EpsilonRandom,
        replay: RemoteReplay,
    ):
        self._seed, self._starts, self._replay = config.seed, 0, replay
        self._actor, self._behaviour, self.steps_of_batch = actor, behaviour, config.learning.train_interval
        space = behaviour.space
        spec = Categorical(space.n) if isinstance(space, Discrete) else Bounded(-1.0, 1.0, torch.Size(space.shape))
        # The collectors have no GPU: they get a copy on the CPU.
        self._acting, self._random = deepcopy(actor).cpu(), EGreedyModule(spec, eps_init=1.0, eps_end=0.0)
        noise = [AdditiveGaussianModule(spec, sigma_init=noise_scale, sigma_end=noise_scale)] if noise_scale else []
        self._policy = TensorDictSequential([self._acting, *noise, self._random])
        count, keys = config.num_collectors, (*STORED_KEYS, *((*FLAGS, name) for name in config.env.flags))
        own: dict[str, Any] = {"auto_register_policy_transforms": False}
        self._collector = RayCollector(
            [partial(make_remote_env, config.env, config.num_envs)] * count,
            self._policy,
            frames_per_batch=self.steps_of_batch,
            total_frames=sys.maxsize,
            replay_buffer=replay,  # pyright: ignore[reportArgumentType]: has what RayCollector needs
            sync=False,
            update_after_each_batch=True,
            remote_configs={"num_cpus": 1},
            collector_kwargs=[own | {"postproc": partial(stored_rows, worker, count, keys)} for worker in range(count)],
        )

    def __iter__(self) -> Iterator[None]:
        """Yield None for each batch; the collectors write the data to the buffer."""
        self._collector.set_seed(environment_seed(self._seed, 0, self._starts))
        self._take_weights()
        self._collector.update_policy_weights_(self._policy)
        for _ in self._collector:
            yield None
            self._take_weights()

    def _take_weights(self) -> None:
        """The weights of the actor and the present probability of random actions, for the next batch."""
        self._acting.load_state_dict(self._actor.state_dict())
        self._random.get_buffer("eps").fill_(self._behaviour.epsilon)

    def state_dict(self) -> dict[str, Any]:
        """The number of resumes."""
        return {"starts": self._starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; collectors begin new episodes, with new seeds."""
        self._starts = state["starts"] + 1

    def shutdown(self) -> None:
        """End the actors, including the buffer's."""
        self._collector.shutdown()
        self._replay.shutdown()
