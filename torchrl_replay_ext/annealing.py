"""Hyperparameters that are tensors and may follow a linear schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import as_number
from torchrl_replay_ext.compilation import scalar


@dataclass(frozen=True)
class Anneal:
    """A linear schedule, from ``start`` to ``end`` over ``num_updates`` priority updates, then constant.

    Accepted wherever a sampler takes ``alpha``, ``beta`` or ``omega``. It lives in the sampler, so that it also works
    where a scheduler cannot reach: in a remote buffer, or in a trainer that is built from a configuration.

    Args:
        start: value before the first update.
        end: value from update ``num_updates`` on.
        num_updates: number of calls of ``update_priority`` until ``end`` is reached, >= 1.

    Examples:
        >>> from torchrl_replay_ext import ProportionalSampler
        >>> ProportionalSampler(100, beta=Anneal(0.4, 1.0, num_updates=1000)).beta
        0.4
    """

    start: float
    end: float
    num_updates: int

    def __post_init__(self):
        for name in ("start", "end", "num_updates"):
            as_number("Anneal", name, getattr(self, name))
        if not self.num_updates >= 1:
            raise ValueError(f"Anneal(num_updates={self.num_updates}): num_updates must be >= 1.")


class Hyperparameter:
    """A number in [0, ``high``], constant or annealed, held in a tensor that is changed in place.

    Args:
        owner: class name for error messages.
        name: the hyperparameter's name.
        value: number, 0-dim tensor or :class:`Anneal`.
        high: upper limit.
        hint: advice that ends the error message.
    """

    def __init__(
        self, owner: str, name: str, value: float | Tensor | Anneal, *, high: float = math.inf, hint: str = ""
    ):
        self._owner, self._name, self._high, self._hint = owner, name, high, hint
        # value, updates counted; start, end and number of updates of the schedule
        self._state = torch.zeros(5, dtype=torch.float64)
        self.set(value)

    def set(self, value: float | Tensor | Anneal) -> None:
        """Assign a constant, or restart with a schedule; ValueError if out of range, TypeError if no number."""
        if isinstance(value, Anneal):
            schedule = value
        else:
            number = as_number(self._owner, self._name, value)
            schedule = Anneal(number, number, 1)
        for number in (schedule.start, schedule.end):
            if not (math.isfinite(number) and 0 <= number <= self._high):
                limits = ">= 0" if math.isinf(self._high) else f"in [0, {self._high:g}]"
                raise ValueError(f"{self._owner}({self._name}={number:g}): {self._name} must be {limits}{self._hint}.")
        self._assign(schedule.start, 0.0, schedule.start, schedule.end, schedule.num_updates)

    def _assign(self, value: float, count: float, start: float, end: float, num_updates: float) -> None:
        self._state.copy_(torch.tensor([value, count, start, end, num_updates], dtype=torch.float64))
        self.annealed = start != end
        # the largest value it can take
        self.bound = max(start, end)

    @property
    def value(self) -> Tensor:
        """The value, float64 []."""
        return self._state[0]

    def current(self) -> float | Tensor:
        """The value as a number; where it is traced, as a tensor."""
        return scalar(self.value)

    def step(self) -> None:
        """Count one update and move along the schedule."""
        if self.annealed:
            _, count, *schedule = self._state.split(1)
            start, end, num_updates = schedule
            value = ((count + 1) / num_updates).clamp_max(1.0).mul(end - start).add(start)
            self._state.copy_(torch.cat([value, count + 1, *schedule]))

    def just_ended(self) -> bool:
        """Whether the last step was the last of the schedule."""
        return self.annealed and self._state[1].item() == self._state[4].item()

    def tensors(self) -> list[Tensor]:
        """What is changed in place."""
        return [self._state]

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self._state = self._state.to(device)

    def state(self) -> Tensor:
        """Everything to restore: value, updates counted, start, end, number of updates; float64 [5] on the CPU."""
        return self._state.to("cpu", copy=True)

    def load(self, state: Tensor) -> None:
        """Restore what :meth:`state` gave."""
        self._assign(*state.tolist())
