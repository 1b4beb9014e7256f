"""Writes transitions to the shards of a replay buffer, whole episodes to one shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from tensordict import NestedKey, TensorDictBase, unravel_key

from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, SHARD_KEY, Arrays, describe, num_rows, split, to_arrays
from torchrl_replay_ext.sharding.calls import Lost, LostShards, RayCalls, get_all, wait_until, warn

# entries of samples that are not stored
RESERVED = {SHARD_KEY, DENSITY}


class ShardWriter:
    """Writes transitions to shards; each process that collects transitions has one.

    A new episode goes to the shard to which the fewest transitions were sent, and all its transitions follow. If the
    process of a shard ends, rows on the way to it are lost, and its open episodes begin again with their next step, in
    another shard or in the new process.

    Args:
        shards: handles of the shards.
        calls: makes the calls.
        traj_key: entry with trajectory ids, int64, unique among all writers.
        done_key: entry that marks the end of an episode.
        timeout: seconds to wait if the processes of all shards have ended. Default: 60.
        on_loss: called with a message if rows are lost. Default: None, a UserWarning.
    """

    def __init__(
        self,
        shards: list[Any],
        calls: RayCalls,
        *,
        traj_key: NestedKey,
        done_key: NestedKey,
        timeout: float = 60.0,
        on_loss: Callable[[str], None] | None = None,
    ):
        self._shards, self._calls, self._timeout, self._on_loss = shards, calls, timeout, on_loss or warn
        self._traj_key, self._done_key = unravel_key(traj_key), unravel_key(done_key)
        self._lost = LostShards(calls, shards)
        # the shard of each open episode
        self._homes: dict[int, int] = {}
        # the entries of the rows; None before the first write
        self._columns: Any = None
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
            Lost: a RuntimeError, if no shard can be written to for ``timeout`` seconds. Nothing is written then.

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
        columns = self._require_columns(rows)
        if not wait_until(self._can_write, self._timeout):
            raise Lost(
                f"{OWNER}.extend: the processes of all shards have ended, and none was started again in "
                f"{self._timeout:g} s; {len(data)} transitions were not written."
            )
        parts = split(rows, self._route(rows), len(self._shards))
        calls = [
            shard.write.remote(part) if num_rows(part) else None
            for shard, part in zip(self._shards, parts, strict=True)
        ]
        for number, answer in enumerate(get_all(self._calls, calls)):
            if isinstance(answer, Lost):
                self._lose(number, num_rows(parts[number]))
        self._columns = columns

    def _can_write(self) -> bool:
        self._lost.returned()
        return len(self._lost.numbers) < len(self._shards)

    def _require_columns(self, rows: Arrays) -> dict:
        """Raise ValueError if rows do not have the entries of the stored ones; return the entries."""
        columns = describe(rows)
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
        if RESERVED & columns.keys():
            raise ValueError(f"{OWNER}.extend: samples get the entries {sorted(RESERVED)}; use other names.")
        stored = self._columns
        if stored is None:
            answers = get_all(self._calls, [shard.columns.remote() for shard in self._shards])
            stored = next((answer for answer in answers if isinstance(answer, dict)), columns)
        if different := [key for key in {**stored, **columns} if stored.get(key) != columns.get(key)]:
            raise ValueError(
                f"{OWNER}.extend: the entries {different} differ in name, shape or dtype from the first batch: "
                f"{[columns.get(key) for key in different]} instead of {[stored.get(key) for key in different]}."
            )
        return columns

    def _route(self, rows: Arrays) -> np.ndarray:
        """The shard of each row, int64 [n]."""
        episode, done = rows[self._traj_key].reshape(-1), rows[self._done_key].reshape(num_rows(rows), -1).any(1)
        numbers, first, which = np.unique(episode, return_index=True, return_inverse=True)
        count, home = np.bincount(which).tolist(), np.zeros(len(numbers), dtype=np.int64)
        usable = {*range(len(self._shards))} - {*self._lost.numbers}
        for place in np.argsort(first):
            number = int(numbers[place])
            if number not in self._homes:
                self._homes[number] = min(usable, key=self._sent.__getitem__)
            home[place] = self._homes[number]
            self._sent[home[place]] += count[place]
        for number in np.unique(episode[done]).tolist():
            del self._homes[number]
        return home[which]

    def _lose(self, shard: int, count: int) -> None:
        """Note that the process of a shard has ended, with ``count`` rows on the way to it."""
        self._lost.add(shard)
        self._homes = {number: home for number, home in self._homes.items() if home != shard}
        self.lost_rows += count
        self._on_loss(f"the process of shard {shard} has ended, and {count} transitions on the way to it are lost")
