"""The configuration of recipes.distributed."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.config import RunConfig
from recipes.common.schemas.dqn import DQNConfig


@dataclass
class Config(RunConfig):
    """The configuration in conf/distributed.yaml."""

    dqn: DQNConfig = MISSING
    address: str | None = MISSING
    num_collectors: int = MISSING
    num_shards: int = MISSING
    prefetch: int = MISSING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_collectors < 1:
            raise ValueError(f"num_collectors={self.num_collectors}: must be >= 1")
        if self.num_shards < 1:
            raise ValueError(f"num_shards={self.num_shards}: must be >= 1")
        if self.dqn.buffer_size % self.num_shards:
            raise ValueError(f"num_shards={self.num_shards}: must divide dqn.buffer_size={self.dqn.buffer_size}")
        if not 0 <= self.prefetch <= 16:
            raise ValueError(f"prefetch={self.prefetch}: must be in [0, 16]")
        if self.compile:
            raise ValueError("compile=true: the buffer is in another process; use recipes.dqn")
        if self.env.atari is not None:
            raise ValueError(f"env={self.env.name}: recipes.distributed does not support Atari games; use recipes.dqn")
        if self.dqn.n_step > 1:
            raise ValueError(f"dqn.n_step={self.dqn.n_step}: recipes.distributed does not support it; use recipes.dqn")
        if self.dqn.cagrad is not None:
            raise ValueError(f"dqn.cagrad={self.dqn.cagrad}: recipes.distributed does not support it; use recipes.dqn")

    @property
    def learning(self) -> DQNConfig:
        """The hyperparameters."""
        return self.dqn
