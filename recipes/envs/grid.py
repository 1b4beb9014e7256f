"""Constants and functions shared by the grid worlds: directions, contents of cells, and drawing.

Coordinates, directions and colours are those of MiniGrid: x increases to the right and y downwards; θ = 0, 1, 2, 3
faces right, down, left, up. A cell is a triple (category, colour, door state).
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np

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

METADATA = {"render_modes": ["rgb_array"], "render_fps": 10}

_ORANGE = (255, 128, 0)
_TILE = 16


def check_choice(owner: Any, name: str, value: Any, allowed: Iterable) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{type(owner).__name__}({name}={value!r}): must be one of {choices}")


def check_action(action: Any, num_actions: int) -> None:
    """Raise ValueError unless `action` is in [0, num_actions)."""
    if not 0 <= action < num_actions:
        raise ValueError(f"step({action!r}): the action must be in [0, {num_actions})")


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


def _pixels() -> tuple[np.ndarray, np.ndarray]:
    """Centres (u, v) of a tile's pixels, in (0, 1)."""
    v, u = (np.mgrid[:_TILE, :_TILE] + 0.5) / _TILE
    return u, v


def _triangle(direction: int) -> np.ndarray:
    u, v = _pixels()
    dx, dy = DIRECTIONS[direction]
    ahead = dx * (u - 0.5) + dy * (v - 0.5)
    aside = dx * (v - 0.5) - dy * (u - 0.5)
    return (ahead > -0.38) & (np.abs(aside) < 0.41 * (0.38 - ahead))


@lru_cache
def _tile(category: int, colour: int, state: int) -> np.ndarray:
    u, v = _pixels()
    tile = np.zeros((_TILE, _TILE, 3), dtype=np.uint8)
    tile[0], tile[:, 0] = 60, 60
    if category == WALL:
        tile[:] = RGB[GREY]
    elif category == GOAL:
        tile[1:, 1:] = RGB[GREEN]
    elif category == LAVA:
        tile[1:, 1:] = _ORANGE
    elif category == SPIKE:
        tile[1:, 1:] = RGB[YELLOW]
    elif category == KEY:
        radius = np.hypot(u - 0.55, v - 0.3)
        ring = (radius < 0.2) & (radius > 0.09)
        shaft = (np.abs(u - 0.55) < 0.06) & (v > 0.48) & (v < 0.9)
        bits = (u > 0.35) & (u < 0.55) & ((np.abs(v - 0.65) < 0.04) | (np.abs(v - 0.82) < 0.04))
        tile[ring | shaft | bits] = RGB[colour]
    elif category == DOOR:
        edge = np.maximum(np.abs(u - 0.5), np.abs(v - 0.5))
        tile[edge > 0.38] = RGB[colour]
        if state == LOCKED:
            tile[edge <= 0.38] = RGB[colour] // 2
            tile[(np.abs(v - 0.5) < 0.06) & (u > 0.6) & (u < 0.8)] = RGB[colour]
    return tile
