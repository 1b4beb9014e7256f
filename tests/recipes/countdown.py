"""An environment whose observations, rewards and ends are known."""

import gymnasium
import numpy as np


class Countdown(gymnasium.Env):
    """Observes how many steps are left of ``length``; the reward is the action.

    The last step terminates if the length is even, else truncates. ``info`` has flags of the second step, of the last
    one, and one that is there on the last step only.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 100.0, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length=4):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return np.array([self.left], np.float32), {"second": False, "last": False}

    def step(self, action):
        self.left -= 1
        over, even = self.left == 0, self.length % 2 == 0
        info = {"second": self.left == self.length - 2, "last": np.bool_(over)} | ({"late": True} if over else {})
        return np.array([self.left], np.float32), float(action), over and even, over and not even, info
