"""What the grid worlds share: directions, actions, contents of cells, and checks.

Coordinates, directions and colours are those of MiniGrid: x increases to the right and y downwards; θ = 0, 1, 2, 3
faces right, down, left, up. A cell is a triple (category, colour, door state).
"""

from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete

DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))
"""θ -> (dx, dy)."""

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE = range(6)
"""Actions. Rooms use only the first three."""

EMPTY, WALL, GOAL, LAVA, SPIKE, KEY, DOOR = range(7)
"""Categories of cells."""

RED, GREEN, BLUE, PURPLE, YELLOW, GREY = range(6)
"""Colours."""

OPEN, LOCKED = range(2)
"""States of a door."""


class World(gymnasium.Env):
    """An environment with discrete actions that checks its arguments."""

    action_space: Discrete

    def check_choice(self, name: str, value: Any, allowed: Sequence) -> None:
        """Raise ValueError unless `value` is one of `allowed`."""
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ValueError(f"{type(self).__name__}({name}={value!r}): must be one of {choices}")

    def check_action(self, action: Any) -> None:
        """Raise ValueError unless `action` is an action of the world."""
        if not 0 <= action < self.action_space.n:
            raise ValueError(f"step({action!r}): the action must be in [0, {self.action_space.n})")
