"""Exponents of samplers: their attributes, their documentation, and their limits."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.samplers.slot_state import SlotState

ALPHA = """Priority exponent. Assigning it applies it to everything stored, in O(capacity).

While alpha is annealed (:class:`~torchrl_replay_ext.Anneal`), a transition has the exponent of the time when it was
last written or updated; when the schedule ends, its end is applied to everything stored. In a
:class:`~torchrl_replay_ext.CompilableReplayBuffer`, where that moment cannot be seen, each update applies the current
alpha to the next 64 slots instead."""
BETA = "Exponent of the importance-sampling weights."


def make_exponents(owner: str, **values: float | Anneal) -> dict[str, Hyperparameter]:
    """Hyperparameters ``alpha``, ``omega`` (>= 0) and ``beta`` (in [0, 1]) of a sampler, by name."""
    hints = {"alpha": "; use 0 for uniform sampling", "omega": "; use 0 for plain PER"}
    limits = {"beta": 1.0}
    return {
        name: Hyperparameter(owner, name, value, high=limits.get(name, math.inf), hint=hints.get(name, ""))
        for name, value in values.items()
    }


class HasHyperparameters(Protocol):
    """A sampler with hyperparameters."""

    hyperparameters: dict[str, Hyperparameter]
    state: SlotState

    def exclusive(self) -> ExitStack:
        """Keeps other threads from drawing, writing and updating."""
        ...


class exponent:
    """A hyperparameter of a sampler as an attribute: reads its value, assigns a number or schedule."""

    def __init__(self, name: str, doc: str, *, only_with: str = ""):
        self._name, self.__doc__, self._only_with = name, doc, only_with

    def __get__(self, sampler: HasHyperparameters | None, owner: type | None = None) -> Any:
        if sampler is None:
            return self
        self._require(sampler)
        return float(sampler.hyperparameters[self._name].value)

    def __set__(self, sampler: HasHyperparameters, value: float | Tensor | Anneal) -> None:
        self._require(sampler)
        with sampler.exclusive():
            sampler.state.set_hyperparameter(self._name, value)

    def _require(self, sampler: HasHyperparameters) -> None:
        if self._name not in sampler.hyperparameters:
            raise AttributeError(f"{type(sampler).__name__}.{self._name}: only with {self._only_with}.")
