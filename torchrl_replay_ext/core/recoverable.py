"""State that is rebuilt after an interrupted change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torchrl_replay_ext.kernels.ops import Views


class Flag:
    """A truth value that processes can share. It is on the CPU, where reading is cheap."""

    def __init__(self):
        self._tensor = torch.zeros(1, dtype=torch.bool, device="cpu")
        self._views = Views(self._tensor)

    def __bool__(self) -> bool:
        return bool(self._views()[0][0])

    def set(self, value: bool) -> None:
        """Change the value."""
        self._views()[0][0] = value


class Recoverable:
    """Marks state as dirty while it is modified.

    If a change is interrupted because of an exception or a killed process, the flag stays set, and the state must be
    rebuilt before its next use.
    """

    # number of nested transactions of this process
    _depth = 0

    def __init__(self):
        self._dirty = Flag()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Mark the state as dirty while the block modifies it. Transactions can be nested."""
        was_dirty = bool(self._dirty)
        self._dirty.set(True)
        self._depth += 1
        try:
            yield
            self._dirty.set(was_dirty)
        finally:
            self._depth -= 1

    @property
    def needs_recovery(self) -> bool:
        """True if a change was interrupted; False while a thread of this process is making one."""
        return bool(self._dirty) and not self._depth

    def mark_dirty(self) -> None:
        """Require a rebuild of the state before its next use."""
        self._dirty.set(True)

    def mark_clean(self) -> None:
        """Mark the state as valid, after it was rebuilt or the interrupted change was undone."""
        self._dirty.set(False)
