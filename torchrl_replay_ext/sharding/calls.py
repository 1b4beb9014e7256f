"""How a sharded buffer starts its shards, calls them and waits for them: with Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torchrl_replay_ext.sharding.shard import ReplayShard


class Lost(RuntimeError):
    """The process of a shard ended before it answered, or those of all shards have ended.

    Args:
        message: what was lost.
    """

    def __init__(self, message: str):
        super().__init__(message)


class Calls(Protocol):
    """Starts shards and makes calls. ``shard.method.remote(...)`` is a call; it returns a reference to the answer."""

    def start(self, arguments: dict[str, Any]) -> Any:
        """Start a shard with these arguments of ReplayShard."""
        ...

    def get(self, reference: Any) -> Any:
        """Wait for an answer. Errors of the call are raised as they are; :class:`Lost` if the process has ended."""
        ...

    def is_answered(self, reference: Any) -> bool:
        """Whether :meth:`get` would not wait."""
        ...

    def stop(self, shard: Any) -> None:
        """End a shard for good."""
        ...


class RayCalls:
    """Shards are Ray actors, which Ray starts again if their process ends.

    Args:
        remote_config: options of ``ray.remote`` for each actor, such as ``num_cpus`` or a placement group.
    """

    def __init__(self, remote_config: dict[str, Any]):
        self._remote_config = {"max_restarts": -1, "max_task_retries": 0, **remote_config}

    def start(self, arguments: dict[str, Any]) -> Any:
        """See :class:`Calls`."""
        import ray  # pyright: ignore[reportMissingImports]: an extra

        return ray.remote(ReplayShard).options(**self._remote_config).remote(**arguments)

    def get(self, reference: Any) -> Any:
        """See :class:`Calls`."""
        import ray  # pyright: ignore[reportMissingImports]: an extra
        from ray import exceptions  # pyright: ignore[reportMissingImports]: an extra

        try:
            return ray.get(reference)
        except exceptions.RayTaskError as error:
            raise error.cause from None
        except (exceptions.RayActorError, exceptions.ObjectLostError, exceptions.OutOfMemoryError) as error:
            raise Lost(str(error)) from error

    def is_answered(self, reference: Any) -> bool:
        """See :class:`Calls`."""
        import ray  # pyright: ignore[reportMissingImports]: an extra

        return bool(ray.wait([reference], timeout=0)[0])

    def stop(self, shard: Any) -> None:
        """See :class:`Calls`."""
        import ray  # pyright: ignore[reportMissingImports]: an extra

        ray.kill(shard, no_restart=True)


def get_all(calls: Calls, references: Sequence[Any]) -> list[Any]:
    """All answers; :class:`Lost` in the place of those of lost shards, None in the place of None.

    Other errors are raised after all answers have been received.
    """
    answers, errors = list[Any](), list[Exception]()
    for reference in references:
        try:
            answers.append(None if reference is None else calls.get(reference))
        except Lost as lost:
            answers.append(lost)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers
