"""A loop that stores stacks of frames, each frame once.

A row of a write has the k frames of its observation and, of the next observation, the newest frame, or with n-step
transitions all k. The arrays:

* ``before``, ``after``, [n, k, words]: the stacks of the rows; bytes, as 8-byte integers if possible.
* ``streams``, int64 [2, streams]: the ids of the trajectories that were written most recently, and when. Of each, the
  m frames that were seen last: ``recent``, [streams, m, words]; ``held``, int32 [streams, m], their numbers; ``seen``,
  int64 [streams, m], when.
* ``ids``, int32 [slots, k + 1 or 2k]: the frames of each slot. ``references``, int32 [frames]: how often a frame is in
  ``ids`` and ``held``. ``free``, int32 [frames]: the frames without references; the last element is their number.
* ``frames``, [frames, words]: the frames; 0 is that of zeros. If ``targets``, int64 [n · (k + 1 or 2k)], is not empty,
  the frames are on an accelerator: ``frames`` gets the new ones, one after another, and ``targets`` where they belong.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part

# words that are compared at once
_TOGETHER = 64


@part
def _same(first, second):
    for begin in range(0, first.shape[0], _TOGETHER):
        difference = 0
        for word in range(begin, min(begin + _TOGETHER, first.shape[0])):
            difference |= first[word] ^ second[word]
        if difference != 0:
            return False
    return True


@part
def _stream_of(trajectory, streams):
    """The stream of ``trajectory``, or the one that was written to least recently."""
    oldest = 0
    for stream in range(streams.shape[1]):
        if streams[0, stream] == trajectory:
            return stream
        if streams[1, stream] < streams[1, oldest]:
            oldest = stream
    return oldest


@part
def _release(names, references, free, num_free):
    """Remove a reference to each frame of ``names``. Returns the number of free frames."""
    for frame in names:
        references[frame] -= 1
        if references[frame] == 0:
            free[num_free] = frame
            num_free += 1
    return num_free


@part
def _frame(row, i, before, after, width):
    """The frame ``i`` of the ``width`` frames of a row."""
    k = before.shape[1]
    return before[row, i] if i < k else after[row, i - width + k]


@loop
def write(slots, trajectory, before, after, streams, recent, held, seen, frames, ids, references, free, targets):
    """Store rows of the trajectories ``trajectory`` [n] in ``slots`` [n], distinct; an error changes no row or frame.

    A frame is not stored if it is equal to that of zeros, to the frame before it in its row, or to one of the m frames
    of its trajectory that were seen last.
    """
    count, k, now, width, memory = slots.shape[0], before.shape[1], streams[1].max(), ids.shape[1], held.shape[1]
    num_free, num_new, blank = np.int64(free[-1]), 0, np.zeros_like(recent[0, 0])
    # of each frame of the rows its number, or -1 - j for the new frame j; likewise of those that were seen last
    found, known, times = np.empty((count, width), np.int64), held.astype(np.int64), seen.copy()
    # of each new frame the row, its place there and in ``held``, and its number
    source, stream_of = np.empty((count * width, 4), np.int64), np.empty(count, np.int64)
    for row in range(count):
        for i in range(1, k if width == k + 1 else 0):
            if not _same(before[row, i], after[row, i - 1]):
                raise ValueError(
                    "FrameStackStorage: the next observation of a row is not its observation shifted by one frame. "
                    "Frames must be stacked along the first dimension of an observation, the newest last. For n-step "
                    "transitions, pass n_step= their n."
                )
        stream = stream_of[row] = _stream_of(trajectory[row], streams)
        streams[0, stream], streams[1, stream] = trajectory[row], now + 1 + row
        # where the next frame is probably: after the one that was found before
        place = np.argmin(times[stream])
        for i in range(width):
            frame, is_new = _frame(row, i, before, after, width), True
            if _same(frame, blank):
                found[row, i], is_new = 0, False
            elif i > 0 and _same(frame, _frame(row, i - 1, before, after, width)):
                found[row, i], is_new = found[row, i - 1], False
            for step in range(memory if is_new else 0):
                at = (place + step) % memory
                j = -1 - known[stream, at]
                other = recent[stream, at] if j < 0 else _frame(source[j, 0], source[j, 1], before, after, width)
                if _same(frame, other):
                    found[row, i], place, is_new = known[stream, at], at + 1, False
                    times[stream, at] = (now + 1 + row) * width + i
                    break
            if is_new:
                at = np.argmin(times[stream])
                found[row, i] = known[stream, at] = -1 - num_new
                source[num_new, 0], source[num_new, 1], source[num_new, 2] = row, i, at
                times[stream, at] = (now + 1 + row) * width + i
                num_new += 1
    # frames of streams are not freed with those of the slots
    for slot in slots:
        num_free = _release(ids[slot], references, free, num_free)
    if num_new > num_free:
        for slot in slots:
            for frame in ids[slot]:
                references[frame] += 1
        raise RuntimeError(
            "FrameStackStorage: stored transitions need all frames, because the trajectories are too short. Pass a "
            "larger frame_capacity=; a trajectory of L steps needs L + 1 frames. If there are more than 64 "
            "simultaneous trajectories, also pass episodes=Episodes(num_streams=<their number>)."
        )
    seen[:] = times
    num_stored = 0
    for row in range(count):
        own, stream = ids[slots[row]], stream_of[row]
        for i in range(width):
            j = -1 - found[row, i]
            if j == num_stored:
                num_free -= 1
                new, at, target = np.int64(free[num_free]), source[j, 2], j
                if targets.shape[0] > 0:
                    targets[j] = new
                else:
                    target = new
                frames[target] = recent[stream, at] = _frame(row, i, before, after, width)
                references[new] += 1
                num_free = _release(held[stream, at : at + 1], references, free, num_free)
                held[stream, at] = source[j, 3] = new
                num_stored += 1
            own[i] = source[j, 3] if j >= 0 else found[row, i]
            references[own[i]] += 1
    free[-1] = num_free
