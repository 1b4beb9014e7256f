"""Measures whole training loops of DQN on CartPole: the recipe, and the loops of TorchRL and stable-baselines3.

All loops have one environment and the same network sizes, batch size, capacity and updates per step.
"""

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from tensordict.nn import TensorDictSequential
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule
from tqdm import tqdm

from recipes import dqn
from recipes.benchmark.buffers import CPU
from recipes.benchmark.results import Row
from recipes.benchmark.timing import require_time, skipping
from recipes.benchmark.updates import agent, configuration
from recipes.common import run

CHUNKS = 4
STEPS = 20  # for each of --calls


class EndedError(Exception):
    """Leaves the training loop of the recipe."""


class Clock:
    """Takes the CPU time at the end of each chunk of steps. The first chunk is a warm-up.

    Args:
        chunk: environment steps per chunk.
    """

    def __init__(self, chunk: int):
        self.chunk = chunk
        self._marks: list[tuple[int, float]] = []

    def __call__(self, steps: int) -> bool:
        """Whether the loop goes on after so many steps."""
        if steps >= self.chunk * (len(self._marks) + 1):
            self._marks.append((steps, time.process_time()))
        return len(self._marks) <= CHUNKS

    def microseconds(self) -> float:
        """The median time per step."""
        pairs = itertools.pairwise(self._marks)
        return 1e6 * statistics.median((stop - start) / (after - before) for (before, start), (after, stop) in pairs)


def recipe_loop(clock: Clock, sampler: str, *, compiled: bool) -> None:
    """The loop of the recipe, without evaluations, logs and checkpoints."""
    words = [f"sampler={sampler}", f"compile={compiled}", "device=cpu", "logger=none", "checkpoint_interval=1000000"]
    config = configuration(*words, total_steps=1_000_000, learning_starts=0, num_evaluations=1, evaluation_episodes=1)

    def continues(training: run.Run) -> bool:
        if not clock(training.env_steps):
            raise EndedError  # no evaluation and no checkpoint at the end
        return True

    with (
        TemporaryDirectory() as directory,
        patch.object(run.Run, "continues", continues),
        patch.object(run, "tqdm", partial(tqdm, disable=True)),
        suppress(EndedError),
    ):
        dqn.train(config, Path(directory))


def torchrl_loop(clock: Clock) -> None:
    """TorchRL's collector, uniform buffer, loss and optimizer, as in its scripts: collect many steps, then learn."""
    settings, (policy, loss_module, target) = configuration().dqn, agent(CPU)
    env = TransformedEnv(GymEnv("CartPole-v1", categorical_action_encoding=True))
    for transform in (StepCounter(), DoubleToFloat(), RewardSum()):
        env.append_transform(transform)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(settings.buffer_size), batch_size=settings.batch_size)
    policy = TensorDictSequential([policy, EGreedyModule(env.action_spec, eps_init=0.1, eps_end=0.1)])
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=settings.learning_rate)
    updates = steps = 0
    collector = Collector(env, policy, frames_per_batch=clock.chunk, total_frames=-1, device="cpu")
    for data in collector:
        replay.extend(data.reshape(-1))
        for _ in range(data.numel() * settings.gradient_steps // settings.train_interval):
            updates += 1
            loss_module(replay.sample())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if updates * settings.train_interval % settings.target_update_interval == 0:
                target.step()
        collector.update_policy_weights_()
        steps += data.numel()
        if not clock(steps):
            break
    collector.shutdown()


def stable_baselines3_loop(clock: Clock) -> None:
    """DQN of stable-baselines3, which has uniform replay only."""
    settings = configuration().dqn
    names = ("learning_rate", "buffer_size", "batch_size", "gradient_steps", "target_update_interval")
    options = {name: getattr(settings, name) for name in names} | {"learning_starts": 0, "device": "cpu"}
    options |= {"train_freq": settings.train_interval, "policy_kwargs": {"net_arch": list(settings.hidden_sizes)}}
    options |= {"exploration_initial_eps": 0.1, "exploration_final_eps": 0.1}
    model = import_module("stable_baselines3").DQN("MlpPolicy", "CartPole-v1", **options)
    model.learn(10**9, callback=lambda *_: clock(model.num_timesteps), log_interval=None)


# Name -> function of the clock that runs the loop until the clock ends it.
LOOPS: dict[str, Callable[[Clock], None]] = {
    "TorchRL": torchrl_loop,
    "stable-baselines3": stable_baselines3_loop,
    "recipe, uniform": partial(recipe_loop, sampler="uniform", compiled=False),
    "compiled recipe, PER": partial(recipe_loop, sampler="per", compiled=True),
}


def measure_training(names: list[str], options: Namespace) -> list[Row]:
    """Measure the CPU time of the loops, one after another. `names`: from LOOPS."""
    rows, settings = [], configuration().dqn
    for name in tqdm(names, desc="training", leave=False):
        with skipping(f"{name} (training)"):
            require_time()
            clock = Clock(max(1, STEPS * options.calls // CHUNKS))
            LOOPS[name](clock)
            row = Row("training", "DQN", name, "TorchRL", settings.buffer_size, settings.batch_size)
            row.microseconds = clock.microseconds()
            rows.append(row)
    return rows
