"""The configuration of recipes.acer."""

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.common.config import EVENT_TABLES, LearningConfig, RunConfig

# Estimates of the return: those with a critic Q, and the one without, for continuous actions only.
WITH_Q = ("retrace", "importance_sampling")
RETURNS = (*WITH_Q, "truncated_importance_sampling")
# Statistics of a discrete policy that the trust region can use.
STATISTICS = ("probs", "logits", "log_probs")


@dataclass
class ACERConfig(LearningConfig):
    """Hyperparameters of ACER (Wang et al. 2017). Continuous actions are in [-1, 1].

    One step is one step of one environment. Fields without a default are set in conf/acer/<env>.yaml.

    Args:
        slice_len: k, steps per trajectory slice; > 0.
        learning_rate: learning rate of the optimizer, > 0.
        on_policy: whether each round starts with an update on the newest steps.
        replay_ratio: mean number of replayed updates per round, >= 0.
        lmbda: λ of Retrace, in [0, 1].
        c: truncation of the importance weights in the policy gradient, >= 0. With truncated importance sampling, the
            truncation of their product.
        trust_region: whether updates of the policy are limited by a trust region.
        delta: δ, bound of the trust region, >= 0.
        average: share of itself that the average policy keeps at each update, in [0, 1).
        returns: "retrace", "importance_sampling" or, for continuous actions, "truncated_importance_sampling".
        entropy_coeff: weight of the entropy in the loss, >= 0.
        critic_coeff: weight of the squared error of Q in the loss, >= 0.
        max_grad_norm: gradients of a larger norm are scaled down to this norm; > 0.
        reward_scale: factor for rewards in the losses, > 0.
        normalize_observations: whether observations are normalized by their running mean and standard deviation.
        statistics: statistics of the policy that the trust region uses, for discrete actions: "probs" (default),
            "logits" or "log_probs".
        shared_layers: whether policy and values share their hidden layers. Default: False.
        sigma: standard deviation of the policy, > 0. This and the following fields except `optimizer` apply to
            continuous actions only. Default: 0.3.
        num_samples: n, actions sampled per state for the dueling network. Default: 5.
        value_coeff: weight of the squared error of V in the loss. Default: 0.5.
        use_q_opc: whether the actor learns from Q(λ) with off-policy corrections instead of Retrace. Default: True.
        dueling: whether Q and V come from a stochastic dueling network instead of two networks. Truncated importance
            sampling has no Q, so it ignores this. Default: True.
        optimizer: name and keyword arguments, see recipes.common.optimizers. Default: Adam.
    """

    prefix = "acer."

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
        # before train_interval, which follows from it
        self.check("slice_len", lambda value: value > 0, "must be > 0")
        super().__post_init__()
        self.check("learning_rate max_grad_norm reward_scale sigma", lambda value: value > 0, "must be > 0")
        self.check("replay_ratio", lambda value: 0 <= value < math.inf, "must be >= 0")
        self.check("average", lambda value: 0 <= value < 1, "must be in [0, 1)")
        self.check(
            "batch_size",
            lambda value: value % self.slice_len == 0,
            f"must be a multiple of acer.slice_len={self.slice_len}",
        )
        self.choose("statistics", STATISTICS)
        self.choose("returns", RETURNS)
        self.check("hidden_sizes", lambda sizes: len(sizes) > 0, "must hold at least one layer")
        self.check("replay_ratio", lambda value: value or self.on_policy, "makes no updates with acer.on_policy=false")

    def num_updates(self) -> int:
        """Expected number of gradient updates in a whole run."""
        return round(self.num_rounds() * (self.on_policy + self.replay_ratio))


@dataclass
class Config(RunConfig):
    """The configuration in conf/acer.yaml."""

    acer: ACERConfig = MISSING

    def __post_init__(self) -> None:
        # before that of num_envs, which would advise another interval
        steps = self.num_envs * self.acer.slice_len
        self.acer.check("train_interval", lambda value: value == steps, f"must be num_envs · acer.slice_len = {steps}")
        super().__post_init__()

        if self.sampler["name"] in EVENT_TABLES and self.sampler.get("retention", "pinned") == "pinned":
            raise ValueError(
                "sampler.retention=pinned: recipes.acer draws slices, so transitions must stay in their order; use ring"
            )

    @property
    def learning(self) -> ACERConfig:
        """The hyperparameters."""
        return self.acer
