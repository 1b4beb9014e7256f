"""Parts of the replay buffers of the recipes: storages, samplers and writers, from the configuration."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.data.replay_buffers.samplers import RandomSampler, Sampler
from torchrl.objectives import LossModule

import torchrl_replay_ext as ext
from recipes.common.collector import TERMINATED
from recipes.common.config import DECOUPLED, EVENT_TABLES, EventConfig, LearningConfig, RunConfig, ends
from recipes.common.errors import ConfigError, did_you_mean

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
WITH_STATS = tuple({*SAMPLERS.values(), ext.TrajectoryRetraceSampler} - {RandomSampler, ext.RecencySampler})

# Entry in which a collector stores the event flags from the `info` of an environment.
FLAGS = ("next", "events")


def set_targets(loss_module: LossModule, learning: LearningConfig) -> None:
    """Set γ of a loss on its device, and the key that n-step transitions need: whether the last step terminated."""
    if learning.n_step > 1:
        loss_module.set_keys(terminated=TERMINATED)
    loss_module.make_value_estimator(gamma=learning.gamma, device=next(loss_module.parameters()).device)


def make_storage(config: RunConfig, device: torch.device) -> ext.CompilableTensorStorage | ext.FrameStackStorage:
    """The storage of a run: each transition whole, or with each frame of a game once."""
    learning = config.learning
    if config.env.atari is None:
        return ext.CompilableTensorStorage(learning.buffer_size, device=device)
    size, episodes = learning.buffer_size, ext.Episodes(num_streams=max(64, 2 * config.num_envs))
    # event tables keep single histories, which end with a whole stack
    further = config.env.atari.num_frames + learning.n_step - 1
    share = sum(event.largest_eta * further / event.history for event in config.env.events.values())
    frames = int(size * (9 / 8 + share)) + 4096 if share else None
    return ext.FrameStackStorage(size, frame_capacity=frames, n_step=learning.n_step, episodes=episodes, device=device)


def make_writer(sampler: Sampler) -> ext.EventTableWriter | None:
    """The writer that a sampler needs: event tables have their own; None: the buffer's default."""
    return ext.EventTableWriter(sampler.tables) if isinstance(sampler, ext.EventTableSampler) else None


def decouple(
    config: RunConfig, critic_sampler: Sampler, policy: TensorDictModuleBase, noise_scale: float = 1.0
) -> Sampler:
    """The sampler of a buffer whose actor may learn from batches of its own (sampler=dper), see actor_batches.

    Args:
        config: the run's configuration.
        critic_sampler: draws the batches of the critics; returned unless the configured sampler is in DECOUPLED.
        policy: the actor.
        noise_scale: standard deviation of the exploration noise. Default: 1.

    Raises:
        ConfigError: if the sampler rejects an option.
    """
    options = {key: value for key, value in config.sampler.items() if key not in ("name", "critic")}
    if config.sampler["name"] not in DECOUPLED:
        return critic_sampler
    with refusals(config.sampler["name"]):
        return ext.DecoupledSampler(critic_sampler, policy, noise_scale=noise_scale, **options)


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
    config: RunConfig, *, td_error: str, capacity: int | None = None, num_streams: int | None = None
) -> Any:
    """Build the configured sampler; for sampler=dper, that of the critics.

    A value `{start, end}` is annealed linearly over all updates of the run. Event tables are those of the environment's
    events. The share of the batch that its events do not use is drawn from the default table.

    Args:
        config: the run's configuration. All keys of `sampler` except `name` and `retention` are keyword arguments of
            the sampler.
        td_error: the kind of TD errors that the loss writes to "td_error": "squared" or "absolute".
        capacity: number of slots of the buffer. Default: None, the configured one.
        num_streams: number of environments whose transitions are interleaved. Default: None, `num_envs`.

    Raises:
        ConfigError: if a keyword is unknown, or the tables or the sampler reject a value.
    """
    settings, updates = config.sampler, config.learning.num_updates()
    settings = settings["critic"] if settings["name"] in DECOUPLED else settings
    size, streams = capacity or config.learning.buffer_size, num_streams or config.num_envs
    sampler: Any = SAMPLERS[settings["name"]]
    with refusals(settings["name"]):
        priority, keywords = settings.get("priority"), _keywords(settings, updates)
        if sampler is not ext.EventTableSampler:
            known = {"capacity": size, "td_error": td_error, "episodes": ext.Episodes(num_streams=streams)}
            taken = inspect.signature(sampler).parameters
            return sampler(**{key: value for key, value in known.items() if key in taken}, **keywords)
        events = config.env.events
        tables = make_tables(events, size, keywords.pop("retention", "pinned"))
        if priority is not None:
            if not isinstance(priority, dict):
                raise TypeError(f"priority={priority}: must be a group, for example {{kind: {priority}}}")
            keywords["priority"] = {"td_error": td_error, **_keywords(priority, updates)}
        shares = {event_name: ends("eta", event.eta) for event_name, event in events.items()}
        shares = {"default": tuple(max(0.0, 1 - sum(part)) for part in zip(*shares.values(), strict=True)), **shares}
        eta = {table: a if a == b else ext.Anneal(a, b, updates) for table, (a, b) in shares.items()}
        return sampler(tables, eta=eta, **keywords)


def _keywords(config: dict[str, Any], num_updates: int) -> dict[str, Any]:
    """The keyword arguments in `config`, without `name` and `priority`; {start, end} becomes a schedule."""
    return {
        key: ext.Anneal(*ends(f"sampler.{key}", value), num_updates) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("name", "priority")
    }
