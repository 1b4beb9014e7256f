"""Learning curves of runs: the interquartile mean over seeds, with a 95 % bootstrap band.

    python -m recipes.plot runs/dqn/cartpole/reaper/* runs/dqn/cartpole/per/* --out cartpole.png
    python -m recipes.plot runs/dqn/threerooms/*/* --columns q_sum return_mean --solved -8.8 --out threerooms.png
    python -m recipes.plot runs/acer/cartpole/*/* --by acer.trust_region acer.replay_ratio --columns training_return
    python -m recipes.plot study=reaper

Runs are grouped by environment (a panel each for every column of progress.csv) and sampler (a line each), or by what
`--by` names in their configuration. A run that stopped because it had reached the reward threshold keeps its last
return from there on; one that is unfinished leaves the average where it ends. `--solved` prints after how many steps
runs have solved their task: at the first of three evaluations in a row with at least that value of the last column.

Of a study (recipes.study; its name, or its directory), it prints the table and writes it and the figure into its
directory.
"""

import argparse
import math
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
from scipy.stats import trim_mean

from recipes.progress import PROGRESS, read_progress, steps_to_reach
from recipes.run import BAD_CONFIG, CONFIG, ConfigError

RESAMPLES = 1000
RETURN = "return_mean"
IN_A_ROW = 3
SAMPLER = ("sampler.name",)
LABELS = {
    RETURN: "return (mean of an evaluation)",
    "training_return": "return (mean of the last 100 episodes of training)",
    "q_sum": "Q-values, summed",
    "q_error": "error of Q (RMS)",
}


@dataclass
class Run:
    """One run's evaluations."""

    env: str
    group: str
    seed: int
    threshold: float | None
    steps: np.ndarray
    values: dict[str, np.ndarray]
    column: str = RETURN

    @property
    def solved(self) -> bool:
        """Whether its last evaluation reached the threshold."""
        return self.threshold is not None and bool(self.values[self.column][-1] >= self.threshold)

    def at(self, steps: np.ndarray, column: str) -> np.ndarray:
        """The latest value at each of `steps`; NaN before the first evaluation and after the end of the run."""
        latest = np.searchsorted(self.steps, steps, side="right") - 1
        values = np.where(latest >= 0, self.values[column][latest], np.nan)
        return values if self.solved else np.where(steps > self.steps[-1], np.nan, values)


def read_run(run_dir: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> Run:
    """Reads a run's directory.

    Raises:
        ConfigError: it holds no evaluations, or not these columns, or its configuration has no such keys.
    """
    for name in (CONFIG, PROGRESS):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir}: no {name} there; pass the directory of a run that keeps one (logger=csv)")
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


# Maps values [n, ...] to a number, or to one for each column.
Statistic = Callable[[np.ndarray], np.ndarray | np.floating]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; with fewer than 4 runs, the mean."""
    return trim_mean(values, 0.25, axis=0)


def bootstrap_interval(values: np.ndarray, statistic: Statistic = interquartile_mean) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile bootstrap interval of a statistic over runs [n, ...], which are resampled whole."""
    rng = np.random.default_rng(0)
    found = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, [0.025, 0.975], axis=0)
    return low, high


def draw_curves(axes: Axes, groups: dict[str, list[Run]], column: str) -> None:
    """Draws a line for each group of runs, and the threshold of their returns."""
    for group, runs in groups.items():
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        values = np.stack([run.at(steps, column) for run in runs])
        # Where only some runs have a value, the line would jump from one set of runs to another: leave it out.
        steps, values = steps[~np.isnan(values).any(0)], values[:, ~np.isnan(values).any(0)]
        label = f"{group} (seed {runs[0].seed})" if len(runs) == 1 else f"{group} (IQM of {len(runs)} seeds)"
        (line,) = axes.plot(steps, interquartile_mean(values), label=label, marker="." if len(steps) < 3 else "")
        if len(runs) > 1:
            axes.fill_between(steps, *bootstrap_interval(values), color=line.get_color(), alpha=0.2, linewidth=0)
    first = next(iter(groups.values()))[0]
    if first.threshold is not None and column == first.column:
        axes.axhline(first.threshold, color="grey", linestyle="--", linewidth=1, label=f"threshold {first.threshold:g}")
    axes.legend()


def plot_runs(run_dirs: list[Path], out: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> None:
    """Draws the runs' learning curves into a PNG."""
    by_env: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run_dir in run_dirs:
        run = read_run(run_dir, columns, by)
        by_env[run.env][run.group].append(run)
    panels = [(env, column) for env in by_env for column in columns]
    figure = Figure(figsize=(6.4 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (env, column) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw_curves(axes, by_env[env], column)
        axes.set(title=env, xlabel="environment steps", ylabel=LABELS.get(column, column))
    figure.savefig(out, dpi=120)


def steps_to_solved(run: Run, least: float, column: str = RETURN) -> float:
    """Steps at the first of IN_A_ROW evaluations in a row with a value of at least `least`; inf if there are none."""
    steps = steps_to_reach(run.steps.tolist(), run.values[column].tolist(), least, IN_A_ROW)
    return math.inf if steps is None else float(steps)


def format_solved(run_dirs: list[Path], least: float, column: str = RETURN, by: Sequence[str] = SAMPLER) -> str:
    """A line for each environment and group: the median of the steps to solved, and those of each seed."""
    found: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for run_dir in run_dirs:
        run = read_run(run_dir, [column], by)
        found[run.env, run.group][run.seed] = steps_to_solved(run, least, column)
    width = 2 + max(len("sampler"), *(len(group) for _, group in found))
    heading = "sampler" if tuple(by) == SAMPLER else "runs"
    lines = [f"{'environment':<16}{heading:<{width}}{'median steps':>12}  by seed"]
    for (env, group), steps in sorted(found.items()):
        each = " ".join(f"{steps[seed]:.0f}" for seed in sorted(steps))
        lines.append(f"{env:<16}{group:<{width}}{np.median(list(steps.values())):>12.0f}  {each}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare runs: IQM over seeds with a 95 % bootstrap band.")
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs; or study=<name or directory>")
    parser.add_argument("--out", type=Path, default=Path("comparison.png"), help="PNG to write [comparison.png]")
    parser.add_argument("--columns", nargs="+", default=[RETURN], help=f"columns of {PROGRESS} [{RETURN}]")
    parser.add_argument("--by", nargs="+", default=SAMPLER, metavar="KEY", help="what tells the lines apart [sampler]")
    parser.add_argument("--solved", type=float, metavar="VALUE", help="print the steps until this value is kept up")
    arguments = parser.parse_args()
    first, *others = map(str, arguments.runs)
    try:
        if first.startswith("study=") and not others:
            from recipes.report import report, study_directory

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
