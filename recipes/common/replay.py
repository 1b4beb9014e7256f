"""Builds the replay buffers of the recipes: storage, sampler and writer."""

import contextlib
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Sequence as Windows
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.objectives import LossModule

import torchrl_replay_ext as ext
from recipes.common.collector import TERMINATED
from recipes.common.config import DECOUPLED, EVENT_TABLES, EnvConfig, EventConfig, LearningConfig, RunConfig, ends
from recipes.common.errors import ConfigError, did_you_mean
from torchrl_replay_ext.core.event_spec import DEFAULT

SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": RandomSampler,
    "per": ext.ProportionalSampler,
    "rank": ext.RankBasedSampler,
    "reaper": ext.ReaPERSampler,
    "recency": ext.RecencySampler,
    "lap": ext.ProportionalSampler,
    **dict.fromkeys(EVENT_TABLES, ext.EventTableSampler),
    **dict.fromkeys(DECOUPLED, ext.DecoupledSampler),
}
PRIORITIZED = tuple({*SAMPLERS.values()} - {RandomSampler, ext.RecencySampler})

# Entry in which a collector stores the event flags from the `info` of an environment.
FLAGS = ("next", "events")


def set_targets(loss_module: LossModule, learning: LearningConfig) -> None:
    """Set γ of a loss on its device, and the key that n-step transitions need: whether the last step terminated."""
    if learning.n_step > 1:
        loss_module.set_keys(terminated=TERMINATED)
    loss_module.make_value_estimator(gamma=learning.gamma, device=next(loss_module.parameters()).device)


def shares_frames(config: RunConfig) -> bool:
    """Whether the buffer stores each frame once. The frames of n-step transitions are not those of the next step."""
    return config.env.atari is not None and config.learning.n_step == 1


def require_memory(config: RunConfig, space: gymnasium.Space, device: torch.device) -> None:
    """Check that the observations of a full buffer, from this space, fit into the memory of the device.

    Raises:
        ConfigError: if they are larger than the total memory of the GPU or the host, where it is known.
    """
    learning, atari = config.learning, config.env.atari
    observation = math.prod(space.shape or ()) * (1 if space.dtype == np.uint8 else 4)  # others are float32
    stored = 2 * observation if atari is None or not shares_frames(config) else observation // atari.num_frames
    size, memory = learning.buffer_size, 2**63
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size * stored > memory:
        text = f"and {device} has {memory / 1e9:,.1f} GB; choose at most {memory // stored}"
        raise ConfigError(f"{learning.prefix}buffer_size={size}: needs at least {size * stored / 1e9:,.0f} GB, {text}")


def make_replay(
    config: RunConfig,
    device: torch.device,
    *,
    td_error: str,
    policy: TensorDictModuleBase | None = None,
    noise_scale: float = 1.0,
    wrap: Callable[[Sampler], Sampler] | None = None,
    windows: Windows | None = None,
) -> ext.CompilableReplayBuffer:
    """Build the buffer of a run, with the configured sampler and the writer that it needs.

    Args:
        config: the run's configuration.
        device: device of the storage.
        td_error: the kind of TD errors that the loss writes to "td_error": "squared" or "absolute".
        policy: the actor. Required by the samplers in DECOUPLED, which draw separate batches for it; see
            actor_batches. Default: None.
        noise_scale: standard deviation of the exploration noise, used by the samplers in DECOUPLED. Default: 1.
        wrap: maps the configured sampler to the buffer's sampler. Default: None, use the configured sampler.
        windows: expands each drawn transition to a window of steps; `batch_size` is then the number of windows. The
            buffer has a column for each environment and is extended with [steps, num_envs] transitions. Default: None,
            single transitions in a flat buffer.

    Raises:
        ConfigError: see make_sampler.
    """
    learning, settings = config.learning, dict(config.sampler)
    critic = settings.pop("critic") if settings["name"] in DECOUPLED else settings
    num_streams = config.num_envs if windows is None else 1
    updates = learning.num_updates()
    # a resumed run restores the environments, except for those that end_last_episodes() gets
    sampler = make_sampler(config.env, critic, learning.buffer_size, updates, num_streams, td_error, "continue")
    writer = None
    if isinstance(sampler, ext.EventTableSampler):
        writer = ext.EventTableWriter(sampler.tables, on_load="continue")
    with refusals(settings["name"]):
        if critic is not settings:
            assert policy is not None
            del settings["name"]
            sampler = ext.DecoupledSampler(sampler, policy, noise_scale=noise_scale, **settings)
        sampler = sampler if wrap is None else wrap(sampler)
    if shares_frames(config):
        streams = max(64, 2 * config.num_envs)
        storage = ext.FrameStackStorage(learning.buffer_size, num_streams=streams, device=device)
    else:
        storage = ext.CompilableTensorStorage(learning.buffer_size, ndim=1 if windows is None else 2, device=device)
    return ext.CompilableReplayBuffer(
        storage=storage,
        sampler=sampler,
        writer=writer,
        batch_size=learning.batch_size,
        priority_key="td_error",
        sample_unit=windows,
        dim_extend=0,
    )


