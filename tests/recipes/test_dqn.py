"""DQN: the runs that the recipe makes, its presets, its errors and its command."""

import contextlib
import importlib.util
import math
import os
import signal
import time

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from recipes import dqn
from recipes.common import evaluation
from recipes.common import run as training
from recipes.common.cli import CONFIG, DONE, INTERRUPTED
from recipes.common.collector import VectorCollector
from recipes.common.errors import ConfigError
from recipes.common.replay import end_last_episodes
from recipes.common.replayable_env import ReplayableEnv
from tests.params import slow_but
from tests.recipes.runs import (
    Composer,
    assert_same_runs,
    assert_trained,
    command,
    eager_and_compiled,
    needs,
    rows,
    stop_after,
    tiny,
)
from torchrl_replay_ext import RankBasedSampler

ENVS = ["cartpole", "acrobot", pytest.param("lunarlander", marks=needs("Box2D"))]
SAMPLERS = ["uniform", "per", "rank", "reaper"]
composer = Composer("dqn", dqn.Config, tiny("dqn", evaluation_episodes=2, hidden_sizes=None))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_trains_and_leaves_its_files(tmp_path, capsys, sampler):
    assert dqn.train(composer.configuration(f"sampler={sampler}"), tmp_path) == DONE
    assert_trained(tmp_path, sampler, capsys.readouterr().out)
    for row in rows(tmp_path):
        assert float(row["return_mean"]) == pytest.approx((float(row["return_0"]) + float(row["return_1"])) / 2)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("env", ENVS[1:])
def test_every_environment_trains(tmp_path, env):
    assert dqn.train(composer.configuration(f"env={env}", *composer.tiny, "dqn.num_evaluations=1"), tmp_path) == DONE
    assert [int(row["env_steps"]) for row in rows(tmp_path)] == [96]


PAPER = {  # appendix D of the ReaPER paper
    "learning_rate": (2.3e-3, 6.3e-4, 6.3e-4),
    "total_steps": (50_000, 100_000, 100_000),
    "buffer_size": (100_000, 50_000, 50_000),
    "learning_starts": (1000, 1000, 1000),
    "target_update_interval": (10, 250, 250),
    "batch_size": (64, 128, 128),
    "train_interval": (256, 4, 4),
    "gradient_steps": (128, 4, 4),
    "n_step": (1, 1, 1),
    "exploration_fraction": (0.16, 0.12, 0.12),
    "initial_epsilon": (1, 1, 1),
    "final_epsilon": (0.04, 0.1, 0.1),
    "evaluation_epsilon": (0.001, 0.001, 0.001),
    "num_evaluations": (100, 100, 100),
    "evaluation_episodes": (5, 5, 5),
    "gamma": (0.99, 0.99, 0.99),
    "max_grad_norm": (10, 10, 10),
    "hidden_sizes": ([64, 64], [64, 64], [64, 64]),
}


@pytest.mark.parametrize(
    ("column", "env", "threshold"), [(0, "cartpole", 475), (1, "acrobot", -100), (2, "lunarlander", 200)]
)
def test_presets_are_those_of_the_paper(column, env, threshold):
    config = composer.composed(f"env={env}")
    assert config.env.reward_threshold == threshold
    extensions = {"loss_function": "smooth_l1", "tau": None, "cagrad": None}
    assert OmegaConf.to_container(config.dqn) == {key: values[column] for key, values in PAPER.items()} | extensions


def test_schedules():
    settings = dqn.parse_config(composer.configuration(), dqn.Config).dqn
    settings.exploration_fraction = 0.5
    assert [settings.epsilon(step) for step in (0, 31, 48, 96)] == pytest.approx([1.0, 1.0, 0.04, 0.04])
    assert settings.epsilon(36) == pytest.approx(1 - 0.75 * 0.96)
    # rounds of updates end at 48, 64, 80 and 96 steps
    assert settings.num_updates() == 8
    settings.total_steps = 100
    assert settings.num_updates() == 10
    assert [settings.evaluations_due(step) for step in (0, 33, 34, 66, 99, 100, 112)] == [0, 0, 1, 1, 2, 3, 3]


def test_training_stops_at_the_threshold_and_resumes_beyond_it(tmp_path, capsys):
    config = composer.configuration("env.reward_threshold=1", "sampler=uniform")
    assert dqn.train(config, tmp_path) == DONE
    assert [row["env_steps"] for row in rows(tmp_path)] == ["32"]
    assert "reached 1 at step 32" in capsys.readouterr().out
    assert dqn.train(composer.resumed(tmp_path, "stop_at_threshold=false"), tmp_path) == DONE
    assert [row["env_steps"] for row in rows(tmp_path)] == ["32", "64", "96"]
    assert "reached 1 at step 32" in capsys.readouterr().out


