"""Many runs of a recipe, side by side: variants, environments and seeds, as a study in conf/study/ lists them.

    python -m recipes.study study=reaper
    python -m recipes.study study=reaper seeds=3 workers=2 out=runs/study/quick
    python -m recipes.plot study=reaper

Runs are processes of their own, as many at a time as there are cores, first all variants of one seed, then those of the
next. Each leaves its directory in <out>/runs, and when it has finished a row in <out>/runs.csv and its evaluations in
<out>/curves.csv; <out>/study.yaml says what was studied. The same command goes on with a study that was interrupted:
what has a row is not run again, and what has a checkpoint is resumed. Seeds are not batched into one process:
torch.vmap updates the networks of ten seeds in .35 of the time, but on CartPole these updates are a tenth of a run.

runs.csv has a row per run: recipe, env, variant, seed; env_steps and updates it took; threshold, and reached, the steps
after which it reached that (empty: it did not); last, best and final, its last evaluation, its best one, and the mean
of the last tenth of them; wall_time in seconds; commit and torch, the code that ran; command, which repeats it.
"""

if __name__ == "__main__":
    # Ahead of the imports below, which take seconds: a mistake on the command line is reported at once.
    from recipes.run import run_recipe

    run_recipe("study", "run_study")

import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from recipes.progress import PROGRESS, append_rows, read_progress, rewrite, steps_to_reach
from recipes.run import CHECKPOINT, CONFIG, DONE, FAILED, INTERRUPTED, ConfigError, parse_config
from recipes.schemas.study import Config, StudyConfig

RUNS, CURVES, STUDY = "runs.csv", "curves.csv", "study.yaml"
# of a run, in runs.csv and curves.csv
KEYS = ("recipe", "env", "variant", "seed")


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
        """What tells it from other runs, as in the columns KEYS."""
        return self.recipe, self.env, self.variant, str(self.seed)

    @property
    def command(self) -> list[str]:
        """The command line behind the interpreter."""
        return ["-m", f"recipes.{self.recipe}", f"env={self.env}", *self.words, f"seed={self.seed}"]


def jobs_of(study: StudyConfig, seeds: int | None = None) -> list[Job]:
    """All runs of a study, in the order in which they are run."""
    return [
        Job(study.recipe, env, variant, study.first_seed + number, (*study.fixed, *words))
        for number in range(seeds or study.seeds)
        for env in study.envs
        for variant, words in study.variants.items()
    ]


def override(key: str, path: Path) -> str:
    """A word of the command line that sets `key` to a path, whatever that holds."""
    return f"{key}={QuotedString(str(path), Quote.single).with_quotes()}"


