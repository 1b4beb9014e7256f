"""Critics that estimate Q and V."""

import itertools

import pytest
import torch
from torch import nn

from torchrl_replay_ext import SeparateValueNetworks, StochasticDuelingNetwork

OBSERVATION, HIDDEN, ACTION = 3, 4, 2
KINDS = [StochasticDuelingNetwork, SeparateValueNetworks]


def make(kind: type[nn.Module], *, trunk: bool = True) -> nn.Module:
    features = HIDDEN if trunk else OBSERVATION
    beside = nn.Sequential(nn.Linear(features + ACTION, 5), nn.Tanh(), nn.Linear(5, 1))
    shared = nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh()) if trunk else None
    return kind(nn.Linear(features, 1), beside, shared).double()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("trunk", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_a_loop(kind, shape, trunk):
    """Eq. 13, or a network for Q alone."""
    network = make(kind, trunk=trunk)
    observation, actions, samples = randn(*shape, OBSERVATION), randn(*shape, 3, ACTION), randn(*shape, 4, ACTION)
    q, v = network(observation, actions, samples)
    assert q.shape == (*shape, 3, 1)
    assert v.shape == (*shape, 1)
    assert torch.equal(network.state_value(observation), v)
    for place in itertools.product(*map(range, shape)):
        features = network.trunk(observation[place])
        value = network.value_net(features)
        beside = network.action_value_net if kind is SeparateValueNetworks else network.advantage_net
        expected = torch.stack([beside(torch.cat([features, a])) for a in actions[place]])
        if kind is StochasticDuelingNetwork:
            expected += value - sum(beside(torch.cat([features, u])) for u in samples[place]) / 4
        torch.testing.assert_close(v[place], value)
        torch.testing.assert_close(q[place], expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(4, ACTION), (4, 1, 1, ACTION), (3, 1, ACTION)])
def test_shapes_that_do_not_fit(kind, shape):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: actions of shape .*expected \(4, 'm', 2\)"):
        make(kind)(randn(4, OBSERVATION), randn(*shape), randn(4, 2, ACTION))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        *((shape, "of shape") for shape in ((ACTION,), (4, ACTION), (3, 2, ACTION), (4, 2, ACTION + 1))),
        ((4, 0, ACTION), "must hold at least one"),
    ],
)
def test_samples_that_do_not_fit(shape, message):
    with pytest.raises(ValueError, match=f"StochasticDuelingNetwork: policy_samples {message}"):
        make(StochasticDuelingNetwork)(randn(4, OBSERVATION), randn(4, 1, ACTION), randn(*shape))
