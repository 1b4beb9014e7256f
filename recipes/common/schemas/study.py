"""The configuration of recipes.study."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.common.hints import RECIPES


@dataclass
class StudyConfig:
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
        for key in ("seeds", "in_a_row"):
            if getattr(self, key) < 1:
                raise ValueError(f"study.{key}={getattr(self, key)}: must be >= 1")
        if self.first_seed < 0:
            raise ValueError(f"study.first_seed={self.first_seed}: must be >= 0")
        if not self.envs:
            raise ValueError("study.envs=[]: must have at least one environment")
        if self.recipe not in RECIPES:
            raise ValueError(f"study.recipe={self.recipe}: choose {', '.join(RECIPES)}")
        if self.baseline not in self.variants:
            raise ValueError(f"study.baseline={self.baseline}: choose one of {', '.join(self.variants)}")


@dataclass
class Config:
    """The configuration in conf/study.yaml."""

    study: StudyConfig = MISSING
    seeds: int | None = None
    workers: int | None = None
    out: str = MISSING

    def __post_init__(self) -> None:
        for key in ("seeds", "workers"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}={value}: must be >= 1")
