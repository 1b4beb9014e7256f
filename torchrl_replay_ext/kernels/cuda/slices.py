"""The kernels of slices for CUDA; see :mod:`torchrl_replay_ext.kernels.slices`. A write is a single program."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from torchrl_replay_ext.kernels.cuda.lanes import assign
from torchrl_replay_ext.kernels.cuda.tree import in_blocks, jit, put, tree_of

# slices of one thread block
_ROWS = 64


@jit
def _write(
    slots, lane_of, begins, ended, count, time, following, size, recent, num_lanes, length, rows, run, tree,
    is_padded: tl.constexpr,
):  # fmt: skip
    now = tl.load(time)
    for row in range(count):
        tl.debug_barrier()
        slot, lane = tl.load(slots + row), tl.load(lane_of + row)
        mask = (slot >= 0) & (slot < size) & (lane >= 0) & (lane < num_lanes)
        slot, lane = tl.where(mask, slot, 0), tl.where(mask, lane, 0)
        # the divisor is added because the remainder of a negative number may be negative
        now = tl.where(mask, now + ((slot - now - 1) % size + size) % size + 1, now)
        is_new = tl.load(begins + row) != 0
        written = tl.load(rows + lane)
        last = tl.load(recent + lane * length + (written + length - 1) % length)
        steps = tl.where(is_new, 1, tl.load(run + lane) + 1)
        goes_on = mask & (is_new == 0) & (now - last < size)
        tl.debug_barrier()
        tl.store(following + slot, slot, mask=mask)
        tl.debug_barrier()
        tl.store(following + (last % size + size) % size, slot, mask=goes_on)
        tl.store(recent + lane * length + written % length, now, mask=mask)
        tl.store(rows + lane, written + 1, mask=mask)
        tl.store(run + lane, tl.where(tl.load(ended + row) != 0, 0, steps), mask=mask)
        put(tree, slot, tl.full((), 1 if is_padded else 0, tl.int64), mask)
        if not is_padded:
            first = tl.load(recent + lane * length + (written + 1) % length)
            begin = mask & (steps >= length) & (now - first < size)
            put(tree, (first % size + size) % size, tl.full((), 1, tl.int64), begin)
    tl.store(time, now)


@jit
def _walk(start, following, leaves, slots, mask, size, length, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    in_batch = rows < count
    slot = tl.minimum(tl.maximum(tl.load(start + rows, mask=in_batch, other=0), 0), size - 1)
    is_part = tl.load(leaves + slot) > 0
    for step in range(length):
        tl.store(slots + rows * length + step, slot, mask=in_batch)
        tl.store(mask + rows * length + step, is_part, mask=in_batch)
        following_slot = tl.minimum(tl.maximum(tl.load(following + slot).to(tl.int64), 0), size - 1)
        is_part = is_part & (following_slot != slot)
        slot = following_slot


def write(*arguments: Any) -> None:
    """See the loop of the same name."""
    assigned = assign(*arguments[:9])
    if assigned is None:
        return
    slots, ended = arguments[3], arguments[5]
    is_padded, time, following, recent, rows, run, *tree = arguments[9:]
    _write[(1,)](
        slots, *assigned, ended, len(slots), time, following, min(len(following), tree[-1]), recent,
        *recent.shape, rows, run, tree_of(*tree), is_padded=is_padded, num_warps=1,
    )  # fmt: skip


def walk(start, following, leaves, slots, mask):
    """See the loop of the same name."""
    size = min(len(following), len(leaves))
    in_blocks(_walk, _ROWS, len(start), start, following, leaves, slots, mask, size, slots.shape[1])
