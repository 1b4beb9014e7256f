"""The kernels of frames for CUDA; see :mod:`torchrl_replay_ext.kernels.frames`.

A single program follows the trajectories, one program per frame compares it, a single program counts references and
assigns places, and one program per frame copies it. The code of a frame of the write may be another frame of the write.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import add, jit, within

# numbers of a frame, or frames, that are processed together
_BLOCK = tl.constexpr(1024)


@jit
def _find(code, before, after, frames, k, length):
    row, number = (-1 - code) // (k + 1), (-1 - code) % (k + 1)
    given = tl.where(number < k, before + (row * k + number) * length, after + (row * k + k - 1) * length)
    return tl.where(code >= 0, frames + code * length, given)


@jit
def _differ(first, second, count):
    differ = tl.zeros([_BLOCK], tl.int32)
    for begin in range(0, count, _BLOCK):
        j = begin + tl.arange(0, _BLOCK)
        one, other = tl.load(first + j, mask=j < count, other=0), tl.load(second + j, mask=j < count, other=0)
        differ |= (one != other).to(tl.int32)
    return tl.max(differ, axis=0)


@jit
def _follow(slots, trajectory, streams, counts, last, count, size, num_streams, block: tl.constexpr):
    """The slot of the last transition of each row's trajectory, -1 - row if it is in this write, ``size`` if none."""
    stream, written = tl.arange(0, block), tl.load(counts + 2)
    exists = stream < num_streams
    ids = tl.load(streams + stream, mask=exists, other=0)
    slot = tl.load(streams + num_streams + stream, mask=exists, other=0)
    number = tl.load(streams + 2 * num_streams + stream, mask=exists, other=2**62)
    for row in range(count):
        own = tl.load(trajectory + row)
        is_own = exists & (ids == own) & (number > 0)
        is_next = stream == tl.argmin(tl.where(is_own, -1, number), axis=0)
        in_write = tl.minimum(tl.maximum(number - written - 1, -1), row - 1)
        found = tl.where(in_write >= 0, -1 - in_write, within(slot, size))
        tl.store(last + row, tl.min(tl.where(is_own & is_next, found, size), axis=0))
        ids, slot = tl.where(is_next, own, ids), tl.where(is_next, tl.load(slots + row), slot)
        number = tl.where(is_next, written + row + 1, number)
    tl.store(streams + stream, ids, mask=exists)
    tl.store(streams + num_streams + stream, slot, mask=exists)
    tl.store(streams + 2 * num_streams + stream, number, mask=exists)
    tl.debug_barrier()
    tl.store(counts + 2, written + count)


@jit
def _compare(before, after, frames, ids, last, codes, counts, refused, k, length, size, num_frames, refuses):
    i = tl.program_id(0).to(tl.int64)
    row, number = i // (k + 1), i % (k + 1)
    if number == 0:
        begin = row * k * length
        is_apart = _differ(before + begin + length, after + begin, (k - 1) * length) > 0
        tl.atomic_min(refused, row, mask=is_apart)
        add(counts + 1, 1, is_apart & (refuses == 0))
    found = tl.load(last + row)
    is_stored = (found >= 0) & (found < size) & (number < k)
    shared = within(tl.load(ids + found * (k + 1) + number + 1, mask=is_stored, other=0), num_frames)
    shared = tl.where((found < 0) & (number < k), -1 - ((-1 - found) * (k + 1) + number + 1), shared)
    code, frame = -1 - i, _find(-1 - i, before, after, frames, k, length)
    for attempt in tl.static_range(3):
        other = shared if attempt == 0 else tl.where((attempt == 1) & (number > 0), -i, 0)
        if code == -1 - i:
            differ = _differ(frame, _find(other, before, after, frames, k, length), length)
            code = tl.where(differ > 0, code, other)
    tl.store(codes + i, code)


