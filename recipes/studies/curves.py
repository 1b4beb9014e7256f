"""Learning curves: reads the evaluations of runs, and draws them. Does not import torch.

Also means over seeds with their 95 % bootstrap intervals, and rank correlations.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from omegaconf import MISSING, OmegaConf
from scipy.stats import bootstrap, spearmanr

from recipes.common.errors import ConfigError
from recipes.common.files import CONFIG, PROGRESS, load_config, read_csv, require_files, was_stopped
from recipes.studies import figures

RETURN = "return_mean"
SAMPLER = ("sampler.name",)
_NAMED = (*SAMPLER, "variant")  # keys whose values name a group of runs without the key
KEYS = ("env", "seed", "env_steps")  # columns of a CSV with the evaluations of many runs
BAND = {"alpha": 0.16, "linewidth": 0}
MARKERS = 8  # about so many on a line
RESAMPLES = 1000
FEW = 5
# Resamples that are in memory at the same time.
AT_ONCE = 100

# Maps values [n, ...] to a statistic over axis 0, such as their mean. Resamples are side by side, [n, ..., resamples].
Statistic = Callable[[np.ndarray], np.ndarray | np.floating]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; with fewer than 4 values, the mean."""
    cut = len(values) // 4  # scipy's trim_mean gives the same and takes 25 times as long
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def bootstrap_interval(values: np.ndarray, statistic: Statistic = interquartile_mean) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of a statistic; resamples axis 0 of `values` [n, ...].

    Percentiles of the resamples; with few values, FEW or less, those of BCa (Efron 1987), since plain percentiles are
    too narrow. Where BCa is undefined, as for equal values, they stay as they are.
    """

    def ends(method: str) -> np.ndarray:
        options = {"n_resamples": RESAMPLES, "batch": AT_ONCE, "rng": np.random.default_rng(0)}
        return np.array(bootstrap((values,), over, axis=0, method=method, **options).confidence_interval)

    def over(sample: np.ndarray, axis: int) -> np.ndarray | np.floating:
        return statistic(np.moveaxis(sample, axis, 0))

    if len(values) == 1:
        return np.asarray(statistic(values)), np.asarray(statistic(values))
    found = ends("percentile")
    if len(values) <= FEW:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            corrected = ends("BCa")
        found = np.where(np.isnan(corrected), found, corrected)
    return found[0], found[1]


def median_of(values: np.ndarray) -> np.ndarray:
    """Median over axis 0."""
    return np.median(values, axis=0)


def median_with_bound(steps: np.ndarray, censored: np.ndarray) -> tuple[float, bool]:
    """The median of steps [n], and whether it is only a lower bound because runs were `censored` [n]."""
    median = float(np.median(steps))
    return median, bool(median != np.median(np.where(censored, np.inf, steps)))


def ratio_of_means(pairs: np.ndarray) -> np.ndarray:
    """Mean of the second column of `pairs` [n, 2, ...], divided by the mean of the first."""
    return pairs[:, 1].mean(0) / pairs[:, 0].mean(0)


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
        values = np.stack([run.at(steps, column) for run in runs])
        # Leave out steps at which some runs have no value: the line would jump when the set of runs changes.
        steps, values = steps[~np.isnan(values).any(0)], values[:, ~np.isnan(values).any(0)]
        if not len(steps):
            continue
        values = smooth(values, window)
        every, (color, marker) = max(1, len(steps) // MARKERS), looks[group]
        marked = (place * every // len(groups), every)
        axes.plot(steps, interquartile_mean(values), color=color, marker=marker, markevery=marked)
        if len(runs) > 1:
            axes.fill_between(steps, *bootstrap_interval(values), color=color, **BAND)
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
    sizes = sorted({len(runs) for runs in groups})
    each = f"smoothed over {window} evaluations" if window > 1 else ""
    if sizes[-1] == 1:
        return f"Lines: single runs{f', {each}' if each else ''}."
    # of fewer than four values, the interquartile mean is the mean
    mean = "interquartile mean" if sizes[-1] >= 4 else "mean"
    count = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    lengths = [{int(run.steps[-1]) for run in runs if not run.stopped} for runs in groups]
    end = " Runs differ in length: a line ends with its shortest run." if max(map(len, lengths)) > 1 else ""
    note = f"Line: {mean} of {count} seeds{f', each {each}' if each else ''}"
    return f"{note}; band: 95 % bootstrap interval over seeds.{end}"


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
