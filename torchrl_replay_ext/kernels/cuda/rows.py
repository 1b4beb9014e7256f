"""The kernels of rows for CUDA; see :mod:`torchrl_replay_ext.kernels.rows`.

Each is one thread block, because the rows of a batch depend on each other: some have the same slot.
"""

from __future__ import annotations

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import add, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import write, write_power
from torchrl_replay_ext.kernels.layouts import EMPTY, INVALID, NOTHING, OUT_OF_RANGE, WINDOW

_OUT_OF_RANGE, _INVALID, _EMPTY = tl.constexpr(OUT_OF_RANGE), tl.constexpr(INVALID), tl.constexpr(EMPTY)
# from here on, the bits of a float32 that is not a number
_MARK = tl.constexpr(0x7F800001)
_NOTHING, _WINDOW = tl.constexpr(NOTHING), tl.constexpr(WINDOW)
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
            found = tl.load(smallest + rows, mask=rows < num_smallest, other=_NOTHING)
            least = tl.minimum(least, tl.min(found, axis=0).to(tl.float64))
    now = tl.load(draws) + 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        in_batch = rows < count
        slot = tl.load(slots + rows, mask=in_batch, other=-1)
        if weight is not None:
            mass = tl.load(density + rows, mask=in_batch, other=0).to(tl.float64)
            can_be_drawn = (mass > 0) & (least > 0)
            ratio = tl.where(can_be_drawn, mass, 1.0) / tl.where(can_be_drawn, least, 1.0)
            result = tl.exp2(-tl.load(beta) * tl.log2(ratio))
            tl.store(weight + rows, tl.where(can_be_drawn, result, 0.0), mask=in_batch)
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
def _update(
    generation, drawn_at, draws, d, largest, counts, limit, eps, smallest, slots, error, stamp, kept, kept_d, result,
    size, count, squared: tl.constexpr, refuses: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    # the number of draws, and of writes at the last one; the oldest valid row, and if it is newer, all are
    now, before = tl.load(draws), tl.load(draws + 1)
    oldest, first = before + 1, tl.cast(count, tl.int32)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        in_batch = rows < count
        slot = tl.load(slots + rows, mask=in_batch, other=0)
        delta = tl.load(error + rows, mask=in_batch, other=0.0).to(tl.float64)
        is_valid = delta >= 0
        if squared:
            delta = tl.sqrt(tl.maximum(delta, 0.0))
        priority = tl.maximum(delta + eps, smallest)
        is_valid = is_valid & (priority <= tl.load(limit))
        is_outside = (slot < 0) | (slot >= size)
        reason = tl.where(is_outside, _OUT_OF_RANGE, tl.where(is_valid, 0, _INVALID))
        written = tl.load(generation + slot, mask=in_batch & (reason == 0), other=2**62)
        oldest = tl.minimum(oldest, tl.min(written, axis=0))
        if refuses:
            if stamp is None:
                is_unknown = tl.load(drawn_at + slot, mask=written == 0, other=1) == 0
                reason = tl.where(is_unknown, _EMPTY, reason)
            first = tl.minimum(first, tl.min(tl.where(in_batch & (reason != 0), rows, count), axis=0))
        tl.store(kept + rows, tl.where(reason == 0, slot, -reason), mask=in_batch)
        tl.store(kept_d + rows, priority.to(tl.float32).to(tl.int32, bitcast=True), mask=in_batch)
    tl.debug_barrier()
    tl.store(result, -tl.load(kept + first, mask=first < count, other=0))
    tl.store(result + 1, first.to(tl.int64))
    tl.debug_barrier()
    # the bits of floats >= 0 are ordered like the floats
    best = tl.cast(0, tl.int32)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        in_batch = (rows < count) & (first == count)
        slot = tl.load(kept + rows, mask=in_batch, other=-1)
        is_usable = slot >= 0
        written = tl.load(generation + slot, mask=is_usable, other=0)
        is_late = written == 0
        if stamp is not None:
            is_late = is_late | (tl.load(stamp + rows, mask=is_usable, other=0) != written)
        else:
            last = tl.load(drawn_at + slot, mask=is_usable, other=0)
            is_late = is_late | ((oldest <= before) & (last < 0) & (now + last < _WINDOW))
        keeps = is_usable & (is_late == 0)
        add(counts, tl.sum((is_usable & is_late).to(tl.int64), axis=0))
        add(counts + 1, tl.sum((in_batch & (slot < 0)).to(tl.int64), axis=0))
        best = tl.maximum(best, tl.max(tl.load(kept_d + rows, mask=keeps, other=0), axis=0))
        tl.store(kept + rows, tl.where(keeps, slot, -1), mask=rows < count)
        # the last row of a slot leaves the largest mark
        tl.atomic_max(d + slot, rows + _MARK, mask=keeps, sem="relaxed")
    tl.store(largest, tl.maximum(tl.load(largest), best.to(tl.float32, bitcast=True).to(tl.float64)))
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        last = tl.load(d + slot, mask=slot >= 0, other=0) - _MARK
        priority = tl.load(kept_d + rows, mask=slot >= 0, other=0)
        tl.atomic_max(kept_d + last, priority, mask=slot >= 0, sem="relaxed")
        tl.store(kept + rows, tl.where(last == rows, slot, -1), mask=rows < count)
    tl.debug_barrier()
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(kept + rows, mask=rows < count, other=-1)
        priority = tl.load(kept_d + rows, mask=slot >= 0, other=0)
        tl.store(kept_d + rows, priority, mask=rows < count)
        tl.store(d + slot, priority, mask=slot >= 0)


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
    state = generation, drawn_at, draws, d.view(torch.int32), largest, counts, limit, eps, smallest
    rows = slots, error, some(stamp), kept, kept_d.view(torch.int32), result, len(generation)
    in_one_block(_update, _TOGETHER, len(slots), *state, *rows, squared=squared, refuses=refuses)
    if capacity:
        write_power(leaves, nodes, minima, pages, capacity, kept, kept_d, alpha)
