"""Measures replay cycles on a device: samplers of this package and of TorchRL, with the storage on the device.

A cycle is `sample(batch_size) + update`, or `extend(64) + sample(batch_size) + update`. Uniform replay has no update.
The rows to write and the TD errors are on the device. Ranks are sorted between the measured windows.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict.nn import CudaGraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmarks.capacity import cycle_of, rank_based
from recipes.benchmarks.replay import ALPHA, BETA, fill, proportional, td_errors, transitions
from recipes.benchmarks.results import LeftOutError, Row
from recipes.run import is_out_of_memory
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    RankBasedSampler,
    ReaPERSampler,
    compile_step,
)

MEASUREMENT = "cycles"
WRITTEN = 64  # rows of a write
WINDOW = 50  # calls between two synchronizations
WARM_UP = 5  # calls before the measurement, after the first

# Ways to run a function. "graph": a compiled graph, replayed as a CUDA graph. "captured": a CUDA graph of eager code.
EAGER, COMPILED, GRAPH, CAPTURED = "eager", "compiled", "CUDA graph", "captured"
MODES = (EAGER, COMPILED, GRAPH, CAPTURED)
NEEDS_CUDA = (GRAPH, CAPTURED)

_ALLOCATES = tuple(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


@dataclass
class Case:
    """A step to measure.

    Args:
        row: the row of the table; `microseconds` and `kernels` are set by `measure`.
        mode: how the step runs, see MODES.
        step: the step, without arguments.
        updates: updates per step; the time is divided by them. Default: 1.
        sort: sorts the ranks, between the windows; None (default): nothing to sort.
        seconds: time per update, one number per window. Default: [].
    """

    row: Row
    mode: str
    step: Callable[[], object]
    updates: int = 1
    sort: Callable[[], None] | None = None
    seconds: list[float] = field(default_factory=list)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_mode(mode: str, function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """`function(*arguments)` as a function without arguments, run in this mode.

    Args:
        mode: one of MODES.
        function: a new function for each call of in_mode, which compile_step needs.
        arguments: tensors and TensorDicts, the same at each call.
    """
    if mode == CAPTURED:
        captured: Any = CudaGraphModule
        return captured(lambda: function(*arguments), warmup=3)
    if mode != EAGER:
        function = compile_step(function, cudagraphs=mode == GRAPH)
    return lambda: function(*arguments)


class KernelCounter(TorchDispatchMode):
    """Counts the operations of torch that launch a kernel on a device: all but views and allocations.

    One operation may launch several kernels. Kernels that other libraries launch are not seen.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._type = device.type
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        on_device = any(isinstance(leaf, torch.Tensor) and leaf.device.type == self._type for leaf in leaves)
        self.count += on_device and not function.is_view and function.overloadpacket not in _ALLOCATES
        return result


def count_kernels(step: Callable[[], object], device: torch.device) -> int:
    """The number of operations of an eager step that launch a kernel on the device; see KernelCounter."""
    with KernelCounter(device) as counter:
        step()
    return counter.count


