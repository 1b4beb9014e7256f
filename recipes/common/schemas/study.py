"""The configuration of recipes.study."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.common.checked import Checked, one_of, within
from recipes.common.config import RECIPES
from recipes.common.errors import did_you_mean


@dataclass
class StudyConfig(Checked):
    """A study, see conf/study/*.yaml.

    Args:
        name: name of the study.
        recipe: name of the recipe to run.
        envs: environments (env=...).
        variants: variants by name, with the words of their command lines.
        fixed: words of every command line. Default: [].
        seeds: number of runs of each variant in each environment, >= 1.
        first_seed: seed of the first run, >= 0; the next runs use the next integers. Default: 0.
        baseline: variant that the others are compared with, seed by seed.
        column: column of progress.csv that runs are judged by. Default: "return_mean".
        also: further columns of progress.csv that curves.csv keeps. Default: [].
        least: value of the column to reach. Default: None, env.reward_threshold.
        in_a_row: number of consecutive evaluations that must reach `least`, >= 1; the first of them counts. Default: 1.
        claims: results in the paper, by environment and variant. Default: {}.
    """

    prefix = "study."

    name: str = MISSING
    recipe: str = one_of(*RECIPES)
    envs: list[str] = MISSING
    variants: dict[str, list[str]] = MISSING
    fixed: list[str] = field(default_factory=list)
    seeds: int = within(">= 1")
    first_seed: int = within(">= 0", default=0)
    baseline: str = MISSING
    column: str = "return_mean"
    also: list[str] = field(default_factory=list)
    least: float | None = None
    in_a_row: int = within(">= 1", default=1)
    claims: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("envs", bool(self.envs), "must have at least one environment")
        hint = did_you_mean(self.baseline, self.variants)
        self.require("baseline", self.baseline in self.variants, f"choose {', '.join(self.variants)}{hint}")


@dataclass
class Config(Checked):
    """The configuration in conf/study.yaml."""

    study: StudyConfig = MISSING
    seeds: int | None = within(">= 1", default=None)
    workers: int | None = within(">= 1", default=None)
    out: str = MISSING
