"""KL divergence between Gaussians, to measure how far stored actions are from those of the current policy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_choice, require_finite
from torchrl_replay_ext.compilation import raise_if

Covariance = Literal["diag", "full"]


def as_noise_scale(noise_scale: float | Tensor, reference: Tensor) -> Tensor:
    """Convert ``noise_scale`` to a tensor of shape [], [A] or [A, A] for ``reference`` [..., A]; else ValueError."""
    scale = torch.as_tensor(noise_scale, dtype=reference.dtype, device=reference.device)
    size = reference.shape[-1]
    if scale.shape not in ((), (size,), (size, size)):
        raise ValueError(
            f"noise_scale has shape {tuple(scale.shape)}; actions of {size} dimensions need a number or a tensor of "
            f"shape [{size}] or [{size}, {size}]."
        )
    return scale


def require_noise_scale(owner: str, noise_scale: float | Tensor) -> None:
    """Raise ValueError or TypeError if ``noise_scale`` is neither standard deviations nor a covariance matrix.

    Args:
        owner: the class or function that error messages name.
        noise_scale: the value to check.
    """
    try:
        scale = torch.as_tensor(noise_scale)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{owner}(noise_scale={noise_scale!r}): noise_scale must be a number or a tensor.") from error
    if scale.dtype == torch.bool or scale.is_complex():
        raise TypeError(f"{owner}(noise_scale={noise_scale}): noise_scale must be real numbers, not {scale.dtype}.")
    if scale.ndim > 2 or (scale.ndim == 2 and scale.shape[0] != scale.shape[1]):
        raise ValueError(
            f"{owner}: noise_scale has shape {tuple(scale.shape)}; it must be a number, standard deviations [A] or a "
            "covariance matrix [A, A]."
        )
    # checked in float32, where a tiny positive number becomes 0
    scale = scale.to(torch.float64 if scale.dtype == torch.float64 and scale.ndim == 2 else torch.float32)
    variance = scale.diagonal() if scale.ndim == 2 else scale.clamp_min(0).square()

    def require(is_met: Callable[[], Any], rule: str) -> None:
        raise_if(lambda: not is_met(), lambda: ValueError(f"{owner}(noise_scale={noise_scale}): {rule}"))

    require(lambda: scale.isfinite().all(), "noise_scale must be finite.")
    require(lambda: variance.gt(0).all(), "noise_scale must be > 0, and so must its square in float32.")
    if scale.ndim == 2:
        require(
            lambda: torch.allclose(scale, scale.mT, rtol=1e-4, atol=1e-6 * float(variance.max())),
            "a covariance matrix must be symmetric; for its Cholesky factor L pass L @ L.mT.",
        )
        require(lambda: torch.linalg.cholesky_ex(scale).info == 0, "a covariance matrix must be positive definite.")


def gaussian_policy_kl(
    difference: Tensor, noise_scale: float | Tensor, *, covariance: Covariance = "diag", eps: float = 1e-6
) -> Tensor:
    r"""D_KL(N(μ, Σ) ‖ N(0, S)) of action differences from exploration noise (DPER, arXiv 2512.05320).

    A difference is a stored action minus the action of the current policy. μ and Σ are the mean and the covariance
    (divided by B, not B − 1) of the differences over a batch, and S is the covariance of the noise. For a single
    dimension, with variance v of the differences and s of the noise, and with MSE = v + μ², the divergence is ::

        ½ [(v + μ²) / s − 1 + ln(s / v)] = MSE / 2s − ½ (1 + ln(v / s))

    It grows with the mean squared error, and it penalises a batch whose differences hardly vary.

    Args:
        difference: stored actions minus actions of the policy, float [..., B, A].
        noise_scale: the noise. A number or a tensor [A], > 0: standard deviations. A tensor [A, A], symmetric and
            positive definite: the covariance matrix.
        covariance: ``"diag"`` (default) uses only the variances of the differences, after whitening if the noise has a
            covariance matrix. ``"full"`` uses the whole covariance matrix.
        eps: added to the variances of the differences, >= 0. Default: 1e-6.

    Returns:
        The divergence in nats, [...], float64 for ``difference`` in float64, else float32. It is +inf, never NaN, where
        the covariance of the differences is singular. This happens with ``eps`` = 0 if a difference does not vary, and
        with ``"full"`` for B <= A rows and any ``eps``. Gradients flow.

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
    require_choice("gaussian_policy_kl", "covariance", covariance, get_args(Covariance))
    require_finite("gaussian_policy_kl", "eps", eps)
    if difference.ndim < 2 or not difference.shape[-2]:
        raise ValueError(f"gaussian_policy_kl: difference has shape {tuple(difference.shape)}, expected [..., B, A].")
    if not difference.is_floating_point():
        raise TypeError(f"gaussian_policy_kl: difference must be floating point, not {difference.dtype}.")
    require_noise_scale("gaussian_policy_kl", noise_scale)
    # squares and determinants need at least float32
    difference = difference if difference.dtype == torch.float64 else difference.float()
    # a covariance matrix may be positive definite in float64 only
    require_noise_scale("gaussian_policy_kl", as_noise_scale(noise_scale, difference))
    return divergence(difference, noise_scale, covariance, eps)


def divergence(difference: Tensor, noise_scale: float | Tensor, covariance: str, eps: float) -> Tensor:
    """Compute :func:`gaussian_policy_kl` without checking the values of its arguments."""
    scale = as_noise_scale(noise_scale, difference)
    rows, size = difference.shape[-2:]
    noise_variance, unit = scale * scale, None
    if scale.ndim == 2:
        whitening = torch.linalg.cholesky(scale)
        difference = torch.linalg.solve_triangular(whitening, difference.mT, upper=False).mT
        # eps times the identity, in the whitened coordinates
        unit = torch.linalg.solve_triangular(whitening, torch.eye(size).to(scale), upper=False)
        noise_variance = torch.ones_like(scale[0])
    mean = difference.mean(-2)
    centred = difference - mean.unsqueeze(-2)
    if covariance == "diag":
        variance = centred.square().mean(-2) + (eps if unit is None else eps * unit.square().sum(-1))
        each = (variance + mean.square()) / noise_variance - 1 + (noise_variance / variance).log()
        return each.sum(-1) / 2
    if rows <= size:
        return torch.full_like(mean[..., 0], math.inf)
    diagonal = torch.eye(size, dtype=difference.dtype, device=difference.device)
    matrix = centred.mT @ centred / rows + eps * (diagonal if unit is None else unit @ unit.mT)
    sign, log_determinant = torch.linalg.slogdet(matrix)
    noise_variance = noise_variance.expand(size)
    trace = (matrix * diagonal / noise_variance).sum((-2, -1))
    result = trace + (mean.square() / noise_variance).sum(-1) - size + noise_variance.log().sum() - log_determinant
    return torch.where(sign > 0, result / 2, math.inf)


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
