"""Files of runs and studies: configurations, CSV files and what the evaluations in them say, tables in Markdown.

Also the atomic replacement of files, locks of directories, and the version of the code. Does not import torch.
"""

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipes.common.errors import ConfigError, reason

CONF = Path(__file__).parents[1] / "conf"
CONFIG, CHECKPOINT, PROGRESS = "config.yaml", "checkpoint.zip", "progress.csv"  # in a run directory
RUNS, CURVES, STUDY = "runs.csv", "curves.csv", "study.yaml"  # of a study, see recipes.study
KEYS = ("recipe", "env", "variant", "seed")  # columns of runs.csv and curves.csv that identify a run

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def load_config(path: Path) -> DictConfig:
    """Read the configuration of a run or a study; ConfigError if the file is damaged."""
    try:
        config = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: damaged: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: damaged: a list instead of keys")
    return config


def require_files(directory: Path, names: Iterable[str], advice: str, option: str = "") -> None:
    """Raise ConfigError unless the directory has these files; `option` is what precedes it on the command line."""
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(f"{option}{directory}: no {name} there; {advice}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replace the file `path` atomically at the end of the block.

    After an error, `path` is unchanged. A killed process leaves a temporary directory behind; the next call removes it.

    Yields:
        The path to write the new content to.
    """
    aside = path.parent / f".{path.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside / path.name
        os.replace(aside / path.name, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory and lock it against other processes, where the system and its files have such locks.

    Raises:
        ConfigError: if it cannot be made, or if another process has locked it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: {reason(error)}") from error
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{directory}: another process runs there") from error
        except OSError:  # some network file systems
            pass
        yield
    finally:
        os.close(descriptor)


def code_version() -> str:
    """The commit of this checkout, followed by "+" if files have changed since; "unknown" without git."""
    root = Path(__file__).parents[1]
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * bool(changes)


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
    return reaches(float(rows[-1]["return_mean"]), threshold)


def reaches(value: float, least: float | None) -> bool:
    """Whether a mean return is at least `least`, up to the rounding of its sum; False if there is no threshold."""
    return least is not None and value >= least - 1e-6


def steps_to_reach(
    steps: Sequence[int], values: Sequence[float], least: float | None, in_a_row: int, *, stopped: bool = False
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
