"""Samplers for TorchRL's replay buffers."""

from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.decoupled import DecoupledSampler
from torchrl_replay_ext.samplers.event_table import EventTableSampler
from torchrl_replay_ext.samplers.proportional import ProportionalSampler
from torchrl_replay_ext.samplers.rank import RankBasedSampler
from torchrl_replay_ext.samplers.reaper import ReaPERSampler
from torchrl_replay_ext.samplers.recency import RecencySampler
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler

__all__ = [
    "DecoupledSampler",
    "Draw",
    "EventTableSampler",
    "ProportionalSampler",
    "RankBasedSampler",
    "ReaPERSampler",
    "RecencySampler",
    "ReplaySampler",
    "TrajectoryRetraceSampler",
]
