"""Conditions of events: fixed thresholds, and conditions that adapt to the transitions written before."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from numbers import Integral

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.arguments import require_choice, require_integer, require_nested_keys, require_number
from torchrl_replay_ext.kernels.ops import conditions_novel, conditions_quantile

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
# rows of a count-min sketch
_DEPTH = 4


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
            # torch would round a finite value to infinity
            is_too_large = torch.finfo(dtype).max < abs(value) < math.inf
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


class AdaptiveCondition(ABC):
    """A condition that depends on the transitions written before, in the order of writing, over all streams.

    What it remembers, its *memory*, are tensors of the tables, which save, load and empty them, and share them with
    the processes that write to the same buffer.
    """

    key: NestedKey

    @abstractmethod
    def memory(self) -> dict[str, Tensor]:
        """A new memory."""

    def restore(self, memory: dict[str, Tensor]) -> None:
        """Derive the parts of a loaded memory that follow from the others."""

    @abstractmethod
    def signal(self, column: Tensor) -> Tensor:
        """What :meth:`detect` needs of the entry of n transitions, int64 [n], on the device of the entry."""

    @abstractmethod
    def detect(self, signal: np.ndarray, memory: dict[str, Tensor]) -> np.ndarray:
        """Whether the event occurs in each of n transitions, bool [n], which then belong to the memory."""


@dataclass(frozen=True)
class Quantile(AdaptiveCondition):
    """The condition that a number is above a running quantile, for example one of the highest 1 % of the rewards.

    The event occurs if ``data[key]`` is larger than the q-quantile of the last ``window`` numbers that the buffer got
    before, of all streams in the order of writing (in a sharded buffer, each shard by itself). The quantile of m
    numbers is the smallest of them that at least q · m of them do not exceed. So at most about a share of 1 - q of the
    transitions are events, and none if a share of 1 - q or more have the largest number: for a reward of 1 at the goal
    and 0 elsewhere, choose q below 1 minus the share of transitions that reach the goal. Numbers that are NaN or
    infinite are no events and are not remembered.

    Args:
        key: an entry with one number per transition, for example ``("next", "reward")``.
        q: the quantile, in (0, 1).
        window: how many numbers are remembered, 16 bytes each. Default: 10000.

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

    def __post_init__(self):
        require_nested_keys("Quantile", key=self.key)
        require_number("Quantile", "q", self.q, lambda q: 0 < q < 1, "in (0, 1)")
        require_integer("Quantile", "window", self.window)

    def memory(self) -> dict[str, Tensor]:
        """The last numbers, the same in ascending order, and their count."""
        recent = torch.zeros(self.window, dtype=torch.float64, device="cpu")
        return {"recent": recent, "ordered": recent.clone(), "count": torch.zeros(1, dtype=torch.int64, device="cpu")}

    def restore(self, memory: dict[str, Tensor]) -> None:
        """Order the numbers again."""
        stored = memory["recent"][: max(int(memory["count"]), 0)]
        memory["ordered"][: len(stored)] = stored.sort().values

    def signal(self, column: Tensor) -> Tensor:
        """The bits of the numbers."""
        return column.reshape(-1).to(torch.float64).view(torch.int64)

    def detect(self, signal: np.ndarray, memory: dict[str, Tensor]) -> np.ndarray:
        """Whether each number is above the quantile of those before it."""
        occurs = np.empty(len(signal), bool)
        parts = memory["recent"], memory["ordered"], memory["count"], occurs
        conditions_quantile(signal.view(np.float64), float(self.q), *parts)
        return occurs


@dataclass(frozen=True)
class Novel(AdaptiveCondition):
    """The condition that a state was seldom seen. The history of the event then leads to the border of what is known.

    The event occurs if the buffer got the state ``data[key]`` at most ``times`` times so far, this transition included,
    in any stream. A count-min sketch counts hashes (Cormode and Muthukrishnan 2005): its size is fixed, and a count may
    be too large, never too small, where many different states share its cells. With as many different states as
    ``width``, one of six new states is missed; with half as many, one of forty.

    Args:
        key: an entry with the state, of any shape, for example ``("next", "observation")``.
        times: how often a state is novel, in [1, 254]. Default: 1, only the first time.
        resolution: states are the same if all their numbers, divided by ``resolution`` and rounded down, are the same.
            Default: None, if all their numbers are equal; continuous states are then always novel.
        width: number of cells in each of the four rows of the sketch, of one byte each; choose about the number of
            different states. Default: 262144.

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

    def __post_init__(self):
        require_nested_keys("Novel", key=self.key)
        require_integer("Novel", "times", self.times)
        require_integer("Novel", "width", self.width)
        if self.times > 254:
            raise ValueError(f"Novel(times={self.times}): times must be at most 254.")
        if self.resolution is not None:
            require_number("Novel", "resolution", self.resolution, lambda r: 0 < r < float("inf"), "positive")

    def memory(self) -> dict[str, Tensor]:
        """The sketch."""
        return {"cells": torch.zeros(_DEPTH, self.width, dtype=torch.uint8, device="cpu")}

    def signal(self, column: Tensor) -> Tensor:
        """Hashes of the states: the numbers as integers, times a random odd number each, added up."""
        numbers = column.reshape(len(column), -1)
        if self.resolution is not None:
            numbers = (numbers.to(torch.float64) / self.resolution).floor()
        if numbers.is_floating_point():
            # -0.0 is 0.0; the lower bits of many numbers are 0
            bits = (numbers.to(torch.float64) + 0.0).view(torch.int64)
            numbers = bits ^ (bits >> 32)
        factors = _factors(numbers.shape[1]).to(numbers.device, non_blocking=True)
        return (numbers * factors).sum(1) & torch.iinfo(torch.int64).max

    def detect(self, signal: np.ndarray, memory: dict[str, Tensor]) -> np.ndarray:
        """Whether each state was seen at most ``times`` times, this one included."""
        occurs = np.empty(len(signal), bool)
        conditions_novel(signal, self.times, memory["cells"], occurs)
        return occurs


@cache
def _factors(count: int) -> Tensor:
    """Random odd numbers, int64 [count]; NumPy promises that this generator always yields the same ones."""
    return torch.from_numpy(np.random.RandomState(0).randint(2**63 - 1, size=count, dtype=np.int64) | 1)
