"""Measures the CPU time to compile one step: write rows, sample a batch, update its priorities.

Each step is compiled in a process of its own with one compile thread, with an empty compiler cache ("cold") and again
with the cache of the first process ("warm"). The time is that of the first compiled call, including the C++ compiler's.
An eager step goes before it, so Numba's kernels are loaded.

This file is also the program of these processes: python -m recipes.benchmark.compile CONTENDER CAPACITY BATCH_SIZE.
"""

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from recipes.benchmark.buffers import OURS, SAMPLERS, Stream, full_buffer, has_priorities, td_errors, transitions
from recipes.benchmark.replay import make_cycle, written
from recipes.benchmark.results import Row
from recipes.benchmark.timing import require_time, skipping
from torchrl_replay_ext import compile_step

WRITTEN = 64  # rows
NAMES = [name for name in SAMPLERS if not name.startswith("TorchRL")]
SETTINGS = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "OMP_NUM_THREADS": "1"}


def first_call(name: str, capacity: int, batch_size: int) -> float:
    """CPU time of the first call of a compiled step, in seconds."""
    torch.set_num_threads(1)
    buffer = full_buffer(name, OURS, transitions(capacity))
    stream, in_graph = Stream(), getattr(buffer.sampler, "writes_in_graphs", True)
    step = written(buffer, make_cycle(buffer, batch_size, updates=has_priorities(name)))
    with torch.no_grad():
        step(stream.take(WRITTEN), td_errors(batch_size))
        rows, td_error, compiled = stream.take(WRITTEN), td_errors(batch_size), compile_step(step)
        start = sum(os.times()[:4])  # of this process and of its finished children
        if not in_graph:
            buffer.extend(rows)
        compiled(rows if in_graph else None, td_error)
        return sum(os.times()[:4]) - start


def measure_compile(names: list[str], options: Namespace) -> list[Row]:
    """Measure the compile times at the largest capacity and batch size. `names`: from NAMES."""
    rows, capacity, size = [], max(options.capacities), max(options.batch_sizes)
    for name in tqdm(names, desc="compile", leave=False):
        with skipping(f"{name} (compile)"), TemporaryDirectory() as cache:
            require_time()
            command = [sys.executable, "-m", "recipes.benchmark.compile", name, str(capacity), str(size)]
            environment = os.environ | SETTINGS | {"TORCHINDUCTOR_CACHE_DIR": cache}
            for state in ("cold", "warm"):
                child = subprocess.run(command, env=environment, capture_output=True, text=True)
                if child.returncode:
                    raise RuntimeError((child.stderr.strip().splitlines() or ["killed"])[-1])
                seconds = float(child.stdout.splitlines()[-1])
                rows.append(Row("compile", state, name, "uniform", capacity, size, WRITTEN, 1e6 * seconds))
    return rows


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # warnings of the libraries
    chosen, *sizes = sys.argv[1:]
    print(first_call(chosen, *map(int, sizes)))