class Pool:
    """Processes that run jobs, each in a directory of its own."""

    def __init__(self, out: Path, study: StudyConfig, version: str):
        self._out, self._study, self._version = out, study, version
        self._running: set[subprocess.Popen] = set()
        self.stopped = False

    def directory(self, job: Job) -> Path:
        """Where the run is."""
        return self._out / "runs" / job.env.replace("/", "_") / job.variant / f"seed{job.seed}"

    def run(self, job: Job) -> dict[str, Any] | None:
        """Runs a job, or goes on with it, and gives its row; None if it was stopped or failed."""
        if self.stopped:
            return None
        run_dir = self.directory(job)
        words = [*job.command, override("hydra.run.dir", run_dir)]
        if (run_dir / CHECKPOINT).is_file() and (run_dir / CONFIG).is_file():
            words = [*job.command[:2], override("resume", run_dir)]
        elif run_dir.exists():
            shutil.rmtree(run_dir)
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        # One thread each: there is a run for every core.
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
        return self.row(job)

    def row(self, job: Job) -> dict[str, Any]:
        """The row of a run that has finished."""
        run_dir, study = self.directory(job), self._study
        evaluations = read_progress(run_dir / PROGRESS)
        steps = [int(row["env_steps"]) for row in evaluations]
        values = [float(row[study.column]) for row in evaluations]
        threshold = study.least
        if threshold is None:
            threshold = OmegaConf.load(run_dir / CONFIG).env.reward_threshold
        at = None if threshold is None else steps_to_reach(steps, values, threshold, study.in_a_row)
        return dict(zip(KEYS, job.key, strict=True)) | {
            "env_steps": steps[-1],
            "updates": evaluations[-1]["updates"],
            "threshold": "" if threshold is None else threshold,
            "reached": "" if at is None else at,
            "last": values[-1],
            "best": max((value for value in values if not math.isnan(value)), default=math.nan),
            "final": statistics.fmean(values[-math.ceil(len(values) / 10) :]),
            "wall_time": round(float(evaluations[-1]["wall_time"]), 1),
            "commit": self._version,
            "torch": torch.__version__,
            "command": shlex.join(["python", *job.command]),
        }

    def curve(self, job: Job) -> list[dict[str, str]]:
        """The evaluations of a run."""
        column = self._study.column
        rows = read_progress(self.directory(job) / PROGRESS)
        key = dict(zip(KEYS, job.key, strict=True))
        return [{**key, "env_steps": row["env_steps"], column: row[column]} for row in rows]

    def stop(self) -> None:
        """Asks all processes to end where their state is whole."""
        self.stopped = True
        for process in list(self._running):
            process.send_signal(signal.SIGINT)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV; none if there is no file."""
    return read_progress(path) if path.is_file() else []


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """What tells the run of a row of runs.csv or curves.csv from others, as Job.key."""
    return tuple(row[name] for name in KEYS)


def load_completed_runs(out: Path) -> set[tuple[str, ...]]:
    """The runs that have a row. What a killed study left half-written, a row or a curve without its row, is removed."""
    for path in (out / RUNS, out / CURVES):
        if path.is_file():
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    done = {key_of(row) for row in read_rows(out / RUNS)}
    curves = read_rows(out / CURVES)
    whole = [row for row in curves if key_of(row) in done]
    if len(whole) < len(curves):
        rewrite(out / CURVES, whole)
    return done


def code_version() -> str:
    """The commit of this checkout, with a + if it was changed since; "unknown" where git does not know."""
    root = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * bool(changes)


@contextmanager
def stopping(pool: Pool) -> Iterator[None]:
    """Ctrl-C and SIGTERM stop the pool."""
    previous = {number: signal.signal(number, lambda *_: pool.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_study(config: DictConfig, out: Path) -> int:
    """Runs what is missing of a study.

    Returns:
        The exit code: 0, 1 if runs failed, 130 if it was interrupted.
    """
    cfg = parse_config(config, Config)
    study = cfg.study
    recorded = OmegaConf.structured(study)
    if (out / STUDY).is_file():
        before = OmegaConf.load(out / STUDY)
        # more seeds are more of the same
        if not isinstance(before, DictConfig) or {**before, "seeds": None} != {**recorded, "seeds": None}:
            raise ConfigError(f"{out} holds another study; choose another directory (out=...)")
    OmegaConf.save(recorded, out / STUDY)
    done = load_completed_runs(out)
    jobs = jobs_of(study, cfg.seeds)
    missing = [job for job in jobs if job.key not in done]
    pool = Pool(out, study, code_version())
    failed = 0
    workers = cfg.workers or len(os.sched_getaffinity(0))
    bar = tqdm(total=len(jobs), initial=len(jobs) - len(missing), desc=study.name, unit="run")
    with stopping(pool), bar, ThreadPoolExecutor(workers) as threads:
        futures = {threads.submit(pool.run, job): job for job in missing}
        for future in as_completed(futures):
            job, row = futures[future], future.result()
            if row is not None:
                # the curve first: what has a row is whole
                append_rows(out / CURVES, pool.curve(job))
                append_rows(out / RUNS, [row])
                bar.update()
            elif not pool.stopped:
                failed += 1
                log = pool.directory(job).with_suffix(".log")
                bar.write(f"failed: {shlex.join(['python', *job.command])} (see {log})", file=sys.stderr)
    if pool.stopped:
        print(f"interrupted; the same command goes on with {out}")
        return INTERRUPTED
    print(f"{len(jobs) - failed} runs in {out / RUNS}; python -m recipes.plot study={out} shows them")
    return FAILED if failed else DONE
