"""Retrace as the targets of a DQN and of other losses of TorchRL."""

import copy

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import A2CLoss, DiscreteSACLoss, DQNLoss
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs
from torchrl.objectives.value import TD0Estimator

from tests.objectives.q_networks import ACTIONS, GAMMA, actor, assert_near, critic, estimator_of, experience, mlp, naive
from tests.objectives.trajectories import averaged
from torchrl_replay_ext import RetraceEstimator


def state_critic():
    return critic(mlp(1), out_key="state_value")


def dqn(network, *, policy="actor", actor_network=None, **arguments):
    loss = averaged(DQNLoss(network, action_space="categorical", delay_value=True, **arguments))
    estimator = estimator_of(value_network=network, actor_network=actor_network, policy=policy)
    loss.make_value_estimator(estimator)
    return loss, estimator


def test_the_registry():
    assert default_value_kwargs("retrace") == {"gamma": 0.99, "lmbda": 1.0}
    loss = DQNLoss(critic(), action_space="categorical")
    estimator = build_value_estimator(loss, "retrace", policy="greedy", gamma=GAMMA)
    assert isinstance(estimator, RetraceEstimator)
    assert estimator.value_network is loss.value_network
    with pytest.raises(TypeError, match="actor_network must be a ProbabilisticActor"):
        build_value_estimator(loss, "retrace")


def test_a_loss_that_lists_the_name_makes_its_estimator_by_it():
    class RetraceDQNLoss(DQNLoss):
        SUPPORTED_VALUE_ESTIMATORS = (*DQNLoss.SUPPORTED_VALUE_ESTIMATORS, "retrace")

    network, batch = critic(), experience(3, 9)
    expected, _ = dqn(network, policy="greedy")
    loss = averaged(RetraceDQNLoss(network, action_space="categorical", delay_value=True))
    loss.set_keys(reward="gain")
    loss.make_value_estimator("retrace", policy="greedy", gamma=GAMMA)
    assert loss.value_type == "retrace" and loss.value_estimator.tensor_keys.reward == "gain"
    renamed = batch.clone()
    renamed["next", "gain"] = renamed["next"].pop("reward")
    torch.testing.assert_close(loss(renamed)["loss"], expected(batch)["loss"])
    # a loss that does not list the name raises an error
    with pytest.raises(NotImplementedError, match="'retrace' is not implemented for loss DQNLoss"):
        DQNLoss(network, action_space="categorical").make_value_estimator("retrace")


def test_for_a_loss_with_an_actor():
    class OwnLoss(A2CLoss):
        SUPPORTED_VALUE_ESTIMATORS = (*A2CLoss.SUPPORTED_VALUE_ESTIMATORS, "retrace")

    pi, value, batch = mlp(), mlp(), experience(3, 9)
    for functional in (True, False):
        loss = OwnLoss(actor(pi, return_log_prob=True), state_critic(), functional=functional)
        estimator = build_value_estimator(loss, "retrace", value_network=critic(value), gamma=GAMMA)
        for _ in range(2):
            assert_near(estimator.value_estimate(batch), naive(batch, value, pi))
            # change the parameters of the actor
            with torch.no_grad():
                pi[2].weight.mul_(-1)


@pytest.mark.usefixtures("from_scratch")
def test_in_one_graph():
    batch = experience(3, 9)
    loss, _ = dqn(critic(), actor_network=actor())
    eager = loss(batch.clone())["loss"]
    compiled = torch.compile(lambda batch: loss(batch)["loss"], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), eager)


# --- unsupported losses


OTHER_LOSSES = {
    "DiscreteSACLoss": lambda: DiscreteSACLoss(
        actor(return_log_prob=True), critic(), action_space="categorical", num_actions=ACTIONS
    ),
    "A2CLoss": lambda: A2CLoss(actor(return_log_prob=True), state_critic()),
}


@pytest.mark.parametrize("name", OTHER_LOSSES)
def test_other_losses_are_refused_by_name_and_keep_the_estimator_they_have(name):
    loss = OTHER_LOSSES[name]()
    estimator = estimator_of()
    says = rf"{name}\.make_value_estimator\(RetraceEstimator\).*supports DQNLoss.*{name} does not pass.*ACERLoss"
    for present in (False, True):
        if present:
            loss.make_value_estimator(TD0Estimator(gamma=0.5, value_network=state_critic()))
        before = loss._value_estimator
        for attempt in (
            lambda: loss.make_value_estimator(estimator),
            lambda: loss.make_value_estimator(RetraceEstimator, gamma=GAMMA, value_network=critic(), policy="greedy"),
        ):
            with pytest.raises(TypeError, match=says):
                attempt()
            assert loss._value_estimator is before
    with pytest.raises(TypeError, match=rf"RetraceEstimator\.for_loss\({name}\): .*supports DQNLoss"):
        build_value_estimator(loss, "retrace", value_network=critic(), policy="greedy")


