"""Deep Sea of bsuite (Osband et al. 2020): of 2^N sequences of actions in an N x N grid, one finds the treasure."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from recipes.envs.grid import World

_MOVE_COST = 0.01


class DeepSea(World):
    """An agent starts at the top left of a grid and falls by one row per step, to the left or to the right.

    An episode has `size` steps and ends below the bottom row. A step to the right costs 0.01 / size, a step to the left
    nothing. A step to the right in the bottom right cell finds the treasure, which gives a reward of 1. Only the agent
    that always goes right gets there: its return is 0.99. The walls on both sides stop sideways moves. Which of the two
    actions goes right differs from cell to cell, so actions do not generalize.

    The observation is the cell, one-hot and row by row. After the last step, it is 0 everywhere.

    Args:
        size: N, the number of rows and columns, >= 1. Default: 10.
        mapping_seed: seed of the meaning of the actions, >= 0. Default: 0.
    """

    EVENTS = ("treasure",)

    def __init__(self, size: int = 10, mapping_seed: int = 0):
        self.action_space = Discrete(2)
        self.observation_space = Box(0.0, 1.0, (size * size,), np.float32)
        self._size = size
        self.right_actions = np.random.default_rng(mapping_seed).integers(2, size=(size, size))
        """The action that goes right in each cell, int64 [row, column]."""
        # The rows after the last one are 0: the agent is below the grid.
        self._observations = np.eye(size * (size + 1), size * size, dtype=np.float32)
        self.cell = 0, 0
        """The agent's row and column; row `size` is below the grid."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Place the agent at the top left."""
        super().reset(seed=seed)
        self.cell = 0, 0
        return self._observations[0].copy(), {"treasure": False}

    def step(self, action: int):
        """Fall by one row, to the left or to the right."""
        size, (row, column) = self._size, self.cell
        self.check_action(action)
        goes_right = bool(action == self.right_actions[row, column])
        # The last column is reached in the bottom row at the earliest.
        treasure = goes_right and column == size - 1
        reward = float(treasure) - goes_right * _MOVE_COST / size
        row, column = row + 1, min(max(column + (1 if goes_right else -1), 0), size - 1)
        self.cell = row, column
        return self._observations[row * size + column].copy(), reward, row == size, False, {"treasure": treasure}
