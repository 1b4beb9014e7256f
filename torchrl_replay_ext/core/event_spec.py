"""Events: conditions on transitions, and how many transitions then enter an event table."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_replay_ext._torchrl import entries_of
from torchrl_replay_ext.arguments import is_key, require_choice, require_integer, require_nested_keys, require_number
from torchrl_replay_ext.core.pair_counts import Sketch, hash_rows

_OPERATORS = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}
# dtypes that torch 2.14 cannot compare by size, and wider ones
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}
# rows of the sketch of Novel
_ROWS = 4


@dataclass(frozen=True)
class Threshold:
    """The condition ``data[key] op value`` of an event.

    Integers and bools (0 and 1) are compared exactly with any ``value``, also if it is a fraction or outside of the
    range of their dtype. Numbers of a floating-point dtype are compared with ``value`` in the precision of this dtype.

    Args:
        key: an entry with one number per transition, for example ``("next", "reward")``.
        op: one of ``>  >=  <  <=  ==  !=``.
        value: a number, possibly infinite, but not NaN.

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
        require_nested_keys("Threshold", key=self.key)
        require_choice("Threshold", "op", self.op, [*_OPERATORS])
        require_number("Threshold", "value", self.value, lambda value: value == value, "a number, not NaN")
        value = self.value.item() if isinstance(self.value, Tensor) else self.value
        # Python compares these exactly, NumPy and torch do not
        object.__setattr__(self, "value", int(value) if isinstance(value, Integral) else float(value))

    def occurs(self, column: Tensor) -> Tensor:
        """True where the condition holds."""
        compare, value, dtype = _OPERATORS[self.op], self.value, column.dtype
        if dtype.is_floating_point:
            value = float(value)
            # torch would round a finite value to infinity
            is_too_large = math.isfinite(value) and bool(torch.tensor(value, dtype=dtype, device="cpu").isinf())
            return compare(column.to(torch.float64) if is_too_large else column, value)
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_inside = low <= value <= high
        if not is_inside or (self.op in ("==", "!=") and value != math.floor(value)):
            # the result is the same for all numbers of this dtype
            return torch.full_like(column, compare(low, value), dtype=torch.bool)
        whole = math.floor(value) if self.op in (">", "<=") else math.ceil(value)
        if dtype == torch.uint64:
            # int64 numbers in the same order
            return compare(column.view(torch.int64) ^ torch.iinfo(torch.int64).min, whole - 2**63)
        return compare(column.to(_WIDER.get(dtype, dtype)), whole)


class StatefulCondition(ABC):
    """A condition that depends on the transitions written before, in the order of writing, over all streams.

    The tables of a buffer have their own copy of it, which they save, load and empty.
    """

    key: NestedKey
    # what it remembers, by name; changed in place, zeros at first
    tensors: dict[str, Tensor]

    @abstractmethod
    def occurs(self, column: Tensor) -> Tensor:
        """True where the condition holds, bool [n] on the CPU; the rows of ``column`` [n, ...] are remembered."""


@dataclass(frozen=True)
class Quantile(StatefulCondition):
    """The condition that a number is above a running quantile, for example one of the highest 1 % of the rewards.

    The event occurs if ``data[key]`` is larger than the q-quantile of the last ``window`` numbers that the buffer got
    before, of all streams in the order of writing (in a sharded buffer, each shard by itself). The quantile of m
    numbers is the smallest of them that at least q · m of them do not exceed. So at most about a share of 1 - q of the
    transitions are events, and none if more than a share of 1 - q have the largest number: for a reward of 1 at the
    goal and 0 elsewhere, choose q below 1 minus the share of transitions that reach the goal. Numbers that are NaN or
    infinite are no events and are not remembered.

    Args:
        key: an entry with one number per transition, for example ``("next", "reward")``.
        q: the quantile, in (0, 1).
        window: how many numbers are remembered, 16 bytes each. A row takes about 10 µs with 10,000 of them, and about
            200 µs with 10^6. Default: 10000.

    Raises:
        ValueError: if ``q`` or ``window`` is out of range.
        TypeError: if an argument has another type.

    Examples:
        >>> from torchrl_replay_ext import EventSpec
        >>> best = EventSpec("best", Quantile(("next", "reward"), 0.99), history=50)
    """

    key: NestedKey
    q: float
    window: int = 10_000
    tensors: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        require_nested_keys("Quantile", key=self.key)
        require_number("Quantile", "q", self.q, lambda q: 0 < q < 1, "in (0, 1)")
        require_integer("Quantile", "window", self.window)

        recent = torch.zeros(self.window, dtype=torch.float64, device="cpu")
        count = torch.zeros(1, dtype=torch.int64, device="cpu")
        # the last numbers in a ring, the same in ascending order, and how many there were so far
        self.tensors.update(recent=recent, ordered=recent.clone(), count=count)

    def occurs(self, column: Tensor) -> Tensor:
        """True where a number is above the quantile of those before it; bool [n] on the CPU."""
        numbers = column.reshape(-1).to(torch.float64).cpu().numpy()
        recent, ordered, count = (tensor.numpy() for tensor in self.tensors.values())
        occurs = np.zeros(len(numbers), bool)
        for row in np.flatnonzero(np.isfinite(numbers)):
            new, size, oldest = numbers[row], min(count[0], self.window), count[0] % self.window
            if size:
                occurs[row] = new > ordered[math.ceil(self.q * size) - 1]
            # the numbers between the place that becomes free and that of the new one move by one place
            hole = size if size < self.window else np.searchsorted(ordered, recent[oldest])
            at = np.searchsorted(ordered[:size], new)
            if hole < at:
                at -= 1
                ordered[hole:at] = ordered[hole + 1 : at + 1]
            else:
                ordered[at + 1 : hole + 1] = ordered[at:hole]
            ordered[at] = recent[oldest] = new
            count[0] += 1
        return torch.from_numpy(occurs)


