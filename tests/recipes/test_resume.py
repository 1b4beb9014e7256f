"""A run that was stopped and resumed is the run that was not: the same bits, but for the time it took."""

import time
from functools import partial
from itertools import count

import pytest
import torch

from recipes import acer, dqn, r2d2, sac, td3
from recipes.common import run
from recipes.common.cli import DONE, INTERRUPTED
from recipes.common.csv_files import rewrite
from tests.recipes.runs import TINY_R2D2, Composer, assert_same_runs, needs, rows, stop_after, tiny

RECIPES = {
    "dqn": (dqn, Composer("dqn", dqn.Config, tiny("dqn"))),
    "sac": (sac, Composer("sac", sac.Config, tiny("sac"))),
    "td3": (td3, Composer("td3", td3.Config, tiny("td3"))),
    "r2d2": (r2d2, Composer("r2d2", r2d2.Config, TINY_R2D2)),
    "acer": (
        acer,
        Composer(
            "acer",
            acer.Config,
            [*tiny("acer", learning_starts=None, train_interval=None, gradient_steps=None, slice_len=4), "num_envs=4"],
        ),
    ),
}


def check(monkeypatch, tmp_path, name, *words, stops=(3,)):
    recipe, composer = RECIPES[name]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir(), parts.mkdir()
    torch._dynamo.reset()
    assert recipe.train(composer.configuration(*words), whole) == DONE
    config = composer.configuration(*words)
    for stop in stops:
        with monkeypatch.context() as patch:
            stop_after(patch, stop)
            torch._dynamo.reset()
            assert recipe.train(config, parts) == INTERRUPTED
        config = composer.resumed(parts)
    torch._dynamo.reset()
    assert recipe.train(config, parts) == DONE
    assert_same_runs(whole, parts)


def test_cpu_times_include_those_before_a_resume(tmp_path, monkeypatch):
    """With a clock that moves by 1 whenever it is read."""
    recipe, composer = RECIPES["dqn"]
    clock = count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert recipe.train(composer.configuration(), tmp_path) == INTERRUPTED
    # read at the start, for an evaluation, for the checkpoint, and again
    assert recipe.train(composer.resumed(tmp_path), tmp_path) == DONE
    assert [float(row["cpu_time"]) for row in rows(tmp_path)] == [1, 3, 4]


def test_runs_of_an_earlier_version_resume_without_cpu_times(tmp_path, monkeypatch):
    recipe, composer = RECIPES["dqn"]
    save = run.save_checkpoint

    def save_without(run_dir, *, counters, **components):
        save(run_dir, counters={k: v for k, v in counters.items() if k != "cpu_time"}, **components)

    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        patch.setattr(run, "save_checkpoint", save_without)
        assert recipe.train(composer.configuration(), tmp_path) == INTERRUPTED
    before = [{k: v for k, v in row.items() if k != "cpu_time"} for row in rows(tmp_path)]
    rewrite(tmp_path / "progress.csv", before)
    assert recipe.train(composer.resumed(tmp_path), tmp_path) == DONE
    after = rows(tmp_path)
    assert [row["env_steps"] for row in after] == ["32", "64", "96"]
    assert [row["cpu_time"] for row in after] == ["nan"] * 3
    assert {k: v for k, v in after[0].items() if k != "cpu_time"} == before[0]
    assert float(after[2]["wall_time"]) > float(after[0]["wall_time"])


EVENTS = [
    "env=tworooms",
    "+env.events.near_initial={history: 5, eta: 0.1}",
    "+env.options.max_episode_steps=30",
    "sampler.min_size=1",
]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dqn", ["sampler=reaper"]),
        ("dqn", [*EVENTS, "sampler=sset_per", "num_envs=4"]),
        ("sac", ["sampler=per", "num_envs=4"]),
        ("td3", ["sampler=dper", "td3.noise=ou"]),
        ("dqn", [*EVENTS, "sampler=sset_per", "num_envs=4", "dqn.n_step=3"]),
        ("sac", ["sampler=reaper", "num_envs=2", "sac.n_step=2"]),
        ("td3", ["sampler=lap", "td3.n_step=3"]),
        ("r2d2", ["sampler=per"]),
        ("acer", ["sampler=per"]),
        ("acer", ["env=pendulum", "acer.normalize_observations=true"]),
    ],
)
def test_recipes(tmp_path, monkeypatch, name, words):
    check(monkeypatch, tmp_path, name, *words)


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("sampler", ["uniform", "per", "rank", "reaper"])
@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_samplers(tmp_path, monkeypatch, name, sampler, num_envs):
    check(monkeypatch, tmp_path, name, f"sampler={sampler}", f"num_envs={num_envs}", stops=(1, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "per", "rank", "reaper"])
def test_samplers_of_r2d2(tmp_path, monkeypatch, sampler):
    check(monkeypatch, tmp_path, "r2d2", f"sampler={sampler}", stops=(1, 3, 1))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["uniform", "per", "rank", "reaper"])
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_samplers_of_acer(tmp_path, monkeypatch, env, sampler):
    check(monkeypatch, tmp_path, "acer", f"env={env}", f"sampler={sampler}", stops=(1, 2, 1))


@pytest.mark.slow
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("retention", ["pinned", "ring"])
@pytest.mark.parametrize("sampler", ["sset", "sset_per"])
def test_event_tables(tmp_path, monkeypatch, sampler, retention, num_envs):
    words = [*EVENTS, f"sampler={sampler}", f"sampler.retention={retention}", f"num_envs={num_envs}"]
    check(monkeypatch, tmp_path, "dqn", *words, stops=(1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["dper", "dper_uniform"])
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_actor_batches(tmp_path, monkeypatch, name, sampler):
    check(monkeypatch, tmp_path, name, f"sampler={sampler}", "num_envs=2", stops=(3, 1))


@pytest.mark.slow
@needs("ale_py")
@needs("cv2")
@pytest.mark.parametrize(
    ("name", "words"), [("dqn", ["sampler=reaper"]), ("dqn", ["sampler=per", "num_envs=4"]), ("acer", [])]
)
def test_games(tmp_path, monkeypatch, name, words):
    """Frames are stored once, games go on after lost lives."""
    settings = ["env.atari.max_frames=400", "env.atari.repeat_action_probability=0.25"]
    learning = [f"{name}.hidden_sizes=[16]", f"{name}.optimizer={{name: rmsprop}}"]
    check(monkeypatch, tmp_path, name, "env=atari/breakout", *settings, *learning, *words)


COMPILED = [
    ("dqn", ["sampler=per", "num_envs=4", "updates_per_graph=2"]),
    ("dqn", ["sampler=reaper", "updates_per_graph=2", "dqn.learning_starts=0"]),
    ("td3", ["sampler=dper", "updates_per_graph=2"]),
    ("dqn", ["sampler=uniform"]),
    ("dqn", ["sampler=rank"]),
    ("dqn", [*EVENTS, "sampler=sset_per"]),
    ("sac", ["sampler=per"]),
    ("r2d2", ["sampler=per"]),
    ("acer", ["env=cartpole", "sampler=per"]),
    ("acer", ["env=pendulum"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), COMPILED[:3])
def test_traced(tmp_path, monkeypatch, name, words):
    """The graph is made anew; that of test_compiled, without the minute that inductor takes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check(monkeypatch, tmp_path, name, "compile=true", *words, stops=(4,))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), COMPILED)
def test_compiled(tmp_path, monkeypatch, name, words):
    """The graph is made anew, and computes the same."""
    check(monkeypatch, tmp_path, name, "compile=true", *words, stops=(4,))
