"""Critic networks of the ACER loss for continuous actions, which estimate both Q and V."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _beside(name: str, features: Tensor, **actions: Tensor) -> Tensor:
    """Concatenate ``features`` [..., F] with each action of all tensors [..., m, A]; returns [..., Σ m, F + A]."""
    size = actions["actions"].shape[-1]
    for key, value in actions.items():
        if value.ndim != features.ndim + 1 or (*value.shape[:-2], value.shape[-1]) != (*features.shape[:-1], size):
            raise ValueError(
                f"{name}: {key} of shape {tuple(value.shape)}, expected {(*features.shape[:-1], 'm', size)}, with m "
                "actions for each state."
            )
    joint = torch.cat(list(actions.values()), -2)
    return torch.cat([features.unsqueeze(-2).expand(*joint.shape[:-1], -1), joint], -1)


class StochasticDuelingNetwork(nn.Module):
    r"""Consistent estimates of Q and V for continuous actions (Wang et al. 2017, Eq. 13).

    ``Q̃(x, a) = V(x) + A(x, a) − 1/n Σ_i A(x, u_i)`` with u_i ~ π(·|x). Q̃ is random, and its expected value over actions
    of the policy is V. A target for Q̃ therefore also trains V.

    Args:
        value_net: V, maps features [..., F] to [..., 1].
        advantage_net: A, maps features and an action, concatenated to [..., F + A], to [..., 1].
        trunk: maps observations to the features [..., F] of both networks. Default: None, the observations are the
            features.

    Examples:
        >>> network = StochasticDuelingNetwork(torch.nn.Linear(3, 1), torch.nn.Linear(3 + 2, 1))
        >>> q, v = network(torch.randn(8, 3), torch.randn(8, 1, 2), torch.randn(8, 5, 2))
        >>> q.shape, v.shape
        (torch.Size([8, 1, 1]), torch.Size([8, 1]))
    """

    def __init__(self, value_net: nn.Module, advantage_net: nn.Module, trunk: nn.Module | None = None):
        super().__init__()
        self.value_net, self.advantage_net = value_net, advantage_net
        self.trunk = nn.Identity() if trunk is None else trunk

    def forward(self, observation: Tensor, actions: Tensor, policy_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate Q of m actions and V, in one pass of each network.

        Args:
            observation: the input of the trunk; without a trunk, features [..., F].
            actions: m actions for each state, [..., m, A].
            policy_samples: samples u_i of the policy, [..., n, A] with n >= 1. All m actions use the same samples.

        Returns:
            Q̃ [..., m, 1] and V [..., 1]. Gradients flow.

        Raises:
            ValueError: if a shape is wrong, or n = 0.
        """
        features = self.trunk(observation)
        beside = _beside("StochasticDuelingNetwork", features, actions=actions, policy_samples=policy_samples)
        num_actions, num_samples = actions.shape[-2], policy_samples.shape[-2]
        if not num_samples:
            raise ValueError("StochasticDuelingNetwork: policy_samples must hold at least one action for each state.")
        value = self.value_net(features)
        advantage = self.advantage_net(beside)
        of_actions, of_samples = advantage.split([num_actions, num_samples], -2)
        return value.unsqueeze(-2) + of_actions - of_samples.mean(-2, keepdim=True), value

    def state_value(self, observation: Tensor) -> Tensor:
        """Estimate V [..., 1] only."""
        return self.value_net(self.trunk(observation))


class SeparateValueNetworks(nn.Module):
    """Separate networks for Q and V, which replace the dueling network in an ablation (Wang et al. 2017, App. E.4).

    With this critic, :class:`~torchrl_replay_ext.ACERContinuousLoss` moves V towards Q^ret with the weight ρ.

    Args:
        value_net: V, maps features [..., F] to [..., 1].
        action_value_net: Q, maps features and an action, concatenated to [..., F + A], to [..., 1].
        trunk: maps observations to the features [..., F] of both networks. Default: None, the observations are the
            features.
    """

    def __init__(self, value_net: nn.Module, action_value_net: nn.Module, trunk: nn.Module | None = None):
        super().__init__()
        self.value_net, self.action_value_net = value_net, action_value_net
        self.trunk = nn.Identity() if trunk is None else trunk

    def forward(self, observation: Tensor, actions: Tensor, policy_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate Q [..., m, 1] of m actions and V [..., 1]; ``policy_samples`` is not used."""
        features = self.trunk(observation)
        beside = _beside("SeparateValueNetworks", features, actions=actions)
        return self.action_value_net(beside), self.value_net(features)

    def state_value(self, observation: Tensor) -> Tensor:
        """Estimate V [..., 1] only."""
        return self.value_net(self.trunk(observation))
