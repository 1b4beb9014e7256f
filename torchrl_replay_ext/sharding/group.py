"""The shards of a buffer: calls to all of them, and lost processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from torchrl_replay_ext.samplers.base import ShardRows
from torchrl_replay_ext.sharding.arrays import OWNER, Arrays
from torchrl_replay_ext.sharding.calls import Lost, LostShards, RayCalls, get_all, wait_until
from torchrl_replay_ext.sharding.shard import Report

# Sent calls: for each shard, the process that is called and the reference to its answer; None if the shard is lost.
Sent = list[tuple[int, Any] | None]


class ShardGroup:
    """Calls shards, and restores those whose process was started again.

    Args:
        calls: starts and calls shards.
        arguments: those of each shard.
        restored: called with the number of a shard that was started again; returns its state or the file with it, or
            None for an empty shard.
        on_loss: called with a message if the process of a shard has ended.
        timeout: the longest time to wait for processes, in seconds.
    """

    def __init__(
        self,
        calls: RayCalls,
        arguments: Sequence[dict[str, Any]],
        restored: Callable[[int], dict[str, Any] | str | None],
        on_loss: Callable[[str], None],
        timeout: float,
    ):
        self._calls, self._restored, self._on_loss, self._timeout = calls, restored, on_loss, timeout
        self.handles = [calls.start(each) for each in arguments]
        # the newest report of each shard; an empty one of the last process if it is lost
        self.reports = [Report()] * len(self.handles)
        self._lost = LostShards(calls, self.handles)
        # state of the schedules of annealed hyperparameters
        self._schedules: dict[str, list] | None = None
        self.lost_shards = self.lost_rows = 0
        # until they have been started
        for number in range(len(self)):
            self._lost.add(number)
        if not wait_until(lambda: self._restore_returned() == len(self), max(timeout, 60.0)):
            self.stop()
            raise RuntimeError(
                f"{OWNER}: {len(self)} shards could not be started; does the cluster have the CPUs and the memory "
                "of remote_config= for each?"
            ) from self._lost.reason

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def can_draw(self) -> bool:
        """True if a shard is known to have rows that can be drawn."""
        return any(any(report.mass) for report in self.reports)

    # --- calls

    def send(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> Sent:
        """Call a method of all shards that are not lost, after those that were started again have been restored.

        Args:
            method: its name.
            arguments: maps the number of a shard to the arguments. Default: none.
        """
        self._restore_returned()
        return [
            None
            if number in self._lost.numbers
            else (self.reports[number].process, shard.answer.remote(method, *arguments(number)))
            for number, shard in enumerate(self.handles)
        ]

    def receive(self, sent: Sent) -> list[Any]:
        """Wait for the answers, and note reports and losses.

        Returns:
            The result of each shard; None for lost shards, and for calls of processes that were lost since.
        """
        results: list[Any] = [None] * len(self)
        answers = get_all(self._calls, [None if call is None else call[1] for call in sent])
        for number, (call, answer) in enumerate(zip(sent, answers, strict=True)):
            known = self.reports[number].process
            if call is None or call[0] != known or number in self._lost.numbers:
                continue
            if isinstance(answer, Lost) or answer[0].process != known:
                self._lose(number)
            else:
                self.reports[number], results[number] = answer
                self._schedules = answer[0].schedules or self._schedules
        return results

    def call(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[Any]:
        """:meth:`send` and :meth:`receive`."""
        return self.receive(self.send(method, arguments))

    def call_all(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[Any]:
        """Call a method of all shards; return the results.

        Raises:
            RuntimeError: if a shard is lost and not started again before the timeout; the method is not called then. If
                a shard is lost during the call.
        """
        self.call("report")
        self.wait(len(self))
        results = [] if self._lost.numbers else self.call(method, arguments)
        if self._lost.numbers:
            raise RuntimeError(f"{OWNER}.{method}: the process of shard {self._lost.numbers[0]} has ended.")
        return results

    def exchange(
        self, wanted: Sequence[ShardRows | None] | None, updates: list[Arrays] | None, *, counts_batch: bool = False
    ) -> Sent:
        """Send each shard its part of an update and of a draw; see :meth:`ReplayShard.exchange`."""

        def arguments(number: int) -> tuple[bytes]:
            others = [report for other, report in enumerate(self.reports) if other != number]
            call = (
                None if updates is None else updates[number],
                None if wanted is None else wanted[number],
                max((report.largest_priority for report in others), default=0.0),
                max((report.largest_episode for report in others), default=0),
                counts_batch,
            )
            return (pickle.dumps(call, protocol=5),)

        return self.send("exchange", arguments)

    # --- lost shards

    def _lose(self, number: int) -> None:
        """Note that the process of a shard has ended."""
        last = self.reports[number]
        self.reports[number] = Report(last.process)
        self.lost_shards += 1
        self.lost_rows += last.length
        self._lost.add(number)
        self._on_loss(
            f"the process of shard {number} of the replay buffer has ended (killed, or out of memory?); its "
            f"{last.length} transitions, as of its last report, are gone"
        )

    def _restore_returned(self) -> int:
        """Restore the shards whose processes were started again; return the number of shards that are not lost."""
        for number, report in self._lost.returned().items():
            try:
                # not at the start, and not if the process was only out of reach
                is_new = self.reports[number].process not in (0, report.process)
                self.reports[number] = self._restore(number, report) if is_new else report
            except Lost:
                self._lost.add(number)
        return len(self) - len(self._lost.numbers)

    def _restore(self, number: int, report: Report) -> Report:
        """Restore a shard, if there is a state for it; return its newest report."""
        answer = self.handles[number].answer
        try:
            if (source := self._restored(number)) is not None:
                # writers may have written to the new process already
                report, _ = self._calls.get(answer.remote("restore", source, True))
        except Lost:
            raise
        except Exception as error:
            self._on_loss(f"shard {number} could not be restored and goes on empty: {error}")
        if self._schedules:
            report, _ = self._calls.get(answer.remote("load_schedules", self._schedules))
        return report

    def wait(self, num_shards: int) -> None:
        """Wait until ``num_shards`` shards are not lost, or the timeout is over."""
        wait_until(lambda: self._restore_returned() >= num_shards, self._timeout)

    def stop(self) -> None:
        """End all shards."""
        for shard in self.handles:
            self._calls.stop(shard)
