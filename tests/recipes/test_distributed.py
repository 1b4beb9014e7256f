"""The distributed DQN: its errors, the actor that owns the buffer, and runs with several collectors."""

import importlib.util
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from recipes import distributed
from recipes.common import evaluation, remote
from recipes.common.cli import DONE, FAILED, INTERRUPTED, ConfigError
from recipes.common.remote import ReplayActor, from_arrays, stored_rows
from recipes.common.replay import STORED_KEYS, make_sampler
from tests.recipes.runs import Composer, checkpoint, command, needs, rows, tiny
from torchrl_replay_ext import CompilableTensorStorage

composer = Composer("distributed", distributed.Config, tiny("dqn", evaluation_episodes=2, hidden_sizes=None))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_collectors=0", "num_collectors=0: must be >= 1"),
        ("prefetch=17", r"prefetch=17: must be in \[0, 16\]"),
        ("+compile=true", "compile=true: the buffer is in another process"),
        ("dqn.cagrad=0.5", "dqn.cagrad=0.5: recipes.distributed does not support it"),
        ("num_envs=3", "num_envs=3: must divide dqn.train_interval=16"),
    ],
)
def test_bad_configurations(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        distributed.train(composer.configuration(override), tmp_path)


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed, .* pip install"):
        distributed.train(composer.configuration(), tmp_path)


def transitions(first, trajectories, done=False):
    count = len(trajectories)
    column = torch.full((count, 1), done)
    return TensorDict(
        {
            "observation": torch.arange(first, first + count).float().unsqueeze(1),
            "action": torch.zeros(count, dtype=torch.int64),
            "collector": {"traj_ids": torch.tensor(trajectories)},
            "next": {
                "observation": torch.zeros(count, 1),
                "reward": torch.zeros(count, 1),
                "done": column,
                "terminated": column.clone(),
                "truncated": torch.zeros_like(column),
            },
        },
        [count],
    )


def replay_actor(sampler):
    return ReplayActor(
        storage=CompilableTensorStorage(8),
        sampler=make_sampler({"name": sampler}, 8, 100, 2),
        batch_size=4,
        priority_key="td_error",
    )


def test_trajectories_of_different_collectors_differ():
    batches = [transitions(0, [0, 0, 1, 2]).reshape(2, 2) for _ in range(3)]
    ids = [stored_rows(worker, 3, STORED_KEYS, batch)["collector", "traj_ids"] for worker, batch in enumerate(batches)]
    assert [trajectory.tolist() for trajectory in ids] == [[0, 0, 3, 6], [1, 1, 4, 7], [2, 2, 5, 8]]


def test_batches_that_travel():
    actor = replay_actor("reaper")
    actor.extend(transitions(0, [0, 0, 1, 1]))
    batch = from_arrays(actor.draw())
    assert set(STORED_KEYS) < set(batch.keys(True, True)) and batch.shape == (4,)
    assert torch.equal(batch["observation"], batch["index"].float().unsqueeze(1))
    actor.exchange(
        {"index": np.arange(4), "write_stamp": np.array([1, 1, 1, 0]), "td_error": np.float32([4.0, 0.0, 1.0, 9.0])}
    )
    stats = actor.sampler_stats()
    assert (
        stats["dropped_updates"] == 1 and stats["never_updated"] == 0.25 and stats["max_priority"] == pytest.approx(2)
    )
    assert replay_actor("uniform").sampler_stats() == {}


@pytest.mark.parametrize("sampler", ["uniform", "reaper"])
def test_episodes_that_go_on_are_ended(sampler):
    actor = replay_actor(sampler)
    actor.end_open_episodes()
    actor.extend(transitions(0, [0, 1, 0, 0]))
    actor.extend(transitions(4, [1], done=True))
    actor.extend(transitions(5, [2]))
    actor.end_open_episodes()
    newest = actor[6:8]
    assert newest["observation"].flatten().tolist() == [3.0, 5.0]
    assert newest["next", "truncated"].all() and newest["next", "done"].all()
    assert not newest["next", "terminated"].any()
    count = actor.write_count
    actor.end_open_episodes()
    assert actor.write_count == count


@pytest.fixture(scope="module")
def ray_runtime():
    ray = pytest.importorskip("ray", reason="needs ray (pip install ray)")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_interrupted_and_resumed(ray_runtime, tmp_path, monkeypatch, capsys):
    evaluate = evaluation.evaluate

    def interrupting(*arguments, **keywords):
        if keywords["seed"][1] == 2:
            signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments, **keywords)

    monkeypatch.setattr(evaluation, "evaluate", interrupting)
    assert distributed.train(composer.configuration("num_envs=2"), tmp_path) == INTERRUPTED
    assert "interrupted at step 64" in capsys.readouterr().out
    assert distributed.train(composer.resumed(tmp_path), tmp_path) == DONE
    table = rows(tmp_path)
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    assert [int(row["updates"]) for row in table] == [0, 4, 8]
    assert [float(row["sampler/num_items"]) for row in table][-1] == 64
    assert all(float(row["sampler/broken_off"]) == 0 for row in table)
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.yaml",
        "progress.csv",
        "learning_curve.png",
        "checkpoint.zip",
    }


