"""DQN: the runs that the recipe makes, its presets, its errors and its command."""

import signal
from unittest.mock import Mock

import pytest
import torch

from recipes import dqn
from recipes.common import progress
from recipes.common import run as training
from recipes.common.cli import INTERRUPTED
from recipes.common.errors import ConfigError
from tests.recipes.runs import RECIPES, command, wait_until

recipe = RECIPES["dqn"]


def test_schedules():
    settings = recipe.configuration().dqn
    settings.exploration_fraction = 0.5
    assert [settings.epsilon(step) for step in (0, 31, 48, 96)] == pytest.approx([1.0, 1.0, 0.04, 0.04])
    assert settings.epsilon(36) == pytest.approx(1 - 0.75 * 0.96)
    # rounds of updates end at 48, 64, 80 and 96 steps
    assert settings.num_updates() == 8
    settings.total_steps = 100
    assert settings.num_updates() == 10
    assert [settings.evaluations_due(step) for step in (0, 33, 34, 66, 99, 100, 112)] == [0, 0, 1, 1, 2, 3, 3]


def test_training_stops_at_the_threshold_and_resumes_beyond_it(tmp_path, capsys):
    table = recipe.run(tmp_path, "env.reward_threshold=1", "sampler=uniform")
    # the evaluation before the first update does not count
    assert [(row["env_steps"], row["updates"] != "0") for row in table] == [("32", False), ("64", True)]
    assert "reached 1 at step 64" in capsys.readouterr().out
    table = recipe.resume(tmp_path, "stop_at_threshold=false")
    assert [row["env_steps"] for row in table] == ["32", "64", "96"]
    assert "reached 1 at step 64" in capsys.readouterr().out


@pytest.mark.parametrize("truncation", ["bootstrap", "terminal"])
def test_what_a_time_limit_is(tmp_path, monkeypatch, truncation):
    stored = []
    monkeypatch.setattr(dqn, "make_round", lambda *_: lambda data: stored.append(data.clone()))
    words = ["+env.options={max_episode_steps: 5}", f"+env.truncation={truncation}"]
    table = recipe.run(tmp_path, *words)
    following = torch.cat(stored)["next"]
    assert following["done"].any() and torch.equal(following["terminated"], ~following["truncated"] & following["done"])
    # after five steps no pole has fallen yet
    limits = following["terminated" if truncation == "terminal" else "truncated"]
    assert torch.equal(limits, following["done"])
    assert float(table[-1]["return_mean"]) == 5.0


def test_a_backend_receives_the_numbers_of_each_evaluation(tmp_path, monkeypatch):
    backend = Mock()
    monkeypatch.setattr(progress, "get_logger", lambda name, **_: backend if name else None)
    recipe.run(tmp_path, "logger.backend=csv")
    calls = backend.log_scalar.call_args_list
    assert [call.kwargs["step"] for call in calls if call.args[0] == "sampler/alpha"] == [32, 64, 96]


def test_directory_of_another_run_is_not_overwritten(tmp_path):
    training.save_config(recipe.configuration(), tmp_path)
    with pytest.raises(ConfigError, match="holds a run already"):
        recipe.run(tmp_path, "sampler=uniform")


def test_command_line(tmp_path):
    """Ctrl-C ends the real command after its round of updates."""
    run_dir = tmp_path / "run"
    running = command("dqn", "sampler=uniform", f"hydra.run.dir={run_dir}", "dqn.learning_starts=49999")
    wait_until((run_dir / "progress.csv").is_file)
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=300)
    assert running.returncode == INTERRUPTED, errors
    assert out.startswith("interrupted at step ") and "Traceback" not in errors
    assert (run_dir / "checkpoint.zip").is_file()
