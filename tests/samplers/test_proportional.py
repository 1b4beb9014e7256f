"""ProportionalSampler against hand tables and the formulas of PER and LAP: draws, weights, schedules and bad input."""

import math
from functools import partial

import pytest
import torch
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from tests import data
from tests.chi_square import p_value
from tests.data import rows
from tests.samplers.experience import Refuses, assert_priorities, probabilities
from torchrl_replay_ext import Anneal, ProportionalSampler

buffer_of = partial(data.buffer_of, ProportionalSampler)


def filled(values, /, **options):
    """A full buffer in which item i was updated with ``values[i]``, by default its magnitude."""
    values = torch.as_tensor(values)
    buffer = buffer_of(len(values), **{"eps": 0.0, "td_error": "absolute", **options})
    index = buffer.extend(rows(len(values)))
    buffer.update_priority(index, values)
    return buffer


def draw(buffer, draws, batch_size=1_000):
    return torch.cat([buffer.sample(batch_size)["index"] for _ in range(draws // batch_size)])


# --- the distribution


def test_priorities_by_hand():
    assert_priorities(filled([1.0, 2.0, 3.0], alpha=2.0), [1.0, 4.0, 9.0])
    # squared TD errors are rooted, and eps is added to the root
    assert_priorities(filled([1.0, 4.0, 9.0], td_error="squared", eps=1.0, alpha=1.0), [2.0, 3.0, 4.0])


@pytest.mark.parametrize("form", [int, torch.tensor, lambda slot: torch.tensor([slot])])
def test_a_single_index_can_be_updated(form):
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    buffer.update_priority(form(1), torch.tensor(3.0) if form is not int else 3.0)
    assert_priorities(buffer, [1.0, 3.0, 1.0])


def test_td_errors_with_a_trailing_dimension():
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    batch = buffer.sample(4)
    batch["td_error"] = batch["index"].float()[:, None] + 2
    buffer.update_tensordict_priority(batch)
    drawn = set(batch["index"].tolist())
    assert_priorities(buffer, [slot + 2.0 if slot in drawn else 1.0 for slot in range(3)])


def test_priorities_of_very_different_size():
    values = torch.logspace(-15, 15, 31)
    buffer = filled(values, alpha=0.6)
    p = probabilities(buffer)
    expected = values.double() ** 0.6
    assert (p > 0).all()
    torch.testing.assert_close(p[15:], (expected / expected.sum())[15:], rtol=1e-4, atol=0.0)
    assert p_value(draw(buffer, 20_000), p) > 1e-4


# --- draws


@pytest.mark.parametrize("batch_size", [1, 7, 32, 200])
def test_a_stratified_batch_has_one_draw_in_each_segment_of_equal_mass(batch_size):
    magnitude = torch.rand(64, generator=torch.Generator().manual_seed(3)) * 5
    magnitude[10:20] = 0.0
    buffer = filled(magnitude, alpha=0.6, stratified=True)
    p = probabilities(buffer)
    last = p.cumsum(0)
    first = last - p
    segment = torch.arange(batch_size, dtype=torch.float64) / batch_size
    for _ in range(50):
        index = buffer.sample(batch_size)["index"].sort().values
        assert (first[index] < segment + 1 / batch_size + 1e-6).all()
        assert (last[index] > segment - 1e-6).all()


# --- importance weights


@pytest.mark.parametrize("weight_norm", ["buffer", "batch"])
def test_weights_are_finite_for_extreme_td_errors(weight_norm):
    buffer = filled([0.0, 1e-12, 1e-4, 1e4], eps=1e-6, alpha=1.0, beta=1.0, weight_norm=weight_norm)
    for _ in range(20):
        weight = buffer.sample(8)["priority_weight"]
        assert weight.isfinite().all() and (weight >= 0).all() and (weight <= 1).all()


def test_items_that_cannot_be_drawn_do_not_normalise_the_weights():
    buffer = filled([0.0, 1.0, 1.0], alpha=0.5, beta=1.0)
    assert buffer.sample(6)["priority_weight"].tolist() == [1.0] * 6


# --- alpha and beta


def test_linear_scheduler_on_beta():
    buffer = filled([1.0, 4.0], alpha=1.0, beta=0.2)
    scheduler = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=4)
    for expected in (0.4, 0.6, 0.8, 1.0, 1.0):
        scheduler.step()
        assert float(buffer.sampler.beta) == pytest.approx(expected)
        batch = buffer.sample(20)
        for index, weight in zip(batch["index"].tolist(), batch["priority_weight"].tolist(), strict=True):
            assert weight == pytest.approx(1.0 if index == 0 else 0.25**expected, rel=1e-4)


def test_annealed_alpha_holds_for_what_was_updated_since():
    buffer = filled([1.0, 2.0], alpha=Anneal(0.0, 2.0, 3))
    for _ in range(4):
        buffer.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    assert_priorities(buffer, [1.0, 4.0])


# --- LAP, a setting of the sampler: p(i) ∝ max(|δ|^α, 1) (Fujimoto et al. 2020, arXiv 2007.06049)

TD_ERRORS = [0.0, 0.25, 0.5, 0.999, 1.0, 1.001, 2.0, 4.0, 9.0, 25.0]
LAP = {"alpha": 0.4, "beta": 0.0, "min_priority": 1.0}


def lap_probabilities(td_errors, alpha=0.4, smallest=1.0):
    """In float64."""
    masses = [max(error**alpha, smallest**alpha) for error in td_errors]
    return torch.tensor([mass / math.fsum(masses) for mass in masses], dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("td_error", ["absolute", "squared"])
def test_lap_has_the_probabilities_of_the_paper(td_error, alpha):
    given = [error**2 for error in TD_ERRORS] if td_error == "squared" else TD_ERRORS
    buffer = filled(given, **LAP | {"alpha": alpha, "td_error": td_error})
    torch.testing.assert_close(probabilities(buffer), lap_probabilities(TD_ERRORS, alpha), rtol=1e-6, atol=0.0)


def test_the_expected_gradient_of_lap_is_that_of_the_uniform_loss_pal():
    """LAP with the Huber loss has the expected gradient of uniform sampling with the loss PAL.

    PAL = δ² / 2 up to |δ| = 1 and |δ|^(1 + α) / (1 + α) above, divided by λ, the mean of max(|δ|^α, 1).
    """
    p, alpha = probabilities(filled(TD_ERRORS, **LAP)).tolist(), LAP["alpha"]
    prioritized = sum(share * min(error, 1.0) for share, error in zip(p, TD_ERRORS, strict=True))
    scale = sum(max(error**alpha, 1.0) for error in TD_ERRORS) / len(TD_ERRORS)
    uniform = sum(error if error <= 1 else error**alpha for error in TD_ERRORS) / len(TD_ERRORS) / scale
    assert prioritized == pytest.approx(uniform, rel=1e-6)


def test_a_state_with_a_smaller_smallest_priority_is_raised():
    buffer, saved = (filled([0.5] * 3, **LAP | {"alpha": 1.0, "min_priority": each}) for each in (3.0, 0.0))
    buffer.sampler.load_state_dict(saved.sampler.state_dict())
    buffer.extend(rows(2))
    buffer.update_priority(torch.tensor([1, 2]), torch.tensor([0.5, 0.5]))
    assert_priorities(buffer, [3.0, 3.0, 3.0])


def test_a_smallest_priority_that_the_sums_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"ProportionalSampler\(min_priority=10000000000\): must be <= "):
        buffer_of(1000, alpha=1.0, min_priority=1e10).extend(rows(10))
    buffer_of(1000, alpha=0.5, min_priority=1e10).extend(rows(10))


# --- bad input


def test_a_td_error_or_an_alpha_beyond_the_range_of_the_sums():
    large = filled(torch.full((10,), 1e6), alpha=0.1)
    with Refuses(large, ValueError, "alpha"):
        large.sampler.alpha = 5.0
    buffer = filled(torch.ones(5), alpha=1.0)
    with Refuses(buffer, ValueError, r"index 3\b.*at most"):
        buffer.update_priority(torch.tensor([2, 3]), torch.tensor([1.0, 1e30]))
