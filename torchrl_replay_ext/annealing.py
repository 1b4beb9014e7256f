"""Hyperparameters that are tensors and may follow a linear schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_replay_ext.tracing import scalar


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
        # of shape [1]: torch 2.13 drops what a compiled graph writes to 0-dim float64 tensors
        self.value = torch.zeros(1, dtype=torch.float64)
        self._count = torch.zeros(1, dtype=torch.float64)
        # start, end and number of updates of the schedule
        self._schedule = torch.zeros(3, dtype=torch.float64)
        self.set(value)

    def set(self, value: float | Tensor | Anneal) -> None:
        """Assign a constant, or restart with a schedule; ValueError if out of range."""
        schedule = value if isinstance(value, Anneal) else Anneal(float(value), float(value), 1)
        for number in (schedule.start, schedule.end):
            if not (math.isfinite(number) and 0 <= number <= self._high):
                limits = ">= 0" if math.isinf(self._high) else f"in [0, {self._high:g}]"
                raise ValueError(f"{self._owner}({self._name}={number:g}): {self._name} must be {limits}{self._hint}.")
        self._follow(schedule.start, schedule.end, schedule.num_updates)
        self._count.zero_()
        self.value.fill_(schedule.start)

    def _follow(self, start: float, end: float, num_updates: float) -> None:
        self._schedule.copy_(torch.tensor([start, end, num_updates], dtype=torch.float64))
        self.annealed = start != end
        # the largest value it can take
        self.bound = max(start, end)

    def current(self) -> float | Tensor:
        """The value as a number; where it is traced, as a tensor."""
        return scalar(self.value[0])

    def step(self) -> None:
        """Count one update and move along the schedule."""
        if self.annealed:
            start, end, num_updates = self._schedule.split(1)
            self._count.add_(1)
            self.value.copy_((self._count / num_updates).clamp_max(1.0).mul(end - start).add(start))

    def just_ended(self) -> bool:
        """Whether the last step was the last of the schedule."""
        return self.annealed and self._count.item() == self._schedule[2].item()

    def tensors(self) -> list[Tensor]:
        """The tensors that are changed in place."""
        return [self.value, self._count, self._schedule]

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self.value, self._count, self._schedule = (tensor.to(device) for tensor in self.tensors())

    def state(self) -> Tensor:
        """Everything to restore: value, updates counted, start, end, number of updates; float64 [5] on the CPU."""
        return torch.cat([self.value, self._count, self._schedule]).cpu()

    def load(self, state: Tensor) -> None:
        """Restore what :meth:`state` gave."""
        value, count, start, end, num_updates = state.tolist()
        self._follow(start, end, num_updates)
        self._count.fill_(count)
        self.value.fill_(value)
