"""The kernels of draws from event tables for CUDA; see :mod:`torchrl_replay_ext.kernels.events`."""

from __future__ import annotations

import triton
import triton.language as tl

from torchrl_replay_ext.kernels import events
from torchrl_replay_ext.kernels.cuda import tree as trees
from torchrl_replay_ext.kernels.cuda.launch import in_blocks, jit, some, within
from torchrl_replay_ext.kernels.cuda.reaper import uniform
from torchrl_replay_ext.kernels.cuda.tree import find_leaf, mass_of, power, sum_before, tree_of
from torchrl_replay_ext.kernels.tree_layout import UNIT

_SYSTEMATIC, _MULTINOMIAL = tl.constexpr(events.SYSTEMATIC), tl.constexpr(events.MULTINOMIAL)
_UNIT = tl.constexpr(UNIT)
# rows of a thread block, and rows that a row is compared with at a time
_ROWS, _TOGETHER = 16, 256


@jit
def _table_of(rows, key, eta, count, tables, allocation: tl.constexpr, pad: tl.constexpr, together: tl.constexpr):
    """The table of each row."""
    k = tl.arange(0, pad)
    last = tl.max(tl.where(eta > 0, k, 0), axis=0)
    # the number of rows of each table, which may be a fraction
    wanted = count * eta
    if allocation == _MULTINOMIAL:
        point = count * uniform(key, 3 * count + rows)
    else:
        # the place of each row in a random order
        own, place = uniform(key, count + rows), tl.zeros_like(rows).to(tl.int32)
        for start in range(0, count, together):
            others = start + tl.arange(0, together).to(tl.int64)
            theirs = uniform(key, count + others)
            precedes = (theirs[None, :] < own[:, None]) | (
                (theirs[None, :] == own[:, None]) & (others[None, :] < rows[:, None])
            )
            place += tl.sum((precedes & (others < count)[None, :]).to(tl.int32), axis=1)
        point = place.to(tl.float64)
        if allocation == _SYSTEMATIC:
            point += uniform(key, tl.cast(3 * count, tl.int64))
        else:
            fraction = wanted - tl.floor(wanted)
            ahead = (fraction[None, :] > fraction[:, None]) | (
                (fraction[None, :] == fraction[:, None]) & (k[None, :] < k[:, None])
            )
            wanted -= fraction
            wanted += (tl.sum(ahead.to(tl.int32), axis=1) < count - tl.sum(wanted, axis=0)).to(tl.float64)
    ends = tl.cumsum(wanted, axis=0)
    return tl.minimum(tl.sum((point[:, None] >= ends[None, :]).to(tl.int32), axis=1), last)


@jit
def _mixed(slot, per_mass, leaves, num_leaves, places, num_slots, tables, lists, pad: tl.constexpr):
    """The probability of each slot; ``per_mass``: [pad]."""
    result = tl.zeros_like(slot).to(tl.float64)
    for k in range(tables):
        position = slot
        if k >= tables - lists:
            position = tl.load(places + (k - tables + lists).to(tl.int64) * num_slots + slot).to(tl.int64)
        held = (position >= 0) & (position < num_leaves)
        mass = tl.load(leaves + position, mask=held, other=0).to(tl.float64)
        result += mass * tl.sum(tl.where(tl.arange(0, pad) == k, per_mass, 0.0), axis=0)
    return result


