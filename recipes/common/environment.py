"""Makes environments from their configuration."""

from functools import partial
from operator import add
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import ClipAction, RescaleAction, TransformAction

from recipes.common.config import EnvConfig
from recipes.common.errors import ConfigError
from recipes.envs.atari import make_atari
from recipes.envs.minatar_games import MinAtar


def make_discrete_env(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    """Make an environment with discrete actions 0 ... n - 1 and vector observations, or a game of Atari or MinAtar.

    Args:
        config: the environment.
        training: make a training environment, with the options in `config.training` and, for Atari games, as make_atari
            says. Default: False.

    Raises:
        ConfigError: if the environment cannot be made with this id and these options, if its spaces do not match, or
            if it does not signal a configured event.
    """
    return _as_discrete(_make(config, training=training), config)


def _as_discrete(env: gymnasium.Env, config: EnvConfig) -> gymnasium.Env:
    if not isinstance(env.action_space, Discrete) or not (config.atari or _observes_vectors(env) or _is_minatar(env)):
        raise ConfigError(
            f"env.id={config.id}: this recipe needs discrete actions and vector observations; "
            "for continuous actions use recipes.sac, recipes.td3 or recipes.acer"
        )
    first = int(env.action_space.start)
    # the outputs of the networks are numbered from 0
    return TransformAction(env, partial(add, first), Discrete(env.action_space.n)) if first else env


def make_continuous_env(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    """Make an environment with vector observations and action vectors in [-1, 1].

    Other action ranges are rescaled to [-1, 1], so that the entropy of policies is comparable between environments.

    Args:
        config: the environment.
        training: see make_discrete_env. Default: False.

    Raises:
        ConfigError: see make_discrete_env.
    """
    return _as_continuous(_make(config, training=training), config)


def _as_continuous(env: gymnasium.Env, config: EnvConfig) -> gymnasium.Env:
    actions = env.action_space
    if not (isinstance(actions, Box) and len(actions.shape) == 1 and actions.is_bounded() and _observes_vectors(env)):
        raise ConfigError(
            f"env.id={config.id}: this recipe needs bounded continuous actions and vector observations; "
            "for discrete actions use recipes.dqn or recipes.acer"
        )
    one = np.ones(actions.shape, dtype=np.float32)
    return RescaleAction(env, -one, one)


def make_env(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    """Make an environment with discrete or continuous actions. Continuous actions are clipped to [-1, 1].

    Args:
        config: the environment.
        training: see make_discrete_env. Default: False.

    Raises:
        ConfigError: see make_discrete_env.
    """
    env = _make(config, training=training)
    if isinstance(env.action_space, Discrete):
        return _as_discrete(env, config)
    return ClipAction(_as_continuous(env, config))


class FreshWorld(gymnasium.Wrapper):
    """BipedalWalker with a new physics world for each episode, as in Lunar Lander.

    Gymnasium reuses the world of the last episode. Its steps then differ, so an episode could not be replayed exactly.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in a new world."""
        walker: Any = self.env.unwrapped
        walker._destroy()
        walker.world = type(walker.world)()
        return self.env.reset(seed=seed, options=options)


class TerminalTruncation(gymnasium.Wrapper):
    """Reports truncated episodes as terminated, for env.truncation=terminal."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


def _make(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    options = config.options | config.training if training else config.options
    try:
        if config.atari is not None:
            env = make_atari(config.id, config.atari, options, training=training)
        else:
            env = gymnasium.make(config.id, **options)
            if type(env.unwrapped).__name__ == "BipedalWalker":
                env = FreshWorld(env)
    except ConfigError:
        raise
    # constructors of environments raise many kinds of errors for invalid options
    except Exception as error:
        raise ConfigError(f"env.id={config.id}: {error}") from error
    if config.truncation == "terminal":
        env = TerminalTruncation(env)
    if config.flags:
        env.reset()
        info = env.step(env.action_space.sample())[4]
        found = [name for name, value in info.items() if isinstance(value, (bool, np.bool_))]
        missing = [name for name in config.flags if name not in found]
        if missing:
            raise ConfigError(
                f"env.events: the info of {config.id} has no flag {', '.join(missing)}; its flags are "
                f"{', '.join(found) or 'none'}"
            )
    return env


def _is_minatar(env: gymnasium.Env) -> bool:
    return isinstance(env.unwrapped, MinAtar)


def _observes_vectors(env: gymnasium.Env) -> bool:
    return len(env.observation_space.shape or ()) == 1
