"""The configuration of recipes.experiments.dper_analysis."""

from dataclasses import dataclass

from omegaconf import MISSING


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
