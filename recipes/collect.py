"""Transitions of any number of environments that are stepped side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from tensordict import TensorDict

from recipes.replayable_env import ReplayableEnv

# Episodes whose returns are kept.
_RECENT = 100


class EpsilonRandom:
    """A behaviour policy: with probability ``epsilon`` a uniformly random action, else that of ``policy``.

    Epsilon-greedy if ``policy`` is greedy; with ``epsilon`` = 1 at first and then 0, a warm-up.

    Args:
        policy: maps observations [envs, ...] to actions, [envs] if they are discrete, else [envs, size].
        action_space: of one environment, discrete or bounded.
        seed: of the random actions.
    """

    def __init__(self, policy: Callable[[np.ndarray], np.ndarray], action_space: gymnasium.Space, *, seed: int):
        self.epsilon = 1.0
        if not isinstance(action_space, (Discrete, Box)):
            raise TypeError(f"EpsilonRandom(action_space={action_space}): must be Discrete or Box.")
        self._policy = policy
        self._space = action_space
        self._rng = np.random.default_rng(seed)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """Actions for these observations."""
        count = len(observations)
        random = self._rng.random(count) < self.epsilon
        action = self._random_actions(count)
        if random.all():
            return action
        return np.where(random.reshape(-1, *[1] * (action.ndim - 1)), action, self._policy(observations))

    def _random_actions(self, count: int) -> np.ndarray:
        space = self._space
        if isinstance(space, Discrete):
            return self._rng.integers(int(space.n), size=count)
        return self._rng.uniform(space.low, space.high, size=(count, *space.shape)).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """The state of the random actions."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._rng.bit_generator.state = state["rng"]


class Behaviour(Protocol):
    """A policy that collects, and the state of what is random about it."""

    def __call__(self, observations: np.ndarray) -> np.ndarray | dict[str, np.ndarray]:
        """Actions for these observations, or those under "action" and what else to keep."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        ...


class VectorCollector:
    """Steps ``len(envs)`` environments side by side and yields what happened.

    One call of the policy serves all environments: with 8 or more of them a step costs a fraction of that of a
    general-purpose collector. Batches are flat, time by time; ``("collector", "traj_ids")`` tells
    trajectories apart.

    Args:
        envs: makers of environments.
        behaviour: maps observations [envs, ...] to actions [envs, ...], or to a dict of "action" and what else to keep,
            each [envs, ...]; has its random state in ``state_dict``.
        frames_per_batch: transitions per batch, a multiple of the number of environments.
        seed: of the first environment; the others have the numbers after it.
        flags: names in the environments' ``info`` of bools, which become ``("next", "events", <name>)``.
    """

    def __init__(
        self,
        envs: Sequence[Callable[[], gymnasium.Env]],
        behaviour: Behaviour,
        *,
        frames_per_batch: int,
        seed: int,
        flags: Sequence[str] = (),
    ):
        if frames_per_batch % len(envs):
            raise ValueError(f"frames_per_batch={frames_per_batch}: must be a multiple of the {len(envs)} environments")
        self._envs = [ReplayableEnv(make(), seed + number) for number, make in enumerate(envs)]
        self._behaviour = behaviour
        self._flags = flags
        self._steps = frames_per_batch // len(envs)
        space = self._envs[0].env.observation_space
        self._shape, self._dtype = (len(envs), *(space.shape or ())), space.dtype
        self._observation = self._stack([env.observation for env in self._envs])
        self._trajectory = np.arange(len(envs))
        self._next_trajectory = len(envs)
        self._return = np.zeros(len(envs))
        # of the last episodes that ended
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self._lost: list[int] = []

    def _stack(self, observations: Sequence[Any]) -> np.ndarray:
        stacked = np.empty(self._shape, self._dtype)
        for row, observation in zip(stacked, observations, strict=True):
            row[...] = observation
        return stacked

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.collect()

    def collect(self) -> TensorDict:
        """One batch of ``frames_per_batch`` transitions."""
        rows: list[tuple[np.ndarray, ...]] = []
        names: list[str] = []
        for _ in range(self._steps):
            action = self._behaviour(self._observation)
            kept: list[np.ndarray] = []
            if isinstance(action, dict):
                names = [name for name in action if name != "action"]
                kept, action = [action[name] for name in names], action["action"]
            rows.append((self._observation, action, self._trajectory, *self._step(action), *kept))
        before, action, trajectory, after, reward, terminated, truncated, flags, *others = (
            torch.from_numpy(np.concatenate(column)) for column in zip(*rows, strict=True)
        )
        following: dict[str, Any] = {
            "observation": _observed(after),
            "reward": reward.float().unsqueeze(1),
            "done": (terminated | truncated).unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        if self._flags:
            following["events"] = {name: flags[:, i : i + 1] for i, name in enumerate(self._flags)}
        data = {"observation": _observed(before), "action": action, "collector": {"traj_ids": trajectory}}
        data |= dict(zip(names, others, strict=True))
        return TensorDict({**data, "next": following}, [len(action)], device="cpu")

    def _step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """One step of each: observations, rewards, terminated, truncated, flags. Episodes that ended begin anew."""
        results = [env.step(action) for env, action in zip(self._envs, actions, strict=True)]
        after, *columns, infos = zip(*results, strict=True)
        reward, terminated, truncated = (
            np.array(column, dtype) for column, dtype in zip(columns, (np.float64, bool, bool), strict=True)
        )
        flags = np.array([[bool(info.get(name, False)) for name in self._flags] for info in infos], dtype=bool)
        self._return += reward
        self._observation = after = self._stack(after)
        done = (terminated | truncated).nonzero()[0]
        if len(done):
            self._observation = after.copy()
            for i in done:
                self._observation[i] = self._envs[i].reset()
            self.returns.extend(self._return[done].tolist())
            self._begin(done)
        return after, reward, terminated, truncated, flags

    def _begin(self, envs: Sequence[int] | np.ndarray) -> None:
        """New trajectories in these environments."""
        self._trajectory = self._trajectory.copy()
        self._trajectory[envs] = np.arange(self._next_trajectory, self._next_trajectory + len(envs))
        self._next_trajectory += len(envs)
        self._return[envs] = 0.0

    def resume(self) -> list[int]:
        """For a resumed run: the numbers of environments that could not go on with their episodes, but began others."""
        return self._lost

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batches depend on."""
        return {
            "next_trajectory": self._next_trajectory,
            "trajectory": self._trajectory.tolist(),
            "return": self._return.tolist(),
            "returns": list(self.returns),
            "behaviour": self._behaviour.state_dict(),
            "envs": [env.state_dict() for env in self._envs],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, which takes as long as the episodes so far; see :meth:`resume`."""
        self._next_trajectory = state["next_trajectory"]
        self._trajectory = np.array(state["trajectory"])
        self._return = np.array(state["return"])
        self.returns = deque(state["returns"], maxlen=_RECENT)
        self._behaviour.load_state_dict(state["behaviour"])
        whole = [env.load_state_dict(saved) for env, saved in zip(self._envs, state["envs"], strict=True)]
        self._observation = self._stack([env.observation for env in self._envs])
        self._lost = [number for number, there in enumerate(whole) if not there]
        self._begin(self._lost)

    def shutdown(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.env.close()


def _observed(observations: torch.Tensor) -> torch.Tensor:
    """As float32; but bytes, of images, as they are."""
    return observations if observations.dtype == torch.uint8 else observations.float()
