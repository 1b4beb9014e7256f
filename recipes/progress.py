"""The record of a run: progress.csv, and a TorchRL logger where one is chosen."""

import csv
import os
from pathlib import Path

from torchrl.record.loggers import get_logger

from recipes.run import ConfigError

PROGRESS = "progress.csv"


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
        try:
            self.logger = get_logger(backend or "", logger_name=str(run_dir), experiment_name=backend or "")  # pyright: ignore
        except (ImportError, NotImplementedError) as error:
            raise ConfigError(f"logger={backend}: {error}; install the package or use logger=csv") from error
        if self.path is not None and self.path.is_file():
            rewrite(self.path, [row for row in read_progress(self.path) if int(row["env_steps"]) <= until])

    def write(self, row: dict[str, float]) -> None:
        """Appends a row; its keys must be those of the first row."""
        if self.path is not None:
            new = not self.path.is_file()
            with self.path.open("a", newline="") as file:
                writer = csv.writer(file)
                if new:
                    writer.writerow(row)
                writer.writerow(row.values())
        if self.logger:
            for name, value in row.items():
                self.logger.log_scalar(name, value, step=int(row["env_steps"]))


def rewrite(path: Path, rows: list[dict[str, str]]) -> None:
    """Replaces the file's content by `rows`, atomically; no rows: no file."""
    if not rows:
        path.unlink()
        return
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)


def read_progress(path: Path) -> list[dict[str, str]]:
    """The rows of a progress.csv, oldest first."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
