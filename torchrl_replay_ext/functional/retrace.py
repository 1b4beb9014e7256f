"""Returns from off-policy trajectories: Retrace, Q(λ) with off-policy corrections, and what ACER makes of them."""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

# Ratios of probabilities are cut off here: e^40 is 2·10^17, and its square is still a float32.
MAX_LOG_RATIO = 40.0


def _require_shape(name: str, expected: torch.Size, **tensors: Tensor) -> None:
    for key, tensor in tensors.items():
        if tensor.shape != expected:
            raise ValueError(
                f"{name}: {key} has shape {tuple(tensor.shape)}, expected {tuple(expected)}: all are of one shape."
            )


def _later(x: Tensor, steps: int) -> Tensor:
    """``x`` [..., T] ``steps`` later, 0 behind the end."""
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
    r"""Return of a trajectory with any trace coefficients c: what Retrace, Q(λ), tree backup and others share.

    With Q_t = Q(x_t, a_t), V_{t+1} = V(x_{t+1}) and c_t the coefficient of the correction at step t (Munos et al. 2016,
    Eq. 3; Wang et al. 2017, Eq. 5, with c in place of ρ̄)::

        R_t = r_t + γ V_{t+1} + γ c_{t+1} (R_{t+1} − Q_{t+1})

    Where ``terminated``, V_{t+1} counts as 0, whatever is given for it; where ``done``, and behind the last step, there
    is no correction from later steps. So a truncated step bootstraps, and a row may hold several episodes.

    The recurrence is solved in O(log T) steps by doubling, without a loop over time. What lies behind an end may be
    NaN: it reaches neither the values nor the gradients of what lies before.

    Args:
        gamma: discount factor; a number, or a tensor that broadcasts against the others.
        trace: c_t, >= 0. The first of a trajectory is not used.
        action_value: Q_t.
        next_state_value: V_{t+1}, of the state that step t led to, also where an episode ends there.
        reward: r_t.
        done: bool, the episode ends with step t.
        terminated: bool, it ends for good; by default wherever it is done.
        time_dim: the dimension of time.

    All are of one shape, [*B, T, F].

    Returns:
        R_t, [*B, T, F], in the dtype of ``action_value``. Gradients flow to all arguments.

    Raises:
        ValueError: if shapes differ.

    Examples:
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [8.0]])
        >>> done = torch.tensor([[False], [False]])
        >>> off_policy_trace_return(0.5, torch.ones(2, 1), torch.zeros(2, 1), value, reward, done)
        tensor([[4.],
                [6.]])
    """
    terminated = done if terminated is None else terminated
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
    # y_t = R_t − Q_t = b_t + a_t y_{t+1}, where y_{t+1} counts
    b = one_step.movedim(time_dim, -1)
    ended = done.movedim(time_dim, -1)
    a = (gamma * _later(trace.movedim(time_dim, -1), 1).movedim(-1, time_dim)).movedim(time_dim, -1)
    # masked, not multiplied by 0: what lies behind an end may be NaN
    a = a.masked_fill(ended, 0.0)
    largest = torch.finfo(a.dtype).max
    steps = 1
    while steps < b.shape[-1]:
        b = b + a * _later(b, steps).masked_fill(ended, 0.0)
        # clamped: a product that overflows would make NaN of the 0 behind an end
        a = (a * _later(a, steps).masked_fill(ended, 0.0)).clamp_max(largest)
        ended = ended | _later(ended, steps)
        steps *= 2
    return (action_value + b.movedim(-1, time_dim)).to(action_value.dtype)


