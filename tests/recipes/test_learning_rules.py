"""What each recipe learns by: when updates begin, what they move, and where the target networks are after each.

These are runs of `train`, so that a wrong argument there is noticed too. The rules are written out here.
"""

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn

from recipes.common import run as training
from recipes.common.networks import Normalizer
from tests.recipes.runs import RECIPES

TAU = 0.125
# recipe -> overrides, and the networks of its loss that have targets
SOFT = {
    "dqn": (["dqn.target_update_interval=null", f"dqn.tau={TAU}"], ["value_network"]),
    "sac": ([f"sac.tau={TAU}"], ["qvalue_network"]),
    "td3": ([f"td3.tau={TAU}"], ["actor_network", "qvalue_network"]),
    "r2d2": ([f"r2d2.tau={TAU}"], []),
    # the average policy keeps this share of itself
    "acer": ([f"acer.average={1 - TAU}", "acer.replay_ratio=1"], ["actor_network"]),
}


def copies(values):
    return [value.detach().clone() for value in values]


def states(networks, names):
    """Copies of the networks that have targets, and of the targets."""
    if not names:  # recipes.r2d2 has two networks and no loss
        return tuple(copies(network.parameters()) for network in networks)
    pair = [[getattr(networks[0], f"{kind}{name}_params") for name in names] for kind in ("", "target_")]
    return tuple(copies(value for each in kind for value in each.flatten_keys().values()) for kind in pair)


@pytest.fixture
def watched(monkeypatch):
    """Runs a recipe; gives (online, target) and what is learned, before the first and after each call of the update."""

    def run(path, name, names, *words):
        module, found, learned, networks = import_module(f"recipes.{name}"), [], [], []

        def note():
            found.append(states(networks, names))
            learned.append(copies(networks[0].parameters()))

        def noting(update):
            def call(*arguments):
                result = update(*arguments)
                note()
                return result

            return call

        def make(first, replay, *given, **options):
            networks.extend(each for each in given if isinstance(each, nn.Module) and not isinstance(each, Normalizer))
            note()
            made = build(first, replay, *given, **options)
            return tuple(map(noting, made)) if isinstance(made, tuple) else noting(made)

        function = "make_updates" if name == "acer" else "make_update"
        build = getattr(module, function)
        monkeypatch.setattr(module, function, make)
        RECIPES[name].run(path, *words)
        return found, learned

    return run


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SOFT)
def test_each_update_moves_the_targets_a_share_of_the_way(tmp_path, watched, name):
    words, names = SOFT[name]
    found, _ = watched(tmp_path, name, names, *words)
    assert len(found) > (4 if name == "td3" else 8)  # a cycle of TD3 has two updates of the critics
    assert distance(*found[0]) == 0
    for (_, before), (online, after) in pairwise(found):
        expected = [old + TAU * (new - old) for old, new in zip(before, online, strict=True)]
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)
    assert distance(found[0][1], found[2][1]) > 1e-5  # and the targets have moved


def test_hard_updates_copy_the_network_at_their_interval(tmp_path, watched):
    """The copy is due at the first round that begins at or after each multiple of the interval."""
    words = "dqn.target_update_interval=32", "dqn.learning_rate=1e-2"
    found, _ = watched(tmp_path, "dqn", ["value_network"], *words)
    # rounds of two updates after 48, 64, 80 and 96 steps; copies before those after 64 and 96
    copied = [0, 0, 0, 2, 2, 2, 2, 6, 6]
    assert len(found) == len(copied)
    for (_, target), number in zip(found, copied, strict=True):
        torch.testing.assert_close(target, found[number][0], rtol=0, atol=0)
    assert distance(found[0][0], found[2][0]) > 1e-4


@pytest.mark.parametrize("name", SOFT)
def test_two_updates_move_every_parameter_that_is_learned(tmp_path, watched, name):
    """Actor, critics and, in SAC, the weight of the entropy."""
    words, names = SOFT[name]
    _, learned = watched(tmp_path, name, names, *words)
    assert len(learned[0]) >= {"dqn": 6, "sac": 6 + 6 + 1, "td3": 6 + 6, "r2d2": 6, "acer": 12}[name]
    assert all(not torch.equal(one, other) for one, other in zip(learned[0], learned[2], strict=True))


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
