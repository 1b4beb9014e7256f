import numpy as np
import pytest

from recipes.common.config import EnvConfig
from recipes.common.evaluation import Evaluation, evaluate
from tests.recipes.countdown import Countdown


class RandomStart(Countdown):
    """Observes a random number in [0, 1) first."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.first = self.np_random.random()
        return np.array([self.first], np.float32), {}


def test_returns_of_whole_episodes_of_different_lengths():
    seen = []

    def policy(observations):
        seen.append(len(observations))
        return np.full(len(observations), 2)

    envs = [Countdown(3), Countdown(1), Countdown(2)]
    assert [episode.score for episode in evaluate(policy, envs, epsilon=0.0, seed=[1])] == [6.0, 2.0, 4.0]
    assert seen == [3, 2, 1]  # environments whose episode is over are not asked again


def test_a_policy_with_memory_is_told_which_episodes_go_on():
    class Counter:
        """Its action is the number of steps that it has seen of the episode."""

        def begin(self, count):
            steps = np.zeros(count, dtype=int)

            def act(observations, episodes):
                assert len(observations) == len(episodes)
                steps[episodes] += 1
                return steps[episodes]

            return act

    envs = [Countdown(3), Countdown(1), Countdown(2)]
    for _ in range(2):  # each evaluation begins with an empty memory
        assert [episode.score for episode in evaluate(Counter(), envs, seed=[1])] == [6.0, 1.0, 3.0]


def test_epsilon_is_the_share_of_random_actions():
    envs = [Countdown(1000) for _ in range(10)]
    episodes = evaluate(lambda o: np.full(len(o), 2), envs, epsilon=0.5, seed=[1])
    mean = np.mean([episode.score for episode in episodes]) / 1000
    # half of the actions are uniform on {0, 1, 2}: mean 1.5, standard deviation .76 / 100
    assert abs(mean - 1.5) < 0.04


def test_seed_decides_everything_and_global_generators_are_left_alone():
    starts = []

    def policy(observations):
        starts.append(observations.copy())
        return np.zeros(len(observations))

    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    first = [evaluate(policy, [RandomStart(5), RandomStart(5)], epsilon=0.9, seed=[1, n]) for n in (1, 1, 2)]
    assert first[0] == first[1] != first[2]
    np.testing.assert_array_equal(starts[0], starts[5])
    assert (starts[0] != starts[10]).all() and starts[0][0] != starts[0][1]
    np.testing.assert_array_equal(np.random.get_state()[1], before)


class Coin(RandomStart):
    """Its `info` names the side of a coin; the reward of "tails" is twice that of "heads"."""

    def __init__(self, length=3, bonus=0):
        super().__init__(length)
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        self.side = "heads" if self.first < 0.5 else "tails"
        return observation, {"side": self.side}

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward * (1 + (self.side == "tails")) + self.bonus, *rest


def columns(config, episodes, **options):
    evaluation = Evaluation(lambda config: Coin(**config.options), config, episodes)
    return evaluation.columns(lambda o: np.ones(len(o)), epsilon=0.0, seed=[1], **options)


def test_returns_are_split_by_an_entry_of_the_info():
    config = EnvConfig("coin", "Coin-v0", None, return_by={"side": ["heads", "tails", "edge"]})
    found = columns(config, 20)
    assert found["return_heads"] == 3 and found["return_tails"] == 6 and np.isnan(found["return_edge"])
    heads = [found[f"return_{i}"] for i in range(20)].count(3.0)
    assert 0 < heads < 20 and found["return_mean"] == (3 * heads + 6 * (20 - heads)) / 20


def test_options_of_training_do_not_reach_evaluations():
    config = EnvConfig("coin", "Coin-v0", None, {"length": 2}, {"bonus": 100}, evaluations={"more": {"bonus": 1}})
    found = columns(config, 8)
    assert found["return_more"] == found["return_mean"] + 2 < 10


def test_q_mean_is_the_mean_value_of_the_steps():
    config = EnvConfig("coin", "Coin-v0", None)
    found = columns(config, 4, value=lambda observations, actions: observations[:, 0] + 10 * actions)
    first = columns(
        config, 4, value=lambda observations, actions: np.where(observations[:, 0] < 1, observations[:, 0], 0)
    )
    # each episode observes its start, in [0, 1), then 2 and 1 steps left
    assert found["q_mean"] == pytest.approx(10 + first["q_mean"] + (2 + 1) / 3)
    assert "q_mean" not in columns(config, 4)
