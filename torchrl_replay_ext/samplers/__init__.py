"""Samplers for TorchRL's replay buffers."""

from torchrl_replay_ext.samplers.proportional import ProportionalSampler

__all__ = ["ProportionalSampler"]