def test_interrupted_run_resumes_where_it_was(tmp_path, monkeypatch, capsys):
    """Ctrl-C at the first evaluation; how other runs resume is in test_resume.py."""
    evaluate = evaluation.evaluate

    def interrupt(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)
        return evaluate(*arguments, **options)

    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    run_dir.mkdir(), whole.mkdir()
    monkeypatch.setattr(evaluation, "evaluate", interrupt)
    assert dqn.train(composer.configuration(), run_dir) == INTERRUPTED
    printed = capsys.readouterr()
    assert printed.out == f"interrupted at step 32; continue with resume={run_dir}\n"
    assert (run_dir / "learning_curve.png").is_file()
    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    first = rows(run_dir)
    assert dqn.train(composer.resumed(run_dir), run_dir) == DONE
    table = rows(run_dir)
    assert table[0] == first[0]
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    assert [int(row["updates"]) for row in table] == [0, 4, 8]
    assert float(table[1]["wall_time"]) > float(table[0]["wall_time"])
    assert dqn.train(composer.configuration(), whole) == DONE
    assert_same_runs(whole, run_dir)


def test_environments_that_cannot_go_on_begin_new_episodes(tmp_path, monkeypatch, capsys):
    """And what was stored of theirs ends here, that of the others not."""
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert dqn.train(composer.configuration("num_envs=4"), tmp_path) == INTERRUPTED
    play = ReplayableEnv._play
    monkeypatch.setattr(ReplayableEnv, "_play", lambda env, state: play(env, state) and state is not lost[0])
    lost, ended = [None], []
    load = VectorCollector.load_state_dict
    end = training.end_last_episodes

    def load_but_one(collector, state):
        lost[0] = state["envs"][2]
        load(collector, state)
        before = state["trajectory"]
        after = collector.state_dict()
        assert after["trajectory"] == [*before[:2], state["next_trajectory"], before[3]]
        assert after["return"][2] == 0

    def spy(replay, num_envs, envs):
        count = replay.write_count
        end(replay, num_envs, envs)
        ended.append((envs, replay.write_count - count))

    monkeypatch.setattr(VectorCollector, "load_state_dict", load_but_one)
    monkeypatch.setattr(training, "end_last_episodes", spy)
    assert dqn.train(composer.resumed(tmp_path), tmp_path) == DONE
    assert "the state of 1 of 4 environments cannot be restored" in capsys.readouterr().err
    assert ended in ([([2], 1)], [([2], 0)])  # the last step may have ended it


@pytest.mark.parametrize("truncation", ["bootstrap", "terminal"])
def test_what_a_time_limit_is(tmp_path, monkeypatch, truncation):
    stored = []
    monkeypatch.setattr(dqn, "make_round", lambda *_: lambda data: stored.append(data.clone()) or [])
    words = ["+env.options={max_episode_steps: 5}", f"+env.truncation={truncation}"]
    assert dqn.train(composer.configuration(*words), tmp_path) == DONE
    following = torch.cat(stored)["next"]
    assert following["done"].any() and torch.equal(following["terminated"], ~following["truncated"] & following["done"])
    # after five steps no pole has fallen yet
    limits = following["terminated" if truncation == "terminal" else "truncated"]
    assert torch.equal(limits, following["done"])
    assert float(rows(tmp_path)[-1]["return_mean"]) == 5.0


def test_further_evaluations_differ_only_in_the_named_options(tmp_path):
    words = ["+env.options={max_episode_steps: 5}", "+env.evaluations={same: {}, longer: {max_episode_steps: 6}}"]
    assert dqn.train(composer.configuration(*words), tmp_path) == DONE
    for row in rows(tmp_path):  # after six steps no pole has fallen yet
        assert [float(row[f"return_{name}"]) for name in ("mean", "same", "longer")] == [5.0, 5.0, 6.0]


@pytest.mark.parametrize("written", [3, 5])
def test_cut_off_episode_ends_as_truncated(written):
    replay = TensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=1)
    flags = {key: torch.zeros(written, 1, dtype=torch.bool) for key in ("done", "terminated", "truncated")}
    steps = torch.arange(float(written)).unsqueeze(1)
    replay.extend(
        TensorDict(
            observation=steps,
            action=torch.zeros(written, dtype=torch.int64),
            collector={"traj_ids": torch.zeros(written, dtype=torch.int64)},
            next={"observation": steps + 1, "reward": steps, **flags},
            batch_size=[written],
        )
    )
    end_last_episodes(replay, 1, [0])
    newest = replay[written % 4]
    assert newest["observation"].item() == newest["next", "reward"].item() == written - 1
    assert newest["next", "done"] and newest["next", "truncated"] and not newest["next", "terminated"]
    assert replay[:]["next", "done"].sum() == 1
    end_last_episodes(replay, 1, [0])  # it has ended: nothing more to write
    assert replay.write_count == written + 1


