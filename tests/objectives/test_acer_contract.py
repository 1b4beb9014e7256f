"""Arguments, networks, entries, state and copies of both losses of ACER, mostly as TorchRL tests its own losses."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, TanhNormal
from torchrl.objectives import SoftUpdate

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.acer_settings import (
    LAYOUTS,
    TIS,
    average_of,
    both,
    each_layout,
    has_shared_parameters,
    name_of,
    of_both,
    setting_of,
)
from tests.objectives.trajectories import assert_same, assert_same_gradients, gradients, losses, refuses, set_average
from torchrl_replay_ext import ACERLoss


def flat(key: NestedKey) -> str:
    return key if isinstance(key, str) else "_".join(key)


# --- state


@both
def test_the_state_has_networks_average_policy_and_weights_of_losses(acer):
    loss, other, batch = setting_of(acer).loss, setting_of(acer, entropy_coeff=2, critic_coeff=3).loss, acer.rows()
    other.load_state_dict(loss.state_dict())
    assert_same(other(batch), loss(batch))


def pickled(loss: Any) -> Any:
    return pickle.loads(pickle.dumps(loss))


@pytest.mark.parametrize(
    ("acer", "arguments", "duplicate"),
    [
        *((*layout, pickled) for layout in LAYOUTS),
        # copy.deepcopy of TorchRL's loss modules does not preserve parameters that two modules share
        *((*layout, copy.deepcopy) for layout in LAYOUTS if not has_shared_parameters(layout[1])),
        (discrete, {"trunk": "hidden"}, copy.deepcopy),
    ],
    ids=name_of,
)
def test_copies(acer, arguments, duplicate):
    setting, batch = acer.Setting(**arguments), acer.rows()
    setting.loss.c = 0.75
    twin = duplicate(setting.loss)
    torch.manual_seed(1)
    expected = setting.loss(batch)
    torch.manual_seed(1)
    result = twin(batch)
    assert_same(result, expected)
    mine, theirs = list(setting.loss.parameters()), list(twin.parameters())
    assert not {id(p) for p in mine} & {id(p) for p in theirs}
    assert_same_gradients(gradients(losses(result), theirs), gradients(losses(expected), mine))
    SoftUpdate(twin, eps=0.75).step()
    twin.c, twin.entropy_coeff = 0.25, 2
    assert (setting.loss.c, float(setting.loss.entropy_coeff)) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("acer", "arguments", "of_rows"),
    [
        (discrete, {"trunk": "hidden"}, {}),
        (continuous, {"statistics": continuous.BOTH, "distribution": TanhNormal}, {"squashed": True}),
    ],
    ids=["discrete", "continuous"],
)
@pytest.mark.usefixtures("from_scratch")
def test_in_one_graph(acer, arguments, of_rows):
    """A single float32 graph has the values and gradients of eager code, also for other data."""
    setting = acer.Setting(**arguments)
    setting.loss.to(torch.float32)
    batch = acer.rows(mask=True, **of_rows).apply(lambda x: x.float() if x.is_floating_point() else x)

    def step(batch: TensorDict) -> tuple[torch.Tensor, ...]:
        result = setting.loss(batch)
        found = torch.autograd.grad(losses(result), setting.parameters, allow_unused=True)
        return *result.detach().values(), *found, batch["td_error"]

    compiled = torch.compile(step, fullgraph=True)
    with torch._dynamo.config.patch(trace_autograd_ops=True), torch._inductor.config.patch(fallback_random=True):
        for stance in ("default", "fail_on_recompile"):
            torch.manual_seed(1)
            expected = step(batch.clone())
            torch.manual_seed(1)
            with torch.compiler.set_stance(stance):
                result = compiled(batch.clone())
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
            batch["next", "reward"] += 1


# --- assignments to arguments


# values of the arguments of both losses, and values that are refused
VALUES = {
    "gamma": ([0.5], [1.1, None]),
    "lmbda": ([0.5], [-0.1]),
    "c": ([0.25], [math.nan]),
    "delta": ([0.01], [-0.5]),
    "retrace_thresh": ([0.25], ["1"]),
    "entropy_coeff": ([0.125], [-1e-3, True]),
    "critic_coeff": ([2.0, torch.tensor([2])], [math.inf, torch.tensor(-1.0), torch.ones(2)]),
    "trust_region": ([False], [1]),
    "reduction": (["sum"], ["median"]),
}
VALUES_OF = {
    discrete: {
        **VALUES,
        "statistics": (["logits"], ["scores", None]),
        "returns": (["importance_sampling"], ["monte_carlo", TIS]),
    },
    continuous: {
        **VALUES,
        "statistics": ([["loc", "scale"]], ["scores", None, ("scale",)]),
        "returns": ([TIS], ["monte_carlo"]),
        "value_coeff": ([2.0], [-1.0]),
        "num_samples": ([5], [0, 2.0, True]),
        "use_q_opc": ([False], ["no"]),
    },
}


def values(*, valid: bool) -> Any:
    """Parameters of tests: each loss with each of its arguments, and with each of these values."""
    every = [
        (acer, key, value)
        for acer, arguments in VALUES_OF.items()
        for key, values in arguments.items()
        for value in values[not valid]
    ]
    return pytest.mark.parametrize(("acer", "key", "value"), every, ids=name_of)


@values(valid=True)
def test_assigned_arguments_are_those_of_the_constructor(acer, key, value):
    setting, other, batch = setting_of(acer), setting_of(acer, **{key: value}), acer.rows()
    networks = {name: x for name, x in other.loss.state_dict().items() if "_params." in name}
    setting.loss.load_state_dict(networks, strict=False)
    before, expected = setting.loss(batch.clone()), other.loss(batch.clone())
    setattr(setting.loss, key, value)
    after = setting.loss(batch.clone())
    assert any(not torch.equal(before[name], x) for name, x in expected.items())
    assert_same(after, expected)


@values(valid=False)
def test_assignments_are_checked_as_the_constructor_checks(acer, key, value):
    with pytest.raises((ValueError, TypeError)) as of_constructor:
        acer.Setting(**{key: value})
    loss = acer.Setting().loss
    before = copy.copy(getattr(loss, key))
    with pytest.raises((ValueError, TypeError)) as of_assignment:
        setattr(loss, key, value)
    assert f"{type(loss).__name__}({key}=" in str(of_assignment.value)
    assert str(of_assignment.value) == str(of_constructor.value)
    assert getattr(loss, key) == before


def test_weights_of_losses_change_without_a_new_graph():
    """They stay buffers, whatever number is assigned."""
    setting, batch = discrete.Setting(), discrete.rows()
    torch._dynamo.reset()
    compiled = torch.compile(setting.loss, fullgraph=True, backend="eager")

    def compare() -> None:
        with torch.no_grad():
            expected, result = setting.loss(batch.clone()), compiled(batch.clone())
        assert_same(result, expected, 1e-9)

    compare()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in (0.75, 0.0, 3):
            setting.loss.entropy_coeff = setting.loss.critic_coeff = number
            compare()
            assert setting.loss.state_dict()["entropy_coeff"] == number


# --- networks and parameters


@each_layout
def test_each_parameter_is_listed_once_and_is_that_of_the_network(acer, arguments):
    setting = setting_of(acer, **arguments)
    listed = sorted(id(x) for x in setting.loss.parameters())
    assert listed == sorted(id(x) for x in setting.parameters)
    assert len(dict(setting.loss.named_parameters())) == len(listed)


@each_layout
def test_reset_parameters(acer, arguments):
    setting, batch = setting_of(acer, **arguments), acer.rows()
    loss, parameters = setting.loss, list(setting.loss.parameters())
    updater = SoftUpdate(loss, eps=0.75)
    with torch.no_grad():
        for x in [*parameters, *average_of(loss).values(True, True)]:
            x += 1000
    loss.reset_parameters_recursive()
    assert [id(x) for x in loss.parameters()] == [id(x) for x in parameters]
    assert all(x.abs().max() < 10 for x in parameters)
    # the average policy starts as the policy
    for key, x in loss.actor_network_params.items(True, True):
        assert torch.equal(average_of(loss).get(key), x)
    result = loss(batch)
    assert result["kl"].abs() < 1e-12
    # the networks of the user are reset, and the updater still works
    assert any(g.any() for g in gradients(losses(result), setting.parameters))
    with torch.no_grad():
        for x in parameters:
            x += 1
    updater.step()
    assert loss(batch)["kl"].abs() > 1e-6


def test_reset_parameters_before_lazy_layers_have_shapes():
    actor = TensorDictModule(nn.LazyLinear(4, dtype=torch.float64), in_keys=["observation"], out_keys=["logits"])
    critic = TensorDictModule(nn.LazyLinear(4, dtype=torch.float64), in_keys=["observation"], out_keys=["action_value"])
    loss = ACERLoss(ProbabilisticActor(actor, in_keys=["logits"], distribution_class=Categorical), critic)
    loss.reset_parameters_recursive()
    SoftUpdate(loss, eps=0.75)
    assert loss(discrete.rows())["kl"].abs() < 1e-12


# --- keys


@both
def test_what_the_constructor_decides_is_named_where_another_way_is_tried(acer):
    loss = acer.Setting().loss
    with pytest.raises(AttributeError, match="in_keys"):
        loss.in_keys = ["observation"]
    for ask in (loss.make_value_estimator, lambda: loss.value_estimator):
        with pytest.raises(NotImplementedError, match="gamma=, lmbda=, returns="):
            ask()


@both
def test_the_loss_reads_its_in_keys_and_writes_its_out_keys(acer):
    setting, batch = setting_of(acer), acer.rows()
    # an entry that the loss does not name may hold anything
    batch["unrelated"] = torch.full(batch.shape, torch.nan)
    given = batch.select(*setting.loss.in_keys)
    expected, result = setting.loss(batch), setting.loss(given)
    assert list(result.keys()) == setting.loss.out_keys
    assert_same(result, expected)
    assert all(x.shape == () and x.requires_grad == key.startswith("loss_") for key, x in result.items())
    assert set(given.keys(True, True)) == {*setting.loss.in_keys, "td_error"}
    # the entries as keyword arguments
    values = setting.loss(**{flat(key): batch[key] for key in setting.loss.in_keys})
    torch.testing.assert_close(values, (*expected.values(),), rtol=0, atol=0)
    names = ["loss_actor", "loss_qvalue", *(["loss_value"] if acer is continuous else []), "loss_entropy"]
    assert setting.loss.out_keys[: len(names)] == names
    for key in setting.loss.in_keys:
        author = "policy" if key in ("action", *acer.BEHAVIOUR) else "environment"
        words = rf"{type(setting.loss).__name__}: the batch has no entry .*{flat(key).rsplit('_', 1)[-1]}.*{author}"
        refuses(setting, batch.exclude(key, "td_error"), KeyError, words)


@both
def test_keys_of_ones_own(acer):
    expected_setting, batch = setting_of(acer), acer.rows(mask=True)
    setting, observation = copy.copy(expected_setting), ("agent", "observation")
    setting.loss = loss = acer.with_own_keys(setting.networks, observation)
    if acer is continuous:
        continuous.sample_the_same(setting)
    loss.set_keys(action="move", reward=("agent", "reward"), done="over", terminated="lost", priority=("replay", "x"))
    loss.loss_mask_key = "real"
    SoftUpdate(loss, eps=0.75)
    set_average(loss, expected_setting.average.actor(observation))
    following = {"observation": batch["next", "observation"], "reward": batch["next", "reward"]}
    renamed = TensorDict(
        {
            "agent": {"observation": batch["observation"]},
            "mu": {key: batch[key] for key in acer.BEHAVIOUR},
            "move": batch["action"],
            "real": batch["collector", "mask"].unsqueeze(-1),
            "next": {"agent": following, "over": batch["next", "done"], "lost": batch["next", "terminated"]},
        },
        batch.shape,
    )
    before = set(renamed.keys(True, True))
    assert set(loss.in_keys) == before - {"real"}
    result, expected = loss(renamed), expected_setting.loss(batch)
    assert set(renamed.keys(True, True)) == before | {("replay", "x")}
    assert torch.equal(renamed["replay", "x"], batch["td_error"])
    assert_same(result, expected)


# --- bad input


def zeros(*shape: int) -> Any:
    return lambda value: torch.zeros(shape, dtype=torch.bool if value is None else value.dtype)


@pytest.mark.parametrize(
    ("acer", "key", "change", "error", "words"),
    [
        *of_both(
            (("next", "reward"), zeros(4, 9), ValueError, r"\(4, 9\), expected \(4, 9, 1\).*environment"),
            (("next", "done"), zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9, 1\).*environment"),
            (("next", "terminated"), zeros(4, 9), ValueError, r"\(4, 9\), expected \(4, 9, 1\).*environment"),
            (("collector", "mask"), zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9\).*sampler"),
            (("collector", "mask"), lambda _: torch.zeros(4, 9), TypeError, "float32.*bool.*sampler"),
            (("collector", "mask"), lambda _: torch.zeros(4, 9).long(), TypeError, "int64.*bool.*sampler"),
            ("priority_weight", zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9\).*sampler"),
            ("steps_to_next_obs", zeros(4, 9, 1), ValueError, "span several steps"),
        ),
        (discrete, "logits", zeros(4, 9, 5), ValueError, r"\(4, 9, 5\), expected \(4, 9, 4\).*collector"),
        (discrete, "action", zeros(4, 9, 5), ValueError, r"\(4, 9, 5\).*indices.*one-hot.*policy"),
        (continuous, "loc", zeros(4, 9, 3), ValueError, r"\(4, 9, 3\), expected \(4, 9, 2\).*collector"),
        (continuous, "scale", zeros(4, 9), ValueError, r"\(4, 9\), expected \(4, 9, 2\).*collector"),
        (continuous, "action", zeros(4, 9, 3), ValueError, r"\(4, 9, 3\).*expected.*\(4, 9, 2\).*policy"),
        (continuous, "action", lambda value: value.long(), ValueError, "int64.*real numbers"),
    ],
    ids=name_of,
)
def test_entries_of_another_shape_or_type(acer, key, change, error, words):
    setting, batch = acer.Setting(), acer.rows()
    batch[key] = change(batch.get(key, None))
    refuses(setting, batch, error, f"{flat(key).rsplit('_', 1)[-1]}.*{words}")
