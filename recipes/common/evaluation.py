"""Evaluates a fixed policy in whole episodes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import flatdim

from recipes.common.config import EnvConfig
from recipes.common.errors import ConfigError

# Maps observations [n, ...] to actions [n, ...]. If actions depend on the previous steps of an episode, the policy has
# a method `begin` instead: it begins a number of episodes and returns a function of observations [n, ...] and the
# numbers of the n episodes that they are from, which returns the actions [n, ...] and remembers the observations.
Policy = Any
# Maps observations [n, ...] and actions [n, ...] to the values [n] of the steps.
Value = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Episode:
    """An episode of an evaluation.

    Args:
        info: the environment's `info` after the reset.
        score: undiscounted return.
        values: value of each step; empty without a value function.
    """

    info: Mapping[str, Any]
    score: float = 0.0
    values: list[float] = field(default_factory=list)


def evaluate(
    policy: Policy, envs: list[gymnasium.Env], *, epsilon: float = 0.0, seed: list[int], value: Value | None = None
) -> list[Episode]:
    """Play one episode in each environment, all at the same time.

    Args:
        policy: the policy, with or without memory.
        envs: one environment per episode.
        epsilon: probability of a uniformly random action, for discrete actions counted from 0. Default: 0.
        seed: seed of the environments and the random actions. Training uses other generators.
        value: the values of the steps. Default: None.
    """
    rng = np.random.default_rng(seed)
    starts = [env.reset(seed=int(rng.integers(2**31))) for env in envs]
    observations, episodes = [start[0] for start in starts], [Episode(start[1]) for start in starts]
    num_actions = flatdim(envs[0].action_space)
    act = policy.begin(len(envs)) if hasattr(policy, "begin") else lambda observed, _: policy(observed)
    running = list(range(len(envs)))
    while running:
        observed = np.stack([observations[i] for i in running])
        actions = act(observed, running)
        if epsilon:
            random = rng.random(len(running)) < epsilon
            actions = np.where(random, rng.integers(num_actions, size=len(running)), actions)
        if value is not None:
            for i, step_value in zip(running, value(observed, actions), strict=True):
                episodes[i].values.append(float(step_value))
        for i, action in zip(tuple(running), actions, strict=True):
            observations[i], reward, terminated, truncated, _ = envs[i].step(action)
            episodes[i].score += float(reward)
            if terminated or truncated:
                running.remove(i)
    return episodes


class Evaluation:
    """The environments in which a run is evaluated, one per episode. They do not use env.training.

    Args:
        make: makes an environment from its configuration.
        config: the environment; see its `evaluations` and `return_by`.
        episodes: number of episodes per evaluation.

    Raises:
        ConfigError: if `return_by` names an entry that the environment's `info` lacks.
    """

    def __init__(self, make: Callable[[EnvConfig], gymnasium.Env], config: EnvConfig, episodes: int):
        self._config = config
        self.envs = [make(config) for _ in range(episodes)]
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        if config.return_by:
            info = self.envs[0].reset(seed=0)[1]
            if missing := [entry for entry in config.return_by if entry not in info]:
                text = f"has no such entry; its entries are {', '.join(map(str, info)) or 'none'}"
                raise ConfigError(f"env.return_by.{missing[0]}: the info of {config.id} {text}")
        others = {name: replace(config, options=config.options | more) for name, more in config.evaluations.items()}
        self._further = {name: [make(other) for _ in range(episodes)] for name, other in others.items()}

    def columns(
        self, policy: Policy, *, epsilon: float, seed: list[int], value: Value | None = None
    ) -> dict[str, float]:
        """Evaluate a policy and return the columns of progress.csv; the arguments are those of :func:`evaluate`."""
        episodes = evaluate(policy, self.envs, epsilon=epsilon, seed=seed, value=value)
        scores = [episode.score for episode in episodes]
        columns = {"return_mean": _mean(scores), **{f"return_{i}": score for i, score in enumerate(scores)}}
        for entry, choices in self._config.return_by.items():
            for choice in choices:
                chosen = [episode.score for episode in episodes if str(episode.info[entry]) == choice]
                columns[f"return_{choice}"] = _mean(chosen)
        for name, envs in self._further.items():
            played = evaluate(policy, envs, epsilon=epsilon, seed=seed)
            columns[f"return_{name}"] = _mean([episode.score for episode in played])
        if value is not None:
            columns["q_mean"] = _mean([step for episode in episodes for step in episode.values])
        if (normalized := self._config.human_normalized(columns["return_mean"])) is not None:
            columns["human_normalized"] = normalized
        return columns

    def close(self) -> None:
        """Close the environments."""
        for envs in (self.envs, *self._further.values()):
            for env in envs:
                env.close()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
