"""The kernels of rows for CUDA; see :mod:`torchrl_replay_ext.kernels.rows`.

Each is one thread block, because the rows of a batch depend on each other: some have the same slot.
"""

from __future__ import annotations

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import add, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import write, write_power
from torchrl_replay_ext.kernels.layouts import EMPTY, INVALID, OUT_OF_RANGE, WINDOW

_OUT_OF_RANGE, _INVALID, _EMPTY = tl.constexpr(OUT_OF_RANGE), tl.constexpr(INVALID), tl.constexpr(EMPTY)
_WINDOW = tl.constexpr(WINDOW)
# the bits of a float32 that is not a number
_MARK = tl.constexpr(0x7F800001)
# rows that are processed together
_TOGETHER = 1024


@jit
def _drawn(
    slots, density, smallest, num_smallest, beta, generation, number, drawn_at, draws, weight, stamp, size, count,
    num_rows: tl.constexpr,
):  # fmt: skip
    least = tl.full([num_rows], float("inf"), tl.float64)
    if weight is not None:
        for start in range(0, num_smallest, num_rows):
            rows = start + tl.arange(0, num_rows)
            found = tl.load(smallest + rows, mask=rows < num_smallest, other=0).to(tl.float64)
            least = tl.minimum(least, tl.where(rows < num_smallest, found, float("inf")))
    least = tl.min(least, axis=0) + tl.zeros([num_rows], tl.float64)
    now = tl.load(draws) + 1
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
        if drawn_at is not None:
            tl.store(drawn_at + slot, now, mask=(slot >= 0) & (slot < size))
    if drawn_at is not None:
        tl.debug_barrier()
        tl.store(draws, now)
        tl.store(draws + 1, tl.load(number))


@jit
def _record(slots, generation, number, drawn_at, d, largest, size, count, stays: tl.constexpr, num_rows: tl.constexpr):
    written = tl.load(number) + 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        valid = (slot >= 0) & (slot < size)
        tl.store(generation + slot, written if stays else 0, mask=valid)
        tl.store(d + slot, -tl.load(largest).to(tl.float32) if stays else 0.0, mask=valid)
        # the same for all rows of a slot
        tl.store(drawn_at + slot, -tl.abs(tl.load(drawn_at + slot, mask=valid, other=0)), mask=valid)
    tl.debug_barrier()
    tl.store(number, written)


@jit
def _inspect(batch, rows, count, squared: tl.constexpr):
    """The slots of some rows, 0 where they are wrong; why rows are wrong; and their priorities."""
    slots, error, limit, eps, smallest, size = batch
    in_batch = rows < count
    slot = tl.load(slots + rows, mask=in_batch, other=0)
    given = tl.load(error + rows, mask=in_batch, other=0.0).to(tl.float64)
    delta = given
    if squared:
        delta = tl.sqrt(tl.maximum(given, 0.0))
    priority = tl.maximum(delta + eps, smallest)
    is_valid = (given >= 0) & (priority <= tl.load(limit))
    is_outside = (slot < 0) | (slot >= size)
    reason = tl.where(is_outside, _OUT_OF_RANGE, tl.where(is_valid, 0, _INVALID))
    return tl.where(is_outside, 0, slot), tl.where(in_batch, reason, 0), priority


