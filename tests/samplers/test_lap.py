"""LAP, a setting of ProportionalSampler, against the formulas of Fujimoto et al. 2020 in float64 (arXiv 2007.06049)."""

import math

import pytest
import torch
from tensordict import TensorDict
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss

from tests.data import buffer_with, learnable
from tests.samplers.experience import probabilities
from torchrl_replay_ext import ProportionalSampler

ALPHA, CAPACITY, BATCH = 0.4, 16, 8
TD_ERRORS = [0.0, 0.25, 0.5, 0.999, 1.0, 1.001, 2.0, 4.0, 9.0, 25.0]


def lap(**arguments):
    return ProportionalSampler(**{"alpha": ALPHA, "beta": 0.0, "eps": 0.0, "min_priority": 1.0} | arguments)


def filled(sampler, td_errors, **arguments):
    rb = buffer_with(sampler, CAPACITY, batch_size=BATCH, **arguments)
    index = rb.extend(TensorDict(number=torch.arange(len(td_errors)), batch_size=[len(td_errors)]))
    rb.update_priority(index, torch.tensor(td_errors))
    return rb


def expected(td_errors, alpha=ALPHA, smallest=1.0):
    """p(i) = max(|δ|^α, 1) / Σ max(|δ|^α, 1)."""
    masses = [max(abs(error) ** alpha, smallest**alpha) for error in td_errors]
    return torch.tensor([mass / math.fsum(masses) for mass in masses], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("td_error", ["absolute", "squared"])
def test_probabilities_are_those_of_the_paper(td_error, alpha):
    given = [error**2 for error in TD_ERRORS] if td_error == "squared" else TD_ERRORS
    rb = filled(lap(alpha=alpha, td_error=td_error), given)
    torch.testing.assert_close(probabilities(rb), expected(TD_ERRORS, alpha), rtol=1e-6, atol=0.0)


def test_samples_have_equal_weights_and_new_transitions_the_largest_priority():
    rb = filled(lap(td_error="absolute"), TD_ERRORS)
    assert rb.sample()["priority_weight"].tolist() == BATCH * [1.0]
    rb.add(TensorDict(number=torch.tensor(10), batch_size=[]))
    torch.testing.assert_close(probabilities(rb), expected([*TD_ERRORS, max(TD_ERRORS)]), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("smallest", [0.0, 0.1, 3.0])
def test_new_transitions_of_an_empty_buffer_have_priority_1_or_the_smallest_one_if_larger(smallest):
    sampler = lap(min_priority=smallest, td_error="absolute")
    rb = filled(sampler, [0.0, 4.0])
    rb.empty()
    rb.extend(TensorDict(number=torch.arange(3), batch_size=[3]))
    assert sampler.stats()["max_priority"] == max(1.0, smallest)
    rb.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    torch.testing.assert_close(
        probabilities(rb), expected([0.5, max(1.0, smallest), max(1.0, smallest)], smallest=smallest)
    )


def test_the_expected_gradient_is_that_of_the_uniform_loss_pal():
    """LAP with the Huber loss has the expected gradient of uniform sampling with the loss PAL.

    PAL = δ² / 2 up to |δ| = 1 and |δ|^(1 + α) / (1 + α) above, divided by λ, the mean of max(|δ|^α, 1).
    """
    rb = filled(lap(td_error="absolute"), TD_ERRORS)
    prioritized = sum(p * min(error, 1.0) for p, error in zip(probabilities(rb).tolist(), TD_ERRORS, strict=True))
    scale = sum(max(error**ALPHA, 1.0) for error in TD_ERRORS) / len(TD_ERRORS)
    uniform = sum(error if error <= 1 else error**ALPHA for error in TD_ERRORS) / len(TD_ERRORS) / scale
    assert prioritized == pytest.approx(uniform, rel=1e-6)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_invalid_td_errors_are_errors_although_they_are_below_the_smallest_priority(value):
    rb = filled(lap(td_error="absolute"), TD_ERRORS)
    before = probabilities(rb)
    with pytest.raises(ValueError, match="TD errors must be >= 0 and finite"):
        rb.update_priority(torch.arange(2), torch.tensor([3.0, value]))
    assert torch.equal(probabilities(rb), before)


def test_torchrls_huber_loss_has_the_gradient_that_lap_needs():
    """``smooth_l1`` is quadratic up to 1; the TD errors of the batch are squared, whatever the loss function is."""
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 2)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", delay_value=False, loss_function="smooth_l1", reduction="none")
    loss.make_value_estimator(gamma=0.0)
    batch = learnable(64)
    batch["next", "reward"] *= 3
    value = network(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    error = (value - batch["next", "reward"].squeeze(1)).detach()
    huber = torch.where(error.abs() <= 1, error**2 / 2, error.abs() - 0.5)
    torch.testing.assert_close(loss(batch)["loss"].detach(), huber)
    torch.testing.assert_close(batch["td_error"].squeeze(1), error**2)
    assert 0 < int((error.abs() > 1).sum()) < 64
