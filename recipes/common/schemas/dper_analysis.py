"""The configuration of recipes.experiments.dper_analysis."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from recipes.common.cli import CHECKPOINT, CONFIG
from recipes.common.signatures import LIBRARY, arguments


@dataclass
class Config:
    """The configuration in conf/dper_analysis.yaml."""

    run: str | None = None
    read: str | None = None
    num_candidates: list[int] = MISSING
    granularity: list[str] = MISSING
    draws: int = MISSING
    seed: int = MISSING
    num_threads: int = MISSING

    def __post_init__(self) -> None:
        for key, least in (("draws", 2), ("seed", 0), ("num_threads", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)}: must be >= {least}")
        for key in ("num_candidates", "granularity"):
            if not getattr(self, key):
                raise ValueError(f"{key}=[]: must have at least one element")
        choices = arguments(LIBRARY, "DecoupledSampler")["granularity"].choices
        for granularity in self.granularity:
            if granularity not in choices:
                raise ValueError(f"granularity={granularity}: choose {', '.join(choices)}")
        if self.read is not None:
            if not Path(self.read).is_file():
                raise ValueError(f"read={self.read}: no such file")
            return
        if self.run is None:
            raise ValueError("run=null: pass the directory of a run of recipes.td3")
        for name in (CONFIG, CHECKPOINT):
            if not (Path(self.run) / name).is_file():
                raise ValueError(f"run={self.run}: no {name} there; pass the directory of a run of recipes.td3")