@pytest.mark.parametrize(
    ("which", "saved"), [("a collector", {64, 80}), ("the replay buffer", {32})], ids=["collector", "buffer"]
)
def test_killed_actor(ray_runtime, tmp_path, monkeypatch, capsys, which, saved):
    """SIGKILL, as if it had run out of memory: the run ends, says why, and goes on from what could be saved."""
    import ray

    collectors = []
    evaluate, collector = evaluation.evaluate, remote.RemoteCollector

    def noted(*arguments, **keywords):
        collectors.append(collector(*arguments, **keywords))
        return collectors[0]

    def killing(*arguments, **keywords):
        if keywords["seed"][1] == 2:
            actors = *collectors[0]._collector.remote_collectors, collectors[0]._replay.actor
            victim = actors[-1 if which == "the replay buffer" else 1]
            os.kill(ray.get(victim.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        return evaluate(*arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "RemoteCollector", noted)
        patch.setattr(evaluation, "evaluate", killing)
        configuration = composer.configuration("num_envs=2", "num_collectors=2", "checkpoint_interval=32")
        assert distributed.train(configuration, tmp_path) == FAILED
    errors = capsys.readouterr().err
    assert f": the process of {which} has ended (killed, or out of memory?)\n" in errors
    assert f"resume={tmp_path}" in errors and "Traceback" not in errors
    assert checkpoint(tmp_path)["counters"]["env_steps"] in saved
    assert distributed.train(composer.resumed(tmp_path), tmp_path) == DONE
    assert [row["env_steps"] for row in rows(tmp_path)] == ["32", "64", "96"]


def test_errors_of_an_environment_pass_as_they_are(ray_runtime):
    with pytest.raises(ValueError, match="action 5"), remote.noticing_lost_actors(None):
        raise ValueError("action 5")


def test_too_few_cpus(monkeypatch):
    ray = pytest.importorskip("ray", reason="needs ray (pip install ray)")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    ended = []
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with (
        pytest.raises(ConfigError, match="num_collectors=2: collectors and buffer need 3 CPUs, the cluster has 2"),
        remote.runtime("auto", 3),
    ):
        pass
    assert ended


def processes_of(session):
    found = subprocess.run(["ps", "-o", "pid=,args=", "-s", str(session)], capture_output=True, text=True)
    return found.stdout.strip()


@pytest.mark.slow
@needs("ray")
@pytest.mark.parametrize("sampler", ["reaper"])
def test_command_line(tmp_path, sampler):
    """Ctrl-C in a terminal reaches every process of the run; none is left behind."""
    run_dir = tmp_path / "run"
    words = [f"sampler={sampler}", f"hydra.run.dir={run_dir}"]
    running = command("distributed", *words, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (run_dir / "progress.csv").is_file() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    out, errors = running.communicate(timeout=120)
    assert running.returncode == INTERRUPTED, errors
    assert out.startswith("interrupted at step ")
    assert "Traceback" not in errors
    assert (run_dir / "checkpoint.zip").is_file()
    assert not processes_of(running.pid)
