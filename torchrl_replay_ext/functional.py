"""Functions of tensors: allocation, divergences from a policy, and off-policy returns."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import as_number, require_choice, require_finite, require_number
from torchrl_replay_ext.compilation import raise_if

__all__ = [
    "acer_value_target",
    "allocate",
    "gaussian_policy_kl",
    "importance_ratio",
    "importance_sampling_return",
    "off_policy_trace_return",
    "ornstein_uhlenbeck_scale",
    "q_opc",
    "retrace",
    "trust_region_projection",
]


Allocation = Literal["systematic", "multinomial", "largest_remainder"]
METHODS = get_args(Allocation)


def allocate(eta: Tensor, batch_size: int, method: Allocation = "systematic", u: Tensor | None = None) -> Tensor:
    r"""Divide a batch among tables in proportions η (SSET, Kompella et al. 2022, Algorithm 1).

    The paper collects "fixed i.i.d. proportions" from the tables, but B·η_k is rarely an integer. Three methods turn
    the proportions into counts:

    * ``"systematic"``: looks up the points (j + u) / B, j = 0..B−1, in the cumulative η. Each count is B·η_k, rounded
      down or up, and its expected value is B·η_k.
    * ``"multinomial"``: draws the table of each row independently.
    * ``"largest_remainder"``: deterministic rounding, the same for every batch. The counts are therefore biased.

    Args:
        eta: proportions η, float [K], >= 0. They are divided by their sum.
        batch_size: number of rows B, >= 1.
        method: ``"systematic"`` (default), ``"multinomial"`` or ``"largest_remainder"``.
        u: uniform random numbers in [0, 1), of shape [] or [1] for ``"systematic"`` and [B] for ``"multinomial"``.
            ``"largest_remainder"`` does not use them. Default: None, drawn from torch's global generator.

    Returns:
        The counts, int64 [K]. Their sum is B.

    Raises:
        ValueError: if ``method`` is unknown, ``batch_size`` < 1, or a proportion is negative or not finite, or all are
            0. The proportions are not checked in a graph and on an accelerator.

    Examples:
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, u=torch.tensor(0.5))
        tensor([16,  6, 10])
        >>> allocate(torch.tensor([0.5, 0.2, 0.3]), 32, "largest_remainder")
        tensor([16,  6, 10])
    """
    require_choice("allocate", "method", method, METHODS)
    if not (batch_size >= 1 and batch_size == int(batch_size)):
        raise ValueError(f"allocate(batch_size={batch_size}): batch_size must be an integer >= 1.")
    eta = eta.to(torch.float64)
    raise_if(
        lambda: not (eta >= 0).all() or not 0 < float(eta.sum()) < math.inf,
        lambda: ValueError(f"allocate(eta={eta.tolist()}): eta must be >= 0 and finite, and one of them > 0."),
        skip_on=eta,
    )
    ends = table_ends(eta / eta.sum(), batch_size, method, u)
    return torch.cat([ends[:1], ends[1:] - ends[:-1]])


def table_ends(eta: Tensor, batch_size: int, method: str, u: Tensor | None = None) -> Tensor:
    """Cumulative counts of :func:`allocate`, int64 [K], for float64 proportions with sum 1, which are not checked."""
    if method == "largest_remainder":
        share = batch_size * eta
        counts = share.floor()
        # rank 0 is the largest fraction; of equal fractions the lower index comes first
        rank = (counts - share).argsort(stable=True).argsort()
        return (counts + (rank < batch_size - counts.sum())).to(torch.int64).cumsum(0)
    if u is None:
        size = 1 if method == "systematic" else batch_size
        u = torch.rand(size, dtype=torch.float64, device=eta.device)
    # integers: the order in which a GPU adds them makes no difference
    cumulated = (eta * 2.0**52).to(torch.int64).cumsum(0)
    # the share of the tables that follow: exactly 1 before the first η > 0, and exactly 0 from the last one on
    later = (cumulated[-1:] - cumulated) / cumulated[-1:].double()
    if method == "systematic":
        # ⌈B (1 − later) − u⌉, written so that it is exact at both ends
        rows_later = u.reshape(-1)[:1].to(eta).add(later, alpha=batch_size).to(torch.int64)
        return (batch_size - rows_later).clamp_min_(0)
    return (u.reshape(1, -1) < (1 - later).unsqueeze(1)).sum(1)


def require_noise_scale(owner: str, noise_scale: float | Tensor) -> None:
    """Raise ValueError or TypeError if ``noise_scale`` does not hold standard deviations.

    Args:
        owner: the class or function that error messages name.
        noise_scale: the value to check.
    """
    if not isinstance(noise_scale, Tensor):
        noise_scale = torch.tensor(as_number(owner, "noise_scale", noise_scale), device="cpu")
    if noise_scale.is_complex() or noise_scale.dtype == torch.bool:
        raise TypeError(f"{owner}(noise_scale={noise_scale}): noise_scale must hold real numbers.")
    # checked in float32, where a tiny positive number becomes 0
    scale = noise_scale.float()
    raise_if(
        lambda: not (scale.isfinite() & (scale.clamp_min(0).square() > 0)).all(),
        lambda: ValueError(
            f"{owner}(noise_scale={noise_scale}): noise_scale must be finite and > 0, and so must its square in "
            "float32."
        ),
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
        The divergence in nats, [...], float64 for ``difference`` in float64, else float32. With ``eps`` = 0 it is
        +inf, or very large by rounding, if a difference does not vary. Gradients flow.

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
    return divergence(difference, noise_scale, eps)


def divergence(difference: Tensor, noise_scale: float | Tensor, eps: float) -> Tensor:
    """Compute :func:`gaussian_policy_kl` without checking the values of its arguments."""
    # squares need at least float32
    difference = difference if difference.dtype == torch.float64 else difference.float()
    scale, size = torch.as_tensor(noise_scale, dtype=difference.dtype, device=difference.device), difference.shape[-1]
    if scale.shape not in ((), (size,)):
        raise ValueError(
            f"noise_scale has shape {tuple(scale.shape)}; actions of {size} dimensions need a number or a tensor of "
            f"shape [{size}]."
        )
    noise_variance = scale.square()
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
    return sigma / math.sqrt(theta * (2 - theta * dt))


Statistics = TypeVar("Statistics", Tensor, tuple[Tensor, ...])
UNIT_INTERVAL = partial(require_number, valid=lambda x: 0 <= x <= 1, rule="in [0, 1]")
THRESHOLD = partial(require_number, valid=lambda x: x >= 0, rule=">= 0; use math.inf for no truncation")
POWER = partial(require_number, valid=lambda x: 0 < x < math.inf, rule="> 0 and finite")


def max_log_ratio(dtype: torch.dtype) -> float:
    """The largest log-ratio of probabilities, 40 (float16: 5.5); ``dtype`` has the square of its exponential."""
    return min(40.0, 0.99 * math.log(torch.finfo(dtype).max) / 2)


def log_ratio(log_p: Tensor, log_q: Tensor, power: float = 1.0) -> Tensor:
    """Power · log(p / q), at most :func:`max_log_ratio`; −inf where p = 0, also if q = 0."""
    ratio = ((log_p - log_q) * power).masked_fill(log_p == -math.inf, -math.inf)
    return ratio.clamp_max(max_log_ratio(ratio.dtype))


def _require_shape(name: str, expected: torch.Size, **tensors: Tensor) -> None:
    for key, tensor in tensors.items():
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: {key} has shape {tuple(tensor.shape)}, expected {tuple(expected)}; all tensors must have the "
                "same shape."
            )


def last_steps(done: Tensor, time_dim: int) -> Tensor:
    """True in done steps and in the last step of a row, bool in the shape of ``done``."""
    last = torch.zeros_like(done, dtype=torch.bool)
    last.movedim(time_dim, 0)[-1:] = True
    return last | done.to(torch.bool)


def _later(x: Tensor, steps: int) -> Tensor:
    """``x`` [..., T] at time t + ``steps`` for each t; 0 after the last step."""
    return torch.cat([x[..., steps:], torch.zeros_like(x[..., :steps])], -1)


def off_policy_trace_return(
    gamma: float | Tensor,
    trace: Tensor,
    action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""Off-policy return with given trace coefficients; Retrace, Q(λ) and tree backup are special cases.

    With Q_t = Q(x_t, a_t), V_{t+1} = V(x_{t+1}) and trace coefficients c_t (Munos et al. 2016, Eq. 3; Wang et al. 2017,
    Eq. 5, with c in place of ρ̄)::

        R_t = r_t + γ V_{t+1} + γ c_{t+1} (R_{t+1} − Q_{t+1})

    In a ``terminated`` step, V_{t+1} is replaced by 0, even if it is NaN. In a ``done`` step and in the last step, the
    correction γ c_{t+1} (R_{t+1} − Q_{t+1}) is 0. So a truncated step bootstraps from V_{t+1}, and a row may hold
    several episodes.

    The recurrence is solved by doubling in O(log T) tensor operations. NaNs after the end of an episode affect neither
    values nor gradients before the end.

    Args:
        gamma: discount factor γ, a number in [0, 1], or a tensor that broadcasts to [\*B, T, F].
        trace: c_t, [\*B, T, F], >= 0. The coefficient of the first step is not used.
        action_value: Q_t, float [\*B, T, F].
        next_state_value: V_{t+1}, float [\*B, T, F]. x_{t+1} is the state that step t led to, also if the episode ends.
        reward: r_t, float [\*B, T, F].
        done: bool [\*B, T, F], True if the episode ends with step t, terminated or truncated.
        terminated: bool [\*B, T, F], True if the episode terminates with step t. Default: None, equal to ``done``.
        time_dim: the dimension of time. Default: -2.

    Returns:
        R_t, [\*B, T, F], in the dtype of ``action_value``. Gradients flow to all arguments.

    Raises:
        ValueError: if shapes differ, or ``gamma`` is a number out of range.

    Examples:
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [8.0]])
        >>> done = torch.tensor([[False], [False]])
        >>> off_policy_trace_return(0.5, torch.ones(2, 1), torch.zeros(2, 1), value, reward, done)
        tensor([[4.],
                [6.]])
    """
    terminated = done if terminated is None else terminated
    if not isinstance(gamma, Tensor):
        UNIT_INTERVAL("off_policy_trace_return", "gamma", gamma)
    _require_shape(
        "off_policy_trace_return",
        action_value.shape,
        trace=trace,
        next_state_value=next_state_value,
        reward=reward,
        done=done,
        terminated=terminated,
    )
    done, terminated = done.to(torch.bool), terminated.to(torch.bool)
    one_step = reward + gamma * next_state_value.masked_fill(terminated, 0.0) - action_value
    # y_t = R_t − Q_t follows y_t = b_t + a_t y_{t+1}, with a_t = 0 where an episode ends
    b = one_step.movedim(time_dim, -1)
    ended = done.movedim(time_dim, -1)
    a = (gamma * _later(trace.movedim(time_dim, -1), 1).movedim(-1, time_dim)).movedim(time_dim, -1)
    # masked, not multiplied by 0, because entries after an end may be NaN
    a = a.masked_fill(ended, 0.0)
    largest = torch.finfo(a.dtype).max
    steps = 1
    while steps < b.shape[-1]:
        b = b + a * _later(b, steps).masked_fill(ended, 0.0)
        # without the clamp, a product may overflow, and inf times the 0 after an end is NaN
        a = (a * _later(a, steps).masked_fill(ended, 0.0)).clamp_max(largest)
        ended = ended | _later(ended, steps)
        steps *= 2
    return (action_value + b.movedim(-1, time_dim)).to(action_value.dtype)


