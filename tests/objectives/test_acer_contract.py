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
from torch.distributions import Categorical
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl.modules import ProbabilisticActor
from torchrl.objectives import HardUpdate, SoftUpdate

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.trajectories import assert_same_gradients, gradients, losses
from torchrl_replay_ext import ACERContinuousLoss, ACERLoss

both = pytest.mark.parametrize("acer", [discrete, continuous], ids=["discrete", "continuous"])


def setting_of(acer: ModuleType, **arguments: Any) -> Any:
    """A loss module with its networks; if it samples actions, they are always the same."""
    setting = acer.Setting(**arguments)
    if acer is continuous:
        continuous.sample_the_same(setting)
    return setting


def without_updater(acer: ModuleType) -> Any:
    """A loss module with no updater of its average policy."""
    networks = acer.Networks()
    if acer is discrete:
        return ACERLoss(networks.actor(), networks.critic())
    return ACERContinuousLoss(networks.actor(), networks.critic)


def average_of(loss: Any) -> Any:
    return dict(loss.named_children())["target_actor_network_params"]


def flat(key: NestedKey) -> str:
    return key if isinstance(key, str) else "_".join(key)


@both
def test_interior_ends_split_rows(acer):
    setting = setting_of(acer)
    first, second = acer.rows()[2:4], acer.rows()[2:4]
    first["next", "done"][:, -1] = True
    joined = setting.loss(torch.cat([first, second], 1))
    apart = setting.loss(torch.cat([first, second], 0))
    for key, value in apart.items():
        torch.testing.assert_close(joined[key], value, rtol=0, atol=1e-12)
    assert_same_gradients(
        gradients(losses(joined), setting.parameters), gradients(losses(apart), setting.parameters), 1e-13
    )


@both
def test_the_average_policy_moves_slowly(acer):
    setting = acer.Setting()
    before = [p.clone() for p in setting.average.actor().parameters()]
    now = [p.detach().clone() for p in setting.networks.actor().parameters()]
    learned = [p.detach().clone() for p in setting.loss.parameters()]
    setting.updater.step()
    moved = list(setting.loss.target_actor_network_params.values(True, True))
    for theta_avg, theta, result in zip(before, now, moved, strict=True):
        torch.testing.assert_close(result.data, 0.75 * theta_avg + 0.25 * theta, rtol=0, atol=1e-15)
    for theta, parameter in zip(now, setting.networks.actor().parameters(), strict=True):
        assert torch.equal(theta, parameter)
    for theta, parameter in zip(learned, setting.loss.parameters(), strict=True):
        assert torch.equal(theta, parameter)


@both
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_reductions(acer, mask, weighted):
    setting, batch = setting_of(acer, reduction="none"), acer.rows(mask=mask)
    weight = torch.rand(batch.shape, dtype=torch.float64) if weighted else torch.ones(batch.shape)
    valid = batch["collector", "mask"] if mask else torch.ones(batch.shape, dtype=torch.bool)
    single = setting.loss(batch)
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


@both
def test_state_dict_has_the_average_policy(acer):
    first, second, batch = setting_of(acer), setting_of(acer), acer.rows()
    second.loss.load_state_dict(first.loss.state_dict())
    expected, result = first.loss(batch), second.loss(batch)
    for key, value in expected.items():
        assert torch.equal(result[key], value)
    assert any(key.startswith("target_actor_network_params") for key in first.loss.state_dict())


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


# --- assignments to arguments

NUMBERS = {"gamma": 0.5, "lmbda": 0.5, "c": 0.25, "delta": 0.01, "retrace_thresh": 0.25}
WEIGHTS = {"entropy_coeff": 0.125, "critic_coeff": 2.0}
CHOICES = {"trust_region": False, "reduction": "sum"}
ARGUMENTS = [
    *((acer, key, value) for acer in (discrete, continuous) for key, value in (NUMBERS | WEIGHTS | CHOICES).items()),
    (discrete, "statistics", "logits"),
    (discrete, "returns", "importance_sampling"),
    (continuous, "value_coeff", 2.0),
    (continuous, "rho_power", 1.0),
    (continuous, "num_samples", 5),
    (continuous, "use_q_opc", False),
    (continuous, "statistics", ["loc", "scale"]),
    (continuous, "returns", "truncated_importance_sampling"),
]


def name_of(value: Any) -> str:
    return value.__name__.rsplit("_", 1)[-1] if isinstance(value, ModuleType) else str(value)


