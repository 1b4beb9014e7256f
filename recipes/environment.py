"""Environments by their Gymnasium ids."""

from functools import partial
from operator import add
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import ClipAction, RescaleAction, TransformAction

from recipes.atari import make_atari
from recipes.config import EnvConfig
from recipes.run import ConfigError


def make_discrete_env(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    """Makes an environment with discrete actions 0 ... n - 1 and vector observations, or an Atari game.

    Args:
        config: the environment.
        training: of Atari games, see make_atari.

    Raises:
        ConfigError: there is none of that id and with these options, it is of another kind, or lacks an event.
    """
    env = _make(config, training=training)
    if not isinstance(env.action_space, Discrete) or not (config.atari or _observes_vectors(env)):
        raise ConfigError(
            f"env.id={config.id}: this recipe needs discrete actions and vector observations; "
            "for continuous actions use recipes.sac, recipes.td3 or recipes.acer"
        )
    first = int(env.action_space.start)
    # networks number their outputs from 0
    return TransformAction(env, partial(add, first), Discrete(env.action_space.n)) if first else env


def make_continuous_env(config: EnvConfig) -> gymnasium.Env:
    """Makes an environment with vector observations whose actions are vectors in [-1, 1].

    Actions of another range are rescaled, so that a policy's entropy means the same everywhere.

    Raises:
        ConfigError: as make_discrete_env.
    """
    env = _make(config)
    actions = env.action_space
    if not (isinstance(actions, Box) and len(actions.shape) == 1 and actions.is_bounded() and _observes_vectors(env)):
        raise ConfigError(
            f"env.id={config.id}: this recipe needs bounded continuous actions and vector observations; "
            "for discrete actions use recipes.dqn or recipes.acer"
        )
    one = np.ones(actions.shape, dtype=np.float32)
    return RescaleAction(env, -one, one)


def make_env(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    """Makes an environment of either kind; continuous actions may lie outside of [-1, 1], which counts as the bound.

    Args:
        config: the environment.
        training: of Atari games, see make_atari.

    Raises:
        ConfigError: as make_discrete_env and make_continuous_env.
    """
    discrete = isinstance(_make(config).action_space, Discrete)
    return make_discrete_env(config, training=training) if discrete else ClipAction(make_continuous_env(config))


class FreshWorld(gymnasium.Wrapper):
    """BipedalWalker with a world of its own for each episode, as Lunar Lander has it.

    Gymnasium empties the last episode's, which then steps differently: the past could not be played again.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        walker: Any = self.env.unwrapped
        walker._destroy()
        walker.world = type(walker.world)()
        return self.env.reset(seed=seed, options=options)


class TerminalTruncation(gymnasium.Wrapper):
    """An environment that reports its time limit as a terminal state."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated or truncated, False, info


def _make(config: EnvConfig, *, training: bool = False) -> gymnasium.Env:
    try:
        if config.atari is not None:
            env = make_atari(config.id, config.atari, config.options, training=training)
        else:
            env = gymnasium.make(config.id, **config.options)
            if type(env.unwrapped).__name__ == "BipedalWalker":
                env = FreshWorld(env)
    except ConfigError:
        raise
    # whatever an environment's constructor may raise for its options
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
                f"env.events: {config.id} reports no {', '.join(missing)} in its info, but {', '.join(found) or 'none'}"
            )
    return env


def _observes_vectors(env: gymnasium.Env) -> bool:
    return len(env.observation_space.shape or ()) == 1
