"""A resumed run has what it had before, begins new episodes, and may become longer."""

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from recipes.common.cli import INTERRUPTED
from recipes.common.errors import ConfigError
from tests.recipes.runs import RECIPES, checkpoint, needs, noted_replays, stopping

EVENTS = [
    "env=tworooms",
    "+env.events.near_initial={history: 5, eta: 0.1}",
    "+env.options.max_episode_steps=30",
    "sampler.min_size=1",
]
GAME = ["env.atari.max_frames=400", "dqn.hidden_sizes=[16]", "dqn.optimizer={name: rmsprop}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dqn", ["sampler=per"]),
        ("dqn", [*EVENTS, "sampler=sset_per", "num_envs=4", "dqn.n_step=3"]),
        ("sac", ["sampler=rank", "num_envs=2"]),
        ("td3", ["sampler=dper", "td3.noise=ou"]),
        ("r2d2", ["sampler=per"]),
        ("acer", ["env=pendulum", "acer.normalize_observations=true", "sampler=per"]),
        pytest.param("dqn", ["env=atari/breakout", *GAME], marks=[pytest.mark.slow, needs("ale_py"), needs("cv2")]),
    ],
)
def test_a_resumed_run_has_its_networks_optimizers_buffer_and_counters(tmp_path, name, words):
    recipe = RECIPES[name]
    recipe.stop(tmp_path, 3, *words)
    before = checkpoint(tmp_path)
    with stopping(0):  # nothing but the load
        recipe.train(recipe.resumed(tmp_path), tmp_path, INTERRUPTED)
    after = checkpoint(tmp_path)
    assert before.keys() == after.keys() and after["collector"]["starts"] == 1
    for state in (before, after):
        del state["collector"], state["counters"]["wall_time"], state["counters"]["cpu_time"]
        state["replay"] = state["replay"]["_storage"], state["replay"]["_batch_size"]
        if name == "r2d2":  # the newest steps are marked as ends
            del state["replay"]
    one, other = tree_leaves(before), tree_leaves(after)
    assert len(one) == len(other) > 30
    # slots that were never written hold any numbers, and NaN
    assert all(np.array_equal(a, b, equal_nan=isinstance(a, torch.Tensor)) for a, b in zip(one, other, strict=True))
    with noted_replays() as replays:
        table = recipe.resume(tmp_path)
    assert int(table[-1]["env_steps"]) >= 96
    if name == "r2d2":
        assert replays[0][11]["next", "done"].all()  # of 3 batches with 4 steps of each environment


@pytest.mark.parametrize("name", RECIPES)
def test_a_finished_run_can_be_extended(tmp_path, name):
    recipe, words = RECIPES[name], [f"{name}.exploration_fraction=1.0"] * (name in ("dqn", "r2d2"))
    before = recipe.run(tmp_path, *words)
    after = recipe.resume(tmp_path, f"{name}.total_steps=150")
    assert after[:3] == before
    # evaluations keep their distance; the last one is at the end
    assert [row["env_steps"] for row in after[3:]] == ["128", "160"]
    if name != "acer":
        assert [row["updates"] for row in after[3:]] == ["12", "16"]
    if words:  # the schedule ended after 96 steps
        settings = recipe.configuration(*words).learning
        expected = [
            settings.initial_epsilon + share * (settings.final_epsilon - settings.initial_epsilon)
            for share in (2 / 3, 1, 1, 1)
        ]
        assert [float(row["epsilon"]) for row in after[1:]] == pytest.approx(expected)
    longer = recipe.resumed(tmp_path, f"{name}.total_steps=400").learning
    assert (longer.total_steps, longer.scheduled) == (400, 96)
    with pytest.raises(ConfigError, match=f"{name}.total_steps=150: must be an integer > 150"):
        recipe.resumed(tmp_path, f"{name}.total_steps=150")


def test_a_run_that_ended_at_its_threshold_is_extended_beyond_it(tmp_path):
    recipe = RECIPES["dqn"]
    recipe.run(tmp_path, "stop_at_threshold=true", "env.reward_threshold=1")
    with pytest.raises(ConfigError, match="pass stop_at_threshold=false too"):
        recipe.resumed(tmp_path, "dqn.total_steps=400")
    assert recipe.resume(tmp_path, "dqn.total_steps=150", "stop_at_threshold=false")[-1]["env_steps"] == "160"


def test_evaluations_keep_their_distance_in_a_second_extension(tmp_path):
    recipe = RECIPES["dqn"]
    recipe.run(tmp_path)
    recipe.resume(tmp_path, "dqn.total_steps=140")
    table = recipe.resume(tmp_path, "dqn.total_steps=200")
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96, 128, 144, 160, 192, 208]
