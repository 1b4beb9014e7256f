"""The kernels of episodes for CUDA; see :mod:`torchrl_replay_ext.kernels.episodes`. One program does all rows.

Writes are decided on the host. Barriers separate the steps in which their changes are made here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl

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
    # without those of the trees
    arrays: loops.Episodes
    # of draws only
    least_largest: int = 0
    generation: Any = None


def episodes_of(*arrays: Any) -> Episodes:
    """The argument of a kernel, from the arguments of a loop with or without ``least_largest`` and ``generation``."""
    e, reads = loops.Episodes(*arrays[:14]), arrays[14:]
    totals = tree_of(e.totals, e.maxima, None, len(e.start_of))
    tree = tree_of(e.leaves, e.nodes, some(e.pages), e.capacity)
    without_trees = e._replace(leaves=None, nodes=None, pages=None, capacity=None, totals=None, maxima=None)
    return Episodes(totals, tree, len(e.episode), without_trees, *reads)


@jit
def position_of(episodes, slot):
    """The position, perhaps out of range, of a slot in range."""
    position = slot % episodes.arrays.num_lanes * episodes.arrays.span + slot // episodes.arrays.num_lanes
    if episodes.tree.pages is not None:
        position = tl.load(episodes.arrays.position_of + slot).to(tl.int64)
    return position


@jit
def _set_masses(episodes, record, position, mass, mask):
    """Set the masses at distinct positions. The order does not matter."""
    change = put(episodes.tree, position, mass, mask)
    add(episodes.totals.leaves + record, change, mask)
    add(episodes.arrays.lane_total + within(position // episodes.arrays.span, episodes.arrays.num_lanes), change, mask)


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
    tl.store(episodes.arrays.episode + slot, record, mask=mask)
    if episodes.tree.pages is not None:
        tl.store(episodes.arrays.position_of + slot, position, mask=mask)
        tl.store(episodes.tree.pages + block, page, mask=mask & (page >= 0))


@jit
def _apply(episodes, changes, d, number, num_removed, count, num_rows: tl.constexpr):
    none = tl.cast(episodes.totals.capacity, tl.int64) - 1
    empty = tl.cast(episodes.arrays.num_lanes, tl.int64) * episodes.arrays.span
    # The last transition of a page is the last one that is removed: no later row needs the page.
    for start in range(0, num_removed, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, position, record, page, first = _load(changes, rows, num_removed, count)
        _set_masses(episodes, record, position, tl.zeros_like(position), position >= 0)
        tl.debug_barrier()
        _set_index(episodes, slot, none, empty, position >> _PAGE_BITS, page, position >= 0)
        tl.store(episodes.arrays.start_of + record, first, mask=position >= 0)
    tl.debug_barrier()
    for start in range(num_removed, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot, position, record, page, marks = _load(changes, rows, count, count)
        begins, ends = (position >= 0) & ((marks & _BEGINS) != 0), (position >= 0) & ((marks & _ENDS) != 0)
        _set_index(episodes, slot, record, position, position >> _PAGE_BITS, page, position >= 0)
        tl.store(episodes.arrays.start_of + record, position, mask=begins)
        tl.store(episodes.arrays.updated_at + record, 0, mask=begins)
        tl.store(episodes.arrays.is_finished + record, False, mask=begins)
        tl.debug_barrier()
        _set_masses(episodes, record, position, mass_of(tl.load(d)) + tl.zeros_like(position), position >= 0)
        tl.store(episodes.arrays.updated_at + record, tl.load(number) + 1, mask=ends)
        tl.store(episodes.arrays.is_finished + record, (marks & _FINISHED) != 0, mask=ends)
    tl.debug_barrier()
    refresh(episodes.totals, episodes.totals.nodes, changes + _RECORD * count, count, False, num_rows)


@jit
def _update(episodes, slots, d, number, records, count, is_one: tl.constexpr, num_rows: tl.constexpr):
    none = tl.cast(episodes.totals.capacity, tl.int64) - 1
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        inside = within(slot, episodes.num_slots)
        record = tl.load(episodes.arrays.episode + inside).to(tl.int64)
        mask = (inside == slot) & (record >= 0) & (record < none)
        tl.store(records + rows, tl.where(mask, record, -1), mask=rows < count)
        new = mass_of(tl.load(d + (0 if is_one else 1) * rows, mask=mask, other=0.0))
        position = within(position_of(episodes, inside), episodes.tree.capacity)
        _set_masses(episodes, record, position, new, mask)
        if number is not None:
            tl.store(episodes.arrays.updated_at + record, tl.load(number), mask=mask)
    tl.debug_barrier()
    refresh(episodes.totals, episodes.totals.nodes, records, count, False, num_rows)


def apply(changes, num_removed, d, num_writes, *episodes):
    """See the loop of the same name."""
    state = episodes_of(*episodes), changes, d, num_writes, num_removed
    in_one_block(_apply, 256, changes.shape[1], *state, num_warps=8)


def update(slots, d, number, *episodes):
    """See the loop of the same name."""
    rows = slots, d, some(number), torch.empty_like(slots)
    in_one_block(_update, 256, len(slots), episodes_of(*episodes), *rows, is_one=len(d) == 1, num_warps=8)
