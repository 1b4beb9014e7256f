"""The interface of state that is updated at each write to a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torchrl_replay_ext.samplers.rows import RowView


class WriteObserver:
    """State that is updated at each write to the slots of a buffer. The methods do nothing by default."""

    # True if the order of the writes matters: the buffer then needs a round-robin writer
    needs_order = False

    def write(self, slots: Tensor, rows: RowView) -> None:
        """Take in the rows of a write. They replace what was in their slots, for which :meth:`remove` is not called.

        The write is recorded afterwards: generations and priorities are still those before it.

        Args:
            slots: int64 [n], in the order of writing, n <= number of slots.
            rows: the rows at ``slots``.

        Raises:
            KeyError, TypeError, ValueError: if the rows are invalid; nothing is changed then.
        """

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n], without duplicates, oldest first."""

    def before_full_overwrite(self) -> None:
        """Called before a write with more rows than slots, of which only the last rows are written."""

    def before_ingest(self, count: int, next_slot: int) -> None:
        """Called before ``count`` rows that the storage already holds are written; ``next_slot`` is written next."""

    def clear(self) -> None:
        """Remove all slots."""

    def tensors(self) -> dict[str, Tensor]:
        """The state to save. It is restored in place."""
        return {}

    def raise_numbers(self, last: int) -> None:
        """Raise the numbers of writes in :meth:`tensors` by ``last``, before :meth:`rebuild`."""

    def rebuild(self) -> None:
        """Recompute derived state after :meth:`tensors` were replaced."""
