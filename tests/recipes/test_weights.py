"""The option weights: how a loss averages the weighted losses l_i of its rows.

"mean" is Σ w_i l_i / B, as in Algorithm 1 of PER and Algorithms 1 and 2 of ReaPER, up to their constant factor B.
"normalized" is Σ w_i l_i / Σ w_i, as TorchRL's losses compute it. TD3 and SAC weight the losses of their critics only.
"""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import SoftUpdate

from recipes import dqn, r2d2, sac, td3
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
        config = composed("dqn", "dqn.max_grad_norm=null", "dqn.loss_function=l2", f"weights={weights}", *self.words)
        network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        loss_module, target = dqn.make_loss(config.dqn, actor)
        self.optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3, fused=True)
        batch = learnable(B, observation=3, done=0.0).update({"table": TABLES, "priority_weight": batch_weights})
        self.replay = Replay(batch)
        self.update = dqn.make_update(config, self.replay, loss_module, target, self.optimizer)

    def loss(self):
        torch.manual_seed(2)
        return self.update(None)["loss"][0]

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
        network = r2d2.RecurrentNetwork(3, 2, 8, [8], CPU)
        target = deepcopy(network).requires_grad_(False)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, fused=True)
        batch = learnable(8, observation=3, done=0.0).reshape(2, 4)
        batch["validity_mask"] = torch.ones(2, 4, dtype=torch.bool)
        batch["recurrent_state"] = torch.zeros(2, 4, 2, 8)
        # the weights of burn-in have no effect
        batch["priority_weight"] = torch.cat([torch.full((2, 1), 9.0), batch_weights.reshape(2, 3)], 1)
        pair = r2d2.values_and_targets(config.r2d2, network, target, batch)
        self.rows = torch.nn.functional.smooth_l1_loss(*pair, reduction="none").flatten()
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
        # in DQN, both are squared errors; the priorities of R2D2 are those of windows, see test_r2d2
        rows = whole.rows if recipe is R2D2 else whole.replay.returned[0]["td_error"].flatten()
        torch.testing.assert_close(rows, losses)


@pytest.mark.parametrize(("recipe", "td_error"), [(td3, torch.square), (sac, torch.abs)])
def test_weights_are_for_the_critics_whose_larger_td_error_is_returned(recipe, td_error):
    name = recipe.__name__.split(".")[-1]
    config = composed(name, f"{name}.hidden_sizes=[16, 16]", *["td3.policy_delay=1"] * (recipe is td3))
    for key in vars(config.learning):
        if key.endswith("learning_rate"):
            setattr(config.learning, key, 0.0)
    torch.manual_seed(0)
    _, loss_module = recipe.make_loss(config.learning, 3, 2, CPU)
    target = SoftUpdate(loss_module, tau=0.5)
    data = learnable(5, observation=3, action=2, done=1.0)  # then the targets are the rewards
    values = []
    for parameters in loss_module.qvalue_network_params.data.unbind(0):
        with parameters.to_module(loss_module.qvalue_network):
            values.append(loss_module.qvalue_network(data.clone())["state_action_value"])
    error = (data["next", "reward"] - torch.stack(values)).squeeze(2)

    results = []
    for weight in (torch.ones(5), torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0])):
        torch.manual_seed(1)
        replay = Replay(data.clone().set("priority_weight", weight))
        optimizers = recipe.make_optimizers(config.learning, loss_module)
        update = recipe.make_update(config, replay, loss_module, target, optimizers)
        results.append({key: value.squeeze(0) for key, value in update(None).items()})
        (sample,) = replay.returned
        assert not sample["td_error"].requires_grad
        torch.testing.assert_close(sample["td_error"], td_error(error).amax(0))
    even, one = results
    torch.testing.assert_close(even["loss_qvalue"], error.square().sum(0).mean())
    torch.testing.assert_close(one["loss_qvalue"], error[:, 2].square().sum())
    for key in {"loss_actor", *even} - {"loss_qvalue"}:
        assert torch.equal(one[key], even[key])
    with torch.no_grad():
        torch.manual_seed(1)
        whole = loss_module(data.clone())  # without weights: all of TorchRL's own
    for key in {"loss_actor", "loss_qvalue", *even}:
        torch.testing.assert_close(whole[key], even[key])
