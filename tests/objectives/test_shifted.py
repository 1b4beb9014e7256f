"""Losses with ``shifted=True``, which take V(x_{t+1}) from the values of the states x_t of the same rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from tests.emulated_device import EmulatedDevice
from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.acer_settings import LAYOUTS, both, name_of, of_both, setting_of
from tests.objectives.q_networks import estimator_of, experience, mlp, naive
from tests.objectives.test_recurrent import Recurrent
from tests.objectives.trajectories import assert_same, assert_same_gradients, averaged, gradients, losses
from torchrl_replay_ext import ACERLoss

ROWS, TIME = 4, 9


def slices(acer: ModuleType, *, mask: bool = True) -> TensorDict:
    """Rows [4, T] of :func:`cut_rows` that end once, apart from terminations; masked steps hold NaN."""
    batch = acer.rows()
    valid = torch.ones(batch.shape, dtype=torch.bool)
    # row 0 is cut; row 1 terminates and goes on with an episode that is truncated or cut; row 2 terminates at its end
    valid[1, 7:] = not mask
    batch["next", "done"][1, 6] = mask
    # row 3 is cut
    batch["next", "done"][3, 2] = False
    valid[3, 5:] = not mask
    for row, step in ((1, 6), (3, 2)):
        batch["observation"][row, step + 1] = batch["next", "observation"][row, step]
    if mask:
        for value in batch.values(True, True):
            if value.is_floating_point():
                value[~valid] = torch.nan
        batch["collector", "mask"] = valid
    return batch


def truncated_inside(acer: ModuleType) -> TensorDict:
    """Rows as in a batch of ``newest()``: the last one is truncated inside and ends again."""
    batch = slices(acer, mask=False)
    batch["next", "done"][3, 2] = True
    batch["observation"][3, 3] += 1
    return batch


def unrelated(acer: ModuleType) -> TensorDict:
    """Rows in which one next state is not the following state although the episode goes on."""
    batch = slices(acer)
    batch["next", "observation"][0, 4, 1] += 0.1
    return batch


@contextmanager
def states_evaluated(network: nn.Module) -> Iterator[list[int]]:
    """The number of states in each call of a network with a single input."""
    counts: list[int] = []
    handle = network.register_forward_hook(lambda _module, inputs, _output: counts.append(inputs[0][..., 0].numel()))
    yield counts
    handle.remove()


# --- values


@pytest.mark.parametrize(
    ("acer", "arguments"),
    [*LAYOUTS, *of_both(({"returns": "importance_sampling"},))],
    ids=name_of,
)
@pytest.mark.parametrize("mask", [False, True])
def test_slices_have_the_losses_of_two_passes(acer, arguments, mask):
    setting, batch = setting_of(acer, **arguments), slices(acer, mask=mask)
    expected, result = setting.loss(batch.clone()), setting.loss(batch, shifted=True)
    assert_same(result, expected, 1e-12)
    assert_same_gradients(*(gradients(losses(x), setting.parameters) for x in (result, expected)), 1e-12)


@both
def test_rounding_of_a_transform_changes_nothing(acer):
    setting, batch = setting_of(acer), slices(acer)
    expected = setting.loss(batch.clone())
    batch["next", "observation"] *= 1 + 1e-15
    result = setting.loss(batch, shifted=True)
    assert_same(result, expected, 1e-10)


# --- cost


@pytest.mark.parametrize(
    ("acer", "network", "passes"),
    # the policy's network also computes the average policy
    [(discrete, "policy_head", 2), (discrete, "value_head", 1), (continuous, "critic.value_net", 1)],
)
@pytest.mark.parametrize(("arguments", "further"), [({}, ROWS * TIME), ({"shifted": True}, ROWS)], ids=str)
def test_one_further_state_per_row_is_evaluated(acer, network, passes, arguments, further):
    setting = acer.Setting()
    with states_evaluated(setting.networks.get_submodule(network)) as counts:
        setting.loss(slices(acer), **arguments)
    assert sum(counts) == passes * ROWS * TIME + further


# --- batches and networks that are not allowed


@both
@pytest.mark.parametrize("batch", [truncated_inside, unrelated])
def test_other_batches_are_refused(acer, batch):
    setting, rows = setting_of(acer), batch(acer)
    assert losses(setting.loss(rows.clone())).isfinite()
    with pytest.raises(ValueError, match=r"of 1 steps are neither .* use shifted=False for other batches"):
        setting.loss(rows, shifted=True)
    assert "td_error" not in set(rows.keys())


@pytest.mark.usefixtures("from_scratch")
def test_in_a_graph_other_batches_give_nan():
    setting, batch = discrete.Setting(), slices(discrete)
    compiled = torch.compile(lambda rows: setting.loss(rows, shifted=True), fullgraph=True, backend="eager")
    expected = setting.loss(batch.clone(), shifted=True)
    assert_same(compiled(batch), expected, 1e-12)
    result = compiled(unrelated(discrete))
    assert result["loss_qvalue"].isnan() and result["loss_actor"].isnan()


@both
def test_an_accelerator_is_not_waited_for(acer):
    batches: Any = slices(acer), truncated_inside(acer)
    with EmulatedDevice("torchrl_replay_ext", "tests") as device, torch.no_grad():
        with torch.device("emulated"):
            setting = setting_of(acer)
        batch, other = (
            batch.apply(lambda x: x.float() if x.is_floating_point() else x).to("emulated") for batch in batches
        )
        device.reset()
        expected = setting.loss(batch.clone())
        waits = dict(device.waits)
        device.reset()
        result = setting.loss(batch, shifted=True)
        assert dict(device.waits) == waits
        torch.testing.assert_close(result["loss_qvalue"].cpu(), expected["loss_qvalue"].cpu(), rtol=1e-5, atol=0)
        assert setting.loss(other, shifted=True)["loss_qvalue"].cpu().isnan()


def test_recurrent_networks_are_refused():
    setting = Recurrent()
    loss = averaged(ACERLoss(setting.actor, setting.critic))
    batch: Any = setting.rows
    with pytest.raises(ValueError, match=r"ACERLoss\(shifted=True\): a recurrent network .* use shifted=False"):
        loss(batch, shifted=True)
    estimator = estimator_of(value_network=setting.q_network, shifted=True)
    with pytest.raises(ValueError, match=r"RetraceEstimator\(shifted=True\): a recurrent network"):
        estimator.value_estimate(batch)


def test_networks_that_read_the_start_of_episodes_are_refused():
    setting, batch = discrete.Setting(), slices(discrete)
    for prefix in ((), ("next",)):
        batch[(*prefix, "is_init")] = torch.zeros(ROWS, TIME, 1, dtype=torch.bool)
    reader = TensorDictModule(
        lambda observation, is_init: setting.networks.value(observation),
        in_keys=["observation", "is_init"],
        out_keys=["action_value"],
    )
    loss = averaged(ACERLoss(setting.networks.actor(), reader))
    loss(batch.clone())
    with pytest.raises(ValueError, match="recurrent"):
        loss(batch, shifted=True)


# --- the estimator


def episodes_of(batch: TensorDict) -> TensorDict:
    """The batch [S, T] with x_{t+1} of the next step, and truncations only at the end of rows."""
    following, done = batch["next", "observation"], batch["next", "done"]
    done[:, :-1] = batch["next", "terminated"][:, :-1]
    goes_on = ~done[:, :-1]
    batch["observation"][:, 1:] = torch.where(goes_on, following[:, :-1], batch["observation"][:, 1:])
    return batch


@pytest.mark.parametrize("policy", ["actor", "greedy"])
@pytest.mark.parametrize("time_dim", [0, 1])
def test_the_estimator_has_the_targets_of_a_loop(policy, time_dim):
    value, pi = mlp(), mlp()
    batch = episodes_of(experience(6, 11))
    assert batch["next", "terminated"][:, :-1].any() and batch["next", "done"].any()
    estimator = estimator_of(value, pi if policy == "actor" else None, time_dim=time_dim, shifted=True)
    shaped = batch if time_dim else batch.transpose(0, 1)
    with states_evaluated(value) as counts:
        result = estimator.value_estimate(shaped)
    assert counts == [6 * 12]
    expected = naive(batch, value, pi if policy == "actor" else None)
    torch.testing.assert_close(result if time_dim else result.transpose(0, 1), expected, rtol=0, atol=1e-12)


def test_the_estimator_refuses_other_batches():
    estimator = estimator_of(shifted=True)
    batch = experience(6, 11)
    with pytest.raises(ValueError, match=r"RetraceEstimator\(shifted=True\): the next states of \d+ steps"):
        estimator(batch)
    assert "value_target" not in set(batch.keys())
    # the values are given, so no state is evaluated for them
    estimator.value_estimate(batch, next_value=torch.zeros(6, 11, 1, dtype=torch.float64))
