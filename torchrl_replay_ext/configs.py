"""Our samplers, writer and buffer as choices of TorchRL's trainers, which are configured by Hydra.

They join the groups of ``torchrl.trainers.algorithms.configs``: ``sampler`` (proportional, per, rank, reaper,
event_table, trajectory_retrace), ``writer`` (event_table, compilable), ``storage`` (compilable_tensor) and
``replay_buffer`` (compilable). An installed package registers them by itself (``hydra_plugins``) wherever that module
was imported, so that a training script needs no change::

    python train.py --config-name replay_dqn sampler@replay_buffer.sampler=reaper replay_buffer.sampler.omega=0.4

``replay_dqn`` and ``replay_sac`` configure TorchRL's DQN and SAC trainers (:mod:`torchrl_replay_ext.conf`). The
``config.yaml`` of TorchRL's own examples cannot be used: its ``replay_buffer: sampler:`` without a value erases
whatever was chosen, and its buffer, ``replay_buffer=base``, takes no priorities.

Arguments are those of the classes. Where a schedule is possible, ``{start: 0.4, end: 1.0, num_updates: 10000}`` is one.
By default ``capacity`` is the storage's, the tables of an event-table sampler are those of its writer, and ``td_error``
is what the trainer's loss writes.

There is no entry for :class:`~torchrl_replay_ext.DecoupledSampler`: the trainers draw one batch for actor and critic
alike, and build a policy anew wherever it is named, so that the sampler's would never be trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from torchrl.trainers.algorithms.configs.data import (
    SamplerConfig,
    StorageConfig,
    TensorDictReplayBufferConfig,
    WriterConfig,
)

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.core.event_spec import EventSpec, Threshold
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.samplers import (
    EventTableSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.writers import EventTableWriter

PROVIDER = "torchrl_replay_ext"

# What TorchRL's losses write to "td_error", by the name of the function or class that a trainer's configuration names.
_TD_ERRORS = {
    "_make_dqn_loss": "squared",
    "DQNLoss": "squared",
    "_make_qmixer_loss": "squared",
    "QMixerLoss": "squared",
    "_make_ddpg_loss": "squared",
    "DDPGLoss": "squared",
    "_make_td3_loss": "squared",
    "TD3Loss": "squared",
    "_make_iql_loss": "squared",
    "IQLLoss": "squared",
    "_make_cql_loss": "squared",
    "CQLLoss": "squared",
    "_make_sac_loss": "absolute",
    "SACLoss": "absolute",
    "DiscreteSACLoss": "absolute",
}


# --- what a sampler's configuration takes from its surroundings


def _of_buffer(path: str, _parent_: Any) -> Any:
    """The entry ``path`` of the replay buffer around a node, however deep the node is in it; None if there is none."""
    node = _parent_
    while node is not None and not (isinstance(node, DictConfig) and "storage" in node):
        node = node._get_parent()
    return None if node is None else OmegaConf.select(node, path)


def _of_loss(_root_: Any) -> str | None:
    """What the trainer's loss writes to "td_error"; None if that is not known."""
    for path in ("trainer.loss_module._target_", "loss._target_"):
        target = OmegaConf.select(_root_, path)
        if target is not None:
            return _TD_ERRORS.get(str(target).rsplit(".", 1)[-1])
    return None


OmegaConf.register_new_resolver("of_buffer", _of_buffer, replace=True)
OmegaConf.register_new_resolver("td_error_of_loss", _of_loss, replace=True)

_CAPACITY = "${of_buffer:storage.max_size}"
_TD_ERROR = "${td_error_of_loss:}"


# --- from plain values to objects


def _key(value: Any) -> Any:
    """A NestedKey; YAML has lists in the place of tuples."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _number(owner: str, name: str, value: Any) -> Any:
    """A number, or a schedule."""
    if isinstance(value, Anneal):
        return value
    if isinstance(value, Mapping):
        if set(value) != {"start", "end", "num_updates"}:
            raise ValueError(
                f"{owner}({name}={dict(value)}): a schedule has the entries start, end and num_updates, no others."
            )
        return Anneal(**value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{owner}({name}={value!r}): must be a number, or a schedule {{start: , end: , num_updates: }}."
        )
    return value


_SCHEDULED = ("alpha", "beta", "omega")


def _arguments(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a sampler's constructor takes."""
    arguments = {}
    for name, value in values.items():
        if name in _SCHEDULED:
            value = _number(owner, name, value)
        elif name.endswith("_key"):
            value = _key(value)
        elif name.endswith("_keys"):
            if isinstance(value, str):
                raise ValueError(f"{owner}({name}={value!r}): must be a list of keys.")
            value = tuple(_key(key) for key in value)
        elif name == "capacity" and value is None:
            raise ValueError(f"{owner}: no storage with max_size around it tells its capacity; set capacity.")
        elif name == "td_error" and value is None:
            raise ValueError(
                f"{owner}: what the trainer's loss writes to 'td_error' is not known; set td_error to 'squared' or "
                "'absolute'."
            )
        arguments[name] = value
    return arguments


