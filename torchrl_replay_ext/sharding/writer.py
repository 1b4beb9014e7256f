"""Writes transitions to the shards of a replay buffer, whole episodes to one shard."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_replay_ext.sharding.processes import Shards
from torchrl_replay_ext.sharding.shard import OWNER, Arrays, num_rows, split, to_arrays


class ShardWriter:
    """Writes transitions to shards; each process that collects transitions has one.

    A new episode goes to the shard to which the fewest transitions were sent, and all its transitions follow. If the
    process of a shard ends, rows on the way to it are lost, and its open episodes begin again with their next step, in
    another shard or in the new process.

    Args:
        shards: the shards.
        traj_key: entry with trajectory ids, int64, unique among all writers.
        done_key: entry that marks the end of an episode.
    """

    def __init__(self, shards: Shards, *, traj_key: NestedKey, done_key: NestedKey):
        self._shards = shards
        self._traj_key, self._done_key = unravel_key(traj_key), unravel_key(done_key)
        # the shard of each open episode, and its process at that time
        self._homes: dict[int, tuple[int, int]] = {}
        # shape of a row and dtype of each entry; None before the first write
        self._columns: dict[NestedKey, Any] | None = None
        # number of rows sent to each shard
        self._sent = [0] * len(shards)
        # number of rows that were on the way to a process that has ended
        self.lost_rows = 0

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
                dtype, or trajectory ids are not int64. Nothing is written then.
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
        shards, rows = self._shards, to_arrays(data)
        columns = self._require_columns(rows)
        if not shards.wait(1):
            raise RuntimeError(
                f"{OWNER}.extend: the processes of all shards have ended, and none was started again in "
                f"{shards.timeout:g} s; {len(data)} transitions were not written."
            )
        parts = split(rows, self._route(rows), len(shards))
        written = shards.call("write", lambda number: (parts[number],) if num_rows(parts[number]) else None)
        if lost := len(data) - sum(filter(None, written)):
            self.lost_rows += lost
            shards.on_loss(f"{lost} transitions on the way to processes that have ended are lost")
        self._columns = columns

    def _require_columns(self, rows: Arrays) -> dict[NestedKey, Any]:
        """Raise ValueError if rows do not have the entries of the first ones; return the entries."""
        columns: dict[NestedKey, Any] = {key: (column.shape[1:], str(column.dtype)) for key, column in rows.items()}
        for key in (self._traj_key, self._done_key):
            if key not in rows:
                raise KeyError(
                    f"{OWNER}.extend: the batch has no entry {key!r}, but episodes stay in one shard; collectors write "
                    "it, or pass traj_key= and done_key=."
                )
        ids = rows[self._traj_key]
        if ids.dtype != np.int64 or ids.size != len(ids):
            raise ValueError(
                f"{OWNER}.extend: the entry {self._traj_key!r} must have one int64 per transition; it has "
                f"the shape {ids.shape} and the dtype {ids.dtype}."
            )
        first = self._columns or columns
        if different := [key for key in {**first, **columns} if first.get(key) != columns.get(key)]:
            raise ValueError(
                f"{OWNER}.extend: the entries {different} differ in name, shape or dtype from the first batch: "
                f"{[columns.get(key) for key in different]} instead of {[first.get(key) for key in different]}."
            )
        return columns

    def _route(self, rows: Arrays) -> np.ndarray:
        """The shard of each row, int64 [n]."""
        episode, done = rows[self._traj_key].reshape(-1), rows[self._done_key].reshape(num_rows(rows), -1).any(1)
        numbers, first, which = np.unique(episode, return_index=True, return_inverse=True)
        count, shard_of = np.bincount(which).tolist(), np.zeros(len(numbers), dtype=np.int64)
        running = {number: (number, self._shards.reports[number].process) for number in self._shards.running}
        for position in np.argsort(first):
            number = int(numbers[position])
            if self._homes.get(number) not in running.values():
                self._homes[number] = running[min(running, key=self._sent.__getitem__)]
            shard_of[position], _ = self._homes[number]
            self._sent[shard_of[position]] += count[position]
        for number in np.unique(episode[done]).tolist():
            del self._homes[number]
        return shard_of[which]
