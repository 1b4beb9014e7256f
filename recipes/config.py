"""The configuration that all recipes share; a recipe adds its own hyperparameters."""

import importlib.util
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf

from recipes.atari_presets import AtariConfig

OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
# env=atari/<game> has the hyperparameters of all Atari games
OmegaConf.register_new_resolver("family", lambda env: env.split("/")[0], replace=True)


# Values of sampler.name: samplers that make_sampler of recipes.replay builds, ...
PLAIN = ("uniform", "per", "rank", "reaper", "recency")
# ... event tables, and samplers that draw batches of their own for the actor.
EVENT_TABLES = ("sset", "sset_per")
DECOUPLED = ("dper", "dper_uniform")

# TorchRL's loggers, and the package that each needs.
BACKENDS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "csv": None,
}

MOST_THREADS = 1024

# Conditions of events that recipes.events defines.
EVENT_FUNCTIONS = ("land_between_flags", "land_near_middle")


@dataclass
class EventConfig:
    """An event of an environment, by default a flag of its name in the environment's `info`.

    Args:
        history: transitions that enter the table with an event.
        eta: share of the batch that comes from the table.
        above: instead of the flag: the reward is larger than this.
        function: instead of the flag: one of EVENT_FUNCTIONS.
    """

    history: int = MISSING
    eta: float = MISSING
    above: float | None = None
    function: str | None = None

    def check(self, where: str) -> None:
        """Raises ValueError if a value is not valid; `where` is the event's place in the configuration."""
        if self.history < 1:
            raise ValueError(f"{where}.history={self.history}: must be >= 1")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"{where}.eta={self.eta}: must be in [0, 1]")
        if self.function is not None and self.function not in EVENT_FUNCTIONS:
            raise ValueError(f"{where}.function={self.function}: choose {', '.join(EVENT_FUNCTIONS)}")
        if self.function is not None and self.above is not None:
            raise ValueError(f"{where}: has above= and function=, one of them must be null")

    @property
    def is_flag(self) -> bool:
        """Whether the environment says when it occurs."""
        return self.above is None and self.function is None


@dataclass
class EnvConfig:
    """An environment of Gymnasium.

    Args:
        name: in the names of directories and presets.
        id: Gymnasium's; "module:id" imports the module first.
        reward_threshold: the mean return at which it counts as solved; None: never.
        options: keywords for gymnasium.make.
        events: by name; see recipes.events.
        atari: preprocessing of an Atari game; None: it is none.
        random_score: mean return of random actions, and ...
        human_score: ... of humans, between which returns are normalized; None: they are not.
        truncation: what a time limit is to the learner. "bootstrap": the episode is cut off there, and its last target
            goes on with the value of the next state; "terminal": the end, as if there were nothing to come. In an
            environment whose observations do not tell the time, the latter teaches that any state may be the last.
    """

    name: str = MISSING
    id: str = MISSING
    reward_threshold: float | None = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    events: dict[str, EventConfig] = field(default_factory=dict)
    atari: AtariConfig | None = None
    random_score: float | None = None
    human_score: float | None = None
    truncation: str = "bootstrap"

    def __post_init__(self) -> None:
        if self.truncation not in ("bootstrap", "terminal"):
            raise ValueError(f"env.truncation={self.truncation}: choose bootstrap, terminal")
        if (self.random_score is None) != (self.human_score is None) or (
            self.random_score is not None and self.random_score == self.human_score
        ):
            raise ValueError(
                f"env.random_score={self.random_score}: it and env.human_score={self.human_score} must be two numbers"
            )
        for name, event in self.events.items():
            event.check(f"env.events.{name}")
        share = sum(event.eta for event in self.events.values())
        if share > 1 + 1e-9:
            raise ValueError(f"env.events: their eta sum to {share:g}, must be <= 1")

    @property
    def flags(self) -> tuple[str, ...]:
        """The events that the environment has to report in its `info`."""
        return tuple(name for name, event in self.events.items() if event.is_flag)

    def human_normalized(self, score: float) -> float | None:
        """The return in units in which random actions have 0 and humans 1; None if their scores are not known."""
        if self.random_score is None or self.human_score is None:
            return None
        return (score - self.random_score) / (self.human_score - self.random_score)