def importance_ratio(log_pi: Tensor, log_mu: Tensor, power: float = 1.0) -> Tensor:
    """Importance ratio ρ = (π / μ)^power, and 0 where π = 0.

    ρ is at most e^40, in float16 e^5.5, so that ρ and its gradient stay finite where μ underflows.

    Args:
        log_pi: log-probability under the target policy π, any shape.
        log_mu: log-probability under the behaviour policy μ, in the same shape.
        power: exponent, > 0. Default: 1.0.

    Returns:
        ρ, in the same shape. Gradients flow.
    """
    return log_ratio(log_pi, log_mu, power).exp()


def retrace(
    gamma: float | Tensor,
    lmbda: float,
    log_pi: Tensor,
    log_mu: Tensor,
    action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    rho_thresh: float = 1.0,
    rho_power: float = 1.0,
    time_dim: int = -2,
) -> Tensor:
    r"""Retrace(λ), an estimate of Q^π from trajectories of a behaviour policy μ (Munos et al. 2016).

    With ρ = π(a_t|x_t) / μ(a_t|x_t) and ρ̄ = λ min(c, ρ^power) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ ρ̄_{t+1} [Q^ret_{t+1} − Q_{t+1}] + γ V_{t+1}

    Wang et al. use the symbol ρ̄ both for trace coefficients and for weights of the policy gradient. Here, ρ̄ is the
    trace coefficient of their Algorithms 2 and 3, with c = 1. In Algorithm 3, power = 1/d for actions of d dimensions;
    the paper prints 1/δ. The weights of the policy gradient have another threshold, c = 10.

    All tensors have the same shape [\*B, T, 1].

    Args:
        gamma: discount factor γ, a number in [0, 1], or a tensor that broadcasts to [\*B, T, 1].
        lmbda: λ in [0, 1]; 0 gives r_t + γ V_{t+1}.
        log_pi: log-probability of a_t under the target policy π.
        log_mu: log-probability of a_t under the behaviour policy μ, stored when it acted.
        action_value: Q_t = Q(x_t, a_t) of the action taken.
        next_state_value: V_{t+1} = E_{a~π} Q(x_{t+1}, a). x_{t+1} is the state that step t led to, also if the episode
            ends.
        reward: r_t.
        done: bool, True if the episode ends with step t. Later steps then give no correction.
        terminated: bool, True if the episode terminates with step t. V_{t+1} is then replaced by 0. Default: None,
            equal to ``done``.
        rho_thresh: truncation c of ρ, >= 0; ``math.inf``: no truncation. Default: 1.0.
        rho_power: exponent of ρ, > 0 and finite. Default: 1.0.
        time_dim: the dimension of time. Default: -2.

    Returns:
        Q^ret_t, [\*B, T, 1], in the dtype of ``action_value``. If c <= 1, the result is finite for any ρ.
        Gradients flow to all arguments: detach the result to use it as a target.

    Raises:
        ValueError: if shapes differ, or an argument is out of range.

    Examples:
        >>> log_mu = torch.tensor([[0.5], [0.5]]).log()
        >>> log_pi = torch.tensor([[0.9], [0.25]]).log()
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [8.0]])
        >>> done = torch.tensor([[False], [True]])
        >>> retrace(1.0, 1.0, log_pi, log_mu, torch.zeros(2, 1), value, reward, done)
        tensor([[5.],
                [2.]])
    """
    UNIT_INTERVAL("retrace", "lmbda", lmbda)
    THRESHOLD("retrace", "rho_thresh", rho_thresh)
    POWER("retrace", "rho_power", rho_power)
    _require_shape("retrace", action_value.shape, log_pi=log_pi, log_mu=log_mu)
    trace = lmbda * importance_ratio(log_pi, log_mu, rho_power).clamp_max(rho_thresh)
    return off_policy_trace_return(
        gamma, trace, action_value, next_state_value, reward, done, terminated, time_dim=time_dim
    )


