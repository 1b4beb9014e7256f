"""Events: a condition on transitions, and how much of what led to it is remembered."""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

DEFAULT = "default"

_OPERATORS = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def is_key(value: Any) -> bool:
    """Whether ``value`` can be the name of an entry: a string, or a tuple of strings."""
    return (isinstance(value, str) and bool(value)) or (
        isinstance(value, tuple) and bool(value) and all(isinstance(part, str) and part for part in value)
    )


@dataclass(frozen=True)
class Threshold:
    """The condition that an entry with one number per transition compares to ``value`` in a given way.

    Args:
        key: where the number is stored, ``("next", "reward")`` for example.
        op: one of ``>  >=  <  <=  ==  !=``.
        value: what it is compared to, a number; infinite ones are allowed, NaN is not.

    Raises:
        ValueError: if ``op`` is unknown or ``value`` is NaN.
        TypeError: if ``key`` is not the name of an entry or ``value`` is not a number.

    Examples:
        >>> Threshold(("next", "reward"), ">", 8.0)
        Threshold(key=('next', 'reward'), op='>', value=8.0)
    """

    key: NestedKey
    op: str
    value: float

    def __post_init__(self):
        if not is_key(self.key):
            raise TypeError(
                f"Threshold(key={self.key!r}): key must be the name of an entry, a string or a tuple of strings."
            )
        if not isinstance(self.op, str) or self.op not in _OPERATORS:
            raise ValueError(f"Threshold(op={self.op!r}): op must be one of {' '.join(_OPERATORS)}.")
        if isinstance(self.value, bool) or not isinstance(self.value, Real):
            raise TypeError(
                f"Threshold(value={self.value!r}): value must be a number, not {type(self.value).__name__}; for an "
                "entry of bools pass its key as the condition."
            )
        if math.isnan(self.value):
            raise ValueError("Threshold(value=nan): value must not be NaN, every comparison with it is False.")


Condition = NestedKey | Threshold | Callable[[TensorDictBase], Tensor]


@dataclass(frozen=True)
class EventSpec:
    r"""An event and how much of what led to it is remembered: ν = ⟨ω, τ⟩ of SSET (Kompella et al. 2022, Sec. 2).

    Args:
        name: the event's name.
        condition: ω, evaluated on every written transition:

            * a key that holds a bool per transition, ``("next", "at_gap")`` for example;
            * a :class:`Threshold` on a key that holds a number per transition;
            * a callable that maps a TensorDict [T] to a bool tensor [T]. With ``context`` 0 the rows are any
              transitions, and each must be judged by itself. With ``context`` > 0 they are successive transitions of
              one episode, led by up to ``context`` earlier ones, and a row may be judged by itself and the ``context``
              rows before it, no more: where a write begins and ends must make no difference. Earlier transitions are
              those that the default table still holds when the write begins.
        history: τ, the number of transitions that enter the table when the event occurs: that of the event and those of
            the same episode before it, >= 1.
        table: the table they enter; by default one that has the event's name. Several events may share a table.
        context: see ``condition``.

    Raises:
        ValueError: if ``history`` < 1 or ``context`` < 0, or a name is ``"default"``.
        TypeError: if the condition is none of the three, or a name is not a string.

    Examples:
        >>> gap = EventSpec("gap", ("next", "at_gap"), history=200)
        >>> fast = EventSpec("fast", Threshold(("next", "reward"), ">", 8.0), history=200, table="good")
    """

    name: str
    condition: Condition
    history: int
    table: str | None = None
    context: int = 0

    def __post_init__(self):
        for field, value in (("name", self.name), ("table", self.table)):
            if not (isinstance(value, str) and value) and not (field == "table" and value is None):
                raise TypeError(f"EventSpec({self.name!r}, {field}={value!r}): {field} must be a non-empty string.")
        for field, low in (("history", 1), ("context", 0)):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"EventSpec({self.name!r}, {field}={value!r}): {field} must be an integer >= {low}.")
        if DEFAULT in (self.name, self.table):
            raise ValueError(f"EventSpec({self.name!r}): {DEFAULT!r} is the table of everything; use another name.")
        condition = self.condition
        if not (is_key(condition) or isinstance(condition, Threshold) or callable(condition)):
            raise TypeError(
                f"EventSpec({self.name!r}): condition must be a key, a Threshold or a callable, not {condition!r}."
            )

    def occurs(self, data: TensorDictBase) -> Tensor:
        """Where in ``data`` [T] the event occurs, bool [T].

        Raises:
            KeyError: if the entry it needs is missing.
            TypeError: if the entry or the callable's result has the wrong type.
            ValueError: if it has the wrong shape.
        """
        condition = self.condition
        if isinstance(condition, (str, tuple, Threshold)):
            key = condition.key if isinstance(condition, Threshold) else condition
            result = data.get(key, None)
            what = f"the entry {key!r}"
            if result is None:
                raise KeyError(
                    f"EventSpec({self.name!r}): the data has no entry {key!r}, which the environment (or a transform) "
                    "writes; pass another condition, or let it write one."
                )
        else:
            result = condition(data)
            what = "the condition's result"
        if not isinstance(result, Tensor):
            raise TypeError(f"EventSpec({self.name!r}): {what} is no tensor but {type(result).__name__}.")
        if result.numel() != data.shape[0]:
            raise ValueError(
                f"EventSpec({self.name!r}): {what} has shape {tuple(result.shape)} for {data.shape[0]} transitions; "
                "one value per transition is needed."
            )
        if isinstance(condition, Threshold):
            result = _OPERATORS[condition.op](result, condition.value)
        elif result.dtype != torch.bool:
            raise TypeError(f"EventSpec({self.name!r}): {what} must be bool, got {result.dtype}.")
        return result.reshape(-1)

    def __copy__(self) -> EventSpec:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> EventSpec:
        return self

    def __getstate__(self) -> dict[str, Any]:
        if callable(self.condition):
            try:
                pickle.dumps(self.condition)
            except Exception as error:
                raise TypeError(
                    f"EventSpec({self.name!r}): its condition cannot be sent to another process ({error}); use a "
                    "function of a module, a key or a Threshold."
                ) from error
        return vars(self).copy()
