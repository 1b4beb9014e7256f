"""Random experience with stacked frames."""

import random
from collections import deque

import numpy as np
import torch
from tensordict import TensorDict

SHAPE = (3, 2)


class StackedStreams:
    """Environments that are stepped in any order, each with the last frames of its episode as observation.

    Args:
        num_envs: number of environments.
        depth: frames of an observation.
        padding: of an episode's first frames, "reset" (the first again) or "zero".
        end: probability that an episode ends with a step.
        lost: probability that an environment is reset in the middle of an episode, without a mark.
        still: probability that a frame is that of before, or zeros.
    """

    def __init__(self, num_envs, *, depth=4, padding="reset", end=0.15, lost=0.0, still=0.1, seed=0, shape=SHAPE):
        self.rng, self.random = random.Random(seed), np.random.default_rng(seed)
        self.depth, self.padding, self.end, self.lost, self.still = depth, padding, end, lost, still
        self.shape, self.num_trajectories = shape, 0
        self.stack = [deque(maxlen=depth) for _ in range(num_envs)]
        self.trajectory = [0] * num_envs
        for env in range(num_envs):
            self.reset(env)

    def frame(self, before=None):
        if self.rng.random() < self.still:
            return np.zeros(self.shape, np.uint8) if before is None or self.rng.random() < 0.5 else before
        return self.random.integers(0, 256, self.shape, dtype=np.uint8)

    def reset(self, env):
        first = self.frame()
        blank = first if self.padding == "reset" else np.zeros(self.shape, np.uint8)
        self.stack[env].extend([blank] * (self.depth - 1) + [first])
        self.trajectory[env] = self.num_trajectories
        self.num_trajectories += 1

    def step(self, env):
        if self.rng.random() < self.lost:
            self.reset(env)
        before, trajectory = np.stack(self.stack[env]), self.trajectory[env]
        self.stack[env].append(self.frame(self.stack[env][-1]))
        after, done = np.stack(self.stack[env]), self.rng.random() < self.end
        if done:
            self.reset(env)
        return before, after, trajectory, done

    def rollout(self, envs, with_ids=True):
        """One step of each of ``envs``, in this order."""
        before, after, trajectory, done = (
            torch.from_numpy(np.stack(column)) for column in zip(*(self.step(env) for env in envs), strict=True)
        )
        done = done.unsqueeze(1)
        data = TensorDict(
            observation=before,
            action=torch.from_numpy(self.random.integers(0, 3, len(envs))),
            logits=torch.from_numpy(self.random.normal(size=(len(envs), 3)).astype(np.float32)),
            next={
                "observation": after,
                "reward": torch.from_numpy(self.random.normal(size=(len(envs), 1)).astype(np.float32)),
                "done": done,
                "terminated": done,
                "truncated": torch.zeros_like(done),
            },
            batch_size=[len(envs)],
            device="cpu",
        )
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
