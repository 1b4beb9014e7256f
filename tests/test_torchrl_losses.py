"""What the guide says of TorchRL's losses: which of them take weighted means, and what the Huber loss writes."""

import pytest
import torch
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torchrl.data import Bounded
from torchrl.data import Categorical as CategoricalSpec
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, TanhNormal, ValueOperator
from torchrl.objectives import CQLLoss, DDPGLoss, DiscreteSACLoss, DQNLoss, IQLLoss, REDQLoss, SACLoss, TD3Loss

from tests.data import learnable

ROWS, ACTION = 32, Bounded(-1.0, 1.0, (1,))


def mlp(inputs, outputs, *end):
    return torch.nn.Sequential(MLP(inputs, outputs, num_cells=[8]), *end)


def actor():
    module = TensorDictModule(mlp(3, 2, NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(module, in_keys=["loc", "scale"], spec=ACTION, distribution_class=TanhNormal)


def deterministic():
    return TensorDictModule(mlp(3, 1, torch.nn.Tanh()), in_keys=["observation"], out_keys=["action"])


def discrete_actor():
    module = TensorDictModule(mlp(3, 2), in_keys=["observation"], out_keys=["logits"])
    kind = torch.distributions.Categorical
    return ProbabilisticActor(module, in_keys=["logits"], spec=CategoricalSpec(2), distribution_class=kind)


def critic():
    return ValueOperator(MLP(4, 1, num_cells=[8]), in_keys=["observation", "action"])


def values():
    return TensorDictModule(mlp(3, 2), in_keys=["observation"], out_keys=["action_value"])


LOSSES = {
    "dqn": lambda: DQNLoss(
        QValueActor(mlp(3, 2), in_keys=["observation"], action_space="categorical"), action_space="categorical"
    ),
    "discrete_sac": lambda: DiscreteSACLoss(discrete_actor(), values(), action_space="categorical", num_actions=2),
    "ddpg": lambda: DDPGLoss(deterministic(), critic()),
    "td3": lambda: TD3Loss(deterministic(), critic(), action_spec=ACTION),
    "sac": lambda: SACLoss(actor(), critic()),
    "redq": lambda: REDQLoss(actor(), critic(), action_spec=ACTION),
    "iql": lambda: IQLLoss(actor(), critic(), ValueOperator(mlp(3, 1), in_keys=["observation"])),
    "cql": lambda: CQLLoss(actor(), critic(), action_spec=ACTION),
}
WEIGHTED = ("dqn", "discrete_sac", "ddpg", "td3", "sac")


@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("name", LOSSES)
def test_losses_take_the_weighted_mean_or_ignore_the_weights(name):
    action_size = None if name in ("dqn", "discrete_sac") else 1
    data = learnable(ROWS, observation=3, action=action_size, done=0.0)
    loss, weight = LOSSES[name](), torch.rand(ROWS) + 0.1
    loss.make_value_estimator(gamma=0.9)

    def critic_loss(weight):
        torch.manual_seed(0)
        result = loss(data.clone().update({"priority_weight": weight}))
        return next(
            result[key].item() for key in ("loss", "loss_qvalue", "loss_value") if result.get(key, None) is not None
        )

    plain, weighted = critic_loss(torch.ones(ROWS)), critic_loss(weight)
    assert (plain != weighted) == (name in WEIGHTED)
    # a common factor of all weights has no effect
    assert critic_loss(3 * weight) == pytest.approx(weighted, rel=1e-5)


def test_the_huber_loss_has_the_gradient_that_lap_needs():
    """``smooth_l1`` is quadratic up to 1; the TD errors of the batch are squared, whatever the loss function is."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", delay_value=False, loss_function="smooth_l1", reduction="none")
    loss.make_value_estimator(gamma=0.0)
    batch = learnable(64)
    batch["next", "reward"] *= 3
    value = network(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    error = (value - batch["next", "reward"].squeeze(1)).detach()
    huber = torch.where(error.abs() <= 1, error**2 / 2, error.abs() - 0.5)
    torch.testing.assert_close(loss(batch)["loss"].detach(), huber)
    torch.testing.assert_close(batch["td_error"].squeeze(1), error**2)
    assert 0 < int((error.abs() > 1).sum()) < 64
