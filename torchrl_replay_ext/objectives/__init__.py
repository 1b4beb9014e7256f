"""Losses, as TorchRL's loss modules."""

from torchrl_replay_ext.objectives.acer import ACERLoss
from torchrl_replay_ext.objectives.acer_continuous import ACERContinuousLoss

__all__ = ["ACERContinuousLoss", "ACERLoss"]
