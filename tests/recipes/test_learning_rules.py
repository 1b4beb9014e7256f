"""What each recipe learns by: when updates begin, what they move, and where the target networks are after each.

These are runs of `train`, so that a wrong argument there is noticed too. The rules are written out here.
"""

import pytest
import torch

from recipes.common import run as training
from tests.recipes.runs import RECIPES, assert_soft_updates, distance, noted_replays

TAU = 0.125
# recipe -> overrides, and the networks of its loss that have targets
SOFT = {
    "dqn": (["dqn.target_update_interval=null", f"dqn.tau={TAU}"], ["value_network"]),
    "sac": ([f"sac.tau={TAU}"], ["qvalue_network"]),
    "td3": ([f"td3.tau={TAU}"], ["actor_network", "qvalue_network"]),
    "r2d2": ([f"r2d2.tau={TAU}"], []),
    # the average policy keeps this share of itself
    "acer": ([f"acer.average={1 - TAU}", "acer.replay_ratio=1", "sampler=per"], ["actor_network"]),
}
KIND = {"dqn": "squared", "sac": "absolute", "td3": "squared", "r2d2": "absolute", "acer": "squared"}  # of TD errors


@pytest.mark.parametrize("name", SOFT)
def test_updates_learn_every_parameter_and_move_the_targets_a_share_of_the_way(tmp_path, watched, name):
    """Learned are actor, critics and, in SAC, the weight of the entropy."""
    words, names = SOFT[name]
    with noted_replays() as replays:
        found, learned, _ = watched(name, names, lambda: RECIPES[name].run(tmp_path, *words))
    assert len(found) > (4 if name == "td3" else 8)  # a cycle of TD3 has two updates of the critics
    assert_soft_updates(found, TAU)
    assert len(learned[0]) >= {"dqn": 6, "sac": 6 + 6 + 1, "td3": 6 + 6, "r2d2": 6, "acer": 12}[name]
    assert all(not torch.equal(one, other) for one, other in zip(learned[0], learned[2], strict=True))
    sampler = replays[0].sampler.anchors if name == "acer" else replays[0].sampler
    assert f"td_error='{KIND[name]}'" in repr(sampler)


def test_hard_updates_copy_the_network_at_their_interval(tmp_path, watched):
    """The copy is due at the first round that begins at or after each multiple of the interval."""
    words = "dqn.target_update_interval=32", "dqn.learning_rate=1e-2"
    found, _, _ = watched("dqn", ["value_network"], lambda: RECIPES["dqn"].run(tmp_path, *words))
    # rounds of two updates after 48, 64, 80 and 96 steps; copies before those after 64 and 96
    copied = [0, 0, 0, 2, 2, 2, 2, 6, 6]
    assert len(found) == len(copied)
    for (_, target), number in zip(found, copied, strict=True):
        torch.testing.assert_close(target, found[number][0], rtol=0, atol=0)
    assert distance(found[0][0], found[2][0]) > 1e-4


@pytest.mark.parametrize(("starts", "first"), [(0, 16), (15, 16), (16, 32), (31, 32), (32, 48)])
@pytest.mark.parametrize("name", RECIPES)
def test_updates_begin_with_the_first_round_after_learning_starts(tmp_path, monkeypatch, name, starts, first):
    if name != "dqn" and starts in (0, 15):
        pytest.skip("in recipes.dqn only")
    steps, log = [], training.Run.log_losses
    monkeypatch.setattr(training.Run, "log_losses", lambda run, losses: steps.append(run.env_steps) or log(run, losses))
    words = [f"{name}.learning_starts={starts}", f"{name}.num_evaluations=1"]
    last = RECIPES[name].run(tmp_path, *words, *["acer.replay_ratio=0"] * (name == "acer"))[-1]
    per_round = {"td3": 1, "acer": 1}.get(name, 2)
    assert steps == [step for step in range(first, 97, 16) for _ in range(per_round)]
    assert int(last["updates"]) == len(steps) * (2 if name == "td3" else 1)
