"""The configuration of recipes.study."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from recipes.hints import RECIPES


@dataclass
class StudyConfig:
    """A file of conf/study.

    Args:
        name: of the study.
        recipe: module of recipes.
        envs: environments (env=...).
        variants: by name, the words of their command lines.
        fixed: words of all command lines.
        seeds: number of runs of each variant in each environment.
        first_seed: the others follow it.
        baseline: the variant that the others are compared to, seed by seed.
        column: of progress.csv, by which runs are judged.
        least: value of the column that is to be reached; None: env.reward_threshold.
        in_a_row: so many evaluations must reach it; the first of them counts.
        claims: what the source says, by environment and variant.
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
    least: float | None = None
    in_a_row: int = 1
    claims: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("seeds", "in_a_row"):
            if getattr(self, key) < 1:
                raise ValueError(f"study.{key}={getattr(self, key)}: must be >= 1")
        if self.recipe not in RECIPES:
            raise ValueError(f"study.recipe={self.recipe}: choose {', '.join(RECIPES)}")
        if self.baseline not in self.variants:
            raise ValueError(f"study.baseline={self.baseline}: choose one of {', '.join(self.variants)}")


@dataclass
class Config:
    """All of conf/study.yaml."""

    study: StudyConfig = MISSING
    seeds: int | None = None
    workers: int | None = None
    out: str = MISSING

    def __post_init__(self) -> None:
        for key in ("seeds", "workers"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key}={value}: must be >= 1")
