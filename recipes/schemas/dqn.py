"""The configuration of recipes.dqn."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.config import EVENT_TABLES, FixedRoundsConfig, RunConfig


@dataclass
class DQNConfig(FixedRoundsConfig):
    """Hyperparameters; a step is one step of the environment.

    Args:
        loss_function: "l2", the squared TD error, or "smooth_l1".
        target_update_interval: steps from one copy to the target network to the next; None: see tau.
        tau: share of the network that the target network takes over at each update; None: copies.
        cagrad: c of CAGrad, which combines the gradients of the event tables; None: the gradient of the whole batch.
        max_grad_norm: None: gradients are not clipped.
        optimizer: its name and its keywords, see recipes.optimizers.
    """

    group = "dqn"

    learning_rate: float = MISSING
    loss_function: str = MISSING
    target_update_interval: int | None = MISSING
    tau: float | None = MISSING
    cagrad: float | None = MISSING
    exploration_fraction: float = MISSING
    initial_epsilon: float = MISSING
    final_epsilon: float = MISSING
    evaluation_epsilon: float = MISSING
    max_grad_norm: float | None = MISSING
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("learning_rate", lambda value: value > 0, "must be > 0")
        self.check("target_update_interval max_grad_norm", lambda value: value is None or value > 0, "must be > 0")
        self.check("tau", lambda value: value is None or 0 < value <= 0.5, "must be in (0, 0.5]")
        self.check("cagrad", lambda value: value is None or 0 <= value < 1, "must be in [0, 1)")
        self.check("loss_function", lambda value: value in ("smooth_l1", "l2"), "choose smooth_l1, l2")
        interval = self.target_update_interval
        self.check(
            "tau",
            lambda value: (value is None) != (interval is None),
            f"one of it and dqn.target_update_interval={interval} must be null, the other a number",
        )
        shares = "exploration_fraction initial_epsilon final_epsilon evaluation_epsilon"
        self.check(shares, lambda value: 0 <= value <= 1, "must be in [0, 1]")
        self.check("final_epsilon", lambda value: value <= self.initial_epsilon, "must be <= dqn.initial_epsilon")

    def epsilon(self, step: int) -> float:
        """Exploration rate: 1 until learning starts, then linear over the exploration fraction of all steps."""
        if step < self.learning_starts:
            return 1.0
        duration = self.exploration_fraction * self.total_steps
        done = min(step / duration, 1.0) if duration else 1.0
        return self.initial_epsilon + done * (self.final_epsilon - self.initial_epsilon)

    def copies_due(self, step: int, count: int) -> bool:
        """Whether the target network is to be copied after the last `count` of `step` steps."""
        interval = self.target_update_interval
        return interval is not None and step // interval > (step - count) // interval


@dataclass
class Config(RunConfig):
    """All of conf/dqn.yaml."""

    dqn: DQNConfig = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dqn.cagrad is not None:
            from recipes.cagrad import MOST_GRADIENTS  # here, since it imports torch

            if self.sampler["name"] not in EVENT_TABLES:
                raise ValueError(f"dqn.cagrad={self.dqn.cagrad}: needs event tables, sampler=sset or sset_per")
            if len(self.env.events) >= MOST_GRADIENTS:
                raise ValueError(f"dqn.cagrad={self.dqn.cagrad}: at most {MOST_GRADIENTS - 1} events")

    @property
    def learning(self) -> DQNConfig:
        """The hyperparameters."""
        return self.dqn
