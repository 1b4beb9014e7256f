"""The record of a run: progress.csv, and a TorchRL logger where one is chosen."""

import csv
import importlib.util
import io
import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrl.record.loggers import get_logger
from tqdm import tqdm

from recipes.files import atomic_write
from recipes.run import ConfigError, reason

PROGRESS = "progress.csv"
VIDEO = "evaluation"  # what a backend calls it


class Progress:
    """Writes one row of numbers per evaluation, at once.

    Args:
        run_dir: directory of the run.
        write_csv: whether to keep progress.csv.
        backend: a TorchRL logger ("tensorboard", "wandb", ...) or None.
        until: rows beyond this number of env steps are dropped: they were written after the checkpoint a resumed run
            starts from, and will be written again.

    Raises:
        ConfigError: the backend's package is not installed.
    """

    def __init__(self, run_dir: Path, write_csv: bool, backend: str | None, until: int = 0) -> None:
        self.path = run_dir / PROGRESS if write_csv else None
        self._backend = backend
        self._waiting: list[dict[str, float]] = []
        try:
            self.logger = get_logger(
                backend or "",  # pyright: ignore[reportArgumentType]: NotImplementedError for names it does not know
                logger_name=str(run_dir),
                experiment_name=backend or "",
            )
        except (ImportError, NotImplementedError) as error:
            raise ConfigError(f"logger={backend}: {error}; install the package or use logger=csv") from error
        if self.path is not None and self.path.is_file():
            rewrite(self.path, [row for row in read_progress(self.path) if int(row["env_steps"]) <= until])

    def write(self, row: dict[str, float], histograms: Mapping[str, Tensor] | None = None) -> None:
        """Appends a row; its keys must be those of the first row. If the disk is full, it waits until it is not.

        Histograms of tensors go to the backend alone.
        """
        if self.path is not None:
            self._waiting.append(row)
            try:
                self.flush()
            except OSError as error:
                warn(f"{self.path}: {reason(error)}; {len(self._waiting)} rows wait to be written")
        if self.logger:
            for name, value in row.items():
                self.logger.log_scalar(name, value, step=int(row["env_steps"]))
            for name, values in (histograms or {}).items():
                bins: Any = "auto" if self._backend == "tensorboard" else 64
                data: Any = values.cpu().numpy()
                self.logger.log_histogram(name, data, step=int(row["env_steps"]), bins=bins)

    def show(self, frames: np.ndarray, step: int) -> None:
        """Hands a video [frames, height, width, 3] to the backend, which needs moviepy; else nothing is done."""
        if self.logger and importlib.util.find_spec("moviepy") is not None:
            self.logger.log_video(VIDEO, torch.from_numpy(frames).movedim(-1, 1).unsqueeze(0), step=step)

    def flush(self) -> None:
        """Writes the rows that wait; OSError: the file is as it was."""
        if self.path is None or not self._waiting:
            return
        append_rows(self.path, self._waiting)
        self._waiting.clear()


class Means:
    """Means of what is recorded from one row to the next."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Takes tensors [n]."""
        for name, value in values.items():
            self._values[name].append(value)

    def take(self, names: Sequence[str]) -> dict[str, float]:
        """The means of these, nan if there is nothing yet; and begins anew."""
        means = {name: torch.cat(self._values[name]).mean().item() if self._values else math.nan for name in names}
        self._values.clear()
        return means

    def state_dict(self) -> dict[str, Tensor]:
        """The values since the last row."""
        return {name: torch.cat(values) for name, values in self._values.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._values.clear()
        self.add(state)


def warn(message: str) -> None:
    """Says on stderr, above the progress bar, that something went wrong which the run survives."""
    tqdm.write(f"warning: {message}", file=sys.stderr)


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Appends rows to a CSV, which are on the disk then; OSError: the file is as it was."""
    length = path.stat().st_size if path.is_file() else 0
    try:
        with path.open("a", newline="") as file:
            file.write(_lines(rows, header=not length))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        if path.is_file():
            os.truncate(path, length)
        raise


def rewrite(path: Path, rows: list[dict[str, str]]) -> None:
    """Replaces the file's content by `rows`, atomically; no rows: no file."""
    if not rows:
        path.unlink()
        return
    with atomic_write(path) as partial, partial.open("w", newline="") as file:
        file.write(_lines(rows, header=True))


def _lines(rows: Sequence[Mapping[str, object]], *, header: bool) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if header:
        writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return text.getvalue()


def read_progress(path: Path) -> list[dict[str, str]]:
    """The rows of a progress.csv, oldest first, without a last one that was cut off."""
    with path.open(newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(io.StringIO(whole, newline="")))


def steps_to_reach(steps: Sequence[int], values: Sequence[float], least: float, in_a_row: int) -> int | None:
    """Steps at the first of `in_a_row` evaluations in a row with at least this value; None if there are none."""
    reached = [value >= least - 1e-6 for value in values]
    for first in range(len(reached) - in_a_row + 1):
        if all(reached[first : first + in_a_row]):
            return steps[first]
    return None
