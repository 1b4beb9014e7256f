"""A loop that stores stacks of frames, each frame once.

A row of a write has the k frames of its observation and the newest frame of the next observation. A *code* stands for a
frame: the id of a stored one, or -1 - i for the i-th one of all rows. The arrays of the state:

* ``frames``: the bytes of all frames, as 8-byte integers if possible. The frame with id 0 is that of zeros.
* ``ids``, int32 [slots, k + 1]: the frames of each slot. ``references``, int32 [frames]: how many ids refer to a frame.
* ``free``, int32 [frames]: ids without references; the last element is their number.
* ``streams``, int64 [3, streams]: of the trajectories that were written most recently the id, the slot of the last
  transition, and its number among all written rows, from 1 on; 0 if there is none.
* ``counts``, int64 [3]: new frames that found no place, rows whose stacks are not one step apart, and written rows.

Loops stay in range whatever the arrays hold.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part

# numbers that are compared at once
_TOGETHER = 64


@part
def _within(number, count):
    return min(max(np.int64(number), 0), count - 1)


@part
def _same(first, begin, second, other_begin, count):
    """True if ``count`` numbers of two arrays are equal, from ``begin`` and ``other_begin`` on."""
    for done in range(0, count, _TOGETHER):
        difference = 0
        for j in range(done, min(done + _TOGETHER, count)):
            difference |= first[begin + j] ^ second[other_begin + j]
        if difference != 0:
            return False
    return True


@part
def _find(code, before, after, frames, k, length):
    """The array that holds a frame, and where the frame begins."""
    row, number = (-1 - code) // (k + 1), (-1 - code) % (k + 1)
    if code >= 0:
        return frames, code * length
    return (before, (row * k + number) * length) if number < k else (after, (row * k + k - 1) * length)


@part
def _is(code, other, before, after, frames, k, length):
    first, begin = _find(code, before, after, frames, k, length)
    second, other_begin = _find(other, before, after, frames, k, length)
    return _same(first, begin, second, other_begin, length)


@part
def _stream_of(trajectory, streams):
    """The stream of ``trajectory``, or the one that was written to least recently."""
    best = 0
    for stream in range(streams.shape[1]):
        if streams[0, stream] == trajectory and streams[2, stream] > 0:
            return stream
        if streams[2, stream] < streams[2, best]:
            best = stream
    return best


@part
def _exchange(by, slots, codes, ids, references, free):
    """Add ``by`` to the references of ``codes``, and subtract it from those of the frames that ``slots`` hold.

    Frames without references are put behind the free ones. Returns the number of free frames.
    """
    num_free = _within(free[-1], free.shape[0])
    for code in codes:
        if code >= 0:
            references[code] += by
    for i in range(codes.shape[0]):
        slot = _within(slots[i // ids.shape[1]], ids.shape[0])
        old = _within(ids[slot, i % ids.shape[1]], references.shape[0])
        references[old] -= by
        if references[old] == 0:
            free[_within(num_free, free.shape[0] - 1)] = old
            num_free += 1
    return num_free


@loop
def write(slots, before, after, trajectory, refuses, frames, ids, references, free, streams, counts, refused):
    """Write the stacks ``before`` and ``after`` of n transitions to ``slots`` [n], in order.

    A frame is shared if it is equal to that of the last transition of its ``trajectory`` [n], to the frame before it,
    or to that of zeros. If ``refuses``, no frame or row is written where ``counts`` would count one: ``refused`` [1] is
    then the first row whose stacks are not one step apart, or n if there are too few free frames; otherwise -1.
    """
    size, width, num_frames = ids.shape[0], ids.shape[1], references.shape[0]
    k, total, length = width - 1, slots.shape[0] * width, frames.shape[0] // num_frames
    num_apart, num_new, codes = 0, 0, np.empty(total, np.int64)
    last, slot, shared = np.int64(-1), np.int64(-1), np.int64(0)
    refused[0] = slots.shape[0]
    for row in range(slots.shape[0]):
        begin = row * k * length
        if not _same(before, begin + length, after, begin, (k - 1) * length):
            num_apart += 1
            refused[0] = min(refused[0], row)
    for i in range(total):
        row, number = i // width, i % width
        if number == 0:
            stream = _stream_of(trajectory[row], streams)
            is_known = streams[0, stream] == trajectory[row] and streams[2, stream] > 0
            # the last row of the trajectory, if it belongs to this write, and its slot
            last = min(streams[2, stream] - counts[2] - 1, row - 1) if is_known else -1
            slot = _within(streams[1, stream], size) if is_known else -1
            streams[0, stream], streams[1, stream], streams[2, stream] = (
                trajectory[row],
                slots[row],
                counts[2] + row + 1,
            )
        shared, previous = np.int64(0), codes[i - 1] if number > 0 else np.int64(0)
        if number < k and last >= 0:
            shared = codes[last * width + number + 1]
        elif number < k and slot >= 0:
            shared = _within(ids[slot, number + 1], num_frames)
        codes[i] = -1 - i
        for code in (shared, previous, np.int64(0)):
            if _is(-1 - i, code, before, after, frames, k, length):
                codes[i] = code
                break
        num_new += codes[i] == -1 - i
    counts[2] += slots.shape[0]
    num_free = _exchange(1, slots, codes, ids, references, free)
    if refuses and (num_apart > 0 or num_new > num_free):
        _exchange(-1, slots, codes, ids, references, free)
        return
    counts[0] += max(num_new - num_free, 0)
    counts[1] += num_apart
    for i in range(total):
        code = codes[i]
        if code < 0:
            codes[i] = 0 if code == -1 - i else codes[-1 - code]
        if code == -1 - i and num_free > 0:
            num_free -= 1
            codes[i] = _within(free[_within(num_free, free.shape[0] - 1)], num_frames)
            array, begin = _find(code, before, after, frames, k, length)
            for j in range(length):
                frames[codes[i] * length + j] = array[begin + j]
        references[codes[i]] += code < 0
        ids[_within(slots[i // width], size), i % width] = codes[i]
    free[-1], refused[0] = num_free, -1
