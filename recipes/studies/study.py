"""Runs a study: many runs of a recipe with the variants, environments and seeds listed in conf/study/<study>.yaml.

    python -m recipes.study study=reaper
    python -m recipes.study study=reaper seeds=3 workers=2 out=runs/study/quick
    python -m recipes.plot study=reaper

Each run is a separate process; by default, as many run in parallel as there are CPU cores. All variants of one seed run
before the next seed starts. A run writes its directory to <out>/runs. When it has finished, it adds a row to
<out>/runs.csv and its evaluations to <out>/curves.csv. <out>/study.yaml holds the configuration of the study. To
continue an interrupted study, repeat the command: runs with a row are skipped and runs with a checkpoint are resumed.
A finished study may grow: repeat the command with more seeds, environments or variants.
Seeds are not batched into one process: torch.vmap updates the networks of ten seeds in 0.35 of the time, but on
CartPole these updates take a tenth of a run.

At the end, also after Ctrl-C, the study writes <out>/table.md, <out>/figure.png and <out>/figure.svg of the runs that
have finished. It prints the table and one sentence per variant. recipes.plot repeats this at any time.

runs.csv has one row per run, with the columns

    recipe, env, variant, seed
    env_steps, updates     total numbers
    threshold, reached     value to reach, and env steps after which the run reached it (empty: not reached);
                           evaluations before the first update do not count
    last, best, final      last evaluation, best evaluation, and mean of the last tenth of the evaluations
    wall_time, cpu_time    seconds, and CPU seconds of the process
    commit, torch          version of the code and of torch
    command                command that repeats the run

curves.csv has one row per evaluation: recipe, env, variant, seed, env_steps, cpu_time, the column that decides whether
a run has reached the threshold, and the columns in study.also. To plot these: recipes.plot --read <out>/curves.csv
--by variant --columns ...
"""

import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from recipes.common import files
from recipes.common.cli import DONE, FAILED, INTERRUPTED, interruption
from recipes.common.errors import ConfigError
from recipes.common.schemas import StudyConfig, StudyRun
from recipes.studies.report import report

Row = dict[str, Any]
# settings of a study that decide how its runs are judged, and which columns are kept
JUDGED_BY = ("column", "also", "least", "in_a_row")


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    recipe: str
    env: str
    variant: str
    seed: int
    words: tuple[str, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """The values of the columns files.KEYS, which identify the run."""
        return self.recipe, self.env, self.variant, str(self.seed)

    @property
    def command(self) -> list[str]:
        """The command-line arguments of the Python interpreter."""
        return ["-m", f"recipes.{self.recipe}", f"env={self.env}", *self.words, f"seed={self.seed}"]


def jobs_of(study: StudyConfig, seeds: int | None = None) -> list[Job]:
    """All runs of a study in order; `seeds` overrides the number of seeds of the study."""
    return [
        Job(study.recipe, env, variant, study.first_seed + number, (*study.fixed, *words))
        for number in range(seeds or study.seeds)
        for env in study.envs
        for variant, words in study.variants.items()
    ]


def override(key: str, path: Path) -> str:
    """A word of the command line that sets `key` to a path, with special characters quoted."""
    return f"{key}={QuotedString(str(path), Quote.single).with_quotes()}"


class Pool:
    """Runs jobs in processes, each in a separate directory."""

    def __init__(self, out: Path, study: StudyConfig, version: str):
        self._out, self._study, self._version = out, study, version
        self._running: set[subprocess.Popen] = set()
        self.stopped = False

    def directory(self, job: Job) -> Path:
        """The run directory of a job."""
        return self._out / "runs" / job.env.replace("/", "_") / job.variant / f"seed{job.seed}"

    def run(self, job: Job) -> tuple[Row, list[Row]] | None:
        """Run or resume a job; return its row of runs.csv and its rows of curves.csv, or None if it did not finish."""
        if self.stopped:
            return None
        run_dir = self.directory(job)
        words = [*job.command, override("hydra.run.dir", run_dir)]
        if (run_dir / files.CHECKPOINT).is_file() and (run_dir / files.CONFIG).is_file():
            words = [*job.command[:2], override("resume", run_dir)]
        elif run_dir.exists():
            with files.locked(run_dir):  # a killed study may have left its process behind
                shutil.rmtree(run_dir)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        # One thread per run: there is one run per core.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with run_dir.with_suffix(".log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words], env=os.environ | threads, stdout=log, stderr=log, start_new_session=True
            )
            self._running.add(process)
            if self.stopped:
                process.send_signal(signal.SIGINT)
            code = process.wait()
            self._running.discard(process)
        if code != DONE:
            return None
        run_dir.with_suffix(".log").unlink()
        return self.results(job)

    def results(self, job: Job) -> tuple[Row, list[Row]]:
        """The row of a finished run in runs.csv, and its rows in curves.csv."""
        study, evaluations = self._study, files.read_csv(self.directory(job) / files.PROGRESS)
        for name, columns in (("column", [study.column]), ("also", study.also)):
            if missing := ", ".join(column for column in columns if column not in evaluations[0]):
                text = f"{files.PROGRESS} has no column {missing}, only {', '.join(evaluations[0])}"
                raise ConfigError(f"study.{name}: {text}")
        key = dict(zip(files.KEYS, job.key, strict=True))
        curve = [
            {**key, "env_steps": row["env_steps"], "cpu_time": round(float(row["cpu_time"]), 1)}
            | {column: row[column] for column in (study.column, *study.also)}
            for row in evaluations
        ]
        values = [float(row[study.column]) for row in evaluations]
        config, last = files.load_config(self.directory(job) / files.CONFIG), evaluations[-1]
        threshold = config.env.reward_threshold if study.least is None else study.least
        stopped = files.was_stopped(config, evaluations)
        # evaluations before the first update judge the random initial network
        trained = [row for row in evaluations if int(row["updates"])]
        of_trained = [int(row["env_steps"]) for row in trained], [float(row[study.column]) for row in trained]
        reached = files.steps_to_reach(*of_trained, threshold, study.in_a_row, stopped=stopped)
        of_run = key | {
            "env_steps": last["env_steps"],
            "updates": last["updates"],
            "threshold": "" if threshold is None else threshold,
            "reached": "" if reached is None else reached,
            "last": values[-1],
            "best": max((value for value in values if not math.isnan(value)), default=math.nan),
            "final": statistics.fmean(values[-math.ceil(len(values) / 10) :]),
            "wall_time": round(float(last["wall_time"]), 1),
            "cpu_time": round(float(last["cpu_time"]), 1),
            "commit": self._version,
            "torch": torch.__version__,
            "command": shlex.join(["python", *job.command]),
        }
        return of_run, curve

    def stop(self) -> None:
        """Ask all processes to save a checkpoint and exit."""
        self.stopped = True
        for process in list(self._running):
            process.send_signal(signal.SIGINT)


