"""Measures training loops of the recipes, of TorchRL and of stable-baselines3.

DQN runs on CartPole, TD3 and SAC on HalfCheetah, ACER on CartPole. All loops of an algorithm have the same environment,
network sizes, batch size, capacity and updates per step, and one environment; ACER's recipe has 8. No peer has ACER.
"""

import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import DoubleToFloat, GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import AdditiveGaussianModule, EGreedyModule
from tqdm import tqdm

from recipes.benchmark.buffers import CPU
from recipes.benchmark.results import Row
from recipes.benchmark.timing import in_shares, require_time, skipping
from recipes.benchmark.updates import ALGORITHMS, OVERRIDES, agent, configuration
from recipes.common import run
from recipes.common.update import total

CHUNKS = 4
MORE_STEPS = {"dqn": 10, "td3": 1, "sac": 1, "acer": 10}  # TD3 and SAC make an update per step, the others fewer
ENVS = {"dqn": "CartPole-v1", "td3": "HalfCheetah-v5", "sac": "HalfCheetah-v5"}


class EndedError(Exception):
    """Leaves the training loop of a recipe."""


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


def recipe_loop(algorithm: str, clock: Clock, sampler: str, *, compiled: bool) -> None:
    """The loop of a recipe, without evaluations, logs and checkpoints."""
    quiet = ("total_steps=1000000", "learning_starts=0", "num_evaluations=1", "evaluation_episodes=1")
    words = [f"sampler={sampler}", f"compile={compiled}", "device=cpu", "logger=none", "checkpoint_interval=1000000"]
    config = configuration(algorithm, *words, *(f"{algorithm}.{word}" for word in quiet))
    recipe = import_module(f"recipes.{algorithm}")

    class ClockedRun(run.Run):
        def continues(self) -> bool:
            if not clock(self.env_steps):
                raise EndedError  # no evaluation and no checkpoint at the end
            return True

    with (
        TemporaryDirectory() as directory,
        patch.object(recipe, "Run", ClockedRun),
        patch.object(run, "tqdm", partial(tqdm, disable=True)),
        patch.object(run, "interruption", lambda: nullcontext(lambda: False)),  # Ctrl-C is for the benchmark
        suppress(EndedError),
    ):
        recipe.train(config, Path(directory))


def torchrl_loop(algorithm: str, clock: Clock) -> None:
    """TorchRL's collector, uniform buffer, loss and optimizers, as in its scripts: collect many steps, then learn."""
    settings, policy, loss_module, target = agent(algorithm, CPU)
    env = TransformedEnv(GymEnv(ENVS[algorithm], categorical_action_encoding=True))
    for transform in (StepCounter(), DoubleToFloat(), RewardSum()):
        env.append_transform(transform)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(settings.buffer_size), batch_size=settings.batch_size)
    modules: list[Any] = [policy]
    if algorithm == "dqn":
        modules.append(EGreedyModule(env.action_spec, eps_init=0.1, eps_end=0.1))
    elif algorithm == "td3":
        modules.append(AdditiveGaussianModule(env.action_spec, sigma_init=0.1, sigma_end=0.1))

    rate = settings.learning_rate if algorithm == "dqn" else settings.actor_learning_rate
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=rate)  # steps only parameters with gradients

    def step(loss: Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def update(batch: TensorDictBase, number: int) -> None:
        if algorithm == "td3":
            step(loss_module.value_loss(batch)[0])
            if number % settings.policy_delay == 0:
                step(loss_module.actor_loss(batch)[0])
                target.step()
        else:
            step(total(loss_module(batch)))
            if algorithm == "sac" or number * settings.train_interval % settings.target_update_interval == 0:
                target.step()

    updates = steps = 0
    collector = Collector(
        env, TensorDictSequential(*modules), frames_per_batch=clock.chunk, total_frames=-1, device="cpu"
    )
    for data in collector:
        replay.extend(data.reshape(-1))
        for _ in range(data.numel() * settings.gradient_steps // settings.train_interval):
            updates += 1
            update(replay.sample(), updates)
        collector.update_policy_weights_()
        steps += data.numel()
        if not clock(steps):
            break
    collector.shutdown()


def stable_baselines3_loop(algorithm: str, clock: Clock) -> None:
    """The algorithm of stable-baselines3, which has uniform replay only."""
    library, settings = import_module("stable_baselines3"), configuration(algorithm).learning
    if algorithm == "dqn":
        options = {"target_update_interval": settings.target_update_interval, "learning_rate": settings.learning_rate}
        options |= {"exploration_initial_eps": 0.1, "exploration_final_eps": 0.1}
    else:
        options = {"tau": settings.tau, "learning_rate": settings.actor_learning_rate}
    model = getattr(library, algorithm.upper())(
        "MlpPolicy",
        ENVS[algorithm],
        buffer_size=settings.buffer_size,
        learning_starts=0,
        batch_size=settings.batch_size,
        train_freq=settings.train_interval,
        gradient_steps=settings.gradient_steps,
        policy_kwargs={"net_arch": list(settings.hidden_sizes)},
        device="cpu",
        **options,
    )
    model.learn(10**9, callback=lambda *_: clock(model.num_timesteps), log_interval=None)


# Name -> function of the algorithm and the clock that runs the loop until the clock ends it.
LOOPS: dict[str, Callable[[str, Clock], None]] = {
    "TorchRL": torchrl_loop,
    "stable-baselines3": stable_baselines3_loop,
    "recipe, uniform": partial(recipe_loop, sampler="uniform", compiled=False),
    "compiled recipe, PER": partial(recipe_loop, sampler="per", compiled=True),
}


def measure_training(names: list[str], options: Namespace) -> list[Row]:
    """Measure the CPU time of the loops, one after another. `names`: from LOOPS.

    TD3 and SAC make 2 * calls steps after the warm-up, DQN and ACER ten times as many.
    """
    rows: list[Row] = []
    for algorithm in in_shares(OVERRIDES):
        settings = configuration(algorithm).learning
        for name in tqdm(names, desc=f"training, {algorithm}", leave=False):
            if algorithm not in ALGORITHMS and "recipe" not in name:
                continue  # no peer has ACER
            with skipping(f"{name} (training, {algorithm})"):
                require_time()
                clock = Clock(max(1, MORE_STEPS[algorithm] * 2 * options.calls // CHUNKS))
                LOOPS[name](algorithm, clock)
                row = Row("training", algorithm.upper(), name, "TorchRL", settings.buffer_size, settings.batch_size)
                row.microseconds = clock.microseconds()
                rows.append(row)
    return rows
