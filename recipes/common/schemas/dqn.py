"""The configuration of recipes.dqn."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.common.config import EVENT_TABLES, FixedRoundsConfig, FixedRoundsRunConfig, ends

WITH_LAP = (*FixedRoundsRunConfig.samplers, "lap")
MOST_GRADIENTS = 12  # that CAGrad combines; the cost doubles with each


@dataclass
class EpsilonGreedyConfig(FixedRoundsConfig):
    """Hyperparameters of Q-learning with epsilon-greedy behaviour. One step is one step of one environment.

    Args:
        learning_rate: learning rate of the optimizer, > 0.
        loss_function: "l2", the squared TD error, or "smooth_l1".
        tau: share of the online network that is blended into the target network at each update, in (0, 0.5].
        exploration_fraction: fraction of total_steps over which epsilon falls linearly, in [0, 1].
        initial_epsilon: epsilon at the start of the linear schedule, in [0, 1].
        final_epsilon: epsilon after the schedule, in [0, initial_epsilon].
        evaluation_epsilon: probability of a random action in evaluations, in [0, 1].
        max_grad_norm: gradients of a larger norm are scaled down to this norm; None: no clipping.
        optimizer: name and keyword arguments, see recipes.common.optimizers. Default: Adam.
    """

    learning_rate: float = MISSING
    loss_function: str = MISSING
    tau: float | None = MISSING
    exploration_fraction: float = MISSING
    initial_epsilon: float = MISSING
    final_epsilon: float = MISSING
    evaluation_epsilon: float = MISSING
    max_grad_norm: float | None = MISSING
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("learning_rate", lambda value: value > 0, "must be > 0")
        self.check("max_grad_norm", lambda value: value is None or value > 0, "must be > 0")
        self.check("tau", lambda value: value is None or 0 < value <= 0.5, "must be in (0, 0.5]")
        self.choose("loss_function", ("smooth_l1", "l2"))
        shares = "exploration_fraction initial_epsilon final_epsilon evaluation_epsilon"
        self.check(shares, lambda value: 0 <= value <= 1, "must be in [0, 1]")
        self.check(
            "final_epsilon", lambda value: value <= self.initial_epsilon, f"must be <= {self.prefix}initial_epsilon"
        )

    def epsilon(self, step: int) -> float:
        """Exploration rate after `step` steps: 1 until learning starts, then the linear schedule."""
        if step < self.learning_starts:
            return 1.0
        duration = self.exploration_fraction * self.total_steps
        done = min(step / duration, 1.0) if duration else 1.0
        return self.initial_epsilon + done * (self.final_epsilon - self.initial_epsilon)


@dataclass
class DQNConfig(EpsilonGreedyConfig):
    """Hyperparameters of DQN, in addition to those of EpsilonGreedyConfig.

    Fields without a default are set in conf/dqn/<env>.yaml.

    Args:
        target_update_interval: steps between two copies to the target network; None: use tau. Exactly one of the two
            must be None.
        cagrad: c of CAGrad, which combines the gradients of the event tables, in [0, 1), or {start, end}: linear over
            all updates of the run; None: gradient of the whole batch.
        log_q_mean: whether evaluations also log the mean value of their steps, as the target network gives it. Default:
            False.
        optimizer: name and keyword arguments, see recipes.common.optimizers. Default: Adam.
    """

    prefix = "dqn."

    target_update_interval: int | None = MISSING
    cagrad: Any = MISSING
    log_q_mean: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("target_update_interval", lambda value: value is None or value > 0, "must be > 0")
        if self.cagrad is not None:
            valid = all(0 <= end < 1 for end in ends("dqn.cagrad", self.cagrad))
            self.check("cagrad", lambda _: valid, "must be in [0, 1)")
        interval = self.target_update_interval
        self.check(
            "tau",
            lambda value: (value is None) != (interval is None),
            f"exactly one of dqn.tau and dqn.target_update_interval={interval} must be null",
        )

    def cagrad_after(self, updates: int) -> float:
        """The c of CAGrad after so many updates of the run."""
        start, end = ends("dqn.cagrad", self.cagrad)
        return start + min(updates / self.num_updates(), 1.0) * (end - start)

    def copies_due(self, step: int, count: int) -> bool:
        """Whether the last `count` of `step` steps include one at which the target network must be copied."""
        interval = self.target_update_interval
        return interval is not None and step // interval > (step - count) // interval


@dataclass
class Config(FixedRoundsRunConfig):
    """The configuration in conf/dqn.yaml."""

    samplers = WITH_LAP

    dqn: DQNConfig = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        has_tables = self.sampler["name"] in EVENT_TABLES
        self.dqn.check("cagrad", lambda value: value is None or has_tables, "needs sampler=sset or sset_per")
        few = len(self.env.events) < MOST_GRADIENTS
        self.dqn.check("cagrad", lambda value: value is None or few, f"supports at most {MOST_GRADIENTS - 1} events")

    @property
    def learning(self) -> DQNConfig:
        """The hyperparameters."""
        return self.dqn
