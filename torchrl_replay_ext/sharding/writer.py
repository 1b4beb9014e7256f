"""Writes transitions to the shards of a replay buffer, whole episodes to one shard."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_replay_ext.core.streams import Episodes
from torchrl_replay_ext.sharding.processes import Shards
from torchrl_replay_ext.sharding.shard import OWNER, Arrays, split, to_arrays


class ShardWriter:
    """Writes transitions to shards; each process that collects transitions has one.

    A new episode goes to the shard to which the fewest transitions were sent, and all its transitions follow. If the
    process of a shard ends, rows on the way to it are lost, and its open episodes begin again with their next step, in
    another shard or in the new process.

    Args:
        shards: the shards.
        episodes: the entries with trajectory ids, integers that are unique among all writers, and with the ends of
            episodes.
    """

    def __init__(self, shards: Shards, episodes: Episodes):
        self._shards = shards
        self._traj_key, self._done_key = unravel_key(episodes.traj_key or ""), unravel_key(episodes.done_key)
        # the process to which the rows of each open episode are sent, by trajectory id
        self._homes: dict[int, int] = {}
        # shape of a row and dtype of each entry of the first batch
        self._columns: dict[NestedKey, Any] = {}
        # number of rows sent to each shard
        self._sent = [0] * len(shards)

    @property
    def write_count(self) -> int:
        """Number of transitions that this writer has sent, including lost ones."""
        return sum(self._sent)

    def extend(self, data: TensorDictBase) -> None:
        """Write transitions [n], those of each episode in time order.

        Args:
            data: the transitions, flat.

        Raises:
            KeyError: if the batch has no trajectory ids or no ends of episodes.
            TypeError: if an entry has a dtype that NumPy does not have, such as bfloat16.
            ValueError: if the batch is not flat, or its entries differ from those of the first batch in name, shape or
                dtype. Nothing is written then.
            RuntimeError: if no shard can be written to for ``timeout`` seconds. Nothing is written then.

        Other errors are those of a shard, such as of its sampler. The rows of the other shards are written then.
        """
        if data.ndim != 1:
            raise ValueError(
                f"{OWNER}.extend: the batch has the shape {tuple(data.shape)}; pass a flat batch, "
                "data.reshape(-1) with a trajectory id for each environment's episode."
            )
        if not len(data):
            return
        rows = to_arrays(data)
        for key in (self._traj_key, self._done_key):
            if key not in rows:
                raise KeyError(
                    f"{OWNER}.extend: the batch has no entry {key!r}, but episodes stay in one shard; collectors write "
                    "it, or pass episodes=Episodes(traj_key=..., done_key=...)."
                )
        columns: dict[NestedKey, Any] = {key: (column.shape[1:], column.dtype) for key, column in rows.items()}
        if self._columns and (different := self._columns.items() ^ columns.items()):
            raise ValueError(
                f"{OWNER}.extend: entries differ in name, shape or dtype from those of the first batch: {different}."
            )
        if not self._shards.wait(1):
            raise RuntimeError(
                f"{OWNER}.extend: the processes of all shards have ended, and none was started again in "
                f"{self._shards.timeout:g} s; {len(data)} transitions were not written."
            )
        self._shards.call("write", split(rows, self._route(rows)))
        self._columns = columns

    def _route(self, rows: Arrays) -> np.ndarray:
        """The shard of each row, int64 [n]."""
        done = rows[self._done_key]
        episode, done = rows[self._traj_key].reshape(len(done)), done.reshape(len(done), -1).any(1)
        ids, episode_of, counts = np.unique(episode, return_inverse=True, return_counts=True)
        running = {report.process: number for number, report in self._shards.reports.items()}
        shard_of = []
        for number, count in zip(ids.tolist(), counts.tolist(), strict=True):
            if self._homes.get(number) not in running:
                self._homes[number] = min(running, key=lambda process: self._sent[running[process]])
            shard_of.append(running[self._homes[number]])
            self._sent[shard_of[-1]] += count
        for number in np.unique(episode[done]).tolist():
            del self._homes[number]
        return np.array(shard_of)[episode_of]
