"""Configuration shared by all recipes. recipes.common.schemas adds the hyperparameters of each recipe."""

import importlib.util
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf

from recipes.common.atari_presets import AtariConfig

# LAP (sampler=lap) needs the Huber loss.
OmegaConf.register_new_resolver("loss_for", lambda sampler: "smooth_l1" if sampler == "lap" else "l2", replace=True)
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
# All env=atari/<game> share one file of hyperparameters, atari.yaml.
OmegaConf.register_new_resolver("family", lambda env: env.split("/")[0], replace=True)


# Values of sampler.name. PLAIN: samplers without event tables, built by recipes.common.replay.make_sampler.
PLAIN = ("uniform", "per", "rank", "reaper", "recency", "lap")
# EVENT_TABLES: samplers with event tables. DECOUPLED: samplers that draw a separate batch for the actor.
EVENT_TABLES = ("sset", "sset_per")
DECOUPLED = ("dper", "dper_uniform")

# TorchRL's loggers and the package that each one needs; None: no extra package.
BACKENDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "csv": None,
}

CONF = Path(__file__).parents[1] / "conf"
MOST_THREADS = 1024

# How losses average their weighted rows, see recipes.common.update.weight_factor.
WEIGHTS = ("normalized", "mean")

# Event conditions defined in recipes.common.events.
EVENT_FUNCTIONS = ("land_between_flags", "land_near_middle")


def ends(key: str, value: Any) -> tuple[float, float]:
    """Start and end of the hyperparameter `key`: a number or {start, end}; ValueError if it is neither."""
    is_schedule = isinstance(value, dict) and set(value) == {"start", "end"}
    found: tuple[Any, Any] = (value["start"], value["end"]) if is_schedule else (value, value)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in found):
        raise ValueError(f"{key}={value}: must be a number or {{start, end}}")
    return found


@dataclass
class EventConfig:
    """An event of an environment and its table. By default, `info[<event name>]` of the environment signals it.

    Args:
        history: number of transitions, up to and including the event, that enter the table; >= 1.
        eta: share of the batch drawn from the table, in [0, 1]; {start, end}: linear over all updates of the run. The
            table's size is the largest value times the buffer's.
        above: the event occurs if the reward is larger than this value. Default: None, use `info`.
        function: land_between_flags or land_near_middle, the condition of the event. Default: None, use `info`.
    """

    history: int = MISSING
    eta: Any = MISSING
    above: float | None = None
    function: str | None = None

    def check(self, where: str) -> None:
        """Raise ValueError if a value is invalid. `where`: configuration key of the event, for the message."""
        if self.history < 1:
            raise ValueError(f"{where}.history={self.history}: must be >= 1")
        if not all(0 <= value <= 1 for value in ends(f"{where}.eta", self.eta)):
            raise ValueError(f"{where}.eta={self.eta}: must be in [0, 1]")
        if self.function is not None and self.function not in EVENT_FUNCTIONS:
            raise ValueError(f"{where}.function={self.function}: choose {', '.join(EVENT_FUNCTIONS)}")
        if self.function is not None and self.above is not None:
            raise ValueError(f"{where}: above and function are both set; set one of them to null")

    @property
    def largest_eta(self) -> float:
        """The largest value of eta."""
        return max(ends("eta", self.eta))

    @property
    def is_flag(self) -> bool:
        """Whether the environment signals the event in its `info`."""
        return self.above is None and self.function is None


