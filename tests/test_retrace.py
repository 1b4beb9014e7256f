"""Retrace, Q^opc and the trust region, against loops over steps as in the paper (Wang et al. 2017)."""

import math

import pytest
import torch

from tests.objectives.trajectories import algorithm_2, by_rows
from torchrl_replay_ext.functional import (
    acer_value_target,
    importance_ratio,
    importance_sampling_return,
    off_policy_trace_return,
    q_opc,
    retrace,
    trust_region_projection,
)

NAN, INF = math.nan, math.inf
DOUBLE = {"dtype": torch.float64}


# --- the paper, step by step


def appendix_e4(gamma, rho, v_next, reward, done, terminated):
    """R_t = r_t + γ ρ_{t+1} R_{t+1}; the paper has no γ."""
    result = [None] * len(reward)
    for t in reversed(range(len(reward))):
        result[t] = reward[t]
        if terminated[t]:
            continue
        behind = v_next[t] if done[t] or t == len(reward) - 1 else rho[t + 1] * result[t + 1]
        result[t] = result[t] + gamma * behind
    return torch.stack(result)


class Experience:
    """Random rows; episodes end in the middle and at the end of rows, terminated or truncated."""

    def __init__(self, shape, dtype=torch.float64, ends=0.3):
        g = torch.Generator().manual_seed(0)
        self.tensors = [torch.randn(shape, dtype=torch.float64, generator=g).to(dtype) for _ in range(5)]
        self.log_pi, self.log_mu, self.q, self.v_next, self.reward = self.tensors
        self.done = torch.rand(shape, generator=g) < ends
        self.terminated = self.done & (torch.rand(shape, generator=g) < 0.5)

    def requires_grad(self):
        for x in self.tensors:
            x.requires_grad_()
        return self

    @property
    def policies(self):
        return self.log_pi, self.log_mu

    @property
    def values(self):
        return self.q, self.v_next, self.reward, self.done, self.terminated


def assert_near(result, expected, tolerance):
    assert result.shape == expected.shape
    difference, size = (x.detach().abs().max() for x in (result - expected, expected))
    assert float(difference) < tolerance * max(1.0, float(size))


