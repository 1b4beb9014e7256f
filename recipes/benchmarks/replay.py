"""Measures replay buffers of this package, TorchRL and peers. A cycle is a sample and the update of its priorities."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer
from tqdm import tqdm

from recipes.benchmarks.results import REPLAY_BASELINE, LeftOutError, Row, peer
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    compile_step,
)

ALPHA, BETA = 0.6, 0.4
EPISODE_LENGTH = 200
FILL_CHUNK = 100_000

Cycle = Callable[[Any], object]


@dataclass(frozen=True)
class Contender:
    """A replay buffer to measure.

    Args:
        name: name in the table.
        build: fills a buffer with transitions (see `transitions`) and returns a function that maps a batch size to the
            cycle. The cycle is called with TD errors.
        convert: converts TD errors, a tensor [B], to the type that the cycle takes; not measured. Default: identity.
    """

    name: str
    build: Callable[[TensorDict], Callable[[int], Cycle]]
    convert: Callable[[Tensor], Any] = lambda td_error: td_error


def transitions(count: int, episode_length: int = EPISODE_LENGTH) -> TensorDict:
    """`count` transitions of one environment, in episodes of `episode_length` steps (default: 200)."""
    done = ((torch.arange(count) + 1) % episode_length == 0).unsqueeze(1)
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


def td_errors(count: int, device: torch.device | None = None) -> Tensor:
    """Random positive TD errors [count] with mean 1."""
    return torch.randn(count, device=device).square()


def fill(buffer: TensorDictReplayBuffer, data: TensorDict) -> None:
    """Fill the buffer with `data` and update the priority of every transition once."""
    for chunk in data.split(FILL_CHUNK):
        buffer.extend(chunk.clone())
    if isinstance(buffer.sampler, PrioritizedSampler):
        for index in torch.arange(len(data), device=data.device).split(FILL_CHUNK):
            buffer.update_priority(index, td_errors(len(index), data.device))


def torchrl_cycle(buffer: TensorDictReplayBuffer, batch_size: int) -> Cycle:
    """The cycle of a TorchRL buffer or a subclass."""

    def sample(td_error: Tensor) -> object:
        return buffer.sample(batch_size)

    def sample_and_update(td_error: Tensor) -> object:
        batch = buffer.sample(batch_size)
        batch.set("td_error", td_error)
        buffer.update_tensordict_priority(batch)
        return batch

    return sample_and_update if isinstance(buffer.sampler, PrioritizedSampler) else sample


def compiled_cycle(buffer: TensorDictReplayBuffer, batch_size: int, *, checked: bool) -> Cycle:
    """`torchrl_cycle` as one graph. If `checked`, torch.compile checks its guards at each call."""
    cycle: Any = torchrl_cycle(buffer, batch_size)
    if not checked:
        return compile_step(cycle)
    # A new code object: torch caches graphs per code object and would have to choose among them at every call.
    cycle.__code__ = cycle.__code__.replace()
    return torch.compile(cycle, fullgraph=True)


def eager(make_sampler: Callable[[int], Any]) -> Callable[[TensorDict], Callable[[int], Cycle]]:
    """A contender: a sampler in a stock buffer."""

    def build(data: TensorDict) -> Callable[[int], Cycle]:
        sampler = make_sampler(len(data))
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(len(data)), sampler=sampler, writer=writer_for(sampler)
        )
        fill(buffer, data)
        return lambda batch_size: torchrl_cycle(buffer, batch_size)

    return build


def compiled(
    make_sampler: Callable[[int], Any], *, checked: bool = False
) -> Callable[[TensorDict], Callable[[int], Cycle]]:
    """A contender: a sampler in a compilable buffer, with a compiled cycle."""

    def build(data: TensorDict) -> Callable[[int], Cycle]:
        sampler = make_sampler(len(data))
        buffer = CompilableReplayBuffer(
            storage=CompilableTensorStorage(len(data)), sampler=sampler, writer=writer_for(sampler)
        )
        fill(buffer, data)
        return lambda batch_size: compiled_cycle(buffer, batch_size, checked=checked)

    return build


def torchrl_per(capacity: int) -> PrioritizedSampler:
    """TorchRL's PER.

    Raises:
        LeftOutError: if TorchRL's C++ extension cannot be loaded with this version of torch.
    """
    try:
        return PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA)
    except (ImportError, RuntimeError) as error:
        raise LeftOutError("the C++ extension of TorchRL cannot be loaded with this version of torch") from error


def proportional(capacity: int) -> ProportionalSampler:
    """PER of this package."""
    return ProportionalSampler(capacity, alpha=ALPHA, beta=BETA)


def event_tables(capacity: int) -> EventTableSampler:
    """Event tables of this package: two events, uniform draws inside the tables."""
    specs = [EventSpec("end", ("next", "terminated"), 50), EventSpec("goal", ("next", "done"), 100)]
    tables = EventTables(specs, {"end": capacity // 5, "goal": capacity // 10})
    return EventTableSampler(tables, eta={"default": 0.5, "end": 0.2, "goal": 0.3})


def writer_for(sampler: Any) -> EventTableWriter | None:
    """The writer that a sampler needs; None: the buffer's default."""
    return EventTableWriter(sampler.tables) if isinstance(sampler, EventTableSampler) else None


