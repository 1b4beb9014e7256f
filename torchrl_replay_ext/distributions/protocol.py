"""The interface of distributions over the slots of a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import Array
from torchrl_replay_ext.core.sum_tree import UpdateMask
from torchrl_replay_ext.core.write_log import WriteLog

__all__ = ["Distribution", "Draw", "RowView", "UpdateMask", "WriteObserver"]


class Draw(NamedTuple):
    """A batch of slots.

    Importance-sampling weights are (density / smallest)^−β.

    Args:
        slots: int64 [B].
        density: float64 or int64 [B], proportional to the probability of each slot; 0 if nothing can be drawn.
            Default: None, all slots are equally likely and the batch has no weights.
        smallest: the smallest positive density of all stored slots. Default: None, weights are divided by the largest
            weight of the batch.
        extras: further entries of the batch, [B] each. Default: None.
    """

    slots: Tensor
    density: Tensor | None = None
    smallest: float | Tensor | None = None
    extras: dict[str, Tensor] | None = None


class RowView(Protocol):
    """Access to the rows of a write.

    Args:
        slots: int64 [n].
        places: the same slots as an index, see :func:`~torchrl_replay_ext.functional.priorities.as_index`.
    """

    slots: Tensor
    places: Array

    def column(self, key: NestedKey, why: str | None = None) -> Tensor | None:
        """One number per row, [n]; None if the entry is missing.

        Args:
            key: name of the entry.
            why: the end of the error message that says who should have written the entry. If given, a missing entry
                raises KeyError. Default: None.
        """
        ...

    def require(self, key: NestedKey, why: str) -> None:
        """Raise KeyError if an entry is missing."""
        ...

    def entry(self, key: NestedKey, why: str) -> Tensor:
        """An entry with any number of values per row, [n, d]. Raises KeyError if it is missing."""
        ...

    def is_rewrite(self) -> bool:
        """True if these rows were stored before and changed in place (``rb.mark_update``).

        Raises:
            ValueError: if the rows are new and not consecutive in the ring.
        """
        ...


class WriteObserver(ABC):
    """State that is updated at each write to the slots of a buffer."""

    # True if slots must be written one after the other in the order of the ring
    needs_order = False
    # True if any gap between writes means that a write was interrupted, for every type of writer
    requires_sequential_writer = False

    @abstractmethod
    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        """Insert the rows of a write.

        Args:
            slots: int64 [n], in the order of writing, n <= number of slots.
            priority: d of a new transition, float64 [1].
            rows: the rows at ``slots``.

        Raises:
            KeyError, TypeError, ValueError: if the rows are invalid; nothing is changed then.
        """

    @abstractmethod
    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], without duplicates, oldest first."""

    def before_full_overwrite(self) -> None:  # noqa: B027 (an empty hook)
        """Called before a write with more rows than slots, of which only the last rows are inserted."""

    def before_ingest(self, count: int, last_slot: int | None) -> None:  # noqa: B027 (an empty hook)
        """Called before ``count`` rows that the storage already holds are inserted; ``last_slot``: None if unknown."""

    @abstractmethod
    def clear(self) -> None:
        """Remove all slots."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""

    @abstractmethod
    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced."""

    @abstractmethod
    def check_valid(self) -> None:
        """Raise AssertionError if the state is inconsistent. O(N)."""


class Distribution(WriteObserver):
    """A probability distribution over slots. It does not access the storage.

    In graphs (``log.layout.for_graphs``) and on accelerators, no method except :meth:`insert` may branch on the values
    of tensors: a graph has none, and to read one from an accelerator, the host must wait for the device.
    """

    # True if slots are written in the order of their numbers
    slots_in_ring_order = True
    # True if writes in a graph have the same result as outside of it
    writes_in_graphs = True
    # True if draws depend on TD errors
    takes_priorities = True
    # entries of tensors() that do not depend on the stored transitions
    settings: tuple[str, ...] = ()
    _log: WriteLog

    @property
    @abstractmethod
    def max_priority(self) -> float:
        """The largest d that can be represented."""

    def update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        """Update priorities. Not called if :attr:`takes_priorities` is False.

        Args:
            slots: int64 [n].
            priority: d of each slot, float32 [n].
            mask: where values cannot be read: the valid rows, and the row that is used of duplicates. None: all rows
                are valid, and the last of duplicates is used.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no priorities.")

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slots with replacement.

        Raises:
            RuntimeError: if nothing can be drawn. Where values cannot be read, all rows are then slot 0 with density 0.
        """

    @abstractmethod
    def density(self, slots: Tensor) -> Tensor:
        """A number proportional to the probability of each of ``slots`` [n], float64 [n]."""

    @abstractmethod
    def reweight(self, slots: Tensor | None) -> None:
        """Recompute the density of ``slots`` [n], or of all slots if None, after an exponent has changed."""

    def stored_slots(self) -> Tensor:
        """The slots that can be drawn, int64 [n]. Default: all that hold a transition."""
        return self._log.stored_slots()

    def stats(self) -> dict[str, Tensor]:
        """Statistics for logging, scalars."""
        return {}

    def sync(self, next_slot: Callable[[], int | None]) -> None:
        """Update state that is shared with a writer. Called outside of graphs before each use, except for writes.

        Args:
            next_slot: returns the slot that will be written next; None if unknown.
        """
