"""How far a sharded replay buffer goes: measured throughput of a few shards, and a model for many hosts.

    python -m recipes.experiments.sharding
    python -m recipes.experiments.sharding --shards 1 2 4 8 --cycles 100
    python -m recipes.experiments.sharding --read recipes/results/sharding.csv

A learner in this process samples batches of 256 transitions with PER from 1, 2 and 4 shards, Ray actors on this host,
and returns TD errors. Transitions are small (CartPole, 50 bytes), or have images (4 frames of 84 x 84, 56 kB).

The model is fitted to the CPU time of the learner's process:

    seconds per batch = base + message · shards + byte · bytes of the batch

A batch is one message to each shard and one back. The learner's CPU limits the batches per second to the inverse; the
network limits them to bandwidth / bytes of the batch. Needs Ray (pip install "ray>=2.9").

sharding.csv has one row per number of shards and kind of transition. Each number is the least of ten blocks. Columns:

    shards, row_bytes     number of shards, bytes of a transition
    wall, cpu             seconds per batch: time, and CPU time of the learner's process
    write_wall            seconds to write 64 transitions
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from tensordict import TensorDict

from recipes.benchmark.buffers import Stream
from recipes.common.checked import positive
from recipes.common.files import markdown
from recipes.common.remote import runtime
from recipes.experiments.command_line import ExperimentParser
from torchrl_replay_ext import CompilableTensorStorage, ProportionalSampler, ShardedReplayBuffer

# of sharding.csv
COLUMNS = ("shards", "row_bytes", "wall", "cpu", "write_wall")
BATCH, WRITTEN, BLOCKS = 256, 64, 10
IMAGE = 4 * 84 * 84
HOSTS = 1, 4, 16, 64, 256
# bytes per second
NETWORKS = {"10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}


def take(stream: Stream, *, images: bool) -> TensorDict:
    """The next WRITTEN transitions."""
    rows = stream.take(WRITTEN)
    if images:
        rows["observation"] = rows["next", "observation"] = torch.zeros(WRITTEN, IMAGE, dtype=torch.uint8)
    return rows


def cycle(buffer: ShardedReplayBuffer) -> None:
    """Sample a batch and return TD errors."""
    batch = buffer.sample()
    batch["td_error"] = torch.rand(BATCH)
    buffer.update_tensordict_priority(batch)


def measure_calls(call: Callable[[], object], count: int) -> np.ndarray:
    """Seconds of a call, and CPU seconds of this process, [2].

    Each number is the least of BLOCKS means of `count` calls: other load on the host only makes calls slower.
    """
    blocks = []
    for _ in range(BLOCKS):
        before = np.array([time.perf_counter(), time.process_time()])
        for _ in range(count):
            call()
        blocks.append((np.array([time.perf_counter(), time.process_time()]) - before) / count)
    return np.min(blocks, axis=0)


def measure(num_shards: int, *, images: bool, cycles: int) -> dict[str, float]:
    """Measure one number of shards; a row of sharding.csv."""
    capacity, stream = 4096 if images else 65536, Stream()
    buffer = ShardedReplayBuffer(
        num_shards,
        storage=partial(CompilableTensorStorage, capacity // num_shards),
        sampler=ProportionalSampler,
        batch_size=BATCH,
        remote_config={"num_cpus": 0},
    )
    try:
        for _ in range(capacity // WRITTEN):
            buffer.extend(take(stream, images=images))
        measure_calls(partial(cycle, buffer), 2)
        wall, cpu = measure_calls(partial(cycle, buffer), cycles)
        write_wall, _ = measure_calls(lambda: buffer.extend(take(stream, images=images)), max(cycles // 4, 1))
    finally:
        buffer.shutdown()
    size = take(stream, images=images).bytes() // WRITTEN
    return dict(zip(COLUMNS, (num_shards, size, wall, cpu, write_wall), strict=True))


def fit(rows: Sequence[dict[str, float]]) -> np.ndarray:
    """Base, seconds per message and seconds per byte of the model, by least squares of relative errors."""
    cpu = np.array([row["cpu"] for row in rows])
    terms = np.array([[1.0, row["shards"], BATCH * row["row_bytes"]] for row in rows])
    return np.linalg.lstsq(terms / cpu[:, None], np.ones(len(cpu)), rcond=None)[0]


def report(rows: Sequence[dict[str, float]]) -> str:
    """The measured numbers and the model, as Markdown."""
    measured = []
    for row in rows:
        times = (f"{row[name] * 1e3:.2f}" for name in ("wall", "cpu", "write_wall"))
        measured.append((f"{row['shards']:.0f}", f"{row['row_bytes']:,.0f}", f"{1 / row['wall']:.0f}", *times))
    base, message, byte = fit(rows)
    model = []
    for size in sorted({row["row_bytes"] for row in rows}):
        for hosts in HOSTS:
            limit = 1 / (base + message * hosts + byte * BATCH * size)
            networks = (f"{speed / (BATCH * size):,.0f}" for speed in NETWORKS.values())
            model.append((hosts, f"{size:,.0f}", f"{limit:.0f}", *networks))
    times = ("batches per second", "ms per batch", "learner's CPU, ms", f"{WRITTEN} rows written, ms")
    return "\n".join(
        [
            markdown(("shards", "bytes of a transition", *times), measured),
            "",
            f"Fitted CPU time of the learner: {base * 1e3:.2f} ms per batch, {message * 1e3:.2f} ms per shard, "
            f"{byte * 1e9:.2f} ms per MB.",
            "",
            markdown(("hosts with one shard each", "bytes of a transition", "learner's limit", *NETWORKS), model),
            "",
            "Limits are in batches of 256 per second.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Run the command line; return the rows of sharding.csv."""
    parser = ExperimentParser("sharding", __doc__, plots=False)
    parser.add_argument("--shards", type=positive, nargs="+", default=[1, 2, 4], help="numbers of shards [1 2 4]")
    parser.add_argument("--cycles", type=positive, default=40, help="batches in each of ten blocks [%(default)s]")
    options = parser.parse_args(arguments)

    def rows() -> Iterator[dict[str, float]]:
        torch.set_num_threads(1)
        with runtime(None, 0, max(options.shards)):
            # not recorded: Ray is still starting processes
            measure(options.shards[0], images=False, cycles=options.cycles)
            for images in (False, True):
                for num_shards in options.shards:
                    row = measure(num_shards, images=images, cycles=options.cycles)
                    print(row, flush=True)
                    yield row

    return parser.run(options, dict.fromkeys(COLUMNS, float), rows, report, None)


if __name__ == "__main__":
    main()