@jit
def _draw(
    seed, shares, min_sizes, tree, counts, begins, slot_at, places, num_slots, lists,
    table, eta, slots, density, probability, count, tables,
    allocation: tl.constexpr, is_mixed: tl.constexpr, pad: tl.constexpr, num_rows: tl.constexpr,
    together: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    in_batch, k = rows < count, tl.arange(0, pad)
    is_table, key = k < tables, tl.load(seed).to(tl.uint64)
    ahead = sum_before(tree, tl.load(begins + k, mask=is_table, other=0))
    own = sum_before(tree, tl.load(begins + 1 + k, mask=is_table, other=0)) - ahead
    needed = tl.load(min_sizes + k, mask=is_table, other=0)
    held = tl.load(counts + k, mask=is_table, other=0)
    is_used = is_table & (own > 0) & (held >= tl.where(needed < 0, count, needed))
    share = tl.where(is_used, tl.load(shares + k, mask=is_table, other=0.0), 0.0)
    sum_of_shares = tl.sum(share, axis=0)
    share = tl.where(
        sum_of_shares > 0, share / tl.where(sum_of_shares > 0, sum_of_shares, 1.0), (k == 0).to(tl.float64)
    )
    tl.store(eta + k, share, mask=is_table & (tl.program_id(0) == 0))
    number = _table_of(rows, key, share, count, tables, allocation, pad, together)
    tl.store(table + rows, number.to(tl.int64), mask=in_batch)
    is_its = k[None, :] == number[:, None]
    width = tl.sum(tl.where(is_its, own[None, :], 0), axis=1)
    rest = (uniform(key, rows) * width.to(tl.float64)).to(tl.int64)
    rest = tl.sum(tl.where(is_its, ahead[None, :], 0), axis=1) + tl.maximum(tl.minimum(rest, width - 1), 0)
    leaf, mass = find_leaf(tree, rest)
    slot = within(tl.load(slot_at + leaf), num_slots)
    per_mass = tl.where(own > 0, share / tl.where(own > 0, own, 1).to(tl.float64), 0.0)
    mixed = _mixed(slot, per_mass, tree.leaves, tree.capacity, places, num_slots, tables, lists, pad)
    tl.store(slots + rows, slot, mask=in_batch)
    tl.store(probability + rows, mixed, mask=in_batch)
    if not is_mixed:
        size = tl.sum(tl.where(is_its, held[None, :], 0), axis=1).to(tl.float64)
        mixed = mass.to(tl.float64) * (size / tl.maximum(width, 1).to(tl.float64))
    tl.store(density + rows, mixed, mask=in_batch)


@jit
def _mixture(
    slots, weights, leaves, num_leaves, places, num_slots, probability, tables, lists, count,
    pad: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    rows, k = tl.program_id(0) * num_rows + tl.arange(0, num_rows), tl.arange(0, pad)
    slot = within(tl.load(slots + rows, mask=rows < count, other=0), num_slots)
    per_mass = tl.load(weights + k, mask=k < tables, other=0.0)
    mixed = _mixed(slot, per_mass, leaves, num_leaves, places, num_slots, tables, lists, pad)
    tl.store(probability + rows, mixed, mask=rows < count)


@jit
def _masses(
    d, alpha, slots, slot_at, capacity, places, num_slots, journal, length, begin, changes, count, lists, has_default,
    index, mass, is_power: tl.constexpr, num_rows: tl.constexpr,
):  # fmt: skip
    """The positions that change, -1 where none does, and their new masses: first those of the journal."""
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    is_change, size = rows < changes, changes + count * (lists + has_default)
    at = tl.load(journal + 2 * ((begin + rows) % length), mask=is_change, other=-1).to(tl.int64)
    # then each of the slots in the default table, if that has no list, and in each list
    is_row = (rows >= changes) & (rows < size)
    number = tl.where(is_row, rows - changes, 0)
    which = number // tl.maximum(count, 1) - has_default
    given = tl.load(slots + number % tl.maximum(count, 1), mask=is_row, other=-1)
    is_row = is_row & (given >= 0) & (given < num_slots)
    listed = tl.load(places + which * num_slots + given, mask=is_row & (which >= 0), other=-1).to(tl.int64)
    exists = is_change & (at >= 0) & (at < capacity)
    now = tl.load(slot_at + at, mask=exists, other=-1).to(tl.int64)
    slot = tl.where(is_change, now, given)
    new = tl.full([num_rows], _UNIT, tl.int64)
    if is_power:
        priority = tl.load(d + slot, mask=(slot >= 0) & (slot < num_slots), other=0.0).to(tl.float64)
        new = mass_of(power(tl.abs(priority), tl.load(alpha)))
    position = tl.where(is_change, at, tl.where(is_row & (which < 0), given, listed))
    tl.store(index + rows, position, mask=rows < size)
    tl.store(mass + rows, tl.where(slot >= 0, new, 0), mask=rows < size)


def set_masses(leaves, nodes, pages, d, alpha, slots, slot_at, places, counts, journal, begin, end):
    """See the loop of the same name."""
    begin, (lists, num_slots), count = max(begin, end - len(journal)), places.shape, len(slots)
    has_default = len(counts) - lists
    size = end - begin + count * (lists + has_default)
    if not size:
        return
    index, mass = leaves.new_empty(2, size)
    _masses[(triton.cdiv(size, _TOGETHER),)](
        d, alpha, slots, slot_at, len(slot_at), places, num_slots, journal, max(len(journal), 1), begin, end - begin,
        count, lists, has_default, index, mass, is_power=len(d) > 0, num_rows=_TOGETHER,
    )  # fmt: skip
    trees.write(leaves, nodes, nodes[:0], pages, len(slot_at), index, mass)


def draw(
    seed, shares, min_sizes, allocation, leaves, nodes, pages, is_uniform, counts, begins, slot_at, places, is_mixed,
    table, *results,
):  # fmt: skip
    """See the loop of the same name."""
    count, tables, (lists, num_slots) = len(table), len(counts), places.shape
    # the leaves of the tree after the last position have no mass
    _draw[(triton.cdiv(max(count, 1), _ROWS),)](
        seed, shares, min_sizes, tree_of(leaves, nodes, some(pages), len(slot_at)), counts, begins, slot_at, places,
        num_slots, lists, table, *results, count, tables, allocation=allocation, is_mixed=is_mixed,
        pad=max(2, triton.next_power_of_2(tables)), num_rows=_ROWS, together=_TOGETHER,
    )  # fmt: skip


def mixture(slots, per_mass, leaves, places, probability):
    """See the loop of the same name."""
    tables, (lists, num_slots) = len(per_mass), places.shape
    in_blocks(
        _mixture, _TOGETHER, len(slots), slots, per_mass, leaves, len(leaves), places, num_slots, probability, tables,
        lists, pad=max(2, triton.next_power_of_2(tables)),
    )  # fmt: skip
