"""Stands for the module ray: actors in this process, which can be killed and started again at will."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any


class LocalRay:
    """Makes calls at once. Answers are copies, as those of Ray, and errors of actors are raised as Ray raises them.

    Attributes:
        before: called before each call with the number of the actor and the method; nothing by default.
        actors: all that were started.
    """

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            def __init__(self, cause: Exception):
                self.cause = cause

    def __init__(self):
        self.before: Callable[[int, str], None] = lambda number, method: None
        self.actors: list[LocalActor] = []

    def remote(self, actor_class: type) -> _ActorClass:
        return _ActorClass(self, actor_class)

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return references, []

    def kill(self, actor: LocalActor, no_restart: bool) -> None:
        actor.kill()


class _ActorClass:
    def __init__(self, ray: LocalRay, actor_class: type):
        self.ray, self.actor_class = ray, actor_class

    def options(self, **options: Any) -> _ActorClass:
        return self

    def remote(self, **arguments: Any) -> LocalActor:
        actors = self.ray.actors
        actors.append(LocalActor(self.ray, len(actors), self.actor_class, copy.deepcopy(arguments)))
        return actors[-1]


class LocalActor:
    def __init__(self, ray: LocalRay, number: int, actor_class: type, arguments: dict[str, Any]):
        self.ray, self.number, self.actor_class, self.arguments = ray, number, actor_class, arguments
        self.restart()

    def restart(self) -> None:
        self.replay, self.is_alive = self.actor_class(**copy.deepcopy(self.arguments)), True

    def kill(self) -> None:
        self.is_alive = False

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self, method)


class _Method:
    def __init__(self, actor: LocalActor, name: str):
        self.actor, self.name = actor, name

    def remote(self, *arguments: Any) -> Any:
        actor, exceptions = self.actor, LocalRay.exceptions
        actor.ray.before(actor.number, arguments[0] if self.name == "answer" else self.name)
        if not actor.is_alive:
            return exceptions.RayError("the process has ended")
        try:
            answer = getattr(actor.replay, self.name)(*copy.deepcopy(arguments))
        except Exception as error:
            return exceptions.RayTaskError(error)
        return copy.deepcopy(answer)