# --- in DQNLoss


def perturb(params):
    params.apply_(lambda x: x.data.add_(torch.randn_like(x)))


@pytest.mark.parametrize("policy", ["actor", "greedy"])
@pytest.mark.parametrize("delay_value", [True, False])
@pytest.mark.parametrize("template", [True, False])
def test_targets_in_dqn_loss(policy, delay_value, template):
    """Targets are Q^ret of the target network, whether the estimator got the user's network or that of the loss."""
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    network = critic(value)
    loss = DQNLoss(network, action_space="categorical", delay_value=delay_value)
    if delay_value:
        averaged(loss)
        perturb(loss.target_value_network_params)
    used = loss.value_network if template else network
    loss.make_value_estimator(estimator_of(pi=pi if policy == "actor" else None, value_network=used))
    target = copy.deepcopy(value)
    if delay_value:
        loss.target_value_network_params.data.to_module(critic(target))
    expected = naive(batch, target, pi if policy == "actor" else None)
    taken = value(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    error = nn.functional.mse_loss(taken, expected)
    result = loss(batch)["loss"]
    torch.testing.assert_close(result, error)
    torch.testing.assert_close(batch["td_error"], (taken - expected).square().detach())
    gradients = torch.autograd.grad(error, value.parameters())
    result.backward()
    for p, gradient in zip(value.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    assert all(p.grad is None for p in pi.parameters())


def test_the_estimator_adds_nothing_to_the_loss():
    pi, network = actor(), critic()
    loss, _ = dqn(network, actor_network=pi)
    alone = DQNLoss(network, action_space="categorical")
    assert [n for n, _ in loss.named_parameters()] == [n for n, _ in alone.named_parameters()]
    assert list(loss.state_dict()) == list(alone.state_dict())
    loss.set_keys(reward="r")
    assert loss.value_estimator.tensor_keys.reward == "r"


def test_a_network_that_replaces_the_actions_taken():
    value, batch = mlp(), experience(3, 9)
    qvalue_actor = QValueActor(value, in_keys=["observation"], action_space="categorical")
    loss, estimator = dqn(qvalue_actor, policy="greedy")
    with pytest.raises(ValueError, match=r"replaced the actions taken, 'action', by greedy actions"):
        loss(batch.clone())
    # outside the loss the estimator works, also with the entries that a collector stored
    expected = naive(batch, value)
    assert_near(estimator(qvalue_actor(batch.clone()).detach().update(batch))["value_target"], expected)
    assert_near(estimator.value_estimate(batch), expected)
    # the first module writes values only; the loss must have the same module
    mixed, _ = dqn(qvalue_actor, policy="greedy")
    mixed.make_value_estimator(estimator_of(value_network=qvalue_actor[0]))
    with pytest.raises(ValueError, match=r"need the same network, .* actor\[0\]"):
        mixed(batch.clone())
    plain, _ = dqn(qvalue_actor[0], policy="greedy")
    result = plain(batch.clone())["loss"]
    # a copy of the action works, too
    batch["taken"] = batch["action"]
    estimator.set_keys(action="taken")
    torch.testing.assert_close(loss(batch)["loss"], result)


def test_double_dqn():
    """V(x_{t+1}) is the value under the target network of the action that the online network would take."""
    value, batch = mlp(), experience(5, 1)
    qvalue_actor = QValueActor(value, in_keys=["observation"], action_space="categorical")
    loss, estimator = dqn(qvalue_actor, policy="greedy", double_dqn=True)
    perturb(loss.target_value_network_params)
    estimator.set_keys(action="taken")
    batch["taken"] = batch["action"]
    target = copy.deepcopy(value)
    loss.target_value_network_params.data["module", "0", "module"].to_module(target)
    behind = batch["next", "observation"]
    v = target(behind).gather(-1, value(behind).argmax(-1, keepdim=True)).masked_fill(batch["next", "terminated"], 0.0)
    taken = value(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    expected = nn.functional.mse_loss(taken, batch["next", "reward"] + GAMMA * v)
    torch.testing.assert_close(loss(batch)["loss"], expected)
