"""The configuration of recipes.td3."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.config import DECOUPLED, FixedRoundsConfig, FixedRoundsRunConfig

# θ of the exploration noise; 0.15 is from the DDPG paper (Lillicrap et al. 2016).
THETA = {"gaussian": 1.0, "ou": 0.15}


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

    actor_learning_rate: float = MISSING
    critic_learning_rate: float = MISSING
    tau: float = MISSING
    policy_delay: int = MISSING
    policy_noise: float = MISSING
    noise_clip: float = MISSING
    noise: str = MISSING
    exploration_noise: float = MISSING
    loss_function: str = "l2"

    def __post_init__(self) -> None:
        self.check("policy_delay", lambda value: value > 0, "must be > 0")
        super().__post_init__()
        self.check("actor_learning_rate critic_learning_rate", lambda value: value > 0, "must be > 0")
        self.check("tau", lambda value: 0 < value <= 0.5, "must be in (0, 0.5]")
        self.check("policy_noise noise_clip exploration_noise", lambda value: value >= 0, "must be >= 0")
        self.choose("loss_function", ("l2", "smooth_l1"))
        self.choose("noise", THETA)
        self.check(
            "gradient_steps",
            lambda value: value % self.policy_delay == 0,
            f"must be a multiple of td3.policy_delay={self.policy_delay}",
        )


@dataclass
class Config(FixedRoundsRunConfig):
    """The configuration in conf/td3.yaml."""

    samplers = (*FixedRoundsRunConfig.samplers, "lap", *DECOUPLED)

    td3: TD3Config = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        delay = self.td3.policy_delay
        self.check(
            "updates_per_graph", lambda value: value % delay == 0, f"must be a multiple of td3.policy_delay={delay}"
        )

    @property
    def learning(self) -> TD3Config:
        """The hyperparameters."""
        return self.td3
