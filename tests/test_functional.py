"""Functions of importance weights, of the order of writes and of reliability, against loops and by hand."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import NaiveReaPER
from torchrl_replay_ext.functional import importance_weights, reliability
from torchrl_replay_ext.indices import is_last_occurrence

# --- importance weights


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_importance_weights_against_a_loop(beta, normalize):
    probability = torch.rand(50, dtype=torch.float64).clamp_min(1e-9)
    weights = [(1 / (1000 * p)) ** beta for p in probability.tolist()]
    if normalize:
        weights = [w / max(weights) for w in weights]
    result = importance_weights(probability, 1000, beta, normalize)
    torch.testing.assert_close(result, torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(6,), (2, 3), ()])
def test_importance_weights_keep_shape_and_dtype(dtype, shape):
    probability = torch.rand(shape, dtype=dtype) + 0.1
    kept = probability.clone()
    for beta in (0.4, torch.tensor(0.4)):
        weights = importance_weights(probability, torch.tensor(10), beta)
        assert weights.shape == shape
        assert weights.dtype == dtype
        assert float(weights.max()) == 1.0
    assert torch.equal(probability, kept)


# --- the order of writes


@settings(deadline=None, derandomize=True, max_examples=60)
@given(index=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_last_occurrence_against_a_loop(index):
    where = {value: position for position, value in enumerate(index)}
    expected = [where[value] == position for position, value in enumerate(index)]
    assert is_last_occurrence(torch.tensor(index)).tolist() == expected


@pytest.mark.filterwarnings("ignore:.*non-contiguous:UserWarning")
def test_an_index_need_not_be_contiguous():
    index = torch.tensor([[2, 0], [3, 0], [2, 0]])[:, 0]
    assert is_last_occurrence(index).tolist() == [False, True, True]


# --- reliability


def test_reliability_by_hand():
    """Episode 7, finished: delta = 1, 2, 1, 4, sum 8, so R = 1 - 7/8, 1 - 5/8, 1 - 4/8, 1.

    Episode 3, ongoing: delta = 4, 6, 6, sum 16 = F, so R = 4/16, 10/16, 1. Episode 5, ongoing: delta = 2, 2, so
    R = 2/16, 4/16.
    """
    episode = torch.tensor([7, 3, 7, 3, 5, 7, 3, 5, 7])
    delta = torch.tensor([1.0, 4.0, 2.0, 6.0, 2.0, 1.0, 6.0, 2.0, 4.0])
    finished = episode == 7
    expected = [1 / 8, 4 / 16, 3 / 8, 10 / 16, 2 / 16, 4 / 8, 1.0, 4 / 16, 1.0]
    assert reliability(delta, episode, finished).tolist() == expected


@pytest.mark.parametrize("largest", [None, 16.0, torch.tensor(16.0)])
def test_reliability_of_ongoing_episodes_with_a_given_largest_sum(largest):
    zeros = torch.zeros(2, dtype=torch.int64)
    result = reliability(torch.tensor([1.0, 3.0]), zeros, zeros.bool(), max_episode_sum=largest)
    assert result.tolist() == ([1 / 4, 4 / 4] if largest is None else [1 / 16, 4 / 16])


@settings(deadline=None, derandomize=True, max_examples=100)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 40), episodes=st.integers(1, 8))
def test_reliability_against_a_loop(seed, size, episodes):
    rng = random.Random(seed)
    episode = [rng.randrange(episodes) * 10 - 30 for _ in range(size)]
    ended = {e: rng.random() < 0.5 for e in set(episode)}
    td_error = [rng.choice([0.0, 10 ** rng.uniform(-2.0, 2.0)]) for _ in range(size)]
    finished = [ended[e] for e in episode]
    if not any(td_error):
        td_error[0] = 1.0
    result = reliability(torch.tensor(td_error, dtype=torch.float64), torch.tensor(episode), torch.tensor(finished))
    naive = NaiveReaPER(eps=0.0, td_error="absolute")
    for t, e in enumerate(episode):
        naive.write(t, e, terminated=ended[e])
    naive.update(range(size), td_error)
    reliabilities = naive.reliabilities()
    expected = torch.tensor([reliabilities[t] for t in range(size)], dtype=torch.float64)
    # 1 - later / sum and prefix / sum round differently; running sums over all episodes add errors of 1e-16 of the
    # total sum
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    assert float(result.min()) >= 0
    assert float(result.max()) <= 1


def test_reliability_of_a_finished_episode_without_errors_is_one():
    episode = torch.tensor([0, 0, 1, 1])
    delta = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert reliability(delta, episode, torch.ones(4).bool()).tolist() == [1.0, 1.0, 0.5, 1.0]
    assert reliability(torch.zeros(4), episode, torch.tensor([True, True, False, False])).tolist() == [1.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reliability_gives_no_gradient_and_leaves_its_arguments_alone(dtype):
    delta = torch.tensor([1.0, 3.0], dtype=dtype, requires_grad=True)
    result = reliability(delta, torch.zeros(2, dtype=torch.int64), torch.ones(2).bool())
    assert not result.requires_grad
    assert result.dtype == dtype
    assert delta.tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("td_error", "episode", "finished", "named"),
    [
        (torch.ones(3), torch.zeros(2).long(), torch.ones(3).bool(), "episode"),
        (torch.ones(3), torch.zeros(3).long(), torch.ones(1).bool(), "finished"),
        (torch.ones(1, 3), torch.zeros(1, 3).long(), torch.ones(1, 3).bool(), "td_error"),
        (torch.tensor([1.0, -0.1]), torch.zeros(2).long(), torch.ones(2).bool(), "td_error"),
        (torch.tensor([1.0, torch.nan]), torch.zeros(2).long(), torch.ones(2).bool(), "td_error"),
        (torch.tensor([1.0, torch.inf]), torch.zeros(2).long(), torch.ones(2).bool(), "td_error"),
    ],
)
def test_reliability_refuses(td_error, episode, finished, named):
    with pytest.raises(ValueError, match=rf"^reliability: .*{named}"):
        reliability(td_error, episode, finished)
