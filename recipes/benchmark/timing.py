"""Times steps that take turns, within a limit of time."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from recipes.benchmark.results import Row

CPU_WINDOW, DEVICE_WINDOW = 10, 50  # successive calls of a contender
WARM_UP = 5  # calls before the measurement

_end = float("inf")  # of the time, by time.monotonic


def limit(seconds: float) -> None:
    """Begin nothing more after so many seconds."""
    global _end
    _end = time.monotonic() + seconds


@contextmanager
def skipping(what: str) -> Iterator[None]:
    """Print an error of the block instead of raising it: the numbers of the other contenders must not be lost."""
    try:
        yield
    except Exception as error:
        tqdm.write(f"{what} is skipped: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def require_time() -> None:
    """Raise TimeoutError if the time is over."""
    if time.monotonic() > _end:
        raise TimeoutError("no time is left (--max-seconds)")


@dataclass
class Case:
    """A step to measure.

    Args:
        row: the row of the table; `measure` sets its `microseconds`.
        step: the step.
        inputs: makes the arguments of a call; not measured. Default: no arguments.
        compiled: whether the first call compiles. Default: False.
        seconds: times per step. Default: [].
    """

    row: Row
    step: Callable[..., object]
    inputs: Callable[[], tuple[Any, ...]] = tuple
    compiled: bool = False
    seconds: list[float] = field(default_factory=list)


def timed(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The duration of a call, in seconds, as the mean of successive calls.

    On the CPU it is CPU time. It leaves out the time for which a busy host suspends the process.
    """
    on_cpu = device.type == "cpu"
    clock = time.process_time if on_cpu else time.perf_counter
    synchronize = (lambda: None) if on_cpu else partial(torch.cuda.synchronize, device)
    synchronize()
    start = clock()
    for call in calls:
        call()
    synchronize()
    return (clock() - start) / len(calls)


def measure(cases: Sequence[Case], device: torch.device, num_calls: int, label: str) -> list[Row]:
    """Measure the steps; all cases take turns. Returns the rows, with medians.

    A turn is a window of 10 calls on the CPU, each timed by itself. On a GPU it is a window of 50 calls, timed as a
    whole, with a synchronization at both ends.

    Args:
        cases: the steps. Those that fail are skipped.
        device: the device that the steps use.
        num_calls: number of measured calls per case, rounded up to whole windows.
        label: what the progress bar says.
    """
    running: list[Case] = []
    for case in tqdm(sorted(cases, key=lambda case: case.compiled), desc=f"first calls, {label}", leave=False):
        with skipping(f"{case.row.contender} ({label})"):
            if case.compiled:
                require_time()
            for _ in range(1 + min(WARM_UP, num_calls)):
                case.step(*case.inputs())
            running.append(case)
    on_cpu = device.type == "cpu"
    window = min(CPU_WINDOW if on_cpu else DEVICE_WINDOW, num_calls)
    for number in tqdm(range(-(-num_calls // window)), desc=label, leave=False):
        if number and time.monotonic() > _end:
            break
        for case in running:
            calls = [partial(case.step, *case.inputs()) for _ in range(window)]
            case.seconds += [timed([call], device) for call in calls] if on_cpu else [timed(calls, device)]
    for case in running:
        case.row.microseconds = 1e6 * statistics.median(case.seconds)
    return [case.row for case in running]
