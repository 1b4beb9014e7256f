"""Measures what replay costs: writes, samples, whole updates, compile times and whole training loops.

    python -m recipes.benchmark                             # everything
    python -m recipes.benchmark whole                       # an update of SAC, eager and as one graph
    python -m recipes.benchmark extend cycle
    python -m recipes.benchmark updates --only TorchRL "compiled uniform" "compiled PER"
    python -m recipes.benchmark cycle --only TorchRL PER "compiled PER" --batch-sizes 32
    python -m recipes.benchmark extend cycle --capacities 10000 100000 1000000 10000000
    python -m recipes.benchmark cycle updates device=cuda --max-seconds 240
    python -m recipes.benchmark extend cycle --capacities 10000 --calls 20 # as a test

Contenders are samplers of this package: PER (ProportionalSampler), rank-based PER (RankBasedSampler), ReaPER
(ReaPERSampler), event tables (EventTableSampler, with one rare event) and slices (TrajectoryRetraceSampler); uniform
draws; TorchRL's uniform buffer and its PER; and the peers that are installed: cpprb, stable-baselines3. A sampler
runs in TorchRL's TensorDictReplayBuffer; ", CompilableReplayBuffer" stands for that buffer, also in eager code;
"compiled" for one graph (compile_step).

Contenders take turns, except in compile and training, so that other load on the host affects them equally. Everything
runs on one CPU thread. Times are CPU times: those in which a busy host suspends the process do not count. They are
medians, but those of compile are of one call. Buffers are full and, except in slices, have wrapped around.

whole       The whole update of recipes.sac with PER, batch 256 and random data, at the largest capacity, in ms: with
            TorchRL's buffer, PER and backward(), and that of the recipe in eager code, by torch.compile and by
            compile_step.
extend      Write of 1, 8 or 64 rows to a buffer with a stock storage, and add of one row. Compared with TorchRL's
            uniform buffer.
cycle       Sample a batch and update its priorities from new TD errors. Compared with TorchRL's PER. Uniform draws,
            event tables and slices have no priorities to update. Compiled contenders run at the largest capacity only.
slices      Write of 8 rows, then a draw of 256 slices of 4 steps, at 100,000, 1,000,000 and 4,000,000 slots: TorchRL's
            SliceSampler, with and without cached values, and TrajectoryRetraceSampler.
updates     Whole updates of recipes.dqn with random data, batch 128, at the largest capacity: sample, loss, gradients,
            optimizer, priorities. What a sampler adds is its time minus that of uniform draws. It is compared with what
            TorchRL's PER adds: its cycle minus TorchRL's uniform sample, both eager, with the same transitions.
compile     CPU time, including the C++ compiler's, of the first call of the compiled cycle with a write. Each in a
            fresh process with one compile thread, with an empty compiler cache (cold) and again with the cache of the
            first process (warm). Compared with uniform draws. At the largest capacity and batch size.
training    CPU time of a step of DQN on CartPole: whole loops of the recipe, of TorchRL's components, combined as in
            its scripts, and of stable-baselines3. All have the same sizes and updates per step, and one environment.
            The peers draw uniformly.

After --max-seconds nothing more begins: a buffer is filled, a step compiled or a window of calls measured to its end,
and what is left is skipped.

With device=cuda, cycle and updates run with storage, networks and data on the GPU, as "CUDA graph" (compile_step with
cudagraphs=True) instead of "compiled", eager cycles also with a write of 64 rows, and updates also of recipes.td3 and
recipes.sac. Times are then those of windows of 50 calls, with a synchronization at both ends. Their median
hides the sorts of rank-based PER, which are rarer. This needs torch >= 2.13 built for CUDA, with its Triton.

The results are printed as Markdown tables and written to benchmark.md. benchmark.csv has one row per number, with the
columns

    measurement, case             the measurement, and what it measures: add, extend, cold, warm, DQN
    contender, reference          the contender, and the one that it is compared with
    capacity, batch_size, written slots of the buffer, rows per sample, rows per write
    microseconds                  the time
    added                         µs more than the reference (updates)
    ratio                         the time divided by that of the reference; for updates, added divided by what
                                  TorchRL's PER adds
    chip, torch, commit           model of the CPU or GPU, version of torch, version of the code
"""

import argparse
import logging
import math
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from recipes.common.checked import positive

