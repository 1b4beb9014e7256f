"""Loss modules and a value estimator for TorchRL."""

from torchrl_replay_ext.objectives.acer import ACERLoss
from torchrl_replay_ext.objectives.acer_continuous import ACERContinuousLoss
from torchrl_replay_ext.objectives.retrace import RetraceEstimator

__all__ = ["ACERContinuousLoss", "ACERLoss", "RetraceEstimator"]
