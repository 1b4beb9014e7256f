"""Several environments side by side give what each of them gives alone."""

import gymnasium
import numpy as np
import pytest
import torch

from recipes.collect import VectorCollector


class Countdown(gymnasium.Env):
    """Observes how many steps are left of `length`; the last one terminates if the length is even, else truncates."""

    observation_space = gymnasium.spaces.Box(-1.0, 100.0, (1,))
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = self.length
        return np.array([self.left], dtype=np.float32), {}

    def step(self, action):
        self.left -= 1
        ended = self.left == 0
        even = self.length % 2 == 0
        observation = np.array([self.left], dtype=np.float32)
        return observation, float(action), ended and even, ended and not even, {}


def collector(lengths=(2, 3, 5), frames=6, **keywords):
    envs = [lambda length=length: Countdown(length) for length in lengths]
    policy = keywords.pop("policy", lambda observations: np.full(len(observations), 2))
    return VectorCollector(envs, policy, frames_per_batch=frames, seed=0, **keywords)


def test_transitions_are_whole_and_episodes_apart():
    source = collector()
    source.epsilon = 0.0
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


def test_epsilon_one_never_asks_the_policy():
    def policy(observations):
        raise AssertionError("asked")

    actions = torch.cat([collector(policy=policy).collect()["action"] for _ in range(3)])
    assert set(actions.tolist()) <= {0, 1, 2}


def test_a_restored_collector_goes_on_with_new_trajectories():
    source = collector()
    for _ in range(3):
        source.collect()
    state = source.state_dict()
    twin = collector()
    twin.load_state_dict(state)
    twin.reset()
    source.reset()
    a, b = source.collect(), twin.collect()
    assert torch.equal(a["action"], b["action"])
    assert b["collector", "traj_ids"].min() >= state["next_trajectory"]


def test_batches_must_be_whole_steps():
    with pytest.raises(ValueError, match="multiple of the 3"):
        collector(frames=7)
