"""Retrace as a TorchRL value estimator, against a loop over single steps."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import OneHotCategorical, QValueActor
from torchrl.objectives import DQNLoss
from torchrl.objectives.utils import build_value_estimator

from tests.objectives.q_networks import ACTIONS, GAMMA, actor, assert_near, critic, estimator_of, experience, mlp, naive
from tests.objectives.trajectories import averaged
from torchrl_replay_ext import RetraceEstimator


def expected_value(x, value, policy=None):
    q = value(x)
    return (q.max(-1).values if policy is None else (policy(x).softmax(-1) * q).sum(-1)).unsqueeze(-1).detach()


# --- values


@pytest.mark.parametrize("policy", ["actor", "greedy"])
@pytest.mark.parametrize(("lmbda", "c", "power"), [(1.0, 1.0, 1.0), (0.8, 3.0, 0.5), (1.0, math.inf, 1.0)])
def test_targets_and_advantages_against_a_loop(policy, lmbda, c, power):
    value, pi = mlp(), mlp() if policy == "actor" else None
    batch = experience(3, 9)
    estimator = estimator_of(value, pi, lmbda=lmbda, rho_thresh=c, rho_power=power)
    expected = naive(batch, value, pi, lmbda=lmbda, c=c, power=power)
    assert_near(estimator.value_estimate(batch.clone()), expected)
    kept = batch.clone()
    result = estimator(batch)
    assert result is batch
    assert_near(batch["value_target"], expected)
    advantage = expected - expected_value(batch["observation"], value, pi)
    assert_near(batch["advantage"], advantage)
    assert batch["advantage"].shape == batch["value_target"].shape == (3, 9, 1)
    # nothing else is written or changed
    assert (batch.exclude("value_target", "advantage") == kept).all()


@pytest.mark.parametrize("distribution", [Categorical, OneHotCategorical])
def test_index_and_one_hot_actions(distribution):
    value, pi, batch = mlp(), mlp(), experience(3, ACTIONS)
    expected = naive(batch, value, pi)
    estimator = estimator_of(value, actor_network=actor(pi, distribution))
    index, one_hot = batch["action"], nn.functional.one_hot(batch["action"], ACTIONS)
    for action in (index, index.unsqueeze(-1), index.int(), one_hot, one_hot.bool(), one_hot.float()):
        batch["action"] = action
        assert_near(estimator.value_estimate(batch), expected)


def test_any_batch_shape_and_time_dimension():
    value, pi, batch = mlp(), mlp(), experience(6, 5)
    estimator = estimator_of(value, pi)
    expected = naive(batch, value, pi)
    assert_near(estimator.value_estimate(batch.reshape(2, 3, 5)), expected.reshape(2, 3, 5, 1))
    assert_near(estimator.value_estimate(batch[0]), expected[0])
    across, expected = batch.transpose(0, 1).contiguous(), expected.transpose(0, 1)
    for time_dim in (0, -2):
        assert_near(estimator.value_estimate(across, time_dim=time_dim), expected)
        fixed = estimator_of(value, pi, time_dim=time_dim)
        assert_near(fixed(across.clone())["value_target"], expected)
    named = TensorDict(across.to_dict(), across.shape, names=["time", None])
    assert_near(estimator(named)["value_target"], expected)


# --- parameters


def test_which_parameters_are_used_for_what():
    nets = {name: mlp() for name in ("own", "params", "target")}
    pi, batch = mlp(), experience(3, 9)
    estimator = estimator_of(nets["own"], pi)
    of = {name: TensorDict.from_module(critic(net)) for name, net in nets.items() if name != "own"}

    def check(result, target, value):
        expected = naive(batch, nets[target], pi)
        assert_near(result["value_target"], expected)
        advantage = expected - expected_value(batch["observation"], nets[value], pi)
        assert_near(result["advantage"], advantage)

    check(estimator(batch.clone()), "own", "own")
    check(estimator(batch.clone(), params=of["params"]), "params", "params")
    check(estimator(batch.clone(), params=of["params"], target_params=of["target"]), "target", "params")
    check(estimator(batch.clone(), target_params=of["target"]), "target", "own")
    for target, arguments in (("own", {}), ("target", {"target_params": of["target"]})):
        result = estimator.value_estimate(batch, **arguments)
        assert_near(result, naive(batch, nets[target], pi))


# --- unused and masked values must not leak


def test_masked_steps_end_a_trajectory_and_may_hold_anything():
    value, pi, batch = mlp(), mlp(), experience(4, 9)
    lengths = [9, 5, 1, 8]
    valid = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    expected = [naive(batch[i : i + 1, :length], value, pi)[0] for i, length in enumerate(lengths)]
    for key in ("observation", "action_log_prob", ("next", "observation"), ("next", "reward")):
        batch[key][~valid] = math.nan
    batch["next", "observation"][batch["next", "terminated"].squeeze(-1)] = math.inf
    batch["collector", "mask"] = valid
    result = estimator_of(value, pi)(batch)["value_target"]
    assert result.isfinite().all() and batch["advantage"].isfinite().all()
    for row, length, of_row in zip(result, lengths, expected, strict=True):
        assert_near(row[:length], of_row)


# --- bad input


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("action_log_prob", None, KeyError, r"'action_log_prob'; a ProbabilisticActor\(return_log_prob=True\) writes"),
        ("action_log_prob", torch.zeros(3, 9, 4), ValueError, r"has shape \(3, 9, 4\), expected \(3, 9\)"),
        (("next", "reward"), None, KeyError, r"no entry \('next', 'reward'\); the environment writes it"),
        ("action", torch.full((3, 9), ACTIONS), ValueError, r"indices that are not in \[0, 4\)"),
    ],
)
def test_bad_batches(key, value, error, message):
    batch = experience(3, 9).exclude(key)
    if value is not None:
        batch[key] = value
    with pytest.raises(error, match=message):
        estimator_of(pi=mlp()).value_estimate(batch)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"RetraceEstimator\(gamma=1.1\): gamma must be in \[0, 1\]"):
        estimator_of(gamma=1.1)
    with pytest.raises(TypeError, match="actor_network must be a ProbabilisticActor"):
        estimator_of(actor_network=critic())
    with pytest.raises(ValueError, match=r"policy have shape \(3, 9, 2\) and the action values"):
        estimator_of(pi=mlp(2))(experience(3, 9))
    with pytest.raises(KeyError, match="no entry 'action_value'; value_network writes it"):
        estimator_of(value_network=critic(out_key="q"))(experience(3, 9))
    with pytest.raises(ValueError, match=r"must have the shape \[\*B, T\]"):
        estimator_of()(experience(3, 9)[0, 0])


# --- in DQNLoss


def dqn(network, *, actor_network=None, **arguments):
    loss = averaged(DQNLoss(network, action_space="categorical", delay_value=True, **arguments))
    estimator = estimator_of(value_network=network, actor_network=actor_network)
    loss.make_value_estimator(estimator)
    return loss, estimator


def perturb(params):
    params.apply_(lambda x: x.data.add_(torch.randn_like(x)))


def test_the_name_in_the_registry():
    class RetraceDQNLoss(DQNLoss):
        SUPPORTED_VALUE_ESTIMATORS = (*DQNLoss.SUPPORTED_VALUE_ESTIMATORS, "retrace")

    network, batch = critic(), experience(3, 9)
    expected, _ = dqn(network)
    loss = averaged(RetraceDQNLoss(network, action_space="categorical", delay_value=True))
    estimator = build_value_estimator(loss, "retrace", gamma=GAMMA)
    assert isinstance(estimator, RetraceEstimator) and estimator.value_network is loss.value_network
    loss.set_keys(reward="gain")
    loss.make_value_estimator("retrace", gamma=GAMMA)
    assert loss.value_estimator.tensor_keys.reward == "gain"
    renamed = batch.clone()
    renamed["next", "gain"] = renamed["next"].pop("reward")
    torch.testing.assert_close(loss(renamed)["loss"], expected(batch)["loss"])


@pytest.mark.usefixtures("from_scratch")
def test_in_one_graph():
    batch = experience(3, 9)
    loss, _ = dqn(critic(), actor_network=actor())
    eager = loss(batch.clone())["loss"]
    compiled = torch.compile(lambda batch: loss(batch)["loss"], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(batch), eager)


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
    loss, estimator = dqn(qvalue_actor)
    with pytest.raises(ValueError, match=r"replaced the actions taken, 'action', by greedy actions"):
        loss(batch.clone())
    # outside the loss the estimator works, also with the entries that a collector stored
    expected = naive(batch, value)
    assert_near(estimator(qvalue_actor(batch.clone()).detach().update(batch))["value_target"], expected)
    assert_near(estimator.value_estimate(batch), expected)
    # the first module writes values only
    plain, _ = dqn(qvalue_actor[0])
    result = plain(batch.clone())["loss"]
    # a copy of the action works, too
    batch["taken"] = batch["action"]
    estimator.set_keys(action="taken")
    torch.testing.assert_close(loss(batch)["loss"], result)


def test_double_dqn():
    """V(x_{t+1}) is the value under the target network of the action that the online network would take."""
    value, batch = mlp(), experience(5, 1)
    qvalue_actor = QValueActor(value, in_keys=["observation"], action_space="categorical")
    loss, estimator = dqn(qvalue_actor, double_dqn=True)
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
