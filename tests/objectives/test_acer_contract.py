"""Properties of both losses of ACER, for discrete and for continuous actions: batches, arguments, and state.

Most are those that TorchRL tests for each of its own losses.
"""

import copy
import math
import pickle
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal
from torchrl.objectives import SoftUpdate

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.trajectories import (
    assert_agrees,
    assert_compiles,
    assert_same,
    assert_same_gradients,
    gradients,
    losses,
    refuses,
    set_average,
)
from torchrl_replay_ext import ACERLoss

TIS = "truncated_importance_sampling"
LAYOUTS = [
    *((discrete, {"trunk": trunk}) for trunk in ("apart", "modules", "hidden")),
    *((continuous, {"shared": shared, "dueling": dueling}) for shared in (False, True) for dueling in (False, True)),
]
both = pytest.mark.parametrize("acer", [discrete, continuous], ids=["discrete", "continuous"])


def setting_of(acer: ModuleType, **arguments: Any) -> Any:
    """A loss module with its networks; if it samples actions, they are always the same."""
    setting = acer.Setting(**arguments)
    if acer is continuous:
        continuous.sample_the_same(setting)
    return setting


def name_of(value: Any) -> str:
    return str(getattr(value, "__name__", value)).rsplit("_", 1)[-1] if not isinstance(value, dict) else str(value)


def has_shared_parameters(arguments: dict[str, Any]) -> bool:
    return arguments.get("shared", False) or arguments.get("trunk", "apart") != "apart"


each_layout = pytest.mark.parametrize(("acer", "arguments"), LAYOUTS, ids=name_of)


def average_of(loss: Any) -> Any:
    return dict(loss.named_children())["target_actor_network_params"]


def flat(key: NestedKey) -> str:
    return key if isinstance(key, str) else "_".join(key)


# --- Algorithms 2 and 3, step by step


def assert_is_algorithm(acer: ModuleType, *, mask: bool = False, mu_key: Any = None, **arguments: Any) -> Any:
    """Compare values and gradients with the loop of the module; returns the losses."""
    setting = acer.Setting(**arguments, **({} if mu_key is None else {"behaviour_key": mu_key})).record()
    of_rows = {"squashed": setting.squashed} if acer is continuous else {"key": mu_key or "logits"}
    batch = acer.rows(mask=mask, **of_rows)
    result = setting.loss(batch)
    assert_agrees(result, acer.algorithm(setting, batch, **({} if mu_key is None else {"mu_key": mu_key})))
    return result


@pytest.mark.parametrize(
    ("acer", "statistics"), [(acer, each) for acer in (discrete, continuous) for each in acer.STATISTICS], ids=name_of
)
@pytest.mark.parametrize("trust_region", [True, False])
@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 10.0, math.inf])
def test_is_the_algorithm(acer, statistics, trust_region, c):
    delta = 0.01 if acer is discrete else 0.1
    result = assert_is_algorithm(acer, c=c, trust_region=trust_region, statistics=statistics, delta=delta)
    if trust_region:
        # the constraint is active in some steps, but not in all
        assert 0 < result["tr_active"] < 1
    if c in (0.5, 1.0):
        assert result["bc_weight"] > 0.05


NETWORKS = [
    *((discrete, {"trunk": t, "kind": k}) for t in ("apart", "hidden", "modules") for k in ("logits", "probs")),
    *(
        (continuous, {"distribution": kind, "statistics": statistics, "shared": shared, "dueling": dueling})
        for kind in (IndependentNormal, Normal, TanhNormal)
        for statistics in continuous.STATISTICS
        for shared in (False, True)
        for dueling in (False, True)
    ),
]


@pytest.mark.parametrize(("acer", "arguments"), NETWORKS, ids=name_of)
@pytest.mark.parametrize("mask", [False, True])
def test_is_the_algorithm_for_any_networks_and_batches(acer, arguments, mask):
    for mu_key in (None, ("collector", "probs")) if acer is discrete else (None,):
        assert_is_algorithm(acer, mask=mask, mu_key=mu_key, **arguments)


