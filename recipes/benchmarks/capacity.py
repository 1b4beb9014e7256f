"""How the time of a cycle grows with the capacity: writes, a sample, and the update of its priorities, on full buffers.

A cycle is `extend(8) + sample(32) + update`, or the same without extend; of uniform replay, which has no priorities,
there is no update. Samplers of this package are in a CompilableReplayBuffer, eager and as one graph; TorchRL's are in a
stock buffer, eager. Ranks are sorted between the cycles, where that is not timed.
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
    """Rank-based PER that leaves it to this benchmark when ranks are sorted."""
    return RankBasedSampler(capacity, stale_fraction=1.0)


def uniform(capacity: int) -> RandomSampler:
    """Uniform replay, of any capacity."""
    return RandomSampler()


# Name, sampler, and whether it is in a buffer of this package.
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
    """One cycle of one buffer, and the times that were measured.

    Args:
        contender: name of the sampler, and whether the cycle is compiled.
        capacity: of the buffer, which is full.
        written: rows that a cycle writes; 0: it does not write.
        cycle: called with the rows to write and the TD errors [BATCH] of the sample.
        compiled: whether the first call compiles.
        sort: sorts the ranks; None: there are none.
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
        """Runs the cycle; gives its seconds."""
        start = time.perf_counter()
        self.cycle(rows, td_error)
        return time.perf_counter() - start

    def upkeep(self, number: int) -> None:
        """What is due after cycle `number` and is not timed: the sort, after changes of a twentieth of the buffer."""
        if self.sort is not None and number % max(1, self.capacity // 20 // (WRITTEN + BATCH)) == 0:
            self.sort()


def cycle_of(buffer: TensorDictReplayBuffer, written: int) -> Any:
    """The cycle as a function; each call of this gives one with its own code, as compile_step needs it."""
    updates = isinstance(buffer.sampler, PrioritizedSampler)

    def cycle(rows: TensorDict, td_error: Tensor) -> object:
        if written:
            buffer.extend(rows)
        batch = buffer.sample(BATCH)
        if updates:
            batch.set("td_error", td_error)
            buffer.update_tensordict_priority(batch)
        return batch

    return cycle


def build(
    name: str, make_sampler: Callable[[int], Any], ours: bool, compiled: bool, written: Sequence[int], data: TensorDict
) -> list[Case]:
    """The cases of one full buffer.

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
    """Times the cycles, all cases in turn.

    Compile times are cold: the first call of each graph, with an empty cache of the compiler, but after another graph
    has been compiled in this process.

    Args:
        names: of NAMES.
        capacities: of the buffers.
        cycles: timed ones.

    Returns:
        The rows, and a note on each contender that was skipped.
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
                notes[f"eager {name} is left out: {error}."] = None
    chunks = itertools.cycle([chunk.clone() for chunk in transitions(10 * EPISODE_LENGTH).split(WRITTEN)])

    to_compile = [case for case in cases if case.compiled]
    if to_compile:
        torch.compile(lambda x: x.sin().sum())(torch.ones(64))
    for case in tqdm(to_compile, desc="compiling", leave=False):
        with fresh_cache():
            case.compile_seconds = case.run(next(chunks), td_errors(BATCH))
    # A tenth of the cycles more, for the warm-up.
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
