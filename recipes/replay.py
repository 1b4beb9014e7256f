"""The `sampler` group: from configuration to sampler."""

from typing import Any

from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler

from recipes.run import ConfigError
from torchrl_replay_ext import Anneal, ProportionalSampler, RankBasedSampler, ReaPERSampler

PRIORITIZED = (ProportionalSampler, RankBasedSampler, ReaPERSampler)


def make_sampler(config: dict[str, Any], capacity: int, num_updates: int, num_envs: int = 1) -> Sampler:
    """Builds the sampler that `config["name"]` names.

    Args:
        config: the sampler group; beyond `name`, its keys are the sampler's keywords. A `{start, end}` value is
            annealed linearly over all updates of the run.
        capacity: slots of the buffer.
        num_updates: updates of the run.
        num_envs: environments whose transitions are written in turn.

    Raises:
        ConfigError: unknown name or keyword, or a value the sampler refuses.
    """
    keywords: dict[str, Any] = {
        key: Anneal(**value, num_updates=num_updates) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }
    try:
        if config["name"] == "uniform":
            return RandomSampler(**keywords)
        if config["name"] == "per":
            return ProportionalSampler(capacity, **keywords)
        if config["name"] == "rank":
            return RankBasedSampler(capacity, **keywords)
        if config["name"] == "reaper":
            return ReaPERSampler(capacity, **{"num_streams": num_envs, **keywords})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler={config['name']}: {error}") from error
    raise ConfigError(f"sampler.name={config['name']}: choose uniform, per, rank, reaper")
