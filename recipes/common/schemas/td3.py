"""The configuration of recipes.td3."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.checked import one_of, within
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
class Config(FixedRoundsRunConfig):
    """The configuration in conf/td3.yaml."""

    group = "td3"
    samplers = (*FixedRoundsRunConfig.samplers, "lap", *DECOUPLED)

    td3: TD3Config = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        delay = self.td3.policy_delay
        whole = self.updates_per_graph % delay == 0
        self.require("updates_per_graph", whole, f"must be a multiple of td3.policy_delay={delay}")
