"""Measures the speed of replay buffers and training loops of this package, TorchRL and installed peer libraries.

    python -m recipes.benchmark
    python -m recipes.benchmark device=cuda
    python -m recipes.benchmark device=cuda --measure cycles --batch-sizes 256 --only eager "CUDA graph"
    python -m recipes.benchmark --measure replay --only torchrl compiled --batch-sizes 256
    python -m recipes.benchmark --measure capacity --capacities 10000 100000 1000000
    python -m recipes.benchmark --quick
    python -m recipes.benchmark --read recipes/results/benchmark.csv

With device=cuda (or cuda:1 ..., cpu, auto), it measures cycles and updates on that device. Without, it measures replay,
training and capacity on the CPU.

Peers: cpprb, tianshou, flashbax, stable-baselines3. Everything runs on one CPU thread. All contenders take turns within
one run, so that other load on the host affects them equally. The processor's caches then hold the data of the other
contenders, as in training; a contender measured alone (--only) is about twice as fast.

--measure replay: wall-clock time of one cycle, median over cycles. A cycle samples a batch from a full buffer of the
largest capacity and updates its priorities from new TD errors. "sample only" contenders have no priorities to update.
Each library uses its own arrays for batches and TD errors: NumPy for cpprb and tianshou, JAX for flashbax, torch for
the others. flashbax does not compute importance-sampling weights. Rank-based replay sorts once per capacity / 20
updates; the median does not include the sort.

--measure training: CPU time of one env step of a DQN on CartPole with one update per ten steps, median over chunks of
steps.

--measure capacity: the cycle of replay at several capacities with batches of 32, with and without a write of 8
transitions per cycle. Contenders: uniform replay, PER, ReaPER and rank-based replay (without the sort), each compiled
and eager, and TorchRL's own samplers. Each cycle is compiled for each capacity with an empty compiler cache, which
takes most of the time.

With device=..., storage, networks and data are on the device. Times are medians over windows of 50 calls, with
torch.cuda.synchronize() at both ends of a window. A contender runs "eager", "compiled" (compile_step), as "CUDA graph"
(compile_step with cudagraphs=True) or "captured" (tensordict's CudaGraphModule: a CUDA graph of eager code, which
synchronizes at each call). The last two need CUDA. Each graph takes up to a minute to compile; choose fewer with
--measure, --batch-sizes and --only.

--measure cycles: sample + update, with and without a write of 64 transitions, for PER, ReaPER and rank-based replay
(without the sort), TorchRL's uniform replay and TorchRL's PER with its trees on the CPU and, if its extension was built
for CUDA, on the GPU.

--measure updates: whole updates of recipes.dqn (CartPole) and recipes.td3 (HalfCheetah) with random data: sample, loss,
gradients, optimizer, targets, priorities. The batch sizes are those of the recipes.

benchmark.csv has one row per number, with the columns

    measurement            replay, training or capacity; on a device cycles, dqn or td3
    capacity, batch_size, contender
    microseconds           median time
    times_faster           time of TorchRL's PrioritizedSampler (CPU trees), or of its own DQN, divided by this time
    written                transitions written per cycle (capacity, cycles)
    compile_seconds        first call of a graph with an empty compiler cache, in a warm process (capacity)
    times_smallest         this time divided by the time at the smallest capacity (capacity)
    kernels                operations of torch that launch a kernel, in one eager cycle or update (on a device)
    chip, torch, commit    model of the GPU or CPU, version of torch, version of the code

--read prints and draws the CSV of an earlier run, also if it lacks columns after times_faster.
"""

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks import STEPS_PER_UPDATE

if TYPE_CHECKING:
    import torch

    from recipes.benchmarks.results import Row

