"""The hyperparameters and the options of each recipe and of other commands, with their checks.

This module does not import torch, so mistakes are reported at once.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recipes.common.checked import Checked, one_of, within
from recipes.common.config import (
    DECOUPLED,
    EVENT_TABLES,
    PLAIN,
    RECIPES,
    FixedRoundsConfig,
    FixedRoundsRunConfig,
    LearningConfig,
    RunConfig,
)
from recipes.common.errors import ConfigError, did_you_mean

WITH_LAP = (*FixedRoundsRunConfig.samplers, "lap")
MOST_GRADIENTS = 12  # that CAGrad combines; the cost doubles with each

# θ of the exploration noise; 0.15 is from the DDPG paper (Lillicrap et al. 2016).
THETA = {"gaussian": 1.0, "ou": 0.15}

# Estimates of the return: those with a critic Q, and the one without, for continuous actions only.
WITH_Q = ("retrace", "importance_sampling")
RETURNS = (*WITH_Q, "truncated_importance_sampling")


@dataclass
class EpsilonGreedyConfig(FixedRoundsConfig):
    """Hyperparameters of Q-learning with epsilon-greedy behaviour. One step is one step of one environment.

    Args:
        learning_rate: learning rate of the optimizer, > 0.
        loss_function: "l2", the squared TD error, or "smooth_l1".
        tau: share of the online network that is blended into the target network at each update, in (0, 0.5].
        exploration_fraction: fraction of total_steps over which epsilon falls linearly, in [0, 1].
        initial_epsilon: epsilon at the start of the linear schedule, in [0, 1].
        final_epsilon: epsilon after the schedule, in [0, 1].
        evaluation_epsilon: probability of a random action in evaluations, in [0, 1].
        max_grad_norm: gradients of a larger norm are scaled down to this norm; None: no clipping.
        optimizer: name and keyword arguments, see recipes.common.update. Default: Adam.
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

    def epsilon(self, step: int) -> float:
        """Exploration rate after `step` steps: 1 until learning starts, then the linear schedule."""
        if step < self.learning_starts:
            return 1.0
        duration = self.exploration_fraction * self.scheduled
        done = min(step / duration, 1.0) if duration else 1.0
        return self.initial_epsilon + done * (self.final_epsilon - self.initial_epsilon)


@dataclass
class DQNConfig(EpsilonGreedyConfig):
    """Hyperparameters of DQN, in addition to those of EpsilonGreedyConfig.

    Fields without a default are set in conf/dqn/<env>.yaml.

    Args:
        target_update_interval: steps between two copies to the target network; None: use tau. Exactly one of the two
            must be None.
        cagrad: c of CAGrad, which combines the gradients of the event tables, in [0, 1); None: gradient of the whole
            batch.
        log_q_mean: whether evaluations also log the mean value of their steps, as the target network gives it. Default:
            False.
        optimizer: name and keyword arguments, see recipes.common.update. Default: Adam.
    """

    prefix = "dqn."

    target_update_interval: int | None = within("> 0")
    cagrad: float | None = within("[0, 1)")
    log_q_mean: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        interval = self.target_update_interval
        one = f"exactly one of dqn.tau and dqn.target_update_interval={interval} must be null"
        self.require("tau", (self.tau is None) != (interval is None), one)

    def copies_due(self, step: int, count: int) -> bool:
        """Whether the last `count` of `step` steps include one at which the target network must be copied."""
        interval = self.target_update_interval
        return interval is not None and step // interval > (step - count) // interval


@dataclass
class DQNRun(FixedRoundsRunConfig):
    """The configuration in conf/dqn.yaml."""

    samplers = WITH_LAP

    dqn: DQNConfig = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dqn.cagrad is not None:
            self.dqn.require("cagrad", self.sampler["name"] in EVENT_TABLES, "needs sampler=sset or sset_per")
            few = len(self.env.events) < MOST_GRADIENTS
            self.dqn.require("cagrad", few, f"supports at most {MOST_GRADIENTS - 1} events")


@dataclass
class SACConfig(FixedRoundsConfig):
    """Hyperparameters of SAC. One step is one step of one environment.

    Args:
        actor_learning_rate: Adam's learning rate for the actor, > 0.
        critic_learning_rate: Adam's learning rate for the critics, > 0.
        alpha_learning_rate: Adam's learning rate for alpha, > 0.
        initial_alpha: initial weight of the entropy, > 0.
        target_entropy: entropy of the policy that alpha is tuned for, in nats.
        tau: share of the critics that is blended into their targets at each update, in (0, 0.5].
    """

    prefix = "sac."

    actor_learning_rate: float = within("> 0")
    critic_learning_rate: float = within("> 0")
    alpha_learning_rate: float = within("> 0")
    initial_alpha: float = within("> 0")
    target_entropy: float = MISSING
    tau: float = within("(0, 0.5]")