def measure(cases: Sequence[Case], device: torch.device, calls: int) -> tuple[list[Row], list[str]]:
    """Measure the steps in windows of WINDOW calls, with a synchronization at both ends; all cases take turns.

    Args:
        cases: the steps.
        device: the device that the steps use.
        calls: number of measured calls per case, rounded up to whole windows.

    Returns:
        The rows, with the median over the windows, and a note for each case that failed.
    """
    running, notes = [], []
    for case in tqdm(cases, desc="compiling", leave=False):
        try:
            for _ in range(1 + WARM_UP):
                case.step()
            if case.mode == EAGER:
                case.row.kernels = round(count_kernels(case.step, device) / case.updates)
            synchronize(device)
        except Exception as error:  # of any library: the numbers of the other cases must not be lost
            if is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            where = f"{case.row.measurement}, batch {case.row.batch_size}, {case.row.written} rows written"
            notes.append(f"{case.row.contender} ({where}) is skipped: {type(error).__name__}: {reason}")
        else:
            running.append(case)
    window = min(WINDOW, calls)
    for _ in tqdm(range(-(-calls // window)), desc="measuring", leave=False):
        for case in running:
            if case.sort is not None:
                case.sort()
            synchronize(device)
            start = time.perf_counter()
            for _ in range(window):
                case.step()
            synchronize(device)
            case.seconds.append((time.perf_counter() - start) / window / case.updates)
    for case in running:
        case.row.microseconds = 1e6 * statistics.median(case.seconds)
    return [case.row for case in running], notes


def torchrl_per(capacity: int, device: torch.device, *, on_device: bool) -> PrioritizedSampler:
    """TorchRL's PER, with its trees on the device or on the CPU.

    Raises:
        LeftOutError: if TorchRL's extension cannot be loaded, or was built without CUDA.
    """
    if on_device and device.type != "cuda":
        raise LeftOutError(f"TorchRL has trees for CUDA and for the CPU only, and the device is {device}")
    try:
        return PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA, device=device if on_device else "cpu")
    except (ImportError, RuntimeError) as error:
        or_else = ", or was built without CUDA" if on_device else ""
        raise LeftOutError(f"the extension of TorchRL cannot be loaded with this version of torch{or_else}") from error


# Name, function that makes the sampler from capacity and device, and whether the sampler is of this package.
SAMPLERS: tuple[tuple[str, Callable[[int, torch.device], Any], bool], ...] = (
    ("torchrl RandomSampler", lambda capacity, device: RandomSampler(), False),
    ("torchrl PrioritizedSampler, CPU trees", lambda *where: torchrl_per(*where, on_device=False), False),
    ("torchrl PrioritizedSampler, CUDA trees", lambda *where: torchrl_per(*where, on_device=True), False),
    ("ProportionalSampler", lambda capacity, device: proportional(capacity), True),
    ("ReaPERSampler", lambda capacity, device: ReaPERSampler(capacity), True),
    ("RankBasedSampler", lambda capacity, device: rank_based(capacity), True),
)
NAMES = tuple(f"{mode} {name}" for name, _, ours in SAMPLERS for mode in (MODES if ours else (EAGER,)))


def make_buffer(sampler: Any, ours: bool, capacity: int, device: torch.device, **arguments: Any) -> Any:
    """An empty buffer with the storage on the device: of this package for its samplers, otherwise of TorchRL."""
    if ours:
        storage = CompilableTensorStorage(capacity, device=device)
        return CompilableReplayBuffer(storage=storage, sampler=sampler, **arguments)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, device=device), sampler=sampler, **arguments)


def chosen_modes(names: Sequence[str], name: str, ours: bool, device: torch.device) -> list[str]:
    """The modes of a contender that are in `names` and that the device has."""
    modes = [mode for mode in (MODES if ours else (EAGER,)) if f"{mode} {name}" in names]
    return [mode for mode in modes if device.type == "cuda" or mode not in NEEDS_CUDA]


def measure_cycles(
    names: Sequence[str], device: torch.device, capacity: int, batch_sizes: Sequence[int], cycles: int
) -> tuple[list[Row], list[str]]:
    """Measure the replay cycles.

    Args:
        names: contenders, from NAMES.
        device: device of the storage.
        capacity: capacity of the full buffers.
        batch_sizes: batch sizes of the samples.
        cycles: number of measured cycles per contender, batch size and kind of cycle.

    Returns:
        The rows, and a note for each skipped contender.
    """
    notes: list[str] = []
    cases: list[Case] = []
    rows = transitions(WRITTEN).to(device)
    data = transitions(capacity).to(device)
    for name, make_sampler, ours in tqdm(SAMPLERS, desc="filling", leave=False):
        for mode in chosen_modes(names, name, ours, device):
            try:
                sampler = make_sampler(capacity, device)
            except LeftOutError as error:
                notes.append(f"{mode} {name} is skipped: {error}.")
                continue
            buffer = make_buffer(sampler, ours, capacity, device)
            fill(buffer, data)
            sort = sampler.sort if isinstance(sampler, RankBasedSampler) else None
            for written in (0, WRITTEN):
                for size in batch_sizes:
                    step = in_mode(mode, cycle_of(buffer, written, size), rows, td_errors(size, device))
                    row = Row(MEASUREMENT, capacity, size, f"{mode} {name}", written=written)
                    cases.append(Case(row, mode, step, sort=sort))
    more, failed = measure(cases, device, cycles)
    order = {contender: number for number, contender in enumerate(NAMES)}
    return sorted(more, key=lambda row: (row.written, row.batch_size, order[row.contender])), notes + failed
