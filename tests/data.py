"""Builders of transitions, event tables and buffers that many tests share."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)

# --- transitions


def rows(count, envs=None, *, done=(), truncated=(), ids=None, first=0, episode=None, **entries) -> TensorDict:
    """Numbered transitions [count], or of several environments [envs, count], the layout that TorchRL writes.

    Args:
        count: number of transitions, or of time steps.
        envs: number of environments; their transitions are numbered step by step.
        done: positions of transitions that terminate an episode.
        truncated: positions of transitions that truncate an episode.
        ids: trajectory ids.
        first: number of the first transition.
        episode: length of all episodes; replaces ``done``.
        entries: further entries, which can replace the ones above.
    """
    shape = (count,) if envs is None else (count, envs)
    number = torch.arange(first, first + math.prod(shape)).reshape(shape).movedim(-1, 0)
    terminated, cut = torch.zeros(2, *number.shape, 1, dtype=torch.bool)
    terminated[list(done)] = True
    cut[list(truncated)] = True
    if episode is not None:
        terminated = (number // (envs or 1) % episode == episode - 1).unsqueeze(-1)
    data = TensorDict(
        {
            "number": number,
            "observation": number.float().unsqueeze(-1),
            "next": {"done": terminated | cut, "terminated": terminated, "truncated": cut},
            **entries,
        },
        number.shape,
    )
    if ids is not None:
        data["collector", "traj_ids"] = torch.as_tensor(ids)
    return data


def random_rows(count, *, first=0, episode=10) -> TensorDict:
    """Rows with the entries of all samplers: random observations [3], actions [2], logits [2], ids, an "event"."""
    number = torch.arange(first, first + count)
    data = rows(count, first=first, episode=episode, ids=number // episode, event=number % 4 == 0)
    return data.update(
        {"observation": torch.randn(count, 3), "action": torch.randn(count, 2), "logits": torch.randn(count, 2)}
    )


def as_graphs(rb):
    """Make the draws and updates of a buffer run as graphs; returns the buffer."""
    rb.sample = torch.compile(rb.sample, fullgraph=True)
    rb.update_tensordict_priority = torch.compile(rb.update_tensordict_priority, fullgraph=True)
    return rb


def learnable(count, *, observation=4, action=None, done=0.1) -> TensorDict:
    """Random transitions for a loss.

    Args:
        count: number of transitions.
        observation: size of an observation.
        action: size of an action in [-1, 1]; None for actions 0 or 1.
        done: probability that a transition terminates an episode.
    """
    ended = torch.rand(count, 1) < done
    following = {
        "observation": torch.randn(count, observation),
        "reward": torch.randn(count, 1),
        "done": ended,
        "terminated": ended.clone(),
    }
    taken = torch.randint(0, 2, (count,)) if action is None else torch.rand(count, action) * 2 - 1
    return TensorDict({"observation": torch.randn(count, observation), "action": taken, "next": following}, [count])


# --- parts


def linear_policy(observation=1, action=1) -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(observation, action), in_keys=["observation"], out_keys=["action"])


def event_sampler(size, condition=("next", "done"), history=3, *, name="end", default=None, share=0.5, **sampler):
    """A sampler with one event, and a table of the same name.

    Args:
        size: capacity of the table.
        condition: condition of the event.
        history: number of transitions that an event adds.
        name: name of the event and of its table.
        default: capacity of the default table, for retention="pinned"; None for retention="ring".
        share: eta of the event's table.
        sampler: arguments of the sampler.
    """
    sizes = {name: size} if default is None else {name: size, "default": default}
    retention = "ring" if default is None else "pinned"
    tables = EventTables([EventSpec(name, condition, history)], sizes, retention=retention)
    return EventTableSampler(tables, **{"eta": {"default": 1 - share, name: share}, "min_size": 1, **sampler})


# a sampler of each kind with its default arguments, made for a capacity; `random_rows` have the entries that they read
SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda capacity: RandomSampler(),
    "proportional": ProportionalSampler,
    "rank": RankBasedSampler,
    "recency": RecencySampler,
    "reaper": ReaPERSampler,
    "tables": lambda capacity: event_sampler(capacity, "event"),
    "tables, proportional": lambda capacity: event_sampler(capacity, "event", priority={"kind": "proportional"}),
    "slices": lambda capacity: TrajectoryRetraceSampler(capacity, slice_len=4),
    "slices, proportional": lambda capacity: TrajectoryRetraceSampler(
        capacity, slice_len=4, anchors=ProportionalSampler(capacity)
    ),
    "decoupled": lambda capacity: DecoupledSampler(ProportionalSampler(capacity), linear_policy(3, 2)),
}


# --- buffers


def buffer_with(sampler, capacity, *, compilable=False, ndim=1, device="cpu", **arguments) -> Any:
    """A buffer with this sampler, a matching storage, and for event tables an EventTableWriter."""
    drawn_by = getattr(sampler, "critic_sampler", sampler)
    drawn_by = getattr(drawn_by, "anchors", drawn_by)
    if isinstance(drawn_by, EventTableSampler) and "writer" not in arguments:
        arguments["writer"] = EventTableWriter(drawn_by.tables)
    make, storage = TensorDictReplayBuffer, LazyTensorStorage
    if compilable:
        make, storage = CompilableReplayBuffer, CompilableTensorStorage
    return make(**{"storage": storage(capacity, ndim=ndim, device=device), "sampler": sampler, **arguments})


def buffer_of(
    sampler_class, capacity=10, *, compilable=False, ndim=1, batch_size=None, generator=None, prefetch=None, **sampler
) -> Any:
    """A buffer with a sampler of this class and the arguments ``sampler``."""
    arguments = {"batch_size": batch_size, "generator": generator, "prefetch": prefetch}
    made = sampler_class(capacity, **sampler)
    return buffer_with(made, capacity, compilable=compilable, ndim=ndim, **arguments)


def learn(rb, error=None) -> TensorDict:
    """Draw a batch and update its priorities, by random TD errors or all by ``error``; returns the batch."""
    batch = rb.sample()
    errors = torch.rand(len(batch), device=batch.device) + 0.1
    batch["td_error"] = errors if error is None else torch.full_like(errors, error)
    rb.update_tensordict_priority(batch)
    return batch
