"""Deep Sea: its rules, checked against a simulation in plain Python, and the preset of DQN."""

import itertools

import numpy as np
import pytest
from torch.utils._pytree import tree_leaves

from recipes.envs.deep_sea import DeepSea
from tests.recipes.runs import Recipe, checkpoint, tiny

recipe = Recipe("dqn", ["env=deepsea", *tiny("dqn")])


def play(env, actions):
    """The steps of an episode; every observation but the last one shows one cell."""
    observation, info = env.reset(seed=0)
    assert info == {"treasure": False}
    steps = []
    for action in actions:
        assert observation.sum() == 1
        observation, *rest = env.step(action)
        steps.append((observation, *rest))
    assert not observation.any()
    return steps


def simulated(size, right_actions, actions):
    """Cells (row, column) and rewards of an episode."""
    cells, rewards, column = [], [], 0
    for row, action in enumerate(actions):
        right = action == right_actions[row, column]
        cells.append((row, column))
        found = right and (row, column) == (size - 1, size - 1)
        rewards.append((1.0 if found else 0.0) - (0.01 / size if right else 0.0))
        column = min(column + 1, size - 1) if right else max(column - 1, 0)
    return cells, rewards


@pytest.mark.parametrize("mapping_seed", [0, 5])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_episode_is_that_of_a_plain_simulation(size, mapping_seed):
    env = DeepSea(size, mapping_seed)
    returns = []
    for actions in itertools.product((0, 1), repeat=size):
        steps = play(env, actions)
        cells, rewards = simulated(size, env.right_actions, actions)
        assert [reward for _, reward, *_ in steps] == pytest.approx(rewards)
        assert [terminated for _, _, terminated, *_ in steps] == [False] * (size - 1) + [True]
        assert not any(truncated for _, _, _, truncated, _ in steps)
        assert [info for *_, info in steps] == [{"treasure": reward > 0} for reward in rewards]
        for (observation, *_), (row, column) in zip(steps, cells[1:], strict=False):
            assert np.flatnonzero(observation).tolist() == [row * size + column]
        returns.append(sum(rewards))
    # the treasure is found by one sequence of actions; without it, going left at every step is best
    assert sorted(returns)[-1] == pytest.approx(0.99) and len(returns) == 2**size
    assert sorted(returns)[-2] == 0.0


def test_the_transitions_of_a_seed_are_the_same_for_every_sampler(tmp_path):
    collected = []
    for sampler in ("uniform", "recency"):
        recipe.run(tmp_path / sampler, f"sampler={sampler}", "env.options.size=4", "num_envs=2")
        collected.append(tree_leaves(checkpoint(tmp_path / sampler)["replay"]["_storage"]))
    assert len(collected[0]) > 5
    assert all(map(np.array_equal, *collected))