@pytest.mark.parametrize(
    ("acer", "arguments"),
    [
        *(
            (acer, arguments)
            for acer in (discrete, continuous)
            for arguments in (
                {"lmbda": 0.7},
                {"lmbda": 0.0},
                {"retrace_thresh": 2.5},
                {"gamma": 1.0},
                {"delta": 0.0},
                {"returns": "importance_sampling"},
            )
        ),
        (discrete, {"gamma": 0.0}),
        (discrete, {"critic_coeff": 0.75}),
        (discrete, {"returns": "importance_sampling", "statistics": "logits"}),
        (continuous, {"use_q_opc": False}),
        (continuous, {"num_samples": 1}),
        (continuous, {"critic_coeff": 0.75, "value_coeff": 0.125}),
        (continuous, {"fixed": True}),
        (continuous, {"returns": "importance_sampling", "dueling": False}),
        (continuous, {"returns": "importance_sampling", "use_q_opc": False, "distribution": TanhNormal}),
    ],
    ids=name_of,
)
def test_is_the_algorithm_with_any_argument(acer, arguments):
    assert_is_algorithm(acer, mask=True, **arguments)


@both
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(acer, mask, weighted):
    setting, batch = setting_of(acer, reduction="none"), acer.rows(mask=mask)
    weight = torch.rand(batch.shape, dtype=torch.float64) if weighted else torch.ones(batch.shape)
    valid = batch["collector", "mask"] if mask else torch.ones(batch.shape, dtype=torch.bool)
    single = setting.loss(batch)
    torch.testing.assert_close(setting.loss.critic_coeff * batch["td_error"], single["loss_qvalue"])
    if weighted:
        # with a last dimension of 1 or without
        batch["priority_weight"] = weight.unsqueeze(-1) if acer is discrete else weight
    each = setting.loss(batch)
    for reduction in ("sum", "mean"):
        setting.loss.reduction = reduction
        result = setting.loss(batch)
        for key in setting.loss._LOSSES:
            assert each[key].shape == batch.shape
            torch.testing.assert_close(each[key], single[key] * weight)
            assert not each[key][~valid].any()
            expected = each[key].sum()
            if reduction == "mean":
                expected = expected / weight[valid].sum()
            torch.testing.assert_close(result[key], expected.to(torch.float64))
        for key in setting.loss._DIAGNOSTICS:
            assert torch.equal(result[key], single[key])


@both
def test_keyword_tensors(acer):
    setting, batch = setting_of(acer), acer.rows()
    expected = setting.loss(batch.clone())
    tensors = {flat(key): value for key, value in batch.items(True, True)}
    values = setting.loss(**tensors)
    names = ["loss_actor", "loss_qvalue", *(["loss_value"] if acer is continuous else []), "loss_entropy"]
    assert setting.loss.out_keys[: len(names)] == names
    assert len(values) == len(setting.loss.out_keys)
    assert set(setting.loss.out_keys) == set(expected.keys())
    for key, value in zip(setting.loss.out_keys, values, strict=True):
        assert torch.equal(value, expected[key])


# --- masks and shapes


@pytest.mark.parametrize(("acer", "arguments"), [*LAYOUTS, (continuous, {"shared": True, "returns": TIS})], ids=name_of)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_steps_may_hold_anything(acer, arguments, bad):
    setting, batch, results = setting_of(acer, **arguments), acer.rows(mask=True), []
    keys = ["observation", *acer.BEHAVIOUR, ("next", "observation"), ("next", "reward")]
    for value in (0.0, bad):
        for key in keys if acer is discrete else [*keys, "action"]:
            batch[key][~batch["collector", "mask"]] = value
        result = setting.loss(batch)
        results.append((dict(result.items()), gradients(losses(result), setting.parameters), batch["td_error"]))
    assert all(g.isfinite().all() for g in results[1][1])
    torch.testing.assert_close(*results)


@both
@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_is_valid(acer, weighted):
    setting, batch = acer.Setting(), acer.rows()
    batch["collector", "mask"] = torch.zeros(batch.shape, dtype=torch.bool)
    if weighted:
        batch["priority_weight"] = torch.rand(batch.shape, dtype=torch.float64)
    result = setting.loss(batch)
    assert all(value == 0 for value in result.values())
    assert not any(g.any() for g in gradients(losses(result), setting.parameters))