MEASUREMENTS, ON_DEVICE = ("replay", "training", "capacity"), ("cycles", "updates")
DEVICE_DEFAULTS = {"capacities": [1_000_000], "batch_sizes": [32, 256, 4096]}
QUICK = {"capacities": [200, 400], "batch_sizes": [32], "cycles": 5, "env_steps": 100}


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
    )
    parser.add_argument(
        "--device",
        type=device_name,
        help="device=cuda, cuda:1 ..., cpu or auto: measure cycles and updates on this device",
    )
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=(*MEASUREMENTS, *ON_DEVICE),
        help="what to time [replay training capacity; with device=...: cycles updates]",
    )
    parser.add_argument(
        "--capacities",
        type=positive,
        nargs="+",
        default=[10_000, 100_000, 1_000_000],
        help="capacities of the buffers; all but capacity use the largest [10000 100000 1000000]",
    )
    parser.add_argument(
        "--batch-sizes",
        type=positive,
        nargs="+",
        default=[32, 256],
        help="batch sizes of replay [32 256] and cycles [32 256 4096]",
    )
    parser.add_argument("--cycles", type=positive, default=1000, help="timed cycles per contender [%(default)s]")
    parser.add_argument("--env-steps", type=positive, default=10_000, help="steps per training loop [%(default)s]")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only contenders whose names begin with NAME")
    parser.add_argument("--quick", action="store_true", help="a few cycles of small buffers, as a test")
    parser.add_argument("--read", type=Path, metavar="CSV", help="print and draw an earlier run, without measuring")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="output directory [%(default)s]")
    if any(word.startswith("--device") for word in words):
        parser.set_defaults(**DEVICE_DEFAULTS)
    if "--quick" in words:
        parser.set_defaults(**QUICK)
    options = parser.parse_args(words)
    measurable = MEASUREMENTS if options.device is None else ON_DEVICE
    options.measure = options.measure or list(measurable)
    for name in options.measure:
        if name not in measurable:
            hint = "add device=cuda" if options.device is None else "it runs on the CPU, leave out device="
            parser.error(f"argument --measure: {name}: {hint}, or choose {', '.join(measurable)}")
    smallest = max(2, *options.batch_sizes, 64 if "capacity" in options.measure else 0)
    if min(options.capacities) < smallest:
        parser.error(f"argument --capacities: {min(options.capacities)}: must be >= {smallest}")
    if options.env_steps < STEPS_PER_UPDATE:
        parser.error(f"argument --env-steps: {options.env_steps}: must be >= {STEPS_PER_UPDATE}, the steps per update")
    if options.read is not None and not options.read.is_file():
        parser.error(f"argument --read: {options.read} is not a file")
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
    """Run the measurements, print the table and write the files."""
    # Imported late, because these modules import torch: mistakes in the options are reported at once.
    from recipes.benchmarks import results
    from recipes.run import ConfigError, is_out_of_memory

    if options.read is not None:
        try:
            rows = results.read_csv(options.read)
        except ValueError as error:
            parser.error(f"argument --read: {error}")
        results.print_table(rows)
        results.plot(rows, options.out / "benchmark.png")
        print(options.out / "benchmark.png")
        return

    import torch

    from recipes.training import find_device

    try:
        device = find_device(options.device or "cpu")
    except ConfigError as error:
        parser.error(
            f"argument --device: {error}. Install torch for CUDA (pytorch.org/get-started/locally), check that "
            "nvidia-smi lists the GPU, or choose device=cpu"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the libraries
            rows = measure(options, parser) if options.device is None else measure_device(options, parser, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        parser.error(f"argument --capacities: not enough memory for {max(options.capacities)} transitions")
    finally:
        torch.set_num_threads(threads)
    results.compare(rows)
    results.label(rows, device)
    if options.device is not None:
        print(f"Microseconds of one cycle or update on {rows[0].chip}; median over windows; commit {rows[0].commit}.")
    else:
        print_units(options)
    results.print_table(rows)
    print(results.versions())
    table, figure = options.out / "benchmark.csv", options.out / "benchmark.png"
    results.write_csv(rows, table)
    results.plot(rows, figure)
    print(table, figure)


def print_units(options: argparse.Namespace) -> None:
    """Print what the numbers of replay, training and capacity are."""
    print(
        f"Microseconds, one thread. replay and capacity: one cycle, median of {options.cycles}. "
        f"training: CPU time of one env step, {options.env_steps} steps, one update per {STEPS_PER_UPDATE}. "
        "compile s: first call of a graph with an empty compiler cache."
    )


def measure(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list["Row"]:
    """Run the measurements chosen by the options, print notes on skipped contenders, and return all rows."""
    import torch

    from recipes.benchmarks import capacity, replay, training

    logging.getLogger("torchrl").setLevel(logging.WARNING)  # its messages would break the progress bar
    loops = training.LOOPS if "training" in options.measure else {}
    contenders = replay.REPLAY if "replay" in options.measure else ()
    cases = capacity.NAMES if "capacity" in options.measure else ()
    names = wanted_names([*(contender.name for contender in contenders), *loops, *cases], options, parser)
    rows: list[Row] = []
    notes: list[str] = []
    with torch.no_grad():
        chosen = [contender for contender in contenders if contender.name in names]
        if chosen:
            more, left_out = replay.measure_replay(chosen, max(options.capacities), options.batch_sizes, options.cycles)
            rows, notes = rows + more, notes + left_out
        if of_capacity := [name for name in cases if name in names]:
            more, left_out = capacity.measure_capacities(of_capacity, options.capacities, options.cycles)
            rows, notes = rows + more, notes + left_out
    more, left_out = training.measure_training([name for name in loops if name in names], options.env_steps)
    return report(rows + more, notes + left_out, parser)


def measure_device(options: argparse.Namespace, parser: argparse.ArgumentParser, device: "torch.device") -> list["Row"]:
    """Run the measurements on a device, print notes on skipped contenders, and return all rows."""
    import torch

    from recipes.benchmarks import device as on_device
    from recipes.benchmarks import updates

    for library in ("torchrl", "tensordict"):
        logging.getLogger(library).setLevel(logging.WARNING)  # their messages would break the progress bar
    cycles = on_device.NAMES if "cycles" in options.measure else ()
    learners = updates.NAMES if "updates" in options.measure else ()
    names = wanted_names([*cycles, *learners], options, parser)
    capacity, rows, notes = max(options.capacities), [], []
    if device.type != "cuda":
        notes.append("CUDA graphs are skipped: they need device=cuda.")
    if cycles:
        with torch.no_grad():
            more, left_out = on_device.measure_cycles(names, device, capacity, options.batch_sizes, options.cycles)
        rows, notes = rows + more, notes + left_out
    if learners:
        more, left_out = updates.measure_updates(names, device, capacity, options.cycles)
        rows, notes = rows + more, notes + left_out
    return report(rows, notes, parser)


def wanted_names(names: Sequence[str], options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """The names that --only chooses."""
    prefixes = names if options.only is None else options.only
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in names):
            listed = "; ".join(dict.fromkeys(names))
            parser.error(f"argument --only: no contender begins with {prefix!r}; contenders: {listed}")
    return tuple(dict.fromkeys(name for name in names if name.startswith(tuple(prefixes))))


def report(rows: list["Row"], notes: Sequence[str], parser: argparse.ArgumentParser) -> list["Row"]:
    """Print the notes and return the rows; an error if there are none."""
    for note in dict.fromkeys(notes):
        print(note)
    if not rows:
        parser.error("argument --only: none of these contenders can be measured here")
    return rows


if __name__ == "__main__":
    main()
