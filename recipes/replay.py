"""Replay buffers of the recipes: what they hold, and how it is sampled."""

from typing import Any

import torch
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler

from recipes.config import RunConfig
from recipes.run import ConfigError
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
)

PRIORITIZED = (ProportionalSampler, RankBasedSampler, ReaPERSampler)

# What the losses and the samplers read. `truncated` ends an episode, but only `terminated` cuts the bootstrap.
STORED_KEYS = (
    "observation",
    "action",
    ("collector", "traj_ids"),
    ("next", "observation"),
    ("next", "reward"),
    ("next", "done"),
    ("next", "terminated"),
    ("next", "truncated"),
)


def make_replay(config: RunConfig, device: torch.device, *, td_error: str) -> CompilableReplayBuffer:
    """Builds the buffer of a run, with the sampler that was chosen.

    Args:
        config: the run's configuration.
        device: where the data lives.
        td_error: what the recipe's loss writes to the entry "td_error": "squared" or "absolute" TD errors.

    Raises:
        ConfigError: as make_sampler.
    """
    learning = config.learning
    return CompilableReplayBuffer(
        storage=CompilableTensorStorage(learning.buffer_size, device=device),
        sampler=make_sampler(config.sampler, learning.buffer_size, learning.num_updates(), config.num_envs, td_error),
        batch_size=learning.batch_size,
        priority_key="td_error",
    )


def make_sampler(
    config: dict[str, Any], capacity: int, num_updates: int, num_envs: int = 1, td_error: str = "squared"
) -> Sampler:
    """Builds the sampler that `config["name"]` names.

    Args:
        config: the sampler group; beyond `name`, its keys are the sampler's keywords. A `{start, end}` value is
            annealed linearly over all updates of the run.
        capacity: slots of the buffer.
        num_updates: updates of the run.
        num_envs: environments whose transitions are written in turn.
        td_error: what the prioritized samplers are handed: "squared" or "absolute" TD errors.

    Raises:
        ConfigError: unknown name or keyword, or a value the sampler refuses.
    """
    keywords: dict[str, Any] = {
        key: Anneal(**value, num_updates=num_updates) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }
    prioritized = {"td_error": td_error, **keywords}
    try:
        if config["name"] == "uniform":
            return RandomSampler(**keywords)
        if config["name"] == "per":
            return ProportionalSampler(capacity, **prioritized)
        if config["name"] == "rank":
            return RankBasedSampler(capacity, **prioritized)
        if config["name"] == "reaper":
            return ReaPERSampler(capacity, **{"num_streams": num_envs, **prioritized})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler={config['name']}: {error}") from error
    raise ConfigError(f"sampler.name={config['name']}: choose uniform, per, rank, reaper")


def end_last_episodes(replay: TensorDictReplayBuffer, num_envs: int = 1) -> None:
    """Marks each environment's newest transition as truncated where its episode goes on: a resumed run begins new ones.

    What is stored cannot be changed behind the sampler's back, so it is the newest transition once more that ends it.
    """
    newest = (replay.write_count - num_envs + torch.arange(num_envs)) % replay.storage.max_size
    transitions = replay[newest].select(*STORED_KEYS).clone()
    transitions = transitions[~transitions["next", "done"].squeeze(1)]
    if len(transitions):
        transitions["next", "truncated"] = torch.ones_like(transitions["next", "truncated"])
        transitions["next", "done"] = torch.ones_like(transitions["next", "done"])
        replay.extend(transitions)
