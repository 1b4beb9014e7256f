import csv
import sys

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from scipy.stats import bootstrap

from recipes import plot
from recipes.common.cli import ConfigError


def write_run(run_dir, returns, sampler="per", seed=1, env="cartpole", threshold=None, every=10):
    run_dir.mkdir()
    config = {"env": {"name": env, "reward_threshold": threshold}, "sampler": {"name": sampler}, "seed": seed}
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with (run_dir / "progress.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env_steps", "return_mean"])
        writer.writerows([every * (i + 1), value] for i, value in enumerate(returns))
    return run_dir


def test_two_runs_make_a_png(tmp_path, monkeypatch, capsys):
    runs = [write_run(tmp_path / f"{seed}", [1.0, 2.0, seed], seed=seed) for seed in (1, 2)]
    runs.append(write_run(tmp_path / "other", [5.0], env="acrobot", sampler="reaper", threshold=3))
    out = tmp_path / "figure.png"
    monkeypatch.setattr(
        sys, "argv", ["plot", *map(str, runs), "--out", str(out), "--columns", "env_steps", "return_mean"]
    )
    plot.main()
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}\n"


def test_directory_without_progress_is_a_clear_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        plot.main()
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert str(tmp_path) in errors and errors.count("\n") == 1
    empty = write_run(tmp_path / "empty", [])
    with pytest.raises(ConfigError, match="no rows"):
        plot.read_run(empty)
    with pytest.raises(ConfigError, match="no column q_sum, only env_steps, return_mean"):
        plot.read_run(write_run(tmp_path / "other", [1.0]), ["q_sum"])


def test_values_between_and_beyond_evaluations(tmp_path):
    steps = np.array([5, 10, 15, 30, 31])
    unfinished = plot.read_run(write_run(tmp_path / "a", [1, 2, 3]))
    np.testing.assert_array_equal(unfinished.at(steps, "return_mean"), [np.nan, 1, 1, 3, np.nan])
    solved = plot.read_run(write_run(tmp_path / "b", [1, 2, 3], threshold=3))
    np.testing.assert_array_equal(solved.at(steps, "return_mean"), [np.nan, 1, 1, 3, 3])


def test_a_run_that_did_not_solve_its_task_counts_with_its_length_and_a_mark(tmp_path):
    runs = [
        write_run(tmp_path / "a", [0, 5, 0, 5, 5, 5, 0], seed=1),
        write_run(tmp_path / "b", [5, 5, 0], seed=2),
        write_run(tmp_path / "c", [5, 6, 7], seed=3, sampler="sset"),
    ]
    lines = plot.format_solved(runs, 5.0).splitlines()
    assert lines[1].split() == ["cartpole", "per", "≥35", "40", "≥30"]
    assert lines[2].split() == ["cartpole", "sset", "10", "10"]


@pytest.mark.parametrize(
    ("steps", "censored", "median", "bounded"),
    [
        ([10, 20, 30], [False, False, False], 20, False),
        ([10, 20, 30], [False, False, True], 20, False),
        ([10, 30, 30], [False, True, True], 30, True),
        # the mean of the second and the third
        ([10, 20, 30, 30], [False, False, True, True], 25, True),
        ([10, 20, 20, 30], [False, False, False, True], 20, False),
        # a run that ended early may have needed most steps
        ([10, 20, 30], [True, False, False], 20, True),
    ],
)
def test_a_median_is_a_lower_bound_if_longer_runs_could_change_it(steps, censored, median, bounded):
    assert plot.median_with_bound(np.array(steps), np.array(censored)) == (median, bounded)


@pytest.mark.parametrize("number", [1, 3, 4, 5, 12])
def test_the_legend_does_not_cover_the_curves(tmp_path, number):
    figure = Figure(figsize=(plot.panel_width(number), 4.8), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    groups = {
        f"sampler{i}": [
            plot.read_run(write_run(tmp_path / f"{i}-{seed}", [1, 2], seed=seed, threshold=2)) for seed in range(2)
        ]
        for i in range(number)
    }
    plot.draw_curves(axes, groups, plot.RETURN)
    axes.set(title="cartpole", xlabel="environment steps", ylabel="return")
    canvas.draw()
    legend = axes.get_legend()
    assert legend is not None
    place = legend.get_window_extent()
    assert not place.overlaps(axes.get_window_extent())
    assert not place.overlaps(axes.xaxis.label.get_window_extent())
    # the figure holds all of it
    assert min(place.x0, place.y0) >= 0
    assert place.x1 <= figure.bbox.width and place.y1 <= figure.bbox.height


def test_interquartile_mean_and_its_band():
    returns = np.array([[0.0], [1.0], [2.0], [100.0]])
    assert plot.interquartile_mean(returns) == 1.5
    rng = np.random.default_rng(1)
    low, high = plot.bootstrap_interval(rng.normal(size=(100, 3)))
    # the interquartile mean of n normals has a standard deviation of about 1.1 / sqrt(n)
    np.testing.assert_allclose(high - low, 2 * 1.96 * 0.11, rtol=0.3)
    low, high = plot.bootstrap_interval(np.ones((5, 2)))
    np.testing.assert_array_equal([low, high], np.ones((2, 2)))


def test_runs_grouped_by_what_their_configurations_hold(tmp_path):
    runs = [write_run(tmp_path / str(seed), [5, 5, 5], seed=seed) for seed in (1, 2)]
    lines = plot.format_solved(runs, 5.0, by=["env.name", "seed"]).splitlines()
    assert [line.split()[1:7] for line in lines[1:]] == [
        ["name", "cartpole,", "seed", seed, "10", "10"] for seed in "12"
    ]
    with pytest.raises(ConfigError, match=r"has no env\.color"):
        plot.read_run(runs[0], by=["env.color"])


def test_bca_percentiles_are_the_published_ones():
    # Efron and Tibshirani, An Introduction to the Bootstrap (1993), Tables 14.1 and 14.2: variance of A in the spatial
    # data, 90 % intervals; the percentile interval is (100.8, 233.9)
    text = "48 36 20 29 42 42 20 42 22 41 45 14 6 0 33 28 34 4 32 24 47 41 24 26 30 41"
    values = np.array(text.split(), dtype=float)
    rng = np.random.default_rng(0)
    found = values[rng.integers(len(values), size=(20_000, len(values)))].var(1)
    low, high = plot.bca_percentiles(found, values, lambda sample: sample.var(0), [0.05, 0.95])
    assert (low, high) == (pytest.approx(115.8, abs=3), pytest.approx(259.6, abs=6))


@pytest.mark.parametrize("count", [2, 4, plot.FEW, plot.FEW + 1])
def test_intervals_of_few_seeds_are_those_of_scipys_bca(monkeypatch, count):
    monkeypatch.setattr(plot, "RESAMPLES", 20_000)
    values = np.random.default_rng(3).lognormal(size=(count, 2))
    method = "BCa" if count <= plot.FEW else "percentile"
    low, high = plot.bootstrap_interval(values, lambda sample: sample.mean(0))
    rng = np.random.default_rng(0)
    expected = bootstrap((values,), np.mean, method=method, n_resamples=20_000, axis=0, rng=rng).confidence_interval
    width = expected.high - expected.low
    np.testing.assert_allclose(low / width, expected.low / width, atol=0.05)
    np.testing.assert_allclose(high / width, expected.high / width, atol=0.05)


def test_intervals_of_equal_or_single_values_have_no_width():
    for values in (np.full((4, 2), 3.0), np.array([[3.0, 3.0]])):
        low, high = plot.bootstrap_interval(values)
        assert low.tolist() == high.tolist() == [3.0, 3.0]