@dataclass
class EnvConfig:
    """A Gymnasium environment.

    Args:
        name: name used in run directories and plots.
        id: Gymnasium id; "module:id" imports the module first.
        reward_threshold: mean return at which the environment counts as solved; None: never.
        options: keyword arguments for gymnasium.make. Default: {}.
        training: keyword arguments for gymnasium.make in which the training environments differ from `options`, such
            as the shaping of rewards. Evaluations do not use them. Default: {}.
        events: events by name, see recipes.common.events. Default: {}. Their largest `eta` must sum to at most 1.
        atari: preprocessing of an Atari game. Default: None, not an Atari game.
        random_score: mean return of random actions, normalized to 0. Default: None, no normalization.
        human_score: mean return of humans, normalized to 1. Default: None, no normalization.
        truncation: how targets treat a time limit. "bootstrap" (default): the target of the last step includes the
            value of the next state. "terminal": the last step is treated as terminal. Without the time in the
            observation, "terminal" teaches the agent that an episode may end in any state.
        evaluations: further evaluations by name, with the keyword arguments for gymnasium.make in which they differ
            from `options`. Their mean returns are the columns return_<name> of progress.csv. Default: {}.
        return_by: names of entries of the environment's `info` after a reset, with their possible values. For each
            value, the column return_<value> of progress.csv is the mean return of the episodes that have it, NaN if
            there are none. Default: {}.
    """

    name: str = MISSING
    id: str = MISSING
    reward_threshold: float | None = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    events: dict[str, EventConfig] = field(default_factory=dict)
    atari: AtariConfig | None = None
    random_score: float | None = None
    human_score: float | None = None
    truncation: str = "bootstrap"
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    return_by: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = [f"env.evaluations.{name}" for name in self.evaluations]
        columns += [f"env.return_by.{entry}.{value}" for entry, values in self.return_by.items() for value in values]
        names = [column.rpartition(".")[2] for column in columns]
        for name, column in zip(names, columns, strict=True):
            if not name.isidentifier() or name == "mean":
                raise ValueError(f"{column}: the name must be an identifier other than mean")
            if names.count(name) > 1:
                raise ValueError(f"{column}: the column return_{name} would exist twice; choose another name")
        if self.truncation not in ("bootstrap", "terminal"):
            raise ValueError(f"env.truncation={self.truncation}: choose bootstrap, terminal")
        if (self.random_score is None) != (self.human_score is None) or (
            self.random_score is not None and self.random_score == self.human_score
        ):
            raise ValueError(
                f"env.random_score={self.random_score}, env.human_score={self.human_score}: must be two different "
                "numbers, or both null"
            )
        for name, event in self.events.items():
            event.check(f"env.events.{name}")
        share = sum(event.largest_eta for event in self.events.values())
        if share > 1 + 1e-9:
            raise ValueError(f"env.events: the sum of all eta is {share:g}, must be <= 1")

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the events that the environment must signal in its `info`."""
        return tuple(name for name, event in self.events.items() if event.is_flag)

    def human_normalized(self, score: float) -> float | None:
        """The score scaled so that random actions score 0 and humans 1; None if these scores are unknown."""
        if self.random_score is None or self.human_score is None:
            return None
        return (score - self.random_score) / (self.human_score - self.random_score)


@dataclass
class LoggerConfig:
    """Logging of a run, see recipes.common.progress.Progress.

    Args:
        csv: whether to write progress.csv.
        backend: a TorchRL logger, one of BACKENDS; None: no logger.
    """

    csv: bool = MISSING
    backend: str | None = MISSING

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"logger.backend={self.backend}: choose null or {', '.join(BACKENDS)}")

    def require_package(self) -> None:
        """Raise ValueError if the package of the backend is not installed."""
        package = BACKENDS.get(self.backend) if self.backend is not None else None
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"logger={self.backend}: {package} is not installed; install the package or use logger=csv"
            )


@dataclass
class LearningConfig(ABC):
    """Hyperparameters of every recipe; the comments of recipes/conf/<recipe>/*.yaml explain them.

    One step is one step of one environment.
    """

    group: ClassVar[str]  # configuration group of the hyperparameters, such as "dqn"
    n_step = 1  # not a field: most recipes let the user choose it, see FixedRoundsConfig

    total_steps: int = MISSING
    buffer_size: int = MISSING
    batch_size: int = MISSING
    learning_starts: int = MISSING
    train_interval: int = MISSING
    num_evaluations: int = MISSING
    evaluation_episodes: int = MISSING
    gamma: float = MISSING
    hidden_sizes: list[int] = MISSING

    def __post_init__(self) -> None:
        self.check(
            "total_steps buffer_size batch_size train_interval num_evaluations evaluation_episodes",
            lambda value: value > 0,
            "must be > 0",
        )
        self.check(
            "batch_size train_interval",
            lambda value: value <= self.buffer_size,
            f"must be <= {self.group}.buffer_size={self.buffer_size}",
        )
        self.check("gamma", lambda value: 0 <= value <= 1, "must be in [0, 1]")
        self.check(
            "learning_starts", lambda value: 0 <= value < self.total_steps, f"must be in [0, {self.group}.total_steps)"
        )
        self.check("hidden_sizes", lambda sizes: all(size > 0 for size in sizes), "must be > 0")

    def check(self, keys: str, valid: Callable[[Any], bool], requirement: str) -> None:
        """Raise ValueError if the value of a key is invalid; `keys` are separated by spaces."""
        for key in keys.split():
            if not valid(getattr(self, key)):
                raise ValueError(f"{self.group}.{key}={getattr(self, key)}: {requirement}")

    def num_rounds(self) -> int:
        """Number of rounds of updates in a whole run."""
        return math.ceil(self.total_steps / self.train_interval) - self.learning_starts // self.train_interval

    @abstractmethod
    def num_updates(self) -> int:
        """Number of gradient updates in a whole run."""

    def evaluations_due(self, step: int) -> int:
        """Number of evaluations due after `step` steps. They are evenly spaced; the last one is after total_steps."""
        return min(step, self.total_steps) * self.num_evaluations // self.total_steps


@dataclass
class FixedRoundsConfig(LearningConfig):
    """Hyperparameters of recipes with a fixed number of updates per round, `gradient_steps`."""

    gradient_steps: int = MISSING
    n_step: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gradient_steps n_step", lambda value: value > 0, "must be > 0")

    def num_updates(self) -> int:
        """Number of gradient updates in a whole run."""
        return self.num_rounds() * self.gradient_steps


@dataclass
class RunConfig(ABC):
    """The options of conf/run.yaml, which all recipes share; the comments there explain them."""

    env: EnvConfig = MISSING
    sampler: dict[str, Any] = MISSING
    logger: LoggerConfig = MISSING
    seed: int = MISSING
    device: str = MISSING
    num_threads: int = MISSING
    num_envs: int = MISSING
    compile: bool = MISSING
    cudagraphs: bool = MISSING
    stop_at_threshold: bool = MISSING
    video: bool = False
    checkpoint_interval: int | None = MISSING
    resume: str | None = None

    @property
    @abstractmethod
    def learning(self) -> LearningConfig:
        """The recipe's hyperparameters."""

    def __post_init__(self) -> None:
        learning = self.learning
        if self.checkpoint_interval is None:
            self.checkpoint_interval = max(10_000, learning.total_steps // 50)
        for key in ("num_threads", "num_envs", "checkpoint_interval"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 1")
        require_divisor("num_envs", self.num_envs, learning, "train_interval")
        n_step = learning.n_step
        if n_step > 1 and n_step * self.num_envs >= learning.total_steps:
            raise ValueError(
                f"{learning.group}.n_step={n_step}: num_envs · n_step must be < {learning.group}.total_steps="
                f"{learning.total_steps}"
            )
        # of sampler=dper, the sampler of the critic, with the settings in its file
        critic = self.sampler.get("critic")
        name = (critic if isinstance(critic, dict) else self.sampler).get("name")
        if isinstance(critic, dict) and name in (*PLAIN, *EVENT_TABLES):
            preset = OmegaConf.load(CONF / "sampler" / f"{name}.yaml")
            self.sampler["critic"] = OmegaConf.to_object(OmegaConf.merge(preset, critic))
        if n_step > 1:
            others = [name for name, event in self.env.events.items() if not event.is_flag]
            if others and name in EVENT_TABLES:
                raise ValueError(
                    f"{learning.group}.n_step={n_step}: {', '.join(others)} of env.events depends on the reward or "
                    "observation of one step; use events that the environment signals, or n_step=1"
                )
        if self.cudagraphs and not self.compile:
            raise ValueError("cudagraphs=true: needs compile=true")
        if self.num_threads > MOST_THREADS:
            raise ValueError(f"num_threads={self.num_threads}: must be <= {MOST_THREADS}")
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", self.device):
            raise ValueError(f"device={self.device}: choose auto, cpu, cuda, cuda:1 ..., mps or xpu")
        samplers = (*PLAIN, *EVENT_TABLES, *DECOUPLED)
        if self.sampler.get("name") not in samplers:
            raise ValueError(f"sampler.name={self.sampler.get('name')}: choose {', '.join(samplers)}")
        loss_function = getattr(learning, "loss_function", None)
        if name == "lap" and loss_function != "smooth_l1":
            way = (
                "this recipe does not have it; use recipes.td3 or recipes.dqn"
                if loss_function is None
                else f"set {learning.group}.loss_function=smooth_l1"
            )
            raise ValueError(f"sampler=lap: needs the Huber loss; {way}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: must be in [0, 2^31)")


@dataclass
class FixedRoundsRunConfig(RunConfig):
    """The options of recipes whose rounds of updates become graphs of `updates_per_graph` updates each."""

    updates_per_graph: int = MISSING
    weights: str = MISSING

    @property
    @abstractmethod
    def learning(self) -> FixedRoundsConfig:
        """The recipe's hyperparameters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.updates_per_graph < 1:
            raise ValueError(f"updates_per_graph={self.updates_per_graph}: must be >= 1")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights}: choose {', '.join(WEIGHTS)}")
        require_divisor("updates_per_graph", self.updates_per_graph, self.learning, "gradient_steps")


def require_divisor(key: str, divisor: int, learning: LearningConfig, multiple: str) -> None:
    """Raise ValueError unless the value of `key`, `divisor`, divides the hyperparameter `multiple`."""
    value = getattr(learning, multiple)
    if value % divisor:
        raise ValueError(f"{key}={divisor}: must divide {learning.group}.{multiple}={value}")
