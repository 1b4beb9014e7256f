"""Properties of both losses of ACER, for discrete and for continuous actions: batches, reductions, and state."""

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.trajectories import assert_same_gradients, gradients, losses

both = pytest.mark.parametrize("acer", [discrete, continuous], ids=["discrete", "continuous"])


def setting_of(acer: ModuleType, **arguments: Any) -> Any:
    """A loss module with its networks; if it samples actions, they are always the same."""
    setting = acer.Setting(**arguments)
    if acer is continuous:
        continuous.sample_the_same(setting)
    return setting


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
    tensors = {"_".join(key if isinstance(key, tuple) else (key,)): value for key, value in batch.items(True, True)}
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
