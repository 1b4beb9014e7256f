"""Measures the CPU time to compile one step: write rows, sample a batch, update its priorities.

Each step is compiled in a process of its own with one compile thread, with an empty compiler cache ("cold") and again
with the cache of the first process ("warm"). The time is that of the first call, including the C++ compiler's.

This file is also the program of these processes: python -m recipes.benchmark.compile CONTENDER CAPACITY BATCH_SIZE.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from recipes.benchmark.buffers import CPU, Stream, make_buffer, td_errors, transitions
from recipes.benchmark.cycle import WRITTEN, make_step
from recipes.benchmark.results import LeftOutError, Row
from recipes.benchmark.timing import COMPILED, require_time

MEASUREMENT = "compile"
NAMES = ("uniform", "PER", "rank-based PER", "ReaPER", "event tables, pinned", "slices")
CACHES = ("cold", "warm")


def cpu_seconds() -> float:
    """CPU time of this process and of its finished children."""
    return sum(os.times()[:4])


def first_call(name: str, capacity: int, batch_size: int) -> float:
    """CPU time of the first call of a compiled step, in seconds. The buffer holds a few transitions only."""
    torch.set_num_threads(1)
    buffer = make_buffer(name, capacity, compilable=True)
    buffer.extend(transitions(min(capacity, 2000)))
    step = make_step(buffer, COMPILED, WRITTEN, batch_size)
    rows, td_error = Stream(CPU).take(WRITTEN), td_errors(batch_size)
    with torch.no_grad():
        start = cpu_seconds()
        step(rows, td_error)
        return cpu_seconds() - start


def measure_compile(names: Sequence[str], capacity: int, batch_size: int) -> tuple[list[Row], list[str]]:
    """Measure the compile times.

    Args:
        names: contenders, from NAMES.
        capacity: capacity of the buffers.
        batch_size: batch size of the samples.

    Returns:
        The rows, and a note for each contender that failed.
    """
    rows, notes = [], []
    for name in tqdm([name for name in NAMES if name in names], desc=MEASUREMENT, leave=False):
        try:
            require_time()
        except LeftOutError as error:
            notes.append(f"{name} (compile) is skipped: {error}.")
            continue
        with TemporaryDirectory() as cache:
            settings = {
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", __name__, name, str(capacity), str(batch_size)]
            for state in CACHES:
                child = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
                if child.returncode:
                    notes.append(f"{name} (compile, {state}) is skipped: {child.stderr.strip().splitlines()[-1]}")
                    break
                seconds = float(child.stdout.splitlines()[-1])
                rows.append(Row(MEASUREMENT, state, name, capacity, batch_size, WRITTEN, 1e6 * seconds))
    return rows, notes


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # warnings of the libraries
    chosen, *sizes = sys.argv[1:]
    print(first_call(chosen, *map(int, sizes)))
