"""Draws ACER's random search: the last return over the learning rate and over δ, as in Figures 5 and 6 of the paper.

    python -m recipes.study study=acer_search
    python -m recipes.experiments.acer_search runs/study/acer_search

Writes search.png and search.svg into the directory of the study. A dot is a setting. For each environment the table has

- *best five*: mean and standard deviation of the last returns of the best five settings, as in the paper's Figure 3;
- *median*, *worst*: of the last returns of all settings;
- *solved*: the number of settings that reach the threshold;
- *learning rate*, *δ*: rank correlation (Spearman) of the last return with them.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from recipes.common.errors import ConfigError, reason
from recipes.common.files import RUNS, markdown, read_csv
from recipes.studies import figures
from recipes.studies.curves import correlation

BEST = 5
SEARCHED = {"acer.learning_rate": "learning rate", "acer.delta": "δ"}
COLUMNS = ("env", "threshold", "reached", "final", "command")


def settings_of(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """The rows of runs.csv that have a searched setting, by environment; the settings become columns."""
    found = defaultdict(list)
    for row in rows:
        words = dict(re.findall(r"(\S+?)=(\S+)", row["command"]))
        if words.keys() >= SEARCHED.keys():
            found[row["env"]].append({**row, **{key: words[key] for key in SEARCHED}})
    return found


def numbers(rows: Sequence[Mapping[str, str]], column: str) -> np.ndarray:
    """A column of rows."""
    return np.array([float(row[column]) for row in rows])


def format_table(settings: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """The table that the module describes."""
    lines = []
    for env, rows in settings.items():
        last = np.sort(numbers(rows, "final"))
        solved = sum(row["reached"] != "" for row in rows)
        correlations = [correlation(numbers(rows, key), numbers(rows, "final")) for key in SEARCHED]
        best = f"{last[-BEST:].mean():.1f} ± {last[-BEST:].std():.1f}"
        texts = (f"{np.median(last):.1f}", f"{last[0]:.1f}", f"{solved} of {len(rows)}")
        lines.append((figures.env_label(env), best, *texts, *(f"{each:.2f}" for each in correlations)))
    return markdown(("environment", "best five", "median", "worst", "solved", *SEARCHED.values()), lines)


@figures.styled
def plot(settings: Mapping[str, Sequence[Mapping[str, str]]]) -> Figure:
    """Draw a row of panels per environment."""
    panels = [(env, key) for env in settings for key in SEARCHED]
    figure, axes_of = figures.panel_grid(len(panels), len(SEARCHED))
    look, entries = figures.looks(["acer"])["acer"], {}
    for axes, (env, key) in zip(axes_of, panels, strict=True):
        rows = settings[env]
        dots = axes.scatter(numbers(rows, key), numbers(rows, "final"), color=look.color, marker=look.marker)
        axes.set_xscale("log" if key == "acer.learning_rate" else "linear")
        axes.set(title=figures.env_label(env), xlabel=SEARCHED[key], ylabel=figures.label("return_mean"))
        entries["a setting of ACER"] = dots
        figures.threshold_line(axes, float(rows[0]["threshold"]), entries, len(settings) > 1)
    figures.explain(
        figure, entries, "Mean of the evaluations in the last tenth of a run. Learning rates and δ were drawn together."
    )
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("study", type=Path, help=f"directory of the study, with its {RUNS}")
    out = parser.parse_args(arguments).study
    try:
        settings = settings_of(read_csv(out / RUNS, COLUMNS))
    except (ConfigError, OSError) as error:
        parser.error(f"{out}: {reason(error)}")
    if not settings:
        parser.error(f"{out}: no run has {' and '.join(SEARCHED)} in its command")
    files = figures.files_of(out / "search")
    figures.save(plot(settings), *files)
    print(format_table(settings))
    print(*files)


if __name__ == "__main__":
    main()
