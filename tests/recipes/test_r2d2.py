"""Recurrent DQN: values and targets of windows, the runs that the recipe makes, its environment and its errors."""

from copy import deepcopy
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from torchrl.data import Sequence

from recipes import r2d2
from recipes.common.collector import VectorCollector
from recipes.common.replay import make_sampler
from tests.recipes.runs import RECIPES
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage

NUM_ENVS, BURN_IN, LENGTH = 4, 3, 5
CPU = torch.device("cpu")
recipe = RECIPES["r2d2"]


# --- what the behaviour policy stores


class Collected:
    """A network, the steps that it collected in several environments, and a buffer that holds them."""

    def __init__(self, steps=60):
        torch.manual_seed(0)
        self.network = r2d2.RecurrentNetwork(2, 2, 8, [8], CPU)
        for weight in self.network.parameters():
            torch.nn.init.normal_(weight, std=0.5)
        make = partial(gymnasium.make, "recipes.envs:CartPolePositions-v0", max_episode_steps=13)
        behaviour = r2d2.RecurrentBehaviour(self.network, make().action_space, NUM_ENVS, seed=1)
        behaviour.epsilon = 0.5
        collector = VectorCollector([make] * NUM_ENVS, behaviour, frames_per_batch=steps * NUM_ENVS, seed=1)
        self.data = collector.collect().exclude("collector").reshape(steps, NUM_ENVS)

    def replay(self, batch_size=16):
        words = [f"r2d2.{key}={value}" for key, value in {"batch_size": batch_size, "buffer_size": 400}.items()]
        cfg = recipe.configuration(*words)
        replay = CompilableReplayBuffer(
            storage=CompilableTensorStorage(400, ndim=2),
            sampler=make_sampler(cfg, td_error="absolute", num_streams=1),
            batch_size=batch_size,
            sample_unit=Sequence(length=LENGTH, burn_in=BURN_IN),
            dim_extend=0,
        )
        replay.extend(self.data)
        return replay

    def states(self, network):
        """The recurrent states [steps, envs, 2, units] before each step, computed step by step from each reset."""
        result, state = [], network.initial(NUM_ENVS)
        for step in self.data:
            result.append(state)
            state = network.step(step["observation"], state)
            state = torch.where(step["next", "done"].unsqueeze(-1), 0.0, state)
        return torch.stack(result)


def test_the_recurrent_state_before_each_step_is_stored_and_begins_anew_with_each_episode():
    collected = Collected()
    assert collected.data["next", "truncated"].any() and collected.data["next", "terminated"].any()
    with torch.no_grad():
        torch.testing.assert_close(collected.data["recurrent_state"], collected.states(collected.network))


@torch.no_grad()
@pytest.mark.parametrize("target_steps", [1, 3])
def test_values_and_targets_of_windows_are_those_computed_step_by_step(target_steps):
    """With the network that collected, burn-in ends in the state that the episode had, also at its beginning."""
    collected = Collected()
    data, network = collected.data, collected.network
    target = deepcopy(network)
    for weight in target.parameters():
        weight.mul_(1.1)
    target.head[-1].weight.neg_()  # so that it prefers the other action
    target.head[-1].bias.neg_()
    settings = recipe.settings(
        f"r2d2.burn_in={BURN_IN}", f"r2d2.sequence_length={LENGTH}", f"r2d2.target_steps={target_steps}"
    )
    batch = collected.replay(batch_size=64).sample().reshape(-1, BURN_IN + LENGTH)
    values, targets = r2d2.values_and_targets(settings, network, target, batch)
    stored = data["recurrent_state"]

    def burned_in(at, env):
        """The target network's state: from the stored one at the first valid step of the window, step by step."""
        state = stored[at[0], env].unsqueeze(0)
        for step in at[:-1]:
            state = target.step(data["observation"][step, env].unsqueeze(0), state)
        return state

    valid = batch["validity_mask"]
    assert not valid[:, 0].all() and not valid[:, -1].all()
    differ = 0  # double Q-learning: the action is the network's choice, not the target network's
    for window, mask, value, wanted in zip(batch, valid, values, targets, strict=True):
        env = int(window["index"][0, 1])
        at = window["index"][:, 0][mask].tolist()
        first = int(mask[:BURN_IN].sum())
        learned = at[first:]
        best = []
        for step in learned:
            after = network.step(data["observation"][step, env].unsqueeze(0), stored[step, env].unsqueeze(0))
            q = network.values(after)[0]
            row = learned.index(step)
            torch.testing.assert_close(value[row], q[data["action"][step, env]])
            following = data["next", "observation"][step, env].unsqueeze(0)
            action = network.values(network.step(following, after)).argmax()
            own = target.step(following, burned_in([*at[: at.index(step) + 1], step + 1], env))
            differ += int(target.values(own).argmax() != action)
            best.append(float(target.values(own)[0, action]))
        for row in range(len(learned)):
            total, discount = 0.0, 1.0
            for later in range(row, min(row + target_steps, len(learned))):
                total += discount * float(data["next", "reward"][learned[later], env])
                discount *= settings.gamma * (not data["next", "terminated"][learned[later], env])
                last = later
            assert float(wanted[row]) == pytest.approx(total + discount * best[last], rel=1e-4)
    assert differ > 20


