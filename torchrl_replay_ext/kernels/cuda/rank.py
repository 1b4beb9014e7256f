"""The kernels of ranks for CUDA; see :mod:`torchrl_replay_ext.kernels.rank`.

The order of all slots is sorted anew by ``rebuild``, which takes less time than to keep it up to date. Keys of 16 bits
take a radix sort two passes. ``members`` then begins with the slots in the order of their ranks; the first entry of
``counts`` is the number of transitions, and ``top`` the newest slot. The other arrays are not used. Within a bucket,
ranks ascend with the age of the slots in the ring.
"""

from __future__ import annotations

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import in_blocks, jit
from torchrl_replay_ext.kernels.layouts import BUCKETS, DROPPED_BITS, NEW, NOWHERE

_BUCKETS, _DROPPED_BITS = tl.constexpr(BUCKETS), tl.constexpr(DROPPED_BITS)
_NEW, _NOWHERE = tl.constexpr(NEW), tl.constexpr(NOWHERE)
_ROWS = 256


@jit
def _move(bucket, top, slots, d, size, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    slot = tl.load(slots + rows, mask=rows < count, other=-1)
    priority = tl.load(d + (0 if is_one else 1) * rows, mask=rows < count, other=0.0)
    # the bits of positive floats are ordered like the floats
    bits = priority.to(tl.int32, bitcast=True) >> _DROPPED_BITS
    found = tl.minimum(tl.maximum(-bits + _BUCKETS - 1, _NEW + 1), _BUCKETS - 1)
    found = tl.where(priority < 0, _NEW, found)
    found = tl.where(priority == priority, found, _NOWHERE)
    tl.store(bucket + slot, found, mask=(slot >= 0) & (slot < size))
    tl.store(top + 0 * rows, slot, mask=(rows == count - 1) & (priority < 0))


def move(bucket, _place, _members, _start, _room, _counts, top, slots, d):
    """See the loop of the same name. The slots that are in range are distinct."""
    in_blocks(_move, _ROWS, len(slots), bucket, top, slots, d, len(bucket), is_one=len(d) == 1)


def rebuild(bucket, _place, members, _start, _room, counts, top):
    """Sort. The empty slots come last."""
    size = len(bucket)
    ring, key = members.new_empty(size), members.new_empty(size, dtype=torch.int16)
    # of equal buckets the newest slot first
    torch.remainder(top - torch.arange(size, device=top.device), size, out=ring)
    # the conversion wraps around: the last key is that of empty slots
    torch.sub(bucket.index_select(0, ring), BUCKETS, out=key)
    torch.index_select(ring, 0, key.sort(stable=True).indices, out=members[:size])
    torch.sum(bucket >= 0, 0, keepdim=True, dtype=torch.int32, out=counts[:1])


def draw(members, _start, counts, size, cumulative, alpha, u, slot, density, smallest):
    """See the loop of the same name."""
    last, exponent = counts[:1].clamp(1, len(cumulative)), -alpha[:1]
    torch.pow(last, exponent, out=smallest)
    last = last - 1
    rank = torch.searchsorted(cumulative, u * cumulative.index_select(0, last), right=True).minimum(last)
    is_empty = counts[:1] <= 0
    torch.pow(rank + 1, exponent, out=density).masked_fill_(is_empty, 0)
    torch.remainder(members.index_select(0, rank), size, out=slot).masked_fill_(is_empty, 0)


def find(members, _start, counts, size, rank, slot):
    """See the loop of the same name."""
    found = members.index_select(0, rank.clamp(0, size - 1))
    torch.remainder(found, size, out=slot).masked_fill_((rank < 0) | (rank >= counts[:1]), 0)


def rank_of(bucket, _place, members, _counts, slots, rank):
    """See the loop of the same name."""
    size, inside = len(bucket), slots.clamp(0, len(bucket) - 1)
    is_stored = (inside == slots) & (bucket.index_select(0, inside) >= 0)
    order, numbers = members[:size].long().clamp_(0, size - 1), torch.arange(size, device=slots.device)
    ranks = torch.empty_like(numbers).scatter_(0, order, numbers)
    rank.copy_(torch.where(is_stored, ranks.index_select(0, inside), -1))


def tabulate(cumulative, exponent, alpha, step):
    """See the loop of the same name."""
    applies = (alpha[:1] - exponent).abs() >= step
    exponent.copy_(torch.where(applies, alpha[:1], exponent))
    ranks = torch.arange(1, len(cumulative) + 1, dtype=torch.float64, device=cumulative.device)
    terms = ranks**-exponent
    # integers: the order in which a GPU adds them makes no difference
    scale = 2.0**60 / terms.sum()
    sums = (terms * scale).to(torch.int64).cumsum(0) / scale
    cumulative.copy_(torch.where(applies, sums, cumulative))
