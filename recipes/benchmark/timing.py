"""Times steps that take turns, within a limit of time."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from recipes.benchmark.results import Row

Item = TypeVar("Item")

CPU_WINDOW, DEVICE_WINDOW = 10, 50  # successive calls of a contender
WARM_UP = 5  # calls before the measurement
FILLING = 0.5  # share of the time for a measurement after which no more buffers are filled

_begin, _end = 0.0, float("inf")  # of the time for the current item of in_shares, by time.monotonic


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
    """Raise TimeoutError if this share of the time for the current item of in_shares has passed."""
    if time.monotonic() > _begin + share * (_end - _begin):
        raise TimeoutError("no time is left (--max-seconds)")


@contextmanager
def skipping(what: str) -> Iterator[None]:
    """Print an error of the block instead of raising it: the numbers of the other contenders must not be lost."""
    try:
        yield
    except Exception as error:
        tqdm.write(f"{what} is skipped: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


@dataclass
class Case:
    """A step to measure.

    Args:
        row: the row of the table; `measure` sets its `microseconds`.
        step: the step.
        inputs: makes the arguments of a call; not measured. Default: no arguments.
        units: updates per step; the time is divided by them. Default: 1.
        compiled: whether the first call compiles. Default: False.
        seconds: times per step. Default: [].
    """

    row: Row
    step: Callable[..., object]
    inputs: Callable[[], tuple[Any, ...]] = tuple
    units: int = 1
    compiled: bool = False
    seconds: list[float] = field(default_factory=list)


def timed(calls: Sequence[Callable[[], object]], device: torch.device) -> float:
    """The duration of a call, in seconds, as the mean of successive calls.

    On the CPU it is CPU time. It leaves out the time for which a busy host suspends the process.
    """
    if device.type == "cpu":
        start = time.process_time()
        for call in calls:
            call()
        return (time.process_time() - start) / len(calls)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for call in calls:
        call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / len(calls)


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
        case.row.microseconds = 1e6 * statistics.median(case.seconds) / case.units
    return [case.row for case in running]
