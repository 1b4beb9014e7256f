"""The configuration of recipes.r2d2."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.checked import within
from recipes.common.config import PLAIN, FixedRoundsRunConfig
from recipes.common.schemas.dqn import EpsilonGreedyConfig


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
        optimizer: name and keyword arguments, see recipes.common.optimizers. Default: Adam.
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
class Config(FixedRoundsRunConfig):
    """The configuration in conf/r2d2.yaml."""

    group = "r2d2"
    samplers = PLAIN  # event tables need a flat buffer

    r2d2: R2D2Config = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_divides("num_envs", "buffer_size")
