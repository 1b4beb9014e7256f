"""The configuration of recipes.dqn."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.common.checked import one_of, within
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

    learning_rate: float = within("> 0")
    loss_function: str = one_of("smooth_l1", "l2")
    tau: float | None = within("(0, 0.5]")
    exploration_fraction: float = within("[0, 1]")
    initial_epsilon: float = within("[0, 1]")
    final_epsilon: float = within("[0, 1]")
    evaluation_epsilon: float = within("[0, 1]")
    max_grad_norm: float | None = within("> 0")
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})

    def __post_init__(self) -> None:
        super().__post_init__()
        falls = self.final_epsilon <= self.initial_epsilon
        self.require("final_epsilon", falls, f"must be <= {self.prefix}initial_epsilon")

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

    target_update_interval: int | None = within("> 0")
    cagrad: Any = MISSING
    log_q_mean: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cagrad is not None:
            self.require("cagrad", all(0 <= end < 1 for end in ends("dqn.cagrad", self.cagrad)), "must be in [0, 1)")
        interval = self.target_update_interval
        one = f"exactly one of dqn.tau and dqn.target_update_interval={interval} must be null"
        self.require("tau", (self.tau is None) != (interval is None), one)

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

    group = "dqn"
    samplers = WITH_LAP

    dqn: DQNConfig = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dqn.cagrad is not None:
            self.dqn.require("cagrad", self.sampler["name"] in EVENT_TABLES, "needs sampler=sset or sset_per")
            few = len(self.env.events) < MOST_GRADIENTS
            self.dqn.require("cagrad", few, f"supports at most {MOST_GRADIENTS - 1} events")
