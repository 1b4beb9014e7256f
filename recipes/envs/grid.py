"""Constants and functions shared by the grid worlds: directions, contents of cells, and drawing.

Coordinates, directions and colours are those of MiniGrid: x increases to the right and y downwards; θ = 0, 1, 2, 3
faces right, down, left, up. A cell is a triple (category, colour, door state).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import gymnasium
import numpy as np
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

RGB = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (112, 39, 195), (255, 255, 0), (100, 100, 100)], dtype=np.uint8)

_ORANGE = np.array((255, 128, 0), dtype=np.uint8)
_TILE = 16


class World(gymnasium.Env):
    """An environment with discrete actions that can be drawn."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}
    action_space: Discrete

    def render(self) -> np.ndarray | None:
        """The image of the world; None without a render mode."""
        return None if self.render_mode is None else self.image()

    def image(self) -> np.ndarray:
        """The image of the world, uint8 [height, width, 3]."""
        raise NotImplementedError

    def check_choice(self, name: str, value: Any, allowed: Sequence) -> None:
        """Raise ValueError unless `value` is one of `allowed`."""
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ValueError(f"{type(self).__name__}({name}={value!r}): must be one of {choices}")

    def check_action(self, action: Any) -> None:
        """Raise ValueError unless `action` is an action of the world."""
        if not 0 <= action < self.action_space.n:
            raise ValueError(f"step({action!r}): the action must be in [0, {self.action_space.n})")


def draw(cells: np.ndarray, x: int, y: int, direction: int) -> np.ndarray:
    """Draw a grid, with the agent as a red triangle that points in its direction.

    Args:
        cells: integers [height, width, 3].
        x: column of the agent.
        y: row of the agent.
        direction: θ of the agent.

    Returns:
        RGB image, uint8 [16 height, 16 width, 3].
    """
    height, width = cells.shape[:2]
    image = np.stack([_tile(*cell) for cell in cells.reshape(-1, 3).tolist()]).reshape(height, width, _TILE, _TILE, 3)
    image[y, x][_triangle(direction)] = RGB[RED]
    return image.swapaxes(1, 2).reshape(height * _TILE, width * _TILE, 3)


# Centres (v, u) of a tile's pixels, relative to its middle, in (-0.5, 0.5).
_V, _U = (np.mgrid[:_TILE, :_TILE] + 0.5) / _TILE - 0.5


def _triangle(direction: int) -> np.ndarray:
    dx, dy = DIRECTIONS[direction]
    ahead, aside = dx * _U + dy * _V, dx * _V - dy * _U
    return (ahead > -0.38) & (np.abs(aside) < 0.41 * (0.38 - ahead))


@lru_cache
def _tile(category: int, colour: int, state: int) -> np.ndarray:
    """A key is a small square, a door a frame with a dark field if it is locked; other objects fill the tile."""
    rgb, middle = (_ORANGE if category == LAVA else RGB[colour]), np.maximum(np.abs(_U), np.abs(_V))
    tile = np.zeros((_TILE, _TILE, 3), dtype=np.uint8)
    if category == KEY:
        tile[middle < 0.2] = rgb
    elif category == DOOR:
        tile[:] = rgb
        tile[middle <= 0.38] = rgb // 2 if state == LOCKED else 0
    elif category != EMPTY:
        tile[:] = rgb
    tile[0], tile[:, 0] = 60, 60
    return tile
