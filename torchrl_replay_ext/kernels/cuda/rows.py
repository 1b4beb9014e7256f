"""The kernels of rows for CUDA; see :mod:`torchrl_replay_ext.kernels.rows`.

Each is one thread block, because the rows of a batch depend on each other: some have the same slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.tree import jit, write, write_power
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, NUMBERS, OUT_OF_RANGE, WINDOW

_OUT_OF_RANGE, _INVALID, _EMPTY = tl.constexpr(OUT_OF_RANGE), tl.constexpr(INVALID), tl.constexpr(EMPTY)
_NUMBERS, _WINDOW = tl.constexpr(NUMBERS), tl.constexpr(WINDOW)
# The bits of a float32 that is not a number: larger than those of any number.
_MARK = tl.constexpr(0x7F800001)
# rows that are processed together
_TOGETHER = 1024


@jit
def _waiting(draws, place, column: tl.constexpr, now, mask):
    """How many draws of a slot wait for their updates; ``column``: 0, or 2 for draws before the last write."""
    number = tl.load(draws + place + column, mask=mask, other=0)
    count = tl.load(draws + place + column + 1, mask=mask, other=0)
    return tl.where((((now - number) & _NUMBERS) <= _WINDOW) & (count > 0), count, 0)


@jit
def _drawn(
    slots, density, smallest, beta, generation, draws, num_draws, weight, stamp, count, size,
    has_weight: tl.constexpr, has_smallest: tl.constexpr, has_stamp: tl.constexpr, counts_draws: tl.constexpr,
    num_rows: tl.constexpr,
):  # fmt: skip
    if has_weight:
        exponent = -tl.load(beta)
        if has_smallest:
            least = tl.load(smallest).to(tl.float64) + tl.zeros([num_rows], tl.float64)
        else:
            lowest = tl.full([num_rows], float("inf"), tl.float64)
            for start in range(0, count, num_rows):
                rows = start + tl.arange(0, num_rows)
                found = tl.load(density + rows, mask=rows < count, other=0).to(tl.float64)
                lowest = tl.minimum(lowest, tl.where(rows < count, found, float("inf")))
            least = tl.min(lowest, axis=0) + tl.zeros([num_rows], tl.float64)
    now = 0
    if counts_draws:
        number = tl.load(num_draws) + 1
        now = (number & _NUMBERS).to(tl.int32)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        in_batch = rows < count
        slot = tl.load(slots + rows, mask=in_batch, other=-1)
        if has_weight:
            mass = tl.load(density + rows, mask=in_batch, other=0).to(tl.float64)
            can_be_drawn = (mass > 0) & (least > 0)
            ratio = tl.where(can_be_drawn, mass, 1.0) / tl.where(can_be_drawn, least, 1.0)
            result = tl.where(can_be_drawn, tl.exp2(exponent * tl.log2(ratio)), 0.0)
            tl.store(weight + rows, result.to(tl.float32), mask=in_batch)
        if has_stamp:
            place = tl.minimum(tl.maximum(slot, 0), size - 1)
            tl.store(stamp + rows, tl.load(generation + place, mask=in_batch, other=0), mask=in_batch)
        if counts_draws:
            valid = (slot >= 0) & (slot < size)
            place = 4 * tl.where(valid, slot, 0)
            # of several rows of a slot, the first ones set the same numbers, and all are counted after them
            is_known = tl.load(draws + place, mask=valid, other=0) == now
            waiting = _waiting(draws, place, 0, now, valid)
            tl.debug_barrier()
            tl.store(draws + place, now + tl.zeros([num_rows], tl.int32), mask=valid & (is_known == 0))
            tl.store(draws + place + 1, waiting, mask=valid & (is_known == 0))
            tl.debug_barrier()
            tl.atomic_add(draws + place + 1, tl.full([num_rows], 1, tl.int32), mask=valid)
            tl.debug_barrier()
    if counts_draws:
        tl.store(num_draws, number)


@jit
def _record(
    slots, generation, number, d, largest, draws, num_draws, count, size,
    stays: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    now = (tl.load(num_draws) & _NUMBERS).to(tl.int32)
    written = tl.load(number) + 1
    priority = -tl.load(largest).to(tl.float32)
    if not stays:
        priority = priority * 0.0
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        valid = (slot >= 0) & (slot < size)
        slot = tl.where(valid, slot, 0)
        tl.store(generation + slot, written * (1 if stays else 0) + tl.zeros([num_rows], tl.int64), mask=valid)
        tl.store(d + slot, priority + tl.zeros([num_rows], tl.float32), mask=valid)
        place = 4 * slot
        last = tl.load(draws + place, mask=valid, other=0)
        before = tl.load(draws + place + 2, mask=valid, other=0)
        waiting = _waiting(draws, place, 0, now, valid) + _waiting(draws, place, 2, now, valid)
        tl.debug_barrier()
        tl.store(draws + place, tl.zeros([num_rows], tl.int32), mask=valid)
        tl.store(draws + place + 1, tl.zeros([num_rows], tl.int32), mask=valid)
        tl.store(draws + place + 2, tl.where(last != 0, last, before), mask=valid)
        tl.store(draws + place + 3, waiting, mask=valid)
        tl.debug_barrier()
    tl.store(number, written)


@jit
def _inspect(
    slots, error, stamp, real, limit, eps, smallest, rows, count, size,
    has_stamp: tl.constexpr, has_real: tl.constexpr, squared: tl.constexpr,
):  # fmt: skip
    """The slots of some rows, 0 where they are wrong; which rows are real; why rows are wrong; and their priorities."""
    in_batch = rows < count
    slot = tl.load(slots + rows, mask=in_batch, other=0)
    given = tl.load(error + rows, mask=in_batch, other=0.0).to(tl.float64)
    is_real = in_batch
    if has_stamp:
        is_real = is_real & (tl.load(stamp + rows, mask=in_batch, other=0) >= 0)
    if has_real:
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
    kept_d, result, count, size,
    has_stamp: tl.constexpr, has_real: tl.constexpr, counts_draws: tl.constexpr, squared: tl.constexpr,
    refuses: tl.constexpr, is_own: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    first = tl.cast(count, tl.int32)
    why = 0
    if refuses:
        for start in range(0, count, num_rows):
            rows = start + tl.arange(0, num_rows)
            slot, is_real, reason, _ = _inspect(
                slots, error, stamp, real, limit, eps, smallest, rows, count, size, has_stamp, has_real, squared
            )
            if counts_draws and not has_stamp:
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
    num_late = tl.zeros([num_rows], tl.int64)
    num_invalid = tl.zeros([num_rows], tl.int64)
    best = tl.zeros([num_rows], tl.float64)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, is_real, reason, priority = _inspect(
            slots, error, stamp, real, limit, eps, smallest, rows, count, size, has_stamp, has_real, squared
        )
        is_real = is_real & goes_on
        usable = is_real & (reason == 0)
        now_in_slot = tl.load(generation + slot, mask=usable, other=0)
        is_late = now_in_slot == 0
        if has_stamp:
            is_late = is_late | (tl.load(stamp + rows, mask=usable, other=0) != now_in_slot)
        if counts_draws and not is_own:
            # the counts of draws may fall below 0, which means the same as 0
            tl.atomic_add(draws + 4 * slot + 3, tl.full([num_rows], -1, tl.int32), mask=usable & is_late)
            if not has_stamp:
                waits = usable & (is_late == 0) & (_waiting(draws, 4 * slot, 2, now, usable) > 0)
                # of several rows of a slot, as many are late as draws wait
                left = tl.atomic_add(draws + 4 * slot + 3, tl.full([num_rows], -1, tl.int32), mask=waits)
                is_late = is_late | (waits & (left > 0))
            tl.atomic_add(draws + 4 * slot + 1, tl.full([num_rows], -1, tl.int32), mask=usable & (is_late == 0))
        keeps = usable & (is_late == 0)
        num_late += (usable & is_late).to(tl.int64)
        num_invalid += (is_real & (reason != 0)).to(tl.int64)
        best = tl.maximum(best, tl.where(keeps, priority, 0.0))
        tl.store(kept + rows, tl.where(keeps, slot, -1), mask=rows < count)
        # the last row of a slot leaves the largest mark
        tl.atomic_max(d_bits + slot, rows + _MARK, mask=keeps)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        keeps = slot >= 0
        wins = keeps & (tl.load(d_bits + tl.where(keeps, slot, 0), mask=keeps, other=0) == rows + _MARK)
        _, _, _, priority = _inspect(
            slots, error, stamp, real, limit, eps, smallest, rows, count, size, has_stamp, has_real, squared
        )
        tl.store(kept + rows, tl.where(wins, slot, -1), mask=rows < count)
        tl.store(kept_d + rows, tl.where(wins, priority, 0.0).to(tl.float32), mask=rows < count)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        tl.store(d + tl.where(slot >= 0, slot, 0), tl.load(kept_d + rows, mask=rows < count, other=0.0), mask=slot >= 0)
    tl.store(largest, tl.maximum(tl.load(largest), tl.max(best, axis=0)))
    tl.store(counts, tl.load(counts) + tl.sum(num_late, axis=0))
    tl.store(counts + 1, tl.load(counts + 1) + tl.sum(num_invalid, axis=0))
    tl.store(result, tl.where(goes_on, 0, why).to(tl.int64))
    tl.store(result + 1, tl.cast(first, tl.int64))


def _together(count: int) -> dict[str, int]:
    rows = min(_TOGETHER, triton.next_power_of_2(count))
    return {"num_rows": rows, "num_warps": max(1, min(8, rows // 32))}


def drawn(generation, slots, density, smallest, beta, draws, num_draws, weight, stamp):
    """See the loop of the same name."""
    count = slots.shape[0]
    if count:
        _drawn[(1,)](
            slots, density, smallest, beta, generation, draws, num_draws, weight, stamp, count, generation.shape[0],
            has_weight=len(weight) > 0, has_smallest=len(smallest) > 0, has_stamp=len(stamp) > 0,
            counts_draws=len(draws) > 0, **_together(count),
        )  # fmt: skip


def record(
    generation, number, draws, num_draws, d, largest, leaves, nodes, minima, pages, capacity, alpha, slots, stays
):
    """See the loop of the same name."""
    count = slots.shape[0]
    _record[(1,)](
        slots, generation, number, d, largest, draws, num_draws, count, generation.shape[0],
        stays=stays, **_together(max(count, 1)),
    )  # fmt: skip
    if capacity and stays:
        write_power(leaves, nodes, minima, pages, capacity, slots, largest, alpha)
    elif capacity:
        write(leaves, nodes, minima, pages, capacity, slots, leaves.new_zeros(1))


def update(
    generation, draws, num_draws, d, largest, counts, limit, eps, smallest, squared, leaves, nodes, minima, pages,
    capacity, alpha, slots, error, stamp, real, counts_draws, refuses, is_own, kept, kept_d, result,
):  # fmt: skip
    """See the loop of the same name. The rows of ``kept`` stay where they are in the batch."""
    count = slots.shape[0]
    if count:
        _update[(1,)](
            slots, error, stamp, real, generation, draws, num_draws, d, d.view(torch.int32), largest, counts, limit,
            eps, smallest, kept, kept_d, result, count, generation.shape[0],
            has_stamp=len(stamp) > 0, has_real=len(real) > 0, counts_draws=counts_draws, squared=squared,
            refuses=refuses, is_own=is_own, **_together(count),
        )  # fmt: skip
    if capacity:
        write_power(leaves, nodes, minima, pages, capacity, kept, kept_d, alpha)
