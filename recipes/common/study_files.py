"""The files of a study, see recipes.study."""

from pathlib import Path

from recipes.common.csv_files import read_csv

RUNS, CURVES, STUDY = "runs.csv", "curves.csv", "study.yaml"
# columns of runs.csv and curves.csv that identify a run
KEYS = ("recipe", "env", "variant", "seed")


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of runs.csv or curves.csv; none if the file does not exist. ConfigError if it is another CSV."""
    return read_csv(path, (*KEYS, "env_steps")) if path.is_file() else []


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """The key (see Job.key) of the run that a row of runs.csv or curves.csv belongs to."""
    return tuple(row[name] for name in KEYS)
