"""Writes transitions to the shards of a replay buffer, whole episodes to one shard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tensordict import NestedKey, TensorDictBase

from torchrl_replay_ext.sharding.arrays import DENSITY, OWNER, SHARD_KEY, Arrays, describe, num_rows, take, to_arrays
from torchrl_replay_ext.sharding.calls import Calls, Lost, get_all
from torchrl_replay_ext.sharding.shard import Report

# Ids from here on belong to episodes whose first part was lost with a shard. Each writer has a range of its own.
_RENAMED, _RANGE = 2**62, 2**40
_PAUSE = 0.05
# the home of an episode that has lost its shard
_NOWHERE = -1
# entries of samples that are not stored
RESERVED = {SHARD_KEY, DENSITY}


class ShardWriter:
    """Writes transitions to shards; each process that collects transitions has one.

    A new episode goes to the shard with the fewest stored transitions, and all its transitions follow. If the process
    of a shard ends, the episodes under way continue in other shards under new trajectory ids.

    Args:
        shards: handles of the shards.
        calls: makes the calls.
        number: number of this writer. No two writers of a buffer may have the same.
        traj_key: entry with trajectory ids, int64, unique among all writers. Without it, all transitions are those of
            one environment.
        done_key: entry that marks the end of an episode.
        timeout: seconds to wait if the processes of all shards have ended. Default: 60.
    """

    def __init__(
        self,
        shards: list[Any],
        calls: Calls,
        *,
        number: int,
        traj_key: NestedKey,
        done_key: NestedKey,
        timeout: float = 60.0,
    ):
        self._shards, self._calls, self._timeout = shards, calls, timeout
        self._traj_key, self._done_key = plain_key(traj_key), plain_key(done_key)
        self._next_name = _RENAMED + number * _RANGE
        # open episodes: their shard, and the id under which the shard knows them
        self._homes: dict[int, tuple[int, int]] = {}
        self._episode = 0
        self._columns: Any = None
        # the newest report of each shard; None while it cannot be written to, because its process has ended
        self.reports: list[Report | None] = [Report(0) for _ in shards]
        # for each shard that cannot be written to: the question for its state, and the incarnation that has ended
        self._questions: dict[int, Any] = {}
        self._ended = [0] * len(shards)
        # number of rows sent to each shard since the last loss; balances shards that are full
        self._sent = [0] * len(shards)
        self._rows_written = 0
        # number of rows that were not written because their shard was lost
        self.lost_rows = 0
        # how many of them are still to be reported, with the next write
        self._unreported = 0

    @property
    def write_count(self) -> int:
        """Number of transitions that this writer has written."""
        return self._rows_written

    def extend(self, data: TensorDictBase, *, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Write transitions [n], those of each episode in time order.

        Args:
            data: the transitions, flat.
            while_waiting: called again and again while no shard can be written to. Default: nothing.

        Raises:
            TypeError: if an entry has a dtype that NumPy does not have, such as bfloat16.
            ValueError: if the batch is not flat, or its entries differ from those of the first batch in name, shape or
                dtype, or trajectory ids are not int64. Nothing is written then.
            Lost: a RuntimeError, if no shard can be written to for ``timeout`` seconds.

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
        self._require_columns(rows)
        try:
            self._write_all(rows, while_waiting)
        except Exception:
            if not self._rows_written:
                # another first batch may have other entries
                self._columns = None
                self._shards[0].forget_columns.remote()
            raise
        self._rows_written += len(data)

    def _write_all(self, rows: Arrays, while_waiting: Callable[[], None]) -> None:
        episode, has_ids = self._episodes_of(rows)
        done = self._column(rows, self._done_key)
        ended = episode[:0] if done is None else np.unique(episode[done.astype(bool)])
        deadline = time.monotonic() + self._timeout
        remaining, before = np.arange(len(episode)), self.lost_rows
        while len(remaining):
            remaining, waits = self._write(rows, episode, has_ids, remaining, ended)
            if waits:
                if time.monotonic() > deadline:
                    count = len(remaining) + self.lost_rows - before
                    raise Lost(
                        f"{OWNER}.extend: the processes of all shards have ended, and none was started "
                        f"again in {self._timeout:g} s; {count} transitions were not written."
                    )
                while_waiting()
                time.sleep(_PAUSE)
        for number in ended.tolist():
            self._homes.pop(number, None)
        if done is None:
            # without done flags, only the episodes of the last batch stay open
            self._homes = {number: self._homes[number] for number in np.unique(episode).tolist()}

    def _column(self, rows: Arrays, key: NestedKey) -> np.ndarray | None:
        """One number per row; None if the entry is missing."""
        column = rows.get(key)
        if column is None:
            return None
        return np.asarray(column.reshape(len(column), -1).any(1)) if column.dtype == bool else column.reshape(-1)

    def _episodes_of(self, rows: Arrays) -> tuple[np.ndarray, bool]:
        """The episode of each row, int64 [n], and whether it is the trajectory id."""
        ids = self._column(rows, self._traj_key)
        if ids is not None:
            return ids, True
        done = self._column(rows, self._done_key)
        if done is None:
            # transitions without episodes: each batch goes to one shard
            self._homes.clear()
            return np.zeros(num_rows(rows), dtype=np.int64), False
        before = np.concatenate([[0], np.cumsum(done.astype(np.int64))])
        episode = self._episode + before[:-1]
        self._episode += int(before[-1])
        return episode, False

    def _require_columns(self, rows: Arrays) -> None:
        columns = describe(rows)
        ids = rows.get(self._traj_key)
        if ids is not None and (ids.dtype != np.int64 or ids.size != len(ids)):
            raise ValueError(
                f"{OWNER}.extend: the entry {self._traj_key!r} must have one int64 per transition; it has "
                f"the shape {ids.shape} and the dtype {ids.dtype}."
            )
        if RESERVED & columns.keys():
            raise ValueError(f"{OWNER}.extend: samples get the entries {sorted(RESERVED)}; use other names.")
        if self._columns is None:
            stored = get_all(self._calls, [shard.stored_columns.remote() for shard in self._shards])
            self._columns = next((each for each in stored if each is not None and not isinstance(each, Lost)), None)
        if self._columns is None:
            try:
                self._columns = self._calls.get(self._shards[0].fix_columns.remote(columns))
            except Lost:
                self._columns = columns
        if columns != self._columns:
            raise ValueError(
                f"{OWNER}.extend: the batch has the entries {_describe(columns, self._columns)}, the first "
                f"batch had {_describe(self._columns, columns)}; all batches must have the same."
            )

    def _write(
        self, rows: Arrays, episode: np.ndarray, has_ids: bool, which: np.ndarray, ended: np.ndarray
    ) -> tuple[np.ndarray, bool]:
        """Write the rows ``which``.

        A shard with a new incarnation refuses the rows; they are sent again under a new trajectory id. Rows that were
        on the way to a lost shard are written to another one, except those of the episodes that end in this batch: the
        next episodes of their environments may have been written to another shard already.

        Returns:
            The rows that remain to be written, and whether there is nothing to do but wait.
        """
        self._ask()
        target, name = self._place(episode[which])
        if target is None:
            return which, True
        sent: list[tuple[int, np.ndarray, int, Any]] = []
        for number in np.unique(target):
            chosen = which[target == number]
            part = take(rows, chosen)
            if has_ids:
                part[self._traj_key] = name[target == number].reshape(part[self._traj_key].shape)
            report = self.reports[number]
            incarnation = report.incarnation if report is not None and report.incarnation else None
            lost, self._unreported = self._unreported, 0
            sent.append((int(number), chosen, lost, self._shards[number].write.remote(part, incarnation, lost)))
        answers = get_all(self._calls, [reference for *_, reference in sent])
        again = [which[:0]]
        for (number, chosen, lost, _), answer in zip(sent, answers, strict=True):
            if isinstance(answer, Lost):
                self._mark_lost(number)
                is_late = np.isin(episode[chosen], ended)
                self.lost_rows += int(is_late.sum())
                self._unreported += lost + int(is_late.sum())
                again.append(chosen[~is_late])
                continue
            written, self.reports[number] = answer
            self._sent[number] += len(chosen)
            if not written:
                self._rename(number, stay=True)
                again.append(chosen)
        return np.sort(np.concatenate(again)), False

    def _place(self, episode: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
        """The shard of each row, and the trajectory id under which it is stored; None if no shard can be written to."""
        numbers, first, which = np.unique(episode, return_index=True, return_inverse=True)
        count = np.bincount(which)
        reports = enumerate(self.reports)
        load = {shard: (report.length, self._sent[shard]) for shard, report in reports if report is not None}
        if not load:
            return None, episode
        home = np.zeros(len(numbers), dtype=np.int64)
        name = numbers.copy()
        for place in np.argsort(first):
            number = int(numbers[place])
            if number not in self._homes:
                shard = min(load, key=load.__getitem__)
                self._homes[number] = shard, number
            elif self._homes[number][0] not in load:
                shard = min(load, key=load.__getitem__)
                self._homes[number] = shard, self._homes[number][1]
            home[place], name[place] = self._homes[number]
            length, sent = load[int(home[place])]
            load[int(home[place])] = length + int(count[place]), sent + int(count[place])
        return home[which], name[which]

    def note(self, reports: Sequence[Report], incarnations: Sequence[int]) -> None:
        """Note the reports that the coordinator has received.

        Args:
            reports: the newest report of each shard; without an incarnation if the shard is lost.
            incarnations: the last known incarnation of each shard.
        """
        for number, (known, report) in enumerate(zip(self.reports, reports, strict=True)):
            if known is None:
                is_newer = report.incarnation not in (0, self._ended[number])
            else:
                is_newer = report.incarnation == known.incarnation and report.number > known.number
                if not report.incarnation and known.incarnation == incarnations[number]:
                    self._mark_lost(number)
            if is_newer:
                self.reports[number] = report

    def _mark_lost(self, shard: int) -> None:
        """Note that the process of a shard has ended."""
        report, self.reports[shard] = self.reports[shard], None
        self._ended[shard] = 0 if report is None else report.incarnation
        self._rename(shard, stay=False)

    def _rename(self, shard: int, *, stay: bool) -> None:
        """The open episodes of a shard, whose earlier transitions are lost, go on under new ids, there or elsewhere."""
        self._sent = [0] * len(self._shards)
        for number, (home, _) in self._homes.items():
            if home == shard:
                self._homes[number] = shard if stay else _NOWHERE, self._next_name
                self._next_name += 1

    def _ask(self) -> None:
        """Ask the shards that cannot be written to for their state, without waiting for answers."""
        for number, report in enumerate(self.reports):
            if report is not None:
                continue
            question = self._questions.pop(number, None)
            if question is not None and not self._calls.is_answered(question):
                self._questions[number] = question
                continue
            if question is not None:
                try:
                    answer = self._calls.get(question)
                except Lost:
                    answer = Report(0)
                if answer.incarnation:
                    self.reports[number] = answer
                    continue
            self._questions[number] = self._shards[number].report.remote()


def plain_key(key: NestedKey) -> NestedKey:
    """A key as TensorDicts list it: a string if it has one part."""
    return key[0] if isinstance(key, tuple) and len(key) == 1 else key


def _describe(columns: dict, other: dict) -> str:
    """The entries that differ from ``other``."""
    found = {key: value for key, value in columns.items() if other.get(key) != value}
    return ", ".join(f"{key!r} {list(shape)} {dtype}" for key, (shape, dtype) in found.items()) or "fewer"
