"""Plots learning curves of runs: the interquartile mean (IQM) over seeds with a 95 % bootstrap band.

    python -m recipes.plot runs/dqn/cartpole/reaper/* runs/dqn/cartpole/per/* --out cartpole
    python -m recipes.plot runs/dqn/threerooms/*/* --columns q_sum return_mean --solved -8.8 --out threerooms
    python -m recipes.plot runs/acer/cartpole/*/* --by acer.trust_region acer.replay_ratio --columns training_return
    python -m recipes.plot --read recipes/results/threerooms.csv --columns q_sum return_mean --smooth 5
    python -m recipes.plot --read runs/study/sset_obstacles/curves.csv --by variant --columns q_mean return_shifted
    python -m recipes.plot study=reaper
    python -m recipes.plot study=sset --baseline sset

There is one panel per environment and column, and one line per sampler, or per value of the configuration keys in
`--by`. A run that stopped because it reached the reward threshold counts with its last return at later steps. A run
that ended otherwise ends the line of its group. `--smooth` averages each run over that many evaluations. `--solved`
prints the steps until a run solved its task: the first of three consecutive evaluations whose value in the last column
is at least the given value. For a run that did not solve its task it prints "≥" and the length of the run.

`--read` takes the evaluations of many runs from one CSV with the columns env, seed, env_steps, those of `--by`
(default: sampler) and those of `--columns`.

For a study (study=<name or directory>, see recipes.study), it prints the table, one sentence per variant, and writes
table and figure into the directory of the study. `--baseline` prints the comparison with another variant and writes no
files.

Each figure is written as PNG and as SVG.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from omegaconf import MISSING, OmegaConf

from recipes.common.cli import BAD_CONFIG, CONFIG, ConfigError
from recipes.common.curves import RETURN, Run, curve_entries, curve_note, draw_curves
from recipes.common.figures import (
    PANEL_HEIGHT,
    count_steps,
    env_label,
    explain,
    files_of,
    looks,
    new_figure,
    save,
    styled,
    threshold_line,
)
from recipes.common.intervals import median_with_bound
from recipes.common.progress import PROGRESS, read_progress, steps_to_reach, was_stopped

IN_A_ROW = 3
SAMPLER = ("sampler.name",)
_NAMED = (*SAMPLER, "variant")  # keys whose values name a group of runs without the key
KEYS = ("env", "seed", "env_steps")  # columns that a CSV for --read must have


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
    values = {key: OmegaConf.select(config, key, default=MISSING) for key in by}
    if missing := [key for key, value in values.items() if value == MISSING]:
        raise ConfigError(f"{run_dir}: {CONFIG} has no {', '.join(missing)}")
    return Run(
        env=config.env.name,
        group=group_name(values),
        seed=config.seed,
        threshold=config.env.reward_threshold,
        steps=np.array([int(row["env_steps"]) for row in rows]),
        values={column: np.array([float(row[column]) for row in rows]) for column in {RETURN, *columns}},
        stopped=was_stopped(config, rows),
    )


def read_table(path: Path, columns: Sequence[str] = (RETURN,), by: Sequence[str] = SAMPLER) -> list[Run]:
    """Read the evaluations of many runs from a CSV; it has no thresholds.

    Args:
        path: a CSV with a row per evaluation.
        columns: columns of values to read. Default: the mean return.
        by: columns that name the group of a run. Default: the sampler.

    Raises:
        ConfigError: if the file has no rows or lacks a column.
    """
    names = [name.removesuffix(".name") for name in by]
    rows = read_progress(path)
    if not rows:
        raise ConfigError(f"{path}: no rows")
    if missing := [name for name in (*KEYS, *names, *columns) if name not in rows[0]]:
        raise ConfigError(f"{path}: no column {', '.join(missing)}, only {', '.join(rows[0])}")
    curves: dict[tuple[str, str, int], list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        group = group_name({key: row[name] for key, name in zip(by, names, strict=True)})
        curves[row["env"], group, int(row["seed"])].append(row)
    return [
        Run(
            env=env,
            group=group,
            seed=seed,
            threshold=None,
            steps=np.array([int(row["env_steps"]) for row in curve]),
            values={column: np.array([float(row[column]) for row in curve]) for column in columns},
        )
        for (env, group, seed), curve in curves.items()
    ]


def group_name(values: Mapping[str, object]) -> str:
    """The name of the runs with these values of the keys in `--by`."""
    texts = {key: "null" if value is None else str(value) for key, value in values.items()}
    names = [text if key in _NAMED else f"{key.split('.')[-1]} {text}" for key, text in texts.items()]
    return ", ".join(names)


@styled
def draw_runs(runs: Sequence[Run], columns: Sequence[str] = (RETURN,), window: int = 1) -> Figure:
    """Draw a panel per environment and column.

    Args:
        runs: at least one run.
        columns: the values to draw. Default: the mean return.
        window: evaluations of a run that are averaged. Default: 1.
    """
    by_env: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_env[run.env][run.group].append(run)
    panels = [(env, column) for env in by_env for column in columns]
    width = len(columns) if 1 < len(columns) <= 3 else min(2, len(panels))
    height = -(-len(panels) // width)
    figure = new_figure(0.8 + height * (PANEL_HEIGHT if width > 1 else 3.4))
    chosen = looks(dict.fromkeys(run.group for run in runs))
    entries: dict = curve_entries(chosen, chosen)
    for axes, panel in zip(figure.subplots(height, width, squeeze=False).flat, panels, strict=False):
        env, column = panel
        draw_curves(axes, by_env[env], column, chosen, window)
        axes.set_xlabel(count_steps(axes.xaxis, max(run.steps[-1] for group in by_env[env].values() for run in group)))
        if len(by_env) > 1:
            axes.set_title(env_label(env))
        first = next(iter(by_env[env].values()))[0]
        if first.threshold is not None and column == first.column:
            threshold_line(axes, first.threshold, entries, len(by_env) > 1)
    if len(by_env) == 1:
        figure.suptitle(env_label(panels[0][0]))
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    explain(figure, entries, curve_note([group for groups in by_env.values() for group in groups.values()], window))
    return figure


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader of the figure should know of its lines: early ends, and runs with the same seed."""
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.env, run.group].append(run)
    found = []
    for (env, group), members in groups.items():
        ends = [int(run.steps[-1]) for run in members]
        # see draw_curves: a line ends with the first of its runs that did not reach the threshold
        unsolved = [end for run, end in zip(members, ends, strict=True) if not run.stopped]
        if unsolved and min(unsolved) < max(ends):
            found.append(
                f"{env}, {group}: the line ends at step {min(unsolved)}, the end of its shortest run; the longest has "
                f"{max(ends)}"
            )
        repeated = sorted(seed for seed, count in Counter(run.seed for run in members).items() if count > 1)
        if repeated:
            seeds = ", ".join(map(str, repeated))
            found.append(f"{env}, {group}: several runs have seed {seeds}; they count as runs of different seeds")
    return found


