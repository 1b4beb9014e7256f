"""The kernel of slices for CUDA; see :mod:`torchrl_replay_ext.kernels.slices`."""

from __future__ import annotations

import triton.language as tl

from torchrl_replay_ext.kernels.cuda.launch import in_blocks, jit, within

# slices of one thread block
_ROWS = 64


@jit
def _walk(start, following, leaves, slots, mask, size, length, count, num_rows: tl.constexpr):
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    in_batch = rows < count
    slot = within(tl.load(start + rows, mask=in_batch, other=0), size)
    is_part = tl.load(leaves + slot) > 0
    for step in range(length):
        tl.store(slots + rows * length + step, slot, mask=in_batch)
        tl.store(mask + rows * length + step, is_part, mask=in_batch)
        following_slot = within(tl.load(following + slot), size)
        is_part = is_part & (following_slot != slot)
        slot = following_slot


def walk(start, following, leaves, slots, mask):
    """See the loop of the same name."""
    size = min(len(following), len(leaves))
    in_blocks(_walk, _ROWS, len(start), start, following, leaves, slots, mask, size, slots.shape[1])
