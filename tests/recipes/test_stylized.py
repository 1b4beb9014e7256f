import pytest
import torch

from recipes.experiments import stylized

LENGTHS = list(range(10, 101, 10))


def updates(strategy, length, period, offset=0, seeds=30):
    initial = stylized.initial_q_values(length, period, offset).expand(seeds, -1)
    return stylized.count_updates(strategy, initial, torch.Generator().manual_seed(length))


CONDITIONS = [(None, 0)] + [(period, offset) for period in (2, 4) for offset in range(period)]


def test_initial_values_by_hand():
    assert stylized.initial_q_values(5, None).tolist() == [0, 0, 0, 0, 0, 1]
    assert stylized.initial_q_values(5, 2).tolist() == [0, 1, 0, 1, 0, 1]
    assert stylized.initial_q_values(5, 2, offset=1).tolist() == [1, 0, 1, 0, 1, 1]
    assert stylized.initial_q_values(9, 4).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 1]
    assert stylized.initial_q_values(9, 4, offset=3).tolist() == [1, 0, 0, 0, 1, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("period", "offset"), CONDITIONS)
def test_the_oracle_updates_every_wrong_value_once(period, offset):
    for length in LENGTHS:
        wrong = (stylized.initial_q_values(length, period, offset) != 1).sum()
        assert (updates("oracle", length, period, offset, seeds=2) == wrong).all()


@pytest.mark.parametrize(("period", "offset"), CONDITIONS)
def test_greedy_reaper_is_optimal_in_every_condition(period, offset):
    for length in range(10, 101):
        oracle = updates("oracle", length, period, offset, seeds=1)
        assert (updates("ReaPER-g", length, period, offset, seeds=3) == oracle).all()


@pytest.mark.parametrize(("period", "offset"), CONDITIONS[1:])
def test_greedy_per_wastes_updates_where_targets_are_unreliable(period, offset):
    extra = [
        (updates("PER-g", length, period, offset) - updates("oracle", length, period, offset)).double().mean().item()
        for length in LENGTHS
    ]
    assert min(extra) > 2
    assert extra[-1] > 10 * extra[0]
    assert all(later > earlier for earlier, later in zip(extra[::3], extra[3::3], strict=False))
