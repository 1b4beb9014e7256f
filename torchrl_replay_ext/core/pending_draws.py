"""Detection of late rows in priority updates: rows whose transition was overwritten after the draw."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import to_device, values_can_be_read
from torchrl_replay_ext.core.write_log import WriteLog

# Number of recent draws that are remembered. Older draws are assumed to receive no update.
_REMEMBERED = 256
# An update with at least so many rows does not equal a batch, or a part of one, by chance.
_UNMISTAKABLE = 8
# If several draws together contain all rows, each must contain at least so many rows on average.
_PER_DRAW = 4
# On an accelerator, the number of recent pending draws that are compared with an update first.
_COMPARED = 8


@dataclass
class _Draw:
    """A batch that was drawn.

    Args:
        slots: int64 [n].
        num_writes: the number of writes before the draw; a tensor where it cannot be read.
        waiting: number of rows that have not been updated yet; the draw is pending if it is positive.
        is_unpadded: False for padded rows, bool [n]; None: no padded rows.
        counted: True if the draw is included in the counts per slot.
    """

    slots: Tensor
    num_writes: int | Tensor
    waiting: int
    is_unpadded: Tensor | None = None
    counted: bool = False


def memory_of(slots: Tensor) -> int:
    """Address of the memory of ``slots``: equal for a batch and its slices, different for copies."""
    return slots.untyped_storage().data_ptr()


class PendingDraws:
    """Decides for each row of an update whether its slot was overwritten after the draw.

    TorchRL's own buffers pass only indices to an update. The update of a batch may contain all rows or parts, shuffled,
    concatenated or twice, and may follow hundreds of other draws. The slots may be overwritten before the update.
    Rules:

    * Rows that share the memory of one of the last 256 draws (the whole batch or a slice), or that are a copy of a
      whole batch, belong to that draw. A row is late if its slot was written after the draw. A copy of a batch of less
      than 8 rows is only recognized at its first update: later, the caller may mean the same slots by chance.
    * Other indices of at least 8 rows are treated as parts of draws if one of the last 256 draws, or a few of them
      together, contain all rows. A row is then late if a draw of its slot's earlier content is still pending: the row
      may belong to that draw, and new content must not get an old TD error. If no draw of the slot is pending, it is
      late if the slot was written after the last draw that contains all rows.
    * All other indices, and indices in increasing order that are not all slots of a pending draw, are treated as made
      by the caller: no row is late.

    Args:
        log: the generations of the slots.
    """

    def __init__(self, log: WriteLog):
        self._log = log
        self._draws: OrderedDict[int, _Draw] = OrderedDict()
        self._num_draws = 0
        # Per slot, allocated when first needed: the number of writes at its last draw (0: never drawn); the numbers of
        # pending draws of its present and of its earlier content; the number of the latest draw of earlier content.
        self._drawn_at: Tensor | None = None
        self._present = self._earlier = self._earlier_draw = torch.empty(0)

    def add(
        self, slots: Tensor, num_writes: int | Tensor, *, is_unpadded: Tensor | None = None, expects_update: bool = True
    ) -> None:
        """Remember a draw.

        Args:
            slots: int64 [n].
            num_writes: the number of writes before the draw; a tensor [] where it cannot be read.
            is_unpadded: False for padded rows, bool [n]. None (default): no padded rows.
            expects_update: True (default) if an update with this draw is expected.
        """
        memory = memory_of(slots)
        self._draws.pop(memory, None)
        if len(self._draws) >= _REMEMBERED:
            self._draws.popitem(last=False)
        self._num_draws += 1
        self._draws[memory] = _Draw(slots, num_writes, slots.shape[0] if expects_update else 0, is_unpadded)

    def unpadded_rows(self, slots: Tensor) -> Tensor | None:
        """False for padded rows of an update of ``slots`` [n], bool [n].

        None if no row is padded, or if ``slots`` are neither a remembered draw, nor a slice or a copy of one.
        """
        draw = self._draws.get(memory_of(slots))
        if draw is None:
            padded = (draw for draw in reversed(self._draws.values()) if draw.is_unpadded is not None)
            draw = next((draw for draw in padded if torch.equal(draw.slots, slots)), None)
            return None if draw is None else draw.is_unpadded
        if draw.is_unpadded is None:
            return None
        begin = slots.storage_offset() - draw.slots.storage_offset()
        return draw.is_unpadded.as_strided(slots.shape, slots.stride(), begin)

    def register_update(self, slots: Tensor) -> None:
        """Register an update of ``slots`` [n] whose late rows are known from write stamps."""
        draw = self._draws.get(memory_of(slots))
        if draw is None and values_can_be_read(slots):
            # in a storage of several dimensions, slots are computed anew from the index
            waiting = (draw for draw in reversed(self._draws.values()) if draw.waiting > 0)
            draw = next((draw for draw in waiting if torch.equal(draw.slots, slots)), None)
        if draw is not None:
            draw.waiting -= slots.shape[0]

    def find_late_rows(self, slots: Tensor, num_writes: int | Tensor) -> tuple[bool, Tensor | None]:
        """Decide whether the rows of an update were drawn, and which of them are late.

        Args:
            slots: int64 [n], within range.
            num_writes: the number of writes so far; a tensor [] where it cannot be read.

        Returns:
            True if the rows were drawn; and the mask of late rows, bool [n], None if no row is late.
        """
        draw = self._draws.get(memory_of(slots)) or self._only_candidate(slots, num_writes)
        if draw is None:
            attribute = self._attribute_few if len(slots) < _UNMISTAKABLE else self._attribute_many
            draw, containing = attribute(slots)
            if containing is None:
                return False, None
            if draw is None:
                return True, self._find_late_rows_by_slot(slots, containing)
        was_updated_before = draw.waiting <= 0
        draw.waiting -= slots.shape[0]
        late = None
        if isinstance(num_writes, Tensor) or draw.num_writes != num_writes:
            generation = self._log.generation.index_select(0, self._in_range(slots))
            late = (generation > draw.num_writes) | (generation == 0)
        if draw.counted and not was_updated_before:
            slots = self._in_range(slots)
            self._age(slots)
            self._subtract_updated(slots, torch.ones_like(slots, dtype=torch.bool) if late is None else ~late)
        return True, late

    def _in_range(self, slots: Tensor) -> Tensor:
        """``slots`` [n]; on an accelerator within range even if the caller has changed the index of a draw."""
        return slots if values_can_be_read(slots) else slots.clamp(0, len(self._log.generation) - 1)

    def _only_candidate(self, slots: Tensor, num_writes: int | Tensor) -> _Draw | None:
        """On an accelerator, the only pending draw, if nothing was written since and its size is that of ``slots`` [n].

        Then no row can be late, and there is no need to read the slots and compare them.
        """
        if values_can_be_read(slots) or len(slots) < _UNMISTAKABLE or isinstance(num_writes, Tensor):
            return None
        waiting = [draw for draw in self._draws.values() if draw.waiting > 0]
        alone = len(waiting) == 1 and waiting[0].num_writes == num_writes
        return waiting[0] if alone and len(waiting[0].slots) == len(slots) else None

    def _attribute_few(self, slots: Tensor) -> tuple[_Draw | None, list[_Draw] | None]:
        """For few rows: the draw of ``slots`` [n], None if it is unclear; and see :meth:`_attribute_many`."""
        waiting = [draw for draw in self._draws.values() if draw.waiting > 0 and len(draw.slots) == len(slots)]
        alike = [draw for draw in waiting if torch.equal(draw.slots, slots)]
        if len(alike) == 1:
            return alike[0], alike
        if not alike:
            order = slots.sort().values
            alike = [draw for draw in waiting if torch.equal(draw.slots.sort().values, order)]
        if not alike:
            return None, None
        self._count()
        # the oldest ones stay pending: their rows are the most likely to be late
        alike[-1].waiting -= len(slots)
        return None, alike

    def _attribute_many(self, slots: Tensor) -> tuple[_Draw | None, list[_Draw] | None]:
        """For many rows: the draw of ``slots`` [n], None if it is unclear; and all draws that contain all rows.

        The list is None if the rows were not drawn, and empty if only several draws together contain them.
        """
        draws = list(self._draws.values())
        waiting = [draw for draw in reversed(draws) if draw.waiting > 0]
        # on an accelerator, the host would wait for each comparison
        for draw in waiting if values_can_be_read(slots) else waiting[:_COMPARED]:
            if torch.equal(draw.slots, slots):
                return draw, [draw]
        if not draws:
            return None, None
        if _is_increasing(slots):
            same = next((draw for draw in waiting if _has_slots(draw, slots)), None)
            if same is not None:
                return same, [same]
            if not bool((draws[-1].slots.diff() >= 0).all()):
                return None, None
        inside = _membership(slots.unique(), draws).cpu()
        containing = [draws[number] for number in inside.all(1).nonzero().flatten().tolist()]
        # pending draws first, the latest first
        for draw in sorted(reversed(containing), key=lambda draw: draw.waiting <= 0):
            if torch.equal(draw.slots, slots):
                return draw, containing
        missing = torch.ones_like(inside[0])
        for _ in range(1 + len(slots) // _PER_DRAW):
            missing &= ~inside[int((inside & missing).sum(1).argmax())]
            if not bool(missing.any()):
                return None, containing
        return None, None

    def _count(self) -> None:
        """Add new draws to the counts per slot."""
        draws = [draw for draw in self._draws.values() if draw.waiting > 0 and not draw.counted]
        if not draws:
            return
        generation = self._log.generation
        if self._drawn_at is None:
            self._drawn_at, self._earlier_draw = torch.zeros_like(generation), torch.zeros_like(generation)
            self._present = torch.zeros_like(generation, dtype=torch.int32)
            self._earlier = torch.zeros_like(self._present)
        slots = torch.cat([draw.slots for draw in draws])
        lengths = to_device(torch.tensor([len(draw.slots) for draw in draws]), slots.device)
        at = _stacked([draw.num_writes for draw in draws], slots.device)
        at = at.repeat_interleave(lengths, output_size=len(slots))
        self._age(slots)
        generation = generation.index_select(0, slots)
        is_present = (at >= generation) & (generation > 0)
        self._drawn_at.scatter_reduce_(0, slots, at, "amax")
        self._present.index_add_(0, slots, is_present.to(torch.int32))
        self._earlier.index_add_(0, slots, (~is_present).to(torch.int32))
        self._earlier_draw[slots[~is_present]] = self._num_draws
        for draw in draws:
            draw.counted = True

    def _age(self, slots: Tensor) -> None:
        """Count draws of overwritten content as draws of earlier content, and forget old ones."""
        assert self._drawn_at is not None
        generation = self._log.generation.index_select(0, slots)
        overwritten = (self._drawn_at.index_select(0, slots) < generation) | (generation == 0)
        present, earlier = self._present.index_select(0, slots), self._earlier.index_select(0, slots)
        since = self._earlier_draw.index_select(0, slots)
        earlier = earlier * (self._num_draws - since <= _REMEMBERED) + present * overwritten
        self._earlier_draw[slots] = torch.where(overwritten & (present > 0), self._num_draws, since)
        self._earlier[slots] = earlier
        self._present[slots] = present * ~overwritten

    def _find_late_rows_by_slot(self, slots: Tensor, containing: list[_Draw]) -> Tensor:
        """The mask of late rows if the draw of the rows is unclear, bool [n].

        Args:
            slots: int64 [n].
            containing: the draws that contain all rows.
        """
        self._count()
        generation = self._log.generation.index_select(0, slots)
        late = torch.zeros_like(generation, dtype=torch.bool)
        if containing:
            late |= generation > _stacked([draw.num_writes for draw in containing], slots.device).amax()
        if self._drawn_at is not None:
            self._age(slots)
            # a pending draw of the present content explains the row
            late &= self._present.index_select(0, slots) == 0
            late |= self._earlier.index_select(0, slots) > 0
            self._subtract_updated(slots, torch.ones_like(late))
        return late | (generation == 0)

    def _subtract_updated(self, slots: Tensor, is_present: Tensor) -> None:
        """Subtract updated rows from the counts of pending draws.

        Where ``is_present``, a draw of the present content is subtracted if there is one. For an ambiguous row this
        keeps the draws of earlier content pending.
        """
        change = is_present.to(torch.int32)
        self._present.index_add_(0, slots, change, alpha=-1)
        self._earlier.index_add_(0, slots, 1 - change, alpha=-1)
        present = self._present.index_select(0, slots)
        earlier = self._earlier.index_select(0, slots) + present.clamp_max(0)
        self._earlier[slots] = earlier.clamp_min(0)
        self._present[slots] = present.clamp_min(0)

    def forget_contents(self) -> None:
        """Make all draws late: the contents of all slots were replaced, and the number of writes may have decreased."""
        if self._draws:
            self._count()
        for draw in self._draws.values():
            draw.num_writes = -1
        if self._drawn_at is not None:
            self._drawn_at.copy_(torch.where(self._drawn_at != 0, -1, 0))


def _stacked(numbers: list[int | Tensor], device: torch.device) -> Tensor:
    """One tensor of numbers, some of which may be tensors [] on the device; int64 [n]."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return to_device(torch.tensor(numbers), device)
    return torch.stack([n if isinstance(n, Tensor) else torch.full((), n, device=device) for n in numbers])


def _is_increasing(slots: Tensor) -> bool:
    return bool((slots.diff() > 0).all())


def _has_slots(draw: _Draw, slots: Tensor) -> bool:
    """True if a draw has exactly ``slots`` [n], which are in increasing order."""
    return len(draw.slots) == len(slots) and torch.equal(draw.slots.sort().values, slots)


def _membership(distinct: Tensor, draws: list[_Draw]) -> Tensor:
    """True where a draw contains a slot of ``distinct`` [n], which is in increasing order; bool [draws, n]."""
    slots = torch.cat([draw.slots for draw in draws])
    lengths = torch.tensor([len(draw.slots) for draw in draws], device=slots.device)
    number = torch.arange(len(draws), device=slots.device).repeat_interleave(lengths)
    place = torch.searchsorted(distinct, slots).clamp_max(len(distinct) - 1)
    found = torch.zeros(len(draws) * len(distinct), dtype=torch.int32, device=slots.device)
    found.index_add_(0, number * len(distinct) + place, (distinct[place] == slots).to(torch.int32))
    return (found > 0).view(len(draws), -1)
