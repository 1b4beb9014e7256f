"""Tensor storages for compiled steps and for stacked frames."""

from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.storages.frame_stack import FrameStackStorage

__all__ = ["CompilableTensorStorage", "FrameStackStorage"]
