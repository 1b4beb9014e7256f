"""The configuration of recipes.acer."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.config import LearningConfig, RunConfig

# The spaces of the trust region, for discrete actions.
STATISTICS = ("probs", "logits", "log_probs")


@dataclass
class ACERConfig(LearningConfig):
    """Hyperparameters; a step is one step of the environment. Continuous actions are in [-1, 1].

    Args:
        slice_len: k, steps of a trajectory in an update.
        on_policy: whether a round begins with an update on the newest steps.
        replay_ratio: mean number of replayed updates in a round.
        lmbda: of Retrace.
        c: truncation of the importance weights in the policy's gradient.
        trust_region: whether there is one.
        delta: its bound.
        statistics: the space it is in, of discrete actions: "probs", "logits" or "log_probs".
        average: share of itself that the average policy keeps at each update.
        returns: "retrace" or "importance_sampling".
        reward_scale: rewards are multiplied by it, for the losses.
        normalize_observations: by their running mean and standard deviation.
        shared_layers: one trunk for policy and values.
        sigma: standard deviation of the policy; this one and the following are of continuous actions only.
        num_samples: n, of actions drawn for the dueling network.
        value_coeff: weight of the loss of the state value.
        use_q_opc: the actor learns from Q(λ) with off-policy corrections, not from Retrace.
        dueling: whether Q and V are of a stochastic dueling network, not of two networks.
        optimizer: its name and its keywords, see recipes.optimizers.
    """

    group = "acer"

    slice_len: int = MISSING
    learning_rate: float = MISSING
    on_policy: bool = MISSING
    replay_ratio: float = MISSING
    lmbda: float = MISSING
    c: float = MISSING
    trust_region: bool = MISSING
    delta: float = MISSING
    average: float = MISSING
    returns: str = MISSING
    entropy_coeff: float = MISSING
    critic_coeff: float = MISSING
    max_grad_norm: float = MISSING
    reward_scale: float = MISSING
    normalize_observations: bool = MISSING
    statistics: str = "probs"
    shared_layers: bool = False
    sigma: float = 0.3
    num_samples: int = 5
    value_coeff: float = 0.5
    use_q_opc: bool = True
    dueling: bool = True
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("slice_len learning_rate max_grad_norm reward_scale sigma", lambda value: value > 0, "must be > 0")
        self.check("replay_ratio", lambda value: 0 <= value < math.inf, "must be >= 0")
        self.check("average", lambda value: 0 <= value < 1, "must be in [0, 1)")
        self.check(
            "batch_size",
            lambda value: value % self.slice_len == 0,
            f"must be a multiple of acer.slice_len={self.slice_len}",
        )
        self.check("statistics", lambda value: value in STATISTICS, f"must be one of {', '.join(STATISTICS)}")
        self.check("hidden_sizes", lambda sizes: len(sizes) > 0, "must hold at least one layer")
        if not self.on_policy and not self.replay_ratio:
            raise ValueError("acer.replay_ratio=0: nothing would be learned with acer.on_policy=false")

    def num_updates(self) -> int:
        """Gradient updates of a whole run, on average."""
        return round(self.num_rounds() * (self.on_policy + self.replay_ratio))


@dataclass
class Config(RunConfig):
    """All of conf/acer.yaml."""

    acer: ACERConfig = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.acer.train_interval != self.num_envs * self.acer.slice_len:
            raise ValueError(
                f"acer.train_interval={self.acer.train_interval}: must be num_envs · acer.slice_len = "
                f"{self.num_envs * self.acer.slice_len}"
            )

    @property
    def learning(self) -> ACERConfig:
        """The hyperparameters."""
        return self.acer
