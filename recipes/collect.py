"""Transitions: of one environment by TorchRL's collector, or of any number that are stepped side by side."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite
from torchrl.envs import GymWrapper
from torchrl.envs.gym_like import BaseInfoDictReader

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
    """Steps ``len(envs)`` environments at once and yields what happened.

    One call of the policy serves all environments: with 8 or more of them a step costs a fraction of that of a
    general-purpose collector. Batches are flat, time by time; ``("collector", "traj_ids")`` tells
    trajectories apart.

    Args:
        envs: makers of environments.
        behaviour: maps observations [envs, ...] to actions [envs, ...], or to a dict of "action" and what else to keep,
            each [envs, ...]; has its random state in ``state_dict``.
        frames_per_batch: transitions per batch, a multiple of the number of environments.
        seed: of the environments.
        flags: names in the environments' ``info`` of bools, which become ``("next", "events", <name>)``.
    """

    def __init__(
        self,
        envs: list[Callable[[], gymnasium.Env]],
        behaviour: Behaviour,
        *,
        frames_per_batch: int,
        seed: int,
        flags: Sequence[str] = (),
    ):
        if frames_per_batch % len(envs):
            raise ValueError(f"frames_per_batch={frames_per_batch}: must be a multiple of the {len(envs)} environments")
        self._envs = SyncVectorEnv(envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self._behaviour = behaviour
        self._flags = flags
        self._steps = frames_per_batch // len(envs)
        self._next_trajectory = 0
        self._seed: int | None = seed
        # of the last episodes that ended
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self.reset()

    def reset(self) -> None:
        """Begin a new episode in each environment."""
        self._observation, _ = self._envs.reset(seed=self._seed)
        self._seed = None
        self._trajectory = self._new_trajectories(self._envs.num_envs)
        self._return = np.zeros(self._envs.num_envs)

    def _new_trajectories(self, count: int) -> np.ndarray:
        self._next_trajectory += count
        return np.arange(self._next_trajectory - count, self._next_trajectory)

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
            flags = self._read_flags(info, done)
            self._track(reward, done)
            rows.append((before, action, trajectory, after, reward, done, terminated, truncated, flags, *kept))
        before, action, trajectory, after, reward, done, terminated, truncated, flags, *others = (
            torch.from_numpy(np.concatenate(column)) for column in zip(*rows, strict=True)
        )
        following: dict[str, Any] = {
            "observation": _observed(after),
            "reward": reward.float().unsqueeze(1),
            "done": done.unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        if self._flags:
            following["events"] = {name: flags[:, i : i + 1] for i, name in enumerate(self._flags)}
        data = {"observation": _observed(before), "action": action, "collector": {"traj_ids": trajectory}}
        data |= dict(zip(names, others, strict=True))
        return TensorDict({**data, "next": following}, [len(action)], device="cpu")

    def _track(self, reward: np.ndarray, done: np.ndarray) -> None:
        self._return += reward
        self.returns.extend(self._return[done].tolist())
        self._return[done] = 0.0

    def _read_flags(self, info: dict[str, Any], done: np.ndarray) -> np.ndarray:
        """The flags of a step, bool [envs, flags]: where an episode ended, those of its end, not of the reset."""
        flags = np.zeros((len(done), len(self._flags)), dtype=bool)
        for now, source in ((~done, info), (done, info.get("final_info", {}))):
            for i, name in enumerate(self._flags):
                if name in source:
                    flags[now, i] = source[name][now]
        return flags

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: it begins new episodes."""
        generators = [env.unwrapped.np_random.bit_generator.state for env in self._envs.envs]
        return {
            "next_trajectory": self._next_trajectory,
            "returns": list(self.returns),
            "behaviour": self._behaviour.state_dict(),
            "env_generators": generators,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._next_trajectory = state["next_trajectory"]
        self.returns = deque(state["returns"], maxlen=_RECENT)
        self._behaviour.load_state_dict(state["behaviour"])
        for env, generator in zip(self._envs.envs, state["env_generators"], strict=True):
            env.unwrapped.np_random.bit_generator.state = generator

    def shutdown(self) -> None:
        """Close the environments."""
        self._envs.close()


def _observed(observations: torch.Tensor) -> torch.Tensor:
    """As float32; but bytes, of images, as they are."""
    return observations if observations.dtype == torch.uint8 else observations.float()


class FlagReader(BaseInfoDictReader):
    """Copies bools from a Gymnasium environment's ``info`` to ``("events", <name>)``; False where there is none."""

    def __init__(self, flags: Sequence[str]):
        self._flags = flags

    def __call__(self, info_dict: dict[str, Any], tensordict: TensorDictBase) -> TensorDictBase:
        """Write the flags into ``tensordict``."""
        flags = {name: torch.tensor([bool(info_dict.get(name, False))]) for name in self._flags}
        return tensordict.set("events", TensorDict(flags, []))

    @property
    def info_spec(self) -> dict[str, Any]:
        """What :meth:`__call__` writes."""
        return {"events": Composite({name: Binary(1, dtype=torch.bool) for name in self._flags})}


class SingleCollector:
    """TorchRL's collector of one environment, which runs on the CPU; its state includes the environment's generator.

    Args:
        env: the environment.
        policy: a TensorDictModule that writes the action.
        frames_per_batch: transitions per batch.
        seed: of the environment.
        device: of the policy.
        flags: as those of :class:`VectorCollector`.
    """

    def __init__(
        self,
        env: GymWrapper,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        frames_per_batch: int,
        seed: int,
        device: torch.device,
        flags: Sequence[str] = (),
    ):
        if flags:
            env.set_info_dict_reader(FlagReader(flags))
        env.set_seed(seed)
        self._generator = env.unwrapped.np_random.bit_generator
        # Where the policy is on the CPU too, no device is named: that saves a fifth of the time per step.
        on_cpu = device.type == "cpu"
        devices = {} if on_cpu else {"policy_device": device, "env_device": "cpu", "storing_device": "cpu"}
        self._collector = Collector(
            env, policy, frames_per_batch=frames_per_batch, auto_register_policy_transforms=False, **devices
        )

    def reset(self) -> None:
        """Begin a new episode."""
        self._collector.reset()

    def __iter__(self) -> Iterator[TensorDictBase]:
        return iter(self._collector)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: it begins a new episode."""
        return {"collector": self._collector.state_dict(), "env_generator": self._generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._collector.load_state_dict(state["collector"])
        self._generator.state = state["env_generator"]

    def shutdown(self) -> None:
        """Close the environment."""
        self._collector.shutdown()
