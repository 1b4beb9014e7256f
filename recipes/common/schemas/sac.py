"""The configuration of recipes.sac."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.checked import within
from recipes.common.config import DECOUPLED, FixedRoundsConfig, FixedRoundsRunConfig


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
class Config(FixedRoundsRunConfig):
    """The configuration in conf/sac.yaml."""

    group = "sac"
    samplers = (*FixedRoundsRunConfig.samplers, *DECOUPLED)

    sac: SACConfig = MISSING
