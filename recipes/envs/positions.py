"""CartPole whose observations are positions without velocities."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box

# Position of the cart and angle of the pole in Gymnasium's observation.
_POSITIONS = [0, 2]


class CartPolePositions(gymnasium.ObservationWrapper):
    """CartPole that shows the position of the cart and the angle of the pole, but neither of the velocities.

    Both are divided by the limit beyond which an episode ends, 2.4 m and 12 degrees. One observation does not determine
    the state, so an agent needs a memory.

    Args:
        **options: keyword arguments of Gymnasium's CartPole, such as ``render_mode``.
    """

    def __init__(self, **options: Any):
        super().__init__(CartPoleEnv(**options))
        world: Any = self.env
        self._limits = np.array([world.x_threshold, world.theta_threshold_radians], dtype=np.float32)
        # the last observation of an episode is beyond a limit
        self.observation_space = Box(-2.0, 2.0, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """The position of the cart and the angle of the pole, float32 [2]."""
        return observation[_POSITIONS] / self._limits
