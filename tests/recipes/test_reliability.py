import math

import numpy as np
import pytest

from recipes.envs.deep_sea import DeepSea
from recipes.experiments import reliability


def test_the_dynamics_of_deep_sea_are_those_of_the_environment():
    dynamics, env = reliability.deep_sea(5), DeepSea(5)
    rng = np.random.default_rng(0)
    for _ in range(50):
        observation, _ = env.reset()
        done = False
        while not done:
            state, action = int(observation.argmax()), int(rng.integers(2))
            observation, reward, done, _, _ = env.step(action)
            assert dynamics.reward[state, action] == pytest.approx(reward)
            assert dynamics.terminal[state, action] == done
            assert done or dynamics.next_state[state, action] == observation.argmax()
    assert dynamics.optimal_q(0.99)[0].max() == pytest.approx(0.99**4 - 0.002 * sum(0.99**t for t in range(5)))


@pytest.mark.parametrize("world", reliability.WORLDS)
def test_measurements_are_those_of_plain_python(world):
    data = reliability.Dataset(world, seed=1)
    q = np.random.default_rng(2).standard_normal(data.truth.shape)
    density = np.random.default_rng(3).random(len(data.state))
    found, trust, targets = data.measure(q, density)
    bias, size = [], len(data.state)
    next_state, reward, terminal = data.dynamics
    td_error = np.zeros(size)
    for row in range(size):
        state, action = data.state[row], data.action[row]
        target = reward[state, action] + (0 if terminal[state, action] else 0.99 * max(q[next_state[state, action]]))
        assert target == pytest.approx(targets[row])
        td_error[row] = abs(target - q[state, action])
        bias.append(abs(target - data.truth[state, action]))
        ends = data.done[row]
        assert ends or row + 1 == size or data.episode[row + 1] == data.episode[row]
        if not ends and row + 1 < size:
            assert data.state[row + 1] == next_state[state, action]
    finished = data.episode < data.episode[-1]
    for row in np.flatnonzero(finished)[::97]:
        episode = np.flatnonzero(data.episode == data.episode[row])
        total, later = td_error[episode].sum(), td_error[episode[episode > row]].sum()
        assert trust[row] == pytest.approx(1 - later / total)
    sums = np.array([td_error[data.episode == episode].sum() for episode in data.episode])
    bound = np.mean(np.array(bias) <= (1 - trust) * sums + 1e-9)
    assert found["bound"] == pytest.approx(bound)
    assert found["bias drawn"] == pytest.approx(np.average(bias, weights=density) / np.mean(bias))
    # a perfect Q has no bias
    perfect, *_ = data.measure(data.truth, density)
    assert perfect["error"] < 1e-9 and perfect["bound"] == 1
    assert math.isnan(reliability.correlation(np.ones(3), np.arange(3)))