def test_the_priority_of_a_window_mixes_its_largest_and_its_mean_td_error(monkeypatch):
    collected = Collected()
    replay = collected.replay(batch_size=4)
    config = recipe.composed(f"r2d2.burn_in={BURN_IN}", f"r2d2.sequence_length={LENGTH}", "r2d2.eta=0.7")
    target = deepcopy(collected.network).requires_grad_(False)
    optimizer = torch.optim.Adam(collected.network.parameters(), lr=0.0)
    update = r2d2.make_update(config, replay, collected.network, target, optimizer)
    batches = []
    apply = replay.update_tensordict_priority
    monkeypatch.setattr(replay, "update_tensordict_priority", lambda batch: batches.append(batch) or apply(batch))
    for _ in range(5):
        update(None)
        batch = batches[-1]
        values, targets = r2d2.values_and_targets(config.r2d2, collected.network, target, batch)
        errors = (targets - values).detach().abs()
        for td_error, error, mask in zip(batch["td_error"], errors, batch["validity_mask"][:, BURN_IN:], strict=True):
            wanted = 0.7 * error[mask].max() + 0.3 * error[mask].mean()
            torch.testing.assert_close(td_error, wanted.expand(BURN_IN + LENGTH))
        assert replay.sampler.stats()["never_updated"] < 1


# --- the environment


def test_the_environment_shows_positions_alone():
    full, shown = gymnasium.make("CartPole-v1"), gymnasium.make("recipes.envs:CartPolePositions-v0")
    assert isinstance(shown.unwrapped, type(full.unwrapped))
    pairs = [(full.reset(seed=3)[0], shown.reset(seed=3)[0])]
    over = False
    while not over:
        steps = full.step(1), shown.step(1)
        pairs.append((steps[0][0], steps[1][0]))
        assert steps[0][1:4] == steps[1][1:4]
        over = steps[0][2]
    for whole, seen in pairs:
        np.testing.assert_allclose(seen, [whole[0] / 2.4, whole[2] / (12 * np.pi / 180)], rtol=1e-6)
        assert shown.observation_space.contains(seen)


# --- resumed runs


def test_windows_end_where_a_resumed_run_begins_new_episodes():
    collected = Collected(steps=60)
    replay = collected.replay(batch_size=400)
    r2d2.end_newest_steps(replay)
    replay.extend(collected.data[:20])
    newest = replay[59]
    assert newest["next", "done"].all()
    assert torch.equal(newest["next", "terminated"], collected.data[59]["next", "terminated"])
    windows = replay.sample().reshape(-1, BURN_IN + LENGTH)
    rows = windows["index"][..., 0]
    assert {*rows.flatten().tolist()} == {*range(80)}
    assert not ((rows < 60).any(1) & (rows >= 60).any(1)).any()
