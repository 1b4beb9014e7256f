"""DQN: the runs that the recipe makes, its presets, its errors and its command."""

import importlib.util
import signal

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from recipes import dqn
from recipes.common import run as training
from recipes.common.cli import INTERRUPTED
from recipes.common.collector import ReplayableEnv, VectorCollector
from recipes.common.errors import ConfigError
from recipes.common.replay import end_last_episodes
from tests import data
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


def test_environments_that_cannot_go_on_begin_new_episodes(tmp_path, monkeypatch, capsys):
    """And what was stored of theirs ends here, that of the others not."""
    recipe.stop(tmp_path, 3, "num_envs=4")
    play = ReplayableEnv._play
    monkeypatch.setattr(ReplayableEnv, "_play", lambda env, state: play(env, state) and state is not lost[0])
    lost, ended = [None], []
    load = VectorCollector.load_state_dict
    end = training.end_last_episodes

    def load_but_one(collector, state):
        lost[0] = state["envs"][2]
        load(collector, state)
        before, after = state["trajectory"], collector.state_dict()
        assert after["trajectory"] == [*before[:2], state["next_trajectory"], before[3]]

    def spy(replay, num_envs, envs):
        count = replay.write_count
        end(replay, num_envs, envs)
        ended.append((envs, replay.write_count - count))

    monkeypatch.setattr(VectorCollector, "load_state_dict", load_but_one)
    monkeypatch.setattr(training, "end_last_episodes", spy)
    recipe.resume(tmp_path)
    assert "the state of 1 of 4 environments cannot be restored" in capsys.readouterr().err
    assert ended in ([([2], 1)], [([2], 0)])  # the last step may have ended it


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


@pytest.mark.parametrize("written", [3, 5])
def test_cut_off_episode_ends_as_truncated(written):
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=1)
    replay.extend(data.rows(written, ids=[0] * written))
    end_last_episodes(replay, 1, [0])
    newest = replay[written % 4]
    assert newest["number"] == newest["observation"] == written - 1
    assert newest["next", "done"] and newest["next", "truncated"] and not newest["next", "terminated"]
    assert replay[:]["next", "done"].sum() == 1
    end_last_episodes(replay, 1, [0])  # it has ended: nothing more to write
    assert replay.write_count == written + 1


@pytest.mark.parametrize("backend", ["tensorboard", "wandb"])
def test_logger_without_its_package_is_a_config_error(tmp_path, backend):
    if importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is installed")
    with pytest.raises(ConfigError, match=f"logger={backend}: .*install the package"):
        recipe.run(tmp_path, f"logger={backend}")


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
