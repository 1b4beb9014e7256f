"""Specifications of events: a condition on transitions, and how many transitions then enter an event table."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_replay_ext._torchrl import entries_of
from torchrl_replay_ext.arguments import is_key, require_choice, require_integer
from torchrl_replay_ext.core.conditions import Novel, StatefulCondition, Threshold

# the name of the table of all transitions
DEFAULT = "default"

Retention = Literal["ring", "pinned"]

Condition = NestedKey | Threshold | StatefulCondition | Callable[[TensorDictBase], Tensor]


@dataclass(frozen=True)
class EventSpec:
    r"""An event ν = ⟨ω, τ⟩ of SSET (Kompella et al. 2022, Sec. 2): a condition ω and a history length τ.

    Args:
        name: the name of the event, a non-empty string other than ``"default"``.
        condition: ω, evaluated for every written transition:

            * a key of an entry with one bool per transition, for example ``("next", "at_gap")``;
            * a :class:`~torchrl_replay_ext.Threshold` on an entry with one number per transition;
            * a :class:`~torchrl_replay_ext.Quantile` or :class:`~torchrl_replay_ext.Novel`, which depend on the
              transitions written before;
            * a callable that maps a TensorDict [T] to a bool tensor [T]. With ``context`` = 0 the rows are arbitrary
              transitions, and the result for a row must depend on this row only. With ``context`` > 0 the rows are
              consecutive transitions of one episode, and up to ``context`` earlier transitions of the episode precede
              the written ones. The result for a row must depend only on the row and the ``context`` rows before it;
              then it does not depend on how the data is split into writes. Earlier transitions are available if the
              default table holds them when the write begins.
        history: τ, the number of transitions that enter the table when the event occurs, >= 1: the transition of the
            event and the τ − 1 transitions before it in the same episode.
        table: the table that the transitions enter. Several events may share a table. Default: None, the name of the
            event.
        context: number of earlier transitions that a callable ``condition`` needs, >= 0. Default: 0.

    Raises:
        ValueError: if ``history`` < 1 or ``context`` < 0, if a Quantile or Novel has a ``context``, or if ``name`` or
            ``table`` is ``"default"``.
        TypeError: if the condition is none of these, or ``name`` or ``table`` is not a non-empty string.

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
        require_integer(f"EventSpec {self.name!r}", "history", self.history)
        require_integer(f"EventSpec {self.name!r}", "context", self.context, least=0)
        if DEFAULT in (self.name, self.table):
            raise ValueError(
                f"EventSpec({self.name!r}): {DEFAULT!r} is the name of the table of all transitions; use another name."
            )
        condition = self.condition
        if not (is_key(condition) or isinstance(condition, Threshold | StatefulCondition) or callable(condition)):
            raise TypeError(
                f"EventSpec({self.name!r}): condition must be a key, a Threshold, Quantile or Novel, or a "
                f"callable, not {condition!r}."
            )
        if isinstance(condition, StatefulCondition) and self.context:
            raise ValueError(
                f"EventSpec({self.name!r}, context={self.context}): a {type(condition).__name__} sees single "
                "transitions; use context=0."
            )

    def signal(self, data: TensorDictBase) -> Tensor:
        """True where the event occurs in ``data`` [T]; T bools, in the shape of the entry or the condition's result.

        Raises:
            KeyError: if the entry of the condition is missing.
            TypeError: if the entry or the callable's result has the wrong type.
            ValueError: if it has the wrong shape.
        """
        condition = self.condition
        if not callable(condition):
            key = condition.key if isinstance(condition, Threshold | StatefulCondition) else condition
            (result,) = entries_of(data, [key])
            what = f"the entry {key!r}"
            if result is None:
                raise KeyError(
                    f"EventSpec({self.name!r}): the data has no entry {key!r}; the environment or a transform must "
                    "write it. Or pass another condition."
                )
        else:
            try:
                result = condition(data)
            except Exception as error:
                if sys.version_info >= (3, 11):
                    error.add_note(f"This is the condition of EventSpec({self.name!r}).")
                raise
            what = "the condition's result"
        if not isinstance(result, Tensor):
            raise TypeError(f"EventSpec({self.name!r}): {what} must be a tensor, not {type(result).__name__}.")
        if result.numel() != data.shape[0] and not isinstance(condition, Novel):
            raise ValueError(
                f"EventSpec({self.name!r}): {what} has shape {tuple(result.shape)} for {data.shape[0]} transitions; "
                "one value per transition is needed."
            )
        if isinstance(condition, Threshold | StatefulCondition):
            result = condition.occurs(result)
        elif result.dtype != torch.bool:
            raise TypeError(f"EventSpec({self.name!r}): {what} must be bool, got {result.dtype}.")
        return result

    def without_memory(self) -> EventSpec:
        """This event, with a condition that remembers nothing."""
        condition: Any = self.condition
        has_state = isinstance(self.condition, StatefulCondition)
        return replace(self, condition=replace(condition)) if has_state else self

    def __copy__(self) -> EventSpec:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> EventSpec:
        if isinstance(self.condition, StatefulCondition):
            return replace(self, condition=copy.deepcopy(self.condition, memo))
        return self

    def __getstate__(self) -> dict[str, Any]:
        if callable(self.condition):
            try:
                pickle.dumps(self.condition)
            except Exception as error:
                raise TypeError(
                    f"EventSpec({self.name!r}): its condition cannot be sent to another process ({error}); use a "
                    "function defined at the top level of a module, or no function."
                ) from error
        return vars(self).copy()


def table_capacities(specs: Sequence[EventSpec], capacity: Mapping[str, int], retention: Retention) -> dict[str, int]:
    """Check the arguments of :class:`~torchrl_replay_ext.EventTables`.

    Returns:
        The capacity κ of each table, the default table first. With ``retention="ring"``, the default table has 0.
    """
    if isinstance(specs, EventSpec) or not isinstance(capacity, Mapping):
        raise TypeError(
            "EventTables: specs must be a list of EventSpec, and capacity a dict with one number for each table."
        )
    if not specs or not all(isinstance(spec, EventSpec) for spec in specs):
        raise ValueError("EventTables: specs must be a list of at least one EventSpec.")
    require_choice("EventTables", "retention", retention, ("ring", "pinned"))
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"EventTables: two events have the same name among {names}.")
    tables = list(dict.fromkeys(spec.table or spec.name for spec in specs))
    expected = tables if retention == "ring" else [DEFAULT, *tables]
    if set(capacity) != set(expected):
        raise ValueError(
            f"EventTables: capacity names {sorted(capacity)}, but the tables are {sorted(expected)}; give one number "
            "for each table. With retention='ring' the default table is the whole storage: remove 'default'."
        )
    for name, value in capacity.items():
        require_integer("EventTables", f"capacity[{name!r}]", value)
    longest = max(specs, key=lambda spec: spec.history)
    if retention == "pinned" and longest.history > capacity[DEFAULT]:
        raise ValueError(
            f"EventTables: EventSpec({longest.name!r}) has history={longest.history}, more than the "
            f"{capacity[DEFAULT]} transitions that the default table keeps; reduce the history or increase "
            "the capacity."
        )
    return {DEFAULT: 0, **{name: capacity[name] for name in expected}}
