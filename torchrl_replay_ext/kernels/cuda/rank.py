"""The kernels of ranks for CUDA; see :mod:`torchrl_replay_ext.kernels.rank`.

The order of all slots is sorted anew by ``rebuild``, which takes less time than to keep it up to date. ``members`` then
begins with the slots in the order of their ranks, followed by the rank of each slot; the first entry of ``counts`` is
the number of transitions. ``place`` is the number of the last change of a slot, negative in bucket ``NEW``, and ``top``
the number of changes. The other arrays are not used.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.launch import for_each, in_one_block, jit, within
from torchrl_replay_ext.kernels.rank_layout import BUCKETS, DROPPED_BITS, NEW, NOWHERE

_BUCKETS, _DROPPED_BITS = tl.constexpr(BUCKETS), tl.constexpr(DROPPED_BITS)
_NEW, _NOWHERE = tl.constexpr(NEW), tl.constexpr(NOWHERE)
# larger than all places
_MARK = tl.constexpr(2**62)
_ROWS = 256


@jit
def _bucket_of(d):
    bits = d.to(tl.int32, bitcast=True) >> _DROPPED_BITS
    found = tl.where(d < 0, _NEW, tl.minimum(tl.maximum(-bits + _BUCKETS - 1, _NEW + 1), _BUCKETS - 1))
    return tl.where(d == d, found, _NOWHERE)


@jit
def _move(bucket, place, top, slots, d, size, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        # the last row of a slot leaves the largest mark
        tl.atomic_max(place + slot, rows.to(tl.int64) + _MARK, mask=(slot >= 0) & (slot < size))
    tl.debug_barrier()
    number = tl.load(top)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        valid = (slot >= 0) & (slot < size)
        wins = valid & (tl.load(place + slot, mask=valid, other=0) == rows.to(tl.int64) + _MARK)
        target = _bucket_of(tl.load(d + (0 if is_one else 1) * rows, mask=wins, other=0))
        change = number + rows + 1
        tl.debug_barrier()
        tl.store(bucket + slot, target, mask=wins)
        tl.store(place + slot, tl.where(target == _NEW, -change, change), mask=wins)
        tl.debug_barrier()
    tl.store(top, number + count)


@jit
def _find(state, rank):
    members, counts, size = state
    exists = (rank >= 0) & (rank < tl.minimum(tl.load(counts), size))
    return within(tl.load(members + rank, mask=exists, other=0), size)


@jit
def _rank_of(state, slot):
    bucket, members, size = state
    valid = (slot >= 0) & (slot < size)
    stored = valid & (tl.load(bucket + slot, mask=valid, other=-1) >= 0)
    return tl.load(members + size + slot, mask=stored, other=-1).to(tl.int64)


def move(bucket, place, members, start, room, counts, top, slots, d):
    """See the loop of the same name."""
    in_one_block(_move, _ROWS, len(slots), bucket, place, top, slots, d, len(bucket), is_one=len(d) == 1)


def rebuild(bucket: Tensor, place: Tensor, members: Tensor, start: Tensor, room: Tensor, counts: Tensor, top: Tensor):
    """Sort: within a bucket, ranks ascend with places."""
    size, stored = bucket.shape[0], bucket >= 0
    key = torch.where(stored, (bucket.to(torch.int64) << 42) + place, torch.iinfo(torch.int64).max)
    order = key.sort(stable=True).indices
    members[:size] = order
    members[size : 2 * size].scatter_(0, order, torch.arange(size, dtype=torch.int32, device=order.device))
    counts[:1] = stored.sum()


def draw(members, start, counts, size, cumulative, alpha, u, slot, density, smallest):
    """See the loop of the same name."""
    count = counts[:1].to(torch.int64).clamp(0, len(cumulative))
    total = cumulative.index_select(0, (count - 1).clamp_min(0))
    rank = torch.minimum(torch.searchsorted(cumulative, u * total, right=True), count - 1)
    density.copy_((rank + 1).to(torch.float64) ** -alpha[:1] * (count > 0))
    smallest.copy_(count.clamp_min(1).to(torch.float64) ** -alpha[:1])
    find(members, start, counts, size, rank, slot)


def find(members, start, counts, size, rank, slot):
    """See the loop of the same name."""
    for_each(_find, (members, counts, size), rank, slot)


def rank_of(bucket, place, members, counts, slots, rank):
    """See the loop of the same name."""
    for_each(_rank_of, (bucket, members, len(bucket)), slots, rank)


def tabulate(cumulative, exponent, alpha, step):
    """See the loop of the same name."""
    applies = (alpha[:1] - exponent).abs() >= step
    exponent.copy_(torch.where(applies, alpha[:1], exponent))
    ranks = torch.arange(1, len(cumulative) + 1, dtype=torch.float64, device=cumulative.device)
    cumulative.copy_(torch.where(applies, (ranks**-exponent).cumsum(0), cumulative))
