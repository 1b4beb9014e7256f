"""The divergence of the stored actions from a policy, by which DecoupledSampler chooses the actor's batch."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from torchrl_replay_ext.functional import gaussian_policy_kl, ornstein_uhlenbeck_scale


def test_the_diagonal_divergence_is_that_of_torch():
    torch.manual_seed(0)
    difference = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0])
    ours = Normal(difference.mean(0), difference.std(0, correction=0))
    for scale in (0.3, torch.tensor([0.5, 0.2, 1.0], dtype=torch.float64)):
        expected = kl_divergence(ours, Normal(torch.zeros(3, dtype=torch.float64), scale)).sum()
        torch.testing.assert_close(gaussian_policy_kl(difference, scale, eps=0.0), expected)
    # MSE / 2s - 1/2 (1 + ln(v / s))
    mse, v, s = difference.square().mean(0), difference.var(0, correction=0), 0.09
    torch.testing.assert_close(
        gaussian_policy_kl(difference, 0.3, eps=0.0), (mse / (2 * s) - 0.5 * (1 + (v / s).log())).sum()
    )


def test_differences_that_do_not_vary_are_infinitely_far_and_never_nan():
    assert gaussian_policy_kl(torch.zeros(10, 2), 0.1, eps=0.0) == math.inf
    assert gaussian_policy_kl(torch.zeros(10, 2), 0.1).isfinite()


def test_ornstein_uhlenbeck_noise():
    torch.manual_seed(0)
    x, values = torch.zeros(2000), []
    for step in range(400):
        x = x - 0.15 * x * 0.5 + 0.3 * math.sqrt(0.5) * torch.randn(2000)
        if step > 200 and step % 20 == 0:
            values.append(x)
    assert ornstein_uhlenbeck_scale(0.3, 0.15, 0.5) == pytest.approx(float(torch.cat(values).std()), rel=0.03)
    assert ornstein_uhlenbeck_scale(1.0, 1e-17) == pytest.approx(1e17**0.5 / 2**0.5)
    with pytest.raises(ValueError, match="0 < theta"):
        ornstein_uhlenbeck_scale(0.3, 3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_scale": torch.ones(3)}, r"noise_scale has shape \(3,\); actions of 2 dimensions"),
        ({"noise_scale": 0.1, "eps": -1.0}, "eps must be >= 0 and finite"),
        ({"noise_scale": 1e-23, "eps": 0.0}, "its square"),
        ({"noise_scale": math.inf}, "noise_scale must be finite"),
        ({"noise_scale": math.nan}, "noise_scale must be finite"),
        ({"noise_scale": 0.0}, "noise_scale must be finite and > 0"),
        ({"noise_scale": torch.tensor([0.1, -0.1])}, "noise_scale must be finite and > 0"),
        ({"noise_scale": torch.ones(2, 2)}, r"noise_scale has shape \(2, 2\); actions of 2 dimensions"),
    ],
)
def test_bad_arguments_of_the_divergence(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_policy_kl(torch.randn(5, 2), **arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    difference = torch.randn(20, 2, dtype=dtype) * 1e-3
    found = gaussian_policy_kl(difference, 1e-4, eps=1e-12)
    torch.testing.assert_close(found, gaussian_policy_kl(difference.float(), 1e-4, eps=1e-12))
    with pytest.raises(TypeError, match=r"must be floating point, not torch.int64"):
        gaussian_policy_kl(torch.ones(5, 2, dtype=torch.int64), 0.1)
