"""The data, samplers and full buffers that the benchmark measures."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

from recipes.benchmark.results import LeftOutError
from recipes.benchmark.timing import require_time
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
    Threshold,
    TrajectoryRetraceSampler,
)

ALPHA, BETA = 0.6, 0.4
EPISODE_LENGTH, EVENT_INTERVAL = 200, 1000  # steps
HISTORY, RARE_SHARE = 50, 50  # rows stored per event; the table of the event has 1 / RARE_SHARE of the slots
SLICE_LENGTH = 8
FILL_CHUNK = 100_000
FILLING = 0.5  # share of the time for a measurement, after which no more buffers are filled
CPU = torch.device("cpu")


def transitions(count: int, start: int = 0) -> TensorDict:
    """`count` transitions of one environment from step `start`: episodes of 200 steps, reward 1 every 1,000 steps."""
    step = torch.arange(start, start + count)
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
    """Transitions of one environment that follow each other, in any portions.

    Args:
        device: device of the transitions.
    """

    def __init__(self, device: torch.device = CPU):
        self._data = transitions(8 * EVENT_INTERVAL).to(device)
        self._position = 0

    def take(self, count: int) -> TensorDict:
        """The next `count` transitions."""
        steps = (self._position + torch.arange(count, device=self._data.device)) % len(self._data)
        self._position += count
        return self._data[steps]


def td_errors(count: int, device: torch.device | None = None) -> Tensor:
    """Random positive TD errors [count] with mean 1."""
    return torch.randn(count, device=device).square()


def torchrl_per(capacity: int, device: torch.device | str) -> PrioritizedSampler:
    """TorchRL's PER, with its trees on `device`.

    Raises:
        LeftOutError: if TorchRL's extension cannot be loaded, or was built without CUDA.
    """
    try:
        return PrioritizedSampler(capacity, alpha=ALPHA, beta=BETA, device=device)
    except (ImportError, RuntimeError) as error:
        or_else = "" if str(device) == "cpu" else ", or was built without CUDA"
        raise LeftOutError(f"the extension of TorchRL cannot be loaded with this version of torch{or_else}") from error


def torchrl_per_on_device(capacity: int, device: torch.device) -> PrioritizedSampler:
    """TorchRL's PER with its trees on the GPU.

    Raises:
        LeftOutError: see torchrl_per; also without a GPU.
    """
    if device.type != "cuda":
        raise LeftOutError(f"TorchRL has trees for CUDA and for the CPU only, and the device is {device}")
    return torchrl_per(capacity, device)


def event_tables(capacity: int, retention: str) -> EventTableSampler:
    """Event tables: one rare event, half of the batch from its table."""
    rare = max(HISTORY, capacity // RARE_SHARE)
    sizes = {"rare": rare} | ({"default": capacity - rare} if retention == "pinned" else {})
    spec = EventSpec("rare", Threshold(("next", "reward"), ">", 0.5), HISTORY)
    tables = EventTables([spec], sizes, retention=retention)  # pyright: ignore[reportArgumentType]: a literal
    return EventTableSampler(tables, eta={"default": 0.5, "rare": 0.5})


# Name -> function of capacity, device and the kind of TD errors ("squared" or "absolute") that makes the sampler.
SAMPLERS: dict[str, Callable[[int, torch.device, Any], Any]] = {
    "TorchRL uniform": lambda capacity, device, kind: RandomSampler(),
    "TorchRL PER": lambda capacity, device, kind: torchrl_per(capacity, "cpu"),
    "TorchRL PER, CUDA trees": lambda capacity, device, kind: torchrl_per_on_device(capacity, device),
    "uniform": lambda capacity, device, kind: RandomSampler(),
    "PER": lambda capacity, device, kind: ProportionalSampler(capacity, alpha=ALPHA, beta=BETA, td_error=kind),
    # does not sort by itself: the sorts are timed separately
    "rank-based PER": lambda capacity, device, kind: RankBasedSampler(capacity, td_error=kind),
    "ReaPER": lambda capacity, device, kind: ReaPERSampler(capacity, td_error=kind),
    "event tables, ring": lambda capacity, device, kind: event_tables(capacity, "ring"),
    "event tables, pinned": lambda capacity, device, kind: event_tables(capacity, "pinned"),
    "slices": lambda capacity, device, kind: TrajectoryRetraceSampler(
        capacity, slice_len=SLICE_LENGTH, behaviour_keys=()
    ),
}
OURS = tuple(name for name in SAMPLERS if not name.startswith("TorchRL"))


def make_buffer(
    name: str,
    capacity: int,
    device: torch.device = CPU,
    *,
    compilable: bool,
    td_error: str = "squared",
    **arguments: Any,
) -> Any:
    """An empty buffer with the sampler of this name and its storage on the device.

    Raises:
        LeftOutError: see torchrl_per; also if no time is left.
    """
    require_time(FILLING)
    sampler = SAMPLERS[name](capacity, device, td_error)
    if isinstance(sampler, EventTableSampler):
        arguments["writer"] = EventTableWriter(sampler.tables)
    if compilable:
        storage = CompilableTensorStorage(capacity, device=device)
        return CompilableReplayBuffer(storage=storage, sampler=sampler, **arguments)
    return TensorDictReplayBuffer(storage=LazyTensorStorage(capacity, device=device), sampler=sampler, **arguments)


def has_priorities(buffer: TensorDictReplayBuffer) -> bool:
    """Whether a cycle updates priorities: neither for uniform replay nor for event tables and slices without any."""
    sampler = buffer.sampler
    without = isinstance(sampler, (EventTableSampler, TrajectoryRetraceSampler))
    return isinstance(sampler, PrioritizedSampler) and not without


def fill(buffer: TensorDictReplayBuffer, data: TensorDict) -> None:
    """Fill the buffer with `data`, overwrite a tenth of it, and update the priority of every transition once."""
    for chunk in (*data.split(FILL_CHUNK), *data.split(max(1, len(data) // 10))[:1]):
        buffer.extend(chunk.clone())
    if has_priorities(buffer):
        for index in torch.arange(len(data), device=data.device).split(FILL_CHUNK):
            buffer.update_priority(index, td_errors(len(index), data.device))
