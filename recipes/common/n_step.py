"""n-step transitions of several environments that are stepped together."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import MultiStepTransform

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