@dataclass
class SACRun(FixedRoundsRunConfig):
    """The configuration in conf/sac.yaml."""

    samplers = (*FixedRoundsRunConfig.samplers, *DECOUPLED)

    sac: SACConfig = MISSING


@dataclass
class TD3Config(FixedRoundsConfig):
    """Hyperparameters of TD3. One step is one step of one environment. Actions are in [-1, 1].

    Args:
        actor_learning_rate: Adam's learning rate for the actor, > 0.
        critic_learning_rate: Adam's learning rate for the critics, > 0.
        tau: share of actor and critics that is blended into their targets at each actor update, in (0, 0.5].
        policy_delay: critic updates per update of the actor and the targets, >= 1.
        policy_noise: standard deviation of the noise added to the target policy's actions, >= 0.
        noise_clip: largest absolute value of that noise, >= 0.
        noise: exploration noise: "gaussian", or "ou", an Ornstein-Uhlenbeck process.
        exploration_noise: standard deviation of the exploration noise, >= 0.
        loss_function: loss of the critics, "l2" or "smooth_l1" (Huber). Default: "l2".
    """

    prefix = "td3."

    actor_learning_rate: float = within("> 0")
    critic_learning_rate: float = within("> 0")
    tau: float = within("(0, 0.5]")
    policy_delay: int = within("> 0")
    policy_noise: float = within(">= 0")
    noise_clip: float = within(">= 0")
    noise: str = one_of(*THETA)
    exploration_noise: float = within(">= 0")
    loss_function: str = one_of("l2", "smooth_l1", default="l2")

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = self.gradient_steps % self.policy_delay == 0
        self.require("gradient_steps", whole, f"must be a multiple of td3.policy_delay={self.policy_delay}")


