"""Measures writes to full buffers, and replay cycles: sample a batch and update its priorities.

Cycles are also measured in the buffers of other libraries, the peers.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmark import buffers
from recipes.benchmark.results import Row
from recipes.benchmark.timing import Case, measure, require_time, skipping
from torchrl_replay_ext import compile_step

WRITES = (("add", 1), ("extend", 1), ("extend", 8), ("extend", 64))

Cycle = Callable[[int, np.ndarray], object]  # a function of the batch size and the TD errors


def columns(data: TensorDict) -> dict[str, np.ndarray]:
    """The transitions as NumPy arrays [N, ...], by the names of stable-baselines3."""
    return {
        "observations": data["observation"].numpy(),
        "actions": data["action"].numpy(),
        "next_observations": data["next", "observation"].numpy(),
        "rewards": data["next", "reward"].numpy(),
        "dones": data["next", "done"].numpy(),
    }


def cpprb_per(data: TensorDict) -> Cycle:
    """PER of cpprb."""
    shapes = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in columns(data).items()}
    buffer = import_module("cpprb").PrioritizedReplayBuffer(len(data), shapes, alpha=buffers.ALPHA)
    for chunk in data.split(buffers.FILL_CHUNK):
        buffer.add(**columns(chunk))
    for index in torch.arange(len(data)).split(buffers.FILL_CHUNK):
        buffer.update_priorities(index.numpy(), buffers.td_errors(len(index)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch = buffer.sample(batch_size, beta=buffers.BETA)
        buffer.update_priorities(batch["indexes"], td_error)
        return batch

    return cycle


def stable_baselines3_uniform(data: TensorDict) -> Cycle:
    """Uniform replay of stable-baselines3, which has no prioritized replay."""
    library, box = import_module("stable_baselines3.common.buffers"), import_module("gymnasium").spaces.Box
    buffer = library.ReplayBuffer(len(data), box(-np.inf, np.inf, (4,)), box(-1.0, 1.0, (1,)), device="cpu")
    for name, values in columns(data).items():
        target = getattr(buffer, name)
        target[:] = values.reshape(target.shape)
    buffer.full = True
    return lambda batch_size, _td_error: buffer.sample(batch_size)


# Name -> function that fills a buffer with transitions and returns its cycle.
PEERS = {"cpprb PER": cpprb_per, "stable-baselines3 uniform": stable_baselines3_uniform}


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


def written(buffer: TensorDictReplayBuffer, cycle: Callable[[Tensor], object]) -> Callable[..., object]:
    """The cycle after a write, as a function of the rows and the TD errors; without a write if the rows are None."""

    def step(rows: TensorDictBase | None, td_error: Tensor) -> object:
        if rows is not None:
            buffer.extend(rows)
        return cycle(td_error)

    return step


def writes(name: str, data: TensorDict) -> Iterable[Case]:
    """The writes to TorchRL's buffer with a sampler."""
    buffer, stream = buffers.full_buffer(name, buffers.EAGER, data), buffers.Stream()
    for kind, count in WRITES:
        row = Row("extend", kind, name, "TorchRL uniform", len(data), written=count)
        if kind == "add":
            yield Case(row, buffer.add, lambda: (stream.take(1)[0],))
        else:
            yield Case(row, buffer.extend, lambda count=count: (stream.take(count),))


def cycles(label: str, name: str, mode: str, data: TensorDict, batch_sizes: list[int]) -> Iterable[Case]:
    """The cycles of a sampler."""
    buffer, device = buffers.full_buffer(name, mode, data), data["observation"].device
    compiled = mode not in (buffers.EAGER, buffers.OURS)
    cudagraphs = mode == buffers.GRAPH if compiled else None
    for size in batch_sizes:
        row = Row("cycle", "", label, "TorchRL PER", len(data), size)
        step = make_cycle(buffer, size, updates=buffers.has_priorities(name), cudagraphs=cudagraphs)
        yield Case(row, step, lambda size=size: (buffers.td_errors(size, device),), compiled=compiled)
        if device.type == "cuda" and mode == buffers.EAGER:
            row, stream, step = (
                replace(row, case="after a write of 64", written=64),
                buffers.Stream(),
                written(buffer, step),
            )
            yield Case(
                row,
                step,
                lambda size=size, stream=stream: (stream.take(64).to(device), buffers.td_errors(size, device)),
            )


def peer_cycles(name: str, data: TensorDict, batch_sizes: list[int]) -> Iterable[Case]:
    """The cycles of another library."""
    require_time()
    cycle = PEERS[name](data)
    for size in batch_sizes:
        row = Row("cycle", "", name, "TorchRL PER", len(data), size)
        yield Case(row, cycle, lambda size=size: (size, buffers.td_errors(size).numpy()))


def measure_extend(names: list[str], options: Namespace) -> list[Row]:
    """Measure the writes, eager, to TorchRL's buffers. `names`: of samplers."""
    rows = []
    for capacity in options.capacities:
        data, cases = buffers.transitions(capacity), []
        for name in tqdm(names, desc="filling", leave=False):
            with skipping(name):
                cases += writes(name, data)
        rows += measure(cases, buffers.CPU, options.calls, f"extend, {capacity:,} slots")
    return rows


def measure_cycle(names: list[str], options: Namespace) -> list[Row]:
    """Measure the cycles; the compiled ones at the largest capacity. `names`: of contenders."""
    rows, device, sizes = [], options.device, options.batch_sizes
    for capacity in options.capacities:
        data, cases = buffers.transitions(capacity).to(device), []
        for label, (name, mode) in tqdm(buffers.contenders(device).items(), desc="filling", leave=False):
            fits = mode in (buffers.EAGER, buffers.OURS) or capacity == max(options.capacities)
            if fits and label in names:
                with skipping(label):
                    cases += cycles(label, name, mode, data, sizes)
        for name in [name for name in PEERS if name in names]:
            with skipping(name):
                cases += peer_cycles(name, data, sizes)
        rows += measure(cases, device, options.calls, f"cycle, {capacity:,} slots")
    return rows
