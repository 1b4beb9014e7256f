"""CSV files of runs and studies, what the evaluations in them say, and tables in Markdown. Does not import torch."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common.errors import ConfigError
from recipes.common.files import atomic_write

PROGRESS = "progress.csv"
RUNS, CURVES, STUDY = "runs.csv", "curves.csv", "study.yaml"  # of a study, see recipes.study
KEYS = ("recipe", "env", "variant", "seed")  # columns of runs.csv and curves.csv that identify a run


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Append rows to a CSV. If it raises OSError, the file is unchanged. See `rewrite`."""
    rewrite(path, [*(read_csv(path) if path.is_file() else []), *rows])


def rewrite(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Replace the content of a CSV by `rows`, atomically; without rows, delete the file.

    The rows may have different columns, as those of an earlier version do; a value that is missing is "nan".
    """
    if not rows:
        path.unlink()
        return
    with atomic_write(path) as partial, partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="nan")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path, needs: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV, in order. An incomplete last line is ignored: a killed process may leave one.

    Args:
        path: the file.
        needs: columns that it must have if it has rows. Default: none.

    Raises:
        ConfigError: if the file is not a CSV or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            whole, _, _ = file.read().rpartition("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a CSV: {error}") from error
    rows = list(csv.DictReader(io.StringIO(whole, newline="")))
    if missing := [column for column in dict.fromkeys(needs) if rows and column not in rows[0]]:
        raise ConfigError(f"{path}: no column {', '.join(missing)}, only {', '.join(rows[0])}")
    return rows


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of runs.csv or curves.csv; none if the file does not exist. ConfigError if it is another CSV."""
    return read_csv(path, (*KEYS, "env_steps")) if path.is_file() else []


def was_stopped(config: Any, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether a run ended early because it had reached the threshold; `config`: its settings, `rows`: its progress."""
    threshold = config.env.reward_threshold if config.get("stop_at_threshold") else None
    return threshold is not None and reaches(float(rows[-1]["return_mean"]), threshold)


def reaches(value: float, least: float) -> bool:
    """Whether a mean return is at least `least`, up to the rounding of its sum."""
    return value >= least - 1e-6


def steps_to_reach(
    steps: Sequence[int], values: Sequence[float], least: float, in_a_row: int, *, stopped: bool = False
) -> int | None:
    """Env steps at the first of `in_a_row` consecutive evaluations with values >= `least`; None if there are none.

    A run that was `stopped` at its threshold counts as if its last value had stayed.
    """
    reached = [reaches(value, least) for value in values]
    reached += reached[-1:] * (in_a_row - 1) * stopped
    for first in range(len(reached) - in_a_row + 1):
        if all(reached[first : first + in_a_row]):
            return steps[first]
    return None


def markdown(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown with one line per row."""
    rows = [f"| {' | '.join(map(str, line))} |" for line in (head, *lines)]
    return "\n".join([rows[0], "|---" * len(head) + "|", *rows[1:]])
