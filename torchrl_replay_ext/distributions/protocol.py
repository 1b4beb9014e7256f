"""What a distribution over the slots of a buffer must provide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.core.sum_tree import UpdateMask
from torchrl_replay_ext.core.write_log import WriteLog

__all__ = ["Distribution", "Draw", "RowView", "UpdateMask", "WriteObserver"]


class Draw(NamedTuple):
    """A batch of slots.

    Importance-sampling weights are (density / smallest)^−β.

    Args:
        slots: int64 [B].
        density: float64 or int64 [B], proportional to the probability of each slot; 0 if nothing can be drawn. None
            (default): all slots are equally likely, and rows carry no weight.
        smallest: the smallest positive density of any stored slot. None (default): weights are normalised over the
            batch.
        extras: further columns of the batch, [B] each. None (default): none.
    """

    slots: Tensor
    density: Tensor | None = None
    smallest: float | Tensor | None = None
    extras: dict[str, Tensor] | None = None


class RowView(Protocol):
    """Rows that were just written."""

    slots: Tensor

    def column(self, key: NestedKey, why: str | None = None) -> Tensor | None:
        """One number per row, [n]; None if the entry is missing.

        Args:
            key: name of the entry.
            why: who should have written it. If given, a missing entry is a KeyError.
        """
        ...

    def require(self, key: NestedKey, why: str) -> None:
        """KeyError if an entry is missing."""
        ...

    def entry(self, key: NestedKey, why: str) -> Tensor:
        """An entry of any shape, [n, ...]; KeyError if it is missing."""
        ...

    def is_rewrite(self) -> bool:
        """Whether these rows were written before, and announced again outside of the ring's order.

        Raises:
            ValueError: if they are new, and do not follow each other in the ring.
        """
        ...


class WriteObserver(ABC):
    """State that follows what is written to the slots of a buffer."""

    # whether slots must be written in the order of the ring, one after the other
    needs_order = False
    # whether a gap between writes means that a write was interrupted, whoever writes
    requires_sequential_writer = False

    @abstractmethod
    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        """Slots were written.

        Args:
            slots: int64 [n], in the order of writing, n <= number of slots.
            priority: d of a new transition, float64 [1].
            rows: the rows in them.

        Raises:
            KeyError, TypeError, ValueError: if the rows do not fit, before anything is changed.
        """

    @abstractmethod
    def remove(self, slots: Tensor) -> None:
        """``slots`` [n], all different, hold nothing until they are written again; the oldest first."""

    def before_full_overwrite(self) -> None:  # noqa: B027 (an empty hook)
        """Called before a write of more rows than there are slots; only its last rows are inserted."""

    def before_ingest(self, count: int, last_slot: int | None) -> None:  # noqa: B027 (an empty hook)
        """Called before rows are inserted that a storage held before; None if the slot written last is unknown."""

    @abstractmethod
    def clear(self) -> None:
        """No slot holds anything."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The state to save, which is restored in place."""

    @abstractmethod
    def rebuild(self) -> None:
        """Recompute derived state, after :meth:`tensors` were replaced."""

    @abstractmethod
    def check_valid(self) -> None:
        """Raise AssertionError if parts of the state contradict each other. O(N)."""


class Distribution(WriteObserver):
    """Knows how likely each slot is, and draws from itself. It never sees a storage.

    In graphs (``log.layout.for_graphs``) every method but :meth:`insert` must be free of branches on values.
    """

    # whether slots are numbered in the order of time
    slots_in_ring_order = True
    # whether writes lose nothing by being part of a graph
    writes_in_graphs = True
    # whether draws depend on TD errors
    takes_priorities = True
    # entries of tensors() that do not depend on what is stored
    settings: tuple[str, ...] = ()
    _log: WriteLog

    @property
    @abstractmethod
    def max_priority(self) -> float:
        """The largest d that can be represented."""

    def update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        """Priorities have changed. Not called if :attr:`takes_priorities` is False.

        Args:
            slots: int64 [n].
            priority: d of each, float32 [n].
            mask: which rows are valid, and which of duplicates wins, where that cannot be decided by branching. None:
                all are valid, and of duplicates the last one wins.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no priorities.")

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        """Draw slots with replacement.

        Raises:
            RuntimeError: if nothing can be drawn. In a graph, all rows are slot 0 with density 0 then.
        """

    @abstractmethod
    def density(self, slots: Tensor) -> Tensor:
        """A number proportional to the probability of each of ``slots`` [n], float64 [n]."""

    @abstractmethod
    def reweight(self, slots: Tensor | None) -> None:
        """An exponent has changed: recompute the density of ``slots`` [n], or of all if None."""

    def stored_slots(self) -> Tensor:
        """The slots that hold something that could be drawn, int64 [n]."""
        return self._log.stored_slots()

    def stats(self) -> dict[str, Tensor]:
        """Numbers worth logging, scalars."""
        return {}

    def sync(self, next_slot: int | None) -> None:
        """Bring state that others write to up to date. Called before each use outside graphs, except by a writer.

        Args:
            next_slot: the slot that is written next; None if unknown.
        """
