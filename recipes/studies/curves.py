"""Learning curves: reads the evaluations of runs, and draws them. Does not import torch.

Also rank correlations.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from omegaconf import MISSING, OmegaConf
from scipy.stats import spearmanr

from recipes.common.errors import ConfigError
from recipes.common.files import CONFIG, PROGRESS, load_config, read_csv, require_files, was_stopped
from recipes.studies import figures
from recipes.studies.intervals import mean_interval

RETURN = "return_mean"
SAMPLER = ("sampler.name",)
_NAMED = (*SAMPLER, "variant")  # keys whose values name a group of runs without the key
KEYS = ("env", "seed", "env_steps")  # columns of a CSV with the evaluations of many runs
BAND = {"alpha": 0.16, "linewidth": 0}
MARKERS = 8  # about so many on a line


def median_with_bound(steps: np.ndarray, censored: np.ndarray) -> tuple[float, bool]:
    """The median of steps [n], and whether it is only a lower bound because runs were `censored` [n]."""
    median = float(np.median(steps))
    return median, bool(median != np.median(np.where(censored, np.inf, steps)))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The rank correlation (Spearman); NaN if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    found: Any = spearmanr(a, b)
    return float(found.statistic)


@dataclass
class Curve:
    """The evaluations of one run."""

    env: str
    group: str
    seed: int
    threshold: float | None
    steps: np.ndarray
    values: dict[str, np.ndarray]
    column: str = RETURN
    stopped: bool = False  # it ended early because it had reached the threshold
    reached: float | None = None  # env steps at the threshold of a study, if the run reached it

    def at(self, steps: np.ndarray, column: str) -> np.ndarray:
        """The latest value at each of `steps`; NaN before the first evaluation and after the end, unless `stopped`."""
        latest = np.searchsorted(self.steps, steps, side="right") - 1
        values = np.where(latest >= 0, self.values[column][latest], np.nan)
        return values if self.stopped else np.where(steps > self.steps[-1], np.nan, values)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running means over the last axis of [runs, evaluations]; near the ends, over the values that exist."""
    weights = np.ones(min(window, values.shape[-1]))
    count = np.convolve(np.ones(values.shape[-1]), weights, mode="same")
    return np.stack([np.convolve(row, weights, mode="same") / count for row in values])


