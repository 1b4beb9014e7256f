"""Loops over the conditions of events that adapt to the rows written before."""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part
from torchrl_replay_ext.kernels.random_numbers import uniform


@part
def _num_below(value, ordered, size):
    """How many of the first ``size`` of ordered numbers are below ``value``."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        if ordered[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@loop
def quantile(value, q, recent, ordered, count, occurs):
    """Whether each value is above the ``q``-quantile of the values before it.

    Args:
        value: float64 [n]. Values that are not finite never are, and are not remembered.
        q: in (0, 1). The quantile of m values is the smallest one that at least q · m of them do not exceed.
        recent: the last values, a ring, float64 [window].
        ordered: the same in ascending order, the first ones of float64 [window].
        count: number of values so far, int64 [1].
        occurs: the result, bool [n].
    """
    window = recent.shape[0]
    for row in range(value.shape[0]):
        new, occurs[row] = value[row], False
        if not np.isfinite(new):
            continue
        size, place = min(max(count[0], 0), window), max(count[0], 0) % window
        if size > 0:
            occurs[row] = new > ordered[min(max(np.int64(np.ceil(q * size)) - 1, 0), size - 1)]
        # from the place of the oldest value to that of the new one, the others move by one place
        hole = size if size < window else min(_num_below(recent[place], ordered, size), size - 1)
        at = _num_below(new, ordered, size)
        if hole < at:
            at -= 1
            for k in range(hole, at):
                ordered[k] = ordered[k + 1]
        else:
            for k in range(hole, at, -1):
                ordered[k] = ordered[k - 1]
        ordered[at] = recent[place] = new
        count[0] = max(count[0], 0) + 1


@loop
def novel(code, times, cells, occurs):
    """Whether each code was seen at most ``times`` times, this one included, by a count-min sketch.

    Args:
        code: hashes of states, int64 [n], >= 0.
        times: at most 254.
        cells: the sketch, counts up to 255, uint8 [depth, width]. A row only increases the smallest of its cells.
        occurs: the result, bool [n].
    """
    depth, width = cells.shape
    at = np.empty(depth, np.int64)
    for row in range(code.shape[0]):
        seen = 255
        for k in range(depth):
            at[k] = min(np.int64(uniform(code[row], k + 1) * width), width - 1)
            seen = min(seen, np.int64(cells[k, at[k]]))
        occurs[row] = seen < times
        for k in range(depth):
            if cells[k, at[k]] == seen and seen < 255:
                cells[k, at[k]] = seen + 1
