"""Measures what replay costs: writes, samples, compile times, whole updates and whole training loops.

    python -m recipes.benchmark                             # about 30 minutes on one CPU core, most of them compiling
    python -m recipes.benchmark --measure extend cycle      # about 5 minutes
    python -m recipes.benchmark --measure cycle --only TorchRL PER "compiled PER" --batch-sizes 32
    python -m recipes.benchmark --measure extend cycle --capacities 10000 100000 1000000 10000000
    python -m recipes.benchmark device=cuda --batch-sizes 32 256 4096
    python -m recipes.benchmark --quick
    python -m recipes.benchmark --read recipes/results/benchmark.csv

Contenders are samplers of this package: PER (ProportionalSampler), rank-based PER (RankBasedSampler), ReaPER
(ReaPERSampler), event tables (EventTableSampler, with one rare event) and slices (TrajectoryRetraceSampler); uniform
draws; TorchRL's uniform buffer and its PER; and the peers that are installed: cpprb, tianshou, flashbax,
stable-baselines3. "compiled" contenders run as one graph (compile_step), the others are eager.

All contenders of a measurement take turns, so that other load on the host affects them equally. Everything runs on one
CPU thread. Our buffers are full and have wrapped around, except for compile. Times are medians, those of compile of one
call.

extend      Write of 1, 8 or 64 rows to a buffer with a stock storage, and add of one row. Compared with TorchRL's
            uniform buffer.
cycle       Sample a batch and update its priorities from new TD errors, alone and after a write of 64 rows. Compared
            with TorchRL's PER. Uniform draws, event tables and slices have no priorities to update. Rank-based PER
            includes its share of the sort that is due when 5 % of the priorities have changed. Compiled contenders
            are measured without writes and at the largest capacity, with --only in all cases.
compile     CPU time, including the C++ compiler's, of the first call of the compiled cycle with a write. Each in a
            fresh process with one compile thread, with an empty compiler cache (cold) and again with the cache of the
            first process (warm). Compared with uniform draws. On the largest capacity.
updates     Whole updates of recipes.dqn, recipes.td3 and recipes.sac with random data: sample, loss, gradients,
            optimizer, targets, priorities. Batch 128 or 256, on the largest capacity. The margin of a sampler is its
            time minus that of uniform draws. It is compared with the margin of TorchRL's PER: its cycle minus TorchRL's
            uniform sample, both eager, with the same transitions.
training    CPU time of a step of DQN and ACER on CartPole, TD3 and SAC on HalfCheetah: whole loops of the recipes,
            of TorchRL's components, combined as in its scripts, and of stable-baselines3. All have the same sizes and
            updates per step, and one environment, but ACER has 8. The peers draw uniformly. No peer has ACER.

Each measurement, capacity and algorithm has an equal share of --max-seconds. A compilation that has begun is finished,
so a run may take half a minute longer. A shorter run leaves out contenders, in the order of the tables.

With device=cuda, cycle and updates run with storage, networks and data on the GPU, also as "CUDA graph" (compile_step
with cudagraphs=True) and "captured" (tensordict's CudaGraphModule: a CUDA graph of eager code). Times are then those of
windows of 50 calls, with a synchronization at both ends. Kernels are operations of torch that launch one. This needs
torch >= 2.13 built for CUDA, with its Triton. TorchRL's PER is skipped if its extension does not load with this torch.

The results are printed as Markdown tables. benchmark.csv has one row per number, with the columns

    measurement, case             the measurement, and what it measures: add, extend, cold, warm, dqn ...
    contender
    capacity, batch_size, written slots of the buffer, rows per sample, rows per write
    microseconds                  the time
    ratio                         the time divided by that of the contender that it is compared with
    margin, margin_ratio          µs more than with uniform draws; the same divided by TorchRL's margin (updates)
    kernels                       of an eager cycle or update (device=cuda)
    chip, torch, commit           model of the CPU or GPU, version of torch, version of the code

--read prints the tables of an earlier run.
"""

