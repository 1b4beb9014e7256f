"""The frame of a training loop: checkpoints, evaluations, logs, the progress bar and Ctrl-C."""

import math
import random
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

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
from recipes.common.cli import CHECKPOINT, CONFIG, DONE, FAILED, INTERRUPTED, interruption, reason
from recipes.common.collector import VectorCollector
from recipes.common.config import RunConfig
from recipes.common.csv_files import reaches
from recipes.common.curves import plot_runs
from recipes.common.errors import ConfigError, LostProcess
from recipes.common.evaluation import Evaluation, Policy
from recipes.common.files import atomic_write, locked
from recipes.common.progress import Means, Progress, warn
from recipes.common.replay import PRIORITIZED, end_last_episodes, require_frames, stored_keys
from recipes.common.video import Camera

if TYPE_CHECKING:
    # recipes.common.remote imports Ray if it is installed, which takes a second
    from recipes.common.remote import RemoteCollector, RemoteReplay

CURVE = "learning_curve.png"


def prepare(config: RunConfig, run_dir: Path) -> torch.device:
    """Check the run directory and the device, set threads and seeds, and return the device."""
    if config.resume is None and (run_dir / CONFIG).exists():
        raise ConfigError(f"{run_dir} holds a run already: resume it (resume={run_dir}) or choose another directory")
    device = find_device(config.device)
    if config.cudagraphs and device.type != "cuda":
        raise ConfigError(f"cudagraphs=true: needs a CUDA device, the device is {device}")
    torch.set_num_threads(config.num_threads)
    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
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


@dataclass
class Counters:
    """The progress of a run; times are in seconds.

    Args:
        env_steps: environment steps.
        updates: gradient updates.
        evaluations: evaluations.
        last_return: mean return of the last evaluation; None before the first.
        best_return: the best mean return so far; None before the first evaluation.
        reached_at: environment steps at which an evaluation reached the threshold; None: none has.
        wall_time: time, including that before a resume.
        cpu_time: CPU time of this process, including that before a resume.
    """

    env_steps: int = 0
    updates: int = 0
    evaluations: int = 0
    last_return: float | None = None
    best_return: float | None = None
    reached_at: int | None = None
    wall_time: float = 0.0
    cpu_time: float = 0.0


@dataclass(kw_only=True)
class Log:
    """The evaluations and logs of a run.

    Args:
        evaluation: the environments.
        policy: the policy to evaluate; see recipes.common.evaluation.evaluate.
        epsilon: probability of a random action in evaluations, for discrete actions. Default: 0.
        value: maps observations and actions to values, see recipes.common.evaluation.evaluate. Default: None.
        losses: names of the numbers that the updates return.
        columns: maps the number of env steps to further numbers to log. Default: none.
        shown: names of the numbers that the progress bar shows.
    """

    evaluation: Evaluation
    policy: Policy
    epsilon: float = 0.0
    value: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    losses: tuple[str, ...]
    columns: Callable[[int], dict[str, float]] = lambda _steps: {}
    shown: tuple[str, ...]


