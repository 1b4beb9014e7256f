"""The training loop of every recipe: collect, learn, evaluate, log, save."""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError
from torchrl.checkpoint import GlobalRNGState
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from recipes.common.checkpoint import load_checkpoint, save_checkpoint
from recipes.common.cli import (
    CHECKPOINT,
    CONFIG,
    DONE,
    FAILED,
    INTERRUPTED,
    ConfigError,
    LostProcess,
    interruption,
    reason,
)
from recipes.common.collector import VectorCollector
from recipes.common.config import EnvConfig, RunConfig
from recipes.common.environment import make_env
from recipes.common.evaluation import evaluate
from recipes.common.files import atomic_write
from recipes.common.progress import Means, Progress, warn
from recipes.common.replay import PRIORITIZED, end_last_episodes, stored_keys
from recipes.common.video import Camera
from recipes.plot import plot_runs

if TYPE_CHECKING:
    # recipes.common.remote imports Ray if it is installed, which takes a second
    from recipes.common.remote import RemoteCollector, RemoteReplay

CURVE = "learning_curve.png"
NORMALIZED = "human_normalized"


@dataclass(kw_only=True)
class Agent:
    """The parts of a recipe that the training loop uses.

    Args:
        collector: yields batches of transitions.
        replay: the buffer.
        explore: called before each batch with the number of env steps so far.
        learn: called with a batch and the number of env steps including it. Writes the batch to the buffer, makes the
            updates and returns the numbers to log, as dicts of tensors [updates].
        policy: the policy to evaluate; maps observations [n, ...] to actions [n, ...].
        losses: names of the numbers that `learn` returns.
        shown: names of the numbers that the progress bar shows.
        state: networks, optimizers and other objects with state, for the checkpoint.
        stores: entries of a batch to store in addition to recipes.common.replay.stored_keys; None: the collector writes
            to the buffer itself. Default: ().
        evaluation_epsilon: probability of a random action in evaluations, for discrete actions. Default: 0.
        columns: maps the number of env steps to further numbers to log. Default: none.
    """

    collector: "VectorCollector | RemoteCollector"
    replay: "TensorDictReplayBuffer | RemoteReplay"
    explore: Callable[[int], None]
    learn: Callable[[TensorDictBase, int], list[dict[str, Tensor]]]
    policy: Callable[[np.ndarray], np.ndarray]
    losses: tuple[str, ...]
    shown: tuple[str, ...]
    state: dict[str, Any]
    stores: tuple[str, ...] | None = ()
    evaluation_epsilon: float = 0.0
    columns: Callable[[int], dict[str, float]] = lambda _steps: {}


def prepare(cfg: RunConfig, run_dir: Path) -> torch.device:
    """Check the run directory and the device, set threads and seeds, and return the device."""
    if cfg.resume is None and (run_dir / CONFIG).exists():
        raise ConfigError(f"{run_dir} holds a run already: resume it (resume={run_dir}) or choose another directory")
    device = find_device(cfg.device)
    if cfg.cudagraphs and device.type != "cuda":
        raise ConfigError(f"cudagraphs=true: needs a CUDA device, the device is {device}")
    torch.set_num_threads(cfg.num_threads)
    seed_everything(cfg.seed)
    return device


