"""The configuration of recipes.experiments.dper_analysis."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from recipes.common.checked import Checked, within
from recipes.common.files import CHECKPOINT, CONFIG


@dataclass
class Config(Checked):
    """The configuration in conf/dper_analysis.yaml."""

    run: str | None = None
    read: str | None = None
    num_candidates: list[int] = MISSING
    granularity: list[str] = MISSING
    draws: int = within(">= 2")
    seed: int = within(">= 0")
    num_threads: int = within(">= 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("num_candidates", min(self.num_candidates, default=0) > 0, "must be numbers >= 1")
        known = {"batch", "group", "transition"}
        valid = bool(self.granularity) and {*self.granularity} <= known
        self.require("granularity", valid, f"choose {', '.join(sorted(known))}")
        if self.read is not None:
            self.require("read", Path(self.read).is_file(), "no such file")
            return
        for name in (CONFIG, CHECKPOINT):
            there = self.run is not None and Path(self.run, name).is_file()
            self.require("run", there, f"no {name} there; pass the directory of a run of recipes.td3")