def assert_same(result, expected, inputs=(), tolerance=1e-10):
    """Values of a function, and gradients of a random weighted sum of them."""
    assert_near(result, expected, tolerance)
    if inputs:
        weight = torch.randn(result.shape, **DOUBLE)
        ours, theirs = (
            torch.autograd.grad((x * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
            for x in (result, expected)
        )
        for of_ours, of_theirs in zip(ours, theirs, strict=True):
            assert_near(of_ours, of_theirs, tolerance)


SHAPES = [
    ((1, 1), -2),
    ((7, 1), -2),
    ((3, 8, 1), -2),
    ((2, 3, 13, 1), 2),
    ((5, 33, 2), -2),
    ((11, 4), 0),
    ((4, 11), -1),
    ((17,), 0),
]


@pytest.mark.parametrize(
    ("lmbda", "c", "power"), [(1.0, 1.0, 1.0), (0.7, 2.5, 1.0), (1.0, 1.0, 1 / 6), (0.9, INF, 0.5)]
)
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
def test_retrace_against_algorithms_2_and_3(shape, time_dim, lmbda, c, power):
    def loop(log_pi, log_mu, *values):
        coefficient = [lmbda * (r if r < c else r * 0 + c) for r in ((log_pi - log_mu).exp() ** power)]
        return algorithm_2(0.9, coefficient, *values)

    data = Experience(shape).requires_grad()
    result = retrace(0.9, lmbda, *data.policies, *data.values, rho_thresh=c, rho_power=power, time_dim=time_dim)
    assert_same(result, by_rows(loop, *data.policies, *data.values, time_dim=time_dim), data.tensors)


LOOPS = {
    "q_opc": (
        lambda data, dim: q_opc(0.9, 0.8, *data.values, time_dim=dim),
        lambda p, m, *values: algorithm_2(0.9, [0.8] * len(p), *values),
    ),
    "importance sampling": (
        lambda data, dim: importance_sampling_return(0.9, *data.policies, *data.values[1:], time_dim=dim),
        lambda p, m, q, *rest: appendix_e4(0.9, (p - m).exp(), *rest),
    ),
}


@pytest.mark.parametrize(("function", "loop"), LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(("shape", "time_dim"), SHAPES)
def test_q_opc_and_importance_sampling_against_loops(shape, time_dim, function, loop):
    data = Experience(shape).requires_grad()
    expected = by_rows(loop, *data.policies, *data.values, time_dim=time_dim)
    assert_same(function(data, time_dim), expected, data.tensors)


@pytest.mark.parametrize("per_step", [False, True])
def test_any_trace_and_gamma_as_a_tensor(per_step):
    data = Experience((3, 9, 1)).requires_grad()
    trace = torch.rand(3, 9, 1, **DOUBLE).requires_grad_()
    gamma = (torch.rand(3, 9, 1, **DOUBLE) if per_step else torch.tensor(0.8, **DOUBLE)).requires_grad_()
    expected = by_rows(algorithm_2, gamma.expand(3, 9, 1), trace, *data.values, time_dim=-2)
    result = off_policy_trace_return(gamma, trace, *data.values)
    assert_same(result, expected, (gamma, trace, *data.tensors[2:]))


def test_value_target_against_a_loop():
    data = Experience((4, 6, 1)).requires_grad()
    q_ret = torch.randn(4, 6, 1, **DOUBLE).requires_grad_()
    rows = zip(*(x.flatten() for x in (*data.policies, q_ret, data.q, data.v_next)), strict=True)
    expected = [min(1.0, (p - m).exp()) * (r - q) + v for p, m, r, q, v in rows]
    result = acer_value_target(*data.policies, q_ret, data.q, data.v_next)
    assert_same(result, torch.stack(expected).reshape(4, 6, 1), (q_ret, *data.tensors))


# --- ends


def test_terminated_and_truncated_in_the_middle_and_at_the_end():
    """γ = 1/2, ρ = 1, Q = 0 except 1 at the second step of an episode: R_0 = r_0 + γ V + γ (R_1 − 1)."""
    q = torch.tensor([0.0, 1.0, 0.0, 1.0])
    v = torch.tensor([2.0, 4.0, 8.0, 16.0])
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0])
    done = torch.tensor([0, 1, 0, 1], dtype=torch.bool)
    zero = torch.zeros(4)
    for terminated, expected in (
        # R_1 = 2 + 0, R_0 = 1 + 1 + (2 − 1)/2;  R_3 = 4 + 0, R_2 = 3 + 4 + (4 − 1)/2
        ([0, 1, 0, 1], [2.5, 2.0, 8.5, 4.0]),
        # R_1 = 2 + 2, R_0 = 1 + 1 + (4 − 1)/2;  R_3 = 4 + 8, R_2 = 3 + 4 + (12 − 1)/2
        ([0, 0, 0, 0], [3.5, 4.0, 12.5, 12.0]),
        ([0, 1, 0, 0], [2.5, 2.0, 12.5, 12.0]),
    ):
        terminated = torch.tensor(terminated, dtype=torch.bool)
        assert retrace(0.5, 1.0, zero, zero, q, v, reward, done, terminated, time_dim=0).tolist() == expected
        assert q_opc(0.5, 1.0, q, v, reward, done, terminated, time_dim=0).tolist() == expected
    by_default = retrace(0.5, 1.0, zero, zero, q, v, reward, done, time_dim=0)
    assert by_default.tolist() == [2.5, 2.0, 8.5, 4.0]


FUNCTIONS = {
    "retrace": lambda d, s: retrace(0.9, 0.9, *(x[s] for x in (*d.policies, *d.values)), rho_thresh=2.0),
    "q_opc": lambda d, s: q_opc(0.9, 0.9, *(x[s] for x in d.values)),
    "importance_sampling": lambda d, s: importance_sampling_return(0.9, *(x[s] for x in (*d.policies, *d.values[1:]))),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("length", [2, 5, 8, 11])
def test_nothing_leaks_from_behind_an_end(function, bad, length):
    """V after termination, and all entries of steps after a truncation, may have any value."""
    clean, data = Experience((3, length, 1), ends=0.0), Experience((3, length, 1), ends=0.0)
    for x in (clean, data):
        x.done[0, -1] = x.terminated[0, -1] = True
        x.done[1, length // 2 - 1] = True
        x.done[2, 0] = x.terminated[2, 0] = True
    behind = torch.zeros(3, length, 1, dtype=torch.bool)
    behind[1, length // 2 :] = behind[2, 1:] = True
    with torch.no_grad():
        data.v_next[data.terminated] = bad
        for x in data.tensors:
            x[behind] = bad
    expected, result = (function(x.requires_grad(), ...)[~behind] for x in (clean, data))
    assert torch.equal(result, expected)
    for ours, theirs in zip(
        torch.autograd.grad(result.sum(), data.tensors, allow_unused=True),
        torch.autograd.grad(expected.sum(), clean.tensors, allow_unused=True),
        strict=True,
    ):
        if theirs is not None:
            assert torch.equal(ours[~behind], theirs[~behind])


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_in_one_graph(function):
    data = Experience((3, 20, 1))
    compiled = torch.compile(lambda: function(data, ...), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), function(data, ...))


# --- extreme ratios


@pytest.mark.parametrize("rho_thresh", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("log_pi", [-INF, -1e30, -200.0, 200.0, 1e30, INF])
def test_finite_for_any_ratio(log_pi, rho_thresh):
    data = Experience((4, 37, 1), dtype=torch.float32)
    data.log_pi.copy_(torch.where(torch.rand(4, 37, 1) < 0.5, log_pi, data.log_pi))
    data.requires_grad()
    result = retrace(0.99, 1.0, *data.policies, *data.values, rho_thresh=rho_thresh)
    gradients = torch.autograd.grad(result.sum(), data.tensors)
    assert all(bool(x.isfinite().all()) for x in (result, *gradients))


def test_importance_ratio():
    """The ratio of two zeros is 0."""
    log_pi = torch.tensor([-INF, 0.0, 1.0, 39.0, 41.0, 1e30, INF, -INF], requires_grad=True)
    ratio = importance_ratio(log_pi, torch.tensor([0.0] * 7 + [-INF]))
    expected = torch.tensor([0.0, 1.0, math.e, math.exp(39), math.exp(40), math.exp(40), math.exp(40), 0.0])
    torch.testing.assert_close(ratio, expected)
    (gradient,) = torch.autograd.grad(ratio.sum(), log_pi)
    torch.testing.assert_close(gradient, torch.where(torch.arange(8) < 4, expected, 0.0))


def test_gradients_of_half_precision_stay_finite():
    log_pi = torch.full((2, 1), -0.1, dtype=torch.float16, requires_grad=True)
    one, no = torch.ones(2, 1, dtype=torch.float16), torch.zeros(2, 1, dtype=torch.bool)
    retrace(0.9, 1.0, log_pi, -15 * one, one, one, one, no).sum().backward()
    assert log_pi.grad is not None and log_pi.grad.isfinite().all()


@pytest.mark.parametrize("length", [2, 9, 37])
def test_products_that_overflow_leave_the_rest_alone(length):
    """If a product of ratios overflows float32 but its factor is 0, the result is finite, as in a loop over steps."""
    log_pi, zero = torch.full((length, 1), 30.0), torch.zeros(length, 1)
    reward = zero.clone()
    reward[0] = 2.0
    done = torch.arange(length).unsqueeze(-1) == length - 1
    result = importance_sampling_return(1.0, log_pi, zero, torch.ones(length, 1), reward, done)
    assert torch.equal(result, reward)


@pytest.mark.parametrize("ends", [0.0, 0.01])
@pytest.mark.parametrize(("c", "spread"), [(1.0, 0.0), (1.0, 0.3), (10.0, 0.3)])
def test_float32_over_1024_steps(c, spread, ends):
    data = Experience((16, 1024, 1), ends=ends)
    data.log_pi = data.log_mu + spread * data.log_pi
    single = [x.to(torch.float32) if x.is_floating_point() else x for x in (*data.policies, *data.values)]
    double = [x.to(torch.float64) if x.is_floating_point() else x for x in single]
    expected = retrace(0.99, 1.0, *double, rho_thresh=c)
    result = retrace(0.99, 1.0, *single, rho_thresh=c)
    assert result.dtype == torch.float32
    assert float((result - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_the_dtype_is_that_of_the_values():
    data = Experience((5, 1), dtype=torch.float32)
    reward = torch.arange(5).unsqueeze(-1)
    ends = data.done, data.terminated
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        q, v = data.q.to(dtype), data.v_next.to(dtype)
        assert retrace(0.5, 1.0, *data.policies, q, v, reward, *ends).dtype == dtype
        assert q_opc(0.5, 1.0, q, v, reward, *ends).dtype == dtype
        assert importance_sampling_return(0.5, *data.policies, v, reward, *ends).dtype == dtype


# --- trust region


@pytest.mark.parametrize("delta", [0.0, 0.1, 1.0, 5.0, INF])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_projection_is_equation_12(n, delta):
    g, k = 3 * torch.randn(2, 500, n, **DOUBLE)
    z, active = trust_region_projection(g, k, delta)
    product = (k * g).sum(-1)
    expected = g - ((product - delta).clamp_min(0) / k.square().sum(-1)).unsqueeze(-1) * k
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(active, product > delta)
    assert torch.equal(z[~active], g[~active])


@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-3, 1.0, 1e3, 1e19, 1e25, 1e38])
def test_the_projection_for_k_of_any_size(size):
    g = torch.randn(100, 6)
    direction = torch.randn(100, 6).clamp(-3, 3)
    k = (size * direction.double()).float()
    g.requires_grad_()
    k.requires_grad_()
    z, active = trust_region_projection(g, k, 1.0)
    exact, exactly_active = trust_region_projection(g.double(), k.double(), 1.0)
    assert torch.equal(active, exactly_active)
    assert torch.equal(z[~active], g[~active])
    torch.testing.assert_close(z, exact.float(), rtol=1e-5, atol=1e-5)
    # k·z <= δ within the precision of float32
    product = (k.double() * z).sum(-1)
    assert bool((product <= 1.0 + 1e-6 * (1.0 + k.double().norm(dim=-1) * g.double().norm(dim=-1))).all())
    weight = torch.randn(100, 6)
    of_g, of_k = torch.autograd.grad((z * weight).sum(), (g, k))
    assert bool(of_g.isfinite().all())
    if size > 1e-30:
        assert bool(of_k.isfinite().all())
    assert bool(of_k[~active].eq(0).all())


def test_a_tiny_k_is_a_constraint_without_slack():
    for g, k in (([3.0, 1.0], [1e-40, 0.5e-40]), ([3.0, -7.0], [0.0, -1e-45])):
        z, active = trust_region_projection(torch.tensor(g), torch.tensor(k), 0.0)
        assert active and abs(torch.tensor(k).double().div(1e-40) @ z.double()) < 1e-5


@pytest.mark.parametrize("delta", [0.0, 1.0])
@pytest.mark.parametrize("size", [1.0, 1e38])
def test_without_direction_there_is_no_constraint(size, delta):
    g, k = torch.full((3, 2), size, requires_grad=True), torch.zeros(3, 2, requires_grad=True)
    z, active = trust_region_projection(g, k, delta)
    assert torch.equal(z, g)
    assert not active.any()
    assert not torch.autograd.grad(z.sum(), k)[0].any()


def test_several_statistics_are_projected_together():
    g, k = torch.randn(2, 50, 5, **DOUBLE)
    expected, active = trust_region_projection(g, k, 0.2)
    parts = (x.split([1, 2, 2], -1) for x in (g, k))
    z, also = trust_region_projection(*parts, 0.2)
    assert isinstance(z, tuple)
    assert [x.shape[-1] for x in z] == [1, 2, 2]
    assert torch.equal(torch.cat(z, -1), expected)
    assert torch.equal(also, active)


# --- bad input


VALUES = ("action_value", "next_state_value", "reward", "done", "terminated")
SHAPES_OF = {
    retrace: ("log_pi", "log_mu", *VALUES),
    q_opc: VALUES,
    importance_sampling_return: ("log_pi", "log_mu", *VALUES[1:]),
    acer_value_target: ("log_pi", "log_mu", "retrace", *VALUES[:2]),
}


@pytest.mark.parametrize(("function", "wrong"), [(each, name) for each, names in SHAPES_OF.items() for name in names])
def test_shapes_must_agree(function, wrong):
    columns = [torch.zeros((3, 4) if name == wrong else (3, 4, 1)) for name in SHAPES_OF[function]]
    factors = {retrace: (0.9, 1.0), q_opc: (0.9, 1.0), importance_sampling_return: (0.9,)}.get(function, ())
    # retrace, q_opc and importance_sampling_return call off_policy_trace_return
    calls = rf"^({function.__name__}|off_policy_trace_return)"
    with pytest.raises(ValueError, match=rf"{calls}:.*has shape \(3, 4(, 1)?\), expected \(3, 4"):
        function(*factors, *columns)


def retrace_of(lmbda=1.0, **arguments):
    data = Experience((3, 4, 1))
    return retrace(0.9, lmbda, *data.policies, *data.values, **arguments)


def q_opc_of(gamma, lmbda):
    return q_opc(gamma, lmbda, *Experience((3, 4, 1)).values)


ZEROS = torch.zeros(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: retrace_of(1.1), r"retrace\(lmbda=1.1\): lmbda must be in \[0, 1\]"),
        (lambda: retrace_of(rho_thresh=-1.0), r"retrace\(rho_thresh=-1.0\): rho_thresh must be >= 0"),
        (lambda: retrace_of(rho_power=0.0), r"retrace\(rho_power=0.0\): rho_power must be > 0"),
        (lambda: q_opc_of(0.9, 2.0), r"q_opc\(lmbda=2.0\)"),
        (lambda: q_opc_of(-0.1, 1.0), "gamma must be in"),
        (lambda: q_opc_of(NAN, 1.0), "gamma must be in"),
        (lambda: trust_region_projection(ZEROS, ZEROS, -1.0), "delta must be >= 0"),
        (lambda: trust_region_projection(ZEROS, ZEROS, NAN), "delta must be >= 0"),
        (lambda: trust_region_projection(ZEROS, torch.zeros(4), 1.0), r"g has shape \[\(3,\)\], k \[\(4,\)\]"),
        (lambda: trust_region_projection((ZEROS, ZEROS), ZEROS, 1.0), "g has shape"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
