"""Builds event tables from the events of an environment (conf/env)."""

from collections.abc import Callable

import torch
from tensordict import NestedKey, TensorDictBase

from recipes.common.config import EventConfig
from torchrl_replay_ext import EventSpec, EventTables, Threshold
from torchrl_replay_ext.core.event_tables import Retention

# Entry in which a collector stores the event flags from the `info` of an environment.
FLAGS = ("next", "events")
REWARD = ("next", "reward")


def land_between_flags(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: both legs touch the ground between the flags, which stand at x = -0.2 and 0.2."""
    observation = data["next", "observation"]
    return (observation[:, 6] > 0) & (observation[:, 7] > 0) & (observation[:, 0].abs() <= 0.2)


def land_near_middle(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: the lander is within 0.1 of the middle between the flags; the paper gives no distance."""
    observation = data["next", "observation"]
    return (observation[:, 0].abs() <= 0.1) & (observation[:, 1].abs() <= 0.1)


FUNCTIONS = {function.__name__: function for function in (land_between_flags, land_near_middle)}


def condition(name: str, event: EventConfig) -> NestedKey | Threshold | Callable[[TensorDictBase], torch.Tensor]:
    """The condition of the event in the form that EventSpec takes: a flag, a threshold or a function."""
    if event.above is not None:
        return Threshold(REWARD, ">", event.above)
    return (*FLAGS, name) if event.function is None else FUNCTIONS[event.function]


def make_tables(events: dict[str, EventConfig], capacity: int, retention: Retention) -> EventTables:
    """Build one table per event, with the event's largest share of the buffer (SSET, Table 1: κ_i = capacity · η_i).

    Args:
        events: events by name.
        capacity: capacity of the buffer, in transitions.
        retention: "ring" or "pinned", see EventTables.
    """
    specs = [EventSpec(name, condition(name, event), event.history) for name, event in events.items()]
    shares = {name: round(capacity * event.largest_eta) for name, event in events.items()}
    if retention == "pinned":
        shares["default"] = capacity - sum(shares.values())
    return EventTables(specs, shares, retention=retention)
