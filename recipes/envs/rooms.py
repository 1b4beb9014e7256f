"""Three rooms in a row, and two: the worlds of the first SSET experiments (paper section 5.1, 5.2 and A.2).

The agent sees its pose (x, y, θ) and turns or walks to the goal. It is paid 1 there, where the episode ends, and -0.1
for any other step. The dynamics are deterministic and small enough to tabulate: see `dynamics` and `optimal_q`.

The paper gives no sizes. Chosen here: rooms of 5x5 cells and an optimal path of 33 steps for the three rooms; for the
two, rooms of 7x7 cells, with the gap at the top and the goal at the bottom, so that the way to the goal is not straight
and its 29 steps still fit into the paper's histories of 30.
"""

import math
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from recipes.envs.grid import (
    DIRECTIONS,
    EMPTY,
    FORWARD,
    GOAL,
    GREEN,
    LEFT,
    METADATA,
    RIGHT,
    WALL,
    check_action,
    check_choice,
    draw,
)

SHAPING = ("gap", "manhattan_goal", "manhattan_gap", "right_wall", "left_wall")
"""Potentials of the paper's Figure 11."""


class Dynamics(NamedTuple):
    """Deterministic dynamics [states, actions] over integer states; read-only.

    The states of the goal come last. They lead to themselves, for a reward of 0, so that their value is 0.
    """

    next_state: np.ndarray
    """int64."""
    reward: np.ndarray
    """float64, shaping included."""
    terminal: np.ndarray
    """bool: the next state is the goal; nothing is to be bootstrapped from it."""


