"""State that is rebuilt after a change of it was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Recoverable:
    """Marks state dirty while it is modified.

    If a change is interrupted, by an exception or because its process is killed, the flag stays set, and the state must
    be rebuilt before its next use. The flag is a tensor, which processes share; on the CPU, where reading is cheap.
    """

    def __init__(self):
        self._dirty = torch.zeros((), dtype=torch.bool)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Mark the state dirty while the block modifies it. Transactions can be nested."""
        was_dirty = bool(self._dirty)
        self._dirty.fill_(True)
        yield
        self._dirty.fill_(was_dirty)

    @property
    def needs_recovery(self) -> bool:
        """Whether a change was interrupted, or is under way."""
        return bool(self._dirty)

    def mark_dirty(self) -> None:
        """The state must be rebuilt before its next use."""
        self._dirty.fill_(True)

    def mark_clean(self) -> None:
        """The state was rebuilt, or the interrupted change was undone."""
        self._dirty.fill_(False)
