"""Compiles the loops of all buffers ahead, for container images and for nodes that share a folder.

``python -m torchrl_replay_ext.kernels`` prints its progress and where the machine code is. The code is valid for this
release of the library and of Numba, and for the kind of processor. ``NUMBA_CACHE_DIR`` names another folder.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from torchrl_replay_ext import (
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    FrameStackStorage,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)

SIZE, BATCH = 40, 8


def rows(count: int) -> TensorDict:
    """Random transitions [count] with the entries that some sampler reads."""
    number = torch.arange(count)
    done = (number % 4 == 3).unsqueeze(1)
    # stacks of two frames, one step apart
    frames = torch.stack([number, number + 1], 1).to(torch.uint8).view(count, 2, 1, 1).expand(-1, -1, 2, 4)
    return TensorDict(
        {
            "observation": frames.contiguous(),
            "logits": torch.zeros(count, 2),
            "collector": {"traj_ids": number // 4},
            "is_init": (number % 4 == 0).unsqueeze(1),
            "next": {"observation": frames + 1, "done": done, "terminated": done, "truncated": torch.zeros_like(done)},
        },
        [count],
    )


def buffer(sampler: Any, storage: Any = None, **arguments: Any) -> TensorDictReplayBuffer:
    """A small buffer on the CPU."""
    storage = LazyTensorStorage(SIZE, device="cpu") if storage is None else storage
    return TensorDictReplayBuffer(
        storage=storage, sampler=sampler, batch_size=BATCH, priority_key="td_error", **arguments
    )


def tables(retention: Any, priority: Any) -> TensorDictReplayBuffer:
    """A buffer with an event table."""
    capacity = {"end": 9} | ({"default": 20} if retention == "pinned" else {})
    lists = EventTables([EventSpec("end", ("next", "done"), 3)], capacity=capacity, retention=retention)
    sampler = EventTableSampler(lists, eta={"default": 0.5, "end": 0.5}, min_size=1, priority=priority)
    return buffer(sampler, writer=EventTableWriter(lists))


def buffers() -> Iterator[tuple[str, TensorDictReplayBuffer]]:
    """Buffers that run all loops, and what they are called."""
    yield "ProportionalSampler", buffer(ProportionalSampler())
    yield "ProportionalSampler, maximum within the buffer", buffer(ProportionalSampler(max_priority_within_buffer=True))
    yield "RankBasedSampler", buffer(RankBasedSampler())
    yield "RankBasedSampler, piecewise", buffer(RankBasedSampler(segments="piecewise"))
    yield "ReaPERSampler", buffer(ReaPERSampler())
    yield "ReaPERSampler, two streams", buffer(ReaPERSampler(episodes=Episodes(num_streams=2), weight_norm="buffer"))
    yield "RecencySampler", buffer(RecencySampler())
    yield "TrajectoryRetraceSampler", buffer(TrajectoryRetraceSampler(slice_len=2))
    yield "EventTableSampler", tables("ring", None)
    yield "EventTableSampler, prioritized", tables("pinned", {"kind": "proportional"})
    yield "FrameStackStorage", buffer(ProportionalSampler(), FrameStackStorage(SIZE, frame_capacity=9 * SIZE))


def use(rb: TensorDictReplayBuffer) -> None:
    """Call all that runs kernels, except of failed writes, conditions with context, and an annealed alpha in graphs."""
    for _ in range(3):
        rb.extend(rows(16))
    batch = rb.sample()
    batch["td_error"] = torch.rand(BATCH)
    rb.update_tensordict_priority(batch)
    sampler: Any = rb.sampler
    sampler.stats()
    if hasattr(sampler, "alpha"):
        sampler.alpha = 0.5
    for table in getattr(sampler, "tables", {}).values():
        table.index()
    rb.load_state_dict(rb.state_dict())
    rb.empty()


def main() -> None:
    """Use each buffer once."""
    from torchrl_replay_ext.kernels import tree

    # this program says it itself
    logging.getLogger("torchrl_replay_ext").setLevel(logging.ERROR)
    for name, rb in buffers():
        begin = time.perf_counter()
        use(rb)
        print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
    print(f"The machine code is in {tree.draw.stats.cache_path or 'no folder: none can be written to'}.")


if __name__ == "__main__":
    main()
