"""Obstacle Course and Randomized Skill of the SSET paper (sections 5.3, A.2): worlds with keys, doors, lava, spikes."""

from typing import Any, ClassVar

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


SCENARIOS = ("lava", "gap", "door")

# For each θ, the offsets dy and dx, [5, 5], of the cells in view. Row 0 is the farthest, column 0 the leftmost.
_AHEAD, _ASIDE = np.mgrid[_VIEW - 1 : -1 : -1, -(_VIEW // 2) : _VIEW // 2 + 1]
_OFFSETS = [(_AHEAD * dy + _ASIDE * dx, _AHEAD * dx - _ASIDE * dy) for dx, dy in grid.DIRECTIONS]


class ObjectWorld(grid.World):
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
    """

    EVENTS: ClassVar[tuple[str, ...]]
    width: int
    height: int

    def __init__(self, start: tuple[int, int] = (1, 1), step_reward: float = 0.0):
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
        self.check_action(action)
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


class ObstacleCourse(ObjectWorld):
    """A course with spikes, a gap, lava, a second gap, keys and doors on the way to the goal, in this fixed order.

    Each episode draws the rows of lava and gaps, and the rows and colours of keys and doors. The paper gives neither
    the layout nor the reward of the goal. It gives a start (1, 1) in the top-left corner and a shifted start (1, 4)
    beside the spikes. Here the grid has 14 x (rows + 2) cells; the outer ones are walls. There are three more walls::

        column   0          4        7          11         13
                 |  spikes  |  lava  |  2 keys  |  2 doors  |

    Two spikes are in the lowest rows of column 2. Lava fills half of the rows of column 6, rounded down, but not the
    row of the gap behind it. The keys are in column 9; each opens one of the doors in column 11. The goal is in the
    bottom-right corner.

    Args:
        start: free cell (x, y) of the first room where the agent starts, facing right. Default: (1, 1).
        rows: rows of all rooms, >= 3. Random actions reach the goal in roughly one of 45 episodes with 3 rows, and in
            one of 350 with 4. Default: 4.
        step_reward: see `ObjectWorld`. Default: 0.

    Raises:
        ValueError: if `rows` is less than 3.
    """

    width = 14
    EVENTS = ("at_spike", "at_lava", "at_gap", "pickup_key", "at_door", "done")

    def __init__(self, start: tuple[int, int] = (1, 1), rows: int = 4, step_reward: float = 0.0):
        if not isinstance(rows, int) or rows < 3:
            raise ValueError(f"ObstacleCourse(rows={rows!r}): must be a whole number >= 3")
        self.height = rows + 2
        self._spikes = ((2, rows - 1), (2, rows))
        super().__init__(start, step_reward)

    def _build(self) -> dict[str, Any]:
        rows = self.height - 2
        for x, y in self._spikes:
            self._put(x, y, grid.SPIKE)
        self._put_gap(4)
        gap = self._put_gap(7)
        for y in [y for y in self._rows(rows) if y != gap][: rows // 2]:
            self._put(6, y, grid.LAVA)
        colours = self._random_colours(2)
        # Keys in the columns beside the walls could block gap or doors.
        for y, colour in zip(self._rows(2), colours, strict=True):
            self._put(9, y, grid.KEY, colour)
        self._put_doors(11, colours)
        self._put(12, rows, grid.GOAL)
        return {}


class RandomizedSkill(ObjectWorld):
    """Each episode needs one skill: avoid lava, go through a gap, or open the correct one of two doors.

    Each episode draws the scenario, the column of the obstacle (3, 4 or 5), the rows of lava, gap or doors, and the
    position of the goal behind the obstacle. With doors, it also draws the position and colour of the key, which opens
    one of the two. ``info["scenario"]`` names the scenario. The paper gives no sizes; this implementation uses 9 x 7
    cells, and lava in three of the five rows.

    Args:
        scenario: one of `SCENARIOS` for all episodes; None (default): a random one in each episode.
        step_reward: see `ObjectWorld`. Default: 0.
    """

    width, height = 9, 7
    EVENTS = ("at_lava", "at_gap", "pickup_key", "at_door", "done")

    def __init__(self, scenario: str | None = None, step_reward: float = 0.0):
        self.check_choice("scenario", scenario, (None, *SCENARIOS))
        super().__init__(step_reward=step_reward)
        self._scenario = scenario

    def _build(self) -> dict[str, Any]:
        rng = self.np_random
        scenario = self._scenario or SCENARIOS[rng.integers(3)]
        column = int(rng.integers(3, 6))
        if scenario == "lava":
            for y in self._rows(3):
                self._put(column, y, grid.LAVA)
        elif scenario == "gap":
            self._put_gap(column)
        else:
            colours = self._random_colours(2)
            self._put_doors(column, colours)
            places = [(x, y) for x in range(1, column) for y in range(1, 6) if (x, y) != self._start]
            self._put(*places[rng.integers(len(places))], grid.KEY, colours[0])
        self._put(int(rng.integers(column + 1, 8)), int(rng.integers(1, 6)), grid.GOAL)
        return {"scenario": scenario}
