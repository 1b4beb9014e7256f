"""Configuration shared by all recipes. recipes.common.schemas adds the hyperparameters of each recipe."""

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from omegaconf import MISSING, OmegaConf

from recipes.common.atari_presets import AtariConfig
from recipes.common.checked import Checked, one_of, within
from recipes.common.errors import ConfigError, did_you_mean
from recipes.common.files import CONF

# LAP (sampler=lap) needs the Huber loss.
OmegaConf.register_new_resolver("loss_for", lambda sampler: "smooth_l1" if sampler == "lap" else "l2", replace=True)
OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
# All env=atari/<game> share one file of hyperparameters, atari.yaml.
OmegaConf.register_new_resolver("family", lambda env: env.split("/")[0], replace=True)


# Training recipes -> configuration group with their settings per environment; the most common recipes first.
RECIPES = {"dqn": "dqn", "sac": "sac", "td3": "td3", "acer": "acer", "r2d2": "r2d2", "distributed": "dqn"}

# Values of sampler.name. PLAIN: samplers without event tables, built by recipes.common.replay.make_sampler.
PLAIN = ("uniform", "per", "rank", "reaper", "recency")
# EVENT_TABLES: samplers with event tables. DECOUPLED: samplers that draw a separate batch for the actor.
EVENT_TABLES = ("sset", "sset_per")
DECOUPLED = ("dper", "dper_uniform")


def ends(key: str, value: Any) -> tuple[float, float]:
    """Start and end of the hyperparameter `key`: a number or {start, end}; ValueError if it is neither."""
    is_schedule = isinstance(value, dict) and set(value) == {"start", "end"}
    found: tuple[Any, Any] = (value["start"], value["end"]) if is_schedule else (value, value)
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in found):
        raise ValueError(f"{key}={value}: must be a number or {{start, end}}")
    return found


