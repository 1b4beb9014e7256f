"""Collects transitions from one or more environments that are stepped together."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Discrete
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import MultiStepTransform

# Number of finished episodes whose returns are kept.
_RECENT = 100


def environment_seed(seed: int, number: int) -> int:
    """The seed of environment ``number`` of a run with ``seed``. Neighbouring runs share no seeds (but for chance)."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0])


class EpsilonRandom:
    """A behaviour policy: a uniformly random action with probability ``epsilon``, else the action of ``policy``.

    With a greedy ``policy`` this is epsilon-greedy. With ``epsilon`` 1 at first and then 0 it is a random warm-up.
    ``epsilon`` starts at 1.

    Args:
        policy: maps observations [envs, ...] to actions, [envs] if they are discrete, else [envs, size].
        action_space: action space of one environment, discrete or bounded.
        seed: seed of the random actions.
    """

    def __init__(self, policy: Callable[[np.ndarray], np.ndarray], action_space: gymnasium.Space, *, seed: int):
        self.epsilon = 1.0
        self._policy = policy
        self.space: Any = action_space
        self._rng = np.random.default_rng(seed)

    def __call__(self, observations: np.ndarray) -> np.ndarray:
        """The actions for ``observations``."""
        count, space = len(observations), self.space
        random = self._rng.random(count) < self.epsilon
        if isinstance(space, Discrete):
            action = self._rng.integers(int(space.n), size=count)
        else:
            action = self._rng.uniform(space.low, space.high, size=(count, *space.shape)).astype(np.float32)
        if random.all():
            return action
        return np.where(random.reshape(-1, *[1] * (action.ndim - 1)), action, self._policy(observations))

    def state_dict(self) -> dict[str, Any]:
        """The state of the generator of random actions."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._rng.bit_generator.state = state["rng"]


# Whether an episode terminated within the n steps. ("next", "terminated") stays that of the first step.
TERMINATED = "n_step_terminated"


class NStep:
    """Makes n-step transitions with TorchRL's MultiStepTransform.

    The reward of a transition becomes the discounted sum of up to n rewards, and its next observation the one after the
    last of these steps. Both stop at the end of the episode. "steps_to_next_obs" holds their number, by which TorchRL's
    losses discount. The ends of episodes and the events stay those of the transition's own step, so samplers see the
    same episodes as without n steps. The loss reads ("next", TERMINATED), which the transform takes from the last step.

    A transition is complete when n further steps have been made, so the newest n steps of each environment are held
    back.

    Args:
        n: number of steps, >= 2.
        gamma: discount factor.
        num_envs: number of environments.
        flags: names of the events in the data.
    """

    def __init__(self, n: int, gamma: float, num_envs: int, flags: Sequence[str] = ()):
        self.n, self._num_envs = n, num_envs
        own = ["done", "terminated", "truncated", *(("events", name) for name in flags)]
        self._transform = lambda: MultiStepTransform(n, gamma, done_keys=own)
        self._held: TensorDictBase | None = None

    @property
    def missing(self) -> int:
        """Steps of each environment that are held back before the first transition is complete."""
        return self.n if self._held is None else 0

    def __call__(self, data: TensorDict) -> TensorDict:
        """The transitions that are complete now.

        Args:
            data: more than :attr:`missing` consecutive steps of all environments, [steps * num_envs]: the first step of
                all environments, then the second, and so on.

        Returns:
            [(steps - missing) * num_envs], in the same order.
        """
        data["next", TERMINATED] = data["next", "terminated"].clone()
        rows = data.reshape(len(data) // self._num_envs, self._num_envs).transpose(0, 1).contiguous()
        if self._held is not None:
            rows = cast(TensorDict, torch.cat([self._held, rows], 1))  # pyright: ignore[reportArgumentType]
        self._held = cast(TensorDict, rows[:, -self.n :].clone())
        complete = cast(TensorDict, self._transform().inv(rows))
        complete = complete.exclude("gamma", "nonterminal", ("next", "original_reward"))
        return complete.transpose(0, 1).reshape(-1).contiguous()

    def end_episodes(self, envs: Sequence[int]) -> None:
        """Truncate the episodes of these environments at their newest step: they start new ones."""
        if self._held is not None:
            for env in envs:
                if not self._held["next", "done"][env, -1]:
                    self._held["next", "done"][env, -1] = True
                    self._held["next", "truncated"][env, -1] = True

    def state_dict(self) -> dict[str, Any]:
        """The steps that are held back."""
        return {"held": None if self._held is None else self._held.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        held = state["held"]
        self._held = None if held is None else TensorDict(held, [self._num_envs, self.n]).cpu()


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


# Maps observations [envs, ...] to the actions, or to a dict of "action" and further entries to store, each [envs, ...].
# If it remembers observations, it has a method `begin`, which gets the indices of environments that begin an episode.
Behaviour = Any


class VectorCollector:
    """Steps ``len(envs)`` environments together and yields batches of transitions.

    The policy is called once per step for all environments. With 8 or more environments, a step costs a fraction of a
    step of a general-purpose collector. Batches are flat: the transitions of all environments at the first step, then
    at the second, and so on. ``("collector", "traj_ids")`` holds the trajectory of each transition.

    Args:
        envs: functions that make the environments.
        behaviour: the behaviour policy, see Behaviour. A checkpoint must save its random state separately.
        frames_per_batch: transitions per batch, a multiple of the number of environments.
        seed: seed of the environments, see :func:`environment_seed`.
        flags: names of bools in the environments' ``info``; they are stored as ``("next", "events", <name>)``.
            Default: ().
        n_step: n of n-step transitions, see :class:`NStep`. The first batch then takes n more
            steps of each environment. Default: 1.
        gamma: discount factor of n-step transitions. Default: 1.
    """

    def __init__(
        self,
        envs: Sequence[Callable[[], gymnasium.Env]],
        behaviour: Behaviour,
        *,
        frames_per_batch: int,
        seed: int,
        flags: Sequence[str] = (),
        n_step: int = 1,
        gamma: float = 1.0,
    ):
        self._envs = [ReplayableEnv(make(), environment_seed(seed, number)) for number, make in enumerate(envs)]
        self._behaviour = behaviour
        self._flags = flags
        self._steps = frames_per_batch // len(envs)
        space = self._envs[0].env.observation_space
        self._shape, self._dtype = (len(envs), *(space.shape or ())), space.dtype
        self._observation = self._stack([env.observation for env in self._envs])
        self._trajectory = np.arange(len(envs))
        self._next_trajectory = len(envs)
        self._return = np.zeros(len(envs))
        # returns of the most recently finished episodes
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self._lost: list[int] = []
        self._n_step = NStep(n_step, gamma, len(envs), flags) if n_step > 1 else None
        # env steps of the last batch
        self.steps_of_batch = 0

    def _stack(self, observations: Sequence[Any]) -> np.ndarray:
        stacked = np.empty(self._shape, self._dtype)
        for row, observation in zip(stacked, observations, strict=True):
            row[...] = observation
        return stacked

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.collect()

    def collect(self) -> TensorDict:
        """Collect one batch of ``frames_per_batch`` transitions."""
        if self._n_step is None:
            return self._collect(self._steps)
        return self._n_step(self._collect(self._steps + self._n_step.missing))

    def _collect(self, steps: int) -> TensorDict:
        self.steps_of_batch = steps * len(self._envs)
        rows = [self._step() for _ in range(steps)]
        entries: dict[str, Any] = {key: torch.from_numpy(np.concatenate([row[key] for row in rows])) for key in rows[0]}
        terminated, truncated, flags = (entries.pop(key) for key in ("terminated", "truncated", "flags"))
        following: dict[str, Any] = {
            "observation": _observed(entries.pop("after")),
            "reward": entries.pop("reward").float().unsqueeze(1),
            "done": (terminated | truncated).unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        if self._flags:
            following["events"] = {name: flags[:, i : i + 1] for i, name in enumerate(self._flags)}
        entries |= {"observation": _observed(entries["observation"]), "next": following}
        entries["collector"] = {"traj_ids": entries.pop("trajectory")}
        return TensorDict(entries, [self.steps_of_batch], device="cpu")

    def _step(self) -> dict[str, np.ndarray]:
        """Step all environments, reset those whose episodes ended, and return the entries of the step by name."""
        before, trajectory, chosen = self._observation, self._trajectory, self._behaviour(self._observation)
        entries: dict[str, np.ndarray] = chosen if isinstance(chosen, dict) else {"action": chosen}
        results = [env.step(action) for env, action in zip(self._envs, entries["action"], strict=True)]
        after, reward, terminated, truncated, infos = zip(*results, strict=True)
        reward = np.array(reward, np.float64)
        terminated, truncated = np.array(terminated, bool), np.array(truncated, bool)
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
        names = ("observation", "trajectory", "after", "reward", "terminated", "truncated", "flags")
        columns = (before, trajectory, after, reward, terminated, truncated, flags)
        return entries | dict(zip(names, columns, strict=True))

    def _begin(self, envs: Sequence[int] | np.ndarray) -> None:
        """Start new trajectories in these environments."""
        self._trajectory = self._trajectory.copy()
        self._trajectory[envs] = np.arange(self._next_trajectory, self._next_trajectory + len(envs))
        self._next_trajectory += len(envs)
        self._return[envs] = 0.0
        if hasattr(self._behaviour, "begin"):
            self._behaviour.begin(envs)

    def resume(self) -> list[int]:
        """After a resume: the indices of environments that could not continue their episodes and started new ones."""
        return self._lost

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next batches depend on."""
        return {
            "next_trajectory": self._next_trajectory,
            "trajectory": self._trajectory.tolist(),
            "return": self._return.tolist(),
            "returns": list(self.returns),
            "envs": [env.state_dict() for env in self._envs],
            **({} if self._n_step is None else {"n_step": self._n_step.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict` by replaying the current episodes; see :meth:`resume`."""
        self._next_trajectory = state["next_trajectory"]
        self._trajectory = np.array(state["trajectory"])
        self._return = np.array(state["return"])
        self.returns = deque(state["returns"], maxlen=_RECENT)
        whole = [env.load_state_dict(saved) for env, saved in zip(self._envs, state["envs"], strict=True)]
        self._observation = self._stack([env.observation for env in self._envs])
        self._lost = [number for number, there in enumerate(whole) if not there]
        self._begin(self._lost)
        if self._n_step is not None:
            self._n_step.load_state_dict(state["n_step"])
            self._n_step.end_episodes(self._lost)

    def shutdown(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.env.close()


def _observed(observations: torch.Tensor) -> torch.Tensor:
    """Observations as float32; images stay uint8."""
    return observations if observations.dtype == torch.uint8 else observations.float()