@pytest.mark.parametrize(("acer", "key", "value"), ARGUMENTS, ids=name_of)
def test_assigned_arguments_are_those_of_the_constructor(acer, key, value):
    setting, other, batch = setting_of(acer), setting_of(acer, **{key: value}), acer.rows()
    networks = {name: x for name, x in other.loss.state_dict().items() if "_params." in name}
    setting.loss.load_state_dict(networks, strict=False)
    before, expected = setting.loss(batch.clone()), other.loss(batch.clone())
    setattr(setting.loss, key, value)
    after = setting.loss(batch.clone())
    assert any(not torch.equal(before[name], x) for name, x in expected.items())
    for name, x in expected.items():
        assert torch.equal(after[name], x)


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
            )
        ),
        (continuous, "value_coeff", -1.0, ValueError),
        (continuous, "num_samples", 0, ValueError),
        (continuous, "rho_power", 0.0, ValueError),
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


@both
@pytest.mark.parametrize("value", [1, torch.tensor(1)], ids=["number", "tensor"])
def test_weights_of_losses_are_real_numbers(acer, value):
    loss = acer.Setting(entropy_coeff=value).loss
    loss.entropy_coeff = 0.25
    assert loss.entropy_coeff == 0.25


@both
def test_a_temporary_state_is_left_as_it_was(acer):
    """``TensorDict.to_module`` assigns tensors to the buffers, and assigns the previous ones at the end."""
    loss = setting_of(acer).loss
    with TensorDict.from_module(loss).apply(lambda x: 2 * x).to_module(loss):
        assert loss.entropy_coeff == 0.5
    assert loss.entropy_coeff == loss.get_buffer("entropy_coeff") == 0.25


@both
def test_weights_of_losses_change_without_a_new_graph(acer):
    setting, batch = setting_of(acer), acer.rows()
    torch._dynamo.reset()
    compiled = torch.compile(setting.loss, fullgraph=True, backend="eager")

    def compare() -> None:
        with torch.no_grad():
            expected, result = setting.loss(batch.clone()), compiled(batch.clone())
        for key, value in expected.items():
            torch.testing.assert_close(result[key], value)

    compare()
    weights = ["entropy_coeff", "critic_coeff", *(["value_coeff"] if acer is continuous else [])]
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in (0.75, 0.0, 3):
            for name in weights:
                setattr(setting.loss, name, number)
            compare()
    # another number makes one more graph, in which it is a variable
    setting.loss.c = 0.5
    compare()
    with torch.compiler.set_stance("fail_on_recompile"):
        for number in (0.625, 0.25, 1.75):
            setting.loss.c = number
            compare()


@both
def test_none_is_the_mean(acer):
    assert acer.Setting(reduction=None).loss.reduction == "mean"


# --- networks and parameters


@pytest.mark.parametrize(
    ("acer", "arguments"),
    [
        *((discrete, {"trunk": trunk}) for trunk in ("apart", "modules", "hidden")),
        *(
            (continuous, {"dueling": dueling, "shared": shared})
            for dueling in (True, False)
            for shared in (True, False)
        ),
    ],
    ids=name_of,
)
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


@both
def test_reset_parameters_without_an_updater(acer):
    loss = without_updater(acer)
    before = [x.clone() for x in loss.parameters()]
    loss.reset_parameters_recursive()
    assert not any(torch.equal(x, y) for x, y in zip(before, loss.parameters(), strict=True))


def test_reset_parameters_of_a_critic_of_ones_own():
    """A module without reset_parameters() keeps its parameters, as in TorchRL; the modules inside are reset."""

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.number, self.net = nn.Parameter(torch.full((), 7.0)), nn.Linear(3, 1)

        def forward(self, observation: Any, actions: Any, policy_samples: Any) -> Any:
            raise NotImplementedError

        def state_value(self, observation: Any) -> Any:
            return self.number * self.net(observation)

    critic = Critic()
    loss = ACERContinuousLoss(continuous.Networks().actor(), critic)
    before = critic.net.weight.clone()
    loss.reset_parameters_recursive()
    assert critic.number == 7 and not (critic.net.weight == before).any()


def test_reset_parameters_before_lazy_layers_have_shapes():
    actor = TensorDictModule(nn.LazyLinear(4, dtype=torch.float64), in_keys=["observation"], out_keys=["logits"])
    critic = TensorDictModule(nn.LazyLinear(4, dtype=torch.float64), in_keys=["observation"], out_keys=["action_value"])
    loss = ACERLoss(ProbabilisticActor(actor, in_keys=["logits"], distribution_class=Categorical), critic)
    loss.reset_parameters_recursive()
    SoftUpdate(loss, eps=0.75)
    assert loss(discrete.rows())["kl"].abs() < 1e-12