@both
def test_any_number_of_batch_dimensions(acer):
    setting, batch = setting_of(acer, reduction="none"), acer.rows()
    expected = setting.loss(batch)
    nested, single = batch.clone().reshape(2, 2, -1), batch[1].clone()
    of_nested, of_single = setting.loss(nested), setting.loss(single)
    for key in setting.loss._LOSSES:
        torch.testing.assert_close(of_nested[key].reshape(batch.shape), expected[key])
        torch.testing.assert_close(of_single[key], expected[key][1])
    assert nested["td_error"].shape == nested.shape
    assert single["td_error"].shape == single.shape
    refuses(setting, batch[0, 0].exclude("td_error"), ValueError, r"\[\*B, T\]")


# --- where gradients flow


@both
def test_only_the_networks_learn(acer):
    setting, batch = acer.Setting(statistics=acer.STATISTICS[-1]), acer.rows()
    keys = [*acer.BEHAVIOUR, ("next", "observation"), ("next", "reward")]
    if acer is continuous:
        keys.append("action")
    for key in keys:
        batch[key].requires_grad_()
    result = setting.loss(batch)
    # Q depends on continuous actions
    (losses(result) - (0 if acer is discrete else result["loss_qvalue"])).backward()
    assert all(batch[key].grad is None for key in keys)
    assert not any(value.requires_grad for value in average_of(setting.loss).values(True, True))
    assert not batch["td_error"].requires_grad
    assert all(not result[key].requires_grad for key in setting.loss._DIAGNOSTICS)


@both
def test_actor_and_critic_learn_from_their_own_loss(acer):
    """No gradient flows to the policy through sampled actions, or to the critic from the actor's loss."""
    setting, batch = acer.Setting(statistics=acer.STATISTICS[-1]), acer.rows()
    result = setting.loss(batch)
    of_policy = list(setting.networks.actor().parameters())
    of_critic = [p for p in setting.parameters if not any(p is q for q in of_policy)]
    others = {"loss_actor": of_critic, "loss_entropy": of_critic, "loss_qvalue": of_policy}
    if acer is continuous:
        others["loss_value"] = of_policy + list(setting.networks.critic.advantage_net.parameters())
    for key, of_others in others.items():
        found = torch.autograd.grad(result[key], of_others, allow_unused=True, retain_graph=True)
        assert found == (None,) * len(of_others)


# --- state


@both
def test_the_state_has_networks_average_policy_and_weights_of_losses(acer):
    loss = setting_of(acer).loss
    state = loss.state_dict()
    critic = "qvalue_network" if acer is discrete else "sdn"
    weights = {"entropy_coeff", "critic_coeff", *(["value_coeff"] if acer is continuous else [])}
    prefixes = {"actor_network_params", f"{critic}_params", "target_actor_network_params"}
    assert {key.split(".")[0] for key in state} == weights | prefixes
    incomplete = {key: value for key, value in state.items() if key != "entropy_coeff"}
    with pytest.raises(RuntimeError, match="entropy_coeff"):
        loss.load_state_dict(incomplete)
    other, batch = setting_of(acer).loss, acer.rows()
    other.load_state_dict(state)
    expected, result = loss(batch), other(batch)
    assert_same(result, expected)


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
    assert len(theirs) == len(mine)
    assert not {id(p) for p in mine} & {id(p) for p in theirs}
    assert_same_gradients(gradients(losses(result), theirs), gradients(losses(expected), mine))
    SoftUpdate(twin, eps=0.75).step()
    twin.c, twin.entropy_coeff = 0.25, 2
    assert (setting.loss.c, float(setting.loss.entropy_coeff)) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("acer", "arguments"),
    [
        (discrete, {"trunk": "hidden"}),
        (continuous, {"statistics": continuous.BOTH, "distribution": TanhNormal}),
    ],
    ids=["discrete", "continuous"],
)
def test_in_one_graph(acer, arguments):
    setting = acer.Setting(**arguments)
    batch = acer.rows(mask=True) if acer is discrete else acer.rows(mask=True, squashed=True)
    assert_compiles(setting.loss, batch, setting.parameters)


# --- assignments to arguments

NUMBERS = {"gamma": 0.5, "lmbda": 0.5, "c": 0.25, "delta": 0.01, "retrace_thresh": 0.25}
WEIGHTS = {"entropy_coeff": 0.125, "critic_coeff": 2.0}
CHOICES = {"trust_region": False, "reduction": "sum"}
ARGUMENTS = [
    *((acer, key, value) for acer in (discrete, continuous) for key, value in (NUMBERS | WEIGHTS | CHOICES).items()),
    (discrete, "statistics", "logits"),
    (discrete, "returns", "importance_sampling"),
    (continuous, "value_coeff", 2.0),
    (continuous, "num_samples", 5),
    (continuous, "use_q_opc", False),
    (continuous, "statistics", ["loc", "scale"]),
    (continuous, "returns", "truncated_importance_sampling"),
]


