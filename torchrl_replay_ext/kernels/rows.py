"""Loops over the rows of draws, writes and priority updates.

``draws``, int32 [slots, 4], has for each slot the number of its last draw since it was written (0: none), how many
draws wait for their updates, and the same for the draws before that write. A draw waits while at most ``WINDOW`` others
follow. Without write stamps, as many updates of a slot are late as draws waited when it was written. ``drawn`` and
``record`` skip slots out of range; in ``update`` they are invalid.
"""

from __future__ import annotations

import math

import numpy as np

from torchrl_replay_ext.kernels.loop import loop, part
from torchrl_replay_ext.kernels.reasons import EMPTY, INVALID, NUMBERS, OUT_OF_RANGE, WINDOW
from torchrl_replay_ext.kernels.tree import write_all, write_power
from torchrl_replay_ext.kernels.tree_layout import UNIT


@part
def _waits(draws, slot, column, now):
    """True if draws of a slot wait for their updates; ``column``: 0, or 2 for draws before the last write."""
    return draws[slot, column + 1] > 0 and (now - draws[slot, column]) & NUMBERS <= WINDOW


@loop
def drawn(generation, slots, density, smallest, beta, draws, num_draws, weight, stamp):
    """Complete a draw of ``slots`` [n] with weights and stamps, and count it.

    Args:
        generation: of each slot.
        slots: int64 [n].
        density: of each row, [n]; 0 if nothing can be drawn.
        smallest: the smallest density of all slots first; empty: that of this batch.
        beta: the exponent of the weights, first.
        draws: see above; empty: the draw is not counted.
        num_draws: the number of draws so far, int64 [1].
        weight: (density / smallest)^−beta, float32 [n], 0 where the density is 0; empty: not needed.
        stamp: the generations of ``slots``, int64 [n]; empty: not needed.
    """
    size = generation.shape[0]
    if weight.shape[0] > 0:
        least = density[0]
        if smallest.shape[0] > 0:
            least = smallest[0]
        else:
            for row in range(density.shape[0]):
                least = min(least, density[row])
        for row in range(weight.shape[0]):
            weight[row] = (density[row] / least) ** -beta[0] if density[row] > 0 and least > 0 else 0.0
    for row in range(stamp.shape[0]):
        stamp[row] = generation[min(max(slots[row], 0), size - 1)]
    if draws.shape[0] == 0:
        return
    num_draws[0] += 1
    now = num_draws[0] & NUMBERS
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= size:
            continue
        draws[slot, 1] = draws[slot, 1] + 1 if _waits(draws, slot, 0, now) else 1
        draws[slot, 0] = now


@loop
def record(
    generation, number, draws, num_draws, d, largest, leaves, nodes, minima, pages, capacity, alpha, slots, stays
):
    """Register one write of ``slots`` [n], or their removal.

    Args:
        generation: of each slot; becomes the number of the write, or 0.
        number: the number of writes so far, int64 [1]; increased by 1.
        draws: see above.
        num_draws: see :func:`drawn`.
        d: of each slot; becomes the negative ``largest``, or 0.
        largest: the priority of new transitions, float64 [1].
        leaves: the masses d^alpha, which are set too, see :class:`~torchrl_replay_ext.core.sum_tree.PowerMasses`.
        nodes: likewise.
        minima: likewise.
        pages: likewise.
        capacity: likewise; 0: there are no masses.
        alpha: the exponent first.
        slots: int64 [n].
        stays: False if the slots become empty.
    """
    number[0] += 1
    now = num_draws[0] & NUMBERS
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= generation.shape[0]:
            continue
        generation[slot] = number[0] if stays else 0
        d[slot] = np.float32(-largest[0]) if stays else np.float32(0)
        waiting = draws[slot, 3] if _waits(draws, slot, 2, now) else 0
        if _waits(draws, slot, 0, now):
            waiting += draws[slot, 1]
        if draws[slot, 0] != 0:
            draws[slot, 2] = draws[slot, 0]
        draws[slot, 0], draws[slot, 1], draws[slot, 3] = 0, 0, waiting
    if capacity > 0:
        mass = math.ceil(largest[0] ** alpha[0] * UNIT) if stays else 0
        write_all(leaves, nodes, minima, pages, capacity, slots, np.full(slots.shape[0], mass, np.int64))


@part
def _delta(error, squared):
    """|δ|; negative or NaN for invalid TD errors."""
    return math.sqrt(error) if squared and error >= 0 else float(error)


