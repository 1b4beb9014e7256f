"""Makes environments from their configuration."""

from functools import partial
from operator import add
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import RescaleAction, TransformAction

from recipes.common.config import EnvConfig
from recipes.common.errors import ConfigError
from recipes.envs.atari import make_atari
from recipes.envs.minatar_games import MinAtar


def make_env(
    config: EnvConfig, *, training: bool = False, actions: tuple[type[gymnasium.Space], ...] = (Discrete, Box)
) -> gymnasium.Env:
    """Make an environment with vector observations, or a game of Atari or MinAtar.

    Discrete actions are 0 ... n - 1. Continuous ones are rescaled and clipped to [-1, 1], so that the entropy of
    policies is comparable between environments.

    Args:
        config: the environment.
        training: make a training environment, with the options in `config.training` and, for Atari games, as make_atari
            says. Default: False.
        actions: allowed kinds of actions. Default: both.

    Raises:
        ConfigError: if the environment cannot be made with this id and these options, if its spaces do not match, or
            if it does not signal a configured event.
    """
    env = _make(config, training)
    space, vectors = env.action_space, len(env.observation_space.shape or ()) == 1
    games = config.atari is not None or isinstance(env.unwrapped, MinAtar)
    if isinstance(space, Discrete) and Discrete in actions and (vectors or games):
        first = int(space.start)
        # the outputs of the networks are numbered from 0
        return TransformAction(env, partial(add, first), Discrete(space.n)) if first else env
    if isinstance(space, Box) and Box in actions and len(space.shape) == 1 and space.is_bounded() and vectors:
        one = np.ones(space.shape, dtype=np.float32)
        env = RescaleAction(env, -one, one)
        return TransformAction(env, partial(np.clip, a_min=-one, a_max=one), env.action_space)
    needed = " or ".join({Discrete: "discrete", Box: "bounded continuous"}[kind] for kind in actions)
    raise ConfigError(
        f"env.id={config.id}: this recipe needs {needed} actions and vector observations, not {space} and "
        f"{env.observation_space}; recipes.dqn is for discrete actions, recipes.sac and recipes.td3 for continuous "
        "ones, recipes.acer for both; gymnasium.wrappers.FlattenObservation makes vectors"
    )


make_discrete_env = partial(make_env, actions=(Discrete,))
make_continuous_env = partial(make_env, actions=(Box,))


class TerminalTruncation(gymnasium.Wrapper):
    """Reports truncated episodes as terminated, for env.truncation=terminal."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


def _make(config: EnvConfig, training: bool) -> gymnasium.Env:
    options = config.options | config.training if training else config.options
    try:
        if config.atari is not None:
            env = make_atari(config.id, config.atari, options, training=training)
        else:
            env = gymnasium.make(config.id, **options)
    # constructors of environments raise many kinds of errors for invalid options
    except Exception as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"env.id={config.id}: {error}") from error
    if config.truncation == "terminal":
        env = TerminalTruncation(env)
    if config.flags:
        env.reset()
        info = env.step(env.action_space.sample())[4]
        found = [name for name, value in info.items() if isinstance(value, (bool, np.bool_))]
        if missing := [name for name in config.flags if name not in found]:
            flags = f"has no bool {', '.join(missing)} in every step; its flags are {', '.join(found) or 'none'}"
            raise ConfigError(f"env.events: the info of {config.id} {flags}")
    return env
