"""Loops over the rows of draws, writes and priority updates.

``drawn_at``, int64 [slots], has the number of the last draw of each slot: 0 if it was never drawn, negative if it was
overwritten after that draw. ``draws``, int64 [2], has the number of draws so far, and the number of writes at the last
one. ``drawn`` and ``record`` skip slots out of range; in ``update`` they are invalid.
"""

from __future__ import annotations

import math

import numpy as np

from torchrl_replay_ext.kernels.layouts import EMPTY, INVALID, OUT_OF_RANGE, UNIT, WINDOW
from torchrl_replay_ext.kernels.loop import inlined, loop
from torchrl_replay_ext.kernels.tree import write_all, write_power


@loop
def drawn(generation, slots, density, min_density, beta, num_writes, drawn_at, draws, weight, stamp):
    """Complete a draw of ``slots`` [n] with weights and stamps, and count it.

    Args:
        generation: of each slot.
        slots: int64 [n].
        density: of each row, [n]; 0 if nothing can be drawn.
        min_density: the smallest density of all slots first; empty: that of this batch.
        beta: the exponent of the weights, first.
        num_writes: the number of writes so far, int64 [1].
        drawn_at: see above; empty: the draw is not counted.
        draws: see above.
        weight: (density / min_density)^−beta, float32 [n], 0 where the density is 0; empty: not needed.
        stamp: the generations of ``slots``, int64 [n]; empty: not needed.
    """
    size = generation.shape[0]
    if weight.shape[0] > 0:
        least = density[0]
        if min_density.shape[0] > 0:
            least = min_density[0]
        else:
            for row in range(density.shape[0]):
                least = min(least, density[row])
        for row in range(weight.shape[0]):
            weight[row] = (density[row] / least) ** -beta[0] if density[row] > 0 and least > 0 else 0.0
    for row in range(stamp.shape[0]):
        stamp[row] = generation[min(max(slots[row], 0), size - 1)]
    if drawn_at.shape[0] == 0:
        return
    draws[0], draws[1] = draws[0] + 1, num_writes[0]
    for row in range(slots.shape[0]):
        if 0 <= slots[row] < size:
            drawn_at[slots[row]] = draws[0]


@loop
def record(
    generation, num_writes, drawn_at, d, largest, leaves, nodes, minima, pages, capacity, alpha, slots, is_write
):
    """Register one write of ``slots`` [n], or their removal.

    Args:
        generation: of each slot; becomes the number of the write, or 0.
        num_writes: the number of writes so far, int64 [1]; increased by 1.
        drawn_at: see above.
        d: of each slot; becomes the negative ``largest``, or 0.
        largest: the priority of new transitions, float64 [1].
        leaves: the masses d^alpha, which are set too, see :class:`~torchrl_replay_ext.core.sum_tree.PowerMasses`.
        nodes: likewise.
        minima: likewise.
        pages: likewise.
        capacity: likewise; 0: there are no masses.
        alpha: the exponent first.
        slots: int64 [n].
        is_write: False if the slots become empty.
    """
    num_writes[0] += 1
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0 or slot >= generation.shape[0]:
            continue
        generation[slot] = num_writes[0] if is_write else 0
        d[slot] = np.float32(-largest[0]) if is_write else np.float32(0)
        drawn_at[slot] = -abs(drawn_at[slot])
    if capacity > 0:
        mass = np.empty(slots.shape[0], np.int64)
        for row in range(slots.shape[0]):
            mass[row] = math.ceil(largest[0] ** alpha[0] * UNIT) if is_write else 0
        write_all(leaves, nodes, minima, pages, capacity, slots, mass)


@inlined
def _delta(error, squared):
    """|δ|; negative or NaN for invalid TD errors."""
    return math.sqrt(error) if squared and error >= 0 else float(error)


