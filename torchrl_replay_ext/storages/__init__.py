"""Storages: what TorchRL's tensor storage lacks."""

from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.storages.frame_stack import FrameStackStorage

__all__ = ["CompilableTensorStorage", "FrameStackStorage"]
