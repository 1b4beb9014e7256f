"""Times steps that take turns, on the CPU or on a device."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tensordict.nn import CudaGraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from recipes.benchmark.results import LeftOutError, Row
from recipes.common.cli import is_out_of_memory
from torchrl_replay_ext import compile_step

Item = TypeVar("Item")

CPU_WINDOW, DEVICE_WINDOW = 10, 50  # successive calls of a contender
WARM_UP = 5  # calls before the measurement, after the first
UPKEEPS = 5  # at most so many calls of a case's upkeep

# Ways to run a function. "graph": a compiled graph, replayed as a CUDA graph. "captured": a CUDA graph of eager code.
EAGER, COMPILED, GRAPH, CAPTURED = "eager", "compiled", "CUDA graph", "captured"
MODES = (EAGER, COMPILED, GRAPH, CAPTURED)

_begin, _end = 0.0, math.inf  # of the time for the current item of in_shares, by time.monotonic

_ALLOCATES = tuple(
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)


def limit(seconds: float) -> None:
    """End all measurements after so many seconds."""
    global _begin, _end
    _begin = time.monotonic()
    _end = _begin + seconds


def in_shares(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items, with an equal share of the time that is left for each."""
    global _begin, _end
    end, items = _end, list(items)
    for number, item in enumerate(items):
        _begin = time.monotonic()
        _end = _begin + (end - _begin) / (len(items) - number)
        yield item
    _end = end


def require_time(share: float = 1.0) -> None:
    """Raise LeftOutError if this share of the time for the current item of in_shares has passed."""
    if time.monotonic() > _begin + share * (_end - _begin):
        raise LeftOutError("no time is left (--max-seconds)")


@dataclass
class Case:
    """A step to measure.

    Args:
        row: the row of the table; `measure` sets `microseconds` and `kernels`.
        step: the step.
        mode: how the step runs, see MODES. Default: EAGER.
        inputs: makes the arguments of a call; not measured. Default: no arguments.
        units: updates per step; the time is divided by them. Default: 1.
        upkeep: work that is due after every `upkeep_interval` steps, such as a sort of the ranks. Its share is added to
            the time of a step. Default: None, no such work.
        upkeep_interval: see `upkeep`. Default: 1.
        seconds: times per step. Default: [].
        upkeep_seconds: times of the upkeep. Default: [].
    """

    row: Row
    step: Callable[..., object]
    mode: str = EAGER
    inputs: Callable[[], tuple[Any, ...]] = tuple
    units: int = 1
    upkeep: Callable[[], object] | None = None
    upkeep_interval: float = 1
    seconds: list[float] = field(default_factory=list)
    upkeep_seconds: list[float] = field(default_factory=list)

    def microseconds(self) -> float:
        """The median time per unit, with the upkeep's share."""
        upkeep = statistics.median(self.upkeep_seconds) / self.upkeep_interval if self.upkeep_seconds else 0.0
        return 1e6 * (statistics.median(self.seconds) + upkeep) / self.units


def contender(mode: str, name: str) -> str:
    """The contender's name in the tables: the mode, unless it is EAGER, and the name."""
    return name if mode == EAGER else f"{mode} {name}"


def needs_cuda(name: str) -> bool:
    """Whether a contender can be measured on a CUDA device only."""
    return name.startswith((GRAPH, CAPTURED)) or name.endswith("CUDA trees")


def modes_of(name: str, names: Sequence[str]) -> list[str]:
    """The modes in which a contender is to be measured: those in `names`."""
    return [mode for mode in MODES if contender(mode, name) in names]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_mode(mode: str, function: Callable[..., object], arguments: tuple[Any, ...]) -> Callable[..., object]:
    """A function that runs in this mode.

    Args:
        mode: one of MODES.
        function: a new function for each call of in_mode, which compile_step needs.
        arguments: arguments of all calls, tensors and TensorDicts; used by CAPTURED only.
    """
    if mode == EAGER:
        return function
    if mode == CAPTURED:
        module: Any = CudaGraphModule
        captured = module(lambda: function(*arguments), warmup=3)
        return lambda *_: captured()
    return compile_step(function, cudagraphs=mode == GRAPH)


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


def measure(cases: Sequence[Case], device: torch.device, calls: int, label: str) -> tuple[list[Row], list[str]]:
    """Measure the steps; all cases take turns.

    A turn is a window of 10 calls on the CPU, each timed by itself. On a device it is a window of 50 calls, timed as a
    whole, with a synchronization at both ends.

    Args:
        cases: the steps.
        device: the device that the steps use.
        calls: number of measured calls per case, rounded up to whole windows.
        label: what the progress bar says.

    Returns:
        The rows, with medians, and a note for each case that failed.
    """
    running, notes = [], []
    eager_first = sorted(cases, key=lambda case: case.mode != EAGER)
    for case in tqdm(eager_first, desc=f"compiling, {label}", leave=False):
        try:
            if case.mode != EAGER:
                require_time()
            for _ in range(1 + min(WARM_UP, calls)):
                case.step(*case.inputs())
            if case.mode == EAGER and device.type != "cpu":
                case.row.kernels = round(count_kernels(partial(case.step, *case.inputs()), device) / case.units)
            synchronize(device)
        except Exception as error:  # of any library: the numbers of the other cases must not be lost
            if is_out_of_memory(error):
                raise
            reason = str(error).strip().partition("\n")[0]
            where = f"{label}, batch {case.row.batch_size}, {case.row.written} rows written"
            notes.append(f"{case.row.contender} ({where}) is skipped: {type(error).__name__}: {reason}")
        else:
            running.append(case)
    on_cpu = device.type == "cpu"
    window = min(CPU_WINDOW if on_cpu else DEVICE_WINDOW, calls)
    windows = -(-calls // window)
    for number in tqdm(range(windows), desc=label, leave=False):
        if number and time.monotonic() > _end:
            break
        for case in running:
            if case.upkeep is not None and number % -(-windows // UPKEEPS) == 0:
                case.upkeep_seconds.append(timed(case.upkeep, device))
            calls_of_window = [partial(case.step, *case.inputs()) for _ in range(window)]
            if on_cpu:
                case.seconds += [timed(call, device) for call in calls_of_window]
            else:
                case.seconds.append(timed(lambda calls=calls_of_window: [call() for call in calls], device) / window)
    for case in running:
        case.row.microseconds = case.microseconds()
    return [case.row for case in running], notes


def timed(function: Callable[[], object], device: torch.device) -> float:
    """The duration of a call, in seconds."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start
