"""Event tables as described in the paper, row by row in plain Python, and scripted experience."""

from __future__ import annotations

from collections import deque

import torch
from tensordict import TensorDict


class NaiveTables:
    """The expected content of each table. Transitions are numbered in the order of writing.

    Args:
        specs: (column of the event, τ, table) for each event.
        capacity: κ of each table; includes "default" if pinned.
        size: N for a ring; None if pinned.
    """

    def __init__(self, specs, capacity, size=None):
        self.specs, self.capacity, self.size = specs, capacity, size
        self.reach = capacity["default"] if size is None else size
        self.tables = {name: deque() for name in capacity if name != "default"}
        self.default = deque(maxlen=self.reach)
        self.episodes: dict = {}
        self.count = 0

    def write(self, stream, events, ended, begins=False):
        number, self.count = self.count, self.count + 1
        self.default.append(number)
        if self.size is not None:
            for table in self.tables.values():
                if number - self.size in table:
                    table.remove(number - self.size)
        if begins:
            self.episodes.pop(stream, None)
        steps, sent = self.episodes.setdefault(stream, ([], {name: set() for name in self.tables}))
        steps.append(number)
        for name, table in self.tables.items():
            wanted = set()
            for column, history, target in self.specs:
                if target == name and events[column]:
                    wanted |= set(steps[-history:])
            for step in sorted(wanted - sent[name]):
                if number - step >= self.reach:
                    continue
                sent[name].add(step)
                table.append(step)
                if len(table) > self.capacity[name]:
                    table.popleft()
        if ended:
            del self.episodes[stream]

    def extend(self, data):
        """Write transitions whose streams are their trajectories, with the events in ``data["next"]``."""
        for row in data:
            events = {key: bool(value) for key, value in row["next"].items()}
            self.write(int(row["collector", "traj_ids"]), events, bool(row["next", "done"]))

    def stored(self):
        return set(self.default).union(*self.tables.values())


def scripted(count, *, streams=1, events=("a", "b"), seed=0, p_event=0.1, p_done=0.05):
    """Random transitions of interleaved streams, with trajectory ids, the number of the environment and events."""
    generator = torch.Generator().manual_seed(seed)
    env = torch.randint(streams, (count,), generator=generator)
    terminated = torch.rand(count, generator=generator) < p_done / 2
    truncated = torch.rand(count, generator=generator) < p_done / 2
    done = terminated | truncated
    trajectory = torch.zeros(count, dtype=torch.int64)
    current = list(range(streams))
    following = streams
    for row, e in enumerate(env.tolist()):
        trajectory[row] = current[e]
        if done[row]:
            current[e], following = following, following + 1
    flags = {name: (torch.rand(count, generator=generator) < p_event).unsqueeze(1) for name in events}
    return TensorDict(
        {
            "number": torch.arange(count),
            "observation": torch.rand(count, 3, generator=generator),
            "env": env,
            "collector": {"traj_ids": trajectory},
            "next": {
                "done": done.unsqueeze(1),
                "terminated": terminated.unsqueeze(1),
                "truncated": truncated.unsqueeze(1),
                "reward": torch.rand(count, 1, generator=generator),
                **flags,
            },
        },
        [count],
    )
