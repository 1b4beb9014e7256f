"""Several environments side by side give what each of them gives alone."""

import gymnasium
import numpy as np
import torch

from recipes.common.collector import EpsilonRandom, VectorCollector
from tests.recipes.countdown import Countdown


def always_2(observations):
    return np.full(len(observations), 2)


def collector(lengths=(2, 3, 5), frames=6, policy=always_2, epsilon=1.0):
    envs = [lambda length=length: Countdown(length) for length in lengths]
    behaviour = EpsilonRandom(policy, Countdown.action_space, seed=0)
    behaviour.epsilon = epsilon
    return VectorCollector(envs, behaviour, frames_per_batch=frames, seed=0)


def test_transitions_are_whole_and_episodes_apart():
    source = collector(epsilon=0.0)
    data = torch.cat([source.collect() for _ in range(10)])
    assert (data["action"] == 2).all() and (data["next", "reward"] == 2.0).all()
    assert torch.equal(data["next", "observation"], data["observation"] - 1)
    ended = data["next", "observation"].squeeze(1) == 0
    assert torch.equal(data["next", "done"].squeeze(1), ended)
    both = data["next", "terminated"] | data["next", "truncated"]
    assert torch.equal(both, data["next", "done"])
    assert not (data["next", "terminated"] & data["next", "truncated"]).any()
    ids = data["collector", "traj_ids"]
    for number, length in enumerate((2, 3, 5)):
        lane = ids[number::3]
        assert lane.tolist() == sorted(lane.tolist())
        counts = lane.unique_consecutive(return_counts=True)[1].tolist()
        assert set(counts[:-1]) == {length}
        end = data["next", "terminated"].squeeze(1)[number::3]
        assert end.any() == (length % 2 == 0)


def test_continuous_actions_are_mixed_by_environment():
    space = gymnasium.spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32))
    behaviour = EpsilonRandom(lambda observations: np.full((len(observations), 2), 9.0, np.float32), space, seed=0)
    observations = np.zeros((4000, 3))
    actions = behaviour(observations)
    assert actions.shape == (4000, 2) and actions.dtype == np.float32
    np.testing.assert_allclose(actions.min(0), [-1.0, 0.0], atol=0.01)
    np.testing.assert_allclose(actions.max(0), [1.0, 5.0], atol=0.01)
    behaviour.epsilon = 0.5
    chosen = behaviour(observations) == 9.0
    assert (chosen[:, 0] == chosen[:, 1]).all() and abs(chosen.mean() - 0.5) < 0.04
    behaviour.epsilon = 0.0
    assert (behaviour(observations) == 9.0).all()


def test_a_restored_collector_begins_new_episodes():
    source, twin = collector(), collector()
    before = torch.cat([source.collect() for _ in range(3)])["collector", "traj_ids"]
    twin.load_state_dict(source.state_dict())
    assert twin.returns == source.returns
    data = twin.collect()
    assert data["observation"][:3].flatten().tolist() == [2, 3, 5]
    assert int(data["collector", "traj_ids"].min()) > int(before.max())


def test_environments_of_neighbouring_seeds_begin_differently():
    def starts(seed, resumes=0):
        envs = [lambda: gymnasium.make("CartPole-v1")] * 4
        behaviour = EpsilonRandom(always_2, gymnasium.spaces.Discrete(2), seed=0)
        source = VectorCollector(envs, behaviour, frames_per_batch=4, seed=seed)
        for _ in range(resumes):
            source.load_state_dict(source.state_dict())
        return {tuple(row) for row in source.collect()["observation"].tolist()}

    first = starts(0)
    assert first == starts(0) and len(first) == 4
    assert not first & starts(1) and not first & starts(0, 1) and not starts(0, 1) & starts(0, 2)