@jit
def _place_of(i, mask, slots, width, size):
    return within(tl.load(slots + i // width, mask=mask, other=0), size) * width + i % width


@jit
def _exchange(by: tl.constexpr, slots, codes, ids, references, free, total, width, size, num_frames):
    """See the loop of the same name."""
    num_free = within(tl.load(free + num_frames - 1), num_frames)
    for begin in range(0, total, _BLOCK):
        i = begin + tl.arange(0, _BLOCK)
        code = tl.load(codes + i, mask=i < total, other=-1)
        add(references + code, by, code >= 0)
    tl.debug_barrier()
    for begin in range(0, total, _BLOCK):
        i = begin + tl.arange(0, _BLOCK)
        mask = i < total
        old = within(tl.load(ids + _place_of(i, mask, slots, width, size), mask=mask, other=0), num_frames)
        is_freed = mask & (tl.atomic_add(references + old, -by, mask=mask) == by)
        place = num_free + tl.cumsum(is_freed.to(tl.int64), axis=0) - 1
        tl.store(free + within(place, num_frames - 1), old, mask=is_freed)
        num_free += tl.sum(is_freed.to(tl.int64), axis=0)
    tl.debug_barrier()
    return num_free


@jit
def _link(slots, codes, given, ids, references, free, counts, refused, count, width, size, num_frames, refuses):
    total, num_new = count * width, tl.full((), 0, tl.int64)
    for begin in range(0, total, _BLOCK):
        i = (begin + tl.arange(0, _BLOCK)).to(tl.int64)
        code, moves = tl.load(codes + i, mask=i < total, other=0), 1
        while moves > 0:
            first = tl.where(code < 0, tl.load(codes - 1 - code, mask=code < 0, other=0), code)
            moves = tl.max((first != code).to(tl.int32), axis=0)
            code = first
        tl.store(codes + i, code, mask=i < total)
        num_new += tl.sum((code == -1 - i).to(tl.int64), axis=0)
    tl.debug_barrier()
    left = _exchange(1, slots, codes, ids, references, free, total, width, size, num_frames)
    if refuses & ((tl.load(refused) < count) | (left < num_new)):
        _exchange(-1, slots, codes, ids, references, free, total, width, size, num_frames)
    else:
        tl.store(counts, tl.load(counts) + tl.maximum(num_new - left, 0))
        for begin in range(0, total, _BLOCK):
            i = (begin + tl.arange(0, _BLOCK)).to(tl.int64)
            code = tl.load(codes + i, mask=i < total, other=0)
            is_new = code == -1 - i
            place = left - tl.cumsum(is_new.to(tl.int64), axis=0)
            number = tl.load(free + within(place, num_frames - 1), mask=is_new & (place >= 0), other=0)
            tl.store(given + i, within(number, num_frames), mask=i < total)
            left -= tl.sum(is_new.to(tl.int64), axis=0)
            # the frame that a code stands for is in this block or in one before
            tl.debug_barrier()
            number = tl.where(code < 0, tl.load(given - 1 - code, mask=code < 0, other=0), code)
            add(references + number, 1, code < 0)
            tl.store(ids + _place_of(i, i < total, slots, width, size), number, mask=i < total)
        tl.store(free + num_frames - 1, tl.maximum(left, 0))
        tl.store(refused, -1)


@jit
def _copy(before, after, frames, given, refused, k, length):
    i = tl.program_id(0).to(tl.int64)
    place = tl.load(given + i)
    if (place > 0) & (tl.load(refused) < 0):
        frame = _find(-1 - i, before, after, frames, k, length)
        for begin in range(0, length, _BLOCK):
            j = begin + tl.arange(0, _BLOCK)
            tl.store(frames + place * length + j, tl.load(frame + j, mask=j < length), mask=j < length)


def write(slots, before, after, trajectory, refuses, frames, ids, references, free, streams, counts, refused):
    """See the loop of the same name."""
    count, (size, width), num_frames, num_streams = len(slots), ids.shape, len(references), streams.shape[1]
    k, length, rows = width - 1, len(frames) // num_frames, (before, after, frames)
    last, (codes, given) = torch.empty_like(slots), slots.new_empty(2, count * width)
    refused.fill_(count)
    block = triton.next_power_of_2(num_streams)
    _follow[(1,)](slots, trajectory, streams, counts, last, count, size, num_streams, block=block, num_warps=1)
    _compare[(count * width,)](*rows, ids, last, codes, counts, refused, k, length, size, num_frames, refuses)
    state = ids, references, free, counts, refused
    _link[(1,)](slots, codes, given, *state, count, width, size, num_frames, refuses)
    _copy[(count * width,)](*rows, given, refused, k, length)