def importance_ratio(log_pi: Tensor, log_mu: Tensor, power: float = 1.0) -> Tensor:
    """ρ = (π / μ)^power from log-probabilities, at most e^40: where μ underflows, ρ and its gradient stay finite."""
    return ((log_pi - log_mu) * power).clamp_max(MAX_LOG_RATIO).exp()


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
    r"""Retrace(λ), an estimate of Q^π from trajectories of another policy (Munos et al. 2016).

    With ρ = π(a_t|x_t) / μ(a_t|x_t) and ρ̄ = λ min(c, ρ^power) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ ρ̄_{t+1} [Q^ret_{t+1} − Q_{t+1}] + γ V_{t+1}

    The paper writes ρ̄ for two things. Here it is the coefficient of its Algorithms 2 and 3: c = 1 and, for actions of d
    dimensions, power = 1/d (Algorithm 3 prints 1/δ), not the truncation with c = 10 of the policy's gradient.

    Args:
        gamma: discount factor.
        lmbda: λ in [0, 1]; 0 gives r_t + γ V_{t+1}.
        log_pi: log-probability of a_t under the policy that is evaluated.
        log_mu: under the one that acted, as it was then.
        action_value: Q_t, of the actions taken.
        next_state_value: V_{t+1} = E_{a~π} Q(x_{t+1}, a), of the state that step t led to.
        reward: r_t.
        done: bool, the episode ends with step t: no correction from later steps.
        terminated: bool, it ends for good: no V_{t+1} either, and what is given there is not looked at; by default
            wherever it is done.
        rho_thresh: c, >= 0; ``math.inf`` cuts nothing.
        rho_power: exponent of ρ, > 0.
        time_dim: the dimension of time.

    All tensors are of one shape, [*B, T, 1].

    Returns:
        Q^ret_t, [*B, T, 1], in the dtype of ``action_value``; for a finite c, finite for any ρ. Gradients flow to all
        arguments: detach the result to use it as a target.

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
    if not 0 <= lmbda <= 1:
        raise ValueError(f"retrace(lmbda={lmbda}): lmbda must be in [0, 1].")
    if not rho_thresh >= 0:
        raise ValueError(f"retrace(rho_thresh={rho_thresh}): rho_thresh must be >= 0; use math.inf to cut nothing.")
    if not 0 < rho_power < math.inf:
        raise ValueError(f"retrace(rho_power={rho_power}): rho_power must be > 0 and finite; use q_opc to cut nothing.")
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

    :func:`retrace` with λ in place of ρ̄: no trace is cut, so that returns reach further. It is a contraction only if
    the two policies are near to each other; ACER uses it for the actor, not for the critic.

    Examples:
        >>> reward, value = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [8.0]])
        >>> done = torch.tensor([[False], [True]])
        >>> q_opc(1.0, 1.0, torch.zeros(2, 1), value, reward, done)
        tensor([[6.],
                [2.]])
    """
    if not 0 <= lmbda <= 1:
        raise ValueError(f"q_opc(lmbda={lmbda}): lmbda must be in [0, 1].")
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
    r"""Return by importance sampling, R_t = r_t + γ ρ_{t+1} R_{t+1}: what ACER's ablation has in place of Retrace.

    Wang et al. 2017, App. E.4, which prints no γ. Where an episode is truncated, and behind the last step, V_{t+1}
    stands for ρ_{t+1} R_{t+1}. Arguments and result as those of :func:`retrace`, in the dtype of ``next_state_value``.
    Nothing bounds the product of the ρ: over many steps it may overflow.

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
    last = torch.zeros_like(done.movedim(time_dim, 0), dtype=torch.bool)
    last[-1:] = True
    value = next_state_value.masked_fill(~(done.to(torch.bool) | last.movedim(0, time_dim)), 0.0)
    trace = importance_ratio(log_pi, log_mu)
    return off_policy_trace_return(
        gamma, trace, torch.zeros_like(value), value, reward, done, terminated, time_dim=time_dim
    )


def acer_value_target(
    log_pi: Tensor, log_mu: Tensor, q_ret: Tensor, action_value: Tensor, state_value: Tensor
) -> Tensor:
    r"""Target of the state value, V^target = min(1, ρ) (Q^ret − Q) + V (Wang et al. 2017, Eq. 14).

    Args:
        log_pi: log-probability of the action taken under the current policy.
        log_mu: under the policy that took it.
        q_ret: Q^ret of :func:`retrace`.
        action_value: Q(x_t, a_t).
        state_value: V(x_t).

    All are of one shape.

    Returns:
        V^target, of that shape. Gradients flow to all arguments.

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


@overload
def trust_region_projection(g: Tensor, k: Tensor, delta: float) -> tuple[Tensor, Tensor]: ...


@overload
def trust_region_projection(
    g: tuple[Tensor, ...], k: tuple[Tensor, ...], delta: float
) -> tuple[tuple[Tensor, ...], Tensor]: ...


def trust_region_projection(
    g: Tensor | tuple[Tensor, ...], k: Tensor | tuple[Tensor, ...], delta: float
) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    r"""The gradient nearest to g that increases a divergence at no more than rate δ (Wang et al. 2017, Eq. 11, 12).

    ``z = g − max(0, (kᵀg − δ) / |k|²) k``, which minimises ½ |g − z|² subject to kᵀz <= δ. Where k is 0, z is g.

    Args:
        g: gradient of what is to be increased, with respect to a distribution's statistics; [..., n]; or a tuple of
            gradients with respect to several, which are projected together.
        k: gradient of the divergence, as ``g``.
        delta: δ >= 0, in the divergence's unit (nats) per unit of step.

    Returns:
        z, as ``g``, and whether the constraint was active, bool [...]. k of any finite size, be it that its square is
        too large for its dtype. Gradients flow.

    Raises:
        ValueError: if shapes differ, or delta is negative.

    Examples:
        >>> trust_region_projection(torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0]), 1.0)
        (tensor([1., 1.]), tensor(True))
    """
    if not delta >= 0:
        raise ValueError(f"trust_region_projection(delta={delta}): delta must be >= 0.")
    gs, ks = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (g, k))
    if [x.shape for x in gs] != [x.shape for x in ks]:
        raise ValueError(
            f"trust_region_projection: g has shape {[tuple(x.shape) for x in gs]}, k {[tuple(x.shape) for x in ks]}."
        )
    joint, direction = torch.cat(gs, -1), torch.cat(ks, -1)
    # a direction of length about 1, whose square neither overflows nor vanishes; z does not depend on the size
    size = direction.detach().abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, torch.ones_like(size))
    unit = direction / size
    excess = (unit * joint).sum(-1, keepdim=True) - delta / size
    active = excess > 0
    square = unit.square().sum(-1, keepdim=True)
    step = torch.where(active, excess, torch.zeros_like(excess)) / torch.where(active, square, torch.ones_like(square))
    z = joint - step * unit
    parts = z.split([x.shape[-1] for x in gs], -1)
    return (parts[0] if isinstance(g, Tensor) else parts), active.squeeze(-1)