class Run:
    """A training run: everything around the loop that the recipe writes.

        run = Run(config, raw_config, run_dir, device, collector=collector, replay=replay, log=Log(...), state={...})
        with run:
            while run.continues():
                data = run.collect()
                ...                      # write data to the buffer, make updates
                run.log_losses(losses)
                run.end_round()
        return run.exit_code

    The directory of the run receives config.yaml, progress.csv, learning_curve.png and checkpoint.zip. The checkpoint
    holds the complete state: a resumed run continues as if it had never stopped. It is loaded by the constructor, so
    graphs must be compiled, and the steps of optimizers made, after it.

    Ctrl-C ends the loop after the current round. An error of a lost process (LostProcess) inside the ``with`` block
    ends it, too; other errors are passed on.

    Args:
        config: the checked configuration.
        raw_config: the configuration as read, to be saved in config.yaml.
        run_dir: directory of the run.
        device: device of the networks.
        collector: yields batches of transitions.
        replay: the buffer.
        log: what to evaluate and log.
        state: networks, optimizers and other objects with state, for the checkpoint.
        stores: entries of a batch to store in addition to recipes.common.replay.stored_keys; None: the collector writes
            to the buffer itself. Default: ().
    """

    def __init__(
        self,
        config: RunConfig,
        raw_config: DictConfig,
        run_dir: Path,
        device: torch.device,
        *,
        collector: "VectorCollector | RemoteCollector",
        replay: "TensorDictReplayBuffer | RemoteReplay",
        log: Log,
        state: Mapping[str, Any],
        stores: tuple[str, ...] | None = (),
    ):
        self._config, self._raw_config, self._run_dir, self._log = config, raw_config, run_dir, log
        self._collector, self._replay = collector, replay
        self._batches = iter(collector)
        self._stored = None if stores is None else (*stored_keys(config.env, config.learning.n_step), *stores)
        self._counters = Counters()
        self._losses = Means()
        self._state = {
            **state,
            "replay": replay,
            "collector": collector,
            "losses": self._losses,
            # the attributes themselves: loading a checkpoint sets them
            "counters": vars(self._counters),
            "global_rng": GlobalRNGState(),
        }
        self.exit_code = FAILED
        if config.resume is not None:
            self._resume(device)
        self._previous_steps = self._counters.env_steps
        self._camera = Camera(config.env, run_dir) if config.video else None

    @property
    def updates(self) -> int:
        """Updates so far."""
        return self._counters.updates

    @property
    def env_steps(self) -> int:
        """Number of environment steps so far."""
        return self._counters.env_steps

    def _resume(self, device: torch.device) -> None:
        load_checkpoint(self._run_dir, device, **self._state)
        # checkpoints of earlier versions have no CPU time
        vars(self._counters).setdefault("cpu_time", math.nan)
        lost = self._collector.resume()
        if lost and isinstance(self._replay, TensorDictReplayBuffer) and not self._finished():
            num_envs = self._config.num_envs
            if not self._collector.holds_newest:
                end_last_episodes(self._replay, num_envs, lost)
            warn(f"the state of {len(lost)} of {num_envs} environments cannot be restored; they start new episodes")

    def __enter__(self) -> "Run":
        config, run_dir = self._config, self._run_dir
        with ExitStack() as opened:
            try:
                opened.enter_context(locked(run_dir))
                self._progress = Progress(run_dir, config.logger.csv, config.logger.backend, until=self.env_steps)
                with atomic_write(run_dir / CONFIG) as path:
                    changed = {"sampler": config.sampler, "resume": None}
                    OmegaConf.save(OmegaConf.merge(OmegaConf.to_container(self._raw_config), changed), path)
            except BlockingIOError as error:
                raise ConfigError(f"{run_dir}: another process trains there") from error
            except OSError as error:
                raise ConfigError(f"{run_dir}: {reason(error)}") from error
            self._started = time.time() - self._counters.wall_time
            self._cpu_started = time.process_time() - self._counters.cpu_time
            self._interrupted = opened.enter_context(interruption())
            self._bar = opened.enter_context(
                tqdm(
                    total=config.learning.total_steps,
                    initial=min(self.env_steps, config.learning.total_steps),
                    desc=f"{config.env.name} {config.sampler['name']} seed {config.seed}",
                    unit="step",
                    mininterval=0.5,
                )
            )
            # closed by __exit__
            self._open = opened.pop_all()
        return self

    def _solved(self) -> bool:
        return self._counters.reached_at is not None and self._config.stop_at_threshold

    def _finished(self) -> bool:
        return self._solved() or self.env_steps >= self._config.learning.total_steps

    def continues(self) -> bool:
        """Whether another round follows: the run is neither finished nor interrupted."""
        return not self._finished() and not self._interrupted()

    def collect(self) -> TensorDictBase:
        """Collect a batch of ``train_interval`` transitions, count its steps and return the entries to store."""
        batch = next(self._batches)
        self._previous_steps = self.env_steps
        self._counters.env_steps += self._collector.steps_of_batch
        return batch if self._stored is None else batch.select(*self._stored)

    def log_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Count and log updates; `losses` are tensors [updates] by name, as an update returns them."""
        self._losses.add(losses)
        self._counters.updates += max(map(len, losses.values()))

    def end_round(self) -> None:
        """Evaluate and save a checkpoint, if they are due, and move the progress bar."""
        learning, interval, steps = self._config.learning, self._config.checkpoint_interval, self.env_steps
        if learning.evaluations_due(steps) > self._counters.evaluations:
            self._evaluate()
        self._bar.update(min(steps, learning.total_steps) - self._bar.n)
        if interval is not None and steps // interval > self._previous_steps // interval:
            self._save()

    def _evaluate(self) -> None:
        config, log, counters = self._config, self._log, self._counters
        counters.evaluations = config.learning.evaluations_due(self.env_steps)
        seed = [config.seed, counters.evaluations]
        row = {
            "env_steps": self.env_steps,
            "updates": counters.updates,
            **log.evaluation.columns(log.policy, epsilon=log.epsilon, seed=seed, value=log.value),
            **log.columns(self.env_steps),
            **self._losses.take(log.losses),
            "wall_time": time.time() - self._started,
            "cpu_time": time.process_time() - self._cpu_started,
        }
        histograms: dict[str, Tensor] = {}
        if isinstance(self._replay, TensorDictReplayBuffer):
            require_frames(self._replay)
            if isinstance(self._replay.sampler, PRIORITIZED):
                row |= {f"sampler/{key}": value.item() for key, value in self._replay.sampler.stats().items()}
                if config.logger.backend is not None:
                    share = self._replay.sampler.probabilities(self._replay.storage)
                    # relative to uniform sampling
                    histograms["sampler/probability"] = share[share > 0] * (share > 0).sum()
        self._progress.write(row, histograms)
        self._record_video(seed)
        self._bar.set_postfix({key: f"{row[key]:.3g}" for key in log.shown}, refresh=False)
        score, best, threshold = row["return_mean"], counters.best_return, config.env.reward_threshold
        counters.last_return = score
        counters.best_return = score if best is None else max(best, score)
        if counters.reached_at is None and threshold is not None and reaches(score, threshold):
            counters.reached_at = self.env_steps

    def _record_video(self, seed: list[int]) -> None:
        if self._camera is None:
            return
        try:
            frames = self._camera.record(self._log.policy, epsilon=self._log.epsilon, seed=seed, step=self.env_steps)
        except OSError as error:
            warn(f"no video of step {self.env_steps} in {self._run_dir}: {reason(error)}")
            return
        self._progress.show(frames, self.env_steps)

    def _save(self) -> bool:
        self._counters.wall_time = time.time() - self._started
        self._counters.cpu_time = time.process_time() - self._cpu_started
        try:
            self._progress.flush()
            save_checkpoint(self._run_dir, **self._state)
        except (OSError, LostProcess) as error:
            warn(f"step {self.env_steps} could not be saved in {self._run_dir}: {reason(error)}")
            return False
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Ctrl-C in a terminal also ends the compiler's processes.
        aborted = isinstance(error, (TorchDynamoException, CppCompileError)) and self._interrupted()
        known = error is None or aborted or isinstance(error, LostProcess)
        with self._open:
            # After an aborted update, the last batch was collected but its updates were not made: nothing is saved.
            saved = known and (aborted or self._save())
        self._collector.shutdown()
        self._log.evaluation.close()
        if self._camera is not None:
            self._camera.close()
        if known:
            self.exit_code = self._conclude(error, saved=saved, aborted=aborted)
        return known

    def _conclude(self, error: BaseException | None, *, saved: bool, aborted: bool) -> int:
        """Draw the learning curve, print the last lines of the run and return the exit code."""
        run_dir, steps = self._run_dir, self.env_steps
        resumable = (run_dir / CHECKPOINT).is_file()
        way = f"continue with resume={run_dir}" if resumable else "there is no checkpoint yet"
        drawn = self._draw_curve()
        if isinstance(error, LostProcess):
            sys.stderr.write(f"stopped at step {steps}: {error}\n")
        if not saved:
            sys.stderr.write(f"the final checkpoint could not be saved; {way}\n")
            return FAILED
        if isinstance(error, LostProcess):
            sys.stderr.write(f"{way}\n")
            return FAILED
        if not self._finished():
            place = " while the update was being compiled" * aborted
            print(f"interrupted at step {steps}{place}; {way}")
            return INTERRUPTED
        if not drawn:
            return FAILED
        print(summary(self._counters, self._config.env.reward_threshold, run_dir))
        return DONE

    def _draw_curve(self) -> bool:
        """Draw the learning curve from progress.csv, if there is one; return whether that did not fail."""
        if not self._config.logger.csv or self._counters.last_return is None:
            return True
        try:
            plot_runs([self._run_dir], self._run_dir / CURVE)
        except OSError as error:
            sys.stderr.write(
                f"{self._run_dir / CURVE}: {reason(error)}; free disk space, then run: "
                f"python -m recipes.plot {self._run_dir}\n"
            )
            return False
        return True


def summary(counters: Counters, threshold: float | None, run_dir: Path) -> str:
    """The last line that a finished run prints."""
    if counters.reached_at is not None:
        outcome = f"reached {threshold:g} at step {counters.reached_at}"
    elif threshold is not None:
        outcome = f"did not reach {threshold:g} in {counters.env_steps} steps"
    else:
        outcome = f"{counters.env_steps} steps"
    return f"{outcome} | best return {counters.best_return:g}, last {counters.last_return:g} | files in {run_dir}"