def draw_curves(
    axes: Axes, groups: Mapping[str, Sequence[Curve]], column: str, looks: Mapping[str, figures.Look], window: int = 1
) -> None:
    """Draw a line and a band for each group of runs; the caller labels the x axis, see `figures.count_steps`.

    Args:
        axes: the panel.
        groups: runs by group.
        column: the values to draw.
        looks: colour and marker of each group.
        window: evaluations of a run that are averaged, see :func:`smooth`. Default: 1.
    """
    for place, (group, runs) in enumerate(groups.items()):
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        # pooled studies may have several runs of a seed
        seeds = np.array([run.seed for run in runs])
        values = np.stack([run.at(steps, column) for run in runs])
        values = np.stack([values[seeds == seed].mean(0) for seed in np.unique(seeds)])
        # Leave out steps at which some runs have no value: the line would jump when the set of runs changes.
        steps, values = steps[~np.isnan(values).any(0)], values[:, ~np.isnan(values).any(0)]
        if not len(steps):
            continue
        values = smooth(values, window)
        every, (color, marker) = max(1, len(steps) // MARKERS), looks[group]
        marked = (place * every // len(groups), every)
        axes.plot(steps, values.mean(0), color=color, marker=marker, markevery=marked)
        if len(values) > 1:
            axes.fill_between(steps, *mean_interval(values), color=color, **BAND)
    axes.set(ylabel=figures.label(column), xmargin=0.02)


def curve_entries(looks: Mapping[str, figures.Look]) -> dict[str, tuple[Artist, ...]]:
    """The entries of the legend: a line on its band for the label of each group."""
    return {
        figures.label(group): (Patch(color=look.color, **BAND), figures.sample_line(look))
        for group, look in looks.items()
    }


def curve_note(groups: Iterable[Sequence[Curve]], window: int = 1) -> str:
    """Sentences on what lines and bands are."""
    groups = [*groups]
    sizes = sorted({len({run.seed for run in runs}) for runs in groups})
    each = f"smoothed over {window} evaluations" if window > 1 else ""
    lasts = [(runs, max(run.steps[-1] for run in runs)) for runs in groups]
    carried = any(run.stopped and run.steps[-1] < last for runs, last in lasts for run in runs)
    end = " A run that stopped at its threshold keeps its last value." if carried else ""
    if sizes[-1] == 1:
        return f"Lines: single runs{f', {each}' if each else ''}.{end}"
    count = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    lengths = [{int(run.steps[-1]) for run in runs if not run.stopped} for runs in groups]
    if max(map(len, lengths)) > 1:
        end += " Runs differ in length: a line ends with its shortest run."
    return f"Line: mean of {count} seeds{f', each {each}' if each else ''}; band: 95 % t interval of the mean.{end}"


def read_run(run_dir: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> Curve:
    """Read the evaluations of a run.

    Args:
        run_dir: directory of the run.
        columns: columns of progress.csv to read. Default: the mean return.
        by: configuration keys that name the group of the run. Default: the sampler.

    Raises:
        ConfigError: if the directory holds no evaluations, or a column or key is missing.
    """
    require_files(run_dir, (CONFIG, PROGRESS), "pass the directory of a run with logger=csv")
    config = load_config(run_dir / CONFIG)
    rows = read_csv(run_dir / PROGRESS, ("env_steps", RETURN, *columns))
    if not rows:
        raise ConfigError(f"{run_dir}: {PROGRESS} has no rows yet")
    values = {key: OmegaConf.select(config, key, default=MISSING) for key in by}
    if missing := [key for key, value in values.items() if value == MISSING]:
        raise ConfigError(f"{run_dir}: {CONFIG} has no {', '.join(missing)}")
    return Curve(
        env=config.env.name,
        group=group_name(values),
        seed=config.seed,
        threshold=config.env.reward_threshold,
        steps=np.array([int(row["env_steps"]) for row in rows]),
        values=values_of(rows, {RETURN, *columns}),
        stopped=was_stopped(config, rows),
    )


def read_table(path: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> list[Curve]:
    """Read the evaluations of many runs from a CSV; it has no thresholds.

    Args:
        path: a CSV with a row per evaluation. Of rows with the same step of a run, the last one counts.
        columns: columns of values to read. Default: the mean return.
        by: columns that name the group of a run. Default: the sampler.

    Raises:
        ConfigError: if the file has no rows or lacks a column.
    """
    names = [name.removesuffix(".name") for name in by]
    runs: dict[tuple[str, str, int], dict[int, dict[str, str]]] = defaultdict(dict)
    for row in read_csv(path, (*KEYS, *names, *columns)):
        group = group_name({key: row[name] for key, name in zip(by, names, strict=True)})
        runs[row["env"], group, int(row["seed"])][int(row["env_steps"])] = row
    if not runs:
        raise ConfigError(f"{path}: no rows")
    return [
        Curve(env, group, seed, None, np.array([*rows]), values_of(rows.values(), columns))
        for (env, group, seed), rows in runs.items()
    ]


def values_of(rows: Iterable[Mapping[str, str]], columns: Iterable[str]) -> dict[str, np.ndarray]:
    """The numbers in columns of a CSV."""
    rows = list(rows)
    return {column: np.array([float(row[column]) for row in rows]) for column in columns}


def group_name(values: Mapping[str, object]) -> str:
    """The name of the runs with these values of the keys in `--by`."""
    texts = {key: "null" if value is None else str(value) for key, value in values.items()}
    names = [text if key in _NAMED else f"{key.split('.')[-1]} {text}" for key, text in texts.items()]
    return ", ".join(names)


@figures.styled
def draw_runs(runs: Sequence[Curve], columns: Sequence[str] = (RETURN,), window: int = 1) -> Figure:
    """Draw a panel per environment and column.

    Args:
        runs: at least one run.
        columns: the values to draw. Default: the mean return.
        window: evaluations of a run that are averaged. Default: 1.
    """
    by_env: dict[str, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_env[run.env][run.group].append(run)
    panels = [(env, column) for env in by_env for column in columns]
    figure, axes_of = figures.panel_grid(len(panels), len(columns) if 1 < len(columns) <= 3 else 2)
    chosen = figures.looks(dict.fromkeys(run.group for run in runs))
    entries: dict = curve_entries(chosen)
    for axes, (env, column) in zip(axes_of, panels, strict=True):
        draw_curves(axes, by_env[env], column, chosen, window)
        largest = max(run.steps[-1] for group in by_env[env].values() for run in group)
        axes.set_xlabel(figures.count_steps(axes.xaxis, largest))
        axes.set_title(figures.env_label(env))
        first = next(iter(by_env[env].values()))[0]
        if first.threshold is not None and column == first.column:
            figures.threshold_line(axes, first.threshold, entries, len(by_env) > 1)
    groups = [group for groups in by_env.values() for group in groups.values()]
    figures.explain(figure, entries, curve_note(groups, window))
    return figure
