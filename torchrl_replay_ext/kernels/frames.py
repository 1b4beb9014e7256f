"""A loop that stores stacks of frames, each frame once.

A row of a write has the k frames of its observation and the newest frame of the next observation. The arrays:

* ``before``, ``after``, [n, k, words]: the stacks of the rows; bytes, as 8-byte integers if possible.
* ``streams``, int64 [2, streams]: the ids of the trajectories that were written most recently, and when. ``last``,
  [streams, k, words]: the newest stack of each. ``held``, int32 [streams, k]: the frames of this stack.
* ``ids``, int32 [slots, k + 1]: the frames of each slot. ``references``, int32 [frames]: how often a frame is in
  ``ids`` and ``held``. ``free``, int32 [frames]: the frames without references; the last element is their number.
* ``frames``, [frames, words]: the frames; 0 is that of zeros. If ``targets``, int64 [n · (k + 1)], is not empty, the
  frames are on an accelerator: ``frames`` gets the new ones, one after the other, and ``targets`` where they belong.
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


@loop
def write(slots, trajectory, before, after, streams, last, held, frames, ids, references, free, targets):
    """Store rows of the trajectories ``trajectory`` [n] in ``slots`` [n], distinct; an error changes no row or frame.

    A row that goes on from the newest stack of its trajectory has the frames of this stack. A frame that is equal to
    the frame before it, or a first frame of zeros, is not stored again.
    """
    count, k, now = slots.shape[0], last.shape[1], streams[1].max()
    num_free, num_new, num_moved = np.int64(free[-1]), 0, np.int64(0)
    stream_of, goes_on, is_new = np.empty(count, np.int64), np.ones(count, np.bool_), np.zeros((count, k + 1), np.bool_)
    newest, blank = np.full(streams.shape[1], -1), np.zeros_like(last[0, 0])
    for row in range(count):
        for i in range(1, k):
            if not _same(before[row, i], after[row, i - 1]):
                raise ValueError(
                    "FrameStackStorage: the next observation of a row is not its observation shifted by one frame. "
                    "Frames must be stacked along the first dimension of an observation, the newest last, and "
                    "transitions must be single steps."
                )
        stream = stream_of[row] = _stream_of(trajectory[row], streams)
        streams[0, stream], streams[1, stream] = trajectory[row], now + 1 + row
        for i in range(k):
            known = last[stream, i] if newest[stream] < 0 else after[newest[stream], i]
            goes_on[row] = goes_on[row] and _same(before[row, i], known)
        newest[stream] = row
        for i in range(k if goes_on[row] else 0, k + 1):
            frame = before[row, i] if i < k else after[row, k - 1]
            is_new[row, i] = not _same(frame, before[row, i - 1] if i > 0 else blank)
            num_new += is_new[row, i]
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
    for row in range(count):
        own, stream = ids[slots[row]], stream_of[row]
        own[0] = 0
        for i in range(k + 1):
            own[i] = held[stream, i] if goes_on[row] and i < k else own[max(i - 1, 0)]
            if is_new[row, i]:
                num_free -= 1
                own[i] = free[num_free]
                target = np.int64(own[i])
                if targets.shape[0] > 0:
                    target, num_moved = num_moved, num_moved + 1
                    targets[target] = own[i]
                frames[target] = before[row, i] if i < k else after[row, k - 1]
            references[own[i]] += 1
        for frame in own[1:]:
            references[frame] += 1
        num_free = _release(held[stream], references, free, num_free)
        held[stream] = own[1:]
    for stream in range(streams.shape[1]):
        if newest[stream] >= 0:
            last[stream] = after[newest[stream]]
    free[-1] = num_free
