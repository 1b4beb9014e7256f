import csv

import numpy as np
import pytest
from omegaconf import OmegaConf

from recipes.common.errors import ConfigError
from recipes.studies import curves, plot
from recipes.studies.curves import smooth
from tests.recipes.runs import ROOT


def write_run(run_dir, returns, sampler="per", seed=1, env="cartpole", threshold=None, every=10, **settings):
    run_dir.mkdir()
    config = {"env": {"name": env, "reward_threshold": threshold}, "sampler": {"name": sampler}, "seed": seed}
    config |= settings
    OmegaConf.save(OmegaConf.create(config), run_dir / "config.yaml")
    with (run_dir / "progress.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env_steps", "return_mean"])
        writer.writerows([every * (i + 1), value] for i, value in enumerate(returns))
    return run_dir


def test_runs_make_a_png_and_an_svg(tmp_path, drawn):
    runs = [write_run(tmp_path / f"{seed}", [1.0, 2.0, seed], seed=seed) for seed in (1, 2)]
    runs.append(write_run(tmp_path / "other", [5.0], env="acrobot", sampler="reaper", threshold=3))
    out = tmp_path / "figure.png"
    words = [*runs, "--out", out, "--columns", "env_steps", "return_mean"]
    printed = drawn(*words)
    assert out.read_bytes().startswith(b"\x89PNG")
    svg = out.with_suffix(".svg")
    assert "<image" not in svg.read_text()
    assert printed == f"{out} {svg}\n"
    before = [path.read_bytes() for path in (out, svg)]
    drawn(*words)
    assert [path.read_bytes() for path in (out, svg)] == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: pass directories of runs"),
        (["run", "--smooth", "0"], "argument --smooth: 0: must be a whole number, at least 1"),
        (
            ["study=sset", "--smooth", "3", "--columns", "q_sum"],
            "study=sset: a study has no option but --baseline, several together have --out alone",
        ),
        (["run", "--out", "figure.pdf"], "figures are written as .png and .svg"),
    ],
)
def test_bad_command_lines_are_explained(words, message, plot_refuses):
    assert message in plot_refuses(*words)


def test_runs_of_the_same_seed_are_no_sample(tmp_path, plot_refuses, drawn):
    runs = [write_run(tmp_path / f"{rate}", [1.0, 2.0], dqn={"learning_rate": rate}) for rate in (1, 2)]
    assert "cartpole per seed 1: 2 runs of this seed would count as so many" in plot_refuses(*runs)
    drawn(*runs, "--by", "dqn.learning_rate", "--out", tmp_path / "figure")


def test_the_published_evaluations_are_drawn_without_their_runs(tmp_path, drawn):
    data = ROOT / "recipes/results/sset/curves.csv"
    drawn("--read", data, "--by", "variant", "--columns", "q_sum", "return_mean", "--out", tmp_path / "figure")
    assert {path.name for path in tmp_path.iterdir()} == {"figure.png", "figure.svg"}
    with pytest.raises(ConfigError, match=r"no column missing, only recipe, env, variant, seed"):
        plot.read_table(data, ["missing"], ["variant"])


def test_smoothing_averages_neighbours_and_keeps_the_ends():
    values = np.array([[0.0, 3.0, 6.0, 0.0, 3.0]])
    np.testing.assert_allclose(smooth(values, 3), [[1.5, 3.0, 3.0, 3.0, 1.5]])
    np.testing.assert_array_equal(smooth(values, 1), values)
    np.testing.assert_allclose(smooth(np.ones((2, 4)), 9), np.ones((2, 4)))


def test_values_between_and_beyond_evaluations(tmp_path):
    steps = np.array([5, 10, 15, 30, 31])
    unfinished = plot.read_run(write_run(tmp_path / "a", [1, 2, 3]))
    np.testing.assert_array_equal(unfinished.at(steps, "return_mean"), [np.nan, 1, 1, 3, np.nan])
    stopped = plot.read_run(write_run(tmp_path / "b", [1, 2, 3], threshold=3, stop_at_threshold=True))
    np.testing.assert_array_equal(stopped.at(steps, "return_mean"), [np.nan, 1, 1, 3, 3])
    ended = plot.read_run(write_run(tmp_path / "c", [1, 2, 3], threshold=3))
    np.testing.assert_array_equal(ended.at(steps, "return_mean"), [np.nan, 1, 1, 3, np.nan])


def test_the_note_says_where_lines_of_runs_of_unequal_length_end(tmp_path):
    runs = [plot.read_run(write_run(tmp_path / f"{n}", [1.0] * n, seed=n)) for n in (2, 3)]
    assert "a line ends with its shortest run" in curves.curve_note([runs])
    assert "shortest" not in curves.curve_note([runs[:1], runs[1:]]) + curves.curve_note([runs[:1] * 2])
