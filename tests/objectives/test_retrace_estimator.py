"""Retrace as a TorchRL value estimator, against a loop over single steps."""

import math

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.modules import MaskedCategorical, NormalParamExtractor, OneHotCategorical, ProbabilisticActor

from tests.objectives.q_networks import ACTIONS, GAMMA, actor, assert_near, critic, estimator_of, experience, mlp, naive


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


def test_the_behaviour_may_be_stored_as_log_probabilities_or_as_logits():
    value, pi, batch = mlp(), mlp(), experience(3, 9)
    logits = mlp()(batch["observation"]).detach()
    batch["action_log_prob"] = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    expected = naive(batch, value, pi)
    estimator = estimator_of(value, pi)
    without = batch.exclude("action_log_prob")
    for other in (
        batch.clone().set("action_log_prob", batch["action_log_prob"].unsqueeze(-1)),
        without.clone().set("logits", logits - 7),
        # if the batch has both entries, the log-probability is used
        batch.clone().set("logits", torch.zeros_like(logits)),
    ):
        assert_near(estimator.value_estimate(other), expected)
    estimator.set_keys(behaviour=("mu", "probs"))
    without["mu", "probs"] = logits.softmax(-1)
    assert_near(estimator.value_estimate(without), expected)


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
        estimator = estimator_of(Masked(value, fill), actor_network=actor(pi, distribution))
        assert_near(estimator.value_estimate(batch), expected)


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
    read = set(renamed.keys(True, True))
    estimator = estimator_of(
        value_network=critic(value, ("agent", "x"), ("agent", "q")), actor_network=actor(pi, in_key=("agent", "x"))
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
    assert set(estimator.in_keys) == read
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
    estimator = estimator_of(pi=mlp())
    for function in (estimator, estimator.value_estimate):
        with pytest.raises(error, match=message):
            function(broken(**changes))


def test_a_batch_without_time():
    with pytest.raises(ValueError, match=r"must have the shape \[\*B, T\]"):
        estimator_of()(experience(3, 9)[0, 0])


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
        estimator_of(pi=mlp(), **arguments)


def test_networks_that_do_not_fit():
    for wrong in (None, critic()):
        with pytest.raises(TypeError, match="actor_network must be a ProbabilisticActor"):
            estimator_of(actor_network=wrong)
    batch = experience(3, 9)
    gaussian = ProbabilisticActor(
        TensorDictModule(
            nn.Sequential(mlp(2), NormalParamExtractor()), in_keys=["observation"], out_keys=["loc", "scale"]
        ),
        in_keys=["loc", "scale"],
        distribution_class=Normal,
    )
    for wrong, found in ((gaussian, "None"), (actor(mlp(2)), r"\(3, 9, 2\)")):
        with pytest.raises(ValueError, match=f"logits of the policy have shape {found} and the action values"):
            estimator_of(actor_network=wrong)(batch)
    with pytest.raises(
        KeyError, match=r"no entry 'action_value'; value_network writes it; .*set_keys\(action_value=\)"
    ):
        estimator_of(value_network=critic(out_key="q"))(batch)
