"""CartPole whose observations are positions without velocities."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.spaces import Box
from gymnasium.wrappers import TransformObservation

# Position of the cart and angle of the pole in Gymnasium's observation.
_POSITIONS = [0, 2]


def make(**options: Any) -> gymnasium.Env:
    """CartPole that shows the position of the cart and the angle of the pole, but neither of the velocities.

    Both are divided by the limit beyond which an episode ends, 2.4 m and 12 degrees. One observation does not determine
    the state, so an agent needs a memory.

    Args:
        **options: keyword arguments of Gymnasium's CartPole.
    """
    env = CartPoleEnv(**options)
    limits = np.array([env.x_threshold, env.theta_threshold_radians], dtype=np.float32)
    # the last observation of an episode is beyond a limit
    return TransformObservation(env, lambda seen: seen[_POSITIONS] / limits, Box(-2.0, 2.0, (2,), np.float32))
