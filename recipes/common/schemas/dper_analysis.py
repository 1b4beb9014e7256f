"""The configuration of recipes.experiments.dper_analysis."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from recipes.common.checked import Checked
from recipes.common.files import CHECKPOINT, CONFIG


@dataclass
class Config(Checked):
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
            self.check(key, lambda value, least=least: value >= least, f"must be >= {least}")
        self.check("num_candidates granularity", lambda value: value, "must have at least one element")
        known = ("batch", "group", "transition")
        self.check("granularity", lambda value: set(value) <= {*known}, f"choose {', '.join(known)}")
        if self.read is not None:
            self.check("read", lambda value: Path(value).is_file(), "no such file")
            return
        for name in (CONFIG, CHECKPOINT):
            self.check(
                "run",
                lambda value, name=name: value is not None and (Path(value) / name).is_file(),
                f"no {name} there; pass the directory of a run of recipes.td3",
            )
