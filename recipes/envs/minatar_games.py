"""The games of MinAtar (Young and Tian 2019) as images. Needs ``pip install minatar``."""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from recipes.envs.grid import World

GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")


class MinAtar(World):
    """A game of MinAtar: 10 x 10 cells with a channel for each kind of object.

    Observations are uint8 [channels, 10, 10] with 255 where there is an object, so networks that scale images to [0, 1]
    see MinAtar's bits. Actions are those that have an effect in the game. Unlike MinAtar's registration with Gymnasium,
    an episode depends on the generator of the environment alone.

    Args:
        game: one of `GAMES`. Default: ``"breakout"``.
        sticky_action_prob: probability that a step repeats the last action instead, in [0, 1]. Default: 0.1.
        difficulty_ramping: whether games become harder in the course of an episode. Default: True.

    Raises:
        ValueError: if an argument is invalid.
        ImportError: if MinAtar is not installed.
    """

    def __init__(self, game: str = "breakout", sticky_action_prob: float = 0.1, difficulty_ramping: bool = True):
        self.check_choice("game", game, GAMES)
        try:
            from minatar import Environment
        except ImportError as error:
            raise ImportError(f"MinAtar(game={game!r}) needs the games: pip install minatar") from error
        self._game = Environment(game, sticky_action_prob=sticky_action_prob, difficulty_ramping=difficulty_ramping)
        self._actions = self._game.minimal_action_set()
        height, width, channels = self._game.state_shape()
        self.action_space = Discrete(len(self._actions))
        self.observation_space = Box(0, 255, (channels, height, width), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start an episode with a seed and without a last action."""
        super().reset(seed=seed)
        self._game.seed(int(self.np_random.integers(2**31)))
        self._game.last_action = 0
        self._game.reset()
        return self._observe(), {}

    def step(self, action: int):
        """Play one frame."""
        self.check_action(action)
        reward, over = self._game.act(self._actions[action])
        return self._observe(), float(reward), bool(over), False, {}

    def _observe(self) -> np.ndarray:
        return np.ascontiguousarray(self._game.state().transpose(2, 0, 1)) * np.uint8(255)
