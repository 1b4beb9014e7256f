"""The processes of the shards of a replay buffer, as one process sees them: calls, and processes that have ended."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torchrl_replay_ext.sharding.shard import OWNER, ReplayShard, Report

_PAUSE = 0.05


def _ray() -> Any:
    import ray

    return ray


def _ended() -> tuple[type[Exception], ...]:
    """The errors of calls whose process has ended."""
    exceptions = _ray().exceptions
    return exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError


def _get(reference: Any) -> Any:
    """Wait for an answer. Errors of the call are raised as they are."""
    try:
        return _ray().get(reference)
    except _ray().exceptions.RayTaskError as error:
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
        reports: the newest report of each shard. Default: none has reported yet.
    """

    def __init__(
        self,
        handles: Sequence[Any],
        timeout: float,
        *,
        on_loss: Callable[[str], None] = warn,
        reports: Sequence[Report] | None = None,
    ):
        self.handles, self.timeout, self.on_loss = handles, timeout, on_loss
        # the newest report of each shard, without a process while none is known to run
        self.reports = [Report()] * len(handles) if reports is None else [*reports]
        # for shards without a process, a call that is answered when there is one
        self._questions: dict[int, Any] = {}
        # why the last process has ended, or could not be started
        self.reason: Exception | None = None
        self.lost_shards = self.lost_rows = 0

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def running(self) -> list[int]:
        """The shards whose processes are not known to have ended."""
        return [number for number, report in enumerate(self.reports) if report.process]

    def find(self) -> None:
        """Use the shards whose processes were started (again)."""
        for number, report in enumerate(self.reports):
            if report.process:
                continue
            if number not in self._questions:
                self._questions[number] = self.handles[number].report.remote()
            elif _ray().wait([self._questions[number]], timeout=0)[0]:
                try:
                    self.reports[number] = _get(self._questions.pop(number))
                except _ended() as error:
                    self.reason = error

    def wait(self, num_shards: int, timeout: float | None = None) -> bool:
        """Wait until ``num_shards`` processes run; False if the timeout is over before."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while True:
            self.find()
            if len(self.running) >= num_shards or time.monotonic() >= deadline:
                return len(self.running) >= num_shards
            time.sleep(_PAUSE)

    def call(self, method: str, arguments: Callable[[int], tuple | None] = lambda number: ()) -> list[Any]:
        """Call a method of all shards whose processes run, wait for the answers, and note reports and losses.

        Args:
            method: its name.
            arguments: maps the number of a shard to the arguments; None: this shard is not called. Default: none.

        Returns:
            The result of each shard; None if there is none.
        """
        self.find()
        results, sent = list[Any]([None] * len(self)), {}
        for number in self.running:
            if (given := arguments(number)) is not None:
                sent[number] = self.handles[number].answer.remote(method, *given)
        for number, reference in sent.items():
            last = self.reports[number]
            try:
                self.reports[number], results[number] = _get(reference)
            except _ended():
                self.reports[number] = Report()
            if self.reports[number].process != last.process:
                self.lost_shards += 1
                self.lost_rows += last.length
                self.on_loss(
                    f"the process of shard {number} of the replay buffer has ended (killed, or out of memory?); its "
                    f"{last.length} transitions, as of its last report, are gone"
                )
        return results

    def call_all(self, method: str, arguments: Callable[[int], tuple] = lambda number: ()) -> list[Any]:
        """Call a method of all shards; return the results.

        Raises:
            RuntimeError: if a process has ended and is not started again before the timeout; the method is not called
                then. If a process ends during the call.
        """
        # a process that has ended is found by a call
        self.call("report")
        results = self.call(method, arguments) if self.wait(len(self)) else []
        if lost := {*range(len(self))}.difference(self.running):
            raise RuntimeError(f"{OWNER}.{method}: the process of shard {min(lost)} has ended.")
        return results

    def stop(self) -> None:
        """End all processes for good."""
        for shard in self.handles:
            _ray().kill(shard, no_restart=True)


def start_shards(
    arguments: Sequence[dict[str, Any]],
    remote_config: dict[str, Any],
    timeout: float,
    on_loss: Callable[[str], None],
) -> Shards:
    """Start a shard for each of ``arguments``, those of ReplayShard, with these options of ``ray.remote``."""
    options = {"num_cpus": 1, "max_restarts": -1, "max_task_retries": 0, **remote_config}
    actor = _ray().remote(ReplayShard).options(**options)
    shards = Shards([actor.remote(**each) for each in arguments], timeout, on_loss=on_loss)
    if not shards.wait(len(shards), max(timeout, 60.0)):
        shards.stop()
        raise RuntimeError(
            f"{OWNER}: {len(shards)} shards could not be started; does the cluster have the CPUs and the memory of "
            "remote_config= for each?"
        ) from shards.reason
    return shards
