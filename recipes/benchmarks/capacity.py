"""Measures how the time of a cycle depends on the capacity of a full buffer.

A cycle is `extend(8) + sample(32) + update`, or `sample(32) + update`. Uniform replay has no priorities and no update.
Samplers of this package are measured in a CompilableReplayBuffer, eager and compiled into one graph; TorchRL's samplers
in a stock buffer, eager. Ranks are sorted between the cycles, outside of the measured time.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch._inductor.utils import fresh_cache
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmarks.replay import EPISODE_LENGTH, fill, proportional, td_errors, torchrl_per, transitions
from recipes.benchmarks.results import LeftOutError, Row
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    RankBasedSampler,
    ReaPERSampler,
    compile_step,
)

WRITTEN, BATCH = 8, 32
MEASUREMENT = "capacity"

Cycle = Callable[[TensorDict, Tensor], object]


def rank_based(capacity: int) -> RankBasedSampler:
    """Rank-based PER that does not sort by itself; the benchmark sorts between the cycles."""
    return RankBasedSampler(capacity, stale_fraction=1.0)


def uniform(capacity: int) -> RandomSampler:
    """Uniform replay; `capacity` is not used."""
    return RandomSampler()


# Name, function that makes the sampler, and whether it is measured in a buffer of this package.
SAMPLERS: tuple[tuple[str, Callable[[int], Any], bool], ...] = (
    ("uniform", uniform, True),
    ("ProportionalSampler", proportional, True),
    ("ReaPERSampler", ReaPERSampler, True),
    ("RankBasedSampler", rank_based, True),
    ("torchrl RandomSampler", uniform, False),
    ("torchrl PrioritizedSampler", torchrl_per, False),
)
NAMES = tuple(
    f"{mode}{name}" for name, _, ours in SAMPLERS for mode in (("compiled ", "eager ") if ours else ("eager ",))
)


@dataclass
class Case:
    """One cycle of one buffer, with the measured times.

    Args:
        contender: "compiled" or "eager", and the name of the sampler.
        capacity: capacity of the full buffer.
        written: rows that a cycle writes; 0: none.
        cycle: the cycle, called with the rows to write and the TD errors [BATCH] of the sample.
        compiled: whether the first call compiles.
        sort: sorts the ranks; None: the sampler has no ranks.
        compile_seconds: duration of the first call, if it compiles. Default: None.
        seconds: durations of the other calls. Default: [].
    """

    contender: str
    capacity: int
    written: int
    cycle: Cycle
    compiled: bool
    sort: Callable[[], None] | None
    compile_seconds: float | None = None
    seconds: list[float] = field(default_factory=list)

    def run(self, rows: TensorDict, td_error: Tensor) -> float:
        """Run the cycle and return its duration in seconds."""
        start = time.perf_counter()
        self.cycle(rows, td_error)
        return time.perf_counter() - start

    def upkeep(self, number: int) -> None:
        """After cycle `number`, sort the ranks if a twentieth of the buffer has changed; not measured."""
        if self.sort is not None and number % max(1, self.capacity // 20 // (WRITTEN + BATCH)) == 0:
            self.sort()


def cycle_of(buffer: TensorDictReplayBuffer, written: int, batch_size: int = BATCH) -> Any:
    """The cycle as a function. Each call returns a new function, which compile_step needs."""
    updates = isinstance(buffer.sampler, PrioritizedSampler)

    def cycle(rows: TensorDict, td_error: Tensor) -> object:
        if written:
            buffer.extend(rows)
        batch = buffer.sample(batch_size)
        if updates:
            batch.set("td_error", td_error)
            buffer.update_tensordict_priority(batch)
        return batch

    return cycle


def build(
    name: str, make_sampler: Callable[[int], Any], ours: bool, compiled: bool, written: Sequence[int], data: TensorDict
) -> list[Case]:
    """Build a full buffer and its cases, one per number of rows in `written`.

    Raises:
        LeftOutError: see torchrl_per.
    """
    capacity, sampler = len(data), make_sampler(len(data))
    if ours:
        buffer = CompilableReplayBuffer(storage=CompilableTensorStorage(capacity), sampler=sampler)
    else:
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    fill(buffer, data)
    sort = sampler.sort if isinstance(sampler, RankBasedSampler) else None
    cases = []
    for count in written:
        cycle = cycle_of(buffer, count)
        contender = f"{'compiled' if compiled else 'eager'} {name}"
        cases.append(Case(contender, capacity, count, compile_step(cycle) if compiled else cycle, compiled, sort))
    return cases


def measure_capacities(names: Sequence[str], capacities: Sequence[int], cycles: int) -> tuple[list[Row], list[str]]:
    """Measure the cycles; all cases take turns.

    Compile times are those of the first call of each graph with an empty compiler cache. Another graph is compiled
    before, so that the process is warm.

    Args:
        names: contenders, from NAMES.
        capacities: capacities of the buffers.
        cycles: number of measured cycles per case.

    Returns:
        The rows, and a note for each skipped contender.
    """
    cases: list[Case] = []
    notes: dict[str, None] = {}
    for capacity in tqdm(sorted(capacities), desc="filling", leave=False):
        data = transitions(capacity)
        for (name, make_sampler, ours), compiled in itertools.product(SAMPLERS, (True, False)):
            if f"{'compiled' if compiled else 'eager'} {name}" not in names:
                continue
            try:
                cases += build(name, make_sampler, ours, compiled, (WRITTEN, 0), data)
            except LeftOutError as error:
                notes[f"eager {name} is skipped: {error}."] = None
    chunks = itertools.cycle([chunk.clone() for chunk in transitions(10 * EPISODE_LENGTH).split(WRITTEN)])

    to_compile = [case for case in cases if case.compiled]
    if to_compile:
        torch.compile(lambda x: x.sin().sum())(torch.ones(64))
    for case in tqdm(to_compile, desc="compiling", leave=False):
        with fresh_cache():
            case.compile_seconds = case.run(next(chunks), td_errors(BATCH))
    # An extra tenth of the cycles, at least 3, is the warm-up.
    for number in tqdm(range(-max(cycles // 10, 3), cycles), desc="capacity", leave=False):
        rows, td_error = next(chunks), td_errors(BATCH)
        for case in cases:
            seconds = case.run(rows, td_error)
            case.upkeep(number)
            if number >= 0:
                case.seconds.append(seconds)
    table = [
        Row(
            MEASUREMENT,
            case.capacity,
            BATCH,
            case.contender,
            1e6 * statistics.median(case.seconds),
            written=case.written,
            compile_seconds=case.compile_seconds,
        )
        for case in cases
    ]
    return sorted(table, key=lambda row: (-row.written, names.index(row.contender), row.capacity)), list(notes)
