"""KL divergence between Gaussians, to measure how far stored actions are from those of the current policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_finite
from torchrl_replay_ext.compilation import raise_if


def as_noise_scale(noise_scale: float | Tensor, reference: Tensor) -> Tensor:
    """Convert ``noise_scale`` to a tensor of shape [] or [A] for ``reference`` [..., A]; else ValueError."""
    scale = torch.as_tensor(noise_scale, dtype=reference.dtype, device=reference.device)
    size = reference.shape[-1]
    if scale.shape not in ((), (size,)):
        raise ValueError(
            f"noise_scale has shape {tuple(scale.shape)}; actions of {size} dimensions need a number or a tensor of "
            f"shape [{size}]."
        )
    return scale


def require_noise_scale(owner: str, noise_scale: float | Tensor) -> None:
    """Raise ValueError or TypeError if ``noise_scale`` does not hold standard deviations.

    Args:
        owner: the class or function that error messages name.
        noise_scale: the value to check.
    """
    try:
        scale = noise_scale if isinstance(noise_scale, Tensor) else torch.as_tensor(noise_scale, device="cpu")
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{owner}(noise_scale={noise_scale!r}): noise_scale must be a number or a tensor.") from error
    if scale.dtype == torch.bool or scale.is_complex():
        raise TypeError(f"{owner}(noise_scale={noise_scale}): noise_scale must be real numbers, not {scale.dtype}.")
    if scale.ndim > 1:
        raise ValueError(
            f"{owner}: noise_scale has shape {tuple(scale.shape)}; it must be a number or standard deviations [A]. For "
            "noise with a covariance matrix C pass C.diagonal().sqrt()."
        )
    # checked in float32, where a tiny positive number becomes 0
    scale = scale.float()

    def require(is_met: Callable[[], Any], rule: str) -> None:
        raise_if(lambda: not is_met(), lambda: ValueError(f"{owner}(noise_scale={noise_scale}): {rule}"))

    require(lambda: scale.isfinite().all(), "noise_scale must be finite.")
    require(
        lambda: scale.clamp_min(0).square().gt(0).all(), "noise_scale must be > 0, and so must its square in float32."
    )


def gaussian_policy_kl(difference: Tensor, noise_scale: float | Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""D_KL(N(μ, Σ) ‖ N(0, S)) of action differences from exploration noise (DPER, arXiv 2512.05320).

    A difference is a stored action minus the action of the current policy. μ and Σ are the mean and the variances
    (divided by B, not B − 1) of the differences over a batch, and S holds the variances of the noise. The dimensions
    count as independent. For a single dimension, with variance v of the differences and s of the noise, and with
    MSE = v + μ², the divergence is ::

        ½ [(v + μ²) / s − 1 + ln(s / v)] = MSE / 2s − ½ (1 + ln(v / s))

    It grows with the mean squared error, and it penalises a batch whose differences hardly vary.

    Args:
        difference: stored actions minus actions of the policy, float [..., B, A].
        noise_scale: standard deviations of the noise, a number or a tensor [A], > 0.
        eps: added to the variances of the differences, >= 0. Default: 1e-6.

    Returns:
        The divergence in nats, [...], float64 for ``difference`` in float64, else float32. It is +inf, never NaN, with
        ``eps`` = 0 if a difference does not vary. Gradients flow.

    Raises:
        ValueError: if an argument has a wrong value or shape. The values of ``noise_scale`` are not checked in a
            compiled graph.
        TypeError: if ``difference`` is not floating point, or ``noise_scale`` does not hold real numbers.

    Examples:
        >>> noise = 0.1 * torch.tensor([[1.0], [-1.0]])
        >>> gaussian_policy_kl(noise, 0.1, eps=0.0)
        tensor(0.)
        >>> gaussian_policy_kl(noise + 0.1, 0.1, eps=0.0)
        tensor(0.5000)
    """
    require_finite("gaussian_policy_kl", "eps", eps)
    if difference.ndim < 2 or not difference.shape[-2]:
        raise ValueError(f"gaussian_policy_kl: difference has shape {tuple(difference.shape)}, expected [..., B, A].")
    if not difference.is_floating_point():
        raise TypeError(f"gaussian_policy_kl: difference must be floating point, not {difference.dtype}.")
    require_noise_scale("gaussian_policy_kl", noise_scale)
    # squares need at least float32
    return divergence(difference if difference.dtype == torch.float64 else difference.float(), noise_scale, eps)


def divergence(difference: Tensor, noise_scale: float | Tensor, eps: float) -> Tensor:
    """Compute :func:`gaussian_policy_kl` without checking the values of its arguments."""
    noise_variance = as_noise_scale(noise_scale, difference).square()
    mean = difference.mean(-2)
    variance = (difference - mean.unsqueeze(-2)).square().mean(-2) + eps
    kl = (variance + mean.square()) / noise_variance - 1 + (noise_variance / variance).log()
    return kl.sum(-1) / 2


def ornstein_uhlenbeck_scale(sigma: float, theta: float, dt: float = 1.0) -> float:
    r"""Stationary standard deviation of an Ornstein-Uhlenbeck process, for use as ``noise_scale``.

    The process x_{t+1} = x_t − θ x_t dt + σ √dt ε has the stationary variance σ² dt / (1 − (1 − θ dt)²).

    Args:
        sigma: scale σ of the noise, > 0.
        theta: rate θ of the return to the mean, with 0 < θ dt < 2.
        dt: time step, > 0, in the unit of 1/θ. Default: 1.0.

    Returns:
        The standard deviation, > 0.

    Raises:
        ValueError: if the process has no stationary distribution.

    Examples:
        >>> round(ornstein_uhlenbeck_scale(0.2, 0.15), 4)
        0.3797
    """
    if not (sigma > 0 and dt > 0 and 0 < theta * dt < 2):
        raise ValueError(
            f"ornstein_uhlenbeck_scale(sigma={sigma}, theta={theta}, dt={dt}): sigma and dt must be > 0, and "
            "0 < theta * dt < 2."
        )
    return sigma * math.sqrt(dt / (1 - (1 - theta * dt) ** 2))
