"""Measures training loops of the recipes, of TorchRL and of stable-baselines3, each as its users run it.

DQN runs on CartPole, TD3 and SAC on HalfCheetah, ACER on CartPole. All loops of an algorithm have the same environment,
network sizes, batch size, capacity and updates per step, and one environment; ACER's recipe has 8. No peer has ACER.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Semaphore, Thread
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tqdm import tqdm

from recipes.benchmark.results import LeftOutError, Row
from recipes.benchmark.timing import in_shares, require_time
from recipes.benchmark.training_peers import SETTINGS, stable_baselines3_loop, torchrl_loop
from recipes.benchmark.updates import CONF
from recipes.common import run

MEASUREMENT = "training"
CHUNKS = 4
ACER_SIZES = (50_000, 320)  # capacity and batch size

# Makes at least so many steps of the environment and returns how many.
TrainingLoop = Callable[[int], int]

OVERRIDES = {
    "dqn": (
        "env=cartpole",
        "dqn.train_interval=10",
        "dqn.gradient_steps=1",
        "dqn.target_update_interval=500",
        "dqn.initial_epsilon=0.1",
        "dqn.final_epsilon=0.1",
    ),
    "td3": ("env=halfcheetah",),
    "sac": ("env=halfcheetah",),
    "acer": ("env=cartpole", f"acer.buffer_size={ACER_SIZES[0]}", f"acer.batch_size={ACER_SIZES[1]}"),
}
# TD3 and SAC make an update per step, the others fewer
MORE_STEPS = {"dqn": 10, "td3": 1, "sac": 1, "acer": 10}


def recipe_loop(algorithm: str, directory: Path, *, sampler: str, compiled: bool) -> TrainingLoop:
    """The loop of a recipe, without evaluations, logs and checkpoints."""
    overrides = [
        *OVERRIDES[algorithm],
        f"sampler={sampler}",
        f"compile={compiled}",
        "device=cpu",
        "logger=none",
        f"{algorithm}.total_steps=1000000",
        f"{algorithm}.learning_starts=0",
        f"{algorithm}.num_evaluations=1",
        f"{algorithm}.evaluation_episodes=1",
        "checkpoint_interval=1000000",
    ]
    if (settings := SETTINGS.get(algorithm)) is not None:
        overrides += [
            f"{algorithm}.buffer_size={settings.capacity}",
            f"{algorithm}.batch_size={settings.batch_size}",
            f"{algorithm}.hidden_sizes={list(settings.hidden_sizes)}",
        ]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        config = compose(algorithm, overrides=overrides)
    run_dir = directory / f"{algorithm}-{sampler}-{compiled}"
    run_dir.mkdir()
    return PausedTraining(algorithm, config, run_dir)


class PausedTraining:
    """The training of a recipe, in a thread that waits after each chunk of steps.

    Args:
        algorithm: the recipe.
        config: its configuration.
        run_dir: directory of the run.
    """

    def __init__(self, algorithm: str, config: DictConfig, run_dir: Path):
        module = import_module(f"recipes.{algorithm}")
        self._steps = self._until = 0
        self._closed = False
        self._turn, self._waiting = Semaphore(0), Semaphore(0)
        self._error: BaseException | None = None
        pause = self.pause

        class PausedRun(run.Run):
            def continues(self) -> bool:
                pause(self.env_steps)
                return True

        # no progress bar, and no signal handlers, which only the main thread can set
        with (
            patch.object(module, "Run", PausedRun),
            patch.object(run, "tqdm", partial(tqdm, disable=True)),
            patch.object(run, "interruption", lambda: nullcontext(lambda: False)),
        ):
            self._thread = Thread(target=self._train, args=(module.train, config, run_dir), daemon=True)
            self._thread.start()
            self._wait()

    def __call__(self, num_env_steps: int) -> int:
        """Make at least so many env steps and return how many."""
        before = self._steps
        self._until = before + num_env_steps
        self._turn.release()
        self._wait()
        return self._steps - before

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._turn.release()
        self._thread.join()

    def _wait(self) -> None:
        self._waiting.acquire()
        if self._error is not None:
            raise self._error

    def _train(self, train: Callable[[DictConfig, Path], int], config: DictConfig, run_dir: Path) -> None:
        try:
            train(config, run_dir)
        except BaseException as error:
            self._error = error
            self._waiting.release()

    def pause(self, steps: int) -> None:
        """Called before each round: waits for the next chunk."""
        self._steps = steps
        if steps >= self._until:
            self._waiting.release()
            self._turn.acquire()
        if self._closed:
            raise RuntimeError("closed")  # leaves the training loop


# Name -> function of the algorithm, the number of steps per chunk and a directory that builds the loop.
LOOPS: dict[str, Callable[[str, int, Path], TrainingLoop]] = {
    "TorchRL": lambda algorithm, chunk, directory: torchrl_loop(algorithm, chunk),
    "stable-baselines3": lambda algorithm, chunk, directory: stable_baselines3_loop(algorithm),
    "recipe, uniform": lambda algorithm, chunk, directory: recipe_loop(
        algorithm, directory, sampler="uniform", compiled=False
    ),
    "compiled recipe, PER": lambda algorithm, chunk, directory: recipe_loop(
        algorithm, directory, sampler="per", compiled=True
    ),
}
NAMES = tuple(LOOPS)


def measure_training(names: Sequence[str], env_steps: int) -> tuple[list[Row], list[str]]:
    """Measure the CPU time of chunks of steps; the loops of an algorithm take turns.

    The first chunk of every loop is a warm-up and is not counted.

    Args:
        names: loops to measure, from NAMES.
        env_steps: number of measured env steps per loop of TD3 and SAC; DQN and ACER make ten times as many.

    Returns:
        The rows, and a note for each skipped loop.
    """
    rows: list[Row] = []
    notes: dict[str, None] = {}
    for algorithm in in_shares(OVERRIDES):
        chunk = MORE_STEPS[algorithm] * env_steps // CHUNKS
        seconds: dict[str, list[float]] = {}
        with ExitStack() as stack:
            directory = Path(stack.enter_context(TemporaryDirectory()))
            loops: dict[str, TrainingLoop] = {}
            for name in (name for name in NAMES if name in names):
                if algorithm not in SETTINGS and "recipe" not in name:
                    continue
                try:
                    require_time()
                    loops[name] = loop = LOOPS[name](algorithm, chunk, directory)
                except LeftOutError as error:
                    notes[f"{name} is skipped: {error}."] = None
                    continue
                if isinstance(loop, PausedTraining):
                    stack.callback(loop.close)
            for number in tqdm(range(-1, CHUNKS), desc=f"{MEASUREMENT}, {algorithm}", leave=False):
                for name, loop in loops.items():
                    start = time.process_time()
                    steps = loop(chunk)
                    stop = time.process_time()
                    if number >= 0:
                        seconds.setdefault(name, []).append((stop - start) / steps)
        settings = SETTINGS.get(algorithm)
        sizes = (settings.capacity, settings.batch_size) if settings is not None else ACER_SIZES
        rows += [
            Row(MEASUREMENT, algorithm, name, *sizes, microseconds=1e6 * statistics.median(values))
            for name, values in seconds.items()
        ]
    return rows, list(notes)