@dataclass
class EventConfig(Checked):
    """An event of an environment and its table. By default, `info[<event name>]` of the environment signals it.

    At most one of `above`, `quantile`, `novel` and `function` is not None.

    Args:
        history: number of transitions, up to and including the event, that enter the table; >= 1.
        eta: share of the batch drawn from the table, in (0, 1]; {start, end}: linear over all updates of the run. The
            table's size is the largest value times the buffer's.
        above: the event occurs if the reward is larger than this value. Default: None, use `info`.
        quantile: the event occurs if the reward is larger than this quantile of the last 10,000 rewards, in (0, 1).
            Default: None, use `info`.
        novel: the event occurs if the next observation was reached at most so many times; >= 1. Default: None, use
            `info`.
        resolution: two observations are the same for `novel` if their numbers, divided by this value and rounded down,
            are; > 0. Default: None, if their numbers are equal.
        function: land_between_flags or land_near_middle, the condition of the event. Default: None, use `info`.
    """

    prefix = "env.events.<name>."

    history: int = within(">= 1")
    eta: Any = MISSING
    above: float | None = None
    quantile: float | None = within("(0, 1)", None)
    novel: int | None = within(">= 1", None)
    resolution: float | None = within("> 0", None)
    function: str | None = one_of("land_between_flags", "land_near_middle", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        inside = all(0 <= end <= 1 for end in ends("eta", self.eta)) and self.largest_eta > 0
        self.require("eta", inside, "must be in [0, 1], and > 0 at the start or the end")
        text = "needs null for the others of above, quantile, novel and function"
        for name in self.conditions[1:]:
            self.require(name, False, text)
        self.require("resolution", self.resolution is None or self.novel is not None, "needs novel=1, for example")

    @property
    def conditions(self) -> list[str]:
        """The arguments that say when the event occurs; if there are none, the environment signals it in its `info`."""
        return [name for name in ("above", "quantile", "novel", "function") if getattr(self, name) is not None]

    @property
    def largest_eta(self) -> float:
        """The largest value of eta."""
        return max(ends("eta", self.eta))


@dataclass
class EnvConfig(Checked):
    """A Gymnasium environment.

    Args:
        name: name used in run directories and plots.
        id: Gymnasium id; "module:id" imports the module first.
        reward_threshold: mean return at which the environment counts as solved; None: never.
        options: keyword arguments for gymnasium.make. Default: {}.
        training: keyword arguments for gymnasium.make in which the training environments differ from `options`, such
            as the shaping of rewards. Evaluations do not use them. Default: {}.
        events: events by name, see recipes.common.replay. Default: {}. The sum of their largest `eta`
            must be <= 1, and < 1 with sampler.retention=pinned.
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

    prefix = "env."

    name: str = MISSING
    id: str = MISSING
    reward_threshold: float | None = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    events: dict[str, EventConfig] = field(default_factory=dict)
    atari: AtariConfig | None = None
    random_score: float | None = None
    human_score: float | None = None
    truncation: str = one_of("bootstrap", "terminal", default="bootstrap")
    evaluations: dict[str, dict[str, Any]] = field(default_factory=dict)
    return_by: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [*self.evaluations, *(value for values in self.return_by.values() for value in values)]
        for name in names:
            if not name.isidentifier() or name == "mean" or names.count(name) > 1:
                text = f"{name} must be an identifier other than mean, and occur once; it names return_{name}"
                raise ValueError(f"env.evaluations, env.return_by: {text}")
        share = sum(event.largest_eta for event in self.events.values())
        if share > 1 + 1e-9:
            raise ValueError(f"env.events: the sum of all eta is {share:g}, must be <= 1")

    @property
    def flags(self) -> tuple[str, ...]:
        """The names of the events that the environment must signal in its `info`."""
        return tuple(name for name, event in self.events.items() if not event.conditions)

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
        backend: a TorchRL logger, such as "tensorboard"; None: no logger.
    """

    csv: bool = MISSING
    backend: str | None = MISSING

    def __post_init__(self) -> None:
        if self.backend and find_spec(self.backend) is None:
            raise ConfigError(f"logger.backend={self.backend}: this package is missing; pip install {self.backend}")


@dataclass
class LearningConfig(Checked):
    """Hyperparameters of every recipe; the comments of recipes/conf/<recipe>/*.yaml explain them.

    One step is one step of one environment. Subclasses have a method `num_updates`, the number of gradient updates over
    which schedules are spread. In a run that was extended, `schedule_steps` is its first number of steps.
    """

    n_step = 1  # not a field: most recipes let the user choose it, see FixedRoundsConfig

    total_steps: int = within("> 0")
    buffer_size: int = within("> 0")
    batch_size: int = within("> 0")
    learning_starts: int = MISSING
    train_interval: int = within("> 0")
    num_evaluations: int = within("> 0")
    evaluation_episodes: int = within("> 0")
    gamma: float = within("[0, 1]")
    hidden_sizes: list[int] = MISSING
    schedule_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("batch_size", "train_interval"):
            fits = getattr(self, key) <= self.buffer_size
            self.require(key, fits, f"must be <= {self.prefix}buffer_size={self.buffer_size}")
        early = 0 <= self.learning_starts < self.total_steps
        self.require("hidden_sizes", all(size > 0 for size in self.hidden_sizes), "must be > 0")
        self.require("learning_starts", early, f"must be in [0, {self.prefix}total_steps)")

    @property
    def scheduled(self) -> int:
        """The steps over which schedules and `num_evaluations` evaluations are spread."""
        return self.schedule_steps or self.total_steps

    def num_rounds(self) -> int:
        """Number of rounds of updates over which schedules are spread."""
        return math.ceil(self.scheduled / self.train_interval) - self.learning_starts // self.train_interval

    def evaluations_due(self, step: int) -> int:
        """Number of evaluations due after `step` steps. They are evenly spaced; the last one is after total_steps."""
        step = min(step, self.total_steps)
        due, rest = divmod(step * self.num_evaluations, self.scheduled)
        return due + (step == self.total_steps and rest > 0)


@dataclass
class FixedRoundsConfig(LearningConfig):
    """Hyperparameters of recipes with a fixed number of updates per round, `gradient_steps`."""

    gradient_steps: int = within("> 0")
    n_step: int = within("> 0", default=1)

    def num_updates(self) -> int:
        """Number of gradient updates over which schedules are spread."""
        return self.num_rounds() * self.gradient_steps

    def epsilon(self, step: int) -> float:
        """Probability of a random action after `step` steps: 1 until learning starts, then 0."""
        return float(step < self.learning_starts)


@dataclass
class RunConfig(Checked):
    """The options of conf/run.yaml, which all recipes share; the comments there explain them."""

    # not fields: most recipes let the user choose them, see FixedRoundsRunConfig
    updates_per_graph, weights = 1, "normalized"
    samplers: ClassVar[tuple[str, ...]] = (*PLAIN, *EVENT_TABLES)  # the values of sampler.name

    env: EnvConfig = MISSING
    sampler: dict[str, Any] = MISSING
    logger: LoggerConfig = MISSING
    seed: int = within("[0, 2147483648)")
    device: str = MISSING
    num_threads: int = within("[1, 1024]")
    num_envs: int = within(">= 1")
    compile: bool = MISSING
    cudagraphs: bool = MISSING
    stop_at_threshold: bool = MISSING
    checkpoint_interval: int | None = within(">= 1")
    resume: str | None = None

    @property
    def learning(self) -> Any:
        """The hyperparameters, a LearningConfig; in recipes.distributed those of its algorithm."""
        return next(value for value in vars(self).values() if isinstance(value, LearningConfig))

    def __post_init__(self) -> None:
        super().__post_init__()
        learning = self.learning
        if self.checkpoint_interval is None:
            self.checkpoint_interval = max(10_000, learning.total_steps // 50)
        self.require("cudagraphs", self.compile or not self.cudagraphs, "needs compile=true")
        self.require_divides("num_envs", "train_interval")
        for key, least in ("train_interval", learning.train_interval), ("n_step", learning.n_step * self.num_envs):
            fits = least <= learning.total_steps
            learning.require(key, fits, f"needs {learning.prefix}total_steps >= {least}, not {learning.total_steps}")
        self._check_sampler()

    def _check_sampler(self) -> None:
        """Check the name of the sampler, or that of the critic's sampler (sampler=dper), and what it needs."""
        learning, name = self.learning, self.sampler.get("name")
        if name not in self.samplers:
            hint = did_you_mean(str(name), self.samplers)
            raise ConfigError(f"sampler={name}: choose {', '.join(self.samplers)}{hint}")
        if name in DECOUPLED:
            critic = self.sampler.get("critic")
            names = [each for each in self.samplers if each not in DECOUPLED]
            name = critic.get("name") if isinstance(critic, dict) else None
            if name not in names:
                where = f"sampler.critic={critic}: must be a group, as in {{name: per}}; its name={name}"
                raise ConfigError(f"{where}: choose {', '.join(names)}{did_you_mean(str(name), names)}")
            preset = OmegaConf.load(CONF / "sampler" / f"{name}.yaml")
            self.sampler["critic"] = OmegaConf.to_object(OmegaConf.merge(preset, critic))
        if name == "lap" and getattr(learning, "loss_function", None) != "smooth_l1":
            text = "dqn.loss_function=smooth_l1 or td3.loss_function=smooth_l1; SAC has no such option"
            raise ValueError(f"sampler=lap: needs the Huber loss, {text}")
        if name not in EVENT_TABLES:
            return
        if not self.env.events:
            text = "has no events; define some, as in conf/env/threerooms.yaml"
            raise ValueError(f"sampler={name}: env={self.env.name} {text}")
        is_clipped = self.env.atari is not None and self.env.atari.clip_rewards
        for event in self.env.events.values() if is_clipped else ():
            event.require("above", (event.above or 0) < 1, "rewards are clipped to 1; use the flag scored")
        others = [event for event in self.env.events if event not in self.env.flags]
        text = "depends on the reward or observation of one step; use flags of the environment, or n_step=1"
        learning.require("n_step", learning.n_step == 1 or not others, f"{', '.join(others)} of env.events {text}")

    def require_divides(self, key: str, multiple: str) -> None:
        """Raise ConfigError unless the value of `key` divides the hyperparameter `multiple`."""
        value = getattr(self.learning, multiple)
        divides = value % getattr(self, key) == 0
        self.require(key, divides, f"must divide {self.learning.prefix}{multiple}={value}")


@dataclass
class FixedRoundsRunConfig(RunConfig):
    """The options of recipes whose rounds of updates become graphs of `updates_per_graph` updates each."""

    updates_per_graph: int = within(">= 1")
    weights: str = one_of("normalized", "mean")  # see recipes.common.update.weight_factor

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_divides("updates_per_graph", "gradient_steps")
