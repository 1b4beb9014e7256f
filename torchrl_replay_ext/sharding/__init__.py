"""Replay buffers that are spread over several processes."""
