"""Plots learning curves of runs: the mean over seeds with its 95 % interval.

    python -m recipes.plot runs/dqn/cartpole/reaper/* runs/dqn/cartpole/per/* --out cartpole
    python -m recipes.plot runs/dqn/threerooms/*/* --columns q_sum return_mean --out threerooms
    python -m recipes.plot runs/acer/cartpole/*/* --by acer.trust_region acer.replay_ratio --columns training_return
    python -m recipes.plot --read runs/study/sset/curves.csv --by variant --columns q_sum return_mean --smooth 5
    python -m recipes.plot study=reaper
    python -m recipes.plot study=sset --baseline sset
    python -m recipes.plot study=sset study=sset_more study=adaptive_threerooms --out threerooms

There is one panel per environment and column, and one line per sampler, or per value of the configuration keys in
`--by`. A run that stopped because it reached the reward threshold counts with its last return at later steps. A run
that ended otherwise ends the line of its group. `--smooth` averages each run over that many evaluations.

`--read` takes the evaluations of many runs from one CSV with the columns env, seed, env_steps, those of `--by`
(default: sampler) and those of `--columns`.

For a study (study=<name or directory>, see recipes.study), it prints the table, one sentence per variant, and writes
table and figure into the directory of the study. `--baseline` prints the comparison with another variant and writes no
files. Several studies are pooled: the variants that all of them have are compared by all their runs, where runs with
the same seed count as one.

Each figure is written as PNG and as SVG.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from recipes.common.checked import positive
from recipes.common.cli import BAD_CONFIG
from recipes.common.errors import ConfigError
from recipes.common.files import PROGRESS
from recipes.studies.curves import RETURN, SAMPLER, draw_runs, read_run, read_table
from recipes.studies.figures import files_of, save
from recipes.studies.report import report, report_pooled, study_directory


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
    add("--baseline", metavar="VARIANT", help="print a study's comparison with this variant instead")
    arguments = parser.parse_args()
    if bool(arguments.runs) == (arguments.read is not None):
        parser.error("pass directories of runs, or study=<name or directory>, or --read CSV")
    columns, by = arguments.columns, arguments.by
    studies = [path for path in map(str, arguments.runs) if path.startswith("study=")]
    try:
        if studies:
            options = ("columns", "by", "smooth", "baseline" if len(studies) > 1 else "out")
            ignored = any(getattr(arguments, name) != parser.get_default(name) for name in options)
            if ignored or len(studies) < len(arguments.runs):
                text = "a study has no option but --baseline, several together have --out alone"
                raise ConfigError(f"{studies[0]}: {text}. Other figures: --read <directory>/curves.csv --by variant")
            outs = [study_directory(name.removeprefix("study=")) for name in studies]
            print(report_pooled(outs, arguments.out) if len(outs) > 1 else report(outs[0], arguments.baseline))
            return
        if arguments.baseline:
            raise ConfigError("--baseline: only for a study, study=<name or directory>")
        files = files_of(arguments.out)
        if arguments.read is not None:
            runs = read_table(arguments.read, columns, by)
        else:
            runs = [read_run(path, columns, by) for path in arguments.runs]
            (run, count), *_ = Counter((run.env, run.group, run.seed) for run in runs).most_common(1)
            if count > 1:
                env, group, seed = run
                text = "runs of this seed would count as so many; pass one, or --by the key in which they differ"
                raise ConfigError(f"{env} {group} seed {seed}: {count} {text}")
        save(draw_runs(runs, columns, arguments.smooth), *files)
    except (ConfigError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
        sys.stderr.write(f"{text}\n")
        sys.exit(BAD_CONFIG)
    print(*files)
