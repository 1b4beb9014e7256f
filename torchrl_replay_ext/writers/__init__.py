"""Writers for TorchRL's replay buffers."""
