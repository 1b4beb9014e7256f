"""The configuration of recipes.study."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.common.checked import Checked
from recipes.common.config import RECIPES


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
    recipe: str = MISSING
    envs: list[str] = MISSING
    variants: dict[str, list[str]] = MISSING
    fixed: list[str] = field(default_factory=list)
    seeds: int = MISSING
    first_seed: int = 0
    baseline: str = MISSING
    column: str = "return_mean"
    also: list[str] = field(default_factory=list)
    least: float | None = None
    in_a_row: int = 1
    claims: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.check("seeds in_a_row", lambda value: value >= 1, "must be >= 1")
        self.check("first_seed", lambda value: value >= 0, "must be >= 0")
        self.check("envs", lambda value: value, "must have at least one environment")
        self.choose("recipe", RECIPES)
        self.choose("baseline", self.variants)


@dataclass
class Config(Checked):
    """The configuration in conf/study.yaml."""

    study: StudyConfig = MISSING
    seeds: int | None = None
    workers: int | None = None
    out: str = MISSING

    def __post_init__(self) -> None:
        self.check("seeds workers", lambda value: value is None or value >= 1, "must be >= 1")
