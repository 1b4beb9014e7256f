"""Experience replay for TorchRL: samplers for ``TensorDictReplayBuffer``, and the losses of ACER and Retrace."""

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.buffers import CompilableReplayBuffer
from torchrl_replay_ext.core.event_spec import EventSpec, Novel, Quantile, Threshold
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.layout import validate_on_accelerators
from torchrl_replay_ext.core.streams import Episodes
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.modules import SeparateValueNetworks, StochasticDuelingNetwork
from torchrl_replay_ext.objectives.acer import ACERLoss
from torchrl_replay_ext.objectives.acer_continuous import ACERContinuousLoss
from torchrl_replay_ext.objectives.retrace import RetraceEstimator
from torchrl_replay_ext.optim import AdamStep, clip_gradients
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.decoupled import DecoupledSampler
from torchrl_replay_ext.samplers.event_table import EventTableSampler
from torchrl_replay_ext.samplers.proportional import ProportionalSampler
from torchrl_replay_ext.samplers.rank import RankBasedSampler
from torchrl_replay_ext.samplers.reaper import ReaPERSampler
from torchrl_replay_ext.samplers.recency import RecencySampler
from torchrl_replay_ext.samplers.trajectory import TrajectoryRetraceSampler
from torchrl_replay_ext.sharding.buffer import ShardedReplayBuffer
from torchrl_replay_ext.sharding.writer import ShardWriter
from torchrl_replay_ext.steps import compile_step
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.storages.frame_stack import FrameStackStorage
from torchrl_replay_ext.writers.event_table import EventTableWriter

__version__ = "0.1.0"

__all__ = [
    "ACERContinuousLoss",
    "ACERLoss",
    "AdamStep",
    "Anneal",
    "CompilableReplayBuffer",
    "CompilableTensorStorage",
    "DecoupledSampler",
    "Draw",
    "Episodes",
    "EventSpec",
    "EventTableSampler",
    "EventTableWriter",
    "EventTables",
    "FrameStackStorage",
    "Novel",
    "ProportionalSampler",
    "Quantile",
    "RankBasedSampler",
    "ReaPERSampler",
    "RecencySampler",
    "ReplaySampler",
    "RetraceEstimator",
    "SeparateValueNetworks",
    "ShardWriter",
    "ShardedReplayBuffer",
    "StochasticDuelingNetwork",
    "SumTree",
    "Threshold",
    "TrajectoryRetraceSampler",
    "clip_gradients",
    "compile_step",
    "validate_on_accelerators",
]