@loop
def update(
    generation, drawn_at, draws, d, largest, counts, limit, eps, min_priority, squared,
    leaves, nodes, minima, pages, capacity, alpha,
    slots, error, stamp, refuses, kept, kept_d, result,
):  # fmt: skip
    """Set the priorities of the rows of an update. Of several rows of a slot the largest priority counts.

    Invalid rows refuse the update, or are left out and counted. Late rows are left out and counted. With stamps, a row
    is late if its slot was overwritten after the draw. Without, if one of the last ``WINDOW`` draws was the last one of
    its slot, which was overwritten after it; except if all rows were written since the last draw.

    Args:
        generation: of each slot; 0: empty.
        drawn_at: see above.
        draws: see above.
        d: priority max(|δ| + eps, min_priority) of each slot, float32.
        largest: the largest d so far, float64 [1].
        counts: the numbers of late and of invalid rows so far, int64 [2].
        limit: the largest d that is valid, float64 [1].
        eps: see ``d``.
        min_priority: see ``d``.
        squared: see ``error``.
        leaves: the masses d^alpha, which are set too, see :class:`~torchrl_replay_ext.core.sum_tree.PowerMasses`.
        nodes: likewise.
        minima: likewise.
        pages: likewise.
        capacity: likewise; 0: there are no masses.
        alpha: the exponent first.
        slots: int64 [n].
        error: TD errors, float32 [n]: δ² if ``squared``, else |δ|.
        stamp: generations at the draw, int64 [n]; empty if they are not known.
        refuses: True if invalid rows refuse the update; nothing is changed then. So do rows of slots that are empty
            and were never drawn.
        kept: the slots that were updated, each once, and -1 in the other rows; int64 [n].
        kept_d: their priorities, and 0 in the other rows; float32 [n].
        result: why the update is refused, or 0; and the row, or the number of rows in ``kept``, which come first.
    """
    size, has_stamps = generation.shape[0], stamp.shape[0] > 0
    is_own = not has_stamps
    result[0], result[1] = 0, -1
    # first all rows are checked, because one that is invalid may refuse the update
    invalid = 0
    for row in range(slots.shape[0]):
        slot, reason = slots[row], 0
        kept[row], kept_d[row] = -1, max(_delta(error[row], squared) + eps, min_priority)
        if slot < 0 or slot >= size:
            reason = OUT_OF_RANGE
        # NaN is not >= 0
        elif not (error[row] >= 0 and kept_d[row] <= limit[0]):
            reason = INVALID
        elif refuses and generation[slot] == 0 and not has_stamps and drawn_at[slot] == 0:
            reason = EMPTY
        else:
            kept[row] = slot
            is_own = is_own and generation[slot] > draws[1]
        if refuses and reason:
            result[0], result[1] = reason, row
            return
        invalid += reason > 0
    late, count = 0, 0
    for row in range(slots.shape[0]):
        slot, priority = kept[row], kept_d[row]
        kept[row], kept_d[row] = -1, 0
        if slot < 0:
            continue
        is_late = generation[slot] == 0
        if has_stamps:
            is_late = is_late or stamp[row] != generation[slot]
        elif not is_own:
            is_late = is_late or (drawn_at[slot] < 0 and draws[0] + drawn_at[slot] < WINDOW)
        late += is_late
        if not is_late:
            kept[count], kept_d[count] = slot, priority
            d[slot] = 0
            count += 1
    counts[0] += late
    counts[1] += invalid
    for row in range(count):
        d[kept[row]] = max(d[kept[row]], kept_d[row])
        largest[0] = max(largest[0], np.float64(kept_d[row]))
    rows, count = count, 0
    for row in range(rows):
        slot = kept[row]
        kept[row], kept_d[row] = -1, 0
        # NaN marks slots of which a row was kept
        if not np.isnan(d[slot]):
            kept[count], kept_d[count] = slot, d[slot]
            d[slot] = np.nan
            count += 1
    for row in range(count):
        d[kept[row]] = kept_d[row]
    result[1] = count
    if capacity > 0:
        write_power(leaves, nodes, minima, pages, capacity, kept[:count], kept_d[:count], alpha)
