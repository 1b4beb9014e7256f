import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from recipes.common.cagrad import cagrad_gradients, table_losses

COEFFICIENTS = (0.1, 0.5, 0.95)


def cagrad(gradients, c, weights=None):
    """The update for losses with these gradients [K, P]."""
    at = torch.zeros(gradients.shape[1], dtype=gradients.dtype, requires_grad=True)
    weights = torch.ones(len(gradients)) if weights is None else weights
    return cagrad_gradients(gradients @ at, weights, [at], c)[0]


def random_gradients(k, p):
    return torch.randn(k, p).double() * torch.logspace(-0.5, 0.5, k).double()[:, None]


def dual_value(gradients, c):
    """The minimum of the convex dual by SLSQP: also the largest worst-case improvement within the ball."""
    g = gradients.numpy()
    k = len(g)
    gram = g @ g.T
    slope = gram.mean(1)
    radius = c * np.sqrt(gram.mean())

    def value(w):
        return w @ slope + radius * np.sqrt(w @ gram @ w)

    def gradient(w):
        return slope + radius * gram @ w / np.sqrt(w @ gram @ w)

    simplex = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(k)}
    start = np.full(k, 1 / k)
    options = {"ftol": 1e-14, "maxiter": 500}
    return minimize(value, start, jac=gradient, bounds=[(0, 1)] * k, constraints=simplex, options=options).fun


@pytest.mark.parametrize("c", COEFFICIENTS)
@pytest.mark.parametrize("k", [2, 3, 7])
def test_solves_the_problem_of_the_paper(k, c):
    for _ in range(10):
        gradients = random_gradients(k, 20)
        mean = gradients.mean(0)
        d = cagrad(gradients, c)
        worst = (gradients @ d).min()
        assert worst.item() == pytest.approx(dual_value(gradients, c), rel=1e-6, abs=1e-7)
        assert ((d - mean).norm() / mean.norm()).item() == pytest.approx(c, rel=1e-9)
        assert worst >= (gradients @ mean).min()


def test_two_gradients_by_hand():
    # By symmetry g_w is along g_0 = (0, 1) for w = (1/2, 1/2), which is the best w: d = (1 + c) g_0.
    gradients = torch.tensor([[3.0, 1.0], [-3.0, 1.0]])
    torch.testing.assert_close(cagrad(gradients, 0.5), torch.tensor([0.0, 1.5]))
    # g_0 = (4, 0) improves the second by nothing. The first is not in the way: w = (0, 1), d = g_0 + c ||g_0|| (0, 1).
    gradients = torch.tensor([[8.0, -1.0], [0.0, 1.0]])
    torch.testing.assert_close(cagrad(gradients, 0.25), torch.tensor([4.0, 1.0]))


@pytest.mark.parametrize("c", [0.0, *COEFFICIENTS])
def test_degenerate_gradients(c):
    gradient = torch.randn(30, dtype=torch.float64)
    zero = torch.zeros_like(gradient)
    assert torch.equal(cagrad(torch.stack([zero, zero]), c), zero)
    assert torch.equal(cagrad(torch.stack([gradient, -gradient]), c), zero)
    for others in ([-gradient, torch.randn_like(gradient)], [zero, -torch.randn_like(gradient)], [gradient * 1e-9]):
        gradients = torch.stack([gradient, *others])
        mean = gradients.mean(0)
        d = cagrad(gradients, c)
        assert (d - mean).norm() <= c * mean.norm() + 1e-9
        assert (gradients @ d).min() >= (gradients @ mean).min() - 1e-6


def test_weights_are_those_of_the_mean_and_zero_is_absence():
    gradients = random_gradients(4, 20)
    rows = torch.tensor([6, 0, 1, 3])
    mean = (rows[:, None] * gradients).sum(0) / 10
    torch.testing.assert_close(cagrad(gradients, 0.0, rows), mean)
    d = cagrad(gradients, 0.4, rows)
    assert ((d - mean).norm() / mean.norm()).item() == pytest.approx(0.4)
    gradients[1] = 0.0
    torch.testing.assert_close(cagrad(gradients, 0.4, rows), d)
    present = [0, 2, 3]
    torch.testing.assert_close(cagrad(gradients[present], 0.4, rows[present]), d)
    torch.testing.assert_close(cagrad(gradients[present], 0.4), cagrad(gradients, 0.4, (rows > 0).double()))
    assert torch.equal(cagrad(gradients, 0.4, torch.zeros(4)), torch.zeros(20, dtype=torch.float64))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_tables_are_those_of_one_backward_pass_per_table(compiled):
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    parameters = list(network.parameters())
    rows, weights = torch.randn(30, 4, dtype=torch.float64), torch.rand(30, dtype=torch.float64)
    tables = torch.tensor([0, 1, 3]).repeat(10)  # none in table 2

    def by_table():
        return table_losses(network(rows).square()[:, 0] * weights, {"priority_weight": weights, "table": tables}, 4)[
            1:
        ]

    def update():
        return cagrad_gradients(*by_table(), parameters, 0.5)

    one_by_one = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in by_table()[0]]
    flat = torch.stack([torch.cat([gradient.flatten() for gradient in gradients]) for gradients in one_by_one])
    expected = cagrad(flat, 0.5, by_table()[1])
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        result = torch.compile(update, fullgraph=True, backend="aot_eager")() if compiled else update()
    assert [gradient.shape for gradient in result] == [parameter.shape for parameter in parameters]
    torch.testing.assert_close(torch.cat([gradient.flatten() for gradient in result]), expected)
