"""Event tables of the recipes: from the presets of an environment (conf/env) to tables."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import MISSING
from tensordict import NestedKey, TensorDictBase

from torchrl_replay_ext import EventSpec, EventTables, Threshold
from torchrl_replay_ext.events import Retention

# Where a collector stores the flags that an environment has in its `info`.
FLAGS = ("next", "events")
REWARD = ("next", "reward")


@dataclass
class EventConfig:
    """An event of an environment, by default a flag of its name in the environment's `info`.

    Args:
        history: transitions that enter the table with an event.
        eta: share of the batch that comes from the table.
        above: instead of the flag: the reward is larger than this.
        function: instead of the flag: one of FUNCTIONS.
    """

    history: int = MISSING
    eta: float = MISSING
    above: float | None = None
    function: str | None = None

    def check(self, where: str) -> None:
        """Raises ValueError if a value is not valid; `where` is the event's place in the configuration."""
        if self.history < 1:
            raise ValueError(f"{where}.history={self.history}: must be >= 1")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"{where}.eta={self.eta}: must be in [0, 1]")
        if self.function is not None and self.function not in FUNCTIONS:
            raise ValueError(f"{where}.function={self.function}: choose {', '.join(FUNCTIONS)}")
        if self.function is not None and self.above is not None:
            raise ValueError(f"{where}: has above= and function=, one of them must be null")

    @property
    def is_flag(self) -> bool:
        """Whether the environment says when it occurs."""
        return self.above is None and self.function is None

    def condition(self, name: str) -> NestedKey | Threshold | Callable[[TensorDictBase], torch.Tensor]:
        """The event's condition for an EventSpec."""
        if self.above is not None:
            return Threshold(REWARD, ">", self.above)
        return (*FLAGS, name) if self.function is None else FUNCTIONS[self.function]


def land_between_flags(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: both legs touch the ground between the flags, which stand at x = -0.2 and 0.2."""
    observation = data["next", "observation"]
    return (observation[:, 6] > 0) & (observation[:, 7] > 0) & (observation[:, 0].abs() <= 0.2)


def land_near_middle(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: the lander is near the middle of the flags; the paper does not say how near."""
    observation = data["next", "observation"]
    return (observation[:, 0].abs() <= 0.1) & (observation[:, 1].abs() <= 0.1)


FUNCTIONS = {function.__name__: function for function in (land_between_flags, land_near_middle)}


def make_tables(events: dict[str, EventConfig], capacity: int, retention: Retention) -> EventTables:
    """One table per event, with a capacity of its share of the buffer (SSET, Table 1: κ_i = capacity · η_i)."""
    specs = [EventSpec(name, event.condition(name), event.history) for name, event in events.items()]
    shares = {name: round(capacity * event.eta) for name, event in events.items()}
    if retention == "pinned":
        shares["default"] = capacity - sum(shares.values())
    return EventTables(specs, shares, retention=retention)
