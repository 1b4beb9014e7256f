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

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import partial
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
from torchrl_replay_ext.arguments import require_choice
from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.core.conditions import Novel, Quantile, Threshold
from torchrl_replay_ext.core.event_spec import EventSpec
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.samplers import (
    EventTableSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.storages import CompilableTensorStorage
from torchrl_replay_ext.writers import EventTableWriter
from torchrl_replay_ext.writers.round_robin import CompilableWriter

# How TorchRL's losses write "td_error". SAC writes squared TD errors if it has a value network.
_TD_ERRORS = {
    **dict.fromkeys(("dqn", "qmixer", "ddpg", "td3", "iql", "cql"), "squared"),
    **dict.fromkeys(("sac", "discretesac"), "absolute"),
}


# --- resolvers: values from the configurations of the buffer and of the loss


def _of_buffer(path: str, _parent_: Any) -> Any:
    """The entry ``path`` of the replay buffer that contains a node, at any depth; None if there is no such entry."""
    node = _parent_
    while node is not None and not (isinstance(node, DictConfig) and "storage" in node):
        node = node._get_parent()
    return None if node is None else OmegaConf.select(node, path)


def _of_loss(_root_: Any) -> str | None:
    """How the trainer's loss writes "td_error", "squared" or "absolute"; None if the loss is unknown."""
    for path in ("trainer.loss_module", "loss"):
        if target := OmegaConf.select(_root_, f"{path}._target_"):
            # DQNLoss, or TorchRL's function _make_dqn_loss
            name = target.rsplit(".", 1)[-1].lower().removeprefix("_make_").removesuffix("loss").rstrip("_")
            if name == "sac" and OmegaConf.select(_root_, f"{path}.value_network") is not None:
                return "squared"
            return _TD_ERRORS.get(name)
    return None


OmegaConf.register_new_resolver("of_buffer", _of_buffer, replace=True)
OmegaConf.register_new_resolver("td_error_of_loss", _of_loss, replace=True)

# What to do if a resolver finds nothing.
_UNRESOLVED = {
    "capacity": "the buffer has no storage with max_size that gives the capacity; set capacity.",
    "td_error": "it is unknown how the trainer's loss writes 'td_error'; set it to 'squared' (δ²) or 'absolute' (|δ|).",
}

_CONDITIONS = {"threshold": Threshold, "quantile": Quantile, "novel": Novel}


# --- from plain values to objects


def _key(value: Any) -> Any:
    """Convert a key from YAML, which has lists instead of tuples, to a NestedKey."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _mapping(owner: str, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{owner}({name}={value!r}): must be a mapping, with an entry for each name.")
    return value


def _made(owner: str, name: str, kind: type, value: Any, *first: Any) -> Any:
    """An object of ``kind`` from its arguments in YAML; ``first``: those that YAML does not have."""
    try:
        return kind(*first, **_mapping(owner, name, value))
    except TypeError as error:
        raise ValueError(f"{owner}({name}={dict(value)}): {error}.") from error


def _number(owner: str, name: str, value: Any) -> Any:
    """Convert a schedule from YAML."""
    return _made(owner, name, Anneal, value) if isinstance(value, Mapping) else value


def _arguments(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values from YAML to arguments of a constructor."""
    arguments = {}
    for name, value in values.items():
        if name in ("alpha", "beta", "omega"):
            value = _number(owner, name, value)
        elif name.endswith("_key"):
            value = _key(value)
        elif name.endswith("_keys"):
            value = value if isinstance(value, str) else tuple(map(_key, value))
        elif name in _UNRESOLVED and value is None:
            raise ValueError(f"{owner}: {_UNRESOLVED[name]}")
        arguments[name] = value
    return arguments


def _make(sampler: type, **values: Any) -> Any:
    return sampler(**_arguments(sampler.__name__, values))


make_proportional = partial(_make, ProportionalSampler)
make_rank = partial(_make, RankBasedSampler)
make_reaper = partial(_make, ReaPERSampler)
make_trajectory_retrace = partial(_make, TrajectoryRetraceSampler)


def make_tables(owner: str, events: Any, capacity: Any, retention: Any) -> EventTables:
    """Make event tables from plain values.

    Args:
        owner: the class that error messages name.
        events: a mapping from the name of each event to the other arguments of :class:`~torchrl_replay_ext.EventSpec`:
            ``condition`` and ``history``, optionally ``table`` and ``context``. ``condition`` is a key (a list if it is
            nested), a threshold ``{key: , op: , value: }``, another condition ``{kind: quantile, key: , q: }`` or
            ``{kind: novel, key: }``, or a function, written as
            ``{_target_: hydra.utils.get_method, path: package.module.function}``.
        capacity: a mapping from the name of each table to its capacity in transitions.
        retention: ``"ring"`` or ``"pinned"``, see :class:`~torchrl_replay_ext.EventTables`.

    Raises:
        ValueError: if a value is missing, unknown or out of range. The message names the event.
    """
    specs = []
    for name, value in _mapping(owner, "events", events).items():
        place = f"events.{name}"
        values = {**_mapping(owner, place, value)}
        condition = values.get("condition")
        if isinstance(condition, Mapping):
            arguments = {"kind": "threshold", **condition, "key": _key(condition.get("key"))}
            require_choice(f"{owner}: {place}.condition", "kind", arguments["kind"], [*_CONDITIONS])
            kind = _CONDITIONS[arguments.pop("kind")]
            values["condition"] = _made(owner, f"{place}.condition", kind, arguments)
        elif condition is not None:
            values["condition"] = _key(condition)
        specs.append(_made(owner, place, EventSpec, values, name))
    return EventTables(specs, dict(_mapping(owner, "capacity", capacity)), retention=retention)


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

_BASES = {
    "sampler": SamplerConfig,
    "writer": WriterConfig,
    "storage": StorageConfig,
    "replay_buffer": TensorDictReplayBufferConfig,
}
_TYPES = {"bool": bool, "int": int, "float": float}
_RESOLVED = {"capacity": "${of_buffer:storage.max_size}", "td_error": "${td_error_of_loss:}"}
# what an event-table sampler reads of the writer
_TABLES = {name: f"${{of_buffer:writer.{name}}}" for name in ("events", "capacity", "retention")}


def _config(group: str, names: Sequence[str], owner: type, target: str | None = None, **defaults: Any) -> type:
    """Make a dataclass with the arguments of a class, except event tables, and add it to Hydra's ConfigStore.

    Args:
        group: the group of TorchRL's configurations.
        names: the names of the entry in the group.
        owner: the class.
        target: what Hydra calls with the arguments, a name of this package. Default: None, the class.
        **defaults: other defaults, and further arguments.
    """
    _, *parameters = inspect.signature(owner.__init__).parameters.values()
    parameters = [each for each in parameters if each.kind != each.VAR_KEYWORD and each.name != "tables"]
    own = {each.name: MISSING if each.default is each.empty else each.default for each in parameters}
    types = {each.name: _TYPES.get(each.annotation, Any) for each in parameters}
    values = {"_target_": f"torchrl_replay_ext.{target or owner.__name__}", "_convert_": "all", **own}
    values |= {name: value for name, value in _RESOLVED.items() if name in own} | defaults
    fields = [(name, types.get(name, Any), field(default=value)) for name, value in values.items()]
    config = make_dataclass(f"{owner.__name__}Config", fields, bases=(_BASES[group],))
    config.__module__ = __name__
    config.__doc__ = f"Hydra configuration for :class:`~torchrl_replay_ext.{owner.__name__}`."
    for name in names:
        ConfigStore.instance().store(group=group, name=name, node=config, provider="torchrl_replay_ext")
    return config


ProportionalSamplerConfig = _config(
    "sampler", ["proportional", "per"], ProportionalSampler, "configs.make_proportional"
)
RankBasedSamplerConfig = _config("sampler", ["rank"], RankBasedSampler, "configs.make_rank")
ReaPERSamplerConfig = _config("sampler", ["reaper"], ReaPERSampler, "configs.make_reaper")
# to choose a sampler for anchors: +sampler@replay_buffer.sampler.anchors=reaper
TrajectoryRetraceSamplerConfig = _config(
    "sampler", ["trajectory_retrace"], TrajectoryRetraceSampler, "configs.make_trajectory_retrace"
)
_OF_TABLES: dict[str, Any] = {**_TABLES, "eta": None, "td_error": _RESOLVED["td_error"]}
EventTableSamplerConfig = _config(
    "sampler", ["event_table"], EventTableSampler, "configs.make_event_table_sampler", **_OF_TABLES
)
_OF_WRITER: dict[str, Any] = {"events": None, "capacity": None, "retention": "ring"}
EventTableWriterConfig = _config(
    "writer", ["event_table"], EventTableWriter, "configs.make_event_table_writer", **_OF_WRITER
)
CompilableWriterConfig = _config("writer", ["compilable"], CompilableWriter, "writers.round_robin.CompilableWriter")
CompilableTensorStorageConfig = _config("storage", ["compilable_tensor"], CompilableTensorStorage)
CompilableReplayBufferConfig = _config("replay_buffer", ["compilable"], CompilableReplayBuffer)