def load_completed_runs(out: Path) -> set[tuple[str, ...]]:
    """The keys of the runs in runs.csv. Removes curves without a row, left by a killed study."""
    done = {tuple(row[name] for name in files.KEYS) for row in files.read_rows(out / files.RUNS)}
    curves = files.read_rows(out / files.CURVES)
    whole = [row for row in curves if tuple(row[name] for name in files.KEYS) in done]
    if len(whole) < len(curves):
        files.rewrite(out / files.CURVES, whole)
    return done


def available_cores() -> int:
    """Number of CPU cores that this process may use; on systems that do not say so, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def continues(before: Any, now: StudyConfig, has_rows: bool) -> bool:
    """Whether a study can go on in the directory of an earlier one: it has all of its runs, and judges them as before.

    It may have further seeds, environments and variants, and its table may differ.

    Args:
        before: content of study.yaml.
        now: study to run.
        has_rows: whether runs have finished. While none has, they may be judged in another way.
    """
    try:
        # studies of an earlier version lack some settings
        before = OmegaConf.merge(OmegaConf.structured(StudyConfig), before)
        has_runs = set(jobs_of(before, 1)) <= set(jobs_of(now, 1))
    except (OmegaConfBaseException, TypeError):
        return False
    return has_runs and not (has_rows and any(before[key] != getattr(now, key) for key in JUDGED_BY))


def run_study(config: StudyRun, out: Path) -> int:
    """Run all runs of a study that have not finished.

    Returns:
        The exit code: 0; 1 if runs failed; 130 if the study was interrupted.
    """
    with files.locked(out):
        study, done = config.study, load_completed_runs(out)
        if (out / files.STUDY).is_file() and not continues(files.load_config(out / files.STUDY), study, bool(done)):
            raise ConfigError(f"{out} holds another study; choose another directory (out=...)")
        OmegaConf.save(OmegaConf.structured(study), out / files.STUDY)
        jobs = jobs_of(study, config.seeds)
        pool, failed = Pool(out, study, files.code_version()), 0
        missing = [job for job in jobs if job.key not in done]
        bar = tqdm(total=len(jobs), initial=len(jobs) - len(missing), desc=study.name, unit="run")
        with interruption(pool.stop), bar, ThreadPoolExecutor(config.workers or available_cores()) as threads:
            futures = {threads.submit(pool.run, job): job for job in missing}
            try:
                for future in as_completed(futures):
                    job, results = futures[future], future.result()
                    if results is not None:
                        row, curve = results
                        # the curve first, so that a run with a row is complete
                        files.append_rows(out / files.CURVES, curve)
                        files.append_rows(out / files.RUNS, [row])
                        bar.update()
                    elif not pool.stopped:
                        failed += 1
                        log = pool.directory(job).with_suffix(".log")
                        bar.write(f"failed: {shlex.join(['python', *job.command])} (see {log})", file=sys.stderr)
            except BaseException:
                pool.stop()
                raise
        show(out)
        if pool.stopped:
            print(f"interrupted; repeat the command to continue {out}")
            return INTERRUPTED
        return FAILED if failed else DONE


def show(out: Path) -> None:
    """Write table and figure of the runs that have finished, if any, and print the table and its conclusions."""
    if (out / files.RUNS).is_file():
        print(report(out))