@both
def test_stateful_networks(acer):
    setting, batch = setting_of(acer), acer.rows()
    expected = setting.loss(batch.clone())
    for name in ("actor_network", "qvalue_network" if acer is discrete else "sdn"):
        network = setting.loss.get_stateful_net(name)
        with torch.no_grad():
            for x in network.parameters():
                x.zero_()
        # a copy of the module, with the parameters of the loss
        assert not any(x.any() for x in getattr(setting.loss, f"{name}_params").values(True, True))
        network = setting.loss.get_stateful_net(name)
        for layer in network.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        setting.loss.from_stateful_net(name, network)
    assert not torch.equal(setting.loss(batch)["loss_qvalue"], expected["loss_qvalue"])


@pytest.mark.parametrize(
    ("acer", "arguments", "count"),
    [
        (discrete, {}, 8),
        (discrete, {"trunk": "modules"}, 6),
        (discrete, {"trunk": "hidden"}, 6),
        (continuous, {}, 14),
        (continuous, {"shared": True}, 12),
        (continuous, {"dueling": False, "shared": True}, 12),
    ],
    ids=name_of,
)
def test_each_parameter_is_listed_once_and_is_that_of_the_network(acer, arguments, count):
    setting, batch = setting_of(acer, **arguments), acer.rows()
    parameters = list(setting.loss.parameters())
    assert len(parameters) == len({id(x) for x in parameters}) == len(dict(setting.loss.named_parameters())) == count
    assert {id(x) for x in parameters} == {id(x) for x in setting.parameters}
    before = [x.detach().clone() for x in setting.parameters]
    average = [x.clone() for x in average_of(setting.loss).values(True, True)]
    optimizer = torch.optim.SGD(setting.loss.parameters(), lr=0.1)
    losses(setting.loss(batch)).backward()
    optimizer.step()
    # the last bias of a dueling network's advantages has no effect
    changed = [not torch.equal(x, y) for x, y in zip(before, setting.parameters, strict=True)]
    assert sum(changed) >= count - 1
    assert all(torch.equal(x, y) for x, y in zip(average, average_of(setting.loss).values(True, True), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("arguments", [{}, {"shared": True}], ids=["apart", "shared"])
@both
def test_casts_reach_all_tensors_and_keep_their_identity(acer, arguments, dtype):
    if acer is discrete and arguments:
        arguments = {"trunk": "modules"}
    loss = acer.Setting(**arguments).loss

    def tensors() -> list[torch.Tensor]:
        of_networks = (x for name in loss._network_names for x in getattr(loss, f"{name}_params").values(True, True))
        return [*loss.parameters(), *average_of(loss).values(True, True), *of_networks]

    before = tensors()
    assert loss.to(dtype) is loss
    after = tensors()
    assert [id(x) for x in before] == [id(x) for x in after]
    assert {x.dtype for x in [*after, *loss.buffers()]} == {dtype}
    assert all(isinstance(x, nn.Parameter) for x in loss.parameters())
    assert not any(x.requires_grad for x in average_of(loss).values(True, True))


@both
def test_parameters_of_the_average_policy_are_buffers(acer):
    loss = setting_of(acer).loss
    of_average = {id(x) for x in average_of(loss).values(True, True)}
    assert of_average <= {id(x) for x in loss.buffers()}
    assert not of_average & {id(x) for x in loss.parameters()}
    # the critic has no average: its target is the critic itself, detached
    name = "qvalue_network" if acer is discrete else "sdn"
    for key, x in getattr(loss, f"target_{name}_params").items(True, True):
        assert not x.requires_grad
        assert x.data_ptr() == getattr(loss, f"{name}_params").get(key).data_ptr()


@both
@pytest.mark.parametrize("updater", [lambda loss: SoftUpdate(loss, eps=0.75), HardUpdate])
def test_a_missing_updater_of_the_average_policy_is_a_warning(acer, updater):
    loss, batch = without_updater(acer), acer.rows()
    with pytest.warns(UserWarning, match="No target network updater"):
        _ = loss.target_actor_network_params
    with pytest.warns(UserWarning, match="No target network updater"):
        loss(batch)
    updater(loss)
    loss(batch)


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
    with pytest.raises(ValueError, match="unknown"):
        loss.set_keys(unknown="entry")


@both
def test_the_loss_reads_its_in_keys_and_writes_its_out_keys(acer):
    setting, batch = setting_of(acer), acer.rows()
    # an entry that the loss does not name may hold anything
    batch["unrelated"] = torch.full(batch.shape, torch.nan)
    given = batch.select(*setting.loss.in_keys)
    expected, result = setting.loss(batch), setting.loss(given)
    assert list(result.keys()) == setting.loss.out_keys
    for key, value in expected.items():
        assert torch.equal(result[key], value)
        assert value.shape == () and value.requires_grad == key.startswith("loss_")
    assert set(given.keys(True, True)) == {*setting.loss.in_keys, "td_error"}
    for key in setting.loss.in_keys:
        with pytest.raises(KeyError, match=flat(key).rsplit("_", 1)[-1]):
            setting.loss(batch.exclude(key))


@both
def test_in_keys_follow_set_keys(acer):
    setting, batch = setting_of(acer), acer.rows()
    expected = setting.loss(batch.clone())
    names = {"action": ("agent", "action"), "reward": "payment", "done": "end", "terminated": ("agent", "final")}
    for name, key in names.items():
        prefix = () if name == "action" else ("next",)
        batch.rename_key_((*prefix, name), (*prefix, *((key,) if isinstance(key, str) else key)))
    setting.loss.set_keys(**names, priority=("agent", "error"))
    assert {("agent", "action"), ("next", "payment"), ("next", "end"), ("next", "agent", "final")} <= {
        *setting.loss.in_keys
    }
    result = setting.loss(batch)
    for key, value in expected.items():
        assert torch.equal(result[key], value)
    assert batch["agent", "error"].shape == batch.shape


@both
def test_selected_out_keys(acer):
    setting, batch = setting_of(acer), acer.rows()
    expected = setting.loss(batch.clone())
    tensors = {flat(key): value for key, value in batch.items(True, True)}
    setting.loss.select_out_keys("loss_qvalue", "kl")
    loss_qvalue, kl = setting.loss(**tensors)
    assert torch.equal(loss_qvalue, expected["loss_qvalue"]) and torch.equal(kl, expected["kl"])
    assert set(setting.loss(batch).keys()) == {"loss_qvalue", "kl"}


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
def test_a_mask_of_another_name_or_none(acer):
    setting, batch = setting_of(acer), acer.rows()
    valid = torch.rand(batch.shape) < 0.7
    everything = setting.loss(batch.clone())
    batch["collector", "mask"] = valid
    expected = setting.loss(batch.clone())
    setting.loss.loss_mask_key = None
    ignored = setting.loss(batch.clone())
    setting.loss.loss_mask_key = ("my", "mask")
    result = setting.loss(batch.exclude("collector").set(("my", "mask"), valid))
    for key, value in expected.items():
        assert torch.equal(result[key], value)
        assert torch.equal(ignored[key], everything[key])
    assert not torch.equal(expected["loss_qvalue"], everything["loss_qvalue"])


class Recorder(nn.Module):
    """Records how actions would be sampled."""

    def __init__(self):
        super().__init__()
        self.seen: set[Any] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add(exploration_type())
        return x


@both
def test_networks_do_not_explore_in_the_loss(acer):
    networks, batch, recorder = acer.Networks(), acer.rows(), Recorder()
    networks.trunk.append(recorder)
    if acer is discrete:
        loss = ACERLoss(networks.actor(), networks.critic())
    else:
        loss = ACERContinuousLoss(networks.actor(), networks.critic)
    SoftUpdate(loss, eps=0.75)
    for mode in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
        loss.deterministic_sampling_mode = mode
        with set_exploration_type(ExplorationType.RANDOM):
            loss(batch)
            assert exploration_type() == ExplorationType.RANDOM
        assert recorder.seen == {mode}
        recorder.seen.clear()


@both
def test_networks_with_random_layers(acer):
    networks, batch = acer.Networks(), acer.rows()
    networks.trunk.append(nn.Dropout(0.5))
    actor = networks.actor()
    loss = ACERLoss(actor, networks.critic()) if acer is discrete else ACERContinuousLoss(actor, networks.critic)
    SoftUpdate(loss, eps=0.75)
    assert loss.vmap_randomness == "different"
    assert not torch.equal(loss(batch)["entropy"], loss(batch)["entropy"])
    assert losses(loss(batch)).isfinite()


@both
def test_the_loss_has_no_value_estimator(acer):
    loss = acer.Setting().loss
    for ask in (loss.make_value_estimator, lambda: loss.value_estimator):
        with pytest.raises(NotImplementedError, match="gamma=, lmbda=, returns="):
            ask()


@both
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_assigned_arguments_are_copied(acer, duplicate):
    loss = acer.Setting().loss
    loss.c, loss.entropy_coeff = 0.75, 0.5
    twin = duplicate(loss)
    assert (twin.c, float(twin.entropy_coeff)) == (0.75, 0.5)
    twin.c, twin.entropy_coeff = 0.25, 2
    assert (loss.c, float(loss.entropy_coeff)) == (0.75, 0.5)
