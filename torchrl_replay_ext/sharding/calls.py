"""How a sharded buffer starts its shards, calls them and waits for them: with Ray."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torchrl_replay_ext.sharding.arrays import OWNER
from torchrl_replay_ext.sharding.shard import ReplayShard, Report

_PAUSE = 0.05


class Lost(RuntimeError):
    """The process of a shard ended before it answered, or those of all shards have ended.

    Args:
        message: what was lost.
    """

    def __init__(self, message: str):
        super().__init__(message)


class RayCalls:
    """Starts shards and makes calls. Shards are Ray actors, which Ray starts again if their process ends.

    ``shard.method.remote(...)`` is a call; it returns a reference to the answer.

    Args:
        remote_config: options of ``ray.remote`` for each actor, such as ``num_cpus`` or a placement group.
    """

    def __init__(self, remote_config: dict[str, Any]):
        self._remote_config = {"max_restarts": -1, "max_task_retries": 0, **remote_config}

    def start(self, arguments: dict[str, Any]) -> Any:
        """Start a shard with these arguments of ReplayShard."""
        return _ray().remote(ReplayShard).options(**self._remote_config).remote(**arguments)

    def get(self, reference: Any) -> Any:
        """Wait for an answer. Errors of the call are raised as they are; :class:`Lost` if the process has ended."""
        exceptions = _ray().exceptions
        try:
            return _ray().get(reference)
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError) as error:
            raise Lost(str(error)) from error

    def is_answered(self, reference: Any) -> bool:
        """Whether :meth:`get` would not wait."""
        return bool(_ray().wait([reference], timeout=0)[0])

    def stop(self, shard: Any) -> None:
        """End a shard for good."""
        _ray().kill(shard, no_restart=True)


def _ray() -> Any:
    import ray

    return ray


def get_all(calls: RayCalls, references: Sequence[Any]) -> list[Any]:
    """All answers; :class:`Lost` in the place of those of lost shards, None in the place of None."""
    answers: list[Any] = []
    for reference in references:
        try:
            answers.append(None if reference is None else calls.get(reference))
        except Lost as lost:
            answers.append(lost)
    return answers


class LostShards:
    """The shards whose processes have ended, until Ray has started them again, as one process knows them.

    Args:
        calls: makes the calls.
        shards: handles of all shards.
    """

    def __init__(self, calls: RayCalls, shards: Sequence[Any]):
        self._calls, self._shards = calls, shards
        # for each lost shard, a call that is answered when its process was started again
        self._questions: dict[int, Any] = {}
        # why the last process has ended, or could not be started
        self.reason: Lost | None = None

    @property
    def numbers(self) -> list[int]:
        """The lost shards."""
        return sorted(self._questions)

    def add(self, number: int) -> None:
        """Note that the process of a shard has ended, and ask for its report."""
        self._questions[number] = self._shards[number].report.remote()

    def returned(self) -> dict[int, Report]:
        """Remove the shards whose processes were started again; return their reports."""
        reports = {}
        for number, question in list(self._questions.items()):
            if self._calls.is_answered(question):
                try:
                    reports[number] = self._calls.get(question)
                    del self._questions[number]
                except Lost as lost:
                    self.reason = lost
                    self.add(number)
        return reports


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until a condition is met; False if it is not in ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return is_met


def warn(message: str) -> None:
    """Report a loss."""
    warnings.warn(f"{OWNER}: {message}.", stacklevel=2)
