"""The analysis of DPER: the numbers it measures for a run of TD3, and its errors."""

import numpy as np
import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler

from recipes.common.files import read_csv
from recipes.experiments import dper_analysis
from tests.recipes.runs import Recipe, tiny
from torchrl_replay_ext import DecoupledSampler

TINY = {"train_interval": 2, "batch_size": 32, "buffer_size": None, "num_evaluations": 1, "hidden_sizes": "[16, 16]"}
MEASURES = ("score", "squared_difference", "kl")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A short run of Pendulum."""
    path = tmp_path_factory.mktemp("td3")
    Recipe("td3", tiny("td3", **TINY)).run(path)
    return path


def test_rows(tmp_path, run_dir, capsys):
    rows = dper_analysis.main([str(run_dir), "--draws", "200", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out.splitlines()
    *table, half, quarter, tenth = read_csv(tmp_path / "out" / "dper_analysis.csv")
    assert len(rows) == len(table) + 3
    assert [(row["granularity"], int(row["num_candidates"])) for row in table] == [
        (granularity, count) for granularity in ("batch", "group") for count in (1, 2, 3, 5, 10)
    ]
    for row in table:
        assert 0 <= float(row["saturated"]) <= 1
        for name in MEASURES:
            low, value, high = (float(row[key]) for key in (f"{name}_low", name, f"{name}_high"))
            assert 0 < low <= value <= high
    for start in (0, 5):
        one, two, _, _, ten = table[start : start + 5]
        assert float(one["score"]) == 1
        for name in MEASURES:
            assert float(one[name]) == pytest.approx(1, abs=0.1)
            assert float(two[name]) < 1
            assert float(ten[name]) < float(two[name])
    for row, share in ((half, 0.5), (quarter, 0.25), (tenth, 0.1)):
        assert row["granularity"] == f"newest {share}"
        assert row["num_candidates"] == row["score"] == "" and float(row["squared_difference"]) > 0
    # finer parts choose more
    score = [float(table[start + 1]["score"]) for start in (0, 5)]
    assert score == sorted(score, reverse=True)
    assert any(line.startswith("| group | 10 |") for line in printed)
    # the same figure and table from the file
    dper_analysis.main(["--read", str(tmp_path / "out" / "dper_analysis.csv"), "--out", str(tmp_path / "again")])
    assert capsys.readouterr().out.splitlines()[1:] == printed[1:]


def test_numbers_are_those_of_the_run(run_dir):
    """The policy that was learned, the transitions that were stored; a batch is chosen by its KL."""
    replay, policy, noise_scale = dper_analysis.load_run(run_dir)
    assert len(replay) == 96 and noise_scale == 0.1
    _, again, _ = dper_analysis.load_run(run_dir)  # other parameters at first
    for parameter, same in zip(policy.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, same)

    sampler = DecoupledSampler(RandomSampler(), policy, num_candidates=2, noise_scale=noise_scale)
    replay.set_sampler(sampler)
    torch.manual_seed(0)
    numbers = dper_analysis.measure(sampler.actor_buffer(replay), policy, noise_scale, 50)
    np.testing.assert_allclose(numbers[:, 0], numbers[:, 4], rtol=1e-5)
    assert (numbers[:, 0] < numbers[:, 1]).all()

    sampler = DecoupledSampler(RandomSampler(), policy, num_candidates=1, noise_scale=noise_scale)
    replay.set_sampler(sampler)
    numbers = dper_analysis.measure(sampler.actor_buffer(replay), policy, noise_scale, 2000)
    stored = replay[:]
    with torch.no_grad():
        mean = (stored["action"] - policy(stored.select("observation"))["action"]).square().mean().item()
    assert numbers[:, 3].mean() == pytest.approx(mean, rel=0.02)
    np.testing.assert_allclose(numbers[:, 0], numbers[:, 1])
