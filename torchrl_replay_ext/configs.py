"""Hydra configurations that add samplers, writers, a storage and a buffer to the choices of TorchRL's trainers.

They extend the groups of ``torchrl.trainers.algorithms.configs``: ``sampler`` (proportional, per, rank, reaper,
event_table, trajectory_retrace), ``writer`` (event_table, compilable), ``storage`` (compilable_tensor) and
``replay_buffer`` (compilable). If the package is installed, Hydra registers them (``hydra_plugins``) in every
application that has imported that module, so a training script needs no change::

    python train.py --config-name replay_dqn sampler@replay_buffer.sampler=reaper replay_buffer.sampler.omega=0.4

``replay_dqn`` and ``replay_sac`` configure TorchRL's DQN and SAC trainers (:mod:`torchrl_replay_ext.conf`). The
``config.yaml`` of TorchRL's own examples does not work: its empty entry ``replay_buffer: sampler:`` erases the chosen
sampler, and its buffer, ``replay_buffer=base``, does not support priorities.

The entries have the arguments of the classes. A hyperparameter with a schedule is written as
``{start: 0.4, end: 1.0, num_updates: 10000}``. By default, ``capacity`` is that of the storage, an event-table sampler
uses the tables of the writer, and ``td_error`` is what the trainer's loss writes.

There is no entry for :class:`~torchrl_replay_ext.DecoupledSampler`. The trainers draw one batch for both actor and
critic. They also build a new policy for each reference to one, so the sampler would hold a policy that is never
trained.
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

# How TorchRL's losses write "td_error", by the name of the function or class in a trainer's configuration.
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
# These write squared TD errors if they have a value network.
_SAC = ("_make_sac_loss", "SACLoss")


# --- resolvers: values from the configurations of the buffer and of the loss


def _of_buffer(path: str, _parent_: Any) -> Any:
    """The entry ``path`` of the replay buffer that contains a node, at any depth; None if there is no such entry."""
    node = _parent_
    while node is not None and not (isinstance(node, DictConfig) and "storage" in node):
        node = node._get_parent()
    return None if node is None else OmegaConf.select(node, path)


def _of_loss(_root_: Any) -> str | None:
    """How the trainer's loss writes "td_error", "squared" or "absolute"; None if the loss is unknown."""
    for path in ("trainer.loss_module._target_", "loss._target_"):
        target = OmegaConf.select(_root_, path)
        if target is not None:
            name = str(target).rsplit(".", 1)[-1]
            if name in _SAC and OmegaConf.select(_root_, path.replace("_target_", "value_network")) is not None:
                return "squared"
            return _TD_ERRORS.get(name)
    return None


OmegaConf.register_new_resolver("of_buffer", _of_buffer, replace=True)
OmegaConf.register_new_resolver("td_error_of_loss", _of_loss, replace=True)

_CAPACITY = "${of_buffer:storage.max_size}"
_TD_ERROR = "${td_error_of_loss:}"


# --- from plain values to objects


def _key(value: Any) -> Any:
    """Convert a key from YAML, which has lists instead of tuples, to a NestedKey."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _number(owner: str, name: str, value: Any) -> Any:
    """Convert a value from YAML to a number or a schedule."""
    if isinstance(value, Anneal):
        return value
    if isinstance(value, Mapping):
        if set(value) != {"start", "end", "num_updates"}:
            raise ValueError(
                f"{owner}({name}={dict(value)}): a schedule must have exactly the entries start, end and num_updates."
            )
        return Anneal(**value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(
            f"{owner}({name}={value!r}): must be a number, or a schedule {{start: , end: , num_updates: }}."
        )
    return value


_SCHEDULED = ("alpha", "beta", "omega")


def _arguments(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from YAML to arguments of a constructor."""
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
            raise ValueError(f"{owner}: the buffer has no storage with max_size that gives the capacity; set capacity.")
        elif name == "td_error" and value is None:
            raise ValueError(
                f"{owner}: it is unknown how the trainer's loss writes 'td_error'; set td_error to 'squared' (δ²) or "
                "'absolute' (|δ|)."
            )
        arguments[name] = value
    return arguments