class Rooms(gymnasium.Env):
    """Rooms in a row, divided by walls with one gap each; subclasses say which.

    Potential-based shaping (Ng et al., 1999) adds F = γφ(s') - φ(s) to the reward:

    - *gap*: φ = 1 in a gap, 0 elsewhere.
    - *manhattan_goal*, *manhattan_gap*: the Manhattan distance to the goal, or to the nearest gap.
    - *right_wall*, *left_wall*: the horizontal distance to that side.

    The paper only calls the distances d normalised; here φ = 1 - d / max d, which grows towards the target and is 0 to
    1 like the potential of the gap. In terminal states φ = 0 (Grzes, 2017): discounted, the F of an episode of T steps
    add up to γ^T φ(s_T) - φ(s_0), and only if the first term vanishes do all policies gain the same, so that the
    optimal ones stay optimal. A time limit is no terminal state; there, φ(s_T) is what bootstrapping stands for.

    Args:
        rewards: (goal, step), paid for a step that reaches the goal and for any other.
        shaping: one of `SHAPING`, or None.
        gamma: the discount factor of the shaping reward.
        render_mode: ``"rgb_array"`` or None.
    """

    metadata = METADATA
    EVENTS: ClassVar[tuple[str, ...]]
    WIDTH: ClassVar[int]
    HEIGHT: ClassVar[int]
    GAPS: ClassVar[tuple[tuple[int, int], ...]]
    """One (x, y) for each wall, which fills the rest of its column."""
    START: ClassVar[tuple[int, int, int]]
    GOAL: ClassVar[tuple[int, int]]

    def __init__(
        self,
        rewards: tuple[float, float] = (1.0, -0.1),
        shaping: str | None = None,
        gamma: float = 0.99,
        render_mode: str | None = None,
    ):
        check_choice(self, "shaping", shaping, (None, *SHAPING))
        check_choice(self, "render_mode", render_mode, (None, *self.metadata["render_modes"]))
        if len(rewards) != 2 or not all(math.isfinite(reward) for reward in rewards):
            raise ValueError(f"{type(self).__name__}(rewards={rewards!r}): must be two finite numbers, (goal, step)")
        if not 0 <= gamma <= 1:
            raise ValueError(f"{type(self).__name__}(gamma={gamma!r}): must be in [0, 1]")
        self.render_mode = render_mode
        self.action_space = Discrete(3)
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)

        walls = {x for x, _ in self.GAPS}
        self._cells = [
            (x, y)
            for x in range(self.WIDTH)
            for y in range(self.HEIGHT)
            if (x not in walls or (x, y) in self.GAPS) and (x, y) != self.GOAL
        ]
        self._cells.append(self.GOAL)
        self._index = {cell: index for index, cell in enumerate(self._cells)}
        poses = np.array([(x, y, theta) for x, y in self._cells for theta in range(4)])
        self._observations = (2 * poses / (self.WIDTH - 1, self.HEIGHT - 1, 3) - 1).astype(np.float32)
        self.potential = self._potential(shaping)
        """φ of each state, float64; all 0 without shaping."""
        self._dynamics = self._tabulate(rewards, gamma)
        # Lists of Python numbers: three times faster to step through than arrays.
        self._table = [table.tolist() for table in self._dynamics]
        self._events = [self._events_at(cell) for cell in self._cells]
        self._state: int | None = None

    @property
    def observations(self) -> np.ndarray:
        """The observation of each state, float32 [states, 3]."""
        return self._observations

    @property
    def num_states(self) -> int:
        """Number of states; the last four are the goal."""
        return 4 * len(self._cells)

    @property
    def state(self) -> int:
        """The current state as an integer."""
        if self._state is None:
            raise gymnasium.error.ResetNeeded(f"{type(self).__name__}: call reset() first")
        return self._state

    def state_of(self, x: int, y: int, theta: int) -> int:
        """The integer state of a pose."""
        if (x, y) not in self._index or theta not in range(4):
            raise ValueError(f"state_of({x}, {y}, {theta}): no such pose in {type(self).__name__}")
        return 4 * self._index[x, y] + theta

    def pose_of(self, state: int) -> tuple[int, int, int]:
        """The pose (x, y, θ) of an integer state."""
        if not 0 <= state < self.num_states:
            raise ValueError(f"pose_of({state}): must be in [0, {self.num_states})")
        return *self._cells[state // 4], state % 4

    def dynamics(self) -> Dynamics:
        """The tabulated dynamics, which `step` follows too."""
        return self._dynamics

    def optimal_q(self, gamma: float) -> np.ndarray:
        """The fixed point Q*(s, a) = r + γ max Q*(s', ·) by value iteration, float64 [states, actions].

        Args:
            gamma: discount factor in [0, 1).
        """
        if not 0 <= gamma < 1:
            raise ValueError(f"optimal_q(gamma={gamma!r}): must be in [0, 1)")
        next_state, reward, terminal = self._dynamics
        discount = gamma * ~terminal
        q = np.zeros(reward.shape)
        while True:
            previous, q = q, reward + discount * q.max(1)[next_state]
            if np.abs(q - previous).max() <= 1e-12 * max(1.0, np.abs(q).max()):
                return q

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Puts the agent at the start."""
        super().reset(seed=seed)
        self._state = self.state_of(*self.START)
        return self._observations[self._state].copy(), dict.fromkeys(self.EVENTS, False)

    def step(self, action: int):
        """Turns left (0), turns right (1) or walks forward (2); walls stop the agent."""
        check_action(action, 3)
        state = self.state
        next_state, reward, terminal = self._table
        self._state = new = next_state[state][action]
        events = self._events[new // 4].copy()
        return self._observations[new].copy(), reward[state][action], terminal[state][action], False, events

    def render(self) -> np.ndarray | None:
        """The grid within a frame of walls."""
        if self.render_mode is None:
            return None
        cells = np.zeros((self.HEIGHT + 2, self.WIDTH + 2, 3), dtype=np.int64)
        cells[..., 0] = WALL
        for x, y in self._cells:
            cells[y + 1, x + 1, 0] = EMPTY
        cells[self.GOAL[1] + 1, self.GOAL[0] + 1] = GOAL, GREEN, 0
        x, y, theta = self.pose_of(self.state)
        return draw(cells, x + 1, y + 1, theta)

    def _events_at(self, cell: tuple[int, int]) -> dict[str, bool]:
        start = self.START[:2]
        events = {
            "at_gap": cell in self.GAPS,
            "done": cell == self.GOAL,
            # The paper says "positions near": here, one or two steps away.
            "near_goal": 1 <= _manhattan(cell, self.GOAL) <= 2,
            "near_initial": 1 <= _manhattan(cell, start) <= 2,
        }
        return {name: events[name] for name in self.EVENTS}

    def _potential(self, shaping: str | None) -> np.ndarray:
        if shaping is None or shaping == "gap":
            phi = np.array([float(shaping == "gap" and cell in self.GAPS) for cell in self._cells])
        else:
            distance = {
                "manhattan_goal": lambda cell: _manhattan(cell, self.GOAL),
                "manhattan_gap": lambda cell: min(_manhattan(cell, gap) for gap in self.GAPS),
                "right_wall": lambda cell: self.WIDTH - 1 - cell[0],
                "left_wall": lambda cell: cell[0],
            }[shaping]
            distances = np.array([distance(cell) for cell in self._cells])
            phi = 1 - distances / distances.max()
        phi[-1] = 0.0
        return phi.repeat(4)

    def _tabulate(self, rewards: tuple[float, float], gamma: float) -> Dynamics:
        next_state = np.empty((self.num_states, 3), dtype=np.int64)
        for state in range(self.num_states):
            x, y, theta = self.pose_of(state)
            dx, dy = DIRECTIONS[theta]
            ahead = (x + dx, y + dy)
            next_state[state, LEFT] = self.state_of(x, y, (theta - 1) % 4)
            next_state[state, RIGHT] = self.state_of(x, y, (theta + 1) % 4)
            next_state[state, FORWARD] = self.state_of(*ahead, theta) if ahead in self._index else state
        first_goal_state = self.num_states - 4
        next_state[first_goal_state:] = np.arange(first_goal_state, self.num_states)[:, None]
        terminal = next_state >= first_goal_state
        reward = np.where(terminal, *rewards) + gamma * self.potential[next_state] - self.potential[:, None]
        reward[first_goal_state:] = 0.0
        for table in (next_state, reward, terminal):
            table.setflags(write=False)
        return Dynamics(next_state, reward, terminal)


def _manhattan(a: tuple[int, int], b: tuple[int, int]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


class ThreeRooms(Rooms):
    """Three Room Grid World (Figure 2). Events: at_gap and done, the agent stands in a gap or in the goal."""

    WIDTH, HEIGHT = 17, 5
    GAPS = ((5, 4), (11, 0))
    START = (0, 0, 0)
    GOAL = (16, 4)
    EVENTS = ("at_gap", "done")


class TwoRooms(Rooms):
    """The world of the shaping comparison (Figures 3 and 11), from the bottom left through a gap to the goal.

    Events: at_gap and done as in the three rooms, and the less ideal near_goal and near_initial, one or two cells away
    from the goal or the start.
    """

    WIDTH, HEIGHT = 15, 7
    GAPS = ((7, 0),)
    START = (0, 6, 0)
    GOAL = (14, 6)
    EVENTS = ("at_gap", "done", "near_goal", "near_initial")
