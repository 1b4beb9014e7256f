"""Critics of continuous actions that estimate Q and V."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _beside(features: Tensor, actions: Tensor) -> Tensor:
    """``features`` [..., F] beside each of ``actions`` [..., m, A]: [..., m, F + A]."""
    if actions.ndim != features.ndim + 1 or actions.shape[:-2] != features.shape[:-1]:
        raise ValueError(
            f"actions have shape {tuple(actions.shape)}, expected {(*features.shape[:-1], 'm', 'A')}: m actions for "
            "each state."
        )
    features = features.unsqueeze(-2).expand(*actions.shape[:-1], features.shape[-1])
    return torch.cat([features, actions], -1)


class StochasticDuelingNetwork(nn.Module):
    r"""Estimates of Q and V that agree, for continuous actions (Wang et al. 2017, Eq. 13).

    ``Q̃(x, a) = V(x) + A(x, a) − 1/n Σ_i A(x, u_i)`` with u_i ~ π(·|x), so that Q̃ is random, and its mean over the
    policy's actions is V. A target for Q̃ therefore also trains V.

    Args:
        value_net: V; maps features [..., F] to [..., 1].
        advantage_net: A; maps features beside an action, [..., F + A], to [..., 1].
        trunk: maps observations to features [..., F], for both; by default, observations are the features.

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
            observation: what the trunk reads; without one, [..., F].
            actions: [..., m, A].
            policy_samples: u, [..., n, A], n >= 1, drawn from the policy; shared by all m actions.

        Returns:
            Q̃ [..., m, 1] and V [..., 1].

        Raises:
            ValueError: if shapes do not fit, or there are no samples.
        """
        num_actions, num_samples = actions.shape[-2], policy_samples.shape[-2]
        if not num_samples:
            raise ValueError("StochasticDuelingNetwork: policy_samples must hold at least one action for each state.")
        features = self.trunk(observation)
        value = self.value_net(features)
        advantage = self.advantage_net(_beside(features, torch.cat([actions, policy_samples], -2)))
        of_actions, of_samples = advantage.split([num_actions, num_samples], -2)
        return value.unsqueeze(-2) + of_actions - of_samples.mean(-2, keepdim=True), value

    def state_value(self, observation: Tensor) -> Tensor:
        """V [..., 1] alone."""
        return self.value_net(self.trunk(observation))


class SeparateValueNetworks(nn.Module):
    """Q and V by networks of their own: what ACER's ablation has in place of the dueling network (App. E.4).

    :class:`~torchrl_replay_ext.ACERContinuousLoss` then moves V towards Q^ret with the weight ρ.

    Args:
        value_net: V; maps features [..., F] to [..., 1].
        action_value_net: Q; maps features beside an action, [..., F + A], to [..., 1].
        trunk: maps observations to features, for both; by default, observations are the features.
    """

    def __init__(self, value_net: nn.Module, action_value_net: nn.Module, trunk: nn.Module | None = None):
        super().__init__()
        self.value_net, self.action_value_net = value_net, action_value_net
        self.trunk = nn.Identity() if trunk is None else trunk

    def forward(self, observation: Tensor, actions: Tensor, policy_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Q [..., m, 1] of m actions, and V [..., 1]; ``policy_samples`` are not used."""
        features = self.trunk(observation)
        return self.action_value_net(_beside(features, actions)), self.value_net(features)

    def state_value(self, observation: Tensor) -> Tensor:
        """V [..., 1] alone."""
        return self.value_net(self.trunk(observation))