@dataclass(frozen=True)
class Novel(StatefulCondition):
    """The condition that a state was seldom seen. The history of the event then leads to the border of what is known.

    The event occurs if the buffer got the state ``data[key]`` at most ``times`` times so far, this transition included,
    in any stream. A count-min sketch counts hashes (Cormode and Muthukrishnan 2005): its size is fixed, and a count may
    be too large, never too small, where many different states share its cells. With as many different states as
    ``width``, one of six new states is missed; with half as many, one of forty.

    Args:
        key: an entry with the state, of any shape, for example ``("next", "observation")``.
        times: how often a state is novel, >= 1. Default: 1, only the first time.
        resolution: states are the same if all their numbers, divided by ``resolution`` and rounded down, are the same.
            Default: None, if all their numbers are equal; continuous states are then always novel.
        width: number of counters in each of the four rows of the sketch, of four bytes each, rounded up to a power of
            2; choose about the number of different states. Default: 262144.

    Raises:
        ValueError: if an argument is out of range.
        TypeError: if an argument has another type.

    Examples:
        >>> from torchrl_replay_ext import EventSpec
        >>> border = EventSpec("border", Novel(("next", "observation"), resolution=0.1), history=50)
    """

    key: NestedKey
    times: int = 1
    resolution: float | None = None
    width: int = 262_144
    tensors: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _sketch: Sketch = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        require_nested_keys("Novel", key=self.key)
        require_integer("Novel", "times", self.times)
        require_integer("Novel", "width", self.width)
        if self.resolution is not None:
            require_number("Novel", "resolution", self.resolution, lambda r: 0 < r < float("inf"), "positive")

        sketch = Sketch(_ROWS, self.width, device=torch.device("cpu"))
        object.__setattr__(self, "_sketch", sketch)
        self.tensors["counts"] = sketch.counts

    def occurs(self, column: Tensor) -> Tensor:
        """True where a state was seen at most ``times`` times, this one included; bool [n] on the CPU."""
        if self.resolution is not None:
            column = (column.to(torch.float64) / self.resolution).floor()
        hashes = hash_rows([column]).cpu()
        ordered, order = hashes.sort(stable=True)
        # how many of the rows before are equal
        earlier = torch.empty_like(order)
        earlier[order] = torch.arange(len(order), device="cpu") - torch.searchsorted(ordered, ordered)
        seen = self._sketch.of(hashes)[0] + earlier
        self._sketch.add(0, hashes, torch.ones(1, len(hashes), dtype=torch.bool, device="cpu"))
        return seen < self.times


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
        TypeError: if the condition is none of these, ``name`` or ``table`` is not a non-empty string, or a number is
            not an integer.

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
        for argument, value in (("name", self.name), ("table", self.table)):
            if not (isinstance(value, str) and value) and not (argument == "table" and value is None):
                raise TypeError(
                    f"EventSpec({self.name!r}, {argument}={value!r}): {argument} must be a non-empty string."
                )
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
            result = condition(data)
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


def table_capacities(specs: Sequence[EventSpec], capacity: Mapping[str, int], retention: Retention) -> dict[str, int]:
    """Check the arguments of :class:`~torchrl_replay_ext.EventTables`.

    Returns:
        The capacity κ of each table, the default table first. With ``retention="ring"``, the default table has 0.
    """
    if not isinstance(specs, Sequence) or not isinstance(capacity, Mapping):
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
