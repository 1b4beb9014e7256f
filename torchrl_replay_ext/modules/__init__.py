"""Critic networks of the ACER loss for continuous actions."""

from torchrl_replay_ext.modules.dueling import SeparateValueNetworks, StochasticDuelingNetwork

__all__ = ["SeparateValueNetworks", "StochasticDuelingNetwork"]
