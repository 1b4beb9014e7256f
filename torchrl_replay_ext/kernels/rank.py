"""Loops over transitions in buckets of nearly equal priorities, from which ranks follow without a sort.

``layouts`` describes the arrays. Slots and ranks out of range are skipped. Loops stay in range whatever the
arrays hold, also while another thread changes them.
"""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.layouts import BITS, BUCKETS, DROPPED_BITS, FIRST_COUNT, NEW, NOWHERE
from torchrl_replay_ext.kernels.loop import inlined, loop, part


@part
def _at(b, k, start, members):
    """The position in ``members`` of member ``k`` of bucket ``b``."""
    return min(max(start[b] + k, 0), members.shape[0] - 1)


@part
def _count(b, by, counts):
    node = BUCKETS + b
    while node > 0:
        counts[node] += by
        node >>= BITS
    counts[0] += by


@part
def _mirror(b, k, count):
    """From the number of a member of a bucket to the number of members with smaller ranks, or back."""
    return count - 1 - k if b == NEW else k


@part
def _signed(b, k):
    """From the number of a member of a bucket, in the order of ``members``, to its offset, or back."""
    return -1 - k if b == NEW else k


@part
def _lay_out(bucket, offset, members, start, room, counts, top, needed):
    """Give each bucket in use, and the bucket ``needed``, a block with space for half as many more transitions."""
    counts[:] = 0
    for s in range(bucket.shape[0]):
        b = bucket[s]
        if 0 <= b < BUCKETS:
            counts[BUCKETS + b] += 1
    for node in range(2 * BUCKETS - 1, 0, -1):
        counts[node >> BITS] += counts[node]
    top[0] = 0
    for b in range(BUCKETS):
        count = counts[BUCKETS + b]
        start[b] = top[0]
        room[b] = count + (count >> 1) + 2 if count > 0 or b == needed else 0
        top[0] += room[b]
    for s in range(bucket.shape[0]):
        b = bucket[s]
        if 0 <= b < BUCKETS:
            members[_at(b, _signed(b, offset[s]), start, members)] = s


@loop
def rebuild(bucket, offset, members, start, room, counts, top):
    """Recompute the blocks and counts from ``bucket`` and ``offset``."""
    _lay_out(bucket, offset, members, start, room, counts, top, NEW)


@inlined
def _take_out(s, bucket, offset, members, start, counts):
    """Remove slot ``s`` from its bucket; the last one of the bucket takes its place."""
    b = bucket[s]
    if 0 <= b < BUCKETS:
        last = members[_at(b, counts[BUCKETS + b] - 1, start, members)]
        if 0 <= last < offset.shape[0]:
            members[_at(b, _signed(b, offset[s]), start, members)] = last
            offset[last] = offset[s]
        _count(b, -1, counts)


@loop
def move(bucket, offset, members, start, room, counts, top, slots, d):
    """Move ``slots`` [n], in order, to the ends of the buckets of their priorities ``d``, [n], or [1] for all rows.

    A negative d is that of a new transition; slots with the d NaN are removed. Only the last of duplicates counts:
    until it is put in its bucket, the slot is marked with the number of its row.
    """
    _read_ahead(bucket, offset, members, start, slots)
    bits = d.view(np.int32)
    for row in range(slots.shape[0] - 1, -1, -1):
        s = slots[row]
        if 0 <= s < bucket.shape[0] and bucket[s] >= NOWHERE:
            _take_out(s, bucket, offset, members, start, counts)
            bucket[s] = NOWHERE - 1 - row
    for row in range(slots.shape[0]):
        s, each = slots[row], min(row, d.shape[0] - 1)
        if s < 0 or s >= bucket.shape[0] or bucket[s] != NOWHERE - 1 - row:
            continue
        bucket[s] = NOWHERE
        if np.isnan(d[each]):
            continue
        # the bits of positive floats are ordered like the floats
        b = NEW if d[each] < 0 else min(max(BUCKETS - 1 - (bits[each] >> DROPPED_BITS), NEW + 1), BUCKETS - 1)
        count = counts[BUCKETS + b]
        if count >= room[b]:
            first, wanted = top[0], 2 * count + 4
            if 0 <= first <= members.shape[0] - wanted:
                for k in range(count):
                    members[first + k] = members[_at(b, k, start, members)]
                start[b], room[b] = first, wanted
                top[0] = first + wanted
            else:
                _lay_out(bucket, offset, members, start, room, counts, top, b)
                count = counts[BUCKETS + b]
        members[_at(b, count, start, members)] = s
        bucket[s], offset[s] = b, _signed(b, count)
        _count(b, 1, counts)


