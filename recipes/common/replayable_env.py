"""Restores environments to the middle of an episode by replaying its actions."""

from typing import Any

import gymnasium
import numpy as np
import torch


class ReplayableEnv:
    """An environment whose state can be saved and restored in the middle of an episode.

    The saved state consists of the random generators at the start of the episode and the actions since then. To restore
    it, the actions are replayed. Apart from its generators, the environment must be deterministic. If a reset may
    continue the same game (:class:`~recipes.envs.atari.Lives`), the wrapper must have an attribute ``goes_on``;
    replay then starts at the beginning of the game.

    Args:
        env: the environment, with its wrappers.
        seed: seed of the first episode.
    """

    def __init__(self, env: gymnasium.Env, seed: int):
        self.env = env
        self._begin(seed)

    def _begin(self, seed: int | None = None, random: dict[str, Any] | None = None) -> np.ndarray:
        self._origin = {"seed": seed, "random": random}
        self._actions: list[Any] = []
        self._ends: list[int] = []
        self.observation, _ = self.env.reset(seed=seed)
        return self.observation

    def reset(self) -> np.ndarray:
        """Start the next episode and return its first observation."""
        if self.env.has_wrapper_attr("goes_on") and self.env.get_wrapper_attr("goes_on"):
            self._ends.append(len(self._actions))
            self.observation, _ = self.env.reset()
            return self.observation
        return self._begin(random=random_state(self.env))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment and record the action."""
        self._actions.append(action)
        result = self.env.step(action)
        self.observation = result[0]
        return result

    def state_dict(self) -> dict[str, Any]:
        """The recorded actions, the generators, and the last observation."""
        return {
            "origin": self._origin,
            "actions": torch.as_tensor(np.array(self._actions)),
            "ends": list(self._ends),
            "observation": torch.as_tensor(np.array(self.observation)),
            "random": random_state(self.env),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore a state from :meth:`state_dict`; if that fails, start a new episode.

        Returns:
            Whether the state was restored: the replayed episode ended at the same steps, and the last observation and
            the generators are exactly equal.
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
    """The state of an environment's random generators."""
    generator = env.unwrapped.np_random.bit_generator.state
    has_own = env.has_wrapper_attr("random_state")
    return {"generator": generator, "game": env.get_wrapper_attr("random_state")() if has_own else None}


def set_random_state(env: gymnasium.Env, state: dict[str, Any]) -> None:
    """Restore a state from :func:`random_state`; the next reset starts a new game."""
    env.unwrapped.np_random.bit_generator.state = state["generator"]
    if state["game"] is not None:
        env.get_wrapper_attr("set_random_state")(state["game"])
