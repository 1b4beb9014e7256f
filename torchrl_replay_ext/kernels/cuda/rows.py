"""The kernels of rows for CUDA; see :mod:`torchrl_replay_ext.kernels.rows`.

Each is one thread block, because the rows of a batch depend on each other: some have the same slot.
"""

from __future__ import annotations

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import add, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import write, write_power
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, NUMBERS, OUT_OF_RANGE, WINDOW

_OUT_OF_RANGE, _INVALID, _EMPTY = tl.constexpr(OUT_OF_RANGE), tl.constexpr(INVALID), tl.constexpr(EMPTY)
_NUMBERS, _WINDOW = tl.constexpr(NUMBERS), tl.constexpr(WINDOW)
# The bits of a float32 that is not a number: larger than those of any number.
_MARK = tl.constexpr(0x7F800001)
# rows that are processed together
_TOGETHER = 1024


@jit
def _waiting(place, now, mask):
    """How many draws of a slot wait for their updates; ``place``: the address of the number of the last one."""
    number = tl.load(place, mask=mask, other=0)
    count = tl.load(place + 1, mask=mask, other=0)
    return tl.where((((now - number) & _NUMBERS) <= _WINDOW) & (count > 0), count, 0)


@jit
def _drawn(
    slots, density, smallest, num_smallest, beta, generation, draws, num_draws, weight, stamp, size, count,
    num_rows: tl.constexpr,
):  # fmt: skip
    least = tl.full([num_rows], float("inf"), tl.float64)
    if weight is not None:
        for start in range(0, num_smallest, num_rows):
            rows = start + tl.arange(0, num_rows)
            found = tl.load(smallest + rows, mask=rows < num_smallest, other=0).to(tl.float64)
            least = tl.minimum(least, tl.where(rows < num_smallest, found, float("inf")))
    least = tl.min(least, axis=0) + tl.zeros([num_rows], tl.float64)
    number = tl.cast(0, tl.int64)
    if draws is not None:
        number = tl.load(num_draws) + 1
    now = (number & _NUMBERS).to(tl.int32)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        in_batch = rows < count
        slot = tl.load(slots + rows, mask=in_batch, other=-1)
        if weight is not None:
            mass = tl.load(density + rows, mask=in_batch, other=0).to(tl.float64)
            can_be_drawn = (mass > 0) & (least > 0)
            ratio = tl.where(can_be_drawn, mass, 1.0) / tl.where(can_be_drawn, least, 1.0)
            result = tl.where(can_be_drawn, tl.exp2(-tl.load(beta) * tl.log2(ratio)), 0.0)
            tl.store(weight + rows, result.to(tl.float32), mask=in_batch)
        if stamp is not None:
            tl.store(stamp + rows, tl.load(generation + within(slot, size)), mask=in_batch)
        if draws is not None:
            valid = (slot >= 0) & (slot < size)
            place = draws + 4 * tl.where(valid, slot, 0)
            # of several rows of a slot, the first ones set the same numbers, and all are counted after them
            is_first = valid & (tl.load(place, mask=valid, other=0) != now)
            waiting = _waiting(place, now, valid)
            tl.debug_barrier()
            tl.store(place, now, mask=is_first)
            tl.store(place + 1, waiting, mask=is_first)
            tl.debug_barrier()
            add(place + 1, 1, valid)
            tl.debug_barrier()
    if draws is not None:
        tl.store(num_draws, number)


@jit
def _record(
    slots, generation, number, d, largest, draws, num_draws, size, count, stays: tl.constexpr, num_rows: tl.constexpr
):
    now = (tl.load(num_draws) & _NUMBERS).to(tl.int32)
    written = tl.load(number) + 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        valid = (slot >= 0) & (slot < size)
        slot = tl.where(valid, slot, 0)
        tl.store(generation + slot, written if stays else 0, mask=valid)
        tl.store(d + slot, -tl.load(largest).to(tl.float32) if stays else 0.0, mask=valid)
        place = draws + 4 * slot
        last = tl.load(place, mask=valid, other=0)
        before = tl.load(place + 2, mask=valid, other=0)
        waiting = _waiting(place, now, valid) + _waiting(place + 2, now, valid)
        tl.debug_barrier()
        tl.store(place, 0, mask=valid)
        tl.store(place + 1, 0, mask=valid)
        tl.store(place + 2, tl.where(last != 0, last, before), mask=valid)
        tl.store(place + 3, waiting, mask=valid)
        tl.debug_barrier()
    tl.store(number, written)


@jit
def _inspect(batch, rows, count, squared: tl.constexpr):
    """The slots of some rows, 0 where they are wrong; which rows are real; why rows are wrong; and their priorities."""
    slots, error, stamp, real, limit, eps, smallest, size = batch
    in_batch = rows < count
    slot = tl.load(slots + rows, mask=in_batch, other=0)
    given = tl.load(error + rows, mask=in_batch, other=0.0).to(tl.float64)
    is_real = in_batch
    if stamp is not None:
        is_real = is_real & (tl.load(stamp + rows, mask=in_batch, other=0) >= 0)
    if real is not None:
        is_real = is_real & (tl.load(real + rows, mask=in_batch, other=0) != 0)
    delta = given
    if squared:
        delta = tl.sqrt(tl.maximum(given, 0.0))
    priority = tl.maximum(delta + eps, smallest)
    is_valid = (given >= 0) & (priority <= tl.load(limit))
    is_outside = (slot < 0) | (slot >= size)
    reason = tl.where(is_outside, _OUT_OF_RANGE, tl.where(is_valid, 0, _INVALID))
    return tl.where(is_outside, 0, slot), is_real, tl.where(is_real, reason, 0), priority