@pytest.mark.parametrize(("acer", "key", "value"), ARGUMENTS, ids=name_of)
def test_assigned_arguments_are_those_of_the_constructor(acer, key, value):
    setting, other, batch = setting_of(acer), setting_of(acer, **{key: value}), acer.rows()
    networks = {name: x for name, x in other.loss.state_dict().items() if "_params." in name}
    setting.loss.load_state_dict(networks, strict=False)
    before, expected = setting.loss(batch.clone()), other.loss(batch.clone())
    setattr(setting.loss, key, value)
    after = setting.loss(batch.clone())
    assert any(not torch.equal(before[name], x) for name, x in expected.items())
    assert_same(after, expected)


@pytest.mark.parametrize(
    ("acer", "key", "value", "error"),
    [
        *(
            (acer, *case)
            for acer in (discrete, continuous)
            for case in (
                ("gamma", 1.1, ValueError),
                ("gamma", None, TypeError),
                ("lmbda", -0.1, ValueError),
                ("c", math.nan, ValueError),
                ("delta", -0.5, ValueError),
                ("retrace_thresh", "1", TypeError),
                ("entropy_coeff", -1e-3, ValueError),
                ("entropy_coeff", True, TypeError),
                ("entropy_coeff", None, TypeError),
                ("critic_coeff", math.inf, ValueError),
                ("critic_coeff", torch.tensor(-1.0), ValueError),
                ("critic_coeff", torch.ones(2), TypeError),
                ("trust_region", 1, TypeError),
                ("statistics", "scores", ValueError),
                ("statistics", None, ValueError),
                ("returns", "monte_carlo", ValueError),
                ("reduction", "median", ValueError),
                ("gamma", math.nan, ValueError),
                ("c", "3", TypeError),
                ("c", -1.0, ValueError),
                ("delta", math.nan, ValueError),
            )
        ),
        (continuous, "value_coeff", -1.0, ValueError),
        *((continuous, "num_samples", value, ValueError) for value in (0, 2.0, True)),
        (continuous, "statistics", ("scale",), ValueError),
        (discrete, "returns", TIS, ValueError),
        (continuous, "use_q_opc", "no", TypeError),
    ],
    ids=name_of,
)
def test_assignments_are_checked_as_the_constructor_checks(acer, key, value, error):
    with pytest.raises(error) as of_constructor:
        acer.Setting(**{key: value})
    loss = acer.Setting().loss
    before = copy.copy(getattr(loss, key))
    with pytest.raises(error) as of_assignment:
        setattr(loss, key, value)
    assert f"{type(loss).__name__}({key}=" in str(of_assignment.value)
    assert str(of_assignment.value) == str(of_constructor.value)
    assert getattr(loss, key) == before


@both
@pytest.mark.parametrize("value", [0.25, 2, torch.tensor(0.25), torch.tensor([2], dtype=torch.int64)], ids=str)
def test_weights_of_losses_stay_buffers(acer, value):
    loss, batch = setting_of(acer, reduction="none").loss.double(), acer.rows()
    once = loss(batch)
    for name, key in (("entropy_coeff", "loss_entropy"), ("critic_coeff", "loss_qvalue")):
        buffer, before = loss.get_buffer(name), float(loss.get_buffer(name))
        setattr(loss, name, copy.deepcopy(value))
        if not isinstance(value, torch.Tensor):
            assert loss.get_buffer(name) is buffer
        assert dict(loss.named_buffers())[name] == value == loss.state_dict()[name]
        result = loss(batch)[key]
        assert result.shape == batch.shape
        torch.testing.assert_close(result, once[key] * float(value) / before)
        setattr(loss, name, 0.375)
        assert loss.get_buffer(name) == 0.375


def test_numbers_change_without_a_new_graph():
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

    def assign(number: float) -> None:
        for name in ("c", "delta", "gamma", "lmbda", "retrace_thresh"):
            setattr(setting.loss, name, number)
        compare()

    # another number makes one more graph, in which it is a variable
    assign(0.5)
    with torch.compiler.set_stance("fail_on_recompile"):
        assign(0.625)
        assign(0.25)