@loop
def update(
    generation, draws, num_draws, d, largest, counts, limit, eps, smallest, squared,
    leaves, nodes, minima, pages, capacity, alpha,
    slots, error, stamp, real, counts_draws, refuses, is_own, kept, kept_d, result,
):  # fmt: skip
    """Set the priorities of the rows of an update. Of several rows of a slot the last one wins.

    Invalid rows refuse the update, or are left out and counted. Late rows, whose slot was overwritten after the draw,
    are left out and counted.

    Args:
        generation: of each slot; 0: empty.
        draws: see above.
        num_draws: see :func:`drawn`.
        d: priority max(|δ| + eps, smallest) of each slot, float32.
        largest: the largest d so far, also of rows that a later one of the same slot replaces, float64 [1].
        counts: the numbers of late and of invalid rows so far, int64 [2].
        limit: the largest d that is valid, float64 [1].
        eps: see ``d``.
        smallest: see ``d``.
        squared: see ``error``.
        leaves: the masses d^alpha, which are set too, see :class:`~torchrl_replay_ext.core.sum_tree.PowerMasses`.
        nodes: likewise.
        minima: likewise.
        pages: likewise.
        capacity: likewise; 0: there are no masses.
        alpha: the exponent first.
        slots: int64 [n].
        error: TD errors, float32 [n]: δ² if ``squared``, else |δ|.
        stamp: generations at the draw, int64 [n], -1 for padding; empty if they are not known.
        real: False for padding, bool [n]; empty if all rows are real.
        counts_draws: False: the draws are not known.
        refuses: True if invalid rows refuse the update; nothing is changed then. So do rows of slots that are empty
            and were never drawn.
        is_own: True if the rows are those of the last write: none is late.
        kept: the slots that were updated, each once, and -1 in the other rows; int64 [n].
        kept_d: their priorities, and 0 in the other rows; float32 [n].
        result: why the update is refused, or 0; and the row, or the number of rows in ``kept``, which come first.
    """
    size, has_stamps = generation.shape[0], stamp.shape[0] > 0
    result[0], result[1] = 0, -1
    now = num_draws[0] & NUMBERS
    # first all rows are checked, because one that is invalid may refuse the update
    for row in range(slots.shape[0]):
        slot, reason = slots[row], 0
        kept[row], kept_d[row] = -1, 0
        if (has_stamps and stamp[row] < 0) or (real.shape[0] > 0 and not real[row]):
            continue
        priority = max(_delta(error[row], squared) + eps, smallest)
        if slot < 0 or slot >= size:
            reason = OUT_OF_RANGE
        # NaN is not >= 0
        elif not (error[row] >= 0 and priority <= limit[0]):
            reason = INVALID
        elif refuses and generation[slot] == 0 and counts_draws and not has_stamps and draws[slot, 2] == 0:
            reason = EMPTY
        if refuses and reason:
            result[0], result[1] = reason, row
            return
        if reason:
            # only counted, in the next loop
            kept[row] = -2
        else:
            kept[row], kept_d[row] = slot, priority
    late, invalid, best = 0, 0, largest[0]
    for row in range(slots.shape[0]):
        slot = kept[row]
        if slot < 0:
            invalid += slot == -2
            continue
        is_late = generation[slot] == 0
        if has_stamps:
            is_late = is_late or stamp[row] != generation[slot]
        elif counts_draws and not is_own:
            is_late = is_late or _waits(draws, slot, 2, now)
        if counts_draws and not is_own:
            column = 3 if is_late else 1
            draws[slot, column] = max(draws[slot, column] - 1, 0)
        if is_late:
            late += 1
            kept[row] = -1
            continue
        best = max(best, np.float64(kept_d[row]))
        # the last row of each slot leaves its number, which float32 holds exactly for the first 2^24 rows
        d[slot] = row
    largest[0] = best
    counts[0] += late
    counts[1] += invalid
    count = 0
    for row in range(slots.shape[0]):
        slot, priority = kept[row], kept_d[row]
        kept[row], kept_d[row] = -1, 0
        if slot >= 0 and d[slot] == np.float32(row):
            kept[count], kept_d[count] = slot, priority
            count += 1
    for place in range(count):
        d[kept[place]] = kept_d[place]
    result[1] = count
    if capacity > 0:
        write_power(leaves, nodes, minima, pages, capacity, kept[:count], kept_d[:count], alpha)
