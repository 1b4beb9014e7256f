"""Replay buffers of other libraries, for the replay cycles."""

from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from tensordict import TensorDict

from recipes.benchmark.buffers import ALPHA, BETA, FILL_CHUNK, td_errors

Cycle = Callable[[int, np.ndarray], object]  # a function of the batch size and the TD errors


def columns(data: TensorDict) -> dict[str, np.ndarray]:
    """The transitions as NumPy arrays [N, ...], by the names of stable-baselines3."""
    return {
        "observations": data["observation"].numpy(),
        "actions": data["action"].numpy(),
        "next_observations": data["next", "observation"].numpy(),
        "rewards": data["next", "reward"].numpy(),
        "dones": data["next", "done"].numpy(),
    }


def cpprb_per(data: TensorDict) -> Cycle:
    """PER of cpprb."""
    shapes = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in columns(data).items()}
    buffer = import_module("cpprb").PrioritizedReplayBuffer(len(data), shapes, alpha=ALPHA)
    for chunk in data.split(FILL_CHUNK):
        buffer.add(**columns(chunk))
    for index in torch.arange(len(data)).split(FILL_CHUNK):
        buffer.update_priorities(index.numpy(), td_errors(len(index)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch = buffer.sample(batch_size, beta=BETA)
        buffer.update_priorities(batch["indexes"], td_error)
        return batch

    return cycle


def stable_baselines3_uniform(data: TensorDict) -> Cycle:
    """Uniform replay of stable-baselines3, which has no prioritized replay."""
    library, box = import_module("stable_baselines3.common.buffers"), import_module("gymnasium").spaces.Box
    buffer = library.ReplayBuffer(len(data), box(-np.inf, np.inf, (4,)), box(-1.0, 1.0, (1,)), device="cpu")
    for name, values in columns(data).items():
        target = getattr(buffer, name)
        target[:] = values.reshape(target.shape)
    buffer.full = True
    return lambda batch_size, _td_error: buffer.sample(batch_size)


# Name -> function that fills a buffer with transitions and returns its cycle.
PEERS = {"cpprb PER": cpprb_per, "stable-baselines3 uniform": stable_baselines3_uniform}
