"""Writers for TorchRL's replay buffers."""

from torchrl_replay_ext.writers.event_table import EventTableWriter

__all__ = ["EventTableWriter"]
