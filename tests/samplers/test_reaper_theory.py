"""Section 3.2 of the ReaPER paper by numbers: Observations 3.1 to 3.3, Eq. 7, Lemmas B.1 and B.2.

An episode of a chain: each state has an optimal action, which leads to the next state, and another one.
"""

import numpy as np
import pytest
import torch

from tests.samplers.experience import probabilities
from tests.samplers.test_reaper import episode, updated

N, GAMMA, RATE = 6, 0.9, 0.3


class Chain:
    """The optimal path with random rewards and a random Q, [N]: e, the bias of targets ε, and δ as in Eqs. 6 and 8."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.reward, self.q, self.other = rng.normal(size=(3, N))
        self.truth = np.zeros(N)
        for t in reversed(range(N)):
            self.truth[t] = self.reward[t] + GAMMA * (self.truth[t + 1] if t + 1 < N else 0.0)
        self.other = np.minimum(self.other, self.truth)  # of the other action, no larger than the optimal value

    def targets(self):
        best = np.maximum(self.q, self.other)
        return self.reward + GAMMA * np.append(best[1:], 0.0)

    def errors(self):
        """e, ε and δ, the target minus Q."""
        e, bias = self.q - self.truth, self.targets() - self.truth
        return e, bias, bias - e


@pytest.mark.parametrize("seed", range(5))
def test_the_change_of_the_error_is_that_of_equation_7_with_the_draws_of_the_sampler(seed):
    """Also Lemma B.2, whose proof leaves out a factor of 2η in its last line (Eq. 32)."""
    chain = Chain(seed)
    e, bias, delta = chain.errors()
    size = np.abs(delta)
    buffer = updated(episode(0, N), size.tolist())
    mu = probabilities(buffer).double().numpy()
    np.testing.assert_allclose(mu, size * size.cumsum() / (size * size.cumsum()).sum(), rtol=1e-5)  # Eqs. 4 and 5
    change = mu @ ((e + RATE * delta) ** 2 - e**2)
    assert change == pytest.approx(mu @ (RATE**2 * delta**2 - 2 * RATE * e**2 + 2 * RATE * e * bias))


def test_gradients_are_aligned_as_in_lemma_b_1_up_to_a_factor():
    """Eq. 19 has 2 (e² - e ε); its proof (Eq. 25) and autograd give 4 (e² - e ε) |∇Q|²."""
    torch.manual_seed(0)
    weight, features, truth, target = torch.randn(4, 3, dtype=torch.float64)
    weight.requires_grad_()
    q = weight @ features
    gradient, ideal = (torch.autograd.grad((q - y) ** 2, weight, retain_graph=True)[0] for y in (target[0], truth[0]))
    e, bias = (q - truth[0]).detach(), target[0] - truth[0]
    torch.testing.assert_close(gradient @ ideal, 4 * (e**2 - e * bias) * features.square().sum())


def test_observations_on_an_optimal_path():
    """3.1: a biased target can degrade Q. 3.2: that of the last transition cannot. 3.3: accuracy goes backward."""
    degraded = 0
    for seed in range(50):
        chain = Chain(seed)
        e, bias, delta = chain.errors()
        after = np.abs(e + RATE * delta)
        worse = after > np.abs(e)
        degraded += worse.sum()
        # only a target on the other side, or one far away, degrades Q
        assert (worse == (RATE**2 * delta**2 + 2 * RATE * e * (bias - e) > 0)).all()
        assert bias[-1] == 0 and not worse[-1]
        for t in reversed(range(1, N)):
            before = np.abs(chain.errors()[1])
            chain.q[t] = chain.truth[t]
            now = np.abs(chain.errors()[1])
            assert (now <= before + 1e-12).all() and now[t - 1] < 1e-12
    assert degraded > 0


def test_an_accurate_update_off_the_optimal_path_can_make_a_target_worse():
    """Observation 3.3 is no law: here a value that is too large hid that the optimal one is too small."""
    optimal, other, truth = np.array([0.5, 1.0]), np.array([1.0, 0.2]), 1.0
    # (value of the optimal action, of the other one), before and after the other one is learned
    before, after = max(optimal[0], other[0]) - truth, max(optimal[0], other[1]) - truth
    assert before == 0 and after == -0.5
