"""Loops over the rows of a priority update."""

from __future__ import annotations

import math

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, LATE, OUT_OF_RANGE, PADDING


@part
def _mark(row, mark, stamp):
    """The mark of a row; rows with stamp -1 are padding."""
    if stamp.shape[0] > 0 and stamp[row] < 0:
        return PADDING
    return mark[row] if mark.shape[0] > 0 else 0


@loop
def check(slots, error, stamp, mark, num_slots, eps, smallest, limit, squared, result):
    """Find the first row whose slot does not exist or whose TD error is invalid; for the arguments see ``update``.

    ``result``: why the update is refused, or 0, and the row; int64 [2].
    """
    result[0], result[1] = 0, -1
    for row in range(slots.shape[0]):
        if _mark(row, mark, stamp) == PADDING:
            continue
        if slots[row] < 0 or slots[row] >= num_slots:
            result[0], result[1] = OUT_OF_RANGE, row
            return
        # NaN is not >= 0
        is_valid = error[row] >= 0
        if is_valid:
            delta = math.sqrt(error[row]) if squared else float(error[row])
            is_valid = max(delta + eps, smallest) <= limit
        if not is_valid:
            result[0], result[1] = INVALID, row
            return


@loop
def update(
    slots, error, stamp, mark, generation, d, largest, dropped, eps, smallest, squared, drawn, kept, kept_d, result
):
    """Set the priorities of the rows of an update that ``check`` has accepted.

    Rows are late if their slot was overwritten after the draw: ``mark`` says so, or their ``stamp`` differs from the
    generation of the slot. They are left out and counted. Of several rows of a slot the last one wins.

    Args:
        slots: int64 [n].
        error: TD errors, float32 [n]: δ² if ``squared``, else |δ|.
        stamp: generations at the draw, int64 [n], -1 for padding; empty if they are not known.
        mark: 0, LATE or PADDING, uint8 [n]; empty if all are 0.
        generation: of each slot; 0: empty.
        d: priority max(|δ| + eps, smallest) of each slot, float32.
        largest: the largest priority so far, also of rows that a later one of the same slot replaces, float64 [1].
        dropped: number of late rows so far, int64 [1].
        eps: see ``d``.
        smallest: see ``d``.
        squared: see ``error``.
        drawn: True if rows of empty slots are late; if False, such a row refuses the update and nothing is changed.
        kept: the slots that were updated, each once; int64 [n].
        kept_d: their priorities, float32 [n].
        result: why the update is refused, or 0; and the row, or the number of rows in ``kept``; int64 [2].
    """
    late = 0
    for row in range(slots.shape[0]):
        slot, kept[row] = slots[row], -1
        said = _mark(row, mark, stamp)
        if said == PADDING or slot < 0 or slot >= generation.shape[0]:
            continue
        if generation[slot] == 0 and not drawn:
            result[0], result[1] = EMPTY, row
            return
        if said == LATE or generation[slot] == 0 or (stamp.shape[0] > 0 and stamp[row] != generation[slot]):
            late += 1
        else:
            kept[row] = slot
    dropped[0] += late
    # the last row of each slot leaves its number, which float32 holds exactly for the first 2^24 rows
    for row in range(slots.shape[0]):
        if kept[row] >= 0:
            d[kept[row]] = row
            delta = math.sqrt(error[row]) if squared else float(error[row])
            largest[0] = max(largest[0], delta + eps, smallest)
    count = 0
    for row in range(slots.shape[0]):
        slot = kept[row]
        if slot < 0 or d[slot] != np.float32(row):
            continue
        root = np.sqrt(error[row]) if squared else error[row]
        kept[count], kept_d[count] = slot, max(np.float32(root + np.float32(eps)), np.float32(smallest))
        count += 1
    for place in range(count):
        d[kept[place]] = kept_d[place]
    result[0], result[1] = 0, count
