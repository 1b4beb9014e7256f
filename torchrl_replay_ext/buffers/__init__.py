"""Replay buffers."""

from torchrl_replay_ext.buffers.compilable import CompilableReplayBuffer

__all__ = ["CompilableReplayBuffer"]