@jit
def _update(
    slots, error, stamp, real, generation, draws, num_draws, d, d_bits, largest, counts, limit, eps, smallest, kept,
    kept_d, result, size, count,
    counts_draws: tl.constexpr, squared: tl.constexpr, refuses: tl.constexpr, is_own: tl.constexpr,
    num_rows: tl.constexpr,
):  # fmt: skip
    batch = slots, error, stamp, real, limit, eps, smallest, size
    first = tl.cast(count, tl.int32)
    why = 0
    if refuses:
        for start in range(0, count, num_rows):
            rows = start + tl.arange(0, num_rows)
            slot, is_real, reason, _ = _inspect(batch, rows, count, squared)
            if counts_draws and stamp is None:
                is_empty = tl.load(generation + slot, mask=is_real, other=1) == 0
                is_empty = is_empty & (tl.load(draws + 4 * slot + 2, mask=is_real, other=1) == 0)
                reason = tl.where(is_empty & (reason == 0), _EMPTY, reason)
            wrong = tl.min(tl.where(reason != 0, rows, count), axis=0)
            if wrong < first:
                first = wrong
                why = tl.sum(tl.where(rows == wrong, reason, 0), axis=0)
    goes_on = first == tl.cast(count, tl.int32)
    now = 0
    if counts_draws:
        now = (tl.load(num_draws) & _NUMBERS).to(tl.int32)
    best = tl.load(largest)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, is_real, reason, priority = _inspect(batch, rows, count, squared)
        is_real = is_real & goes_on
        usable = is_real & (reason == 0)
        now_in_slot = tl.load(generation + slot, mask=usable, other=0)
        is_late = now_in_slot == 0
        if stamp is not None:
            is_late = is_late | (tl.load(stamp + rows, mask=usable, other=0) != now_in_slot)
        if counts_draws and not is_own:
            # the counts of draws may fall below 0, which means the same as 0
            waiting = draws + 4 * slot
            add(waiting + 3, -1, usable & is_late)
            if stamp is None:
                waits = usable & (is_late == 0) & (_waiting(waiting + 2, now, usable) > 0)
                # of several rows of a slot, as many are late as draws wait
                left = tl.atomic_add(waiting + 3, -1, mask=waits)
                is_late = is_late | (waits & (left > 0))
            add(waiting + 1, -1, usable & (is_late == 0))
        keeps = usable & (is_late == 0)
        add(counts, tl.sum((usable & is_late).to(tl.int64), axis=0))
        add(counts + 1, tl.sum((is_real & (reason != 0)).to(tl.int64), axis=0))
        # as it is stored, in float32
        priority = priority.to(tl.float32)
        best = tl.maximum(best, tl.max(tl.where(keeps, priority, 0.0), axis=0).to(tl.float64))
        tl.store(kept + rows, tl.where(keeps, slot, -1), mask=rows < count)
        tl.store(kept_d + rows, tl.where(keeps, priority, 0.0), mask=rows < count)
        # the last row of a slot leaves the largest mark
        tl.atomic_max(d_bits + slot, rows + _MARK, mask=keeps)
    for start in range(0, count, num_rows):
        tl.debug_barrier()
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        wins = tl.load(d_bits + slot, mask=slot >= 0, other=0) == rows + _MARK
        priority = tl.load(kept_d + rows, mask=wins, other=0.0)
        tl.debug_barrier()
        tl.store(d + slot, priority, mask=wins)
        tl.store(kept + rows, tl.where(wins, slot, -1), mask=rows < count)
        tl.store(kept_d + rows, priority, mask=rows < count)
    tl.store(largest, best)
    tl.store(result, tl.where(goes_on, 0, why).to(tl.int64))
    tl.store(result + 1, tl.cast(first, tl.int64))


def drawn(generation, slots, density, smallest, beta, draws, num_draws, weight, stamp):
    """See the loop of the same name."""
    # the smallest density of all slots, or those of this batch
    smallest = (smallest, 1) if len(smallest) else (density, len(density))
    state = beta, generation, some(draws), num_draws, some(weight), some(stamp), len(generation)
    in_one_block(_drawn, _TOGETHER, len(slots), slots, density, *smallest, *state)


def record(
    generation, number, draws, num_draws, d, largest, leaves, nodes, minima, pages, capacity, alpha, slots, stays
):
    """See the loop of the same name."""
    state = generation, number, d, largest, draws, num_draws, len(generation)
    in_one_block(_record, _TOGETHER, len(slots), slots, *state, stays=stays)
    if capacity:
        new = (largest, alpha) if stays else (leaves.new_zeros(1),)
        write(leaves, nodes, minima, pages, capacity, slots, *new)


def update(
    generation, draws, num_draws, d, largest, counts, limit, eps, smallest, squared, leaves, nodes, minima, pages,
    capacity, alpha, slots, error, stamp, real, counts_draws, refuses, is_own, kept, kept_d, result,
):  # fmt: skip
    """See the loop of the same name. The rows of ``kept`` stay where they are in the batch."""
    in_one_block(
        _update, _TOGETHER, len(slots), slots, error, some(stamp), some(real), generation, draws, num_draws, d,
        d.view(torch.int32), largest, counts, limit, eps, smallest, kept, kept_d, result, len(generation),
        counts_draws=counts_draws, squared=squared, refuses=refuses, is_own=is_own,
    )  # fmt: skip
    if capacity:
        write_power(leaves, nodes, minima, pages, capacity, kept, kept_d, alpha)
