"""Double DQN with uniform, proportional (PER) or reliability-adjusted (ReaPER) replay.

    python -m recipes.dqn env=cartpole sampler=reaper seed=1
    python -m recipes.dqn -m seed=1,2,3 sampler=uniform,per,reaper
    python -m recipes.dqn compile=true num_envs=8
    python -m recipes.dqn resume=runs/dqn/cartpole/reaper/seed1-...

The settings are those of the ReaPER paper's appendix D (conf/dqn/<env>.yaml).

progress.csv has a row per evaluation: env_steps and updates so far; return_mean, the score, and return_0 ..., the
episodes it is the mean of; epsilon of the behaviour policy; loss, the mean over the updates since the row before;
wall_time in seconds, that before a resume included; sampler/..., the scalars of the sampler's stats().
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import flatdim
from omegaconf import MISSING, DictConfig, OmegaConf
from tensordict import TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import nn
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import Collector
from torchrl.data import TensorDictReplayBuffer
from torchrl.envs import GymWrapper
from torchrl.modules import EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, HardUpdate
from tqdm import tqdm

from recipes.checkpoint import load_checkpoint, save_checkpoint
from recipes.collect import VectorCollector
from recipes.evaluation import evaluate
from recipes.plot import plot_runs
from recipes.progress import Progress
from recipes.replay import PRIORITIZED, make_sampler
from recipes.run import (
    CONFIG,
    DONE,
    INTERRUPTED,
    ConfigError,
    find_device,
    interruption,
    run_recipe,
    seed_everything,
    typed,
)
from recipes.update import CompiledUpdate, eager_update, value_targets
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage

# What the loss and the samplers read. `truncated` ends an episode, but only `terminated` cuts the bootstrap.
STORED_KEYS = (
    "observation",
    "action",
    ("collector", "traj_ids"),
    ("next", "observation"),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
    ("next", "truncated"),
)


CURVE = "learning_curve.png"


@dataclass
class EnvConfig:
    """An environment of Gymnasium and the mean return at which it counts as solved (None: never)."""

    name: str = MISSING
    id: str = MISSING
    reward_threshold: float | None = MISSING


@dataclass
class DQNConfig:
    """Hyperparameters; a step is one step of the environment."""

    total_steps: int = MISSING
    buffer_size: int = MISSING
    batch_size: int = MISSING
    learning_rate: float = MISSING
    learning_starts: int = MISSING
    train_interval: int = MISSING
    gradient_steps: int = MISSING
    target_update_interval: int = MISSING
    exploration_fraction: float = MISSING
    initial_epsilon: float = MISSING
    final_epsilon: float = MISSING
    evaluation_epsilon: float = MISSING
    num_evaluations: int = MISSING
    evaluation_episodes: int = MISSING
    gamma: float = MISSING
    max_grad_norm: float = MISSING
    hidden_sizes: list[int] = MISSING

    def __post_init__(self) -> None:
        positive = (
            "total_steps buffer_size batch_size learning_rate train_interval gradient_steps target_update_interval "
            "num_evaluations evaluation_episodes max_grad_norm"
        )
        for key in positive.split():
            if not getattr(self, key) > 0:
                raise ValueError(f"dqn.{key}={getattr(self, key)}: must be > 0")
        for key in ("exploration_fraction", "initial_epsilon", "final_epsilon", "evaluation_epsilon", "gamma"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"dqn.{key}={getattr(self, key)}: must be in [0, 1]")
        if self.final_epsilon > self.initial_epsilon:
            raise ValueError(f"dqn.final_epsilon={self.final_epsilon}: must be <= dqn.initial_epsilon")
        if not 0 <= self.learning_starts < self.total_steps:
            raise ValueError(f"dqn.learning_starts={self.learning_starts}: must be in [0, dqn.total_steps)")
        if any(size < 1 for size in self.hidden_sizes):
            raise ValueError(f"dqn.hidden_sizes={self.hidden_sizes}: must be > 0")

    def epsilon(self, step: int) -> float:
        """Exploration rate: 1 until learning starts, then linear over the exploration fraction of all steps."""
        if step < self.learning_starts:
            return 1.0
        duration = self.exploration_fraction * self.total_steps
        done = min(step / duration, 1.0) if duration else 1.0
        return self.initial_epsilon + done * (self.final_epsilon - self.initial_epsilon)

    def num_updates(self) -> int:
        """Gradient updates of a whole run."""
        rounds = math.ceil(self.total_steps / self.train_interval)
        return (rounds - self.learning_starts // self.train_interval) * self.gradient_steps

    def evaluations_due(self, step: int) -> int:
        """Evaluations that belong to the first `step` steps: they are evenly spread, the last one at the end."""
        return min(step, self.total_steps) * self.num_evaluations // self.total_steps


@dataclass
class LoggerConfig:
    """See recipes.progress.Progress."""

    csv: bool = MISSING
    backend: str | None = MISSING


@dataclass
class Config:
    """All of conf/dqn.yaml."""

    env: EnvConfig = MISSING
    dqn: DQNConfig = MISSING
    sampler: dict[str, Any] = MISSING
    logger: LoggerConfig = MISSING
    seed: int = MISSING
    device: str = MISSING
    num_threads: int = MISSING
    num_envs: int = MISSING
    compile: bool = MISSING
    cudagraphs: bool = MISSING
    updates_per_graph: int = MISSING
    stop_at_threshold: bool = MISSING
    checkpoint_interval: int = MISSING
    resume: str | None = None

    def __post_init__(self) -> None:
        for key in ("num_threads", "num_envs", "updates_per_graph", "checkpoint_interval"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 1")
        if self.dqn.train_interval % self.num_envs:
            raise ValueError(f"num_envs={self.num_envs}: must divide dqn.train_interval={self.dqn.train_interval}")
        if self.dqn.gradient_steps % self.updates_per_graph:
            raise ValueError(
                f"updates_per_graph={self.updates_per_graph}: must divide dqn.gradient_steps={self.dqn.gradient_steps}"
            )
        if self.cudagraphs and not self.compile:
            raise ValueError("cudagraphs=true: needs compile=true")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: must be in [0, 2^31)")


def make_env(env_id: str) -> gymnasium.Env:
    """Makes an environment with discrete actions and vector observations."""
    try:
        env = gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"env.id={env_id}: {error}") from error
    if not isinstance(env.action_space, gymnasium.spaces.Discrete) or len(env.observation_space.shape or ()) != 1:
        raise ConfigError(f"env.id={env_id}: this DQN needs discrete actions and vector observations")
    return env


def train(config: DictConfig, run_dir: Path) -> int:
    """Trains, evaluates, and leaves config.yaml, progress.csv, learning_curve.png and checkpoint.zip in `run_dir`.

    Returns:
        The exit code.
    """
    cfg = typed(config, Config)
    dqn = cfg.dqn
    if cfg.resume is None and (run_dir / CONFIG).exists():
        raise ConfigError(
            f"{run_dir} holds a run already: go on with it (resume={run_dir}), or choose another directory"
        )
    device = find_device(cfg.device)
    if cfg.cudagraphs and device.type != "cuda":
        raise ConfigError(f"cudagraphs=true: needs a CUDA device, this is {device}")
    torch.set_num_threads(cfg.num_threads)
    seed_everything(cfg.seed)

    # Environments: one to learn in, and one per evaluation episode.
    evaluation_envs = [make_env(cfg.env.id) for _ in range(dqn.evaluation_episodes)]
    training_env = make_env(cfg.env.id)

    # Networks and loss.
    sizes = [flatdim(training_env.observation_space), *dqn.hidden_sizes]
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(sizes[-1], flatdim(training_env.action_space))).to(device)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(
        actor, loss_function="smooth_l1", delay_value=True, double_dqn=True, action_space="categorical"
    )
    loss_module.make_value_estimator(gamma=dqn.gamma)
    # HardUpdate copies at every (interval + 1)-th call of step(): with 0, at each.
    target_update = HardUpdate(loss_module, value_network_update_interval=0)
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=dqn.learning_rate, fused=True)

    # The loss writes the SQUARED TD error to "td_error": what the samplers expect by default (td_error="squared": they
    # take the root). It also applies the sampler's "priority_weight" by itself.
    sampler = make_sampler(cfg.sampler, dqn.buffer_size, dqn.num_updates(), cfg.num_envs)
    replay = CompilableReplayBuffer(
        storage=CompilableTensorStorage(dqn.buffer_size, device=device),
        sampler=sampler,
        batch_size=dqn.batch_size,
        priority_key="td_error",
    )

    def loss_function(sample: TensorDictBase) -> torch.Tensor:
        return loss_module(sample)["loss"]

    @torch.inference_mode()
    def greedy(observations: np.ndarray) -> np.ndarray:
        return network(torch.as_tensor(observations, device=device)).argmax(-1).cpu().numpy()

    # The environments run on the CPU, and their batches stay there until the buffer takes them.
    if cfg.num_envs > 1:
        collector = VectorCollector(
            [partial(make_env, cfg.env.id)] * cfg.num_envs,
            greedy,
            frames_per_batch=dqn.train_interval,
            seed=cfg.seed,
        )

        def set_epsilon(epsilon: float) -> None:
            collector.epsilon = epsilon

    else:
        env = GymWrapper(training_env, categorical_action_encoding=True, device=None)
        env.set_seed(cfg.seed)
        # Where the networks are on the CPU too, no device is named: that saves a fifth of the time per step.
        on_cpu = device.type == "cpu"
        devices = {} if on_cpu else {"policy_device": device, "env_device": "cpu", "storing_device": "cpu"}
        exploration = EGreedyModule(env.action_spec, eps_init=1.0, eps_end=0.0, device=device)
        collector = Collector(
            env,
            TensorDictSequential([actor, exploration]),
            frames_per_batch=dqn.train_interval,
            auto_register_policy_transforms=False,
            **devices,
        )

        def set_epsilon(epsilon: float) -> None:
            exploration.get_buffer("eps").fill_(epsilon)

    # Everything a resumed run needs. The environment itself cannot be saved: a resumed run starts a new episode,
    # drawn from the generator's saved state.
    counters: dict[str, Any] = {
        "env_steps": 0,
        "updates": 0,
        "evaluations": 0,
        "last_return": None,
        "best_return": None,
        "reached_at": None,
        "wall_time": 0.0,
        "env_generator": None,
    }
    state = {
        "loss": loss_module,
        "optimizer": optimizer,
        "replay": replay,
        "collector": collector,
        "global_rng": GlobalRNGState(),
        "counters": counters,
    }

    def finished() -> bool:
        solved = counters["reached_at"] is not None and cfg.stop_at_threshold
        return solved or counters["env_steps"] >= dqn.total_steps

    env_generator = training_env.unwrapped.np_random.bit_generator
    if cfg.resume is not None:
        load_checkpoint(run_dir, device, **state)
        env_generator.state = counters["env_generator"]
        collector.reset()
        if not finished():
            end_last_episodes(replay, cfg.num_envs)
    progress = Progress(run_dir, cfg.logger.csv, cfg.logger.backend, until=counters["env_steps"])
    OmegaConf.save(OmegaConf.merge(config, {"resume": None}), run_dir / CONFIG)

    def save() -> None:
        counters["wall_time"] = time.time() - started
        counters["env_generator"] = env_generator.state
        save_checkpoint(run_dir, **state)

    # With one call per batch, the batch is written in the same graph. On a GPU it has to come from the CPU first.
    extends = cfg.compile and dqn.gradient_steps == cfg.updates_per_graph and device.type == "cpu"
    # Made after a checkpoint was loaded, since that replaces the optimizer's tensors.
    if cfg.compile:
        compiled = CompiledUpdate(
            replay,
            loss_function,
            optimizer,
            dqn.max_grad_norm,
            targets=value_targets(loss_module),
            num_updates=cfg.updates_per_graph,
            extends=extends,
            cudagraphs=cfg.cudagraphs,
        )
    update = eager_update(replay, loss_function, optimizer, dqn.max_grad_norm)

    started = time.time() - counters["wall_time"]
    losses: list[torch.Tensor] = []
    bar = tqdm(
        total=dqn.total_steps,
        initial=counters["env_steps"],
        desc=f"{cfg.env.name} {cfg.sampler['name']} seed {cfg.seed}",
        unit="step",
        mininterval=0.5,
    )
    with interruption() as interrupted, bar:
        batches = iter(collector)
        while not finished() and not interrupted():
            # Collect.
            set_epsilon(dqn.epsilon(counters["env_steps"]))
            batch = next(batches)
            previous_steps = counters["env_steps"]
            counters["env_steps"] += batch.numel()
            data = batch.select(*STORED_KEYS)
            learning = counters["env_steps"] > dqn.learning_starts
            if not (learning and extends):
                replay.extend(data)
            interval = dqn.target_update_interval
            target_due = counters["env_steps"] // interval > previous_steps // interval

            # Learn.
            if target_due and not (learning and cfg.compile):
                target_update.step()
            if learning and cfg.compile:
                for i in range(dqn.gradient_steps // cfg.updates_per_graph):
                    losses.append(compiled(data, target_due=target_due and i == 0).clone())
            elif learning:
                losses.extend(update() for _ in range(dqn.gradient_steps))
            if learning:
                counters["updates"] += dqn.gradient_steps

            # Evaluate.
            if dqn.evaluations_due(counters["env_steps"]) > counters["evaluations"]:
                counters["evaluations"] = dqn.evaluations_due(counters["env_steps"])
                returns = evaluate(
                    greedy,
                    evaluation_envs,
                    epsilon=dqn.evaluation_epsilon,
                    seed=[cfg.seed, counters["evaluations"]],
                )
                mean_return = sum(returns) / len(returns)
                row = {
                    "env_steps": counters["env_steps"],
                    "updates": counters["updates"],
                    "return_mean": mean_return,
                    **{f"return_{i}": value for i, value in enumerate(returns)},
                    "epsilon": dqn.epsilon(counters["env_steps"]),
                    "loss": torch.cat(losses).mean().item() if losses else math.nan,
                    "wall_time": time.time() - started,
                }
                if isinstance(sampler, PRIORITIZED):
                    row |= {f"sampler/{key}": value.item() for key, value in sampler.stats().items()}
                progress.write(row)
                bar.set_postfix({key: f"{row[key]:.3g}" for key in ("return_mean", "epsilon", "loss")}, refresh=False)
                losses.clear()
                counters["last_return"] = mean_return
                best = counters["best_return"]
                counters["best_return"] = mean_return if best is None else max(best, mean_return)
                threshold = cfg.env.reward_threshold
                if counters["reached_at"] is None and threshold is not None and mean_return >= threshold:
                    counters["reached_at"] = counters["env_steps"]
            bar.update(counters["env_steps"] - previous_steps)

            if counters["env_steps"] // cfg.checkpoint_interval > previous_steps // cfg.checkpoint_interval:
                save()
        save()

    collector.shutdown()
    for environment in evaluation_envs:
        environment.close()
    if not finished():
        print(f"interrupted at step {counters['env_steps']}; go on with resume={run_dir}")
        return INTERRUPTED
    if cfg.logger.csv:
        plot_runs([run_dir], run_dir / CURVE)
    print(summary(counters, cfg.env.reward_threshold, run_dir))
    return DONE


def end_last_episodes(replay: TensorDictReplayBuffer, num_envs: int = 1) -> None:
    """Marks each environment's newest transition as truncated where its episode goes on: a resumed run begins new ones.

    What is stored cannot be changed behind the sampler's back, so it is the newest transition once more that ends it.
    """
    newest = (replay.write_count - num_envs + torch.arange(num_envs)) % replay.storage.max_size
    transitions = replay[newest].select(*STORED_KEYS).clone()
    transitions = transitions[~transitions["next", "done"].squeeze(1)]
    if len(transitions):
        transitions["next", "truncated"] = torch.ones_like(transitions["next", "truncated"])
        transitions["next", "done"] = torch.ones_like(transitions["next", "done"])
        replay.extend(transitions)


def summary(counters: dict[str, Any], threshold: float | None, run_dir: Path) -> str:
    """The line a finished run ends with."""
    if counters["reached_at"] is not None:
        outcome = f"reached {threshold:g} at step {counters['reached_at']}"
    elif threshold is not None:
        outcome = f"did not reach {threshold:g} in {counters['env_steps']} steps"
    else:
        outcome = f"{counters['env_steps']} steps"
    return f"{outcome} | best return {counters['best_return']:g}, last {counters['last_return']:g} | files in {run_dir}"


if __name__ == "__main__":
    run_recipe(train, "dqn")
