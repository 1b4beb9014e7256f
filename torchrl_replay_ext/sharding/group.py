"""The shards of a buffer: calls to all of them, and lost processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_replay_ext.sharding.arrays import OWNER
from torchrl_replay_ext.sharding.calls import Lost, LostShards, RayCalls, get_all, wait_until
from torchrl_replay_ext.sharding.shard import Report


class ShardGroup:
    """Calls shards, and uses those again whose process was started again.

    Args:
        calls: starts and calls shards.
        arguments: those of each shard.
        on_loss: called with a message if the process of a shard has ended.
        timeout: the longest time to wait for processes, in seconds.
    """

    def __init__(
        self, calls: RayCalls, arguments: Sequence[dict[str, Any]], on_loss: Callable[[str], None], timeout: float
    ):
        self._calls, self._on_loss, self._timeout = calls, on_loss, timeout
        self.handles = [calls.start(each) for each in arguments]
        # the newest report of each shard; an empty one of the last process if it is lost
        self.reports = [Report()] * len(self.handles)
        self._lost = LostShards(calls, self.handles)
        self.lost_shards = self.lost_rows = 0
        # until they have been started
        for number in range(len(self)):
            self._lost.add(number)
        if not self.wait(len(self), max(timeout, 60.0)):
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

    def call(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[Any]:
        """Call a method of all shards that are not lost, wait for the answers, and note reports and losses.

        Args:
            method: its name.
            arguments: maps the number of a shard to the arguments. Default: none.

        Returns:
            The result of each shard; None for lost shards.
        """
        self._take_back()
        lost, results = self._lost.numbers, list[Any]([None] * len(self))
        sent = [
            None if number in lost else shard.answer.remote(method, *arguments(number))
            for number, shard in enumerate(self.handles)
        ]
        for number, answer in enumerate(get_all(self._calls, sent)):
            if isinstance(answer, Lost) or (answer and answer[0].process != self.reports[number].process):
                self._lose(number)
            elif answer:
                self.reports[number], results[number] = answer
        return results

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

    def _take_back(self) -> int:
        """Use the shards again whose processes were started again; return the number of shards that are not lost."""
        for number, report in self._lost.returned().items():
            self.reports[number] = report
        return len(self) - len(self._lost.numbers)

    def wait(self, num_shards: int, timeout: float | None = None) -> bool:
        """Wait until ``num_shards`` shards are not lost; False if the timeout is over before."""
        return wait_until(lambda: self._take_back() >= num_shards, self._timeout if timeout is None else timeout)

    def stop(self) -> None:
        """End all shards."""
        for shard in self.handles:
            self._calls.stop(shard)
