"""Environments by their Gymnasium ids."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import RescaleAction

from recipes.run import ConfigError


def make_discrete_env(env_id: str) -> gymnasium.Env:
    """Makes an environment with discrete actions and vector observations.

    Raises:
        ConfigError: there is none of that id, or it is of another kind.
    """
    env = _make(env_id)
    if not isinstance(env.action_space, Discrete) or not _observes_vectors(env):
        raise ConfigError(f"env.id={env_id}: this DQN needs discrete actions and vector observations")
    return env


def make_continuous_env(env_id: str) -> gymnasium.Env:
    """Makes an environment with vector observations whose actions are vectors in [-1, 1].

    Actions of another range are rescaled, so that a policy's entropy means the same everywhere.

    Raises:
        ConfigError: there is none of that id, or it is of another kind.
    """
    env = _make(env_id)
    actions = env.action_space
    if not (isinstance(actions, Box) and len(actions.shape) == 1 and actions.is_bounded() and _observes_vectors(env)):
        raise ConfigError(f"env.id={env_id}: this recipe needs bounded continuous actions and vector observations")
    one = np.ones(actions.shape, dtype=np.float32)
    return RescaleAction(env, -one, one)


def _make(env_id: str) -> gymnasium.Env:
    try:
        return gymnasium.make(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(f"env.id={env_id}: {error}") from error


def _observes_vectors(env: gymnasium.Env) -> bool:
    return len(env.observation_space.shape or ()) == 1