@jit
def _update(
    slots, error, stamp, generation, drawn_at, draws, d, d_bits, largest, counts, limit, eps, smallest, kept, kept_d,
    result, size, count, squared: tl.constexpr, refuses: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    batch = slots, error, limit, eps, smallest, size
    first = tl.cast(count, tl.int32)
    why = 0
    # the number of draws, and of writes at the last one; the oldest valid row, and if it is newer, all are
    now, before = tl.load(draws), tl.load(draws + 1)
    oldest = before + 1
    if refuses or stamp is None:
        for start in range(0, count, num_rows):
            rows = start + tl.arange(0, num_rows)
            slot, reason, _ = _inspect(batch, rows, count, squared)
            written = tl.load(generation + slot, mask=(rows < count) & (reason == 0), other=2**62)
            oldest = tl.minimum(oldest, tl.min(written, axis=0))
            if refuses:
                if stamp is None:
                    is_empty = (written == 0) & (tl.load(drawn_at + slot) == 0)
                    reason = tl.where(is_empty, _EMPTY, reason)
                wrong = tl.min(tl.where(reason != 0, rows, count), axis=0)
                if wrong < first:
                    first = wrong
                    why = tl.sum(tl.where(rows == wrong, reason, 0), axis=0)
    goes_on = first == tl.cast(count, tl.int32)
    best = tl.load(largest)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, reason, priority = _inspect(batch, rows, count, squared)
        in_batch = (rows < count) & goes_on
        usable = in_batch & (reason == 0)
        written = tl.load(generation + slot, mask=usable, other=0)
        is_late = written == 0
        if stamp is not None:
            is_late = is_late | (tl.load(stamp + rows, mask=usable, other=0) != written)
        else:
            last = tl.load(drawn_at + slot, mask=usable, other=0)
            is_late = is_late | ((oldest <= before) & (last < 0) & (now + last < _WINDOW))
        keeps = usable & (is_late == 0)
        add(counts, tl.sum((usable & is_late).to(tl.int64), axis=0))
        add(counts + 1, tl.sum((in_batch & (reason != 0)).to(tl.int64), axis=0))
        # as it is stored, in float32
        priority = priority.to(tl.float32)
        best = tl.maximum(best, tl.max(tl.where(keeps, priority, 0.0), axis=0).to(tl.float64))
        tl.store(kept + rows, tl.where(keeps, slot, -1), mask=rows < count)
        tl.store(kept_d + rows, tl.where(keeps, priority, 0.0), mask=rows < count)
        tl.store(d + slot, 0.0, mask=keeps)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        # the bits of floats >= 0 are ordered like the floats
        bits = tl.load(kept_d + rows, mask=rows < count, other=0.0).to(tl.int32, bitcast=True)
        tl.atomic_max(d_bits + slot, bits, mask=slot >= 0)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        # one row of a slot gets its largest priority, the others get the mark that this row leaves
        bits = tl.atomic_xchg(d_bits + slot, _MARK, mask=slot >= 0)
        is_it = (slot >= 0) & (bits != _MARK)
        tl.store(kept + rows, tl.where(is_it, slot, -1), mask=rows < count)
        tl.store(kept_d + rows, tl.where(is_it, bits.to(tl.float32, bitcast=True), 0.0), mask=rows < count)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        tl.store(d + slot, tl.load(kept_d + rows, mask=slot >= 0, other=0.0), mask=slot >= 0)
    tl.store(largest, best)
    tl.store(result, tl.where(goes_on, 0, why).to(tl.int64))
    tl.store(result + 1, tl.cast(first, tl.int64))


def drawn(generation, slots, density, smallest, beta, number, drawn_at, draws, weight, stamp):
    """See the loop of the same name."""
    # the smallest density of all slots, or those of this batch
    smallest = (smallest, 1) if len(smallest) else (density, len(density))
    state = beta, generation, number, some(drawn_at), draws, some(weight), some(stamp), len(generation)
    in_one_block(_drawn, _TOGETHER, len(slots), slots, density, *smallest, *state)


def record(generation, number, drawn_at, d, largest, leaves, nodes, minima, pages, capacity, alpha, slots, stays):
    """See the loop of the same name."""
    state = generation, number, drawn_at, d, largest, len(generation)
    in_one_block(_record, _TOGETHER, len(slots), slots, *state, stays=stays)
    if capacity:
        new = (largest, alpha) if stays else (leaves.new_zeros(1),)
        write(leaves, nodes, minima, pages, capacity, slots, *new)


def update(
    generation, drawn_at, draws, d, largest, counts, limit, eps, smallest, squared, leaves, nodes, minima, pages,
    capacity, alpha, slots, error, stamp, refuses, kept, kept_d, result,
):  # fmt: skip
    """See the loop of the same name. The rows of ``kept`` stay where they are in the batch."""
    in_one_block(
        _update, _TOGETHER, len(slots), slots, error, some(stamp), generation, drawn_at, draws, d, d.view(torch.int32),
        largest, counts, limit, eps, smallest, kept, kept_d, result, len(generation), squared=squared, refuses=refuses,
    )  # fmt: skip
    if capacity:
        write_power(leaves, nodes, minima, pages, capacity, kept, kept_d, alpha)
