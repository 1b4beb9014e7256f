"""Measures writes to full buffers, and replay cycles: sample a batch and update its priorities."""

from argparse import Namespace
from collections.abc import Callable, Iterable

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmark.buffers import (
    CPU,
    EAGER,
    OURS,
    Stream,
    contender,
    full_buffer,
    has_priorities,
    modes,
    samplers,
    td_errors,
    transitions,
)
from recipes.benchmark.peers import PEERS
from recipes.benchmark.results import Row
from recipes.benchmark.timing import Case, in_shares, measure, require_time, skipping
from torchrl_replay_ext import compile_step

WRITES = (("add", 1), ("extend", 1), ("extend", 8), ("extend", 64))


def extend_names(device: torch.device) -> list[str]:
    """The contenders of the writes."""
    return [name for name in samplers(device) if name != "uniform"]


def cycle_names(device: torch.device) -> list[str]:
    """The contenders of the cycles."""
    ours = [contender(mode, name) for name in samplers(device) for mode in modes(name, device)]
    return ours + (list(PEERS) if device.type == "cpu" else [])


def make_cycle(
    buffer: TensorDictReplayBuffer, batch_size: int, *, updates: bool, cudagraphs: bool | None = None
) -> Callable[[Tensor], object]:
    """The cycle as a function of the TD errors [batch_size].

    Args:
        buffer: the buffer.
        batch_size: batch size of the sample.
        updates: whether the buffer has priorities to update.
        cudagraphs: whether the compiled cycle is replayed as a CUDA graph. Default: None, not compiled.
    """

    def cycle(td_error: Tensor) -> object:
        batch = buffer.sample(batch_size)
        if updates:
            batch.set("td_error", td_error)
            buffer.update_tensordict_priority(batch)
        return batch

    step = cycle if cudagraphs is None else compile_step(cycle, cudagraphs=cudagraphs)
    return torch.no_grad()(step)


def measure_extend(names: list[str], options: Namespace) -> list[Row]:
    """Measure the writes, eager, to TorchRL's buffers. `names`: see extend_names."""

    def cases(data: TensorDict) -> Iterable[Case]:
        for name in tqdm(names, desc="filling", leave=False):
            with skipping(name):
                buffer, stream = full_buffer(name, EAGER, data), Stream()
                for kind, count in WRITES:
                    row = Row("extend", kind, name, "TorchRL uniform", len(data), written=count)
                    if kind == "add":
                        yield Case(row, buffer.add, lambda stream=stream: (stream.take(1)[0],))
                    else:
                        yield Case(row, buffer.extend, lambda stream=stream, count=count: (stream.take(count),))

    return _measure(cases, "extend", options)


def measure_cycle(names: list[str], options: Namespace) -> list[Row]:
    """Measure the cycles; the compiled ones at the largest capacity. `names`: see cycle_names."""
    device = options.device

    def cases(data: TensorDict) -> Iterable[Case]:
        for name in tqdm(samplers(device), desc="filling", leave=False):
            chosen = [mode for mode in modes(name, device) if contender(mode, name) in names]
            for mode in chosen:
                compiled = mode not in (EAGER, OURS)
                if compiled and len(data) < max(options.capacities):
                    continue
                with skipping(contender(mode, name)):
                    buffer = full_buffer(name, mode, data)
                    for size in options.batch_sizes:
                        row = Row("cycle", "", contender(mode, name), "TorchRL PER", len(data), size)
                        graphs = mode == "CUDA graph" if compiled else None
                        step = make_cycle(buffer, size, updates=has_priorities(name), cudagraphs=graphs)
                        yield Case(row, step, lambda size=size: (td_errors(size, device),), compiled=compiled)
        for name in (name for name in PEERS if name in names):
            with skipping(name):
                require_time()
                cycle = PEERS[name](data)
                for size in options.batch_sizes:
                    row = Row("cycle", "", name, "TorchRL PER", len(data), size)
                    yield Case(row, cycle, lambda size=size: (size, td_errors(size).numpy()))

    return _measure(cases, "cycle", options)


def _measure(cases: Callable[[TensorDict], Iterable[Case]], label: str, options: Namespace) -> list[Row]:
    rows = []
    for capacity in in_shares(options.capacities):
        label_of = f"{label}, {capacity:,} slots"
        with skipping(label_of):
            data = transitions(capacity).to(options.device if label == "cycle" else CPU)
            rows += measure(list(cases(data)), data["observation"].device, options.calls, label_of)
    return rows
