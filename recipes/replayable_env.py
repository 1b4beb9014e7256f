"""How to bring an environment back to the middle of an episode."""

from typing import Any

import gymnasium
import numpy as np
import torch


class ReplayableEnv:
    """An environment, and what brings another one like it to where it is: played again, not copied.

    That is the state of its generators where its episode began, and the actions since. Other than by its generators,
    the environment must be deterministic. One whose reset may go on with the same game (:class:`~recipes.atari.Lives`)
    says so by an attribute ``goes_on``; then all begins with the game.

    Args:
        env: the environment, with its wrappers.
        seed: of its first episode.
    """

    def __init__(self, env: gymnasium.Env, seed: int):
        self.env = env
        self._games = _wrapper(env, "goes_on")
        self._begin(seed)

    def _begin(self, seed: int | None = None, random: dict[str, Any] | None = None) -> np.ndarray:
        self._origin = {"seed": seed, "random": random}
        self._actions: list[Any] = []
        self._ends: list[int] = []
        self.observation, _ = self.env.reset(seed=seed)
        return self.observation

    def reset(self) -> np.ndarray:
        """Begin the next episode; returns its first observation."""
        if self._games is not None and self._games.goes_on:
            self._ends.append(len(self._actions))
            self.observation, _ = self.env.reset()
            return self.observation
        return self._begin(random=random_state(self.env))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step."""
        self._actions.append(action)
        result = self.env.step(action)
        self.observation = result[0]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Where the environment is."""
        return {
            "origin": self._origin,
            "actions": torch.as_tensor(np.array(self._actions)),
            "ends": list(self._ends),
            "observation": torch.as_tensor(np.array(self.observation)),
            "random": random_state(self.env),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Bring the environment to where it was; or if it does not get there, to the beginning of a new episode.

        Returns:
            Whether it got there: to the same observation and generators, exactly, and to no other end on the way.
        """
        if self._play(state):
            return True
        set_random_state(self.env, state["random"])
        self._begin(random=state["random"])
        return False

    def _play(self, state: dict[str, Any]) -> bool:
        origin, ends = state["origin"], set(state["ends"])
        if origin["random"] is not None:
            set_random_state(self.env, origin["random"])
        self._begin(**origin)
        for action in state["actions"].cpu().numpy():
            _, _, terminated, truncated, _ = self.step(action)
            over = terminated or truncated
            if over != (len(self._actions) in ends):
                return False
            if over:
                self.reset()
        observed = np.array_equal(np.asarray(self.observation), state["observation"].cpu().numpy())
        return observed and random_state(self.env) == state["random"]


def random_state(env: gymnasium.Env) -> dict[str, Any]:
    """The state of an environment's generators."""
    generator = env.unwrapped.np_random.bit_generator.state
    own = _wrapper(env, "random_state")
    return {"generator": generator, "game": None if own is None else own.random_state()}


def set_random_state(env: gymnasium.Env, state: dict[str, Any]) -> None:
    """Restore what :func:`random_state` gave; the next reset begins a new game."""
    env.unwrapped.np_random.bit_generator.state = state["generator"]
    if state["game"] is not None:
        _wrapper(env, "random_state").set_random_state(state["game"])


def _wrapper(env: Any, name: str) -> Any:
    """The outermost wrapper with an attribute of its own of this name; None: there is none."""
    while isinstance(env, gymnasium.Wrapper):
        if name in vars(type(env)):
            return env
        env = env.env
    return None