@inlined
def _read_ahead(bucket, offset, members, start, slots):
    """Read what the loops after it need, without branches, so that the cache misses of the rows overlap."""
    size = bucket.shape[0]
    at = np.empty(slots.shape[0], np.int64)
    for row in range(slots.shape[0]):
        s = min(max(slots[row], 0), size - 1)
        b = min(max(bucket[s], 0), BUCKETS - 1)
        at[row] = _at(b, _signed(b, offset[s]), start, members)
    for row in range(slots.shape[0]):
        at[row] = members[at[row]]


@inlined
def _find(members, start, counts, size, rank, slot):
    for row in range(rank.shape[0]):
        slot[row] = -1
        rest = rank[row]
        if rest < 0 or rest >= counts[0]:
            continue
        node = FIRST_COUNT
        while True:
            last = node | (1 << BITS) - 1
            while node < last and counts[node] <= rest:
                rest -= counts[node]
                node += 1
            if node >= BUCKETS:
                break
            node <<= BITS
        b = node - BUCKETS
        slot[row] = _at(b, _mirror(b, rest, counts[node]), start, members)
    for row in range(rank.shape[0]):
        # counts may differ by now
        member = members[slot[row]] if slot[row] >= 0 else 0
        slot[row] = min(max(member, 0), size - 1)


@loop
def draw(members, start, counts, size, cumulative, alpha, u, slot, density, smallest):
    """Draw slots with probabilities in proportion to rank^-alpha.

    Args:
        members: see ``layouts``.
        start: likewise.
        counts: likewise.
        size: number of slots.
        cumulative: Σ_{r≤k} r^-alpha for k = 1, 2, …
        alpha: the exponent first.
        u: where each row lies among the sums, in [0, 1), float64 [n].
        slot: the slots, int64 [n]; 0 if nothing can be drawn.
        density: rank^-alpha of each, float64 [n]; 0 if nothing can be drawn.
        smallest: that of the last rank, float64 [1].
    """
    count = min(np.int64(counts[0]), cumulative.shape[0])
    total = cumulative[count - 1] if count > 0 else 0.0
    rank = np.zeros(u.shape[0], np.int64)
    step = 1
    while 2 * step <= count:
        step *= 2
    # the first rank whose sum exceeds the target; all rows halve their ranges together
    while step > 0:
        for row in range(u.shape[0]):
            middle = rank[row] + step - 1
            is_passed = middle < count and cumulative[min(middle, cumulative.shape[0] - 1)] <= u[row] * total
            rank[row] += step if is_passed else 0
        step //= 2
    for row in range(u.shape[0]):
        rank[row] = min(rank[row], count - 1)
        density[row] = (rank[row] + 1.0) ** -alpha[0] if count > 0 else 0.0
    smallest[0] = max(count, 1) ** -alpha[0]
    _find(members, start, counts, size, rank, slot)


@loop
def find(members, start, counts, size, rank, slot):
    """Find the slots of the ranks ``rank`` [n], counted from 0; slot 0 if there are not so many transitions."""
    _find(members, start, counts, size, rank, slot)


@loop
def rank_of(bucket, offset, members, counts, slots, rank):
    """The ranks of ``slots`` [n], counted from 0; -1 for slots without a transition."""
    for row in range(slots.shape[0]):
        rank[row] = -1
        s = slots[row]
        if s < 0 or s >= bucket.shape[0] or bucket[s] < 0 or bucket[s] >= BUCKETS:
            continue
        b = bucket[s]
        node = BUCKETS + b
        ahead = _mirror(b, _signed(b, offset[s]), counts[node])
        while node > 0:
            first = node >> BITS << BITS
            for k in range(max(first, FIRST_COUNT), node):
                ahead += counts[k]
            node >>= BITS
        rank[row] = ahead


@loop
def tabulate(cumulative, exponent, alpha, step):
    """Fill ``cumulative`` with Σ_{r≤k} r^-alpha if alpha differs by ``step`` or more from that of the table."""
    if abs(alpha[0] - exponent[0]) < step:
        return
    exponent[0] = alpha[0]
    total = 0.0
    for k in range(cumulative.shape[0]):
        total += (k + 1.0) ** -alpha[0]
        cumulative[k] = total
