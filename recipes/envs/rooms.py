"""Environments with two and three rooms in a row, from the SSET paper (sections 5.1, 5.2 and A.2).

The agent observes its pose (x, y, θ) and turns or walks. The reward is 1 for reaching the goal, which ends the episode,
and -0.1 for any other step. The dynamics are deterministic and tabulated: see `dynamics`.

The paper gives no sizes. In this implementation, the three rooms have 5x5 cells and an optimal path of 33 steps. The
two rooms have 7x7 cells, with the gap at the top and the goal at the bottom: the way to the goal is not straight, and
its 29 steps fit into the paper's histories of 30.
"""

from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium.spaces import Box, Discrete

from recipes.envs import grid

SHAPING = ("gap", "manhattan_goal", "manhattan_gap", "right_wall", "left_wall")
"""Potentials for reward shaping, from the paper's Figure 11."""


class Dynamics(NamedTuple):
    """Deterministic dynamics over integer states, read-only arrays [states, actions].

    In the rooms, the states of the goal come last. Each leads to itself with reward 0, so its value is 0.
    """

    next_state: np.ndarray
    """Next state, int64."""
    reward: np.ndarray
    """Reward including shaping, float64."""
    terminal: np.ndarray
    """Whether the next state is terminal, as the goal is; bool."""

    def optimal_q(self, gamma: float) -> np.ndarray:
        """The optimal Q-values, the fixed point Q*(s, a) = r + γ max Q*(s', ·), computed by value iteration.

        Args:
            gamma: discount factor in [0, 1).

        Returns:
            float64 [states, actions].
        """
        discount = gamma * ~self.terminal
        q = np.zeros(self.reward.shape)
        while True:
            previous, q = q, self.reward + discount * q.max(1)[self.next_state]
            if np.abs(q - previous).max() <= 1e-12 * max(1.0, np.abs(q).max()):
                return q