@dataclass
class TD3Run(FixedRoundsRunConfig):
    """The configuration in conf/td3.yaml."""

    samplers = (*FixedRoundsRunConfig.samplers, "lap", *DECOUPLED)

    td3: TD3Config = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        delay = self.td3.policy_delay
        whole = self.updates_per_graph % delay == 0
        self.require("updates_per_graph", whole, f"must be a multiple of td3.policy_delay={delay}")


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
        value_coeff: weight of the squared error of V in the loss, >= 0. Default: 0.5.
        use_q_opc: whether the actor learns from Q(λ) with off-policy corrections instead of Retrace. Default: True.
        dueling: whether Q and V come from a stochastic dueling network instead of two networks. Truncated importance
            sampling has no Q, so it ignores this. Default: True.
        optimizer: name and keyword arguments, see recipes.common.update. Default: Adam.
    """

    prefix = "acer."

    slice_len: int = within("> 0")
    learning_rate: float = within("> 0")
    on_policy: bool = MISSING
    replay_ratio: float = within(">= 0")
    lmbda: float = within("[0, 1]")
    c: float = within(">= 0")
    trust_region: bool = MISSING
    delta: float = within(">= 0")
    average: float = within("[0, 1)")
    returns: str = one_of(*RETURNS)
    entropy_coeff: float = within("[0, inf)")
    critic_coeff: float = within("[0, inf)")
    max_grad_norm: float = within("> 0")
    reward_scale: float = within("> 0")
    normalize_observations: bool = MISSING
    statistics: str = one_of("probs", "logits", "log_probs", default="probs")
    shared_layers: bool = False
    sigma: float = within("> 0", default=0.3)
    num_samples: int = within(">= 1", default=5)
    value_coeff: float = within("[0, inf)", default=0.5)
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
        """Expected number of replayed updates, over which schedules are spread: the others draw nothing."""
        return max(1, round(self.num_rounds() * self.replay_ratio))


@dataclass
class ACERRun(RunConfig):
    """The configuration in conf/acer.yaml."""

    acer: ACERConfig = MISSING

    def __post_init__(self) -> None:
        # before that of num_envs, which would advise another interval
        steps, interval = self.num_envs * self.acer.slice_len, self.acer.train_interval
        self.acer.require("train_interval", interval == steps, f"must be num_envs · acer.slice_len = {steps}")
        super().__post_init__()
        if self.sampler["name"] in EVENT_TABLES and self.sampler.get("retention", "pinned") == "pinned":
            raise ValueError("sampler.retention=pinned: in slices, transitions must stay in their order; use ring")


@dataclass
class R2D2Config(EpsilonGreedyConfig):
    """Hyperparameters of recurrent DQN, in addition to those of EpsilonGreedyConfig.

    Fields without a default are set in conf/r2d2/<env>.yaml.

    Args:
        burn_in: steps before the first step of a window that only update the recurrent state, >= 0.
        sequence_length: steps of a window to learn from, >= 1.
        target_steps: steps whose rewards a target sums up, >= 1; fewer at the end of a window.
        units: units of the LSTM, >= 1.
        eta: weight of the largest TD error of a window in its priority, in [0, 1]; the mean has the weight 1 - eta.
        optimizer: name and keyword arguments, see recipes.common.update. Default: Adam.
    """

    prefix = "r2d2."

    burn_in: int = within(">= 0")
    sequence_length: int = within("> 0")
    target_steps: int = within("> 0")
    units: int = within("> 0")
    eta: float = within("[0, 1]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("n_step", self.n_step == 1, "must be 1; use r2d2.target_steps, which apply inside windows")
        self.require("tau", self.tau is not None, "must be in (0, 0.5]")


@dataclass
class R2D2Run(FixedRoundsRunConfig):
    """The configuration in conf/r2d2.yaml."""

    samplers = PLAIN  # event tables need a flat buffer

    r2d2: R2D2Config = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_divides("num_envs", "buffer_size")
        window = self.num_envs * (self.r2d2.burn_in + self.r2d2.sequence_length)
        fits = self.r2d2.buffer_size >= window
        self.r2d2.require("buffer_size", fits, f"must be >= {window}, a window for each environment")


@dataclass
class DistributedRun(RunConfig):
    """The configuration in conf/distributed.yaml, with the group of hyperparameters of the algorithm."""

    samplers = WITH_LAP

    algorithm: str = one_of("dqn", "td3", "sac")
    dqn: DQNConfig | None = None
    td3: TD3Config | None = None
    sac: SACConfig | None = None
    address: str | None = MISSING
    num_collectors: int = within(">= 1")
    num_shards: int = within(">= 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        learning = self.learning
        self.require_divides("num_shards", "buffer_size")
        way = f"recipes.distributed does not support it; use recipes.{self.algorithm}"
        self.require("compile", not self.compile, way)
        self.env.require("name", self.env.atari is None, way)
        learning.require("n_step", learning.n_step == 1, way)
        if self.dqn is not None:
            self.dqn.require("cagrad", self.dqn.cagrad is None, way)
        if self.td3 is not None:
            self.td3.require("noise", self.td3.noise == "gaussian", way)
            # an update of recipes.td3 ends with that of the actor
            self.updates_per_graph = self.td3.policy_delay


@dataclass
class StudyConfig(Checked):
    """A study, see conf/study/*.yaml.

    Args:
        name: name of the study.
        recipe: name of the recipe to run.
        envs: environments (env=...).
        variants: variants by name, with the words of their command lines.
        fixed: words of every command line. Default: [].
        seeds: number of runs of each variant in each environment, >= 1.
        first_seed: seed of the first run, >= 0; the next runs use the next integers. Default: 0.
        baseline: variant that the others are compared with, seed by seed.
        column: column of progress.csv that runs are judged by. Default: "return_mean".
        also: further columns of progress.csv that curves.csv keeps. Default: [].
        least: value of the column to reach. Default: None, env.reward_threshold.
        in_a_row: number of consecutive evaluations that must reach `least`, >= 1; the first of them counts. Default: 1.
        claims: results in the paper, by environment and variant. Default: {}.
    """

    prefix = "study."

    name: str = MISSING
    recipe: str = one_of(*RECIPES)
    envs: list[str] = MISSING
    variants: dict[str, list[str]] = MISSING
    fixed: list[str] = field(default_factory=list)
    seeds: int = within(">= 1")
    first_seed: int = within(">= 0", default=0)
    baseline: str = MISSING
    column: str = "return_mean"
    also: list[str] = field(default_factory=list)
    least: float | None = None
    in_a_row: int = within(">= 1", default=1)
    claims: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("envs", bool(self.envs), "must have at least one environment")
        for word in [*self.fixed, *(word for words in self.variants.values() for word in words)]:
            if word.lstrip("+~").split("=")[0] in ("env", "seed", "resume"):
                raise ConfigError(f"study: {word} cannot be a word of a variant; the study sets env, seed and resume")
        hint = did_you_mean(self.baseline, self.variants)
        self.require("baseline", self.baseline in self.variants, f"choose {', '.join(self.variants)}{hint}")


@dataclass
class StudyRun(Checked):
    """The configuration in conf/study.yaml."""

    study: StudyConfig = MISSING
    seeds: int | None = within(">= 1", default=None)
    workers: int | None = within(">= 1", default=None)
    out: str = MISSING


# the class of the options of each command
SCHEMAS: dict[str, Any] = dict(dqn=DQNRun, sac=SACRun, td3=TD3Run, acer=ACERRun, r2d2=R2D2Run)
SCHEMAS |= dict(distributed=DistributedRun, study=StudyRun)
