"""Plots learning curves of runs: the interquartile mean (IQM) over seeds with a 95 % bootstrap band.

    python -m recipes.plot runs/dqn/cartpole/reaper/* runs/dqn/cartpole/per/* --out cartpole.png
    python -m recipes.plot runs/dqn/threerooms/*/* --columns q_sum return_mean --solved -8.8 --out threerooms.png
    python -m recipes.plot runs/acer/cartpole/*/* --by acer.trust_region acer.replay_ratio --columns training_return
    python -m recipes.plot study=reaper

There is one panel per environment and column, and one line per sampler, or per value of the configuration keys in
`--by`. A run that stopped because it reached the reward threshold counts with its last return at later steps. A run
that ended otherwise ends the line of its group. `--solved` prints the steps until a run solved its task: the first of
three consecutive evaluations whose value in the last column is at least the given value. For a run that did not solve
its task it prints "≥" and the length of the run.

For a study (study=<name or directory>, see recipes.study), it prints the table and writes table and figure into the
directory of the study.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from scipy.stats import norm, trim_mean

from recipes.common.cli import BAD_CONFIG, CONFIG, ConfigError
from recipes.common.progress import PROGRESS, read_progress, steps_to_reach

RESAMPLES = 1000
FEW = 5
RETURN = "return_mean"
IN_A_ROW = 3
SAMPLER = ("sampler.name",)
# The legend is below the axes for up to this many groups, and beside the axes for more.
GROUPS_BELOW = 4
PANEL_WIDTH, LEGEND_WIDTH = 6.4, 3.1  # inches
LABELS = {
    RETURN: "return (mean of an evaluation)",
    "training_return": "return (mean of the last 100 episodes of training)",
    "q_sum": "Q-values, summed",
    "q_error": "error of Q (RMS)",
}


@dataclass
class Run:
    """The evaluations of one run."""

    env: str
    group: str
    seed: int
    threshold: float | None
    steps: np.ndarray
    values: dict[str, np.ndarray]
    column: str = RETURN

    @property
    def solved(self) -> bool:
        """Whether the last evaluation reached the threshold."""
        return self.threshold is not None and bool(self.values[self.column][-1] >= self.threshold)

    def at(self, steps: np.ndarray, column: str) -> np.ndarray:
        """The latest value at each of `steps`; NaN before the first evaluation and after the end of an unsolved run."""
        latest = np.searchsorted(self.steps, steps, side="right") - 1
        values = np.where(latest >= 0, self.values[column][latest], np.nan)
        return values if self.solved else np.where(steps > self.steps[-1], np.nan, values)


def read_run(run_dir: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> Run:
    """Read the evaluations of a run.

    Args:
        run_dir: directory of the run.
        columns: columns of progress.csv to read. Default: the mean return.
        by: configuration keys that name the group of the run. Default: the sampler.

    Raises:
        ConfigError: if the directory holds no evaluations, or a column or key is missing.
    """
    for name in (CONFIG, PROGRESS):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir}: no {name} there; pass the directory of a run with logger=csv")
    config = OmegaConf.load(run_dir / CONFIG)
    rows = read_progress(run_dir / PROGRESS)
    if not rows:
        raise ConfigError(f"{run_dir}: {PROGRESS} has no rows yet")
    for column in columns:
        if column not in rows[0]:
            raise ConfigError(f"{run_dir}: {PROGRESS} has no column {column}, only {', '.join(rows[0])}")
    values = {key: OmegaConf.select(config, key) for key in by}
    if missing := [key for key, value in values.items() if value is None]:
        raise ConfigError(f"{run_dir}: {CONFIG} has no {', '.join(missing)}")
    names = [str(value) if key in SAMPLER else f"{key.split('.')[-1]} {value}" for key, value in values.items()]
    return Run(
        env=config.env.name,
        group=", ".join(names),
        seed=config.seed,
        threshold=config.env.reward_threshold,
        steps=np.array([int(row["env_steps"]) for row in rows]),
        values={column: np.array([float(row[column]) for row in rows]) for column in {RETURN, *columns}},
    )


# Maps values [n, ...] to a statistic [...] over axis 0.
Statistic = Callable[[np.ndarray], np.ndarray | np.floating]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; with fewer than 4 values, the mean."""
    return trim_mean(values, 0.25, axis=0)


