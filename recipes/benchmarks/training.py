"""Measures training loops of DQN on CartPole: of this package, of TorchRL and of stable-baselines3."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, RandomSampler, TensorDictReplayBuffer
from torchrl.envs import GymEnv, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from tqdm import tqdm

from recipes.benchmarks import STEPS_PER_UPDATE
from recipes.benchmarks.replay import ALPHA, BETA
from recipes.benchmarks.results import TRAINING_BASELINE, LeftOutError, Row, peer
from recipes.collect import EpsilonRandom, VectorCollector
from recipes.update import CompiledUpdate, eager_update, target_pairs
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, ProportionalSampler, ReaPERSampler

ENV = "CartPole-v1"
HIDDEN_SIZES = (120, 84)
TRAINING_CAPACITY, TRAINING_BATCH = 10_000, 128
UPDATES_PER_COPY = 50
STEPS_PER_CHUNK = 1000
GAMMA, EPSILON, LEARNING_RATE, MAX_GRAD_NORM = 0.99, 0.1, 2.5e-4, 10.0

TrainingLoop = Callable[[int], object]


def make_network() -> nn.Sequential:
    """The network of every contender: from observations [4] to action values [2]."""
    first, second = HIDDEN_SIZES
    return nn.Sequential(nn.Linear(4, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 2))


def torchrl_training_loop() -> TrainingLoop:
    """A loop of TorchRL's components, as in TorchRL's DQN example for CartPole."""
    env = TransformedEnv(GymEnv(ENV))
    env.append_transform(RewardSum())
    env.append_transform(StepCounter())
    actor = QValueActor(make_network(), in_keys=["observation"], spec=env.action_spec)
    exploration = EGreedyModule(env.action_spec, eps_init=EPSILON, eps_end=EPSILON)
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(TRAINING_CAPACITY), batch_size=TRAINING_BATCH)
    loss_module = DQNLoss(actor, loss_function="l2", delay_value=True)
    loss_module.make_value_estimator(gamma=GAMMA)
    target_update = HardUpdate(loss_module, value_network_update_interval=UPDATES_PER_COPY)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LEARNING_RATE)
    collector = Collector(
        env,
        TensorDictSequential([actor, exploration]),
        frames_per_batch=STEPS_PER_UPDATE,
        total_frames=-1,
        device="cpu",
        storing_device="cpu",
    )
    batches = iter(collector)

    def run(num_env_steps: int) -> None:
        for _ in range(num_env_steps // STEPS_PER_UPDATE):
            collected = next(batches).reshape(-1)
            replay.extend(collected)
            exploration.step(collected.numel())
            loss = loss_module(replay.sample())["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            target_update.step()
            collector.update_policy_weights_()

    return run


def stable_baselines3_training_loop() -> TrainingLoop:
    """The DQN of stable-baselines3."""
    library = peer("stable_baselines3")
    model = library.DQN(
        "MlpPolicy",
        gymnasium.make(ENV),
        learning_rate=LEARNING_RATE,
        buffer_size=TRAINING_CAPACITY,
        learning_starts=0,
        batch_size=TRAINING_BATCH,
        gamma=GAMMA,
        train_freq=STEPS_PER_UPDATE,
        gradient_steps=1,
        target_update_interval=UPDATES_PER_COPY * STEPS_PER_UPDATE,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        policy_kwargs={"net_arch": list(HIDDEN_SIZES)},
        device="cpu",
    )
    return lambda num_env_steps: model.learn(num_env_steps, log_interval=None, reset_num_timesteps=False)


def our_training_loop(sampler: str, *, compiled: bool) -> TrainingLoop:
    """A loop made of the components of the recipes."""
    network = make_network()
    replay = CompilableReplayBuffer(
        storage=CompilableTensorStorage(TRAINING_CAPACITY), sampler=our_sampler(sampler), batch_size=TRAINING_BATCH
    )
    loss_module = DQNLoss(
        QValueActor(network, in_keys=["observation"], action_space="categorical"),
        delay_value=True,
        action_space="categorical",
    )
    loss_module.make_value_estimator(gamma=GAMMA)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LEARNING_RATE, fused=True)

    @torch.inference_mode()
    def greedy(observation: np.ndarray) -> np.ndarray:
        return network(torch.from_numpy(observation)).argmax(-1).numpy()

    behaviour = EpsilonRandom(greedy, gymnasium.make(ENV).action_space, seed=0)
    collector = VectorCollector(
        [lambda: gymnasium.make(ENV)] * STEPS_PER_UPDATE, behaviour, frames_per_batch=STEPS_PER_UPDATE, seed=0
    )
    replay.extend(collector.collect())
    behaviour.epsilon = EPSILON

    compiled_update = CompiledUpdate(
        replay, loss_module, [optimizer], MAX_GRAD_NORM, targets=target_pairs(loss_module), extends=True
    )
    update = eager_update(replay, loss_module, [optimizer], MAX_GRAD_NORM)
    target_update = HardUpdate(loss_module, value_network_update_interval=UPDATES_PER_COPY)
    updates = 0

    def loop(num_env_steps: int) -> None:
        nonlocal updates
        for _ in range(num_env_steps // STEPS_PER_UPDATE):
            data = collector.collect()
            updates += 1
            if compiled:
                compiled_update(data, target_due=updates % UPDATES_PER_COPY == 0)
            else:
                replay.extend(data)
                update()
                target_update.step()

    return loop


def our_sampler(name: str) -> Any:
    """The sampler of this name, for a training loop."""
    if name == "uniform":
        return RandomSampler()
    if name == "ProportionalSampler":
        return ProportionalSampler(TRAINING_CAPACITY, alpha=ALPHA, beta=BETA)
    return ReaPERSampler(TRAINING_CAPACITY, num_streams=STEPS_PER_UPDATE)


# Name -> function that builds a training loop. A loop is called with a number of env steps to run.
LOOPS: dict[str, Callable[[], TrainingLoop]] = {
    TRAINING_BASELINE: torchrl_training_loop,
    "stable-baselines3 DQN, uniform replay": stable_baselines3_training_loop,
    "recipe, eager, ProportionalSampler": partial(our_training_loop, "ProportionalSampler", compiled=False),
    **{
        f"recipe, compiled, {name}": partial(our_training_loop, name, compiled=True)
        for name in ("uniform", "ProportionalSampler", "ReaPERSampler")
    },
}


def measure_training(names: Sequence[str], env_steps: int) -> tuple[list[Row], list[str]]:
    """Measure chunks of steps; the first chunk of every loop is a warm-up and is not counted.

    Args:
        names: loops to measure, from LOOPS.
        env_steps: number of measured env steps per loop.

    Returns:
        The rows, and a note for each skipped loop.
    """
    loops: dict[str, TrainingLoop] = {}
    notes: list[str] = []
    for name in names:
        try:
            loops[name] = LOOPS[name]()
        except LeftOutError as error:
            notes.append(f"{name} is skipped: {error}.")
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    chunk = min(STEPS_PER_CHUNK, env_steps) // STEPS_PER_UPDATE * STEPS_PER_UPDATE
    for number in tqdm(range(-1, env_steps // chunk), desc="training", leave=False):
        for name, loop in loops.items():
            start = time.process_time()
            loop(chunk)
            stop = time.process_time()
            if number >= 0:
                seconds[name].append((stop - start) / chunk)
    rows = [
        Row("training", TRAINING_CAPACITY, TRAINING_BATCH, name, 1e6 * statistics.median(values))
        for name, values in seconds.items()
    ]
    return rows, notes
