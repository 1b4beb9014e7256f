"""The configuration of recipes.acer."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.common.checked import one_of, within
from recipes.common.config import EVENT_TABLES, LearningConfig, RunConfig

# Estimates of the return: those with a critic Q, and the one without, for continuous actions only.
WITH_Q = ("retrace", "importance_sampling")
RETURNS = (*WITH_Q, "truncated_importance_sampling")


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

    slice_len: int = within("> 0")
    learning_rate: float = within("> 0")
    on_policy: bool = MISSING
    replay_ratio: float = within(">= 0")
    lmbda: float = MISSING
    c: float = MISSING
    trust_region: bool = MISSING
    delta: float = MISSING
    average: float = within("[0, 1)")
    returns: str = one_of(*RETURNS)
    entropy_coeff: float = MISSING
    critic_coeff: float = MISSING
    max_grad_norm: float = within("> 0")
    reward_scale: float = within("> 0")
    normalize_observations: bool = MISSING
    statistics: str = one_of("probs", "logits", "log_probs", default="probs")
    shared_layers: bool = False
    sigma: float = within("> 0", default=0.3)
    num_samples: int = 5
    value_coeff: float = 0.5
    use_q_opc: bool = True
    dueling: bool = True
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "adam"})

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.batch_size % self.slice_len == 0
        self.require("batch_size", whole, f"must be a multiple of acer.slice_len={self.slice_len}")
        self.require("hidden_sizes", len(self.hidden_sizes) > 0, "must hold at least one layer")
        updates = self.replay_ratio > 0 or self.on_policy
        self.require("replay_ratio", updates, "makes no updates with acer.on_policy=false")

    def num_updates(self) -> int:
        """Expected number of gradient updates in a whole run."""
        return round(self.num_rounds() * (self.on_policy + self.replay_ratio))


@dataclass
class Config(RunConfig):
    """The configuration in conf/acer.yaml."""

    group = "acer"
    acer: ACERConfig = MISSING

    def __post_init__(self) -> None:
        # before that of num_envs, which would advise another interval
        steps = self.num_envs * self.acer.slice_len
        self.acer.require(
            "train_interval", self.acer.train_interval == steps, f"must be num_envs · acer.slice_len = {steps}"
        )
        super().__post_init__()
        if self.sampler["name"] in EVENT_TABLES and self.sampler.get("retention", "pinned") == "pinned":
            raise ValueError(
                "sampler.retention=pinned: recipes.acer draws slices, so transitions must stay in their order; use ring"
            )
