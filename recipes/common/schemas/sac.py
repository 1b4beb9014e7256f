"""The configuration of recipes.sac."""

from dataclasses import dataclass

from omegaconf import MISSING

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

    actor_learning_rate: float = MISSING
    critic_learning_rate: float = MISSING
    alpha_learning_rate: float = MISSING
    initial_alpha: float = MISSING
    target_entropy: float = MISSING
    tau: float = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = "actor_learning_rate critic_learning_rate alpha_learning_rate initial_alpha"
        self.check(rates, lambda value: value > 0, "must be > 0")
        self.check("tau", lambda value: 0 < value <= 0.5, "must be in (0, 0.5]")


@dataclass
class Config(FixedRoundsRunConfig):
    """The configuration in conf/sac.yaml."""

    samplers = (*FixedRoundsRunConfig.samplers, *DECOUPLED)

    sac: SACConfig = MISSING

    @property
    def learning(self) -> SACConfig:
        """The hyperparameters."""
        return self.sac
