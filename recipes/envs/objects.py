"""Base class of ObstacleCourse and RandomizedSkill: objects, observations and actions."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from recipes.envs import grid

# Colours of categories that always have the same colour, as in MiniGrid.
_COLOURS = {grid.EMPTY: grid.RED, grid.WALL: grid.GREY, grid.GOAL: grid.GREEN, grid.LAVA: grid.RED}
_COLOURS[grid.SPIKE] = grid.YELLOW
_FREE = (grid.EMPTY, grid.GOAL, grid.LAVA, grid.SPIKE)  # the agent can walk there
_VIEW = 5
_PAD = _VIEW - 1
_SIZE = 3 * _VIEW**2 + 6
_LARGEST = np.array([grid.DOOR, grid.GREY, grid.LOCKED], dtype=np.float32)


# For each θ, the offsets dy and dx, [5, 5], of the cells in view. Row 0 is the farthest, column 0 the leftmost.
_AHEAD, _ASIDE = np.mgrid[_VIEW - 1 : -1 : -1, -(_VIEW // 2) : _VIEW // 2 + 1]
_OFFSETS = [(_AHEAD * dy + _ASIDE * dx, _AHEAD * dx - _ASIDE * dy) for dx, dy in grid.DIRECTIONS]


class ObjectWorld(gymnasium.Env):
    """A walled grid with spikes, lava, gaps, keys, doors and a goal. Subclasses place the objects.

    Rewards: -1 for a step onto a spike, -1 for a step into lava, 1 for a step to the goal. Lava and goal end the
    episode. A key opens doors of its colour and can be used again. The agent carries at most one key. Keys and doors
    have any colour except grey. An open door stays open. The agent sees through walls.

    The observation has 81 numbers, each divided by its largest value:

    - category, colour and door state of the 5x5 cells in view, from the farthest row to the nearest, each row from left
      to right. The agent is in the middle of the nearest row.
    - whether the agent carries a key, and the key's category and colour, or (-1, -1) without a key.
    - the pose (x, y, θ), scaled to [-1, 1].

    Events:

    - at_spike, at_lava, at_gap, done: the agent stands on a spike, in lava, in a gap of a wall, in the goal.
    - pickup_key: the step picked up a key.
    - at_door: the step opened a door, or the agent stands in a door. The paper's text says "opened-a-door", its Table 1
      "at-door".

    Args:
        start: cell (x, y) where the agent starts, facing right. Default: (1, 1).
        step_reward: reward of all other steps; the paper does not give it. A small negative value makes the agent
            explore. With -0.01 and γ = 0.99, waiting forever is as bad as lava. Default: 0.
        render_mode: ``"rgb_array"`` or None (default).
    """

    metadata = grid.METADATA
    EVENTS: ClassVar[tuple[str, ...]]
    width: int
    height: int

    def __init__(self, start: tuple[int, int] = (1, 1), step_reward: float = 0.0, render_mode: str | None = None):
        self.render_mode = render_mode
        self._step_reward = float(step_reward)
        self.action_space = Discrete(6)
        low = np.concatenate([np.zeros(_SIZE - 5), -np.ones(5)]).astype(np.float32)
        self.observation_space = Box(low, np.float32(1.0), dtype=np.float32)
        self._start = start
        # A margin of walls, so that the view never leaves the array.
        self._padded = np.zeros((self.height + 2 * _PAD, self.width + 2 * _PAD, 3), dtype=np.int8)
        self.cells = self._padded[_PAD:-_PAD, _PAD:-_PAD]
        """(category, colour, door state) of each cell, [height, width, 3]."""
        self.gaps: set[tuple[int, int]] = set()
        """Gaps (x, y) in the walls."""
        self.pose = (*start, 0)
        """(x, y, θ) of the agent."""
        self.carried: int | None = None
        """Colour of the key that the agent carries."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Place all objects and the agent."""
        super().reset(seed=seed)
        self._padded[:] = grid.WALL, grid.GREY, 0
        self.cells[1:-1, 1:-1] = grid.EMPTY, grid.RED, 0
        self.gaps = set()
        self.pose = (*self._start, 0)
        self.carried = None
        self._told = self._build()
        return self._observe(), dict.fromkeys(self.EVENTS, False) | self._told

    def step(self, action: int):
        """Turn left (0) or right (1), walk (2), pick up (3) or drop (4) a key, or open a door (5)."""
        grid.check_action(action, 6)
        x, y, theta = self.pose
        dx, dy = grid.DIRECTIONS[theta]
        x_ahead, y_ahead = x + dx, y + dy
        category, colour, state = self.cells[y_ahead, x_ahead].tolist()
        picked_up = opened = False
        if action == grid.LEFT:
            theta = (theta - 1) % 4
        elif action == grid.RIGHT:
            theta = (theta + 1) % 4
        elif action == grid.FORWARD:
            if category in _FREE or (category == grid.DOOR and state == grid.OPEN):
                x, y = x_ahead, y_ahead
        elif action == grid.PICKUP:
            if category == grid.KEY and self.carried is None:
                self.carried = colour
                self._put(x_ahead, y_ahead, grid.EMPTY)
                picked_up = True
        elif action == grid.DROP:
            if category == grid.EMPTY and self.carried is not None:
                self._put(x_ahead, y_ahead, grid.KEY, self.carried)
                self.carried = None
        elif action == grid.TOGGLE and category == grid.DOOR and state == grid.LOCKED and self.carried == colour:
            self._put(x_ahead, y_ahead, grid.DOOR, colour, grid.OPEN)
            opened = True
        self.pose = (x, y, theta)

        here = int(self.cells[y, x, 0])
        happened = {
            "at_spike": here == grid.SPIKE,
            "at_lava": here == grid.LAVA,
            "at_gap": (x, y) in self.gaps,
            "pickup_key": picked_up,
            "at_door": opened or here == grid.DOOR,
            "done": here == grid.GOAL,
        }
        reward = 1.0 if here == grid.GOAL else -1.0 if here in (grid.LAVA, grid.SPIKE) else self._step_reward
        info = {name: happened[name] for name in self.EVENTS} | self._told
        return self._observe(), reward, here in (grid.GOAL, grid.LAVA), False, info

    def render(self) -> np.ndarray | None:
        """The image of the whole grid; None without a render mode."""
        if self.render_mode is None:
            return None
        return grid.draw(self.cells, *self.pose)

    def _build(self) -> dict[str, Any]:
        """Place the objects of one episode with `np_random`; return the entries of `info` besides the events."""
        raise NotImplementedError

    def _observe(self) -> np.ndarray:
        x, y, theta = self.pose
        dy, dx = _OFFSETS[theta]
        observation = np.empty(_SIZE, dtype=np.float32)
        observation[:-6] = (self._padded[y + _PAD + dy, x + _PAD + dx] / _LARGEST).ravel()
        if self.carried is None:
            observation[-6:-3] = 0.0, -1.0, -1.0
        else:
            observation[-6:-3] = 1.0, grid.KEY / grid.DOOR, self.carried / grid.GREY
        observation[-3:] = 2 * x / (self.width - 1) - 1, 2 * y / (self.height - 1) - 1, 2 * theta / 3 - 1
        return observation

    def _rows(self, count: int) -> list[int]:
        """`count` different random rows."""
        return (1 + self.np_random.permutation(self.height - 2)[:count]).tolist()

    def _random_colours(self, count: int) -> list[int]:
        """`count` different random colours except grey, the colour of walls."""
        return self.np_random.permutation(grid.GREY)[:count].tolist()

    def _put(self, x: int, y: int, category: int, colour: int | None = None, state: int = 0) -> None:
        self.cells[y, x] = category, _COLOURS[category] if colour is None else colour, state

    def _put_wall(self, x: int) -> None:
        self.cells[1:-1, x] = grid.WALL, grid.GREY, 0

    def _put_gap(self, x: int) -> int:
        """Place a wall with a gap in a random row; return the row."""
        self._put_wall(x)
        (y,) = self._rows(1)
        self._put(x, y, grid.EMPTY)
        self.gaps.add((x, y))
        return y

    def _put_doors(self, x: int, colours: list[int]) -> None:
        """Place a wall with a locked door of each colour, in random rows."""
        self._put_wall(x)
        for y, colour in zip(self._rows(len(colours)), colours, strict=True):
            self._put(x, y, grid.DOOR, colour, grid.LOCKED)
