import gymnasium
import numpy as np

from recipes.common.evaluation import evaluate


class Countdown(gymnasium.Env):
    """Ends after `length` steps; the reward is the action."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length, truncates=False):
        self.length, self.truncates = length, truncates

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.first = self.length, self.np_random.random()
        return np.array([self.first], np.float32), {}

    def step(self, action):
        self.left -= 1
        over = self.left == 0
        observation = np.array([self.left], np.float32)
        return observation, float(action), over and not self.truncates, over and self.truncates, {}


def test_returns_of_whole_episodes_of_different_lengths():
    seen = []

    def policy(observations):
        seen.append(len(observations))
        return np.full(len(observations), 2)

    envs = [Countdown(3), Countdown(1), Countdown(2, truncates=True)]
    assert evaluate(policy, envs, epsilon=0.0, seed=[1]) == [6.0, 2.0, 4.0]
    assert seen == [3, 2, 1]  # environments whose episode is over are not asked again


def test_epsilon_is_the_share_of_random_actions():
    envs = [Countdown(1000) for _ in range(10)]
    mean = np.mean(evaluate(lambda o: np.full(len(o), 2), envs, epsilon=0.5, seed=[1])) / 1000
    # half of the actions are uniform on {0, 1, 2}: mean 1.5, standard deviation .76 / 100
    assert abs(mean - 1.5) < 0.04


def test_seed_decides_everything_and_global_generators_are_left_alone():
    starts = []

    def policy(observations):
        starts.append(observations.copy())
        return np.zeros(len(observations))

    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    first = [evaluate(policy, [Countdown(5), Countdown(5)], epsilon=0.9, seed=[1, n]) for n in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    np.testing.assert_array_equal(starts[0], starts[5])
    assert (starts[0] != starts[10]).all() and starts[0][0] != starts[0][1]
    np.testing.assert_array_equal(np.random.get_state()[1], before)