def require_frames(replay: TensorDictReplayBuffer) -> None:
    """Raise RuntimeError if the storage could not store some frames. Compiled writes cannot raise it themselves."""
    if lost := getattr(replay.storage, "lost_frames", 0):
        raise RuntimeError(f"{lost} frames did not fit into the buffer: episodes are shorter than 8 steps on average")
    if mismatched := getattr(replay.storage, "mismatched", 0):
        raise RuntimeError(f"{mismatched} transitions were stored with wrong frames: they are not single steps")


def actor_batches(replay: ext.CompilableReplayBuffer) -> Callable[[], TensorDictBase] | None:
    """A function that draws the actor's batches; None if the actor uses the critic's batches.

    Raises:
        ConfigError: if the sampler cannot draw batches for the actor.
    """
    sampler = replay.sampler
    if not isinstance(sampler, ext.DecoupledSampler):
        return None
    with refusals("dper"):
        return sampler.actor_buffer(replay).sample


@contextlib.contextmanager
def refusals(name: str) -> Iterator[None]:
    """Raise ConfigError if the sampler of this name refuses its arguments, with a similar name for an unknown one."""
    try:
        yield
    except (TypeError, ValueError) as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        hint = did_you_mean(found[1], inspect.signature(SAMPLERS[name]).parameters) if found else ""
        raise ConfigError(f"sampler={name}: {error}{hint}") from error


