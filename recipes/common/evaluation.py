"""Evaluates a fixed policy in whole episodes."""

from collections.abc import Callable

import gymnasium
import numpy as np
from gymnasium.spaces import flatdim


def evaluate(
    policy: Callable[[np.ndarray], np.ndarray], envs: list[gymnasium.Env], *, epsilon: float = 0.0, seed: list[int]
) -> list[float]:
    """Play one episode in each environment, all at the same time.

    Args:
        policy: maps observations [n, ...] to actions [n, ...].
        envs: one environment per episode.
        epsilon: probability of a uniformly random action, for discrete actions counted from 0. Default: 0.
        seed: seed of the environments and the random actions. Training uses other generators.

    Returns:
        The undiscounted return of each episode.
    """
    rng = np.random.default_rng(seed)
    observations = [env.reset(seed=int(rng.integers(2**31)))[0] for env in envs]
    num_actions = flatdim(envs[0].action_space)
    returns = [0.0] * len(envs)
    running = list(range(len(envs)))
    while running:
        actions = policy(np.stack([observations[i] for i in running]))
        if epsilon:
            random = rng.random(len(running)) < epsilon
            actions = np.where(random, rng.integers(num_actions, size=len(running)), actions)
        for i, action in zip(tuple(running), actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(action)
            returns[i] += float(reward)
            if terminated or truncated:
                running.remove(i)
    return returns
