"""Networks that the objectives need."""

from torchrl_replay_ext.modules.dueling import SeparateValueNetworks, StochasticDuelingNetwork

__all__ = ["SeparateValueNetworks", "StochasticDuelingNetwork"]
