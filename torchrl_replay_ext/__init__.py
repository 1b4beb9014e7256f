"""Experience replay for TorchRL: samplers that plug into its ``TensorDictReplayBuffer``."""
