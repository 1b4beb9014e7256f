"""The shards of a buffer: calls to all of them, lost processes, and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchrl_replay_ext.distributions.protocol import ShardRows
from torchrl_replay_ext.sharding.arrays import OWNER, SHARD_KEY, Arrays, num_rows
from torchrl_replay_ext.sharding.calls import Calls, Lost, get_all
from torchrl_replay_ext.sharding.shard import Exchange, Report

_MARKER = "checkpoint.json"
# how often a call of all shards is repeated if processes end while it is made
_ATTEMPTS = 5


class ShardGroup:
    """Calls shards, and restores those whose process was started again.

    Args:
        calls: starts and calls shards.
        arguments: those of each shard.
        restored: called with the number of a shard that was started again; returns its state, or None for an empty
            shard. None: the shard continues from the last :meth:`dumps`.
        on_loss: called with a message if the process of a shard has ended.
        timeout: the longest time to wait for processes, in seconds.
    """

    def __init__(
        self,
        calls: Calls,
        arguments: Sequence[dict[str, Any]],
        restored: Callable[[int], dict[str, Any] | None] | None,
        on_loss: Callable[[str], None],
        timeout: float,
    ):
        self._calls, self._restored, self._on_loss, self._timeout = calls, restored, on_loss, timeout
        self.handles = [calls.start(each) for each in arguments]
        # the newest report of each shard
        self.reports = [Report(0)] * len(self.handles)
        # the incarnation of each shard
        self.incarnations = [0] * len(self.handles)
        # for each lost shard, the call that is answered when its process was started again
        self._waiting: dict[int, Any] = {}
        self._checkpoint: Path | None = None
        # state of the schedules of annealed hyperparameters
        self._schedules: dict[str, list] | None = None
        self.lost_shards = self.lost_rows = 0
        self._wait_for_start()

    def _wait_for_start(self) -> None:
        """Wait until all shards have been started."""
        answers = [shard.report.remote() for shard in self.handles]
        deadline = time.monotonic() + max(self._timeout, 60.0)
        while not all(map(self._calls.is_answered, answers)):
            if time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(
                    f"{OWNER}: {len(self)} shards could not be started; does the cluster have the CPUs and the memory "
                    "of remote_config= for each?"
                )
            time.sleep(0.01)
        for number, answer in enumerate(answers):
            self._adopt(number, self._calls.get(answer))

    def _adopt(self, number: int, report: Report) -> None:
        """Note the first report of an incarnation."""
        self.reports[number], self.incarnations[number] = report, report.incarnation
        self._waiting.pop(number, None)

    @property
    def num_lost(self) -> int:
        """Number of shards that are lost now."""
        return len(self._waiting)

    def __len__(self) -> int:
        return len(self.handles)

    # --- draws and updates

    def exchange(
        self, wanted: Sequence[ShardRows | None] | None, updates: list[Arrays] | None, *, counts_batch: bool = False
    ) -> tuple[list[Any], list[int]]:
        """Send each shard its part of an update and of a draw; see :meth:`ReplayShard.exchange`.

        Returns:
            References to the answers, for :meth:`collect_rows`, and the incarnation that each is meant for.
        """
        priority = _largest_of_others([report.largest_priority for report in self.reports])
        episode = _largest_of_others([report.largest_episode for report in self.reports])
        answers: list[Any] = []
        for number, shard in enumerate(self.handles):
            update, rows = None if updates is None else updates[number], None if wanted is None else wanted[number]
            call = Exchange(update, rows, priority[number], episode[number], counts_batch)
            answers.append(None if number in self._waiting else shard.exchange.remote(call.pack()))
        return answers, [*self.incarnations]

    def collect_rows(self, answers: list[Any], incarnations: list[int]) -> list[Arrays]:
        """Wait for the answers of :meth:`exchange`, note the reports and return the rows with the numbers of shards."""
        rows = []
        for number, answer in enumerate(get_all(self._calls, answers)):
            # if the incarnation has changed since the request, the loss is already recorded
            is_known = incarnations[number] == self.incarnations[number]
            if isinstance(answer, Lost):
                if is_known:
                    self._mark_lost(number)
            elif answer is not None:
                report, part = answer
                if is_known:
                    self._check_incarnation(number, report)
                if self._accept(number, report) and num_rows(part):
                    rows.append({**part, SHARD_KEY: np.full(num_rows(part), number)})
        return rows

    def note(self, reports: Sequence[Report | None]) -> None:
        """Note the reports that a writer has received."""
        for number, report in enumerate(reports):
            if report is not None:
                self._accept(number, report)

    def _check_incarnation(self, number: int, report: Report) -> None:
        """Mark a shard as lost if its report is that of a new process."""
        if report.incarnation != self.incarnations[number]:
            self._mark_lost(number)

    def _accept(self, number: int, report: Report) -> bool:
        """Note a report of the known process, if it is newer; return whether it is of that process."""
        if report.incarnation != self.incarnations[number]:
            return False
        # Answers may arrive late: after newer ones, or after the process has ended.
        if number not in self._waiting and report.number >= self.reports[number].number:
            self.reports[number] = report
            self._schedules = report.schedules or self._schedules
        return True

    def call(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[tuple[Report, Any]]:
        """Call a method of all shards that are not lost.

        Args:
            method: its name.
            arguments: maps the number of a shard to the arguments. Default: none.

        Returns:
            The report and the result of each.
        """
        self.restore_lost()
        calls = [
            None if number in self._waiting else shard.answer.remote(method, *arguments(number))
            for number, shard in enumerate(self.handles)
        ]
        results = []
        for number, answer in enumerate(get_all(self._calls, calls)):
            if isinstance(answer, Lost):
                self._mark_lost(number)
            elif answer is not None:
                self._check_incarnation(number, answer[0])
                if self._accept(number, answer[0]):
                    results.append(answer)
        return results

    def call_all(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[Any]:
        """Call a method of all shards, and wait for lost ones before; return the results.

        Raises:
            RuntimeError: if a shard is still lost after the timeout.
        """
        for _ in range(_ATTEMPTS):
            self.wait(num_lost=0)
            answers = [] if self._waiting else self.call(method, arguments)
            if len(answers) == len(self):
                return [result for _, result in answers]
            if not answers:
                break
        lost = min(self._waiting, default=0)
        raise RuntimeError(f"{OWNER}.{method}: the process of shard {lost} has ended.")

    # --- lost shards

    def _mark_lost(self, number: int) -> None:
        """Note that the process of a shard has ended."""
        if number in self._waiting:
            return
        last, self.reports[number] = self.reports[number], Report(0)
        self.lost_shards += 1
        # `last.lost` rows were counted by the process that has ended
        self.lost_rows += last.length + last.lost
        # answered when Ray has started the process again
        self._waiting[number] = self.handles[number].report.remote()
        self._on_loss(
            f"the process of shard {number} of the replay buffer has ended (killed, or out of memory?); its "
            f"{last.length} transitions, as of its last report, are gone"
        )

    def restore_lost(self) -> None:
        """Restore the shards whose processes were started again from the last checkpoint, if there is one."""
        for number, question in list(self._waiting.items()):
            if not self._calls.is_answered(question):
                continue
            try:
                report = self._calls.get(question)
                if report.incarnation != self.incarnations[number]:
                    report = self._restore(number, report)
                self._adopt(number, report)
            except Lost:
                self._waiting[number] = self.handles[number].report.remote()

    def _restore(self, number: int, report: Report) -> Report:
        """Restore a shard, which has made this report; return its next report."""
        shard = self.handles[number]
        try:
            source = self._source(number)
            if source is not None:
                self._calls.get(shard.stage.remote(source))
                # writers may have found the new process first
                report, _ = self._calls.get(shard.answer.remote("restore", True))
        except Lost:
            raise
        except Exception as error:
            self._on_loss(f"shard {number} could not be restored and goes on empty: {error}")
        if self._schedules:
            report, _ = self._calls.get(shard.answer.remote("load_schedules", self._schedules))
        return report

    def _source(self, number: int) -> dict[str, Any] | str | None:
        """The content for a shard that was started again, for :meth:`ReplayShard.stage`; None if there is none."""
        if self._restored is not None:
            return self._restored(number)
        return None if self._checkpoint is None else str(newest(self._checkpoint) / f"shard{number}.pt")

    def wait(self, *, num_lost: int) -> None:
        """Wait until at most ``num_lost`` shards are lost, or the timeout is over."""
        deadline = time.monotonic() + self._timeout
        self.restore_lost()
        while len(self._waiting) > num_lost and time.monotonic() < deadline:
            time.sleep(0.05)
            self.restore_lost()

    def load(self, sources: Sequence[dict[str, Any] | str]) -> None:
        """Replace the content of all shards; ``sources``: for each, see :meth:`ReplayShard.stage`.

        Raises:
            ValueError: if there is another number of sources than of shards; nothing is changed then.
            RuntimeError: if a shard is lost; nothing is changed then, unless it is lost just now.
        """
        if len(sources) != len(self):
            raise ValueError(
                f"{OWNER}: the checkpoint has {len(sources)} shards, this buffer has {len(self)}; use "
                f"num_shards={len(sources)}."
            )
        self.call_all("stage", lambda number: (sources[number],))
        self._checkpoint = None
        # the first one alone: a state that does not fit is refused before any other shard is changed
        self._renew("restore", range(1))
        self._renew("restore", range(1, len(self)))

    def empty(self) -> None:
        """Remove all transitions. RuntimeError if a shard is lost."""
        self.call_all("report")
        self._checkpoint = None
        self._renew("empty", range(len(self)))

    def _renew(self, method: str, numbers: Sequence[int]) -> None:
        """Call a method that begins new incarnations of shards. Errors are raised after all answers were noted."""
        errors = []
        for number, answer in [(number, self.handles[number].answer.remote(method)) for number in numbers]:
            try:
                self._adopt(number, self._calls.get(answer)[0])
            except Lost:
                self._mark_lost(number)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    # --- checkpoints

    def dumps(self, path: Path) -> None:
        """See :meth:`ShardedReplayBuffer.dumps`."""
        path.mkdir(parents=True, exist_ok=True)
        before = [entry for entry in path.iterdir() if entry.is_dir() and entry.name.isdigit()]
        new = path / str(1 + max((int(entry.name) for entry in before), default=0))
        new.mkdir()
        try:
            self.call_all("dumps", lambda number: (str(new / f"shard{number}.pt"),))
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        marker = path / f"{_MARKER}.new"
        marker.write_text(json.dumps({"directory": new.name, "shards": len(self)}))
        os.replace(marker, path / _MARKER)
        self._checkpoint = path
        for entry in before:
            shutil.rmtree(entry, ignore_errors=True)

    def loads(self, path: Path) -> None:
        """See :meth:`ShardedReplayBuffer.loads`."""
        directory = newest(path)
        shards = json.loads((path / _MARKER).read_text())["shards"]
        self.load([str(directory / f"shard{number}.pt") for number in range(shards)])
        self._checkpoint = path

    def stop(self) -> None:
        """End all shards."""
        for shard in self.handles:
            self._calls.stop(shard)


def _largest_of_others(values: list[Any]) -> list[Any]:
    """For each value, the largest of the others; 0 if there is none."""
    if len(values) == 1:
        return [0]
    first = max(range(len(values)), key=values.__getitem__)
    second = max(value for number, value in enumerate(values) if number != first)
    return [second if number == first else values[first] for number in range(len(values))]


def newest(path: Path) -> Path:
    """The directory of the newest complete checkpoint under ``path``."""
    try:
        return path / json.loads((path / _MARKER).read_text())["directory"]
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} has no complete checkpoint of a {OWNER}.") from None
