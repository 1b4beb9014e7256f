"""Retrace as a TorchRL value estimator, against a loop over single steps, and as the targets of a DQN."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.modules import MaskedCategorical, NormalParamExtractor, OneHotCategorical, ProbabilisticActor, QValueActor
from torchrl.objectives import A2CLoss, DiscreteSACLoss, DQNLoss, SoftUpdate
from torchrl.objectives.utils import build_value_estimator, default_value_kwargs
from torchrl.objectives.value import TD0Estimator

from tests.objectives.trajectories import q_ret_of
from torchrl_replay_ext import RetraceEstimator

OBSERVATION, ACTIONS, GAMMA = 3, 4, 0.9


def mlp(outputs=ACTIONS):
    return nn.Sequential(nn.Linear(OBSERVATION, 8), nn.Tanh(), nn.Linear(8, outputs)).to(torch.float64)


def critic(network=None, in_key="observation", out_key="action_value"):
    return TensorDictModule(network or mlp(), in_keys=[in_key], out_keys=[out_key])


def actor(network=None, distribution=Categorical, in_key="observation", **arguments):
    module = TensorDictModule(network or mlp(), in_keys=[in_key], out_keys=["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=distribution, **arguments)


def estimator_of(value=None, pi=None, **arguments):
    """An estimator for networks of Q and π, or the greedy policy."""
    of_pi = {"policy": "greedy"} if pi is None else {"actor_network": actor(pi)}
    return RetraceEstimator(**{"gamma": GAMMA, "value_network": critic(value), **of_pi, **arguments})


def experience(*shape, seed=0):
    """Rows [*shape] of a random policy, with terminated and truncated episodes."""
    g = torch.Generator().manual_seed(seed)
    double = {"dtype": torch.float64, "generator": g}
    done = torch.rand(*shape, 1, generator=g) < 0.25
    logits = torch.randn(*shape, ACTIONS, **double)
    action = torch.multinomial(logits.softmax(-1).reshape(-1, ACTIONS), 1, generator=g).reshape(*shape, 1)
    return TensorDict(
        {
            "observation": torch.randn(*shape, OBSERVATION, **double),
            "action": action.squeeze(-1),
            "action_log_prob": logits.log_softmax(-1).gather(-1, action).squeeze(-1),
            "next": {
                "observation": torch.randn(*shape, OBSERVATION, **double),
                "reward": torch.randn(*shape, 1, **double),
                "done": done,
                "terminated": done & (torch.rand(*shape, 1, generator=g) < 0.5),
            },
        },
        shape,
    )


@torch.no_grad()
def naive(batch, value, policy=None, *, lmbda=1.0, c=1.0, power=1.0):
    """Q^ret [S, T, 1] by the loop of Algorithm 2; without ``policy``, for the greedy policy."""

    def probabilities(x):
        if policy is not None:
            return policy(x).softmax(-1)
        return nn.functional.one_hot(value(x).argmax(-1), ACTIONS).to(x.dtype)

    x, behind, action = batch["observation"], batch["next", "observation"], batch["action"].unsqueeze(-1)
    rho = probabilities(x).gather(-1, action) / batch["action_log_prob"].exp().unsqueeze(-1)
    v_next = (probabilities(behind) * value(behind)).sum(-1, keepdim=True)
    return q_ret_of(batch, GAMMA, rho**power, value(x).gather(-1, action), v_next, lmbda=lmbda, c=c)


def assert_near(result, expected):
    assert result.sub(expected).abs().max() < 1e-10


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


@pytest.mark.parametrize("action", ["[S, T]", "[S, T, 1]", "int32", "one-hot", "one-hot bool", "one-hot float"])
@pytest.mark.parametrize("distribution", [Categorical, OneHotCategorical])
def test_index_and_one_hot_actions(action, distribution):
    value, pi, batch = mlp(), mlp(), experience(3, ACTIONS)
    expected = naive(batch, value, pi)
    index = batch["action"]
    one_hot = nn.functional.one_hot(index, ACTIONS)
    batch["action"] = {
        "[S, T]": index,
        "[S, T, 1]": index.unsqueeze(-1),
        "int32": index.to(torch.int32),
        "one-hot": one_hot,
        "one-hot bool": one_hot.to(torch.bool),
        "one-hot float": one_hot.to(torch.float32),
    }[action]
    estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(value), actor_network=actor(pi, distribution))
    assert_near(estimator.value_estimate(batch), expected)


def test_the_behaviour_may_be_stored_as_log_probabilities_or_as_logits():
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    behaviour = mlp()
    logits = behaviour(batch["observation"]).detach()
    batch["action_log_prob"] = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    expected = naive(batch, value, pi)
    estimator = estimator_of(value, pi)
    for changed in (
        {"action_log_prob": batch["action_log_prob"].unsqueeze(-1)},
        {"action_log_prob": None, "logits": logits - 7},
        # if the batch has both entries, the log-probability is used
        {"logits": torch.zeros_like(logits)},
    ):
        other = batch.clone().update({k: v for k, v in changed.items() if v is not None})
        other = other.exclude(*(k for k, v in changed.items() if v is None))
        assert_near(estimator.value_estimate(other), expected)
    batch["mu", "probs"] = logits.softmax(-1)
    del batch["action_log_prob"]
    estimator.set_keys(behaviour=("mu", "probs"))
    assert_near(estimator.value_estimate(batch), expected)


def test_any_batch_shape_and_time_dimension():
    value, pi, batch = mlp(), mlp(), experience(6, 5)
    estimator = estimator_of(value, pi)
    expected = naive(batch, value, pi)

    def same(result, shape):
        return bool(result.sub(shape(expected)).abs().max() < 1e-10)

    assert same(estimator.value_estimate(batch.reshape(2, 3, 5)), lambda x: x.reshape(2, 3, 5, 1))
    assert same(estimator.value_estimate(batch[0]), lambda x: x[0])
    across = batch.transpose(0, 1).contiguous()
    for time_dim in (0, -2):
        assert same(estimator.value_estimate(across, time_dim=time_dim), lambda x: x.transpose(0, 1))
        fixed = estimator_of(value, pi, time_dim=time_dim)
        assert same(fixed(across.clone())["value_target"], lambda x: x.transpose(0, 1))
    named = TensorDict(across.to_dict(), across.shape, names=["time", None])
    assert same(estimator(named)["value_target"], lambda x: x.transpose(0, 1))


def test_actions_that_are_not_allowed():
    """An action with π = 0 may have an infinite Q."""
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    allowed = torch.tensor([True, True, False, True])
    batch["action"] = batch["action"].clone()
    batch["action"][batch["action"] == 2] = 3

    class Masked(nn.Module):
        def __init__(self, network, fill):
            super().__init__()
            self.network, self.fill = network, fill

        def forward(self, x):
            return self.network(x).masked_fill(~allowed, self.fill)

    expected = naive(batch, Masked(value, 0.0), Masked(pi, -math.inf))
    distribution = lambda logits: MaskedCategorical(logits=logits, mask=allowed.expand_as(logits))  # noqa: E731
    for fill in (-math.inf, math.nan, torch.finfo(torch.float64).min):
        estimator = RetraceEstimator(
            gamma=GAMMA, value_network=critic(Masked(value, fill)), actor_network=actor(pi, distribution)
        )
        assert_near(estimator.value_estimate(batch), expected)


# --- parameters


def test_which_parameters_are_used_for_what():
    nets = {name: mlp() for name in ("own", "params", "target")}
    pi, batch = mlp(), experience(3, 9)
    estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(nets["own"]), actor_network=actor(pi))
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


def test_next_values_may_be_given():
    value, pi, batch = mlp(), mlp(), experience(3, 1)
    estimator = estimator_of(value, pi)
    given = torch.randn(3, 1, 1, dtype=torch.float64)
    expected = batch["next", "reward"] + GAMMA * given.masked_fill(batch["next", "terminated"], 0.0)
    torch.testing.assert_close(estimator.value_estimate(batch, next_value=given), expected)
    with pytest.raises(ValueError, match="next_state_value has shape"):
        estimator.value_estimate(batch, next_value=given.squeeze(-1))


def test_no_gradients_flow():
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    batch["next", "reward"].requires_grad_()
    params = TensorDict.from_module(critic(mlp()))
    result = estimator_of(value, pi)(batch, params=params)
    assert not result["value_target"].requires_grad and not result["advantage"].requires_grad
    assert all(p.requires_grad for p in (*value.parameters(), *pi.parameters()))


# --- unused and masked values must not leak


@pytest.mark.parametrize("mask_shape", [(4, 9), (4, 9, 1)])
def test_masked_steps_end_a_trajectory(mask_shape):
    value, pi, batch = mlp(), mlp(), experience(4, 9)
    lengths = torch.tensor([9, 5, 1, 8])
    valid = torch.arange(9) < lengths.unsqueeze(-1)
    estimator = estimator_of(value, pi)
    expected = [naive(batch[i : i + 1, :length], value, pi)[0] for i, length in enumerate(lengths.tolist())]
    batch["collector", "mask"] = valid.reshape(mask_shape)
    batch["next", "reward"][~valid] = math.nan
    result = estimator(batch)["value_target"]
    for row, length, of_row in zip(result, lengths.tolist(), expected, strict=True):
        assert_near(row[:length], of_row)
    # if all steps are valid, the mask has no effect
    batch = experience(4, 9)
    kept = estimator.value_estimate(batch)
    batch["collector", "mask"] = torch.ones(mask_shape, dtype=torch.bool)
    assert torch.equal(estimator.value_estimate(batch), kept)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["actor", "greedy"])
@pytest.mark.parametrize("mu_key", ["action_log_prob", "logits"])
def test_masked_steps_and_terminal_observations_may_hold_anything(bad, policy, mu_key):
    value, pi, batch = mlp(), mlp(), experience(4, 9)
    valid = torch.arange(9) < torch.tensor([9, 5, 1, 8]).unsqueeze(-1)
    batch["collector", "mask"] = valid
    if mu_key == "logits":
        batch["logits"] = torch.randn(4, 9, ACTIONS, dtype=torch.float64)
        del batch["action_log_prob"]
    estimator = estimator_of(value, pi, policy=policy)
    results = []
    for content in (0.0, bad):
        for key in ("observation", mu_key, ("next", "observation"), ("next", "reward")):
            batch[key][~valid] = content
        batch["next", "observation"][batch["next", "terminated"].squeeze(-1)] = content
        estimate = estimator.value_estimate(batch)
        assert estimate.isfinite().all()
        results.append(estimate)
    torch.testing.assert_close(*results)


# --- the conventions of TorchRL's estimators


def test_keys():
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    expected = naive(batch, value, pi)
    renamed = TensorDict(
        {
            "agent": {"x": batch["observation"], "a": batch["action"]},
            "mu": batch["action_log_prob"],
            "next": {
                "agent": {"x": batch["next", "observation"], "r": batch["next", "reward"]},
                "d": batch["next", "done"],
                "t": batch["next", "terminated"],
            },
        },
        batch.shape,
    )
    estimator = RetraceEstimator(
        gamma=GAMMA,
        value_network=critic(value, ("agent", "x"), ("agent", "q")),
        actor_network=actor(pi, in_key=("agent", "x")),
    )
    estimator.set_keys(
        action=("agent", "a"),
        action_value=("agent", "q"),
        sample_log_prob="mu",
        reward=("agent", "r"),
        done="d",
        terminated="t",
        value_target="target",
        advantage=("agent", "advantage"),
        value="ignored",
    )
    assert_near(estimator(renamed)["target"], expected)
    assert renamed["agent", "advantage"].shape == (3, 9, 1)
    assert estimator.out_keys == [("agent", "advantage"), "target"]
    assert estimator.in_keys == [
        ("agent", "x"),
        ("agent", "a"),
        "mu",
        ("next", "agent", "r"),
        ("next", "d"),
        ("next", "t"),
        ("next", "agent", "x"),
    ]
    with pytest.raises(KeyError, match="not an accepted tensordict key"):
        estimator.set_keys(state="x")


def test_dispatch():
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    estimator = estimator_of(value, pi)
    entries = {key if isinstance(key, str) else "_".join(key): batch[key] for key in estimator.in_keys}
    advantage, target = estimator(**entries)
    expected = estimator(batch)
    assert torch.equal(advantage, expected["advantage"])
    assert torch.equal(target, expected["value_target"])


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
    loss = RetraceDQNLoss(network, action_space="categorical", delay_value=True)
    SoftUpdate(loss, eps=0.9)
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
    state_value = TensorDictModule(mlp(1), in_keys=["observation"], out_keys=["state_value"])
    for functional in (True, False):
        loss = OwnLoss(actor(pi, return_log_prob=True), state_value, functional=functional)
        estimator = build_value_estimator(loss, "retrace", value_network=critic(value), gamma=GAMMA)
        for _ in range(2):
            assert_near(estimator.value_estimate(batch), naive(batch, value, pi))
            # change the parameters of the actor
            with torch.no_grad():
                pi[2].weight.mul_(-1)


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_in_one_graph():
    batch = experience(3, 9)
    loss, _ = dqn(critic(), actor_network=actor())
    eager = loss(batch.clone())["loss"]
    compiled = torch.compile(lambda batch: loss(batch)["loss"], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch), eager)


# --- unsupported losses


def state_critic():
    return TensorDictModule(mlp(1), in_keys=["observation"], out_keys=["state_value"])


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


def dqn(network, *, policy="actor", actor_network=None, **arguments):
    loss = DQNLoss(network, action_space="categorical", **{"delay_value": True, **arguments})
    SoftUpdate(loss, eps=0.9)
    estimator = RetraceEstimator(gamma=GAMMA, value_network=network, actor_network=actor_network, policy=policy)
    loss.make_value_estimator(estimator)
    return loss, estimator


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
        SoftUpdate(loss, eps=0.9)
        perturb(loss.target_value_network_params)
    used = loss.value_network if template else network
    estimator = estimator_of(pi=pi if policy == "actor" else None, value_network=used)
    loss.make_value_estimator(estimator)
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
    assert (
        estimator(qvalue_actor(batch.clone()).detach().update(batch))["value_target"].sub(expected).abs().max() < 1e-10
    )
    assert_near(estimator.value_estimate(batch), expected)
    # the first module writes values only; the loss must have the same module
    mixed, _ = dqn(qvalue_actor, policy="greedy")
    mixed.make_value_estimator(RetraceEstimator(gamma=0.9, value_network=qvalue_actor[0], policy="greedy"))
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


# --- bad input


def broken(**changes):
    """A batch in which entries, named with "__" for "next", are replaced or, if None, missing."""
    batch = experience(3, 9)
    for key, change in changes.items():
        key = ("next", key[2:]) if key.startswith("__") else key
        value = batch.get(key)
        batch = batch.exclude(key)
        if change is not None:
            batch[key] = change(value)
    return batch


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"observation": None}, KeyError, "no entry 'observation'; the networks read it; the environment writes it"),
        ({"__observation": None}, KeyError, r"no entry \('next', 'observation'\); the networks read it"),
        ({"__reward": None}, KeyError, r"no entry \('next', 'reward'\); the environment writes it"),
        ({"__done": None}, KeyError, r"no entry \('next', 'done'\)"),
        ({"__terminated": None}, KeyError, r"no entry \('next', 'terminated'\)"),
        ({"action": None}, KeyError, "no entry 'action'; the policy writes it, and the collector stores it"),
        (
            {"action_log_prob": None},
            KeyError,
            r"no entry 'logits'; nor 'action_log_prob'.*ProbabilisticActor\(return_log_prob=True\).*collector stores",
        ),
        ({"__reward": lambda x: x.squeeze(-1)}, ValueError, r"'reward'\) has shape \(3, 9\), expected \(3, 9, 1\)"),
        ({"__done": lambda x: x.squeeze(-1)}, ValueError, r"'done'\) has shape \(3, 9\), expected \(3, 9, 1\)"),
        (
            {"action_log_prob": lambda x: x.unsqueeze(-1).expand(3, 9, ACTIONS)},
            ValueError,
            r"'action_log_prob' has shape \(3, 9, 4\), expected \(3, 9\)",
        ),
        (
            {"action_log_prob": None, "logits": lambda _: torch.zeros(3, 9, 2)},
            ValueError,
            r"'logits' has shape \(3, 9, 2\), expected \(3, 9, 4\)",
        ),
        ({"action": lambda x: x.double()}, ValueError, r"'action' has shape \(3, 9\) and dtype torch.float64"),
        ({"action": lambda x: x.unsqueeze(-1).expand(3, 9, 2)}, ValueError, r"'action' has shape \(3, 9, 2\)"),
        ({"action": lambda x: x - 1}, ValueError, r"indices that are not in \[0, 4\)"),
        ({"action": lambda x: x + ACTIONS}, ValueError, r"indices that are not in \[0, 4\)"),
        ({"action": lambda x: x.unsqueeze(-1).expand(3, 9, ACTIONS)}, ValueError, "is not one-hot"),
        ({"steps_to_next_obs": lambda _: torch.ones(3, 9, 1)}, ValueError, "'steps_to_next_obs', so its transitions"),
    ],
)
def test_bad_batches(changes, error, message):
    estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(), actor_network=actor())
    for function in (estimator, estimator.value_estimate):
        with pytest.raises(error, match=message):
            function(broken(**changes))


def test_a_batch_without_time():
    estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(), actor_network=actor())
    with pytest.raises(ValueError, match=r"must have the shape \[\*B, T\]"):
        estimator(experience(3, 9)[0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gamma": 1.1}, r"RetraceEstimator\(gamma=1.1\): gamma must be in \[0, 1\]"),
        ({"lmbda": -0.1}, r"\(lmbda=-0.1\): lmbda must be in \[0, 1\]"),
        ({"rho_thresh": -1.0}, r"\(rho_thresh=-1.0\): rho_thresh must be >= 0"),
        ({"rho_power": 0.0}, r"\(rho_power=0.0\): rho_power must be > 0 and finite"),
        ({"policy": "softmax"}, r"\(policy='softmax'\): policy must be 'actor' or 'greedy'"),
    ],
)
def test_arguments_out_of_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        RetraceEstimator(**{"gamma": GAMMA, "value_network": critic(), "actor_network": actor(), **arguments})


def test_networks_that_do_not_fit():
    for wrong in (None, critic()):
        with pytest.raises(TypeError, match="actor_network must be a ProbabilisticActor"):
            RetraceEstimator(gamma=GAMMA, value_network=critic(), actor_network=wrong)
    batch = experience(3, 9)
    gaussian = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(mlp(2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=Normal,
    )
    for wrong, found in ((gaussian, "None"), (actor(mlp(2)), r"\(3, 9, 2\)")):
        estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(), actor_network=wrong)
        with pytest.raises(ValueError, match=f"logits of the policy have shape {found} and the action values"):
            estimator(batch)
    estimator = RetraceEstimator(gamma=GAMMA, value_network=critic(out_key="q"), actor_network=actor())
    with pytest.raises(
        KeyError, match=r"no entry 'action_value'; value_network writes it; .*set_keys\(action_value=\)"
    ):
        estimator(batch)
    several = broken(action=lambda x: torch.ones(*x.shape, ACTIONS, dtype=torch.bool))
    with pytest.raises(ValueError, match="is not one-hot"):
        RetraceEstimator(gamma=GAMMA, value_network=critic(), policy="greedy")(several)
