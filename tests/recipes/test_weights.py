"""The option weights: how a loss averages the weighted losses l_i of its rows.

"mean" is Σ w_i l_i / B, as in Algorithm 1 of PER and Algorithms 1 and 2 of ReaPER, up to their constant factor B.
"normalized" is Σ w_i l_i / Σ w_i, as TorchRL's losses compute it.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor

from recipes import dqn, r2d2
from recipes.common.recurrent import RecurrentNetwork
from tests.data import learnable
from tests.recipes.runs import Replay, composed

B = 6
WEIGHTS = torch.tensor([0.1, 1.0, 0.4, 0.7, 0.05, 0.3])
TABLES = torch.tensor([0, 0, 0, 1, 1, 2])
CPU = torch.device("cpu")


class DQN:
    """One update on six rows. A new object starts from the same networks and the same batch."""

    words: tuple[str, ...] = ()

    def __init__(self, batch_weights, weights):
        torch.manual_seed(0)
        config = composed("dqn", "dqn.max_grad_norm=null", f"weights={weights}", *self.words)
        network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        loss_module, target = dqn.make_loss(config.dqn, actor)
        self.optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3, fused=True)
        batch = learnable(B, observation=3, done=0.0).update({"table": TABLES, "priority_weight": batch_weights})
        self.update = dqn.make_update(config, Replay(batch), loss_module, target, self.optimizer, config.dqn.cagrad)

    def loss(self):
        torch.manual_seed(2)
        return self.update(None)[self.entry][0]

    entry = "loss"

    def gradient(self):
        """The gradients of the update: Adam's first moments are a tenth of them."""
        return torch.cat([10 * state["exp_avg"].flatten() for state in self.optimizer.state.values()])


class CAGrad(DQN):
    """With c = 0, the gradient is that of the loss."""

    words = ("env=threerooms", "sampler=sset_per", "dqn.cagrad=0.0")


class R2D2(DQN):
    """Two windows of a step of burn-in and three steps to learn from: six rows."""

    def __init__(self, batch_weights, weights):
        torch.manual_seed(0)
        words = "r2d2.burn_in=1", "r2d2.sequence_length=3", "r2d2.max_grad_norm=null", f"weights={weights}"
        config = composed("r2d2", *words)
        network = RecurrentNetwork(3, 2, 8, [8], CPU)
        target = deepcopy(network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
        batch = learnable(8, observation=3, done=0.0).reshape(2, 4)
        batch["validity_mask"] = torch.ones(2, 4, dtype=torch.bool)
        batch["recurrent_state"] = torch.zeros(2, 4, 2, 8)
        # the weights of burn-in have no effect
        batch["priority_weight"] = torch.cat([torch.full((2, 1), 9.0), batch_weights.reshape(2, 3)], 1)
        self.update = r2d2.make_update(config, Replay(batch), network, target, self.optimizer)


@pytest.mark.parametrize("recipe", [DQN, CAGrad, R2D2])
def test_losses_average_their_rows_as_weights_says(recipe):
    row_losses, row_gradients = [], []
    for row in torch.eye(B):  # a single row with a weight: its loss and gradient
        single = recipe(row, "normalized")
        row_losses.append(single.loss())
        row_gradients.append(single.gradient())
    losses, gradients = torch.stack(row_losses), torch.stack(row_gradients)
    assert losses.std() > 0.01
    for weights, divisor in (("mean", B), ("normalized", WEIGHTS.sum())):
        whole = recipe(WEIGHTS, weights)
        torch.testing.assert_close(whole.loss(), (WEIGHTS * losses).sum() / divisor)
        torch.testing.assert_close(whole.gradient(), WEIGHTS @ gradients / divisor, rtol=1e-4, atol=1e-6)
