"""The processes of the shards of a replay buffer, as one process sees them: calls, and processes that have ended."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl_replay_ext.sharding.shard import OWNER, Report

_PAUSE = 0.05


def ray_module() -> Any:
    """Ray, which is imported when it is needed."""
    import ray

    return ray


def _get(reference: Any) -> Any:
    """Wait for an answer. Errors of the call are raised as they are; a RayError says that the process has ended."""
    try:
        return ray_module().get(reference)
    except ray_module().exceptions.RayTaskError as error:
        raise error.cause from None


def warn(message: str) -> None:
    """Report a loss."""
    warnings.warn(f"{OWNER}: {message}.", stacklevel=2)


class Shards:
    """Calls shards. Ray starts the process of a shard again if it ends; the shard is then used again.

    Args:
        handles: the actors.
        timeout: the longest time to wait for processes, in seconds.
        on_loss: called with a message if the process of a shard has ended. Default: :func:`warn`.
        reports: the newest report of each shard, by number. Default: none has reported yet.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        timeout: float,
        *,
        on_loss: Callable[[str], None] = warn,
        reports: Mapping[int, Report] | None = None,
    ):
        self.handles, self.timeout, self.on_loss = handles, timeout, on_loss
        # the newest report of each shard whose process is not known to have ended
        self.reports = dict(reports or {})
        # for the other shards, a call that is answered when there is a process
        self._questions: dict[int, Any] = {}
        # why the last process has ended, or could not be started
        self.reason: Exception | None = None
        self.lost_shards = self.lost_rows = 0

    def __len__(self) -> int:
        return len(self.handles)

    def find(self) -> None:
        """Use the shards whose processes were started (again)."""
        for number in set(range(len(self))).difference(self.reports):
            if number not in self._questions:
                self._questions[number] = self.handles[number].report.remote()
            elif ray_module().wait([self._questions[number]], timeout=0)[0]:
                try:
                    self.reports[number] = _get(self._questions.pop(number))
                except ray_module().exceptions.RayError as error:
                    self.reason = error

    def wait(self, num_shards: int) -> bool:
        """Wait until ``num_shards`` processes run; False if the timeout is over before."""
        deadline = time.monotonic() + self.timeout
        self.find()
        while len(self.reports) < num_shards and time.monotonic() < deadline:
            time.sleep(_PAUSE)
            self.find()
        return len(self.reports) >= num_shards

    def call(self, method: str, arguments: Mapping[int, Any] | None = None) -> dict[int, Any]:
        """Call a method of shards whose processes run, wait for the answers, and note reports and losses.

        Args:
            method: its name.
            arguments: its argument by the number of the shard; others are not called. Default: None, all are called
                without an argument.

        Returns:
            The results, by the numbers of the shards that have answered.
        """
        self.find()
        results, sent = dict[int, Any](), dict[int, Any]()
        for number in self.reports:
            if arguments is None or number in arguments:
                given = () if arguments is None else (arguments[number],)
                sent[number] = self.handles[number].answer.remote(method, *given)
        for number, reference in sent.items():
            last = self.reports[number]
            try:
                self.reports[number], results[number] = _get(reference)
            except ray_module().exceptions.RayError:
                del self.reports[number]
            if number not in results or self.reports[number].process != last.process:
                self.lost_shards += 1
                self.lost_rows += last.length
                self.on_loss(
                    f"the process of shard {number} of the replay buffer has ended (killed, or out of memory?); its "
                    f"{last.length} transitions, as of its last report, and those on the way to it are gone"
                )
        return results

    def call_all(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Call a method of all shards; return the results.

        Raises:
            RuntimeError: if a process has ended, or was never started, and is not started before the timeout; the
                method is not called then. If a process ends during the call.
        """
        # a process that has ended is found by a call
        self.call("report")
        by_number = None if arguments is None else dict(enumerate(arguments))
        results = self.call(method, by_number) if self.wait(len(self)) else {}
        if lost := set(range(len(self))).difference(self.reports):
            raise RuntimeError(
                f"{OWNER}.{method}: the process of shard {min(lost)} has ended, or was not started in "
                f"{self.timeout:g} s; does the cluster have the CPUs and the memory of remote_config= for each shard?"
            ) from self.reason
        return [results[number] for number in range(len(self))]
