"""Batches at the edge: rows that no policy has written, saturated actions, half precision, empty masks."""

import math

import pytest
import torch
from torch.distributions import Normal
from torchrl.modules import MaskedCategorical, OneHotCategorical, TanhNormal

from tests.objectives import test_acer as discrete
from tests.objectives import test_acer_continuous as continuous
from torchrl_replay_ext import ACERLoss
from torchrl_replay_ext.functional import importance_ratio, retrace

# --- rows that no policy has written


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


# --- probabilities


@pytest.mark.parametrize("kind", [MaskedCategorical, OneHotCategorical])
def test_arguments_that_change_the_probabilities_are_refused(kind):
    networks = discrete.Networks()
    mask = torch.tensor([True, True, False, True])
    arguments = {"mask": mask} if kind is MaskedCategorical else {"temperature": 2.0}
    actor = networks.actor(distribution_class=kind, distribution_kwargs=arguments)
    with pytest.raises(ValueError, match="may change its probabilities"):
        ACERLoss(actor, networks.critic())


def test_the_ratio_of_two_zeros_is_zero():
    zero = torch.tensor([[-math.inf], [-1.0], [-1.0]], dtype=torch.float64)
    assert importance_ratio(zero[0], zero[0]).item() == 0
    reward, done = torch.ones_like(zero), torch.zeros_like(zero, dtype=torch.bool)
    first = torch.roll(zero, 1, 0)
    result = retrace(0.9, 1.0, first, first, 2 * reward, 3 * reward, reward, done)
    # the trace is cut before the second step, whose ratio is 0
    last = 1 + 0.9 * 3
    expected = [last, last + 0.9 * (last - 2), last]
    assert result.flatten().tolist() == pytest.approx(expected)


# --- precision


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 2.0), (torch.float64, 8.0)])
def test_ratios_of_saturated_actions(dtype, mean):
    """The tanh cancels out as long as the dtype tells an action from 1: in float32 up to |atanh a| = 7.25."""
    shape = (1, 3, continuous.ACTION)
    loc, scale = torch.full(shape, mean, dtype=dtype), torch.full(shape, 0.5, dtype=dtype)
    action = TanhNormal(loc, scale).sample()

    def log_density(loc):
        return continuous.distribution(loc.double(), scale.double(), squashed=True).log_prob(action.double())

    setting = continuous.Setting(distribution=TanhNormal, c=1e6)
    setting.loss.to(dtype)
    setting.loss._policy = lambda batch, *, average=False: Normal(loc + 0.2, scale)
    batch = continuous.rows(squashed=True)[:1, :3].to(dtype)
    batch.update({"action": action, "loc": loc, "scale": scale})
    expected = (log_density(loc + 0.2) - log_density(loc)).exp().mean()
    torch.testing.assert_close(setting.loss(batch)["rho"].double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("statistics", discrete.STATISTICS)
@pytest.mark.parametrize("c", [0.0, 2.0, math.inf])
def test_half_precision_stays_finite(statistics, c):
    setting, batch = discrete.Setting(statistics=statistics, c=c), discrete.rows(spread=15.0)
    batch = batch.apply(lambda x: x.half() if x.is_floating_point() else x)
    setting.loss.to(torch.float16)
    result = setting.loss(batch)
    assert all(value.isfinite() for value in result.values())
    log_pi = torch.full((2, 1), -0.1, dtype=torch.float16, requires_grad=True)
    one, no = torch.ones(2, 1, dtype=torch.float16), torch.zeros(2, 1, dtype=torch.bool)
    retrace(0.9, 1.0, log_pi, -15 * one, one, one, one, no).sum().backward()
    assert log_pi.grad is not None and log_pi.grad.isfinite().all()
