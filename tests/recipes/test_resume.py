"""A run that was stopped and resumed is the run that was not: the same bits, but for the time it took."""

import time
from itertools import count

import pytest
import torch

from recipes.common.cli import INTERRUPTED
from tests.recipes.runs import RECIPES, assert_same_runs, needs, stopping


def check(tmp_path, name, *words, stops=(3,)):
    recipe, whole, parts = RECIPES[name], tmp_path / "whole", tmp_path / "parts"
    torch._dynamo.reset()
    recipe.run(whole, *words)
    config = recipe.configuration(*words)
    for stop in stops:
        with stopping(stop):
            torch._dynamo.reset()
            recipe.train(config, parts, INTERRUPTED)
        config = recipe.resumed(parts)
    torch._dynamo.reset()
    recipe.train(config, parts)
    assert_same_runs(whole, parts)


def test_cpu_times_include_those_before_a_resume(tmp_path, monkeypatch):
    """With a clock that moves by 1 whenever it is read."""
    clock = count()
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    RECIPES["dqn"].stop(tmp_path, 3)
    # read at the start, for an evaluation, for the checkpoint, and again
    assert [float(row["cpu_time"]) for row in RECIPES["dqn"].resume(tmp_path)] == [1, 3, 4]


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
def test_recipes(tmp_path, name, words):
    check(tmp_path, name, *words)


SAMPLERS = ["uniform", "per", "rank", "reaper"]
LONGER = [
    *(
        (name, [f"sampler={each}", f"num_envs={n}"])
        for name in ("dqn", "sac", "td3")
        for each in SAMPLERS
        for n in (1, 4)
    ),
    *(("r2d2", [f"sampler={each}"]) for each in SAMPLERS),
    *(("acer", [f"env={env}", f"sampler={each}"]) for env in ("cartpole", "pendulum") for each in SAMPLERS),
    *(
        ("dqn", [*EVENTS, f"sampler={each}", f"sampler.retention={kind}", "num_envs=4"])
        for each in ("sset", "sset_per")
        for kind in ("pinned", "ring")
    ),
    *((name, [f"sampler={each}", "num_envs=2"]) for name in ("sac", "td3") for each in ("dper", "dper_uniform")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "words"), LONGER)
def test_several_stops(tmp_path, name, words):
    check(tmp_path, name, *words, stops=(1, 2, 1))


@pytest.mark.slow
@needs("ale_py")
@needs("cv2")
@pytest.mark.parametrize(
    ("name", "words"), [("dqn", ["sampler=reaper"]), ("dqn", ["sampler=per", "num_envs=4"]), ("acer", [])]
)
def test_games(tmp_path, name, words):
    """Frames are stored once, games go on after lost lives."""
    settings = ["env.atari.max_frames=400", "env.atari.repeat_action_probability=0.25"]
    learning = [f"{name}.hidden_sizes=[16]", f"{name}.optimizer={{name: rmsprop}}"]
    check(tmp_path, name, "env=atari/breakout", *settings, *learning, *words)


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
@pytest.mark.parametrize(("name", "words"), COMPILED)
def test_compiled(tmp_path, name, words):
    """The graph is made anew, and computes the same."""
    check(tmp_path, name, "compile=true", *words, stops=(4,))
