"""Replay buffers of other libraries, for the replay cycles.

Each library uses its own arrays for batches and TD errors: NumPy for cpprb and tianshou, JAX for flashbax. flashbax
computes no importance-sampling weights. stable-baselines3 has no prioritized replay.
"""

import os
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from recipes.benchmark.buffers import ALPHA, BETA, FILL_CHUNK, td_errors
from recipes.benchmark.results import peer

Cycle = Callable[[Any], object]


def columns(data: TensorDict) -> dict[str, np.ndarray]:
    """The transitions as NumPy arrays [N, ...]."""
    return {
        "obs": data["observation"].numpy(),
        "act": data["action"].numpy(),
        "next_obs": data["next", "observation"].numpy(),
        "rew": data["next", "reward"].numpy(),
        "done": data["next", "done"].numpy(),
        "terminated": data["next", "terminated"].numpy(),
    }


def cpprb_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of cpprb."""
    cpprb = peer("cpprb")
    shapes = {key: {"shape": value.shape[1:], "dtype": value.dtype} for key, value in columns(data).items()}
    buffer = cpprb.PrioritizedReplayBuffer(len(data), shapes, alpha=ALPHA)
    for chunk in data.split(FILL_CHUNK):
        buffer.add(**columns(chunk))
    for index in torch.arange(len(data)).split(FILL_CHUNK):
        buffer.update_priorities(index.numpy(), td_errors(len(index)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch = buffer.sample(batch_size, beta=BETA)
        buffer.update_priorities(batch["indexes"], td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def tianshou_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of tianshou."""
    tianshou = peer("tianshou.data")
    arrays = columns(data)
    filled = tianshou.ReplayBuffer.from_data(
        obs=arrays["obs"],
        act=arrays["act"],
        rew=arrays["rew"][:, 0],
        terminated=arrays["terminated"][:, 0],
        truncated=np.zeros(len(data), dtype=bool),
        done=arrays["done"][:, 0],
        obs_next=arrays["next_obs"],
    )
    buffer = tianshou.PrioritizedReplayBuffer(len(data), alpha=ALPHA, beta=BETA)
    buffer.update(filled)
    buffer.update_weight(np.arange(len(data)), td_errors(len(data)).numpy())

    def cycle(batch_size: int, td_error: np.ndarray) -> object:
        batch, index = buffer.sample(batch_size)
        buffer.update_weight(index, td_error)
        return batch

    return lambda batch_size: lambda td_error: cycle(batch_size, td_error)


def flashbax_per(data: TensorDict) -> Callable[[int], Cycle]:
    """PER of flashbax, compiled by JAX with donated state."""
    # JAX reads these when it is imported: one thread, on the CPU.
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "1",
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    }
    jax, flashbax = peer("jax"), peer("flashbax")

    def make(batch_size: int) -> Any:
        return flashbax.make_prioritised_flat_buffer(
            max_length=len(data),
            min_length=1,
            sample_batch_size=batch_size,
            add_sequences=True,
            priority_exponent=ALPHA,
        )

    buffer = make(1)
    # flashbax samples pairs of successive steps, so the next observation is not stored.
    arrays = {key: value for key, value in columns(data).items() if key != "next_obs"}
    state = buffer.init({key: value[0] for key, value in arrays.items()})
    add = jax.jit(buffer.add, donate_argnums=0)
    set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
    for start in range(0, len(data), FILL_CHUNK):
        state = add(state, {key: value[start : start + FILL_CHUNK] for key, value in arrays.items()})
    # The newest step has no successor; its priority stays 0.
    for index in torch.arange(len(data) - 1, dtype=torch.int32).split(FILL_CHUNK):
        state = set_priorities(state, index.numpy(), td_errors(len(index)).numpy())
    key = jax.random.key(0)

    def cycle_of(batch_size: int) -> Cycle:
        sized = make(batch_size)

        @jax.jit
        def sample(state: Any, key: Any) -> Any:
            key, draw = jax.random.split(key)
            return sized.sample(state, draw), key

        # Two graphs: in a single graph, XLA would copy the whole tree twice per cycle.
        def cycle(td_error: Any) -> object:
            nonlocal state, key
            batch, key = sample(state, key)
            state = set_priorities(state, batch.indices, td_error)
            return jax.block_until_ready((state, batch))[1]

        return cycle

    return cycle_of


def to_jax(td_error: Tensor) -> Any:
    """TD errors as a JAX array."""
    return peer("jax.numpy").asarray(td_error.numpy())


def stable_baselines3_uniform(data: TensorDict) -> Callable[[int], Cycle]:
    """Uniform replay of stable-baselines3, which has no prioritized replay."""
    buffers = peer("stable_baselines3.common.buffers")
    arrays = columns(data)
    box = gymnasium.spaces.Box
    buffer = buffers.ReplayBuffer(len(data), box(-np.inf, np.inf, (4,)), box(-1.0, 1.0, (1,)), device="cpu")
    buffer.observations[:] = arrays["obs"][:, None]
    buffer.next_observations[:] = arrays["next_obs"][:, None]
    buffer.actions[:] = arrays["act"][:, None]
    buffer.rewards[:] = arrays["rew"]
    buffer.dones[:] = arrays["done"]
    buffer.full = True
    return lambda batch_size: lambda td_error: buffer.sample(batch_size)


# Name -> a function that fills a buffer with transitions and returns a function from the batch size to the cycle, and a
# function that converts TD errors [B] to the type that the cycle takes.
PEERS: dict[str, tuple[Callable[[TensorDict], Callable[[int], Cycle]], Callable[[Tensor], Any]]] = {
    "cpprb PER": (cpprb_per, Tensor.numpy),
    "tianshou PER": (tianshou_per, Tensor.numpy),
    "flashbax PER": (flashbax_per, to_jax),
    "stable-baselines3 uniform": (stable_baselines3_uniform, lambda td_error: td_error),
}
