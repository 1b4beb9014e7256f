"""Each recipe in one file: TorchRL's environments, collectors and losses with the buffers of torchrl_replay_ext."""
