"""Samplers for TorchRL's replay buffers."""