def plot_runs(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw the mean returns of runs into the PNG or SVG `out`."""
    save(draw_runs([read_run(run_dir) for run_dir in run_dirs]), out)


def format_solved(runs: Sequence[Run], least: float, column: str = RETURN, heading: str = "sampler") -> str:
    """A table with one line per environment and group: median steps to solved, and the steps of each run, by seed.

    A run is solved at the first of IN_A_ROW consecutive evaluations with values >= `least`, or where it was stopped at
    its threshold with such a value. Of a run that did not get there, the table has the length, marked "≥".
    """
    found: dict[tuple[str, str], list[tuple[int, bool]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.seed):
        values = run.values[column].tolist()
        solved = steps_to_reach(run.steps.tolist(), values, least, IN_A_ROW, stopped=run.stopped)
        found[run.env, run.group].append((int(run.steps[-1]), True) if solved is None else (solved, False))
    width = 2 + max(len(heading), *(len(group) for _, group in found))

    def text(steps: float, censored: bool) -> str:
        return f"{'≥' * censored}{steps:.0f}"

    lines = [f"{'environment':<16}{heading:<{width}}{'median steps':>12}  by seed"]
    for (env, group), each_run in sorted(found.items()):
        steps, censored = np.array(each_run).T
        each = " ".join(text(*run) for run in each_run)
        median = text(*median_with_bound(steps, censored == 1))
        lines.append(f"{env:<16}{group:<{width}}{median:>12}  {each}")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare runs: IQM over seeds with a 95 % bootstrap band.")
    parser.add_argument("runs", nargs="*", type=Path, help="directories of runs; or study=<name or directory>")
    parser.add_argument("--read", type=Path, metavar="CSV", help="a CSV with the evaluations of many runs")
    parser.add_argument(
        "--out", type=Path, default=Path("comparison"), help="figure to write, as .png and .svg [comparison]"
    )
    parser.add_argument("--columns", nargs="+", default=[RETURN], help=f"columns of {PROGRESS} [{RETURN}]")
    parser.add_argument(
        "--by", nargs="+", default=SAMPLER, metavar="KEY", help="configuration keys; one line per value [sampler]"
    )
    parser.add_argument("--smooth", type=int, default=1, metavar="N", help="average each run over N evaluations [1]")
    parser.add_argument(
        "--solved",
        type=float,
        metavar="VALUE",
        help="print the env steps until runs solve the task: three evaluations >= VALUE",
    )
    parser.add_argument("--baseline", metavar="VARIANT", help="print a study's comparison with this variant instead")
    arguments = parser.parse_args()
    if bool(arguments.runs) == (arguments.read is not None):
        parser.error("pass directories of runs, or study=<name or directory>, or --read CSV")
    if arguments.smooth < 1:
        parser.error(f"--smooth {arguments.smooth}: must be at least 1")
    columns, by = arguments.columns, arguments.by
    studies = [path for path in map(str, arguments.runs) if path.startswith("study=")]
    try:
        if studies:
            others = [name for name in vars(arguments) if name not in ("runs", "baseline")]
            ignored = [f"--{name}" for name in others if getattr(arguments, name) != parser.get_default(name)]
            if ignored or len(arguments.runs) > 1:
                what = f"without {', '.join(ignored)}" if ignored else "one study at a time, without other runs"
                raise ConfigError(
                    f"{studies[0]}: {what}; a study's table and figure go to its directory. For other figures of its "
                    f"runs pass --read <directory of the study>/curves.csv --by variant"
                )
            from recipes.common.report import compare_with, report, study_directory

            out = study_directory(studies[0].removeprefix("study="))
            print(compare_with(out, arguments.baseline) if arguments.baseline else report(out))
            return
        if arguments.baseline:
            raise ConfigError("--baseline: only for a study, study=<name or directory>")
        files = files_of(arguments.out)
        if arguments.read is not None:
            runs = read_table(arguments.read, columns, by)
        else:
            runs = [read_run(run_dir, columns, by) for run_dir in arguments.runs]
        for remark in remarks(runs):
            sys.stderr.write(f"{remark}\n")
        save(draw_runs(runs, columns, arguments.smooth), *files)
        if arguments.solved is not None:
            heading = "sampler" if tuple(by) == SAMPLER else "runs"
            print(format_solved(runs, arguments.solved, columns[-1], heading))
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_CONFIG)
    print(*files)


if __name__ == "__main__":
    main()
