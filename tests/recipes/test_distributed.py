"""The distributed recipe: its errors, the actor that owns the buffer, and runs with several collectors."""

import importlib.util
import math
import os
import signal

import pytest
import torch
from tensordict import TensorDict

from recipes.common import evaluation, remote
from recipes.common import run as training
from recipes.common.cli import INTERRUPTED
from recipes.common.errors import ConfigError
from recipes.common.remote import TRAJECTORY, stored_rows
from tests.recipes.runs import FILES, Recipe, assert_soft_updates, rows, tiny
from tests.recipes.test_learning_rules import KIND, SOFT, TAU

recipe = Recipe("distributed", tiny("dqn", evaluation_episodes=2, hidden_sizes=None))


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"Ray is not installed, .* pip install"):
        recipe.run(tmp_path)


def test_trajectories_of_different_collectors_differ():
    batch = TensorDict({"collector": {"traj_ids": torch.tensor([[0, 0], [1, 2]])}}, [2, 2])
    ids = [stored_rows(worker, 3, (TRAJECTORY,), batch)["collector", "traj_ids"] for worker in range(3)]
    assert [trajectory.tolist() for trajectory in ids] == [[0, 0, 3, 6], [1, 1, 4, 7], [2, 2, 5, 8]]


@pytest.mark.parametrize("sampler", ["rank", "recency"])
def test_samplers_that_need_one_shard(tmp_path, sampler):
    pytest.importorskip("ray", reason="needs ray (pip install ray)")
    with pytest.raises(ConfigError, match=f"num_shards=2 sampler={sampler}: .* in one place"):
        recipe.run(tmp_path, f"sampler={sampler}", "num_shards=2")


@pytest.fixture(scope="module")
def ray_runtime():
    ray = pytest.importorskip("ray", reason="needs ray (pip install ray)")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def test_interrupted_and_resumed(ray_runtime, tmp_path, monkeypatch, capsys):
    evaluate = evaluation.evaluate

    def interrupting(*arguments, **keywords):
        if keywords["seed"][1] == 2:
            signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments, **keywords)

    monkeypatch.setattr(evaluation, "evaluate", interrupting)
    recipe.train(recipe.configuration("num_envs=2"), tmp_path, INTERRUPTED)
    assert "interrupted at step 64" in capsys.readouterr().out
    table = recipe.resume(tmp_path)
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    assert [int(row["updates"]) for row in table] == [0, 4, 8]
    assert [float(row["sampler/num_items"]) for row in table][-1] == 64
    assert all(float(row["sampler/interrupted"]) == 0 for row in table)
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize("algorithm", ["dqn", "td3", "sac"])
def test_each_algorithm_learns_by_the_rules_of_its_recipe(ray_runtime, tmp_path, monkeypatch, watched, algorithm):
    words, names = SOFT[algorithm]
    env = "cartpole" if algorithm == "dqn" else "pendulum"
    config = recipe.composed(f"algorithm={algorithm}", f"env={env}", "sampler=per", *tiny(algorithm), *words)
    kinds, make = [], training.Run.make_remote_replay
    monkeypatch.setattr(training.Run, "make_remote_replay", lambda run, **kind: kinds.append(kind) or make(run, **kind))
    found, learned, loss_module = watched(algorithm, names, lambda: recipe.train(config, tmp_path))
    assert kinds == [{"td_error": KIND[algorithm]}]
    assert algorithm != "dqn" or loss_module.double_dqn  # what it does is tested in test_n_step
    table = rows(tmp_path)
    assert [row["env_steps"] for row in table] == ["32", "64", "96"]
    # as many updates as in the algorithm's recipe
    assert [int(row["updates"]) for row in table] == [0, 4, 8]
    assert len(found) == (5 if algorithm == "td3" else 9)
    assert_soft_updates(found, TAU)
    assert all(not torch.equal(one, other) for one, other in zip(learned[0], learned[2], strict=True))
    # the buffer receives the TD errors
    assert float(table[-1]["sampler/never_updated"]) < 1 and float(table[-1]["sampler/rejected_updates"]) == 0
    assert all(math.isfinite(float(row[key])) for row in table[1:] for key in row if key.startswith("loss"))
    if algorithm != "dqn":  # a finished run can be extended
        longer = recipe.resume(tmp_path, f"{algorithm}.total_steps=128")
        assert longer[:3] == table and (longer[3]["env_steps"], longer[3]["updates"]) == ("128", "12")


def killing(monkeypatch, victim):
    """Kill a process before the second evaluation, as if it had run out of memory; `victim` maps a collector to it."""
    import ray

    collectors = []
    evaluate, collector = evaluation.evaluate, remote.RemoteCollector

    def noted(*arguments, **keywords):
        collectors.append(collector(*arguments, **keywords))
        return collectors[0]

    def kill(*arguments, **keywords):
        if keywords["seed"][1] == 2:
            pid = ray.get(victim(collectors[0]).__ray_call__.remote(lambda _: os.getpid()))
            os.kill(pid, signal.SIGKILL)
        return evaluate(*arguments, **keywords)

    monkeypatch.setattr(remote, "RemoteCollector", noted)
    monkeypatch.setattr(evaluation, "evaluate", kill)


def test_killed_shard(ray_runtime, tmp_path, monkeypatch, capsys):
    """The run says what is lost and goes on."""
    killing(monkeypatch, lambda collector: collector._replay._shards.handles[-1])
    settings = "num_envs=2", "num_collectors=2", "checkpoint_interval=32", "num_shards=2"
    table = recipe.run(tmp_path, *settings)
    errors = capsys.readouterr().err
    assert "the process of shard 1 of the replay buffer has ended" in errors
    assert [row["env_steps"] for row in table] == ["32", "64", "96"]
    assert float(table[-1]["sampler/lost_shards"]) == 1