@dataclass
class LoggerConfig:
    """See recipes.progress.Progress."""

    csv: bool = MISSING
    backend: str | None = MISSING

    def __post_init__(self) -> None:
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(f"logger.backend={self.backend}: choose null or {', '.join(BACKENDS)}")

    def require_package(self) -> None:
        """Raises ValueError if the package of the backend is not installed."""
        package = BACKENDS.get(self.backend) if self.backend is not None else None
        if package is not None and importlib.util.find_spec(package) is None:
            raise ValueError(
                f"logger={self.backend}: {package} is not installed; install the package or use logger=csv"
            )


@dataclass
class LearningConfig(ABC):
    """Hyperparameters of every recipe; a step is one step of the environment."""

    group: ClassVar[str]  # their place in the configuration

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
        self.check("gamma", lambda value: 0 <= value <= 1, "must be in [0, 1]")
        self.check(
            "learning_starts", lambda value: 0 <= value < self.total_steps, f"must be in [0, {self.group}.total_steps)"
        )
        self.check("hidden_sizes", lambda sizes: all(size > 0 for size in sizes), "must be > 0")

    def check(self, keys: str, valid: Callable[[Any], bool], requirement: str) -> None:
        """Raises ValueError where a value is not valid; `keys` are separated by spaces."""
        for key in keys.split():
            if not valid(getattr(self, key)):
                raise ValueError(f"{self.group}.{key}={getattr(self, key)}: {requirement}")

    def num_rounds(self) -> int:
        """Rounds of updates of a whole run."""
        return math.ceil(self.total_steps / self.train_interval) - self.learning_starts // self.train_interval

    @abstractmethod
    def num_updates(self) -> int:
        """Gradient updates of a whole run."""

    def evaluations_due(self, step: int) -> int:
        """Evaluations that belong to the first `step` steps: they are evenly spread, the last one at the end."""
        return min(step, self.total_steps) * self.num_evaluations // self.total_steps


@dataclass
class FixedRoundsConfig(LearningConfig):
    """Those of recipes with a fixed number of updates in a round."""

    gradient_steps: int = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("gradient_steps", lambda value: value > 0, "must be > 0")

    def num_updates(self) -> int:
        """Gradient updates of a whole run."""
        return self.num_rounds() * self.gradient_steps


@dataclass
class RunConfig(ABC):
    """What the top file of a recipe holds (conf/dqn.yaml, conf/sac.yaml ...) but for the recipe's hyperparameters."""

    env: EnvConfig = MISSING
    sampler: dict[str, Any] = MISSING
    logger: LoggerConfig = MISSING
    seed: int = MISSING
    device: str = MISSING
    num_threads: int = MISSING
    num_envs: int = MISSING
    compile: bool = MISSING
    cudagraphs: bool = MISSING
    updates_per_graph: int = 1
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
        for key in ("num_threads", "num_envs", "updates_per_graph", "checkpoint_interval"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= 1")
        for key, multiple in (("num_envs", "train_interval"), ("updates_per_graph", "gradient_steps")):
            divisor, value = getattr(self, key), getattr(learning, multiple, 1)
            if value % divisor:
                raise ValueError(f"{key}={divisor}: must divide {learning.group}.{multiple}={value}")
        if self.cudagraphs and not self.compile:
            raise ValueError("cudagraphs=true: needs compile=true")
        if self.num_threads > MOST_THREADS:
            raise ValueError(f"num_threads={self.num_threads}: must be <= {MOST_THREADS}")
        if not re.fullmatch(r"auto|(cpu|cuda|mps|xpu)(:\d+)?", self.device):
            raise ValueError(f"device={self.device}: choose auto, cpu, cuda, cuda:1 ..., mps or xpu")
        samplers = (*PLAIN, *EVENT_TABLES, *DECOUPLED)
        if self.sampler.get("name") not in samplers:
            raise ValueError(f"sampler.name={self.sampler.get('name')}: choose {', '.join(samplers)}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: must be in [0, 2^31)")