def find_device(name: str) -> torch.device:
    """The torch device of this name; `auto` is the first CUDA device, or the CPU if there is none."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name}: {str(error).splitlines()[0]}") from error
    return device


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def further_evaluation_envs(env: EnvConfig, episodes: int) -> dict[str, list[gymnasium.Env]]:
    """The environments of env.evaluations by name, one per episode."""
    configs = {name: replace(env, options=env.options | options) for name, options in env.evaluations.items()}
    return {name: [make_env(config) for _ in range(episodes)] for name, config in configs.items()}


def run(
    agent: Agent,
    evaluation_envs: list[gymnasium.Env],
    cfg: RunConfig,
    config: DictConfig,
    run_dir: Path,
    device: torch.device,
) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        agent: the recipe's parts.
        evaluation_envs: one environment per evaluation episode.
        cfg: the checked configuration.
        config: the configuration as read, to be saved in config.yaml.
        run_dir: directory of the run.
        device: device of the networks.

    Returns:
        The exit code.
    """
    learning, collector, replay = cfg.learning, agent.collector, agent.replay
    stored = None if agent.stores is None else (*stored_keys(cfg.env), *agent.stores)
    further_envs = further_evaluation_envs(cfg.env, learning.evaluation_episodes)

    # The checkpoint holds the complete state, so a resumed run continues as if it had never stopped.
    counters: dict[str, Any] = {
        "env_steps": 0,
        "updates": 0,
        "evaluations": 0,
        "last_return": None,
        "best_return": None,
        "reached_at": None,
        "wall_time": 0.0,
    }
    losses = Means()
    state = agent.state | {
        "replay": replay,
        "collector": collector,
        "losses": losses,
        "counters": counters,
        "global_rng": GlobalRNGState(),
    }

    def finished() -> bool:
        solved = counters["reached_at"] is not None and cfg.stop_at_threshold
        return solved or counters["env_steps"] >= learning.total_steps

    if cfg.resume is not None:
        load_checkpoint(run_dir, device, **state)
        lost = collector.resume()
        if lost and isinstance(replay, TensorDictReplayBuffer) and not finished():
            end_last_episodes(replay, cfg.num_envs, lost)
            warn(f"the state of {len(lost)} of {cfg.num_envs} environments cannot be restored; they start new episodes")
    camera = Camera(cfg.env, run_dir) if cfg.video else None
    try:
        progress = Progress(run_dir, cfg.logger.csv, cfg.logger.backend, until=counters["env_steps"])
        with atomic_write(run_dir / CONFIG) as path:
            OmegaConf.save(OmegaConf.merge(config, {"resume": None}), path)
    except OSError as error:
        raise ConfigError(f"{run_dir}: {reason(error)}") from error

    def save() -> bool:
        counters["wall_time"] = time.time() - started
        try:
            progress.flush()
            save_checkpoint(run_dir, **state)
        except (OSError, LostProcess) as error:
            warn(f"step {counters['env_steps']} could not be saved in {run_dir}: {reason(error)}")
            return False
        return True

    def record_video() -> None:
        if camera is None:
            return
        step, seed = counters["env_steps"], [cfg.seed, counters["evaluations"]]
        try:
            frames = camera.record(agent.policy, epsilon=agent.evaluation_epsilon, seed=seed, step=step)
        except OSError as error:
            warn(f"no video of step {step} in {run_dir}: {reason(error)}")
            return
        progress.show(frames, step)

    def play(envs: list[gymnasium.Env]) -> list[float]:
        seed = [cfg.seed, counters["evaluations"]]
        return evaluate(agent.policy, envs, epsilon=agent.evaluation_epsilon, seed=seed)

    def evaluate_and_log() -> None:
        counters["evaluations"] = learning.evaluations_due(counters["env_steps"])
        returns = play(evaluation_envs)
        mean_return = sum(returns) / len(returns)
        row = {
            "env_steps": counters["env_steps"],
            "updates": counters["updates"],
            "return_mean": mean_return,
            **{f"return_{i}": value for i, value in enumerate(returns)},
            **{f"return_{name}": sum(play(envs)) / len(envs) for name, envs in further_envs.items()},
            **({} if (normalized := cfg.env.human_normalized(mean_return)) is None else {NORMALIZED: normalized}),
            **agent.columns(counters["env_steps"]),
            **losses.take(agent.losses),
            "wall_time": time.time() - started,
        }
        histograms: dict[str, Tensor] = {}
        if isinstance(replay, TensorDictReplayBuffer) and isinstance(replay.sampler, PRIORITIZED):
            row |= {f"sampler/{key}": value.item() for key, value in replay.sampler.stats().items()}
            if cfg.logger.backend is not None:
                share = replay.sampler.probabilities(replay.storage)
                # relative to uniform sampling
                histograms["sampler/probability"] = share[share > 0] * (share > 0).sum()
        progress.write(row, histograms)
        record_video()
        bar.set_postfix({key: f"{row[key]:.3g}" for key in agent.shown}, refresh=False)
        counters["last_return"] = mean_return
        best = counters["best_return"]
        counters["best_return"] = mean_return if best is None else max(best, mean_return)
        threshold = cfg.env.reward_threshold
        if counters["reached_at"] is None and threshold is not None and mean_return >= threshold:
            counters["reached_at"] = counters["env_steps"]

    started = time.time() - counters["wall_time"]
    bar = tqdm(
        total=learning.total_steps,
        initial=counters["env_steps"],
        desc=f"{cfg.env.name} {cfg.sampler['name']} seed {cfg.seed}",
        unit="step",
        mininterval=0.5,
    )
    lost_process: LostProcess | None = None
    aborted = False
    with interruption() as interrupted, bar:
        try:
            batches = iter(collector)
            while not finished() and not interrupted():
                # Collect.
                agent.explore(counters["env_steps"])
                batch = next(batches)
                previous_steps = counters["env_steps"]
                counters["env_steps"] += batch.numel()
                data = batch if stored is None else batch.select(*stored)

                # Learn.
                if counters["env_steps"] > learning.learning_starts:
                    for result in agent.learn(data, counters["env_steps"]):
                        losses.add(result)
                        counters["updates"] += max(map(len, result.values()))
                else:
                    replay.extend(data)

                # Evaluate.
                if learning.evaluations_due(counters["env_steps"]) > counters["evaluations"]:
                    evaluate_and_log()
                bar.update(counters["env_steps"] - previous_steps)

                if counters["env_steps"] // cfg.checkpoint_interval > previous_steps // cfg.checkpoint_interval:
                    save()
        except LostProcess as error:
            lost_process = error
        except (TorchDynamoException, CppCompileError):
            # Ctrl-C in a terminal also ends the compiler's processes.
            if not interrupted():
                raise
            aborted = True
        # The last batch was collected but its updates were not made: do not save this state.
        saved = aborted or save()

    collector.shutdown()
    if lost_process is not None:
        sys.stderr.write(f"stopped at step {counters['env_steps']}: {lost_process}\n")
    for environment in chain(evaluation_envs, *further_envs.values(), [camera] if camera else []):
        environment.close()
    if not saved:
        before = (
            f"resume={run_dir} continues from the previous one"
            if (run_dir / CHECKPOINT).is_file()
            else "there is no previous one"
        )
        sys.stderr.write(f"the final checkpoint could not be saved; {before}\n")
        return FAILED
    if lost_process is not None:
        sys.stderr.write(f"continue with resume={run_dir}\n")
        return FAILED
    if aborted:
        before = f"continue with resume={run_dir}" if (run_dir / CHECKPOINT).is_file() else "there is no checkpoint yet"
        print(f"interrupted at step {counters['env_steps']} while the update was being compiled; {before}")
        return INTERRUPTED
    if not finished():
        print(f"interrupted at step {counters['env_steps']}; continue with resume={run_dir}")
        return INTERRUPTED
    if cfg.logger.csv:
        try:
            plot_runs([run_dir], run_dir / CURVE)
        except OSError as error:
            sys.stderr.write(
                f"{run_dir / CURVE}: {reason(error)}; free disk space, then run: python -m recipes.plot {run_dir}\n"
            )
            return FAILED
    print(summary(counters, cfg.env.reward_threshold, run_dir))
    return DONE


def summary(counters: dict[str, Any], threshold: float | None, run_dir: Path) -> str:
    """The last line that a finished run prints."""
    if counters["reached_at"] is not None:
        outcome = f"reached {threshold:g} at step {counters['reached_at']}"
    elif threshold is not None:
        outcome = f"did not reach {threshold:g} in {counters['env_steps']} steps"
    else:
        outcome = f"{counters['env_steps']} steps"
    return f"{outcome} | best return {counters['best_return']:g}, last {counters['last_return']:g} | files in {run_dir}"
