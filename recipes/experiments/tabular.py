"""Experience and Q-learning in worlds with tabulated dynamics."""

from collections.abc import Iterable

import numpy as np

from recipes.envs.rooms import Dynamics


def experience(
    dynamics: Dynamics, truth: np.ndarray, start: int, horizon: int, count: int, optimal_share: float, seed: int
) -> list[np.ndarray]:
    """States, actions and whether their episode ends, of `count` consecutive steps, [count] each.

    The behaviour is optimal now and then.

    Args:
        dynamics: the world.
        truth: the optimal Q-values, [states, actions].
        start: the state at the start of an episode.
        horizon: the largest number of steps of an episode.
        count: number of steps.
        optimal_share: probability of an optimal action; the others are uniformly random.
        seed: seed of the behaviour.
    """
    rng, rows, state, steps = np.random.default_rng(seed), [], start, 0
    for _ in range(count):
        is_optimal = rng.random() < optimal_share
        action = int(truth[state].argmax() if is_optimal else rng.integers(truth.shape[1]))
        steps += 1
        done = bool(dynamics.terminal[state, action]) or steps == horizon
        rows.append((state, action, done))
        state, steps = (start, 0) if done else (int(dynamics.next_state[state, action]), steps)
    return [*map(np.array, zip(*rows, strict=True))]


def learn(
    q: list[list[float]], world: Dynamics, states: np.ndarray, actions: np.ndarray, rates: Iterable[float], gamma: float
) -> list[float]:
    """Tabular Q-learning from transitions, one after the other. Returns the absolute TD errors.

    Args:
        q: the Q-values, changed in place.
        world: the world.
        states: states [n].
        actions: actions [n].
        rates: learning rates, at least n.
        gamma: discount factor.
    """
    errors, columns = [], (states, actions, *(table[states, actions] for table in world))
    for rate, state, action, after, reward, ends in zip(rates, *(each.tolist() for each in columns), strict=False):
        error = reward + gamma * (not ends) * max(q[after]) - q[state][action]
        q[state][action] += rate * error
        errors.append(abs(error))
    return errors