import argparse
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from recipes.benchmark.results import Row

MEASUREMENTS, ON_GPU = ("extend", "cycle", "compile", "updates", "training"), ("cycle", "updates")
SMALLEST = 1000  # slots
ON_GPU_SECONDS = 240
QUICK = {
    "measure": ["extend", "cycle", "updates", "training"],
    "capacities": [1000, 2000],
    "batch_sizes": [32],
    "calls": 2,
    "env_steps": 8,
}


def positive(text: str) -> int:
    """Parse the value of an option: an integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def device_name(text: str) -> str:
    """Parse the value of device=."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text}: choose auto, cpu, cuda, cuda:1 ...")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    # device=cuda as in the other recipes; argparse knows it as --device=cuda
    words = [f"--{word}" if word.startswith("device=") else word for word in arguments or sys.argv[1:]]
    parser = argparse.ArgumentParser(
        prog="python -m recipes.benchmark",
        usage="%(prog)s [device=cuda] [options]",
        description=(__doc__ or "").splitlines()[0],
        epilog="A run takes about 30 minutes on one core, most of them for compiling. Measurements: "
        "extend: writes of a few rows. cycle: sample and update of priorities. compile: compile times. updates: whole "
        "updates of DQN, TD3 and SAC. training: whole training loops. To shorten a run, choose fewer --measure, --only "
        "or --capacities; with a warm compiler cache it takes less time.",
    )
    add = parser.add_argument
    add("--device", type=device_name, default="cpu", help="device=cuda, cuda:1 ..., auto [cpu]")
    add("--measure", nargs="+", choices=MEASUREMENTS, help="what to measure [all; with device=cuda: cycle updates]")
    add(
        "--capacities",
        type=positive,
        nargs="+",
        default=[10_000, 1_000_000],
        help="slots of the buffers of extend and cycle; compile and updates use the largest [10000 1000000]",
    )
    add("--batch-sizes", type=positive, nargs="+", default=[256], help="of cycle; compile uses the largest [256]")
    add("--calls", type=positive, default=500, help="measured calls of extend, cycle and updates [%(default)s]")
    add(
        "--env-steps",
        type=positive,
        default=1000,
        help="measured steps of training loops of TD3 and SAC; DQN and ACER make ten times as many [%(default)s]",
    )
    add(
        "--max-seconds",
        type=positive,
        help="end of the measurements; skips what has no time left and prints the rest [none; with device=cuda: 240]",
    )
    add("--only", nargs="+", metavar="NAME", help="only contenders whose names begin with NAME")
    add("--quick", action="store_true", help="a few calls with small buffers and nothing compiled, as a test")
    add("--read", type=Path, metavar="CSV", help="print the tables of an earlier run, without measuring")
    add("--out", type=Path, default=Path("runs/benchmark"), help="output directory [%(default)s]")
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(words)
    if min(options.capacities) < max(SMALLEST, *options.batch_sizes):
        smallest = max(SMALLEST, *options.batch_sizes)
        parser.error(f"argument --capacities: {min(options.capacities)}: must be >= {smallest}")
    if options.env_steps < 8:
        parser.error(f"argument --env-steps: {options.env_steps}: must be >= 8")
    if options.read is not None and not options.read.is_file():
        parser.error(f"argument --read: {options.read} is not a file")
    if options.read is None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --out: {error}")
    try:
        run(options, parser)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Run the measurements, print the tables and write the files."""
    # Imported late, because these modules import torch: mistakes in the options are reported at once.
    from recipes.benchmark import results
    from recipes.common.cli import is_out_of_memory
    from recipes.common.errors import ConfigError

    if options.read is not None:
        try:
            rows = results.read_csv(options.read)
        except ValueError as error:
            parser.error(f"argument --read: {error}")
        results.print_tables(rows)
        results.print_summary(rows)
        return

    import torch

    from recipes.common.run import find_device

    try:
        device = find_device(options.device)
    except ConfigError as error:
        parser.error(
            f"argument --device: {error}. Install torch for CUDA (pytorch.org/get-started/locally), check that "
            "nvidia-smi lists the GPU, or choose device=cpu"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for library in ("torchrl", "tensordict"):
        logging.getLogger(library).setLevel(logging.WARNING)  # their messages would break the progress bar
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the libraries
            rows, notes, is_complete = measure(options, parser, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        parser.error(f"argument --capacities: not enough memory for {max(options.capacities)} transitions")
    finally:
        torch.set_num_threads(threads)
    for note in dict.fromkeys(notes):
        print(note)
    if not rows:
        parser.error("argument --only: none of these contenders can be measured here")
    results.compare(rows)
    results.label(rows, device)
    results.print_tables(rows)
    results.print_summary(rows)
    print(results.versions(), rows[0].chip, f"commit {rows[0].commit}", sep="; ")
    table = options.out / "benchmark.csv"
    results.write_csv(rows, table)
    print(table)
    if not is_complete:
        raise KeyboardInterrupt


def measure(
    options: argparse.Namespace, parser: argparse.ArgumentParser, device: "torch.device"
) -> tuple[list["Row"], list[str], bool]:
    """Run the measurements that the options choose.

    Returns:
        The rows, notes on skipped contenders, and False if a measurement was interrupted.
    """
    from recipes.benchmark import compile, cycle, extend, timing, training, updates

    on_cpu, largest = device.type == "cpu", max(options.capacities)
    measurable = MEASUREMENTS if on_cpu else ON_GPU
    chosen = options.measure or measurable
    for name in chosen:
        if name not in measurable:
            parser.error(f"argument --measure: {name}: runs on the CPU; leave out device=, or choose cycle, updates")
    contenders = {
        "extend": extend.NAMES,
        "cycle": (*cycle.NAMES, *cycle.PEER_NAMES),
        "compile": compile.NAMES,
        "updates": updates.NAMES,
        "training": training.NAMES,
    }
    names = {
        measurement: [name for name in contenders[measurement] if not on_cpu or not timing.needs_cuda(name)]
        for measurement in chosen
    }
    known = list(dict.fromkeys(name for each in names.values() for name in each))
    for prefix in options.only or ():
        if not any(name.startswith(prefix) for name in known):
            parser.error(f"argument --only: no contender begins with {prefix!r}; contenders: {'; '.join(known)}")
    if options.only is not None:
        only = tuple(options.only)
        names = {measurement: [name for name in each if name.startswith(only)] for measurement, each in names.items()}
    elif options.quick:
        names = {
            measurement: [name for name in each if not name.startswith((timing.COMPILED, timing.GRAPH))]
            for measurement, each in names.items()
        }
    elif on_cpu and "updates" in chosen:
        names["updates"] = list(updates.COMPARED_ON_CPU)

    functions: dict[str, Callable[[Sequence[str]], tuple[list[Row], list[str]]]] = {
        "extend": lambda names: extend.measure_extend(names, options.capacities, options.calls),
        "cycle": lambda names: cycle.measure_cycles(
            names, device, options.capacities, options.batch_sizes, options.calls, all_graphs=options.only is not None
        ),
        "compile": lambda names: compile.measure_compile(names, largest, max(options.batch_sizes)),
        "updates": lambda names: updates.measure_updates(names, device, largest, options.calls),
        "training": lambda names: training.measure_training(names, options.env_steps),
    }
    rows: list[Row] = []
    notes: list[str] = []
    default = math.inf if on_cpu else ON_GPU_SECONDS
    timing.limit(options.max_seconds or default)
    for measurement in timing.in_shares(chosen):
        try:
            more, left_out = functions[measurement](names[measurement])
        except KeyboardInterrupt:
            if not rows:
                raise
            notes.append(f"{measurement} was interrupted; its numbers are lost.")
            return rows, notes, False
        rows, notes = rows + more, notes + left_out
    return rows, notes, True


if __name__ == "__main__":
    main()
