"""The part of the command line that all experiments with --out and --read share."""

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from recipes.common.errors import ConfigError, reason
from recipes.common.files import append_rows, read_csv
from recipes.studies.figures import files_of, save

Row = dict[str, Any]


class ExperimentParser(argparse.ArgumentParser):
    """A parser with the options --out and --read.

    Args:
        name: the experiment; names its module, its files and the default directory, runs/<name>.
        doc: docstring of its module; the first line describes the command.
        plots: whether it draws a figure. Default: True.
    """

    def __init__(self, name: str, doc: str | None, *, plots: bool = True):
        super().__init__(prog=f"python -m recipes.experiments.{name}", description=(doc or "").splitlines()[0])
        self.name = name
        files, reads = ("csv, .png and .svg", "draw the figure") if plots else ("csv", "print the tables")
        text = f"directory of {name}.{files} (default: %(default)s)"
        self.add_argument("--out", type=Path, default=Path("runs") / name, help=text)
        self.add_argument("--read", type=Path, metavar="CSV", help=f"{reads} of an earlier run; run nothing")

    def run(
        self,
        options: argparse.Namespace,
        kinds: Mapping[str, Callable[[str], Any]],
        measure: Callable[[], Iterable[Row]],
        describe: Callable[[list[Row]], str],
        plot: Callable[[list[Row]], Figure] | None,
    ) -> list[Row]:
        """Measure, or read an earlier CSV; write the rows as they come, draw them and print their description.

        Args:
            options: the parsed options.
            kinds: see rows.
            measure: yields the rows of the CSV.
            describe: maps rows to the text to print.
            plot: maps rows to the figure; None: draw none.
        """
        rows = [] if options.read is None else self.rows(options.read, kinds)
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.error(f"--out {options.out}: {error.strerror}")
        logging.getLogger("torchrl").setLevel(logging.WARNING)  # its messages would break the progress bar
        written = files_of(options.out / self.name) if plot is not None else []
        if options.read is None:
            path = options.out / f"{self.name}.csv"
            path.unlink(missing_ok=True)
            for row in measure():
                append_rows(path, [row])
                rows.append(row)
            written.append(path)
        if plot is not None:
            save(plot(rows), *written[:2])
        print("written:", *written)
        print(describe(rows))
        return rows

    def rows(self, path: Path, kinds: Mapping[str, Callable[[str], Any]]) -> list[Row]:
        """The rows of the CSV for --read; refuse a file that cannot be read, or lacks columns.

        Args:
            path: the file.
            kinds: a type for each column that the file must have. Other columns stay text.
        """
        try:
            rows = read_csv(path, [*kinds])
            return [row | {name: kind(row[name]) for name, kind in kinds.items()} for row in rows]
        except ConfigError as error:
            self.error(f"--read {error}")
        except (OSError, ValueError) as error:
            self.error(f"--read {path}: {reason(error)}")
