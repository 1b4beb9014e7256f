"""The kernels of ranks for CUDA; see :mod:`torchrl_replay_ext.kernels.rank`.

The order of all slots is sorted anew by ``rebuild``, which takes less time than to keep it up to date. ``members`` then
begins with the slots in the order of their ranks, followed by the rank of each slot; the first entry of ``counts`` is
the number of transitions. ``place`` is the number of the last change of a slot, negative in bucket ``NEW``, and ``top``
the number of changes. The other arrays are not used.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.tree import in_blocks, jit
from torchrl_replay_ext.kernels.rank_layout import BUCKETS, DROPPED_BITS, NEW, NOWHERE

_NEW = tl.constexpr(NEW)
# larger than all places
_MARK = tl.constexpr(2**62)
_ROWS = 256


@jit
def _move(bucket, place, top, slots, to, count, size, is_one: tl.constexpr, num_rows: tl.constexpr):
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
        target = tl.load(to + (0 if is_one else 1) * rows, mask=wins, other=0)
        change = number + rows + 1
        tl.debug_barrier()
        tl.store(bucket + slot, target, mask=wins)
        tl.store(place + slot, tl.where(target == _NEW, -change, change), mask=wins)
        tl.debug_barrier()
    tl.store(top, number + count)


@jit
def _find(members, counts, size, rank, slot, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    at = tl.load(rank + rows, mask=rows < count, other=-1)
    exists = (at >= 0) & (at < tl.minimum(tl.load(counts), size))
    found = tl.load(members + at, mask=exists, other=0).to(tl.int64)
    tl.store(slot + rows, tl.minimum(tl.maximum(found, 0), size - 1), mask=rows < count)


@jit
def _rank_of(bucket, members, size, slots, rank, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    valid = (slot >= 0) & (slot < size)
    stored = valid & (tl.load(bucket + slot, mask=valid, other=-1) >= 0)
    found = tl.load(members + size + slot, mask=stored, other=-1).to(tl.int64)
    tl.store(rank + rows, found, mask=rows < count)


def move(bucket, place, members, start, room, counts, top, slots, d):
    """See the loop of the same name."""
    count = slots.shape[0]
    if count:
        rows = min(_ROWS, triton.next_power_of_2(count))
        to = torch.where(d < 0, NEW, (BUCKETS - 1 - (d.view(torch.int32) >> DROPPED_BITS)).clamp(NEW + 1, BUCKETS - 1))
        to = torch.where(d.isnan(), NOWHERE, to)
        _move[(1,)](bucket, place, top, slots, to, count, bucket.shape[0], is_one=len(to) == 1, num_rows=rows)


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
    in_blocks(_find, _ROWS, len(rank), members, counts, size, rank, slot)


def rank_of(bucket, place, members, counts, slots, rank):
    """See the loop of the same name."""
    in_blocks(_rank_of, _ROWS, len(slots), bucket, members, len(bucket), slots, rank)


def tabulate(cumulative, exponent, alpha, step):
    """See the loop of the same name."""
    applies = (alpha[:1] - exponent).abs() >= step
    exponent.copy_(torch.where(applies, alpha[:1], exponent))
    ranks = torch.arange(1, len(cumulative) + 1, dtype=torch.float64, device=cumulative.device)
    cumulative.copy_(torch.where(applies, (ranks**-exponent).cumsum(0), cumulative))