def _maker(sampler: type) -> Callable[..., Any]:
    def make(**values: Any) -> Any:
        return sampler(**_arguments(sampler.__name__, values))

    make.__doc__ = f"A :class:`~torchrl_replay_ext.{sampler.__name__}` from plain values."
    return make


make_proportional = _maker(ProportionalSampler)
make_rank = _maker(RankBasedSampler)
make_reaper = _maker(ReaPERSampler)
make_trajectory_retrace = _maker(TrajectoryRetraceSampler)


def _mapping(owner: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{owner}({name}={value!r}): must be a mapping, with an entry for each name.")
    return value


def make_tables(owner: str, events: Any, capacity: Any, retention: Any) -> EventTables:
    """Event tables from plain values.

    Args:
        owner: for messages.
        events: by name, the arguments of :class:`~torchrl_replay_ext.EventSpec`: ``condition`` is a key (a list if it
            is nested), a threshold ``{key: , op: , value: }``, or a function, as
            ``{_target_: hydra.utils.get_method, path: package.module.function}``; ``history``; and if need be
            ``table`` and ``context``.
        capacity: of each table.
        retention: ``"ring"`` or ``"pinned"``.

    Raises:
        ValueError: if a value is missing, unknown or out of range; it names the event.
    """
    known = {spec_field.name for spec_field in fields(EventSpec)} - {"name"}
    specs = []
    for name, values in _mapping(owner, "events", events).items():
        given = set(_mapping(owner, f"events.{name}", values))
        missing, unknown = {"condition", "history"} - given, given - known
        if missing or unknown:
            raise ValueError(
                f"{owner}(events.{name}): missing {sorted(missing)}, unknown {sorted(unknown)}; an event has the "
                "entries condition, history, table and context."
            )
        specs.append(EventSpec(name, **{**values, "condition": _condition(owner, name, values["condition"])}))
    return EventTables(specs, dict(_mapping(owner, "capacity", capacity)), retention=retention)


def _condition(owner: str, name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _key(value)
    if set(value) != {"key", "op", "value"}:
        raise ValueError(
            f"{owner}(events.{name}.condition={dict(value)}): a threshold has the entries key, op and value, no others."
        )
    return Threshold(_key(value["key"]), value["op"], value["value"])


def make_event_table_writer(events: Any, capacity: Any, retention: str, **values: Any) -> EventTableWriter:
    """An :class:`~torchrl_replay_ext.EventTableWriter` from plain values, see :func:`make_tables`."""
    owner = "EventTableWriter"
    return EventTableWriter(make_tables(owner, events, capacity, retention), **_arguments(owner, values))


def make_event_table_sampler(
    events: Any, capacity: Any, retention: Any, eta: Any, priority: Any, td_error: str | None, **values: Any
) -> EventTableSampler:
    """An :class:`~torchrl_replay_ext.EventTableSampler` from plain values.

    Its tables are equal to those of the writer, which take their place when both meet in a buffer.
    """
    owner = "EventTableSampler"
    if events is None:
        raise ValueError(
            f"{owner}: the buffer's writer has no events; choose writer@replay_buffer.writer=event_table and set "
            "replay_buffer.writer.events and .capacity."
        )
    if priority is not None:
        priority = _arguments(owner, {"td_error": td_error, **_mapping(owner, "priority", priority)})
    return EventTableSampler(
        make_tables(owner, events, capacity, retention),
        eta={name: _number(owner, f"eta.{name}", value) for name, value in _mapping(owner, "eta", eta).items()},
        priority=priority,
        **_arguments(owner, values),
    )


# --- the groups


@dataclass
class _PriorityConfig(SamplerConfig):
    _convert_: str = "all"
    capacity: Any = _CAPACITY
    td_error: Any = _TD_ERROR


@dataclass
class ProportionalSamplerConfig(_PriorityConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.ProportionalSampler`."""

    _target_: str = "torchrl_replay_ext.configs.make_proportional"
    alpha: Any = 0.6
    beta: Any = 0.4
    eps: float = 1e-6
    stratified: bool = False
    weight_norm: str = "buffer"
    max_priority_within_buffer: bool = False


@dataclass
class RankBasedSamplerConfig(_PriorityConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.RankBasedSampler`."""

    _target_: str = "torchrl_replay_ext.configs.make_rank"
    alpha: Any = 0.7
    beta: Any = 0.5
    stratified: bool = True
    segments: str = "exact"
    stale_fraction: float = 0.05
    weight_norm: str = "buffer"


@dataclass
class ReaPERSamplerConfig(_PriorityConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.ReaPERSampler`."""

    _target_: str = "torchrl_replay_ext.configs.make_reaper"
    alpha: Any = 0.4
    omega: Any = 0.2
    beta: Any = 0.4
    eps: float = 1e-6
    num_streams: int = 1
    truncated: str = "finished"
    done_key: Any = ("next", "done")
    terminated_key: Any = ("next", "terminated")
    traj_key: Any = ("collector", "traj_ids")
    init_key: Any = "is_init"
    weight_norm: str = "batch"
    max_priority_within_buffer: bool = False


@dataclass
class TrajectoryRetraceSamplerConfig(SamplerConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`.

    ``anchors`` may be chosen too: ``+sampler@replay_buffer.sampler.anchors=reaper``.
    """

    _target_: str = "torchrl_replay_ext.configs.make_trajectory_retrace"
    _convert_: str = "all"
    capacity: Any = _CAPACITY
    slice_len: int = MISSING
    num_streams: int = 1
    done_key: Any = ("next", "done")
    traj_key: Any = ("collector", "traj_ids")
    behaviour_keys: Any = ("logits",)
    pad: bool = True
    anchors: Any = "uniform"
    init_key: Any = "is_init"


@dataclass
class EventTableSamplerConfig(SamplerConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.EventTableSampler`; its tables are those of the writer."""

    _target_: str = "torchrl_replay_ext.configs.make_event_table_sampler"
    _convert_: str = "all"
    events: Any = "${of_buffer:writer.events}"
    capacity: Any = "${of_buffer:writer.capacity}"
    retention: Any = "${of_buffer:writer.retention}"
    eta: Any = None
    min_size: Any = None
    allocation: str = "systematic"
    correction: str | None = None
    beta: Any = 1.0
    priority: Any = None
    td_error: Any = _TD_ERROR
    pair_keys: Any = ("observation", "action")


@dataclass
class EventTableWriterConfig(WriterConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.EventTableWriter`, see :func:`make_tables`."""

    _target_: str = "torchrl_replay_ext.configs.make_event_table_writer"
    _convert_: str = "all"
    events: Any = None
    capacity: Any = None
    retention: str = "ring"
    stream_key: Any = ("collector", "traj_ids")
    done_key: Any = ("next", "done")
    init_key: Any = "is_init"


@dataclass
class CompilableWriterConfig(WriterConfig):
    """Hydra configuration for the default writer of :class:`~torchrl_replay_ext.CompilableReplayBuffer`."""

    _target_: str = "torchrl_replay_ext.buffers.compilable.CompilableWriter"


@dataclass
class CompilableTensorStorageConfig(StorageConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.CompilableTensorStorage`."""

    _target_: str = "torchrl_replay_ext.CompilableTensorStorage"
    max_size: int = MISSING
    device: Any = "cpu"
    ndim: int = 1
    consolidated: bool = False


@dataclass
class CompilableReplayBufferConfig(TensorDictReplayBufferConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.CompilableReplayBuffer`."""

    _target_: str = "torchrl_replay_ext.CompilableReplayBuffer"


_ENTRIES = {
    "sampler": {
        "proportional": ProportionalSamplerConfig,
        "per": ProportionalSamplerConfig,
        "rank": RankBasedSamplerConfig,
        "reaper": ReaPERSamplerConfig,
        "event_table": EventTableSamplerConfig,
        "trajectory_retrace": TrajectoryRetraceSamplerConfig,
    },
    "writer": {"event_table": EventTableWriterConfig, "compilable": CompilableWriterConfig},
    "storage": {"compilable_tensor": CompilableTensorStorageConfig},
    "replay_buffer": {"compilable": CompilableReplayBufferConfig},
}


def register() -> None:
    """Add the entries to Hydra's ConfigStore; happens when this module is imported."""
    store = ConfigStore.instance()
    for group, entries in _ENTRIES.items():
        for name, node in entries.items():
            store.store(group=group, name=name, node=node, provider=PROVIDER)


register()