# --- networks and parameters


@each_layout
def test_each_parameter_is_listed_once_and_is_that_of_the_network(acer, arguments):
    count = (8 if acer is discrete else 14) - 2 * has_shared_parameters(arguments)
    setting, batch = setting_of(acer, **arguments), acer.rows()
    parameters = list(setting.loss.parameters())
    assert len(parameters) == len({id(x) for x in parameters}) == len(dict(setting.loss.named_parameters())) == count
    assert {id(x) for x in parameters} == {id(x) for x in setting.parameters}
    assert all(isinstance(x, nn.Parameter) for x in parameters)
    before = [x.detach().clone() for x in setting.parameters]
    average = [x.clone() for x in average_of(setting.loss).values(True, True)]
    optimizer = torch.optim.SGD(setting.loss.parameters(), lr=0.1)
    losses(setting.loss(batch)).backward()
    optimizer.step()
    # the last bias of a dueling network's advantages has no effect
    changed = [not torch.equal(x, y) for x, y in zip(before, setting.parameters, strict=True)]
    assert sum(changed) >= count - 1
    assert all(torch.equal(x, y) for x, y in zip(average, average_of(setting.loss).values(True, True), strict=True))


@each_layout
def test_reset_parameters(acer, arguments):
    setting, batch = setting_of(acer, **arguments), acer.rows()
    loss, parameters = setting.loss, list(setting.loss.parameters())
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
    setting.updater.step()
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
def test_keys_are_set_and_restored(acer):
    loss, other = acer.Setting().loss, acer.Setting().loss
    names = vars(loss.default_keys())
    assert vars(loss.tensor_keys) == names
    assert {"action", "reward", "done", "terminated", "priority", "priority_weight"} <= set(names)
    for name in names:
        loss.set_keys(**{name: ("some", "entry")})
        assert getattr(loss.tensor_keys, name) == ("some", "entry")
    assert vars(other.tensor_keys) == names
    loss.set_keys(**dict.fromkeys(names))
    assert vars(loss.tensor_keys) == names
    with pytest.raises(ValueError, match=r"unknown.*not an accepted"):
        loss.set_keys(unknown="entry")
    with pytest.raises(AttributeError, match="set_keys"):
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


# --- the call


@both
@pytest.mark.parametrize("use", [True, "auto", False])
def test_weights_of_the_sampler_can_be_ignored(acer, use):
    setting, batch = setting_of(acer), acer.rows()
    without = setting.loss(batch)
    batch["priority_weight"] = torch.rand(batch.shape)
    setting.loss.use_prioritized_weights = use
    for key in setting.loss._LOSSES:
        assert torch.equal(setting.loss(batch)[key], without[key]) == (use is False)


@both
def test_a_mask_can_be_ignored(acer):
    setting, batch = setting_of(acer), acer.rows()
    expected = setting.loss(batch.clone())
    batch["collector", "mask"] = torch.rand(batch.shape) < 0.7
    assert not torch.equal(setting.loss(batch.clone())["loss_qvalue"], expected["loss_qvalue"])
    setting.loss.loss_mask_key = None
    assert_same(setting.loss(batch), expected)


# --- bad input


def zeros(*shape: int) -> Any:
    return lambda value: torch.zeros(shape, dtype=torch.bool if value is None else value.dtype)


@pytest.mark.parametrize(
    ("acer", "key", "change", "error", "words"),
    [
        *(
            (acer, *case)
            for acer in (discrete, continuous)
            for case in (
                (("next", "reward"), zeros(4, 9), ValueError, r"\(4, 9\), expected \(4, 9, 1\).*environment"),
                (("next", "done"), zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9, 1\).*environment"),
                (("next", "terminated"), zeros(4, 9), ValueError, r"\(4, 9\), expected \(4, 9, 1\).*environment"),
                (("collector", "mask"), zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9\).*sampler"),
                (("collector", "mask"), lambda _: torch.zeros(4, 9), TypeError, "float32.*bool.*sampler"),
                (("collector", "mask"), lambda _: torch.zeros(4, 9).long(), TypeError, "int64.*bool.*sampler"),
                ("priority_weight", zeros(4, 9, 2), ValueError, r"\(4, 9, 2\), expected \(4, 9\).*sampler"),
                ("steps_to_next_obs", zeros(4, 9, 1), ValueError, "span several steps"),
            )
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
