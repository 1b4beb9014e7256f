"""Experience with stacked frames."""

import random
from collections import deque
from typing import Any

import torch
from tensordict import TensorDict


def numbered_stacks(count, *, first=0, dtype=torch.uint8) -> TensorDict:
    """Steps of one episode with stacks of 3 frames [2, 2], on the CPU; each pixel is the number of its frame."""
    frames = torch.arange(first, first + count + 3, dtype=dtype, device="cpu").view(-1, 1, 1).expand(-1, 2, 2)
    stacks = frames.unfold(0, 3, 1).movedim(-1, 1)
    done = torch.zeros(count, 1, dtype=torch.bool, device="cpu")
    following = {"observation": stacks[1:], "done": done, "terminated": done}
    return TensorDict({"observation": stacks[:-1], "next": following}, [count], device="cpu").clone()


class StackedStreams:
    """Environments that are stepped in any order, each with the last frames of its episode as observation.

    Args:
        num_envs: number of environments.
        depth: frames of an observation.
        padding: of an episode's first frames, "reset" (the first again) or "zero".
        end: probability that an episode ends with a step.
        lost: probability that an environment is reset in the middle of an episode, without a mark.
        still: probability that a frame is that of before, or zeros.
        shape: of a frame.
    """

    def __init__(self, num_envs, *, depth=4, padding="reset", end=0.15, lost=0.0, still=0.1, seed=0, shape=(3, 2)):
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.depth, self.padding, self.end, self.lost, self.still = depth, padding, end, lost, still
        self.blank, self.num_trajectories = torch.zeros(shape, dtype=torch.uint8), 0
        self.stack = [deque(maxlen=depth) for _ in range(num_envs)]
        self.trajectory = [0] * num_envs
        for env in range(num_envs):
            self.reset(env)

    def frame(self, before):
        if self.rng.random() < self.still:
            return before if self.rng.random() < 0.5 else self.blank
        return torch.randint(256, self.blank.shape, dtype=torch.uint8, generator=self.generator)

    def reset(self, env):
        first = self.frame(self.blank)
        self.stack[env].extend([first if self.padding == "reset" else self.blank] * (self.depth - 1) + [first])
        self.trajectory[env] = self.num_trajectories
        self.num_trajectories += 1

    def step(self, env):
        if self.rng.random() < self.lost:
            self.reset(env)
        before, trajectory = torch.stack([*self.stack[env]]), self.trajectory[env]
        self.stack[env].append(self.frame(self.stack[env][-1]))
        after, done = torch.stack([*self.stack[env]]), torch.tensor([self.rng.random() < self.end])
        if done:
            self.reset(env)
        return before, after, torch.tensor(trajectory), done

    def rollout(self, envs, with_ids=True) -> Any:
        """One step of each of ``envs``, in this order."""
        before, after, trajectory, done = map(torch.stack, zip(*map(self.step, envs), strict=True))
        flags = {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)}
        reward = torch.randn(len(envs), 1, generator=self.generator)
        data = TensorDict(
            {"observation": before, "next": {"observation": after, "reward": reward, **flags}}, [len(envs)]
        )
        data["action"] = torch.randint(3, (len(envs),), generator=self.generator)
        data["logits"] = torch.randn(len(envs), 3, generator=self.generator)
        if with_ids:
            data["collector", "traj_ids"] = trajectory
        return data

    def chunk(self, layout, length):
        """About ``length`` steps in an order of envs: one after another, a run of each, or any."""
        num = len(self.stack)
        if layout == "interleaved":
            return self.rollout([i % num for i in range(max(length // num, 1) * num)])
        if layout == "env_major":
            return self.rollout([env for env in range(num) for _ in range(max(length // num, 1))])
        return self.rollout([self.rng.randrange(num) for _ in range(length)])
