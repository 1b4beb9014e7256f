"""Replay buffers that are spread over several processes."""

from torchrl_replay_ext.sharding.buffer import ShardedReplayBuffer
from torchrl_replay_ext.sharding.writer import ShardWriter

__all__ = ["ShardWriter", "ShardedReplayBuffer"]
