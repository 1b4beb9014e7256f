import pytest
import torch

from recipes.experiments import cliffwalk


def walk(num_states):
    return cliffwalk.Cliffwalk(num_states, torch.Generator().manual_seed(0))


def test_the_buffer_holds_all_sequences_of_actions():
    n = 5
    counts = walk(n).transitions(torch.Generator().manual_seed(1)).bincount(minlength=2 * n)
    expected = torch.zeros(2 * n, dtype=torch.int64)
    for actions in range(2**n):
        for state in range(n):
            # bit k says whether the action in state k is the one that leads on
            fell = not actions >> state & 1
            expected[state + n * fell] += 1
            if fell:
                break
    assert counts.sum() == 2 ** (n + 1) - 2
    assert torch.equal(counts, expected)


def test_truth_is_the_fixed_point():
    of = walk(7)
    of.q_values = list(of.truth)
    assert of.mean_squared_error() == 0
    assert [of.td_error(k) for k in range(14)] == pytest.approx([0.0] * 14)


def test_prioritized_replay_needs_far_fewer_updates():
    updates = {strategy: cliffwalk.count_updates(strategy, 9, 0)[0] for strategy in cliffwalk.STRATEGIES}
    assert updates["rank-based"] <= 0.3 * updates["uniform"]
    assert updates["proportional"] <= 0.25 * updates["uniform"]
    assert updates["oracle"] <= 0.1 * updates["uniform"]


def test_outliers_are_stored_with_their_transitions_but_not_with_the_success():
    """A run that replays an outlier again and again does not end by itself; the oracle replays none."""
    assert cliffwalk.count_updates("oracle", 6, 0, 1.0) == cliffwalk.count_updates("oracle", 6, 0)
    assert cliffwalk.count_updates("proportional", 6, 0, 1.0, cap=500) == (500, True)
    rows = [dict(num_states=6, strategy=name, seed=0, updates=500, censored=1) for name in cliffwalk.STRATEGIES]
    assert cliffwalk.format_table(rows).splitlines()[-1] == "| 6 |" + " ≥ 500 |" * len(cliffwalk.STRATEGIES)
