"""Plots learning curves of runs: the mean over seeds with its 95 % interval.

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
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.common.checked import positive
from recipes.common.cli import BAD_CONFIG
from recipes.common.errors import ConfigError
from recipes.common.files import PROGRESS, markdown, steps_to_reach
from recipes.studies.curves import RETURN, SAMPLER, Curve, draw_runs, median_with_bound, read_run, read_table
from recipes.studies.figures import files_of, save
from recipes.studies.report import report, study_directory

IN_A_ROW = 3


def format_solved(runs: Sequence[Curve], least: float, column: str = RETURN, heading: str = "sampler") -> str:
    """A table with one line per environment and group: median steps to solved, and the steps of each run, by seed.

    A run is solved at the first of IN_A_ROW consecutive evaluations with values >= `least`, or where it was stopped at
    its threshold with such a value. Of a run that did not get there, the table has the length, marked "≥".
    """
    found: dict[tuple[str, str], list[tuple[int, bool]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.seed):
        values = run.values[column].tolist()
        solved = steps_to_reach(run.steps.tolist(), values, least, IN_A_ROW, stopped=run.stopped)
        found[run.env, run.group].append((int(run.steps[-1]), True) if solved is None else (solved, False))

    def text(steps: float, censored: bool) -> str:
        return f"{'≥' * censored}{steps:.0f}"

    lines = []
    for (env, group), each_run in sorted(found.items()):
        steps, censored = np.array(each_run).T
        median = text(*median_with_bound(steps, censored == 1))
        lines.append((env, group, median, " ".join(text(*run) for run in each_run)))
    return markdown(("environment", heading, "median steps", "by seed"), lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Compare runs: mean over seeds with its 95 % interval.")
    add = parser.add_argument
    add("runs", nargs="*", type=Path, help="directories of runs; or study=<name or directory>")
    add("--read", type=Path, metavar="CSV", help="a CSV with the evaluations of many runs")
    add("--out", type=Path, default=Path("comparison"), help="figure to write, as .png and .svg [comparison]")
    add("--columns", nargs="+", default=[RETURN], help=f"columns of {PROGRESS} [{RETURN}]")
    add("--by", nargs="+", default=SAMPLER, metavar="KEY", help="configuration keys; one line per value [sampler]")
    add("--smooth", type=positive, default=1, metavar="N", help="average each run over N evaluations [1]")
    text = f"print the env steps until runs solve the task: {IN_A_ROW} evaluations >= VALUE"
    add("--solved", type=float, metavar="VALUE", help=text)
    add("--baseline", metavar="VARIANT", help="print a study's comparison with this variant instead")
    arguments = parser.parse_args()
    if bool(arguments.runs) == (arguments.read is not None):
        parser.error("pass directories of runs, or study=<name or directory>, or --read CSV")
    columns, by = arguments.columns, arguments.by
    studies = [path for path in map(str, arguments.runs) if path.startswith("study=")]
    try:
        if studies:
            options = ("out", "columns", "by", "smooth", "solved")
            ignored = any(getattr(arguments, name) != parser.get_default(name) for name in options)
            if ignored or len(arguments.runs) > 1:
                text = "one study at a time, and no option but --baseline; table and figure go to its directory"
                raise ConfigError(f"{studies[0]}: {text}. Other figures: --read <directory>/curves.csv --by variant")
            out = study_directory(studies[0].removeprefix("study="))
            print(report(out, arguments.baseline))
            return
        if arguments.baseline:
            raise ConfigError("--baseline: only for a study, study=<name or directory>")
        files = files_of(arguments.out)
        if arguments.read is not None:
            runs = read_table(arguments.read, columns, by)
        else:
            runs = [read_run(path, columns, by) for path in arguments.runs]
        save(draw_runs(runs, columns, arguments.smooth), *files)
        if arguments.solved is not None:
            heading = "sampler" if tuple(by) == SAMPLER else "runs"
            print(format_solved(runs, arguments.solved, columns[-1], heading))
    except (ConfigError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        sys.stderr.write(f"{text}\n")
        sys.exit(BAD_CONFIG)
    print(*files)
