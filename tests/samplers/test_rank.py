"""RankBasedSampler against a naive ranking."""

import math

import pytest
import torch
from torchrl.data import TensorDictReplayBuffer

from tests.data import buffer_with, rows
from tests.reference import rank_probabilities
from tests.samplers.experience import probabilities, sorted_within
from torchrl_replay_ext import Anneal, RankBasedSampler


def buffer(capacity: int, ndim: int = 1, **arguments) -> TensorDictReplayBuffer:
    arguments = {"td_error": "absolute", **arguments}
    return buffer_with(RankBasedSampler(capacity, **arguments), capacity, ndim=ndim)


def filled(td_error: torch.Tensor, **arguments) -> TensorDictReplayBuffer:
    rb = buffer(len(td_error), **arguments)
    rb.extend(rows(len(td_error)))
    rb.update_priority(torch.arange(len(td_error)), td_error)
    return rb


@pytest.mark.parametrize("segments", ["exact", "piecewise"])
def test_one_draw_in_each_stratum(segments):
    num, batch, alpha = 1000, 32, 0.7
    rb = filled(1.02 ** torch.arange(num, 0.0, -1), alpha=alpha, segments=segments)  # slot i has rank i + 1
    running = rank_probabilities(num, alpha).cumsum(0)
    lower = torch.arange(batch) / batch
    for _ in range(50):
        ranks = rb.sample(batch)["index"].sort().values
        # rank r covers (running[r - 1], running[r]], which must meet the j-th part of [0, 1)
        assert bool((running[ranks] > lower - 1e-9).all())
        assert bool((running[ranks] - rank_probabilities(num, alpha)[ranks] < lower + 1 / batch + 1e-9).all())


def test_weights_have_a_closed_form():
    num, alpha, beta = 200, 0.7, 0.5
    rb = filled(torch.arange(num, 0.0, -1), alpha=alpha, beta=beta)
    batch = rb.sample(64)
    expected = ((batch["index"] + 1) / num) ** (alpha * beta)
    torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-6, atol=0)
    rb = filled(torch.arange(num, 0.0, -1), alpha=alpha, beta=beta, weight_norm="batch")
    batch = rb.sample(64)
    expected = ((batch["index"] + 1) / (batch["index"].max() + 1)) ** (alpha * beta)
    torch.testing.assert_close(batch["priority_weight"], expected, rtol=1e-6, atol=0)


# total variation between the approximation of the paper and P, computed from the definitions; for (1000, 256, 1.0) the
# first rank is more probable than a segment
@pytest.mark.parametrize(
    ("num", "batch", "alpha", "distance"), [(10_000, 32, 0.7, 0.027), (100, 8, 0.7, 0.061), (1000, 256, 1.0, None)]
)
def test_piecewise_segments(num, batch, alpha, distance):
    # equal TD errors have the ranks of their order
    rb = filled(torch.arange(num, 0.0, -1), alpha=alpha, beta=1.0, segments="piecewise")
    sample = rb.sample(batch)
    exact = [r**-alpha for r in range(1, num + 1)]
    normalizer = math.fsum(exact)
    # boundaries: the first ranks at which the cumulative distribution reaches j / k
    ends, running = [], 0.0
    for r in range(1, num + 1):
        running += exact[r - 1]
        while len(ends) < batch - 1 and running >= (len(ends) + 1) / batch * normalizer * (1 - 1e-12):
            ends.append(r)
    ends.append(num)
    expected = torch.zeros(num, dtype=torch.float64)
    for begin, end in zip([0, *ends], ends, strict=False):
        members = range(begin, end) if end > begin else [end - 1]
        for r in members:
            expected[r] += 1 / batch / len(members)
    found = probabilities(rb)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    if distance is not None:
        difference = found - torch.tensor(exact, dtype=torch.float64) / normalizer
        assert float(difference.abs().sum()) / 2 == pytest.approx(distance, abs=0.002)
    weights = found.min() / found[sample["index"]]
    torch.testing.assert_close(sample["priority_weight"].double(), weights, rtol=1e-6, atol=0)


def test_an_update_gives_the_last_rank_of_equal_td_errors():
    rb = filled(torch.ones(5))
    assert probabilities(rb).argsort(descending=True).tolist() == [0, 1, 2, 3, 4]
    rb.update_priority(torch.tensor([1]), torch.tensor([1.001]))
    assert probabilities(rb).argsort(descending=True).tolist() == [0, 4, 2, 3, 1]


@pytest.mark.parametrize("segments", ["exact", "piecewise"])
@pytest.mark.parametrize(("num", "draws"), [(1, 20), (5, 4), (100, 1)])
def test_alpha_zero_is_uniform_and_batches_may_exceed_the_buffer(num, draws, segments):
    """Each stratum is a part of one rank, whatever the rounding."""
    rb = filled(torch.arange(num, 0.0, -1), alpha=0.0, segments=segments)
    batch = rb.sample(num * draws)
    assert batch["index"].bincount(minlength=num).tolist() == [draws] * num
    assert bool((batch["priority_weight"] == 1).all())
    torch.testing.assert_close(probabilities(rb), torch.full((num,), 1 / num, dtype=torch.float64))


def test_td_errors_of_all_sizes():
    """Zero, denormal and huge numbers, more than a bucket has space for at first."""
    torch.manual_seed(0)
    td_error = torch.cat([torch.zeros(300), torch.rand(300) * 1e-40, 10 ** torch.linspace(-37, 38, 300)])
    td_error = td_error[torch.randperm(900)]
    rb = filled(td_error)
    expected = torch.empty(900, dtype=torch.float64)
    expected[td_error.argsort(descending=True)] = rank_probabilities(900, 0.7)
    # TD errors that are equal after rounding to 7 bits of mantissa
    bucket = td_error.view(torch.int32) >> 16
    torch.testing.assert_close(sorted_within(bucket, probabilities(rb)), sorted_within(bucket, expected))


def test_an_annealed_alpha_is_followed():
    rb = filled(torch.rand(20), alpha=Anneal(0.0, 1.0, 4))
    for number in range(5):
        alpha = min((number + 1) / 4, 1.0)  # `filled` has updated once
        torch.testing.assert_close(probabilities(rb).sort(descending=True).values, rank_probabilities(20, alpha))
        rb.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    rb.sampler.alpha = 2.0
    torch.testing.assert_close(probabilities(rb).sort(descending=True).values, rank_probabilities(20, 2.0))


def test_an_alpha_that_is_annealed_slowly_and_applied_in_steps_reaches_its_end():
    rb = filled(torch.rand(20), alpha=Anneal(0.2, 0.3, 50))
    for _ in range(50):
        rb.update_priority(torch.tensor([0]), torch.tensor([0.5]))
    torch.testing.assert_close(probabilities(rb).max(), rank_probabilities(20, 0.3)[0])
