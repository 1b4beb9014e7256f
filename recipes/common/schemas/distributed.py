"""The configuration of recipes.distributed."""

from dataclasses import dataclass

from omegaconf import MISSING

from recipes.common.checked import within
from recipes.common.config import RunConfig
from recipes.common.schemas.dqn import WITH_LAP, DQNConfig


@dataclass
class Config(RunConfig):
    """The configuration in conf/distributed.yaml."""

    group = "dqn"
    samplers = WITH_LAP

    dqn: DQNConfig = MISSING
    address: str | None = MISSING
    num_collectors: int = within(">= 1")
    num_shards: int = within(">= 1")
    prefetch: int = within("[0, 16]")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_divides("num_shards", "buffer_size")
        way = "recipes.distributed does not support it; use recipes.dqn"
        self.require("compile", not self.compile, way)
        self.env.require("name", self.env.atari is None, way)
        self.dqn.require("n_step", self.dqn.n_step == 1, way)
        self.dqn.require("cagrad", self.dqn.cagrad is None, way)
