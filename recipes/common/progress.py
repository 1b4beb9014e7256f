"""Logs a run: progress.csv and an optional TorchRL logger."""

import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.record.loggers import get_logger
from tqdm import tqdm

from recipes.common.config import LoggerConfig
from recipes.common.files import PROGRESS, append_rows, read_csv, rewrite


class Progress:
    """Writes one row of numbers per evaluation, without delay.

    Args:
        run_dir: directory of the run.
        config: whether to write progress.csv, and TorchRL's logger.
        until: existing rows with more env steps than this are removed. They were written after the checkpoint that a
            resumed run starts from, and will be written again. Default: 0.
    """

    def __init__(self, run_dir: Path, config: LoggerConfig, until: int = 0) -> None:
        self.path = run_dir / PROGRESS if config.csv else None
        name: Any = config.backend or ""
        experiment = run_dir.name if name == "wandb" else name
        self.logger = get_logger(name, logger_name=str(run_dir), experiment_name=experiment)
        if self.path is not None and self.path.is_file():
            rewrite(self.path, [row for row in read_csv(self.path, ["env_steps"]) if int(row["env_steps"]) <= until])

    def write(self, row: dict[str, float]) -> None:
        """Append a row: numbers by column, with the keys of the first row."""
        if self.path is not None:
            append_rows(self.path, [row])
        if self.logger:
            for name, value in row.items():
                self.logger.log_scalar(name, value, step=int(row["env_steps"]))


class Means:
    """Means of the numbers that were added since the last row."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add tensors [n] by name."""
        for name, value in values.items():
            self._values[name].append(value)

    def take(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means of these numbers, NaN if nothing was added, and remove all values."""
        means = {name: torch.cat(self._values[name]).mean().item() if self._values else math.nan for name in names}
        self._values.clear()
        return means


def warn(message: str) -> None:
    """Print a warning to stderr, above the progress bar."""
    tqdm.write(f"warning: {message}", file=sys.stderr)