class TestCompiled:
    # rank: in a graph it is sorted at writes only, and so draws differ
    @pytest.mark.parametrize("sampler", slow_but(["per"], [name for name in SAMPLERS if name != "rank"]))
    def test_the_compiled_update_learns_what_the_eager_one_does(self, tmp_path, sampler):
        """The same draws, and the same parameters but for rounding."""
        tables = eager_and_compiled(dqn.train, composer.configuration, tmp_path, f"sampler={sampler}")
        results = [[float(row["loss"]) for row in table[1:]] for table in tables]
        assert results[0] == pytest.approx(results[1], rel=1e-4)

    @pytest.mark.slow
    def test_ranks_are_sorted_between_compiled_updates(self, tmp_path, monkeypatch):
        torch._dynamo.reset()
        sorts = []
        sort = RankBasedSampler.sort
        monkeypatch.setattr(RankBasedSampler, "sort", lambda sampler: (sorts.append(sampler), sort(sampler)))
        config = composer.configuration("sampler=rank", "compile=true", "dqn.gradient_steps=1")
        assert dqn.train(config, tmp_path) == DONE
        assert len(sorts) >= 2
        assert all(math.isfinite(float(row["loss"])) for row in rows(tmp_path)[1:])

    @pytest.mark.slow
    def test_the_first_batch_of_all_may_be_learned_from(self, tmp_path):
        torch._dynamo.reset()
        words = ("sampler=uniform", "compile=true", "updates_per_graph=2", "dqn.learning_starts=0")
        assert dqn.train(composer.configuration(*words), tmp_path) == DONE
        assert [int(row["updates"]) for row in rows(tmp_path)] == [4, 8, 12]

    @pytest.mark.slow
    def test_several_environments_resume_compiled(self, tmp_path, monkeypatch):
        torch._dynamo.reset()
        words = ("sampler=per", "compile=true", "num_envs=4", "updates_per_graph=2")
        answers = iter([False, False, False, False, True])
        monkeypatch.setattr(training, "interruption", lambda: contextlib.nullcontext(lambda: next(answers)))
        assert dqn.train(composer.configuration(*words), tmp_path) == INTERRUPTED
        monkeypatch.undo()
        before = len(rows(tmp_path))
        torch._dynamo.reset()
        assert dqn.train(composer.resumed(tmp_path), tmp_path) == DONE
        table = rows(tmp_path)
        assert 0 < before < len(table)
        assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
        assert [int(row["updates"]) for row in table] == [0, 4, 8]


@pytest.mark.parametrize("backend", ["tensorboard", "wandb"])
def test_logger_without_its_package_is_a_config_error(tmp_path, backend):
    if importlib.util.find_spec(backend):
        pytest.skip(f"{backend} is installed")
    with pytest.raises(ConfigError, match=f"logger={backend}: .*install the package"):
        dqn.train(composer.configuration(f"logger={backend}"), tmp_path)


def test_directory_of_another_run_is_not_overwritten(tmp_path):
    OmegaConf.save(composer.configuration(), tmp_path / CONFIG)
    with pytest.raises(ConfigError, match="holds a run already"):
        dqn.train(composer.configuration("sampler=uniform"), tmp_path)


def test_resumed_run_keeps_its_configuration(tmp_path):
    OmegaConf.save(composer.configuration(), tmp_path / CONFIG)
    assert composer.resumed(tmp_path, "device=cpu").device == "cpu"
    with pytest.raises(ConfigError, match=r"seed=3: a resumed run keeps its configuration"):
        composer.resumed(tmp_path, "seed=3")


def test_command_line(tmp_path):
    """Exit codes, and what stderr says, of the real command: bad configurations, and Ctrl-C."""
    bad = [
        (command("dqn", "alpha=1"), "did you mean sampler.alpha?"),
        (command("dqn", "env=gridworld"), "env=gridworld: there is no such choice; choose acrobot, "),
        (command("dqn", "env=pendulum"), "use recipes.sac or recipes.td3"),
    ]
    run_dir = tmp_path / "run"
    running = command("dqn", "sampler=uniform", f"hydra.run.dir={run_dir}", "dqn.learning_starts=49999")
    deadline = time.monotonic() + 300
    while not (run_dir / "progress.csv").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    for process, message in bad:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2
        assert errors.startswith("bad configuration: ") and message in errors and errors.count("\n") == 1
    out, errors = running.communicate(timeout=300)
    assert running.returncode == INTERRUPTED, errors
    assert out.startswith("interrupted at step ")
    assert "Traceback" not in errors
    assert (run_dir / "checkpoint.zip").is_file()

    os.truncate(run_dir / "checkpoint.zip", 10_000)
    for process, message in (
        (command("dqn", f"resume={run_dir}"), "checkpoint.zip is damaged: "),
        (command("dqn", f"resume={run_dir}", "dqn.gamma=0.9"), "a resumed run keeps its configuration"),
    ):
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 2
        assert message in errors and errors.count("\n") == 1
