"""A run that was stopped and resumed is the run that was not: the same bits, but for the time it took."""

import contextlib

import pytest
import torch

from recipes import acer, dqn, sac, td3, training
from recipes.run import DONE, INTERRUPTED
from tests.recipes.runs import Composer, assert_same_runs, needs


def tiny(group, **more):
    settings = {
        "total_steps": 96,
        "learning_starts": 32,
        "train_interval": 16,
        "gradient_steps": 2,
        "batch_size": 8,
        "buffer_size": 64,
        "num_evaluations": 2,
        "evaluation_episodes": 1,
        "hidden_sizes": "[8, 8]",
    } | more
    return [*(f"{group}.{key}={value}" for key, value in settings.items() if value), "env.reward_threshold=null"]


RECIPES = {
    "dqn": (dqn, Composer("dqn", dqn.Config, tiny("dqn"))),
    "sac": (sac, Composer("sac", sac.Config, tiny("sac"))),
    "td3": (td3, Composer("td3", td3.Config, tiny("td3"))),
    "acer": (
        acer,
        Composer(
            "acer",
            acer.Config,
            [*tiny("acer", learning_starts="", train_interval="", gradient_steps="", slice_len=4), "num_envs=4"],
        ),
    ),
}


def stop_after(monkeypatch, batches):
    """Runs are interrupted after so many batches, as if by Ctrl-C."""
    answers = iter([False] * batches)
    monkeypatch.setattr(
        training, "interruption", lambda: contextlib.nullcontext(lambda: next(answers, True) is not False)
    )


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


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("sampler", ["uniform", "per", "rank", "reaper"])
@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_samplers(tmp_path, monkeypatch, name, sampler, num_envs):
    check(monkeypatch, tmp_path, name, f"sampler={sampler}", f"num_envs={num_envs}")
