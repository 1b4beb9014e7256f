"""Transitions of several environments that are stepped side by side."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict


class VectorCollector:
    """Steps ``len(envs)`` environments at once with an epsilon-greedy policy and yields what happened.

    One call of the policy serves all environments: with 8 or more of them a step costs a fraction of that of a
    general-purpose collector. Batches are flat, time by time; ``("collector", "traj_ids")`` tells
    trajectories apart.

    Args:
        envs: makers of environments with discrete actions.
        policy: maps observations [envs, ...] to greedy actions [envs].
        frames_per_batch: transitions per batch, a multiple of the number of environments.
        seed: of the environments and of the random actions.
    """

    def __init__(
        self,
        envs: list[Callable[[], gymnasium.Env]],
        policy: Callable[[np.ndarray], np.ndarray],
        *,
        frames_per_batch: int,
        seed: int,
    ):
        if frames_per_batch % len(envs):
            raise ValueError(f"frames_per_batch={frames_per_batch}: must be a multiple of the {len(envs)} environments")
        self.epsilon = 1.0
        self._envs = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._policy = policy
        self._steps = frames_per_batch // len(envs)
        self._rng = np.random.default_rng(seed)
        self._num_actions = int(self._envs.single_action_space.n)  # pyright: ignore
        self._next_trajectory = 0
        self._seed: int | None = seed
        self.reset()

    def reset(self) -> None:
        """Begin a new episode in each environment."""
        self._observation, _ = self._envs.reset(seed=self._seed)
        self._seed = None
        self._trajectory = self._new_trajectories(self._envs.num_envs)

    def _new_trajectories(self, count: int) -> np.ndarray:
        self._next_trajectory += count
        return np.arange(self._next_trajectory - count, self._next_trajectory)

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.collect()

    def collect(self) -> TensorDict:
        """One batch of ``frames_per_batch`` transitions."""
        rows: list[tuple[np.ndarray, ...]] = []
        count = self._envs.num_envs
        for _ in range(self._steps):
            random = self._rng.random(count) < self.epsilon
            action = self._rng.integers(self._num_actions, size=count)
            if not random.all():
                action = np.where(random, action, self._policy(self._observation))
            before, trajectory = self._observation, self._trajectory
            after, reward, terminated, truncated, info = self._envs.step(action)
            self._observation = after
            done = terminated | truncated
            if done.any():
                # environments that ended were reset already; this is what they ended with
                after = after.copy()
                for i in np.flatnonzero(done):
                    after[i] = info["final_obs"][i]
                self._trajectory = trajectory.copy()
                self._trajectory[done] = self._new_trajectories(int(done.sum()))
            rows.append((before, action, trajectory, after, reward, done, terminated, truncated))
        before, action, trajectory, after, reward, done, terminated, truncated = (
            torch.from_numpy(np.concatenate(column)) for column in zip(*rows, strict=True)
        )
        following: dict[str, Any] = {
            "observation": after.float(),
            "reward": reward.float().unsqueeze(1),
            "done": done.unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        data = {"observation": before.float(), "action": action, "collector": {"traj_ids": trajectory}}
        return TensorDict({**data, "next": following}, [len(action)], device="cpu")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: it begins new episodes."""
        generators = [env.unwrapped.np_random.bit_generator.state for env in self._envs.envs]
        return {
            "next_trajectory": self._next_trajectory,
            "rng": self._rng.bit_generator.state,
            "env_generators": generators,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._next_trajectory = state["next_trajectory"]
        self._rng.bit_generator.state = state["rng"]
        for env, generator in zip(self._envs.envs, state["env_generators"], strict=True):
            env.unwrapped.np_random.bit_generator.state = generator

    def shutdown(self) -> None:
        """Close the environments."""
        self._envs.close()
