import csv

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


def test_greedy_per_is_optimal_where_targets_are_reliable():
    for length in LENGTHS:
        assert (updates("PER-g", length, None) == length).all()


@pytest.mark.parametrize(("period", "offset"), CONDITIONS[1:])
def test_greedy_per_wastes_updates_where_targets_are_unreliable(period, offset):
    extra = [
        (updates("PER-g", length, period, offset) - updates("oracle", length, period, offset)).double().mean().item()
        for length in LENGTHS
    ]
    assert min(extra) > 2
    assert extra[-1] > 10 * extra[0]
    assert all(later > earlier for earlier, later in zip(extra[::3], extra[3::3], strict=False))


@pytest.mark.parametrize("period", [None, 4, 2])
def test_uniform_is_the_worst(period):
    for length in (10, 30):
        assert updates("uniform", length, period).double().mean() > 2 * updates("PER-g", length, period).double().mean()


def test_uniform_needs_length_squared_updates_from_scratch():
    # each of the n values waits for its one transition out of n: mean n, variance n(n - 1)
    seeds, length = 400, 12
    mean = updates("uniform", length, None, seeds=seeds).double().mean().item()
    assert abs(mean - length**2) < 5 * (length * length * (length - 1) / seeds) ** 0.5


def test_the_initial_values_are_left_alone():
    initial = stylized.initial_q_values(10, 2).repeat(3, 1)
    before = initial.clone()
    stylized.count_updates("PER-g", initial, torch.Generator())
    assert torch.equal(initial, before)


def test_command_line(tmp_path, capsys):
    rows = stylized.main(["--out", str(tmp_path / "out"), "--seeds", "3", "--lengths", "10", "20"])
    assert len(rows) == 2 * 3 * 4
    with (tmp_path / "out" / "stylized.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["strategy"] for row in written] == [row["strategy"] for row in rows]
    assert all(float(row["extra"]) == 0 for row in written if row["strategy"] in ("ReaPER-g", "oracle"))
    assert (tmp_path / "out" / "stylized.png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again"
    assert stylized.main(["--out", str(again), "--read", str(tmp_path / "out" / "stylized.csv")]) == rows
    assert sorted(path.name for path in again.iterdir()) == ["stylized.png", "stylized.svg"]
    for path in again.iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    printed = capsys.readouterr().out
    assert "ReaPER-g" in printed and "stylized.png" in printed


def test_the_seed_decides():
    once, again, other = (stylized.run([20], 5, seed) for seed in (1, 1, 2))
    assert once == again
    assert once != other


@pytest.mark.parametrize("argument", ["--seeds", "--lengths"])
def test_a_bad_argument_ends_with_exit_code_2(argument, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        stylized.main(["--out", str(tmp_path), argument, "0"])
    assert argument in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
