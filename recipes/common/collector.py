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

from recipes.common.networks import to_tensor

# Number of finished episodes whose returns are kept.
_RECENT = 100


def environment_seed(seed: int, number: int, starts: int) -> int:
    """The seed of environment ``number`` of a run with ``seed`` that has been resumed ``starts`` times.

    Neighbouring runs share no seeds (but for chance).
    """
    return int(np.random.SeedSequence([seed, number, starts]).generate_state(1)[0])


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
            rows = cast(TensorDict, TensorDict.cat([self._held, rows], 1))
        self._held = cast(TensorDict, rows[:, -self.n :].clone())
        complete = cast(TensorDict, self._transform().inv(rows))
        complete = complete.exclude("gamma", "nonterminal", ("next", "original_reward"))
        return complete.transpose(0, 1).reshape(-1).contiguous()


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
        self._envs, self._seed, self._starts = [make() for make in envs], seed, 0
        self._behaviour = behaviour
        self._flags = flags
        self._steps = frames_per_batch // len(envs)
        space = self._envs[0].observation_space
        self._shape, self._dtype = (len(envs), *(space.shape or ())), space.dtype
        self._observation = self._reset_all()
        self._trajectory = np.arange(len(envs))
        self._next_trajectory = len(envs)
        self._return = np.zeros(len(envs))
        # returns of the most recently finished episodes
        self.returns: deque[float] = deque(maxlen=_RECENT)
        self._n_step = NStep(n_step, gamma, len(envs), flags) if n_step > 1 else None
        # env steps of the last batch
        self.steps_of_batch = 0

    def _reset_all(self) -> np.ndarray:
        """Begin an episode in each environment, with its seed, and return the observations."""
        seeds = [environment_seed(self._seed, number, self._starts) for number in range(len(self._envs))]
        return self._stack([env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=True)])

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
        columns = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
        before, after = (to_tensor(columns.pop(key), torch.device("cpu")) for key in ("observation", "after"))
        entries: dict[str, Any] = {key: torch.from_numpy(column) for key, column in columns.items()}
        terminated, truncated, flags = (entries.pop(key) for key in ("terminated", "truncated", "flags"))
        following: dict[str, Any] = {
            "observation": after,
            "reward": entries.pop("reward").float().unsqueeze(1),
            "done": (terminated | truncated).unsqueeze(1),
            "terminated": terminated.unsqueeze(1),
            "truncated": truncated.unsqueeze(1),
        }
        if self._flags:
            following["events"] = {name: flags[:, i : i + 1] for i, name in enumerate(self._flags)}
        entries |= {"observation": before, "next": following}
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
                self._observation[i] = self._envs[i].reset()[0]
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

    def state_dict(self) -> dict[str, Any]:
        """The number of resumes, the next trajectory and the returns of the last episodes."""
        return {"starts": self._starts, "next_trajectory": self._next_trajectory, "returns": list(self.returns)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; all environments begin new episodes, with new seeds."""
        self._starts, self._next_trajectory = state["starts"] + 1, state["next_trajectory"]
        self.returns = deque(state["returns"], maxlen=_RECENT)
        self._observation = self._reset_all()
        self._begin(range(len(self._envs)))

    def shutdown(self) -> None:
        """Close the environments."""
        for env in self._envs:
            env.close()