def land_between_flags(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: both legs touch the ground between the flags, which stand at x = -0.2 and 0.2."""
    observation = data["next", "observation"]
    return (observation[:, 6] > 0) & (observation[:, 7] > 0) & (observation[:, 0].abs() <= 0.2)


def land_near_middle(data: TensorDictBase) -> torch.Tensor:
    """Lunar Lander: the lander is within 0.1 of the middle between the flags; the paper gives no distance."""
    observation = data["next", "observation"]
    return (observation[:, 0].abs() <= 0.1) & (observation[:, 1].abs() <= 0.1)


FUNCTIONS = {function.__name__: function for function in (land_between_flags, land_near_middle)}


def condition(name: str, event: EventConfig) -> Any:
    """The condition of the event in the form that EventSpec takes."""
    if event.above is not None:
        return ext.Threshold(("next", "reward"), ">", event.above)
    if event.quantile is not None:
        return ext.Quantile(("next", "reward"), event.quantile)
    if event.novel is not None:
        return ext.Novel(("next", "observation"), event.novel, event.resolution)
    return (*FLAGS, name) if event.function is None else FUNCTIONS[event.function]


def make_tables(events: dict[str, EventConfig], capacity: int, retention: Any) -> ext.EventTables:
    """Build one table per event, with the event's largest share of the buffer (SSET, Table 1: κ_i = capacity · η_i).

    Args:
        events: events by name.
        capacity: capacity of the buffer, in transitions.
        retention: "ring" or "pinned", see EventTables.
    """
    specs = [ext.EventSpec(name, condition(name, event), event.history) for name, event in events.items()]
    shares = {name: round(capacity * event.largest_eta) for name, event in events.items()}
    if retention == "pinned":
        shares["default"] = capacity - sum(shares.values())
    return ext.EventTables(specs, shares, retention=retention)


def make_sampler(
    env: EnvConfig,
    config: dict[str, Any],
    capacity: int,
    num_updates: int,
    num_envs: int,
    td_error: Any,
    on_load: str = "truncate",
) -> Any:
    """Build the sampler named by `config["name"]`; event tables are those of the environment's events.

    Args:
        env: the environment. The share of the batch that its events do not use is drawn from the default table.
        config: the sampler group. All keys except `name` and `retention` are keyword arguments of the sampler. A value
            `{start, end}` is annealed linearly over all updates of the run.
        capacity: number of slots of the buffer.
        num_updates: number of updates of the run.
        num_envs: number of environments whose transitions are interleaved.
        td_error: the kind of TD errors that prioritized samplers receive: "squared" or "absolute".
        on_load: what becomes of unfinished episodes in a resumed run: "truncate" or "continue".

    Raises:
        ConfigError: if a keyword is unknown, or the tables or the sampler reject a value.
    """
    sampler: Any = SAMPLERS[config["name"]]
    with refusals(config["name"]):
        priority, keywords = config.get("priority"), _keywords(config, num_updates)
        episodes = {"num_streams": num_envs, "on_load": on_load}
        if sampler is not ext.EventTableSampler:
            known = {"capacity": capacity, "td_error": td_error, **episodes}
            taken = inspect.signature(sampler).parameters
            return sampler(**{key: value for key, value in known.items() if key in taken}, **keywords)
        tables = make_tables(env.events, capacity, keywords.pop("retention", "pinned"))
        if priority is not None:
            if not isinstance(priority, dict):
                raise TypeError(f"priority={priority}: must be a group, for example {{kind: {priority}}}")
            episodes = episodes if priority.get("kind") == "reaper" else {}
            keywords["priority"] = {"td_error": td_error, **episodes, **_keywords(priority, num_updates)}
        shares = {event_name: ends("eta", event.eta) for event_name, event in env.events.items()}
        shares = {"default": tuple(max(0.0, 1 - sum(part)) for part in zip(*shares.values(), strict=True)), **shares}
        eta = {table: a if a == b else ext.Anneal(a, b, num_updates) for table, (a, b) in shares.items()}
        return sampler(tables, eta=eta, **keywords)


def _keywords(config: dict[str, Any], num_updates: int) -> dict[str, Any]:
    """The keyword arguments in `config`, without `name` and `priority`; {start, end} becomes a schedule."""
    return {
        key: ext.Anneal(**value, num_updates=num_updates) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("name", "priority")
    }


def stored_slots(buffer: TensorDictReplayBuffer) -> torch.Tensor:
    """The slots of all stored transitions, or with event tables of those in the default table; oldest first."""
    if isinstance(buffer.writer, ext.EventTableWriter):
        return buffer.writer.tables[DEFAULT].index()
    length = len(buffer)
    return (buffer.write_count - length + torch.arange(length)) % buffer.storage.max_size


def end_last_episodes(replay: TensorDictReplayBuffer, num_envs: int, envs: Sequence[int]) -> None:
    """Truncate the episodes of `envs` at their newest transitions: a resumed run starts new episodes.

    Stored transitions must not be changed without the sampler. Therefore copies that are marked as truncated, without
    events, are written. A buffer with a column for each environment can only be extended by whole rows. There, the
    newest transitions of all environments are repeated.
    """
    if replay.storage.ndim == 1:
        rows = replay[stored_slots(replay)[-num_envs:][list(envs)]].exclude("index")
        rows = rows[~rows["next", "done"].squeeze(1)]
    else:
        rows = replay[(replay.write_count - 1) % replay.storage.shape[0]].exclude("index").clone().unsqueeze(0)
    if not rows.numel():
        return
    rows["next", "truncated"] = rows["next", "truncated"] | ~rows["next", "terminated"]
    rows["next", "done"] = torch.ones_like(rows["next", "done"])
    if FLAGS in rows.keys(include_nested=True):
        rows[FLAGS] = rows[FLAGS].apply(torch.zeros_like)
    replay.extend(rows)
