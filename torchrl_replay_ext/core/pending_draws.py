"""Which rows of a late priority update still name the transitions that were drawn."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_replay_ext.core.write_log import WriteLog

# Draws that are remembered. A batch that has not come back after so many others is considered lost.
_REMEMBERED = 256
# So many rows are not equal to a batch, or part of one, by chance.
_UNMISTAKABLE = 8
# Rows that a draw must contain on average, if several draws together contain all.
_PER_DRAW = 4
# How many of the latest draws that have not come back are compared with an update first.
_COMPARED = 4


@dataclass
class _Draw:
    """A batch that was drawn.

    Args:
        slots: int64 [n].
        num_writes: the number of writes before the draw.
        waiting: how many of its rows have not come back.
        real: which rows are not padding, bool [n]; None: all.
        counted: whether its slots were added to the counts per slot.
    """

    slots: Tensor
    num_writes: int
    waiting: int
    real: Tensor | None = None
    counted: bool = False


def memory_of(slots: Tensor) -> int:
    """The memory that holds ``slots``: equal for a batch and slices of it, different for copies."""
    return slots.untyped_storage().data_ptr()


class PendingDraws:
    """Decides row by row whether an update that names slots is about their present content.

    TorchRL's own buffers hand back indices only. A batch may come back whole or split, shuffled, concatenated, twice,
    or after hundreds of others, and its slots may have been overwritten since. The rules:

    * Rows that share the memory of one of the last 256 draws (the whole batch, or a slice of it), or are a copy of a
      whole batch, belong to that draw. They are late where their slots were written since.
    * Other rows, at least 8 of them, are taken for parts of draws if one of the last 256 draws contains them all, or a
      few of them together do. Then a row is late if a draw of its slot's earlier content has not come back: the row may
      belong to that draw, and new content must not get an old TD error.
    * Everything else is an index that the caller has made up, and so is an index in increasing order: no row is late.

    Args:
        log: the generations of the slots.
    """

    def __init__(self, log: WriteLog):
        self._log = log
        self._draws: OrderedDict[int, _Draw] = OrderedDict()
        self._num_draws = 0
        # Of each slot, made when first needed: the number of writes at its last draw (0: never drawn); the draws of its
        # present and of its earlier content that have not come back; the number of the last one of the latter.
        self._drawn_at: Tensor | None = None
        self._present = self._earlier = self._earlier_draw = torch.empty(0)

    def add(self, slots: Tensor, num_writes: int, *, real: Tensor | None = None, comes_back: bool = True) -> None:
        """Remember a draw.

        Args:
            slots: int64 [n].
            num_writes: the number of writes before the draw.
            real: which rows are not padding, bool [n]; None: all.
            comes_back: whether an update is expected of it.
        """
        memory = memory_of(slots)
        self._draws.pop(memory, None)
        if len(self._draws) >= _REMEMBERED:
            self._draws.popitem(last=False)
        self._num_draws += 1
        self._draws[memory] = _Draw(slots, num_writes, slots.shape[0] if comes_back else 0, real)

    def real_rows(self, slots: Tensor) -> Tensor | None:
        """Which of ``slots`` [n] are not padding, bool [n]; None if they belong to no remembered draw.

        They may be a draw, a contiguous part of it, or a copy of it.
        """
        draw = self._draws.get(memory_of(slots))
        if draw is not None and draw.real is not None and slots.is_contiguous():
            begin = slots.storage_offset() - draw.slots.storage_offset()
            return draw.real[begin : begin + len(slots)]
        return next((draw.real for draw in reversed(self._draws.values()) if torch.equal(draw.slots, slots)), None)

    def come_back(self, slots: Tensor) -> None:
        """Note that ``slots`` [n] have come back together with their generations."""
        draw = self._draws.get(memory_of(slots))
        if draw is not None:
            draw.waiting -= slots.shape[0]

    def judge(self, slots: Tensor, num_writes: int) -> tuple[bool, Tensor | None]:
        """Whether ``slots`` [n], within range, were drawn; and which of them are late, bool [n], or None if none is.

        Args:
            slots: int64 [n].
            num_writes: the number of writes so far.
        """
        draw, is_drawn = self._draws.get(memory_of(slots)), True
        if draw is None:
            attribute = self._attribute_few if len(slots) < _UNMISTAKABLE else self._attribute_many
            draw, is_drawn = attribute(slots)
        if not is_drawn:
            return False, None
        if draw is None:
            late = self._judge_by_slot(slots)
            return True, late if bool(late.any()) else None
        comes_back_again = draw.waiting <= 0
        draw.waiting -= slots.shape[0]
        late = None
        if draw.num_writes != num_writes:
            generation = self._log.generation.index_select(0, slots)
            late = (generation > draw.num_writes) | (generation == 0)
        if draw.counted and not comes_back_again:
            self._age(slots)
            self._come_back(slots, torch.ones_like(slots, dtype=torch.bool) if late is None else ~late)
        return True, late

    def _attribute_few(self, slots: Tensor) -> tuple[_Draw | None, bool]:
        """The draw of which a few ``slots`` [n] are a copy, if there is one; and whether they were drawn at all."""
        waiting = [draw for draw in self._draws.values() if draw.waiting > 0 and len(draw.slots) == len(slots)]
        equal = [draw for draw in waiting if torch.equal(draw.slots, slots)]
        if len(equal) == 1:
            return equal[0], True
        order = slots.sort().values
        return None, any(torch.equal(draw.slots.sort().values, order) for draw in waiting)

    def _attribute_many(self, slots: Tensor) -> tuple[_Draw | None, bool]:
        """The draw of which many ``slots`` [n] are a copy, if there is one; and whether they were drawn at all."""
        draws = list(self._draws.values())
        waiting = [draw for draw in reversed(draws) if draw.waiting > 0]
        for draw in waiting[:_COMPARED]:
            if torch.equal(draw.slots, slots):
                return draw, True
        if not draws or (_is_increasing(slots) and not bool((draws[-1].slots.diff() >= 0).all())):
            return None, False
        inside = _membership(slots.unique(), draws).cpu()
        containing = [draws[number] for number in inside.all(1).nonzero().flatten().tolist()]
        # the latest that has not come back, or the latest
        for draw in sorted(reversed(containing), key=lambda draw: draw.waiting <= 0):
            if torch.equal(draw.slots, slots):
                return draw, True
        missing = torch.ones_like(inside[0])
        for _ in range(1 + len(slots) // _PER_DRAW):
            missing &= ~inside[int((inside & missing).sum(1).argmax())]
            if not bool(missing.any()):
                return None, True
        return None, False

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
        earlier = earlier * (self._num_draws - since <= _REMEMBERED) + present * overwritten
        self._earlier_draw[slots] = torch.where(overwritten & (present > 0), self._num_draws, since)
        self._earlier[slots] = earlier
        self._present[slots] = present * ~overwritten

    def _judge_by_slot(self, slots: Tensor) -> Tensor:
        """Which rows that belong to unknown draws are late, bool [n]."""
        self._count()
        late = self._log.generation.index_select(0, slots) == 0
        if self._drawn_at is None:
            return late
        self._age(slots)
        late |= self._earlier.index_select(0, slots) > 0
        self._come_back(slots, torch.ones_like(late))
        return late

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


def _is_increasing(slots: Tensor) -> bool:
    return bool((slots.diff() > 0).all())


def _membership(distinct: Tensor, draws: list[_Draw]) -> Tensor:
    """Which of ``draws`` contain each of ``distinct`` [n] slots, in increasing order; bool [draws, n]."""
    slots = torch.cat([draw.slots for draw in draws])
    lengths = torch.tensor([len(draw.slots) for draw in draws], device=slots.device)
    number = torch.arange(len(draws), device=slots.device).repeat_interleave(lengths)
    place = torch.searchsorted(distinct, slots).clamp_max(len(distinct) - 1)
    found = torch.zeros(len(draws) * len(distinct), dtype=torch.int32, device=slots.device)
    found.index_add_(0, number * len(distinct) + place, (distinct[place] == slots).to(torch.int32))
    return (found > 0).view(len(draws), -1)