def q_opc(
    gamma: float | Tensor,
    lmbda: float,
    action_value: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""Q(λ) with off-policy corrections (Harutyunyan et al. 2016; Wang et al. 2017, Eq. 21).

    :func:`retrace` with λ in place of ρ̄. Traces are not truncated, so later rewards have more weight. The operator is a
    contraction only if the two policies are close to each other. ACER uses it for the actor, not for the critic.

    All tensors have the same shape [\*B, T, 1].

    Args:
        gamma: discount factor γ, a number in [0, 1], or a tensor that broadcasts to [\*B, T, 1].
        lmbda: λ in [0, 1]; the paper has 1.
        action_value: Q_t = Q(x_t, a_t) of the action taken.
        next_state_value: V_{t+1} = E_{a~π} Q(x_{t+1}, a).
        reward: r_t.
        done: bool, True if the episode ends with step t.
        terminated: bool, True if the episode terminates with step t. Default: None, equal to ``done``.
        time_dim: the dimension of time. Default: -2.

    Returns:
        Q^opc_t, [\*B, T, 1], in the dtype of ``action_value``. Gradients flow to all arguments.

    Raises:
        ValueError: if shapes differ, or an argument is out of range.

    Examples:
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [8.0]])
        >>> done = torch.tensor([[False], [True]])
        >>> q_opc(1.0, 1.0, torch.zeros(2, 1), value, reward, done)
        tensor([[6.],
                [2.]])
    """
    UNIT_INTERVAL("q_opc", "lmbda", lmbda)
    trace = torch.full_like(action_value, lmbda)
    return off_policy_trace_return(
        gamma, trace, action_value, next_state_value, reward, done, terminated, time_dim=time_dim
    )


def importance_sampling_return(
    gamma: float | Tensor,
    log_pi: Tensor,
    log_mu: Tensor,
    next_state_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor | None = None,
    *,
    time_dim: int = -2,
) -> Tensor:
    r"""Return by importance sampling, R_t = r_t + γ ρ_{t+1} R_{t+1} (Wang et al. 2017, App. E.4, which prints no γ).

    It replaces Retrace in an ablation of ACER. In a truncated step and in the last step, V_{t+1} replaces
    ρ_{t+1} R_{t+1}. The product of the ρ is not truncated: over many steps it may overflow.

    All tensors have the same shape [\*B, T, 1].

    Args:
        gamma: discount factor γ, a number in [0, 1], or a tensor that broadcasts to [\*B, T, 1].
        log_pi: log-probability of a_t under the target policy π.
        log_mu: log-probability of a_t under the behaviour policy μ, stored when it acted.
        next_state_value: V_{t+1}, used where a row or a truncated episode ends.
        reward: r_t.
        done: bool, True if the episode ends with step t.
        terminated: bool, True if the episode terminates with step t. Default: None, equal to ``done``.
        time_dim: the dimension of time. Default: -2.

    Returns:
        R_t, [\*B, T, 1], in the dtype of ``next_state_value``. Gradients flow to all arguments.

    Raises:
        ValueError: if shapes differ, or ``gamma`` is a number out of range.

    Examples:
        >>> log_mu, log_pi = torch.tensor([[0.5], [0.2]]).log(), torch.tensor([[0.5], [0.6]]).log()
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [8.0]])
        >>> done = torch.tensor([[False], [True]])
        >>> importance_sampling_return(1.0, log_pi, log_mu, value, reward, done)
        tensor([[7.],
                [2.]])
    """
    _require_shape(
        "importance_sampling_return", next_state_value.shape, log_pi=log_pi, log_mu=log_mu, reward=reward, done=done
    )
    value = next_state_value.masked_fill(~last_steps(done, time_dim), 0.0)
    trace = importance_ratio(log_pi, log_mu)
    return off_policy_trace_return(
        gamma, trace, torch.zeros_like(value), value, reward, done, terminated, time_dim=time_dim
    )


def acer_value_target(
    log_pi: Tensor, log_mu: Tensor, q_ret: Tensor, action_value: Tensor, state_value: Tensor
) -> Tensor:
    r"""Target of the state value, V^target = min(1, ρ) (Q^ret − Q) + V (Wang et al. 2017, Eq. 14).

    Args:
        log_pi: log-probability of the action taken under the target policy π, any shape.
        log_mu: log-probability of the same action under the behaviour policy μ, in the same shape.
        q_ret: Q^ret of :func:`retrace`, in the same shape.
        action_value: Q(x_t, a_t), in the same shape.
        state_value: V(x_t), in the same shape.

    Returns:
        V^target, in the same shape. Gradients flow to all arguments.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> half, one = torch.tensor([0.5]).log(), torch.tensor([1.0])
        >>> acer_value_target(half, half, 5 * one, 2 * one, one)
        tensor([4.])
    """
    _require_shape(
        "acer_value_target", action_value.shape, log_pi=log_pi, log_mu=log_mu, q_ret=q_ret, state_value=state_value
    )
    return importance_ratio(log_pi, log_mu).clamp_max(1.0) * (q_ret - action_value) + state_value


def trust_region_projection(g: Statistics, k: Statistics, delta: float) -> tuple[Statistics, Tensor]:
    r"""Project a policy gradient g so that a divergence grows at a rate of at most δ (Wang et al. 2017, Eqs. 11-12).

    ``z = g − max(0, (kᵀg − δ) / |k|²) k`` minimises ½ |g − z|² subject to kᵀz <= δ. Where k is 0, z is g. The result is
    also correct where |k|² overflows or underflows its dtype.

    Args:
        g: gradient of the objective with respect to the statistics of a distribution, [..., n]; or a tuple of gradients
            with respect to several statistics, which are projected together.
        k: gradient of the divergence, in the shapes of ``g``.
        delta: δ >= 0, in nats per unit of step.

    Returns:
        z, in the shapes of ``g``, and a bool tensor [...], True where the constraint was active. Gradients flow.

    Raises:
        ValueError: if shapes differ, or delta is negative.

    Examples:
        >>> trust_region_projection(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0]), 1.0)
        (tensor([1., 1.]), tensor(True))
    """
    require_number("trust_region_projection", "delta", delta, lambda x: x >= 0, ">= 0")
    gs, ks = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (g, k))
    if [x.shape for x in gs] != [x.shape for x in ks]:
        raise ValueError(
            f"trust_region_projection: g has shape {[tuple(x.shape) for x in gs]}, k {[tuple(x.shape) for x in ks]}; "
            "both must have the same shapes."
        )
    joint, direction = torch.cat(gs, -1), torch.cat(ks, -1)
    # z depends on k / |k| and δ / |k| only, so k is scaled to a length of about 1: its square neither overflows nor
    # underflows
    size = direction.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, torch.ones_like(size))
    unit = direction / size
    # not a number divided by the tensor, which torch computes as delta · (1 / size)
    excess = (unit * joint).sum(-1, keepdim=True) - torch.full_like(size, delta) / size
    active = excess > 0
    square = unit.square().sum(-1, keepdim=True)
    step = torch.where(active, excess, torch.zeros_like(excess)) / torch.where(active, square, torch.ones_like(square))
    z = joint - step * unit
    parts: Any = z.split([x.shape[-1] for x in gs], -1)
    return (parts[0] if isinstance(g, Tensor) else parts), active.squeeze(-1)
