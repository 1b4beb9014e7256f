"""State that is rebuilt after an interrupted change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Recoverable:
    """Marks state as dirty while it is modified.

    If a change is interrupted because of an exception or a killed process, the flag stays set, and the state must be
    rebuilt before its next use. The flag is a tensor, so processes can share it. It is on the CPU, where reading is
    cheap.
    """

    # number of nested transactions of this process
    _depth = 0

    def __init__(self):
        self._dirty = torch.zeros((), dtype=torch.bool, device="cpu")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Mark the state as dirty while the block modifies it. Transactions can be nested."""
        was_dirty = bool(self._dirty)
        self._dirty.fill_(True)
        self._depth += 1
        try:
            yield
            self._dirty.fill_(was_dirty)
        finally:
            self._depth -= 1

    @property
    def needs_recovery(self) -> bool:
        """True if a change was interrupted; False while a thread of this process is making one."""
        return bool(self._dirty) and not self._depth

    @property
    def is_changing(self) -> bool:
        """True within a transaction of this process."""
        return self._depth > 0

    def mark_dirty(self) -> None:
        """Require a rebuild of the state before its next use."""
        self._dirty.fill_(True)

    def mark_clean(self) -> None:
        """Mark the state as valid, after it was rebuilt or the interrupted change was undone."""
        self._dirty.fill_(False)