def bootstrap_interval(values: np.ndarray, statistic: Statistic = interquartile_mean) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of a statistic; resamples axis 0 of `values` [n, ...].

    Percentiles of the resamples; with few values, FEW or less, those of BCa, since plain percentiles are too narrow.
    """
    rng = np.random.default_rng(0)
    found = np.array([statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)])
    levels = [0.025, 0.975]
    if 1 < len(values) <= FEW:
        low, high = bca_percentiles(found, values, statistic, levels)
    else:
        low, high = np.quantile(found, levels, axis=0)
    return low, high


def bca_percentiles(
    found: np.ndarray, values: np.ndarray, statistic: Statistic, levels: Sequence[float]
) -> list[np.ndarray]:
    """Percentiles of bootstrap resamples, corrected for bias and acceleration (BCa; Efron 1987, Eq. 6.8).

    The corrected level is Φ(z0 + (z0 + z) / (1 - a (z0 + z))). z is the normal quantile of the level, z0 that of the
    share of resamples below the estimate. The acceleration is a = Σ u³ / (6 (Σ u²)^1.5) of the jackknife's deviations
    u. Where all resamples lie on one side of the estimate, z0 is infinite, and the level stays as it is.

    Args:
        found: the statistic of each resample, [resamples, ...].
        values: the sample, [n, ...] with n > 1.
        statistic: the statistic.
        levels: the levels of the percentiles, each in (0, 1).

    Returns:
        The percentile of each level, [...].
    """
    estimate = statistic(values)
    share = ((found < estimate).mean(0) + (found <= estimate).mean(0)) / 2
    finite = (share > 0) & (share < 1)
    bias = norm.ppf(np.where(finite, share, 0.5))
    without = np.array([statistic(np.delete(values, row, axis=0)) for row in range(len(values))])
    deviations = without.mean(0) - without
    spread = (deviations**2).sum(0) ** 1.5
    acceleration = np.where(finite & (spread > 0), (deviations**3).sum(0) / np.where(spread > 0, 6 * spread, 1.0), 0.0)
    ordered = np.sort(found, axis=0)
    percentiles = []
    for level in levels:
        shifted = bias + norm.ppf(level)
        place = norm.cdf(bias + shifted / (1 - acceleration * shifted)) * (len(found) - 1)
        below = np.floor(place).astype(int)
        above = np.ceil(place).astype(int)
        ends = [np.take_along_axis(ordered, at[None], axis=0)[0] for at in (below, above)]
        percentiles.append(ends[0] + (place - below) * (ends[1] - ends[0]))
    return percentiles


def median_with_bound(steps: np.ndarray, censored: np.ndarray) -> tuple[float, bool]:
    """The median of steps [n], and whether it is only a lower bound because runs were `censored` [n]."""
    median = float(np.median(steps))
    return median, bool(median != np.median(np.where(censored, np.inf, steps)))


def panel_width(num_groups: int, width: float = PANEL_WIDTH) -> float:
    """Width in inches of a panel with `num_groups` lines: `width`, and room for a legend beside the axes."""
    return width + LEGEND_WIDTH * (num_groups > GROUPS_BELOW)


def draw_curves(axes: Axes, groups: dict[str, list[Run]], column: str) -> None:
    """Draw one line per group of runs, the reward threshold, and a legend outside the axes."""
    for group, runs in groups.items():
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        values = np.stack([run.at(steps, column) for run in runs])
        # Leave out steps at which some runs have no value: the line would jump when the set of runs changes.
        steps, values = steps[~np.isnan(values).any(0)], values[:, ~np.isnan(values).any(0)]
        label = f"{group} (seed {runs[0].seed})" if len(runs) == 1 else f"{group} (IQM of {len(runs)} seeds)"
        (line,) = axes.plot(steps, interquartile_mean(values), label=label, marker="." if len(steps) < 3 else "")
        if len(runs) > 1:
            axes.fill_between(steps, *bootstrap_interval(values), color=line.get_color(), alpha=0.2, linewidth=0)
    first = next(iter(groups.values()))[0]
    if first.threshold is not None and column == first.column:
        axes.axhline(first.threshold, color="grey", linestyle="--", linewidth=1, label=f"threshold {first.threshold:g}")
    axes.locator_params(axis="x", nbins=6)
    if len(groups) > GROUPS_BELOW:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    else:
        # the padding, in font sizes, leaves room for the tick labels and the label of the x axis
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=4, ncols=2, frameon=False)


def plot_runs(run_dirs: list[Path], out: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> None:
    """Draw the learning curves of runs into the PNG `out`."""
    by_env: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run_dir in run_dirs:
        run = read_run(run_dir, columns, by)
        by_env[run.env][run.group].append(run)
    panels = [(env, column) for env in by_env for column in columns]
    width = panel_width(max(map(len, by_env.values())))
    figure = Figure(figsize=(width * len(panels), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (env, column) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_curves(axes, by_env[env], column)
        axes.set(title=env, xlabel="environment steps", ylabel=LABELS.get(column, column))
    figure.savefig(out, dpi=120)


def format_solved(run_dirs: list[Path], least: float, column: str = RETURN, by: Sequence[str] = SAMPLER) -> str:
    """A table with one line per environment and group: median steps to solved, and the steps of each seed.

    A run is solved at the first of IN_A_ROW consecutive evaluations with values >= `least`. Of a run that did not get
    there, the table has the length, marked "≥".
    """
    found: dict[tuple[str, str], dict[int, tuple[int, bool]]] = defaultdict(dict)
    for run_dir in run_dirs:
        run = read_run(run_dir, [column], by)
        solved = steps_to_reach(run.steps.tolist(), run.values[column].tolist(), least, IN_A_ROW)
        found[run.env, run.group][run.seed] = (int(run.steps[-1]), True) if solved is None else (solved, False)
    width = 2 + max(len("sampler"), *(len(group) for _, group in found))
    heading = "sampler" if tuple(by) == SAMPLER else "runs"

    def text(steps: float, censored: bool) -> str:
        return f"{'≥' * censored}{steps:.0f}"

    lines = [f"{'environment':<16}{heading:<{width}}{'median steps':>12}  by seed"]
    for (env, group), runs in sorted(found.items()):
        steps, censored = np.array([runs[seed] for seed in sorted(runs)]).T
        each = " ".join(text(*runs[seed]) for seed in sorted(runs))
        median = text(*median_with_bound(steps, censored == 1))
        lines.append(f"{env:<16}{group:<{width}}{median:>12}  {each}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare runs: IQM over seeds with a 95 % bootstrap band.")
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs; or study=<name or directory>")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="PNG to write [comparison.png]")
    parser.add_argument("--columns", nargs="+", default=[RETURN], help=f"columns of {PROGRESS} [{RETURN}]")
    parser.add_argument(
        "--by", nargs="+", default=SAMPLER, metavar="KEY", help="configuration keys; one line per value [sampler]"
    )
    parser.add_argument(
        "--solved",
        type=float,
        metavar="VALUE",
        help="print the env steps until runs solve the task: three evaluations >= VALUE",
    )
    arguments = parser.parse_args()
    first, *others = map(str, arguments.runs)
    try:
        if first.startswith("study=") and not others:
            from recipes.common.report import report, study_directory

            print(report(study_directory(first.removeprefix("study="))))
            return
        plot_runs(arguments.runs, arguments.out, arguments.columns, arguments.by)
        if arguments.solved is not None:
            print(format_solved(arguments.runs, arguments.solved, arguments.columns[-1], arguments.by))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_CONFIG)
    print(arguments.out)


if __name__ == "__main__":
    main()
