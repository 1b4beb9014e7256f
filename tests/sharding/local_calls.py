"""Shards in this process instead of Ray actors, which can be killed and started again at will."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torchrl_replay_ext.sharding.calls import Lost
from torchrl_replay_ext.sharding.shard import ReplayShard


class LocalCalls:
    """Makes calls at once, in the order of the coordinator's calls. Answers are copies, as those of Ray.

    Args:
        before: called before each call with the number of the shard and the method. Default: nothing.
    """

    def __init__(self, before: Callable[[int, str], None] = lambda number, method: None):
        self.before, self.shards = before, list[LocalShard]()
        self.num_calls = 0

    def start(self, arguments: dict[str, Any]) -> LocalShard:
        self.shards.append(LocalShard(self, len(self.shards), copy.deepcopy(arguments)))
        return self.shards[-1]

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def is_answered(self, reference: Any) -> bool:
        return not isinstance(reference, _Unanswered) or reference.shard.is_alive

    def stop(self, shard: LocalShard) -> None:
        shard.is_alive = False


class _Unanswered(Lost):
    """The answer of a process that has ended, until it is started again."""

    def __init__(self, shard: LocalShard):
        super().__init__("the process has ended")
        self.shard = shard


class LocalShard:
    def __init__(self, calls: LocalCalls, number: int, arguments: dict[str, Any]):
        self.calls, self.number, self.arguments = calls, number, arguments
        self.restart()

    def restart(self) -> None:
        self.replay, self.is_alive = ReplayShard(**copy.deepcopy(self.arguments)), True

    def kill(self) -> None:
        self.is_alive = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self, method)


class _Method:
    def __init__(self, shard: LocalShard, name: str):
        self.shard, self.name = shard, name

    def remote(self, *arguments: Any, **keywords: Any) -> Any:
        shard = self.shard
        shard.calls.num_calls += 1
        shard.calls.before(shard.number, arguments[0] if self.name == "answer" else self.name)
        if not shard.is_alive:
            return _Unanswered(shard)
        try:
            answer = getattr(shard.replay, self.name)(*copy.deepcopy(arguments), **keywords)
        except Exception as error:
            return error
        return copy.deepcopy(answer)
