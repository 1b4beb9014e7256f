"""Sharded buffers in this process, single buffers with the same content, and comparisons of both."""

import copy
from functools import partial

import torch
from torchrl.data.replay_buffers import RandomSampler

from tests.data import rows
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    ReaPERSampler,
    ShardedReplayBuffer,
    Threshold,
    TrajectoryRetraceSampler,
)

STREAMS, BATCH = 4, 64


def tables(retention="ring"):
    capacity = {"high": 64} | ({"default": 192} if retention == "pinned" else {})
    return EventTables([EventSpec("high", Threshold("value", ">", 0.9), history=3)], capacity, retention=retention)


def event_tables(retention="ring", **arguments):
    return {
        "sampler": partial(
            EventTableSampler, tables(retention), eta={"default": 0.6, "high": 0.4}, min_size=8, **arguments
        ),
        "writer": partial(EventTableWriter, tables(retention)),
    }


slices = partial(TrajectoryRetraceSampler, slice_len=4, episodes=Episodes(num_streams=STREAMS), behaviour_keys=())
PARTS = {
    "uniform": {"sampler": RandomSampler},
    "proportional": {"sampler": partial(ProportionalSampler, alpha=0.7, beta=0.5)},
    "stratified": {"sampler": partial(ProportionalSampler, alpha=0.7, beta=0.5, stratified=True)},
    "reaper": {
        "sampler": partial(ReaPERSampler, alpha=0.7, beta=0.5, omega=0.6, episodes=Episodes(num_streams=STREAMS))
    },
    "reaper, ongoing": {
        "sampler": partial(
            ReaPERSampler, beta=0.5, omega=1.0, episodes=Episodes(num_streams=STREAMS), weight_norm="buffer"
        )
    },
    "event tables": event_tables(),
    "event tables, mixture": event_tables(correction="mixture", beta=0.5),
    "event tables, priorities": event_tables(priority={"kind": "proportional", "beta": 0.5}),
    "event tables, pinned": event_tables("pinned", priority={"kind": "proportional", "beta": 0.5}),
    "slices": {"sampler": partial(slices, pad=False)},
    "slices, priorities": {"sampler": lambda: slices(anchors=ProportionalSampler(alpha=0.7, beta=0.5))},
}


def transitions(first, steps, *, seed=0):
    """`steps` steps of STREAMS environments that alternate. Row i has the number `first` + i."""
    count = steps * STREAMS
    number = torch.arange(first, first + count)
    step, stream = number // STREAMS, number % STREAMS
    # episodes of different lengths
    length = 7 + stream
    return rows(
        count,
        first=first,
        done=(step % length == length - 1).nonzero().squeeze(1).tolist(),
        ids=step // length * STREAMS + stream,
        value=torch.rand(count, generator=torch.Generator().manual_seed(seed)),
    )


def sharded(name, num_shards, *, capacity=256, **arguments):
    arguments = {"batch_size": BATCH, "seed": 1, "timeout": 0.1, **arguments}
    arguments.setdefault("storage", partial(CompilableTensorStorage, capacity))
    return ShardedReplayBuffer(num_shards, **{**copy.deepcopy(PARTS.get(name, {})), **arguments})


def whole(name, capacity=256, batch_size=BATCH):
    parts = {key: part() for key, part in copy.deepcopy(PARTS[name]).items()}
    return CompilableReplayBuffer(storage=CompilableTensorStorage(capacity), batch_size=batch_size, **parts)


def td_errors(number):
    """A TD error for each row that depends on nothing else."""
    rng = torch.Generator().manual_seed(5)
    return torch.rand(4096, generator=rng).square()[number] + 0.01


def fill(rb, steps=40):
    for first in range(0, steps, 8):
        rb.extend(transitions(first * STREAMS, 8, seed=first))


def filled(name, num_shards, **arguments):
    """A sharded buffer with 160 transitions."""
    many = sharded(name, num_shards, **arguments)
    fill(many)
    return many


def update(rb, batch, td_error):
    """Update the priorities of a batch by these TD errors."""
    batch["td_error"] = td_error
    rb.update_tensordict_priority(batch)


def learn(rb, updates=40):
    for _ in range(updates):
        batch = rb.sample()
        update(rb, batch, td_errors(batch["number"]))


def written_slots(buffer):
    """The slots that hold transitions; with pinned tables there are gaps between them."""
    if isinstance(buffer.writer, EventTableWriter):
        tables = buffer.writer.tables
        return torch.cat([tables[name].index() for name in tables.names]).unique()
    return torch.arange(len(buffer))


def takes_priorities(many):
    return many._takes_priorities


def set_priorities(one, many, td_error=td_errors):
    """Give all rows of both buffers priorities that depend on the row alone."""
    if takes_priorities(many):
        for buffer in (one, *(handle.replay._buffer for handle in many._shards.handles)):
            slots = written_slots(buffer)
            buffer.update_priority(slots, td_error(buffer[slots]["number"]))
    # the shards tell each other about the largest priority
    many.sample()


def filled_pair(name, num_shards):
    """One buffer and a sharded one with the same transitions and priorities."""
    one, many = whole(name), filled(name, num_shards)
    fill(one)
    set_priorities(one, many)
    return one, many


def probability_of_rows(one):
    """Probability of each row to be drawn by one buffer with all transitions, by its number."""
    slots = written_slots(one)
    number = one[slots]["number"]
    probability = torch.full((len(one),), 1 / len(one), dtype=torch.float64)
    if not isinstance(one.sampler, RandomSampler):
        probability = one.sampler.probabilities(one.storage)
    return torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add_(0, number, probability[slots])


def draw(many, batches=200, unit=1):
    """The numbers of drawn rows (the first one of each slice), and the weight of each."""
    numbers, weights = [], {}
    for _ in range(batches):
        batch = many.sample()
        assert len(batch) == many.batch_size
        numbers.append(batch["number"][::unit])
        if "priority_weight" in batch:
            weights.update(zip(batch["number"].tolist(), batch["priority_weight"].tolist(), strict=True))
    return torch.cat(numbers), weights


def require_own_priorities(many):
    """Each updated row of the living shards has the priority of its own TD error; return their number."""
    updated = 0
    for buffer in (handle.replay._buffer for handle in many._shards.handles if handle.is_alive):
        slots = written_slots(buffer)
        if len(slots):
            sampler = getattr(buffer.sampler, "starts_sampler", buffer.sampler)
            priority = sampler.state_dict()["priority"][slots]
            expected = td_errors(buffer[slots]["number"] % 4096).sqrt() + 1e-6
            torch.testing.assert_close(priority[priority > 0], expected[priority > 0])
            updated += int((priority > 0).sum())
    return updated


def rows_in(many):
    """The numbers of the rows that the living shards hold, by shard."""
    buffers = [handle.replay._buffer if handle.is_alive else [] for handle in many._shards.handles]
    return [set(buffer[:]["number"].tolist()) if len(buffer) else set() for buffer in buffers]
