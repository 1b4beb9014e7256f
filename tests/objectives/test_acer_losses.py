"""Values and gradients of both losses of ACER, for discrete and for continuous actions."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributions import Normal
from torchrl.modules import IndependentNormal, TanhNormal

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from tests.objectives.acer_settings import LAYOUTS, TIS, average_of, both, name_of, of_both, setting_of
from tests.objectives.trajectories import assert_agrees, assert_same, gradients, losses, refuses

# --- Algorithms 2 and 3, step by step


def assert_is_algorithm(acer: ModuleType, *, mask: bool = False, **arguments: Any) -> Any:
    """Compare values and gradients with the loop of the module; returns the losses."""
    setting = acer.Setting(**arguments).record()
    of_rows = {"key": setting.loss.tensor_keys.behaviour} if acer is discrete else {"squashed": setting.squashed}
    batch = acer.rows(mask=mask, **of_rows)
    result = setting.loss(batch)
    assert_agrees(result, acer.algorithm(setting, batch))
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


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("acer", "arguments"),
    [
        *(
            (discrete, {"trunk": trunk, "kind": kind, "behaviour_key": key})
            for trunk in ("apart", "hidden", "modules")
            for kind in ("logits", "probs")
            for key in ("logits", ("collector", "probs"))
        ),
        *(
            (continuous, {"distribution": kind, "statistics": statistics, "shared": shared, "dueling": dueling})
            for kind in (IndependentNormal, Normal, TanhNormal)
            for statistics in continuous.STATISTICS
            for shared in (False, True)
            for dueling in (False, True)
        ),
        *of_both(
            ({"lmbda": 0.7},),
            ({"lmbda": 0.0},),
            ({"retrace_thresh": 2.5},),
            ({"gamma": 1.0},),
            ({"delta": 0.0},),
            ({"returns": "importance_sampling"},),
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
def test_is_the_algorithm_for_any_networks_arguments_and_batches(acer, arguments, mask):
    assert_is_algorithm(acer, mask=mask, **arguments)


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
        given = torch.where(valid, weight, math.nan)
        batch["priority_weight"] = given.unsqueeze(-1) if acer is discrete else given
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


# --- masks and shapes


@pytest.mark.parametrize(("acer", "arguments"), [*LAYOUTS, (continuous, {"shared": True, "returns": TIS})], ids=name_of)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_steps_may_hold_anything(acer, arguments, bad):
    setting, batch, results = setting_of(acer, **arguments), acer.rows(mask=True), []
    for value in (0.0, bad):
        for entry in batch.select(*setting.loss.in_keys).values(True, True):
            if entry.is_floating_point():
                entry[~batch["collector", "mask"]] = value
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


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("key", ["probs", "scale"])
def test_zeros_in_place_of_probabilities_or_scales_are_refused(key, mask):
    if key == "probs":
        setting, batch = discrete.Setting(behaviour_key=key), discrete.rows(key=key, mask=mask)
    else:
        setting, batch = continuous.Setting(), continuous.rows(mask=mask)
    setting.loss(batch)  # zeros in masked steps are none of the loss's business
    batch[key][2, 1:3] = 0
    with pytest.raises(ValueError, match=rf"'{key}' of the behaviour policy is not > 0 in 2 steps.*init_random_frames"):
        setting.loss(batch)


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
    keys = [key for key, x in batch.items(True, True) if x.is_floating_point() and key != "observation"]
    for key in keys:
        batch[key].requires_grad_()
    result = setting.loss(batch)
    # Q depends on continuous actions
    (losses(result) - (0 if acer is discrete else result["loss_qvalue"])).backward()
    assert all(batch[key].grad is None for key in keys)
    assert not any(value.requires_grad for value in average_of(setting.loss).values(True, True))
    assert not batch["td_error"].requires_grad
    assert all(not result[key].requires_grad for key in setting.loss._DIAGNOSTICS)


# --- weights and masks that are ignored


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
