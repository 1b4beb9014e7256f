"""A recurrent Q-network and the policies that act with it."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torchrl.modules import MLP

from recipes.common.collector import EpsilonRandom
from recipes.common.networks import to_tensor


class RecurrentNetwork(nn.Module):
    """Q-values from an LSTM and fully connected layers. The recurrent state is one tensor [..., 2, units].

    Args:
        num_observed: length of an observation vector.
        num_actions: number of actions.
        units: units of the LSTM.
        hidden_sizes: units of each layer between the LSTM and the Q-values.
        device: device of the parameters.
    """

    def __init__(self, num_observed: int, num_actions: int, units: int, hidden_sizes: list[int], device: torch.device):
        super().__init__()
        self.cell = nn.LSTMCell(num_observed, units, device=device)
        self.head = MLP(units, num_actions, num_cells=hidden_sizes, activation_class=nn.ReLU, device=device)

    def initial(self, count: int) -> Tensor:
        """The recurrent states [count, 2, units] at the beginning of episodes."""
        return self.cell.weight_hh.new_zeros(count, 2, self.cell.hidden_size)

    def begin(self, count: int) -> "RecurrentEpisodes":
        """Begin ``count`` greedy episodes, see recipes.common.evaluation.Policy."""
        return RecurrentEpisodes(self, count)

    def step(self, observation: Tensor, state: Tensor) -> Tensor:
        """The recurrent states [n, 2, units] after one step, from observations [n, size] and the states before."""
        return torch.stack(self.cell(observation, (state[:, 0], state[:, 1])), 1)

    def values(self, state: Tensor) -> Tensor:
        """Q-values [..., actions] of recurrent states [..., 2, units]."""
        return self.head(state[..., 0, :])

    def forward(self, observations: Tensor, state: Tensor) -> Tensor:
        """Q-values [n, steps, actions] of consecutive observations [n, steps, size].

        Args:
            observations: [n, steps, size].
            state: recurrent states before the first observation, [n, 2, units].
        """
        hidden, cell, outputs = state[:, 0], state[:, 1], []
        for observation in observations.unbind(1):
            hidden, cell = self.cell(observation, (hidden, cell))
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1))

    @torch.no_grad()
    def burn_in(self, observations: Tensor, valid: Tensor, state: Tensor) -> Tensor:
        """The recurrent states [n, 2, units] after consecutive observations; without gradients.

        Args:
            observations: [n, steps, size].
            valid: False for rows that repeat the first one, before the first valid row of a window; bool [n, steps].
            state: recurrent states before the first valid row, [n, 2, units].
        """
        for observation, is_step in zip(observations.unbind(1), valid.unbind(1), strict=True):
            state = torch.where(is_step[:, None, None], self.step(observation, state), state)
        return state


class RecurrentEpisodes:
    """Greedy actions in episodes that are played side by side, with their recurrent states.

    Args:
        network: the network.
        count: number of episodes.
    """

    def __init__(self, network: RecurrentNetwork, count: int):
        self._network = network
        self.state = network.initial(count)

    @torch.no_grad()
    def __call__(self, observations: np.ndarray, episodes: Sequence[int]) -> np.ndarray:
        """The greedy actions [n] for the next observations [n, size] of these episodes."""
        after = self._network.step(to_tensor(observations, self.state.device), self.state[episodes])
        self.state[episodes] = after
        return self._network.values(after).argmax(-1).cpu().numpy()


class RecurrentBehaviour(EpsilonRandom):
    """An epsilon-greedy behaviour policy that stores the recurrent state before each step as "recurrent_state".

    Args:
        network: the network.
        action_space: action space of one environment.
        num_envs: number of environments.
        seed: seed of the random actions.
    """

    def __init__(self, network: RecurrentNetwork, action_space: gymnasium.Space, num_envs: int, *, seed: int):
        self._episodes, self._all = RecurrentEpisodes(network, num_envs), range(num_envs)
        super().__init__(lambda _: self._greedy, action_space, seed=seed)

    def __call__(self, observations: np.ndarray) -> dict[str, np.ndarray]:
        """The actions for ``observations``, and the recurrent states before this step."""
        before = self._episodes.state.cpu().numpy().copy()
        # random actions, too, need the recurrent state after this observation
        self._greedy = self._episodes(observations, self._all)
        return {"action": super().__call__(observations), "recurrent_state": before}

    def begin(self, envs: Sequence[int] | np.ndarray) -> None:
        """Begin new episodes in these environments."""
        self._episodes.state[envs] = 0

    def state_dict(self) -> dict[str, Any]:
        """The generator of random actions and the recurrent states."""
        return {**super().state_dict(), "recurrent_state": self._episodes.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self._episodes.state.copy_(state["recurrent_state"])