MEASUREMENTS = ("whole", "extend", "cycle", "slices", "updates", "compile", "training")
ON_GPU = ("cycle", "updates")
SMALLEST = 1000  # slots
INTERRUPTED = 130  # exit code


def word(text: str) -> str:
    """Parse a word without dashes: a measurement or the device."""
    if text not in MEASUREMENTS and not re.fullmatch(r"device=(cpu|cuda(:\d+)?)", text):
        raise argparse.ArgumentTypeError(f"{text}: choose {', '.join(MEASUREMENTS)}, device=cuda, device=cuda:1 ...")
    return text


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the command line, without importing torch."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmark", description=(__doc__ or "").splitlines()[0])
    add, numbers = parser.add_argument, {"type": positive, "nargs": "+"}
    add("words", type=word, nargs="*", metavar="MEASUREMENT", help=f"{', '.join(MEASUREMENTS)} [all]; device=cuda")
    add("--capacities", **numbers, help="slots of the buffers [10000 1000000; slices: 100000 1000000 4000000]")
    add("--batch-sizes", **numbers, default=[32, 256], help="of cycle and compile [32 256]")
    add("--calls", type=positive, default=300, help="measured calls; training makes 20 times as many steps [300]")
    add("--max-seconds", type=positive, default=math.inf, help="time after which nothing more begins")
    add("--only", nargs="+", metavar="NAME", default=[""], help="only contenders whose names begin with NAME")
    add("--out", type=Path, default=Path("runs/benchmark"), help="output directory [%(default)s]")
    options = parser.parse_args(arguments)
    options.slice_capacities = options.capacities or [100_000, 1_000_000, 4_000_000]
    options.capacities = options.capacities or [10_000, 1_000_000]
    smallest = max(SMALLEST, *options.batch_sizes)
    if min(options.capacities) < smallest:
        parser.error(f"argument --capacities: {min(options.capacities)}: must be >= {smallest}")
    options.device = ([word[7:] for word in options.words if "=" in word] or ["cpu"])[-1]
    able = MEASUREMENTS if options.device == "cpu" else ON_GPU
    options.measurements = [name for name in options.words if "=" not in name] or able
    if unable := [name for name in options.measurements if name not in able]:
        parser.error(f"{unable[0]} runs on the CPU: leave out device=, or choose {', '.join(ON_GPU)}")
    return parser, options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser, options = parse(arguments)
    import torch

    from recipes.benchmark import buffers, compile, replay, results, slices, timing, training, updates, whole
    from recipes.common.errors import ConfigError
    from recipes.common.run import find_device

    try:
        options.device = find_device(options.device)
        options.out.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        parser.error(f"{error}")
    contenders = buffers.contenders(options.device)
    known = {
        "whole": (whole.NAMES, whole.measure_whole),
        "extend": ([name for name, (_, mode) in contenders.items() if mode == buffers.EAGER], replay.measure_extend),
        "cycle": ([*contenders, *(replay.PEERS if options.device.type == "cpu" else ())], replay.measure_cycle),
        "slices": (list(slices.SAMPLERS), slices.measure_slices),
        "updates": ([*updates.contenders(options.device)], updates.measure_updates),
        "compile": (compile.NAMES, compile.measure_compile),
        "training": (list(training.LOOPS), training.measure_training),
    }
    names = list(dict.fromkeys(name for measurement in options.measurements for name in known[measurement][0]))
    for prefix in options.only:
        if not any(name.startswith(prefix) for name in names):
            parser.error(f"argument --only: no contender begins with {prefix!r}; contenders: {'; '.join(names)}")
    for library in ("torchrl", "tensordict"):
        logging.getLogger(library).setLevel(logging.WARNING)  # their messages would break the progress bar
    rows, exit_code = [], 0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timing.limit(options.max_seconds)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the libraries
            for measurement in options.measurements:
                able, function = known[measurement]
                rows += function([name for name in able if name.startswith(tuple(options.only))], options)
    except KeyboardInterrupt:
        print(f"{measurement} was interrupted; its numbers are lost.")
        exit_code = INTERRUPTED
    if rows:
        results.save(rows, options.device, options.out)
    if exit_code or not rows:
        sys.exit(exit_code or 1)


if __name__ == "__main__":
    main()
