"""Measures draws of slices with a write before each: does their time grow with the buffer?"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler

from recipes.benchmark import buffers
from recipes.benchmark.results import Row
from recipes.benchmark.timing import Case, measure, require_time, skipping
from torchrl_replay_ext import TrajectoryRetraceSampler

COUNT, LENGTH = 256, 4  # slices per draw, steps per slice
WRITTEN = 8  # rows before each draw

_torchrl = partial(SliceSampler, num_slices=COUNT, traj_key=("collector", "traj_ids"))
# Name -> function that makes the sampler.
SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "TorchRL SliceSampler": _torchrl,
    "TorchRL SliceSampler, cached values": partial(_torchrl, cache_values=True),
    "slices": partial(TrajectoryRetraceSampler, slice_len=LENGTH, behaviour_keys=()),
}


def make_case(name: str, data: TensorDict) -> Case:
    """A write and a draw, with a full buffer."""
    require_time()
    storage, stream = LazyTensorStorage(len(data)), buffers.Stream()
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SAMPLERS[name](), batch_size=COUNT * LENGTH)
    for chunk in data.split(buffers.FILL_CHUNK):
        buffer.extend(chunk.clone())

    def step(rows: TensorDict) -> object:
        buffer.extend(rows)
        return buffer.sample()

    row = Row("slices", "", name, "TorchRL SliceSampler", len(data), COUNT * LENGTH, WRITTEN)
    return Case(row, step, lambda: (stream.take(WRITTEN),))


def measure_slices(chosen: list[str], options: Namespace) -> list[Row]:
    """Measure the draws. `chosen`: from SAMPLERS."""
    rows = []
    for capacity in options.slice_capacities:
        data, cases = buffers.transitions(capacity), []
        for name in chosen:
            with skipping(f"{name} (slices)"):
                cases.append(make_case(name, data))
        rows += measure(cases, buffers.CPU, options.calls, f"slices, {capacity:,} slots")
    return rows
