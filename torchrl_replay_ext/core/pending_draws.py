"""Which rows of a late priority update still name the transitions that were drawn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_replay_ext.core.write_log import WriteLog

# Draws that are remembered one by one; all of them are also counted, slot by slot, when that is needed.
_REMEMBERED = 128
# So many rows are not equal to a batch, or part of one, by chance.
_UNMISTAKABLE = 8
# A batch that has not come back after so many draws is considered lost.
_EXPIRY = 1024


@dataclass
class _Draw:
    """A batch that was drawn.

    Args:
        slots: int64 [n].
        num_writes: the number of writes before the draw.
        waiting: how many of its rows have not come back.
        counted: whether its slots were added to the counts per slot.
    """

    slots: Tensor
    num_writes: int
    waiting: int
    counted: bool = False


def _memory(slots: Tensor) -> int:
    return slots.untyped_storage().data_ptr()


class PendingDraws:
    """Decides row by row whether an update that names slots is about their present content.

    TorchRL's own buffers hand back indices only. A batch may come back whole or split, shuffled, concatenated, twice,
    or after hundreds of others, and its slots may have been overwritten since. The rules:

    * Rows that share the memory of one of the last draws (the whole batch, or a slice of it), or are a copy of the
      whole batch, belong to that draw. They are late where their slots were written since.
    * Other rows are attributed to draws if these can account for all of them: each slot as often as it was drawn and
      has not come back. Then a row is late if a draw of its slot's earlier content has not come back, since it may
      belong to that draw.
    * Otherwise the caller has made up the index, and no row is late. The same holds for less than 8 rows, unless they
      are a whole batch in another order, and for an index of all slots that hold something.
    * A draw that has not come back after 1,024 others is considered lost.

    Args:
        log: the generations of the slots.
    """

    def __init__(self, log: WriteLog):
        self._log = log
        self._draws: OrderedDict[int, _Draw] = OrderedDict()
        self._num_draws = 0
        # of those that are remembered, how many have not come back
        self._num_waiting = 0
        # Of each slot, made when first needed: the number of writes at its last draw (0: never drawn); the draws of its
        # present and of its earlier content that have not come back; the number of the last one of the latter.
        self._drawn_at: Tensor | None = None
        self._present = self._earlier = self._earlier_draw = torch.empty(0)

    def add(self, slots: Tensor, num_writes: int, *, comes_back: bool = True) -> None:
        """Remember a draw of ``slots`` [n], made after ``num_writes`` writes; whether an update is expected of it."""
        memory = _memory(slots)
        if memory in self._draws or len(self._draws) >= 2 * _REMEMBERED:
            self._count()
            for key in [memory, *list(self._draws)[:_REMEMBERED]]:
                forgotten = self._draws.pop(key, None)
                self._num_waiting -= forgotten is not None and forgotten.waiting > 0
        self._num_draws += 1
        self._num_waiting += comes_back
        self._draws[memory] = _Draw(slots, num_writes, slots.shape[0] if comes_back else 0)

    def find(self, slots: Tensor, num_writes: int) -> _Draw | None:
        """The draw that ``slots`` [n] are part of; None if that cannot be told.

        Args:
            slots: int64 [n].
            num_writes: the number of writes so far.
        """
        return self._draws.get(_memory(slots)) or self._copied_draw(slots, num_writes)

    def is_late(
        self, slots: Tensor, draw: _Draw | None, num_writes: int, num_stored: Callable[[], int]
    ) -> Tensor | None:
        """Which rows of an update name content that was overwritten, bool [n]; None if none does.

        Args:
            slots: int64 [n], within range.
            draw: the draw that they are part of, see :meth:`find`.
            num_writes: the number of writes so far.
            num_stored: counts the slots that hold something.
        """
        if draw is None:
            late = self._judge_by_slot(slots, num_stored)
            return late if bool(late.any()) else None
        comes_back_again = draw.waiting <= 0
        self.returned(draw, slots.shape[0])
        late = None
        if draw.num_writes != num_writes:
            generation = self._log.generation.index_select(0, slots)
            late = (generation > draw.num_writes) | (generation == 0)
        if draw.counted and not comes_back_again:
            self._age(slots)
            self._come_back(slots, torch.ones_like(slots, dtype=torch.bool) if late is None else ~late)
        return late

    def _copied_draw(self, slots: Tensor, num_writes: int) -> _Draw | None:
        """The remembered draw of which ``slots`` [n] are a copy, if there is one such draw only."""
        if not self._draws:
            return None
        latest = next(reversed(self._draws.values()))
        only_latest = self._num_waiting == 1 and latest.waiting > 0 and latest.num_writes == num_writes
        if only_latest and torch.equal(latest.slots, slots):
            return latest
        equal = [draw for draw in self._draws.values() if torch.equal(draw.slots, slots)]
        waiting = [draw for draw in equal if draw.waiting > 0]
        if waiting:
            return waiting[0] if len(waiting) == 1 else None
        return equal[-1] if equal and len(slots) >= _UNMISTAKABLE else None

    def returned(self, draw: _Draw, count: int) -> None:
        """``count`` rows of ``draw`` have come back."""
        self._num_waiting -= draw.waiting > 0 and draw.waiting <= count
        draw.waiting -= count

    def _count(self) -> None:
        """Add the draws that were not counted to the counts per slot."""
        draws = [draw for draw in self._draws.values() if draw.waiting > 0 and not draw.counted]
        if not draws:
            return
        generation = self._log.generation
        if self._drawn_at is None:
            self._drawn_at, self._earlier_draw = torch.zeros_like(generation), torch.zeros_like(generation)
            self._present = torch.zeros_like(generation, dtype=torch.int32)
            self._earlier = torch.zeros_like(self._present)
        slots = torch.cat([draw.slots for draw in draws])
        lengths = torch.tensor([len(draw.slots) for draw in draws])
        at = torch.tensor([draw.num_writes for draw in draws]).repeat_interleave(lengths).to(slots.device)
        self._age(slots)
        is_present = at >= generation.index_select(0, slots)
        self._drawn_at.scatter_reduce_(0, slots, at, "amax")
        self._present.index_add_(0, slots, is_present.to(torch.int32))
        self._earlier.index_add_(0, slots, (~is_present).to(torch.int32))
        self._earlier_draw[slots[~is_present]] = self._num_draws
        for draw in draws:
            draw.counted = True

    def _age(self, slots: Tensor) -> None:
        """Turn draws of content that was overwritten since into earlier draws, and forget lost ones."""
        assert self._drawn_at is not None
        overwritten = self._drawn_at.index_select(0, slots) < self._log.generation.index_select(0, slots)
        present, earlier = self._present.index_select(0, slots), self._earlier.index_select(0, slots)
        since = self._earlier_draw.index_select(0, slots)
        earlier = earlier * (self._num_draws - since <= _EXPIRY) + present * overwritten
        self._earlier_draw[slots] = torch.where(overwritten & (present > 0), self._num_draws, since)
        self._earlier[slots] = earlier
        self._present[slots] = present * ~overwritten

    def _judge_by_slot(self, slots: Tensor, num_stored: Callable[[], int]) -> Tensor:
        """Which rows of no known draw are late, bool [n]."""
        nothing = torch.zeros_like(slots, dtype=torch.bool)
        if len(slots) < _UNMISTAKABLE and not self._is_shuffled_draw(slots):
            return nothing
        self._count()
        if self._drawn_at is None:
            return nothing
        distinct, count = slots.unique(return_counts=True)
        self._age(distinct)
        waiting = self._present.index_select(0, distinct) + self._earlier.index_select(0, distinct)
        if bool((count > waiting).any()) or len(distinct) == len(slots) == num_stored():
            # no draws could give these rows, or these are all rows there are: the caller has made up the index
            return nothing
        is_gone = self._log.generation.index_select(0, slots) == 0
        late = (self._earlier.index_select(0, slots) > 0) | is_gone
        self._come_back(slots, torch.ones_like(late))
        return late

    def _is_shuffled_draw(self, slots: Tensor) -> bool:
        order = slots.sort().values
        waiting = (draw.slots for draw in self._draws.values() if draw.waiting > 0 and len(draw.slots) == len(slots))
        return any(torch.equal(drawn.sort().values, order) for drawn in waiting)

    def _come_back(self, slots: Tensor, is_present: Tensor) -> None:
        """Count rows that have come back: draws of the present content where ``is_present``, as long as there are any.

        An ambiguous row takes one of the present draws, so that the earlier ones stay in the count.
        """
        change = is_present.to(torch.int32)
        self._present.index_add_(0, slots, change, alpha=-1)
        self._earlier.index_add_(0, slots, 1 - change, alpha=-1)
        present = self._present.index_select(0, slots)
        earlier = self._earlier.index_select(0, slots) + present.clamp_max(0)
        self._earlier[slots] = earlier.clamp_min(0)
        self._present[slots] = present.clamp_min(0)

    def forget_contents(self) -> None:
        """The contents of all slots were replaced, and the number of writes may have gone back: all draws are late."""
        if self._draws:
            self._count()
        for draw in self._draws.values():
            draw.num_writes = -1
        if self._drawn_at is not None:
            self._drawn_at.copy_(torch.where(self._drawn_at != 0, -1, 0))