def columns(data: TensorDict) -> dict[str, np.ndarray]:
    """The transitions as NumPy arrays [N, ...]."""
    return {
        "obs": data["observation"].numpy(),
        "act": data["action"].numpy(),
        "next_obs": data["next", "observation"].numpy(),
        "rew": data["next", "reward"].numpy(),
        "done": data["next", "done"].numpy(),
        "terminated": data["next", "terminated"].numpy(),
    }


def cpprb_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of cpprb."""
    cpprb = peer("cpprb")
    shapes = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in columns(data).items()}
    buffer = cpprb.PrioritizedReplayBuffer(len(data), shapes, alpha=ALPHA)
    for chunk in data.split(FILL_CHUNK):
        buffer.add(**columns(chunk))
    for index in torch.arange(len(data)).split(FILL_CHUNK):
        buffer.update_priorities(index.numpy(), td_errors(len(index)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch = buffer.sample(batch_size, beta=BETA)
        buffer.update_priorities(batch["indexes"], td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def tianshou_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of tianshou."""
    tianshou = peer("tianshou.data")
    arrays = columns(data)
    filled = tianshou.ReplayBuffer.from_data(
        obs=arrays["obs"],
        act=arrays["act"],
        rew=arrays["rew"][:, 0],
        terminated=arrays["terminated"][:, 0],
        truncated=np.zeros(len(data), dtype=bool),
        done=arrays["done"][:, 0],
        obs_next=arrays["next_obs"],
    )
    buffer = tianshou.PrioritizedReplayBuffer(len(data), alpha=ALPHA, beta=BETA)
    buffer.update(filled)
    buffer.update_weight(np.arange(len(data)), td_errors(len(data)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch, index = buffer.sample(batch_size)
        buffer.update_weight(index, td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def flashbax_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of flashbax, compiled by JAX with donated state."""
    # JAX reads these when it is imported: one thread, on the CPU.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    jax, flashbax = peer("jax"), peer("flashbax")

    def make(batch_size: int) -> Any:
        return flashbax.make_prioritised_flat_buffer(
            max_length=len(data),
            min_length=1,
            sample_batch_size=batch_size,
            add_sequences=True,
            priority_exponent=ALPHA,
        )

    buffer = make(1)
    # flashbax samples pairs of successive steps, so the next observation is not stored.
    arrays = {key: value for key, value in columns(data).items() if key != "next_obs"}
    state = buffer.init({key: value[0] for key, value in arrays.items()})
    add = jax.jit(buffer.add, donate_argnums=0)
    set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
    for start in range(0, len(data), FILL_CHUNK):
        state = add(state, {key: value[start : start + FILL_CHUNK] for key, value in arrays.items()})
    # The newest step has no successor; its priority stays 0.
    for index in torch.arange(len(data) - 1, dtype=torch.int32).split(FILL_CHUNK):
        state = set_priorities(state, index.numpy(), td_errors(len(index)).numpy())
    key = jax.random.key(0)

    def cycle_of(batch_size: int) -> Cycle:
        sized = make(batch_size)

        @jax.jit
        def sample(state: Any, key: Any) -> Any:
            key, draw = jax.random.split(key)
            return sized.sample(state, draw), key

        # Two graphs: in a single graph, XLA would copy the whole tree twice per cycle.
        def cycle(td_error: Any) -> object:
            nonlocal state, key
            batch, key = sample(state, key)
            state = set_priorities(state, batch.indices, td_error)
            return jax.block_until_ready((state, batch))[1]

        return cycle

    return cycle_of


def to_jax(td_error: Tensor) -> Any:
    """TD errors as a JAX array."""
    return peer("jax.numpy").asarray(td_error.numpy())


def stable_baselines3_uniform(data: TensorDict) -> Callable[[int], Cycle]:
    """Uniform replay of stable-baselines3, which has no prioritized replay."""
    buffers = peer("stable_baselines3.common.buffers")
    arrays = columns(data)
    box = gymnasium.spaces.Box
    buffer = buffers.ReplayBuffer(len(data), box(-np.inf, np.inf, (4,)), box(-1.0, 1.0, (1,)), device="cpu")
    buffer.observations[:] = arrays["obs"][:, None]
    buffer.next_observations[:] = arrays["next_obs"][:, None]
    buffer.actions[:] = arrays["act"][:, None]
    buffer.rewards[:] = arrays["rew"]
    buffer.dones[:] = arrays["done"]
    buffer.full = True
    return lambda batch_size: lambda td_error: buffer.sample(batch_size)


REPLAY = (
    Contender(REPLAY_BASELINE, eager(torchrl_per)),
    Contender("torchrl RandomSampler (sample only)", eager(lambda capacity: RandomSampler())),
    Contender("ProportionalSampler", eager(proportional)),
    Contender("RankBasedSampler", eager(RankBasedSampler)),
    Contender("ReaPERSampler", eager(ReaPERSampler)),
    Contender("EventTableSampler (sample only)", eager(event_tables)),
    Contender("compiled ProportionalSampler, torch.compile", compiled(proportional, checked=True)),
    Contender("compiled ProportionalSampler", compiled(proportional)),
    Contender("compiled RankBasedSampler", compiled(RankBasedSampler)),
    Contender("compiled ReaPERSampler", compiled(ReaPERSampler)),
    Contender("compiled RandomSampler (sample only)", compiled(lambda capacity: RandomSampler())),
    Contender("compiled EventTableSampler (sample only)", compiled(event_tables)),
    Contender("cpprb PER", cpprb_per, Tensor.numpy),
    Contender("tianshou PER", tianshou_per, Tensor.numpy),
    Contender("flashbax PER", flashbax_per, to_jax),
    Contender("stable-baselines3 uniform (sample only)", stable_baselines3_uniform),
)


def measure_replay(
    contenders: Sequence[Contender], capacity: int, batch_sizes: Sequence[int], cycles: int
) -> tuple[list[Row], list[str]]:
    """Measure the cycles; all contenders take turns.

    Args:
        contenders: the buffers to measure.
        capacity: capacity of the full buffers.
        batch_sizes: batch sizes of the samples.
        cycles: number of measured cycles per contender and batch size.

    Returns:
        The rows, and a note for each skipped contender.
    """
    data = transitions(capacity)
    notes, entrants, rows = [], [], []
    for contender in tqdm(contenders, desc="filling", leave=False):
        try:
            entrants.append((contender, contender.build(data)))
        except LeftOutError as error:
            notes.append(f"{contender.name} is skipped: {error}.")
    for batch_size in batch_sizes:
        runs: list[tuple[Contender, Cycle, list[float]]] = [(c, cycle_of(batch_size), []) for c, cycle_of in entrants]
        for contender, cycle, _ in tqdm(runs, desc=f"compiling, batch {batch_size}", leave=False):
            cycle(contender.convert(td_errors(batch_size)))
        # An extra tenth of the cycles, at least 3, is the warm-up.
        for number in tqdm(range(-max(cycles // 10, 3), cycles), desc=f"replay, batch {batch_size}", leave=False):
            td_error = td_errors(batch_size)
            for contender, cycle, seconds in runs:
                converted = contender.convert(td_error)
                start = time.perf_counter()
                cycle(converted)
                stop = time.perf_counter()
                if number >= 0:
                    seconds.append(stop - start)
        rows += [
            Row("replay", capacity, batch_size, contender.name, 1e6 * statistics.median(seconds))
            for contender, _, seconds in runs
        ]
    return rows, notes
