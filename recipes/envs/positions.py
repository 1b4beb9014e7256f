"""CartPole whose observations are positions without velocities."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box

_POSITIONS = [0, 2]


class CartPolePositions(gymnasium.ObservationWrapper):
    """CartPole that shows the position of the cart and the angle of the pole, but neither of the velocities.

    One observation does not determine the state, so an agent needs a memory.

    Args:
        **options: keyword arguments of Gymnasium's CartPole, such as ``render_mode``.
    """

    def __init__(self, **options: Any):
        super().__init__(CartPoleEnv(**options))
        space = self.env.observation_space
        assert isinstance(space, Box)
        self.observation_space = Box(space.low[_POSITIONS], space.high[_POSITIONS])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """The position of the cart, in metres, and the angle of the pole, in radians."""
        return observation[_POSITIONS]
