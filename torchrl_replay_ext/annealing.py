"""Hyperparameters in tensors, constant or on a linear schedule, and the attributes by which users assign them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import as_number, shown, within_limits
from torchrl_replay_ext.compilation import outside_inference_mode
from torchrl_replay_ext.kernels.ops import Views

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.base import ReplaySampler


@dataclass(frozen=True)
class Anneal:
    """A linear schedule from ``start`` to ``end`` over ``num_updates`` priority updates, then constant.

    Pass it to a sampler as ``alpha``, ``beta`` or ``omega``. The sampler itself advances the schedule, so it also works
    in a remote buffer or in a trainer that is built from a configuration, where a scheduler has no access. The share
    ``eta`` of an event table counts drawn batches instead, and so does the ``beta`` of event tables without priorities.

    Args:
        start: value before the first update, in the range of the hyperparameter.
        end: value after ``num_updates`` updates, in the range of the hyperparameter.
        num_updates: number of calls of ``update_priority`` until ``end`` is reached, >= 1.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if ``num_updates`` is not an integer >= 1.

    Examples:
        >>> from torchrl_replay_ext import ProportionalSampler
        >>> ProportionalSampler(100, beta=Anneal(0.4, 1.0, num_updates=1000)).beta
        0.4
    """

    start: float
    end: float
    num_updates: int

    def __post_init__(self):
        numbers = {name: as_number("Anneal", name, value) for name, value in vars(self).items()}
        if not (numbers["num_updates"] >= 1 and numbers["num_updates"].is_integer()):
            raise ValueError(f"Anneal(num_updates={self.num_updates}): num_updates must be an integer >= 1.")
        # a graph cannot read tensors; the class is frozen
        vars(self).update(numbers, num_updates=int(self.num_updates))


class Hyperparameter:
    """A number in [0, ``high``], constant or annealed, held in a tensor that is changed in place.

    A number that exceeds a limit by rounding, at most 1e-6, counts as the limit.

    Args:
        owner: the class that error messages name.
        name: the name of the hyperparameter.
        value: a number, a tensor with one element, or an :class:`Anneal`.
        high: upper limit. Default: ``math.inf``.
        hint: advice at the end of error messages. Default: none.
    """

    @outside_inference_mode()
    def __init__(
        self, owner: str, name: str, value: float | Tensor | Anneal, *, high: float = math.inf, hint: str = ""
    ):
        self._owner, self._name, self._high, self._hint = owner, name, high, hint
        # value, number of updates so far, and the schedule: start, end, number of updates
        self._state = torch.zeros(5, dtype=torch.float64, device="cpu")
        self.to(self._state.device, self._state.device)
        self.set(value)

    def set(self, value: float | Tensor | Anneal) -> None:
        """Assign a constant, or start a schedule; ValueError if out of range, TypeError if not a number."""
        if not isinstance(value, Anneal):
            number = as_number(self._owner, self._name, value)
            value = Anneal(number, number, 1)
        start, end = map(self._within_limits, (value.start, value.end))
        self._assign(start, 0.0, start, end, value.num_updates)

    def _within_limits(self, number: float) -> float:
        limited = within_limits(number, self._high)
        if limited is None:
            limits = ">= 0" if math.isinf(self._high) else f"in [0, {shown(self._high)}]"
            raise ValueError(f"{self._owner}({self._name}={shown(number)}): {self._name} must be {limits}{self._hint}.")
        return limited

    def _assign(self, value: float, count: float, start: float, end: float, num_updates: float) -> None:
        self._state.copy_(torch.tensor([value, count, start, end, num_updates], dtype=torch.float64, device="cpu"))
        self._publish()
        self.annealed = start != end
        # the largest value of the schedule
        self.bound = max(start, end)

    @property
    def value(self) -> Tensor:
        """The value, float64 []."""
        return self._state[0]

    def step(self) -> None:
        """Count one update of a schedule and set the value that it has after it."""
        _, count, start, end, num_updates = self._state.split(1)
        # exactly the end after the last update
        value = start.lerp(end, ((count + 1) / num_updates).clamp_max(1.0))
        self._state.copy_(torch.cat([value, count + 1, start, end, num_updates]))
        self._publish()

    def _publish(self) -> None:
        """Copy a value that the host keeps to the device."""
        if self.tensor is not self._state:
            self.tensor.fill_(self._state[0].item())

    def just_ended(self) -> bool:
        """Whether the latest update was the last one of the schedule."""
        return self._state[1].item() == self._state[4].item()

    def to(self, counters: torch.device, device: torch.device) -> None:
        """Move the state to ``counters``, and what kernels read to ``device``."""
        self._state = self._state.to(counters)
        # the value comes first
        self.tensor = self._state if counters == device else self._state[:1].to(device)
        self.views = Views(self.tensor)

    def state(self) -> Tensor:
        """The state to save: value, number of updates so far, start, end, ``num_updates``; float64 [5] on the CPU."""
        return self._state.to("cpu", copy=True)

    def load(self, state: Tensor) -> None:
        """Restore a state that :meth:`state` returned; ValueError for a value out of range."""
        value, count, start, end, num_updates = state.tolist()
        for number in (value, start, end):
            self._within_limits(number)
        self._assign(value, count, start, end, num_updates)


def make_exponents(owner: str, /, **values: float | Anneal) -> dict[str, Hyperparameter]:
    """Make the hyperparameters ``alpha``, ``omega`` (>= 0) and ``beta`` (in [0, 1]) of a sampler.

    Args:
        owner: the class that error messages name.
        **values: the values by name.

    Returns:
        The hyperparameters by name.

    Raises:
        TypeError: if there is another name.
    """
    rules: dict[str, dict[str, Any]] = {
        "alpha": {"hint": "; use 0 for uniform sampling"},
        "omega": {"hint": "; use 0 for plain PER"},
        "beta": {"high": 1.0},
    }
    if unknown := values.keys() - rules:
        raise TypeError(f"{owner}({min(unknown)}=...): there is no such argument; exponents are {', '.join(rules)}.")
    return {name: Hyperparameter(owner, name, value, **rules[name]) for name, value in values.items()}


ALPHA = """Priority exponent. An assignment applies the new value to all stored transitions, in O(capacity).

While alpha is annealed (:class:`~torchrl_replay_ext.Anneal`), the priority of a transition uses the alpha of its last
write or update. When the schedule ends, its final value is applied to all stored transitions. A
:class:`~torchrl_replay_ext.CompilableReplayBuffer` cannot branch on the end of the schedule; there, each update applies
the current alpha to the next 64 slots instead."""
BETA = "Exponent of the importance-sampling weights."


def exponent(name: str, doc: str, *, only_with: str = "") -> Any:
    """A property for a hyperparameter of a sampler: reads a float, accepts a number or a schedule.

    Args:
        name: the name of the hyperparameter.
        doc: the docstring of the attribute.
        only_with: the argument without which the sampler does not have the hyperparameter. Default: none.
    """

    def require(sampler: ReplaySampler) -> None:
        if name not in sampler.hyperparameters:
            raise AttributeError(f"{type(sampler).__name__}.{name}: this sampler has no {name}; it needs {only_with}.")

    def get(sampler: ReplaySampler) -> float:
        require(sampler)
        return float(sampler.hyperparameters[name].value)

    def set_(sampler: ReplaySampler, value: float | Tensor | Anneal) -> None:
        require(sampler)
        sampler.set_hyperparameter(name, value)

    return property(get, set_, doc=doc)
