"""The data, samplers and full buffers that the benchmark measures."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

import torchrl_replay_ext as ext
from recipes.benchmark.timing import require_time

ALPHA, BETA = 0.6, 0.4
EPISODE_LENGTH, EVENT_INTERVAL = 200, 1000  # steps
HISTORY, RARE_SHARE = 50, 50  # rows stored per event; the table of the event has 1 / RARE_SHARE of the slots
SLICE_LENGTH = 8
FILL_CHUNK = 100_000
CPU = torch.device("cpu")

# Ways to run a sampler: eager code in TorchRL's buffer; eager code in ours; a compiled graph; this as a CUDA graph.
EAGER, OURS, COMPILED, GRAPH = "eager", "CompilableReplayBuffer", "compiled", "CUDA graph"


def modes(name: str, device: torch.device) -> tuple[str, ...]:
    """The ways to run a sampler on the device. TorchRL's samplers run eager in TorchRL's buffer only."""
    if name.startswith("TorchRL"):
        return (EAGER,)
    eager = (OURS,) if name == "uniform" else (EAGER, OURS)  # TorchRL uniform is the other one
    return (*eager, GRAPH if device.type == "cuda" else COMPILED)


def contender(mode: str, name: str) -> str:
    """The name in the tables."""
    return {EAGER: name, OURS: f"{name}, {OURS}"}.get(mode, f"{mode} {name}")


def transitions(count: int) -> TensorDict:
    """`count` transitions of one environment: episodes of 200 steps, reward 1 every 1,000 steps."""
    step = torch.arange(count)
    done = ((step + 1) % EPISODE_LENGTH == 0).unsqueeze(1)
    return TensorDict(
        {
            "observation": torch.randn(count, 4),
            "action": torch.zeros(count, 1),
            "collector": {"traj_ids": step // EPISODE_LENGTH},
            "next": {
                "observation": torch.randn(count, 4),
                "reward": ((step + 1) % EVENT_INTERVAL == 0).float().unsqueeze(1),
                "done": done,
                "terminated": done.clone(),
            },
        },
        [count],
    )


class Stream:
    """Transitions of one environment that follow each other, in any portions."""

    def __init__(self):
        self._data = transitions(8 * EVENT_INTERVAL)
        self._position = 0

    def take(self, count: int) -> TensorDict:
        """The next `count` transitions."""
        steps = (self._position + torch.arange(count)) % len(self._data)
        self._position += count
        return cast(TensorDict, self._data[steps])


def td_errors(count: int, device: torch.device = CPU) -> Tensor:
    """Random positive TD errors [count] with mean 1."""
    return torch.randn(count, device=device).square()


def event_tables(capacity: int, retention: Any) -> ext.EventTableSampler:
    """Event tables: one rare event, half of the batch from its table."""
    rare = max(HISTORY, capacity // RARE_SHARE)
    sizes = {"rare": rare} | ({"default": capacity - rare} if retention == "pinned" else {})
    spec = ext.EventSpec("rare", ext.Threshold(("next", "reward"), ">", 0.5), HISTORY)
    return ext.EventTableSampler(ext.EventTables([spec], sizes, retention=retention), eta={"default": 0.5, "rare": 0.5})


# Name -> function of the capacity that makes the sampler.
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "TorchRL uniform": lambda capacity: RandomSampler(),
    "TorchRL PER": partial(PrioritizedSampler, alpha=ALPHA, beta=BETA),
    "TorchRL PER, CUDA trees": partial(PrioritizedSampler, alpha=ALPHA, beta=BETA, device="cuda"),
    "uniform": lambda capacity: RandomSampler(),
    "PER": partial(ext.ProportionalSampler, alpha=ALPHA, beta=BETA, td_error="squared"),
    "ReaPER": partial(ext.ReaPERSampler, td_error="squared"),
    "rank-based PER": partial(ext.RankBasedSampler, td_error="squared"),
    "event tables, ring": partial(event_tables, retention="ring"),
    "event tables, pinned": partial(event_tables, retention="pinned"),
    "slices": partial(ext.TrajectoryRetraceSampler, slice_len=SLICE_LENGTH, behaviour_keys=()),
}


def contenders(device: torch.device) -> dict[str, tuple[str, str]]:
    """The samplers that run on the device with the ways to run them, by the names in the tables."""
    names = [name for name in SAMPLERS if device.type == "cuda" or not name.endswith("CUDA trees")]
    return {contender(mode, name): (name, mode) for name in names for mode in modes(name, device)}


def has_priorities(name: str) -> bool:
    """Whether a cycle updates priorities: not for uniform draws, and event tables and slices without any."""
    return "PER" in name


def full_buffer(name: str, mode: str, data: TensorDict, **arguments: Any) -> Any:
    """A buffer with the sampler of this name, on the device of `data`, full of `data`.

    A tenth of the buffer has been overwritten. The priority of every transition was updated once.

    Raises:
        TimeoutError: if the time is over.
    """
    require_time()
    capacity, device = len(data), data["observation"].device
    sampler = SAMPLERS[name](capacity)
    if isinstance(sampler, ext.EventTableSampler):
        arguments["writer"] = ext.EventTableWriter(sampler.tables)
    if mode == EAGER:
        storage = LazyTensorStorage(capacity, device=device)
        buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, **arguments)
    else:
        storage = ext.CompilableTensorStorage(capacity, device=device)
        buffer = ext.CompilableReplayBuffer(storage=storage, sampler=sampler, **arguments)
    for chunk in (*data.split(FILL_CHUNK), *data.split(max(1, len(data) // 10))[:1]):
        buffer.extend(chunk.clone())
    if has_priorities(name):
        for index in torch.arange(len(data), device=device).split(FILL_CHUNK):
            buffer.update_priority(index, td_errors(len(index), device))
    return buffer
