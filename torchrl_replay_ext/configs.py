"""Hydra configurations that add samplers, writers, a storage and a buffer to the choices of TorchRL's trainers.

They extend the groups of ``torchrl.trainers.algorithms.configs``: ``sampler`` (proportional, per, rank, reaper,
event_table, trajectory_retrace), ``writer`` (event_table, compilable), ``storage`` (compilable_tensor) and
``replay_buffer`` (compilable). If the package is installed, Hydra registers them (``hydra_plugins``) in every
application that has imported that module, so a training script needs no change::

    python train.py --config-name replay_dqn sampler@replay_buffer.sampler=reaper replay_buffer.sampler.omega=0.4

``replay_dqn`` and ``replay_sac`` configure TorchRL's DQN and SAC trainers (:mod:`torchrl_replay_ext.conf`). The
``config.yaml`` of TorchRL's own examples does not work: its empty entry ``replay_buffer: sampler:`` erases the chosen
sampler, and its buffer, ``replay_buffer=base``, does not support priorities.

The entries have the arguments of the classes. ``td_error`` is the entry ``td_error`` of the whole configuration, which
must say what the loss writes. A hyperparameter with a schedule is written as
``{start: 0.4, end: 1.0, num_updates: 10000}``. An event-table sampler has the tables of the writer.

There is no entry for :class:`~torchrl_replay_ext.DecoupledSampler`. The trainers draw one batch for both actor and
critic. They also build a new policy for each reference to one, so the sampler would hold a policy that is never
trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from hydra.core.config_store import ConfigStore
from torchrl.trainers.algorithms.configs.data import TensorDictReplayBufferConfig

import torchrl_replay_ext
from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.core.event_spec import EventSpec
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.writers.round_robin import CompilableWriter


def _argument(value: Any) -> Any:
    """A value of YAML as an argument: lists become tuples, and mappings with "start" become schedules."""
    if isinstance(value, list):
        return tuple(map(_argument, value))
    # not any mapping: event tables are one, too
    if not isinstance(value, dict):
        return value
    entries = {name: _argument(entry) for name, entry in value.items()}
    return Anneal(**entries) if "start" in entries else entries


def make(kind: str, **arguments: Any) -> Any:
    """Make an object of a class of :mod:`torchrl_replay_ext` from values of YAML.

    Args:
        kind: name of the class, such as "ReaPERSampler" or "Threshold".
        **arguments: its arguments. A nested key is a list, a schedule a mapping ``{start: , end: , num_updates: }``.
    """
    return getattr(torchrl_replay_ext, kind)(**{name: _argument(value) for name, value in arguments.items()})


def make_tables(events: Mapping[str, Any], capacity: Any, retention: Any = "ring") -> EventTables:
    """Make event tables from values of YAML.

    Args:
        events: a mapping from the name of each event to the other arguments of :class:`~torchrl_replay_ext.EventSpec`.
            ``condition`` is a key (a list if it is nested), or an object that Hydra makes, such as
            ``{_target_: torchrl_replay_ext.configs.make, kind: Threshold, key: , op: , value: }``.
        capacity: a mapping from the name of each table to its capacity in transitions.
        retention: ``"ring"`` or ``"pinned"``, see :class:`~torchrl_replay_ext.EventTables`.
    """
    return EventTables(
        [EventSpec(name, **_argument(event)) for name, event in events.items()], capacity, retention=retention
    )


def _store(group: str, name: str, node: Any) -> None:
    ConfigStore.instance().store(group=group, name=name, node=node, provider="torchrl_replay_ext")


def _arguments(owner: Any, **replaced: Any) -> dict[str, Any]:
    """The arguments of a class and their defaults, "???" for those without one, and what makes an object of them."""
    defaults = {name: each.default for name, each in inspect.signature(owner).parameters.items()}
    defaults = {name: "???" if default is inspect.Parameter.empty else default for name, default in defaults.items()}
    if "td_error" in defaults:
        replaced["td_error"] = "${td_error}"
    return (
        {"_target_": "torchrl_replay_ext.configs.make", "_convert_": "all", "kind": owner.__name__}
        | defaults
        | replaced
    )


_store("sampler", "proportional", _arguments(torchrl_replay_ext.ProportionalSampler))
_store("sampler", "per", _arguments(torchrl_replay_ext.ProportionalSampler))
_store("sampler", "rank", _arguments(torchrl_replay_ext.RankBasedSampler))
_store("sampler", "reaper", _arguments(torchrl_replay_ext.ReaPERSampler))
# to choose a sampler for anchors: +sampler@replay_buffer.sampler.anchors=reaper
_store("sampler", "trajectory_retrace", _arguments(torchrl_replay_ext.TrajectoryRetraceSampler))
_store("sampler", "event_table", _arguments(torchrl_replay_ext.EventTableSampler, tables="${..writer.tables}"))
_TABLES = {
    "_target_": "torchrl_replay_ext.configs.make_tables",
    "events": "???",
    "capacity": "???",
    "retention": "ring",
}
_store("writer", "event_table", _arguments(torchrl_replay_ext.EventTableWriter, tables=_TABLES))
_WRITER = f"{CompilableWriter.__module__}.{CompilableWriter.__name__}"
_store("writer", "compilable", {"_target_": _WRITER})
_store("storage", "compilable_tensor", _arguments(torchrl_replay_ext.CompilableTensorStorage))
_BUFFER = "torchrl_replay_ext.CompilableReplayBuffer"
_store("replay_buffer", "compilable", TensorDictReplayBufferConfig(_target_=_BUFFER))