class Rooms(grid.World):
    """Rooms in a row, divided by walls with one gap each. Subclasses define the layout.

    Potential-based shaping (Ng et al., 1999) adds F = γφ(s') - φ(s) to the reward:

    - *gap*: φ = 1 in a gap, 0 elsewhere.
    - *manhattan_goal*, *manhattan_gap*: φ = 1 - d / max d with d the Manhattan distance to the goal, or to the nearest
      gap.
    - *right_wall*, *left_wall*: φ = 1 - d / max d with d the horizontal distance to that side.

    The paper only says that distances are normalised; φ = 1 - d / max d increases towards the target and is in [0, 1],
    like the potential of the gap. In terminal states φ = 0 (Grzes, 2017). The discounted sum of F over an episode of T
    steps is γ^T φ(s_T) - φ(s_0). Only if the first term is 0 is this sum the same for all policies, so that optimal
    policies stay optimal. A state at a time limit is not terminal: targets bootstrap from it, and φ keeps its value.

    Args:
        rewards: (goal, step), the rewards of a step that reaches the goal and of any other step. Default: (1, -0.1).
        shaping: one of `SHAPING`; None (default): no shaping.
        gamma: discount factor of the shaping reward, in [0, 1]. Default: 0.99.

    Raises:
        ValueError: if `shaping` is unknown.
    """

    EVENTS: ClassVar[tuple[str, ...]]
    WIDTH: ClassVar[int]
    HEIGHT: ClassVar[int]
    GAPS: ClassVar[tuple[tuple[int, int], ...]]
    """The gap (x, y) of each wall; the wall fills the other cells of column x."""
    START: ClassVar[tuple[int, int, int]]
    GOAL: ClassVar[tuple[int, int]]

    def __init__(self, rewards: tuple[float, float] = (1.0, -0.1), shaping: str | None = None, gamma: float = 0.99):
        self.check_choice("shaping", shaping, (None, *SHAPING))
        self.action_space = Discrete(3)
        self.observation_space = Box(-1.0, 1.0, (3,), np.float32)

        walls = {x for x, _ in self.GAPS}
        grid_cells = [(x, y) for x in range(self.WIDTH) for y in range(self.HEIGHT)]
        free = [(x, y) for x, y in grid_cells if x not in walls or (x, y) in self.GAPS]
        self._cells = [*(cell for cell in free if cell != self.GOAL), self.GOAL]
        self._index = {cell: index for index, cell in enumerate(self._cells)}
        self.num_states = 4 * len(self._cells)
        """Number of states; the last four are the goal."""
        poses = np.array([self.pose_of(state) for state in range(self.num_states)])
        self.observations = (2 * poses / (self.WIDTH - 1, self.HEIGHT - 1, 3) - 1).astype(np.float32)
        """The observation of each state, float32 [states, 3]."""
        self.potential = self._potential(shaping)
        """φ of each state, float64 [states]; all 0 without shaping."""
        self.dynamics = self._tabulate(rewards, gamma)
        """The tabulated dynamics; `step` uses the same tables."""
        # Steps are three times faster with lists of Python numbers than with arrays.
        self._table = [table.tolist() for table in self.dynamics]
        self._events = [self._events_at(cell) for cell in self._cells]
        self.state = 0
        """The current state as an integer."""

    def state_of(self, x: int, y: int, theta: int) -> int:
        """The integer state of a pose."""
        return 4 * self._index[x, y] + theta

    def pose_of(self, state: int) -> tuple[int, int, int]:
        """The pose (x, y, θ) of an integer state."""
        return *self._cells[state // 4], state % 4

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Place the agent at the start."""
        super().reset(seed=seed)
        self.state = self.state_of(*self.START)
        return self.observations[self.state].copy(), dict.fromkeys(self.EVENTS, False)

    def step(self, action: int):
        """Turn left (0), turn right (1) or walk forward (2). A step into a wall has no effect."""
        self.check_action(action)
        state = self.state
        next_state, reward, terminal = self._table
        self.state = new = next_state[state][action]
        events = self._events[new // 4].copy()
        return self.observations[new].copy(), reward[state][action], terminal[state][action], False, events

    def _events_at(self, cell: tuple[int, int]) -> dict[str, bool]:
        events = {
            "at_gap": cell in self.GAPS,
            "done": cell == self.GOAL,
            # The paper says "positions near"; here, near means one or two cells away.
            "near_goal": 1 <= _manhattan(cell, self.GOAL) <= 2,
            "near_initial": 1 <= _manhattan(cell, self.START) <= 2,
        }
        return {name: events[name] for name in self.EVENTS}

    def _potential(self, shaping: str | None) -> np.ndarray:
        distance = {
            None: lambda cell: 1,
            "gap": lambda cell: cell not in self.GAPS,
            "manhattan_goal": lambda cell: _manhattan(cell, self.GOAL),
            "manhattan_gap": lambda cell: min(_manhattan(cell, gap) for gap in self.GAPS),
            "right_wall": lambda cell: self.WIDTH - 1 - cell[0],
            "left_wall": lambda cell: cell[0],
        }[shaping]
        distances = np.array([float(distance(cell)) for cell in self._cells])
        phi = 1 - distances / distances.max()
        phi[-1] = 0.0
        return phi.repeat(4)

    def _tabulate(self, rewards: tuple[float, float], gamma: float) -> Dynamics:
        next_state = np.empty((self.num_states, 3), dtype=np.int64)
        for state in range(self.num_states):
            x, y, theta = self.pose_of(state)
            dx, dy = grid.DIRECTIONS[theta]
            ahead = (x + dx, y + dy)
            next_state[state, grid.LEFT] = self.state_of(x, y, (theta - 1) % 4)
            next_state[state, grid.RIGHT] = self.state_of(x, y, (theta + 1) % 4)
            next_state[state, grid.FORWARD] = self.state_of(*ahead, theta) if ahead in self._index else state
        first_goal_state = self.num_states - 4
        next_state[first_goal_state:] = np.arange(first_goal_state, self.num_states)[:, None]
        terminal = next_state >= first_goal_state
        reward = np.where(terminal, *rewards) + gamma * self.potential[next_state] - self.potential[:, None]
        reward[first_goal_state:] = 0.0
        for table in (next_state, reward, terminal):
            table.setflags(write=False)
        return Dynamics(next_state, reward, terminal)


def _manhattan(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


class ThreeRooms(Rooms):
    """Three Room Grid World (Figure 2). Events: the agent stands in a gap (at_gap) or in the goal (done)."""

    WIDTH, HEIGHT = 17, 5
    GAPS = ((5, 4), (11, 0))
    START = (0, 0, 0)
    GOAL = (16, 4)
    EVENTS = ("at_gap", "done")


class TwoRooms(Rooms):
    """The environment of the shaping comparison (Figures 3 and 11): from the bottom left through a gap to the goal.

    Events: at_gap and done as in ThreeRooms. Two less useful events are near_goal and near_initial: the agent is one or
    two cells away from the goal or the start.
    """

    WIDTH, HEIGHT = 15, 7
    GAPS = ((7, 0),)
    START = (0, 6, 0)
    GOAL = (14, 6)
    EVENTS = ("at_gap", "done", "near_goal", "near_initial")
