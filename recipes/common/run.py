"""The frame of a training loop: checkpoints, evaluations, logs, the progress bar and Ctrl-C."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import CppCompileError
from torchrl.checkpoint import GlobalRNGState
from tqdm import tqdm

from recipes.common.checkpoint import load_checkpoint, save_checkpoint
from recipes.common.cli import DONE, FAILED, INTERRUPTED, interruption
from recipes.common.collector import Behaviour, VectorCollector
from recipes.common.config import RunConfig
from recipes.common.errors import ConfigError, reason
from recipes.common.evaluation import Evaluation, Policy, Value
from recipes.common.files import CHECKPOINT, CONFIG, atomic_write, locked, reaches
from recipes.common.progress import Means, Progress
from recipes.common.replay import WITH_STATS
from recipes.common.schemas import DistributedRun
from recipes.studies.curves import draw_runs, read_run
from recipes.studies.figures import save


def save_config(config: RunConfig, run_dir: Path) -> None:
    """Write config.yaml."""
    with atomic_write(run_dir / CONFIG) as path:
        OmegaConf.save(OmegaConf.create(asdict(config) | {"resume": None}), path)


def find_device(name: str) -> torch.device:
    """The torch device of this name; `auto` is the first CUDA device, or the CPU if there is none."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
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
        last_return: mean return of the last evaluation; None before the first.
        best_return: the best mean return so far; None before the first evaluation.
        reached_at: environment steps at which an evaluation reached the threshold; None: none has.
        wall_time: time, including that before a resume.
        cpu_time: CPU time of this process, including that before a resume.
    """

    env_steps: int = 0
    updates: int = 0
    last_return: float | None = None
    best_return: float | None = None
    reached_at: int | None = None
    wall_time: float = 0.0
    cpu_time: float = 0.0


class Run:
    """A training run: everything around the loop that the recipe writes.

        run = Run(config, run_dir, make_env)
        ...                              # networks and optimizers, on run.device
        replay = CompilableReplayBuffer(...)
        run.attach(behaviour, replay, policy=policy, losses=("loss",), state={"loss": loss_module, ...})
        with run:
            while run.continues():
                data = run.collect()
                ...                      # write data to the buffer, make updates
                run.log_losses(losses)
                run.end_round()
        return run.exit_code

    The directory of the run receives config.yaml, progress.csv, learning_curve.png and checkpoint.zip. The checkpoint
    holds networks, optimizers, buffer, counters and random generators, but no environments: a resumed run begins new
    episodes. It is loaded by :meth:`attach`, so graphs must be compiled, and the steps of optimizers made, after it.

    Ctrl-C ends the loop after the current round. After an error inside the ``with`` block, nothing is saved; the run
    can be resumed from its last checkpoint.

    Args:
        config: the configuration.
        run_dir: directory of the run.
        make: makes an environment from its configuration, see recipes.common.environment.

    Raises:
        ConfigError: if the directory holds another run, or the device does not fit.
    """

    def __init__(self, config: RunConfig, run_dir: Path, make: Callable[..., gymnasium.Env]):
        if config.resume is None and (run_dir / CONFIG).exists():
            way = f"resume it (resume={run_dir}) or choose another directory"
            raise ConfigError(f"{run_dir} holds a run already: {way}")
        self.config, self._run_dir, self._make, self.exit_code = config, run_dir, make, FAILED
        # buffer and collectors in other processes, on the CPU; the module imports Ray, which takes a second
        self._remote = import_module("recipes.common.remote") if isinstance(config, DistributedRun) else None
        self.device = find_device(config.device)
        """Device of the networks."""
        if config.cudagraphs and self.device.type != "cuda":
            raise ConfigError(f"cudagraphs=true: needs a CUDA device, the device is {self.device}")
        torch.set_num_threads(config.num_threads)
        # Adam's averages of gradients that have become 0 end as denormal numbers, with which a CPU calculates slowly
        torch.set_flush_denormal(True)
        random.seed(config.seed)
        np.random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.evaluation = Evaluation(make, config.env, config.learning.evaluation_episodes)
        """The environments of evaluations, one for each episode."""

    def make_remote_replay(self, *, td_error: str) -> Any:
        """Build the buffer of recipes.distributed, whose storage and samplers are in other processes.

        Args:
            td_error: the kind of TD errors that the loss writes to "td_error": "squared" or "absolute".
        """
        assert self._remote is not None
        return self._remote.RemoteReplay(self.config, self.device, td_error)

    def attach(
        self,
        behaviour: Behaviour,
        replay: Any,
        *,
        policy: Policy,
        losses: Sequence[str],
        state: Mapping[str, Any],
        epsilon: float = 0.0,
        value: Value | None = None,
        columns: Callable[[int], dict[str, float]] = lambda _steps: {},
        actor: TensorDictModuleBase | None = None,
        noise_scale: float = 0.0,
    ) -> None:
        """Set what the loop works with, build the collector, and load the checkpoint of a resumed run.

        Environments run on the CPU. Batches stay there until they are written to the buffer.

        Args:
            behaviour: the behaviour policy, see recipes.common.collector.
            replay: the buffer.
            policy: the policy to evaluate; see recipes.common.evaluation.Policy.
            losses: names of the numbers that the updates return; the progress bar shows the first two.
            state: networks, optimizers and other objects with state, for the checkpoint.
            epsilon: probability of a random action in evaluations, for discrete actions. Default: 0.
            value: values of observations and actions, see recipes.common.evaluation.Value. Default: None.
            columns: maps the number of env steps to further numbers to log. Default: none.
            actor: the policy that collectors of recipes.distributed act with. Default: None, the recipe has none.
            noise_scale: standard deviation of the Gaussian noise that they add to its actions. Default: 0, no noise.
        """
        config, learning = self.config, self.config.learning
        if self._remote is not None:
            collector = self._remote.RemoteCollector(config, actor, noise_scale, behaviour, replay)
        else:
            collector = VectorCollector(
                [partial(self._make, config.env, training=True)] * config.num_envs,
                behaviour,
                frames_per_batch=learning.train_interval,
                seed=config.seed,
                flags=config.env.flags,
                n_step=learning.n_step,
                gamma=learning.gamma,
            )
        self.collector, self._replay, self._policy = collector, replay, policy
        self._epsilon, self._value, self._loss_names, self._columns = epsilon, value, losses, columns
        self._batches, self.counters, self._losses = iter(collector), Counters(), Means()
        # the attributes of the counters themselves: loading a checkpoint sets them
        own = {"counters": vars(self.counters), "global_rng": GlobalRNGState()}
        self._state = {**state, "replay": replay, "collector": collector, **own}
        if config.resume is not None:
            load_checkpoint(self._run_dir, self.device, **self._state)
        self._previous_steps = self.counters.env_steps

    @property
    def env_steps(self) -> int:
        """Number of environment steps so far."""
        return self.counters.env_steps

    def __enter__(self) -> "Run":
        config, run_dir = self.config, self._run_dir
        with ExitStack() as opened:
            opened.callback(self.evaluation.close)
            opened.callback(self.collector.shutdown)
            opened.enter_context(locked(run_dir))
            try:
                self._progress = Progress(run_dir, config.logger, until=self.env_steps)
                save_config(config, run_dir)
            except OSError as error:
                raise ConfigError(f"{run_dir}: {reason(error)}") from error
            self._started = time.time() - self.counters.wall_time
            self._cpu_started = time.process_time() - self.counters.cpu_time
            self._interrupted = opened.enter_context(interruption())
            name, total = f"{config.env.name} {config.sampler['name']} seed {config.seed}", config.learning.total_steps
            bar = tqdm(desc=name, total=total, initial=min(self.env_steps, total), unit="step", mininterval=0.5)
            self._bar = opened.enter_context(bar)
            # closed by __exit__
            self._open = opened.pop_all()
        return self

    def _finished(self) -> bool:
        solved = self.counters.reached_at is not None and self.config.stop_at_threshold
        return solved or self.env_steps >= self.config.learning.total_steps

    def continues(self) -> bool:
        """Whether another round follows: the run is neither finished nor interrupted."""
        return not self._finished() and not self._interrupted()

    def collect(self) -> Any:
        """Collect a batch of ``train_interval`` transitions, and count its steps. None: it is in the buffer already."""
        batch = next(self._batches)
        self._previous_steps = self.env_steps
        self.counters.env_steps += self.collector.steps_of_batch
        return batch

    def log_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Count and log updates; `losses` are tensors [updates] by name, as an update returns them."""
        self._losses.add(losses)
        self.counters.updates += max(map(len, losses.values()))

    def end_round(self) -> None:
        """Evaluate and save a checkpoint, if they are due, and move the progress bar."""
        learning, interval, steps = self.config.learning, self.config.checkpoint_interval, self.env_steps
        if learning.evaluations_due(steps) > learning.evaluations_due(self._previous_steps):
            self._evaluate()
        self._bar.update(min(steps, learning.total_steps) - self._bar.n)
        if interval is not None and steps // interval > self._previous_steps // interval:
            self._save()

    def _evaluate(self) -> None:
        config, counters = self.config, self.counters
        seed = [config.seed, config.learning.evaluations_due(self.env_steps)]
        row = {
            "env_steps": self.env_steps,
            "updates": counters.updates,
            **self.evaluation.columns(self._policy, epsilon=self._epsilon, seed=seed, value=self._value),
            **self._columns(self.env_steps),
            **self._losses.take(self._loss_names),
            "wall_time": time.time() - self._started,
            "cpu_time": time.process_time() - self._cpu_started,
        }
        if self._remote is not None:
            row["epsilon"] = config.learning.epsilon(self.env_steps)
            row |= {f"sampler/{key}": value for key, value in self._replay.stats().items()}
        else:
            sampler: Any = self._replay.sampler
            if type(sampler) in WITH_STATS:
                numbers = sampler.stats().to_dict(convert_tensors=True)
                row |= {f"sampler/{key}": value for key, value in numbers.items()}
        self._progress.write(row)
        shown = ("return_mean", *self._loss_names[:2])
        self._bar.set_postfix({key: f"{row[key]:.3g}" for key in shown}, refresh=False)
        score, best, threshold = row["return_mean"], counters.best_return, config.env.reward_threshold
        counters.last_return = score
        counters.best_return = score if best is None else max(best, score)
        # an untrained network that is lucky has solved nothing
        if counters.reached_at is None and counters.updates and reaches(score, threshold):
            counters.reached_at = self.env_steps

    def _save(self) -> None:
        self.counters.wall_time = time.time() - self._started
        self.counters.cpu_time = time.process_time() - self._cpu_started
        save_checkpoint(self._run_dir, **self._state)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # Ctrl-C in a terminal also ends the compiler's processes.
        aborted = isinstance(error, (TorchDynamoException, CppCompileError)) and self._interrupted()
        with self._open:
            if error is None:
                self._save()
        if error is None or aborted:
            self.exit_code = self._conclude()
        return aborted

    def _conclude(self) -> int:
        """Draw the learning curve, print the last lines of the run and return the exit code."""
        run_dir, steps, counters = self._run_dir, self.env_steps, self.counters
        if self.config.logger.csv and counters.last_return is not None:
            save(draw_runs([read_run(run_dir)]), run_dir / "learning_curve.png")
        if not self._finished():
            resumable = (run_dir / CHECKPOINT).is_file()
            way = f"continue with resume={run_dir}" if resumable else "there is no checkpoint yet"
            print(f"interrupted at step {steps}; {way}")
            return INTERRUPTED
        learning, threshold = self.config.learning, self.config.env.reward_threshold
        outcome = f"{steps} steps"
        if steps > learning.total_steps:
            outcome += f" (total_steps={learning.total_steps}, in whole batches of {learning.train_interval})"
        if threshold is not None:
            outcome = f"did not reach {threshold:g} in {outcome}"
        if counters.reached_at is not None:
            outcome = f"reached {threshold:g} at step {counters.reached_at}"
        scores = f"best return {counters.best_return:g}, last {counters.last_return:g}"
        print(f"{outcome} | {scores} | files in {run_dir}")
        return DONE
