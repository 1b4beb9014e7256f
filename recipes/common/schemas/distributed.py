"""The configuration of recipes.distributed."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.config import RunConfig
from recipes.common.schemas.dqn import WITH_LAP, DQNConfig


@dataclass
class Config(RunConfig):
    """The configuration in conf/distributed.yaml."""

    samplers = WITH_LAP

    dqn: DQNConfig = MISSING
    address: str | None = MISSING
    num_collectors: int = MISSING
    num_shards: int = MISSING
    prefetch: int = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("num_collectors num_shards", lambda value: value >= 1, "must be >= 1")
        self.check_divides("num_shards", "buffer_size")
        self.check("prefetch", lambda value: 0 <= value <= 16, "must be in [0, 16]")
        way = "recipes.distributed does not support it; use recipes.dqn"
        self.check("compile", lambda value: not value, way)
        if self.env.atari is not None:
            raise ValueError(f"env={self.env.name}: {way}")
        self.dqn.check("n_step", lambda value: value == 1, way)
        self.dqn.check("cagrad", lambda value: value is None, way)

    @property
    def learning(self) -> DQNConfig:
        """The hyperparameters."""
        return self.dqn
