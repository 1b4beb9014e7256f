"""The kernels of ranks for CUDA; see :mod:`torchrl_replay_ext.kernels.rank`.

The order of all slots is sorted anew by ``rebuild``, which takes less time than to keep it up to date. Keys of 16 bits
take a radix sort two passes. ``members`` then begins with the slots in the order of their ranks, followed by the rank
of each slot; the first entry of ``counts`` is the number of transitions, and ``top`` the newest slot. The other arrays
are not used. Within a bucket, ranks ascend with the age of the slots in the ring.
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
    size, numbers = len(bucket), torch.arange(len(bucket), device=bucket.device)
    # of equal buckets the newest slot first
    ring = (top - numbers) % size
    # the conversion wraps around: the last key is that of empty slots
    key = (bucket.index_select(0, ring) - BUCKETS).to(torch.int16)
    order = ring.index_select(0, key.sort(stable=True).indices)
    members[:size] = order
    members[size : 2 * size].scatter_(0, order, numbers.to(torch.int32))
    torch.sum(bucket >= 0, 0, keepdim=True, dtype=torch.int32, out=counts[:1])


def draw(members, start, counts, size, cumulative, alpha, u, slot, density, smallest):
    """See the loop of the same name."""
    last = (counts[:1] - 1).clamp(-1, len(cumulative) - 1)
    end, exponent = last.clamp_min(0), -alpha[:1]
    rank = torch.minimum(torch.searchsorted(cumulative, u * cumulative.index_select(0, end), right=True), last)
    torch.pow(rank + 1, exponent, out=density).masked_fill_(last < 0, 0)
    torch.pow(end + 1, exponent, out=smallest)
    find(members, start, counts, size, rank, slot)


def find(members, _start, counts, size, rank, slot):
    """See the loop of the same name."""
    found = members.index_select(0, rank.clamp(0, size - 1)).clamp_(0, size - 1)
    slot.copy_(found).masked_fill_((rank < 0) | (rank >= counts[:1]), 0)


def rank_of(bucket, _place, members, _counts, slots, rank):
    """See the loop of the same name."""
    size = len(bucket)
    inside = slots.clamp(0, size - 1)
    is_stored = (inside == slots) & (bucket.index_select(0, inside) >= 0)
    rank.copy_(torch.where(is_stored, members.index_select(0, size + inside), -1))


def tabulate(cumulative, exponent, alpha, step):
    """See the loop of the same name."""
    applies = (alpha[:1] - exponent).abs() >= step
    exponent.copy_(torch.where(applies, alpha[:1], exponent))
    ranks = torch.arange(1, len(cumulative) + 1, dtype=torch.float64, device=cumulative.device)
    cumulative.copy_(torch.where(applies, (ranks**-exponent).cumsum(0), cumulative))
