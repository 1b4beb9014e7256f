"""Times one cycle of replay, sample and update of the priorities, in a stock ``TensorDictReplayBuffer``.

Run it with ``python -m tests.benchmarks.test_replay_cycle`` or ``python -m pytest -m benchmark -s tests/benchmarks``.
All samplers run in turn, cycle by cycle and on one thread, so that they share whatever else the machine does. Numbers
are medians; times are printed and never asserted.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

from torchrl_replay_ext import ProportionalSampler, ReaPERSampler

BASELINE = "TorchRL PER"


@dataclass
class Contender:
    """A sampler in its buffer, and what its cycles took, in seconds."""

    name: str
    buffer: TensorDictReplayBuffer
    updates: bool = True
    sampled: list[float] = field(default_factory=list)
    updated: list[float] = field(default_factory=list)

    def cycle(self, td_error: torch.Tensor) -> None:
        start = time.perf_counter()
        batch = self.buffer.sample(len(td_error))
        middle = time.perf_counter()
        self.sampled.append(middle - start)
        if self.updates:
            batch.set("td_error", td_error)
            start = time.perf_counter()
            self.buffer.update_tensordict_priority(batch)
            self.updated.append(time.perf_counter() - start)

    def medians(self) -> tuple[float, float]:
        """Of a sample and of an update, in microseconds."""
        return (
            1e6 * statistics.median(self.sampled),
            1e6 * statistics.median(self.updated) if self.updates else 0.0,
        )

    def forget_times(self) -> None:
        self.sampled.clear()
        self.updated.clear()


def transitions(start: int, count: int, episode_length: int) -> TensorDict:
    """One environment's steps ``start``, ``start + 1``, ...; every episode has ``episode_length`` of them."""
    done = ((torch.arange(start, start + count) + 1) % episode_length == 0).unsqueeze(1)
    return TensorDict(
        {
            "observation": torch.randn(count, 4),
            "action": torch.zeros(count, 1),
            "next": {
                "observation": torch.randn(count, 4),
                "reward": torch.zeros(count, 1),
                "done": done,
                "terminated": done.clone(),
            },
        },
        [count],
    )


def filled(sampler, capacity: int, episode_length: int = 1000) -> TensorDictReplayBuffer:
    """A full buffer in which every transition has been updated once, with TD errors of about the size of one."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler)
    chunk = 100_000
    for start in range(0, capacity, chunk):
        buffer.extend(transitions(start, min(chunk, capacity - start), episode_length))
    if not isinstance(sampler, RandomSampler):
        for index in torch.arange(capacity).split(chunk):
            buffer.update_priority(index, torch.randn(len(index)).square())
    return buffer


def torchrl_per(capacity: int) -> PrioritizedSampler | None:
    """TorchRL's sampler, or None where its C++ extension does not load."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PrioritizedSampler(capacity, alpha=0.6, beta=0.4)
    except (ImportError, RuntimeError):
        return None


def contenders(capacity: int) -> list[Contender]:
    def make(name: str, sampler, **arguments) -> Contender:
        buffer = filled(sampler, capacity, **arguments)
        return Contender(name, buffer, updates=not isinstance(sampler, RandomSampler))

    per = torchrl_per(capacity)
    return [
        *([make(BASELINE, per)] if per is not None else []),
        make("uniform (sample only)", RandomSampler()),
        make("ProportionalSampler", ProportionalSampler(capacity)),
        make("ReaPER, episodes of 200", ReaPERSampler(capacity), episode_length=200),
        make("ReaPER, episodes of 1000", ReaPERSampler(capacity), episode_length=1000),
        make("ReaPER, episodes of 5000", ReaPERSampler(capacity), episode_length=5000),
    ]


def measure(entrants: list[Contender], batch_size: int, cycles: int) -> None:
    for number in range(-cycles // 10, cycles):
        if number == 0:
            # the warm-up does not count
            for entrant in entrants:
                entrant.forget_times()
        td_error = torch.randn(batch_size).square()
        for entrant in entrants:
            entrant.cycle(td_error)


def main(
    capacities: tuple[int, ...] = (100_000, 1_000_000),
    batch_sizes: tuple[int, ...] = (32, 256),
    cycles: int = 1000,
    write: Callable[[str], None] = print,
) -> None:
    """Prints one table."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write("")
        write(f"Microseconds for a sample and an update of its priorities; medians of {cycles} cycles, one thread.")
        write(f"torch {torch.__version__}")
        write(
            f"{'capacity':>9} {'batch':>5}  {'sampler':<25} {'sample':>7} {'update':>7} {'cycle':>7} {'ratio':>6} "
            f"{'bytes/slot':>10}"
        )
        available = True
        for capacity in capacities:
            entrants = contenders(capacity)
            for batch_size in batch_sizes:
                measure(entrants, batch_size, cycles)
                baseline = next((sum(e.medians()) for e in entrants if e.name == BASELINE), None)
                available = baseline is not None
                for entrant in entrants:
                    sample, update = entrant.medians()
                    ratio = f"{(sample + update) / baseline:.2f}" if baseline else "-"
                    sampler = entrant.buffer.sampler
                    memory = f"{sampler.nbytes() / capacity:.1f}" if isinstance(sampler, ReaPERSampler) else ""
                    write(
                        f"{capacity:>9} {batch_size:>5}  {entrant.name:<25} {sample:>7.0f} "
                        f"{f'{update:.0f}' if entrant.updates else '':>7} {sample + update:>7.0f} {ratio:>6} "
                        f"{memory:>10}"
                    )
        write(
            f"ratio: cycle over that of {BASELINE}."
            if available
            else f"{BASELINE} is left out: the C++ extension of TorchRL does not load next to this version of torch."
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.benchmark
def test_replay_cycle():
    main()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacities", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--cycles", type=int, default=1000)
    options = parser.parse_args()
    main(tuple(options.capacities), tuple(options.batch_sizes), options.cycles)
