"""The kernels of slices for CUDA; see :mod:`torchrl_replay_ext.kernels.slices`. A write is a single program."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from torchrl_replay_ext.kernels.cuda.lanes import assign
from torchrl_replay_ext.kernels.cuda.launch import in_blocks, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import put, tree_of

# slices of one thread block
_ROWS = 64


@jit
def _write(
    slots, lane_of, begins, ended, count, time, following, recent, num_lanes, length, rows, run, firsts, tree, size,
    is_padded: tl.constexpr,
):  # fmt: skip
    now = tl.load(time)
    for row in range(count):
        tl.debug_barrier()
        slot, lane = tl.load(slots + row), tl.load(lane_of + row)
        if (slot >= 0) & (slot < size) & (lane >= 0) & (lane < num_lanes):
            now += _modulo(slot - now - 1, size) + 1
            written, recent_of = tl.load(rows + lane), recent + lane * length
            last = tl.load(recent_of + (written + length - 1) % length)
            is_new = tl.load(begins + row) != 0
            steps = tl.where(is_new, 1, tl.load(run + lane) + 1)
            tl.debug_barrier()
            tl.store(following + slot, slot)
            tl.debug_barrier()
            tl.store(following + _modulo(last, size), slot, mask=(is_new == 0) & (now - last < size))
            tl.store(recent_of + written % length, now)
            tl.store(rows + lane, written + 1)
            tl.store(run + lane, tl.where(tl.load(ended + row) != 0, 0, steps))
            if firsts is not None:
                tl.store(firsts + slot, is_new)
            mass = tl.full([], 1 if is_padded else 0, tl.int64)
            put(tree, slot, mass if firsts is None else mass * is_new.to(tl.int64))
            tl.debug_barrier()
            if not is_padded:
                oldest = tl.load(recent_of + (written + 1) % length)
                start = _modulo(oldest, size)
                one = tl.full([], 1, tl.int64) if firsts is None else tl.load(firsts + start).to(tl.int64)
                put(tree, start, one, (steps >= length) & (now - oldest < size))
    tl.store(time, now)


@jit
def _modulo(number, size):
    # the divisor is added because the remainder of a negative number may be negative
    return (number % size + size) % size


@jit
def _walk(start, following, leaves, slots, mask, size, length, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    in_batch = rows < count
    slot = within(tl.load(start + rows, mask=in_batch, other=0), size)
    is_part = tl.load(leaves + slot) > 0
    for step in range(length):
        tl.store(slots + rows * length + step, slot, mask=in_batch)
        tl.store(mask + rows * length + step, is_part, mask=in_batch)
        following_slot = within(tl.load(following + slot), size)
        is_part = is_part & (following_slot != slot)
        slot = following_slot


def write(*arguments: Any) -> None:
    """See the loop of the same name."""
    slots, ended = arguments[3], arguments[5]
    is_padded, time, following, recent, rows, run, firsts, leaves, nodes, pages, capacity = arguments[9:]
    tree = tree_of(leaves, nodes, some(pages), capacity)
    state = time, following, recent, *recent.shape, rows, run, some(firsts), tree, min(len(following), capacity)
    _write[(1,)](slots, *assign(*arguments[:9]), ended, len(slots), *state, is_padded=is_padded, num_warps=1)


def walk(start, following, leaves, slots, mask):
    """See the loop of the same name."""
    size = min(len(following), len(leaves))
    in_blocks(_walk, _ROWS, len(start), start, following, leaves, slots, mask, size, slots.shape[1])
