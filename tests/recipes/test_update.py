"""Losses as graphs need them."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor

from recipes import dqn, sac, td3
from tests.recipes.runs import composed

META = torch.device("meta")


def dqn_loss():
    network = nn.Sequential(nn.Linear(4, 8, device=META), nn.Linear(8, 2, device=META))
    config = composed("dqn").dqn
    # target networks need real tensors
    with patch.object(dqn, "HardUpdate"):
        return dqn.make_loss(config, QValueActor(network, in_keys=["observation"], action_space="categorical"))[0]


def td3_loss():
    return td3.make_loss(composed("td3").td3, 3, 2, META)[1]


def sac_loss():
    return sac.make_loss(composed("sac").sac, 3, 2, META)[1]


@pytest.mark.parametrize("make_loss", [dqn_loss, td3_loss, sac_loss])
def test_losses_are_on_the_device_before_their_first_use(make_loss):
    """A graph cannot move a tensor, such as gamma, at its first call."""
    loss_module = make_loss()
    gamma = loss_module.value_estimator.gamma
    tensors = [*loss_module.parameters(), *loss_module.buffers(), gamma]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
