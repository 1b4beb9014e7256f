"""State and algorithms on tensors: no storage, no sampler, no TorchRL."""
