"""Numbers about the Q-values of the target network, for progress.csv."""

from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.objectives import DQNLoss

from recipes.common.config import EnvConfig
from recipes.common.environment import make_discrete_env
from recipes.common.networks import to_tensor
from recipes.envs.rooms import Rooms


class TargetValues:
    """The Q-values of the target network of a loss.

    Args:
        loss_module: the loss.
        device: device of its networks.
    """

    def __init__(self, loss_module: DQNLoss, device: torch.device):
        self._loss_module, self._device = loss_module, device

    @torch.no_grad()
    def __call__(self, observations: np.ndarray) -> Tensor:
        """Q-values [n, num_actions] of observations [n, ...]."""
        network = self._loss_module.value_network
        observed = to_tensor(observations, self._device)
        with self._loss_module.target_value_network_params.to_module(network):
            return network(TensorDict(observation=observed))["action_value"]

    def of_steps(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Q-values [n] of observations [n, ...] and integer actions [n]."""
        return np.take_along_axis(self(observations).cpu().numpy(), actions[:, None], 1)[:, 0]


def room_columns(config: EnvConfig, values: TargetValues, gamma: float) -> Callable[[], dict[str, float]]:
    """A function that returns q_sum and q_error; an empty dict if the optimal Q-values are not available."""
    if not config.id.startswith("recipes.envs:") or gamma == 1:
        return dict
    world = make_discrete_env(config, training=True).unwrapped
    if not isinstance(world, Rooms):
        return dict
    # Leave out the goal states: episodes end there, so their Q-values are never learned.
    states = (world.dynamics.next_state != np.arange(world.num_states)[:, None]).any(1)
    observations, optimal = world.observations[states], torch.as_tensor(world.dynamics.optimal_q(gamma)[states])

    def columns() -> dict[str, float]:
        q = values(observations).cpu()
        return {"q_sum": q.sum().item(), "q_error": (q - optimal).square().mean().sqrt().item()}

    return columns
