"""The kernels of episodes for CUDA; see :mod:`torchrl_replay_ext.kernels.episodes`. One program does all rows.

Writes are decided on the host. Barriers separate the steps in which their changes are made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.kernels import episodes as loops
from torchrl_replay_ext.kernels.cuda.launch import add, in_one_block, jit, some, within
from torchrl_replay_ext.kernels.cuda.tree import Tree, mass_of, put, refresh, tree_of
from torchrl_replay_ext.kernels.layouts import PAGE_BITS

_PAGE_BITS = tl.constexpr(PAGE_BITS)
_SLOT, _POSITION, _RECORD = tl.constexpr(loops.SLOT), tl.constexpr(loops.POSITION), tl.constexpr(loops.RECORD)
_PAGE, _REST = tl.constexpr(loops.PAGE), tl.constexpr(loops.REST)
_BEGINS, _ENDS, _FINISHED = tl.constexpr(loops.BEGINS), tl.constexpr(loops.ENDS), tl.constexpr(loops.FINISHED)


class Episodes(NamedTuple):
    """The state of an ``EpisodeIndex`` as one argument of a kernel; see :func:`episodes_of`."""

    # the sums and the largest entries of the totals of all records
    totals: Tree
    tree: Tree
    num_slots: int
    position_of: Tensor
    num_lanes: int
    span: int
    lane_total: Tensor
    episode: Tensor
    start_of: Tensor
    is_finished: Tensor
    updated_at: Tensor
    # of draws only
    least_largest: int = 0
    generation: Any = None


def episodes_of(leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, *arrays: Any) -> Episodes:
    """The argument of a kernel, from the arguments of a loop with or without ``least_largest`` and ``generation``."""
    episode, start_of, _, _, totals, maxima = arrays[4:10]
    trees = tree_of(totals, maxima, None, len(start_of)), tree_of(leaves, nodes, some(pages), capacity)
    return Episodes(*trees, len(episode), *arrays[:8], *arrays[10:])


@jit
def position_of(episodes, slot):
    """The position, perhaps out of range, of a slot in range."""
    position = slot % episodes.num_lanes * episodes.span + slot // episodes.num_lanes
    if episodes.tree.pages is not None:
        position = tl.load(episodes.position_of + slot).to(tl.int64)
    return position


@jit
def _set_masses(episodes, record, position, mass, mask):
    """Set the masses at distinct positions. The order does not matter."""
    change = put(episodes.tree, position, mass, mask)
    add(episodes.totals.leaves + record, change, mask)
    add(episodes.lane_total + within(position // episodes.span, episodes.num_lanes), change, mask)


@jit
def _load(changes, rows, end, count):
    """The changes of the rows before ``end``, which the host has put in range."""
    slot = tl.load(changes + _SLOT * count + rows, mask=rows < end, other=0)
    position = tl.load(changes + _POSITION * count + rows, mask=rows < end, other=-1)
    record = tl.load(changes + _RECORD * count + rows, mask=rows < end, other=0)
    page = tl.load(changes + _PAGE * count + rows, mask=rows < end, other=-1)
    return slot, position, record, page, tl.load(changes + _REST * count + rows, mask=rows < end, other=0)


@jit
def _set_index(episodes, slot, record, position, block, page, mask):
    tl.store(episodes.episode + slot, record, mask=mask)
    if episodes.tree.pages is not None:
        tl.store(episodes.position_of + slot, position, mask=mask)
        tl.store(episodes.tree.pages + block, page, mask=mask & (page >= 0))


@jit
def _refresh(episodes, records, count, num_rows: tl.constexpr):
    refresh(episodes.totals, episodes.totals.nodes, records, count, False, 64 if num_rows > 64 else num_rows)


@jit
def _apply(episodes, changes, d, number, num_removed, count, num_rows: tl.constexpr):
    none, empty = tl.cast(episodes.totals.capacity, tl.int64) - 1, tl.cast(episodes.num_lanes, tl.int64) * episodes.span
    # The last transition of a page is the last one that is removed: no later row needs the page.
    for start in range(0, num_removed, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, position, record, page, first = _load(changes, rows, num_removed, count)
        _set_masses(episodes, record, position, tl.zeros_like(position), position >= 0)
        tl.debug_barrier()
        _set_index(episodes, slot, none, empty, position >> _PAGE_BITS, page, position >= 0)
        tl.store(episodes.start_of + record, first, mask=position >= 0)
    tl.debug_barrier()
    for start in range(num_removed, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, position, record, page, marks = _load(changes, rows, count, count)
        begins, ends = (position >= 0) & ((marks & _BEGINS) != 0), (position >= 0) & ((marks & _ENDS) != 0)
        _set_index(episodes, slot, record, position, position >> _PAGE_BITS, page, position >= 0)
        tl.store(episodes.start_of + record, position, mask=begins)
        tl.store(episodes.updated_at + record, 0, mask=begins)
        tl.store(episodes.is_finished + record, False, mask=begins)
        tl.debug_barrier()
        _set_masses(episodes, record, position, mass_of(tl.load(d)) + tl.zeros_like(position), position >= 0)
        tl.store(episodes.updated_at + record, tl.load(number) + 1, mask=ends)
        tl.store(episodes.is_finished + record, (marks & _FINISHED) != 0, mask=ends)
    tl.debug_barrier()
    _refresh(episodes, changes + _RECORD * count, count, num_rows)


@jit
def _update(episodes, slots, d, number, records, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    none = tl.cast(episodes.totals.capacity, tl.int64) - 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        in_range = (slot >= 0) & (slot < episodes.num_slots)
        slot = tl.where(in_range, slot, 0)
        record = tl.load(episodes.episode + slot).to(tl.int64)
        mask = in_range & (record >= 0) & (record < none)
        tl.store(records + rows, tl.where(mask, record, -1), mask=rows < count)
        new = mass_of(tl.load(d + (0 if is_one else 1) * rows, mask=mask, other=0.0))
        position = within(position_of(episodes, slot), episodes.tree.capacity)
        _set_masses(episodes, record, position, new, mask)
        if number is not None:
            tl.store(episodes.updated_at + record, tl.load(number), mask=mask)
    tl.debug_barrier()
    _refresh(episodes, records, count, num_rows)


def apply(changes, num_removed, d, num_writes, *episodes):
    """See the loop of the same name."""
    state = episodes_of(*episodes), changes, d, num_writes, num_removed
    in_one_block(_apply, 256, changes.shape[1], *state, num_warps=8)


def update(slots, d, number, *episodes):
    """See the loop of the same name."""
    rows = slots, d, some(number), torch.empty_like(slots)
    in_one_block(_update, 256, len(slots), episodes_of(*episodes), *rows, is_one=len(d) == 1, num_warps=8)