def _maker(sampler: type) -> Callable[..., Any]:
    def make(**values: Any) -> Any:
        return sampler(**_arguments(sampler.__name__, values))

    make.__doc__ = f"Make a :class:`~torchrl_replay_ext.{sampler.__name__}` from plain values."
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
    """Make event tables from plain values.

    Args:
        owner: the class that error messages name.
        events: a mapping from the name of each event to the other arguments of :class:`~torchrl_replay_ext.EventSpec`:
            ``condition`` and ``history``, optionally ``table`` and ``context``. ``condition`` is a key (a list if it is
            nested), a threshold ``{key: , op: , value: }``, or a function, written as
            ``{_target_: hydra.utils.get_method, path: package.module.function}``.
        capacity: a mapping from the name of each table to its capacity in transitions.
        retention: ``"ring"`` or ``"pinned"``, see :class:`~torchrl_replay_ext.EventTables`.

    Raises:
        ValueError: if a value is missing, unknown or out of range. The message names the event.
    """
    known = {spec_field.name for spec_field in fields(EventSpec)} - {"name"}
    specs = []
    for name, values in _mapping(owner, "events", events).items():
        given = set(_mapping(owner, f"events.{name}", values))
        missing, unknown = {"condition", "history"} - given, given - known
        if missing or unknown:
            raise ValueError(
                f"{owner}(events.{name}): missing {sorted(missing)}, unknown {sorted(unknown)}; an event has the "
                "entries condition and history, and optionally table and context."
            )
        specs.append(EventSpec(name, **{**values, "condition": _condition(owner, name, values["condition"])}))
    return EventTables(specs, dict(_mapping(owner, "capacity", capacity)), retention=retention)


def _condition(owner: str, name: str, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _key(value)
    if set(value) != {"key", "op", "value"}:
        raise ValueError(
            f"{owner}(events.{name}.condition={dict(value)}): a threshold must have exactly the entries key, op and "
            "value."
        )
    return Threshold(_key(value["key"]), value["op"], value["value"])


def make_event_table_writer(events: Any, capacity: Any, retention: str, **values: Any) -> EventTableWriter:
    """Make an :class:`~torchrl_replay_ext.EventTableWriter` from plain values, see :func:`make_tables`."""
    owner = "EventTableWriter"
    return EventTableWriter(make_tables(owner, events, capacity, retention), **_arguments(owner, values))


def make_event_table_sampler(
    events: Any, capacity: Any, retention: Any, eta: Any, priority: Any, td_error: str | None, **values: Any
) -> EventTableSampler:
    """Make an :class:`~torchrl_replay_ext.EventTableSampler` from plain values.

    The sampler first gets its own tables with the specification of the writer's tables. When the buffer is made, the
    writer's tables replace them.
    """
    owner = "EventTableSampler"
    if events is None:
        raise ValueError(
            f"{owner}: the writer of the buffer has no events; choose writer@replay_buffer.writer=event_table and set "
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
    validate: bool = False


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
    min_priority: float = 0.0


@dataclass
class RankBasedSamplerConfig(_PriorityConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.RankBasedSampler`."""

    _target_: str = "torchrl_replay_ext.configs.make_rank"
    alpha: Any = 0.7
    beta: Any = 0.5
    stratified: bool = True
    segments: str = "exact"
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

    To choose a sampler for ``anchors``, add ``+sampler@replay_buffer.sampler.anchors=reaper`` to the command line.
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
    validate: bool = False


@dataclass
class EventTableSamplerConfig(SamplerConfig):
    """Hydra configuration for :class:`~torchrl_replay_ext.EventTableSampler`, with the tables of the writer."""

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
    validate: bool = False


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

    _target_: str = "torchrl_replay_ext.writers.round_robin.CompilableWriter"


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
    compile: bool = False


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
    """Add the entries to Hydra's ConfigStore. Importing this module calls it."""
    store = ConfigStore.instance()
    for group, entries in _ENTRIES.items():
        for name, node in entries.items():
            store.store(group=group, name=name, node=node, provider=PROVIDER)


register()
