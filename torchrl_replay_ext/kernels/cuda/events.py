"""The kernels of draws from event tables for CUDA; see :mod:`torchrl_replay_ext.kernels.events`.

Indices are clamped, because the arrays may hold anything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from torchrl_replay_ext.functional import METHODS, table_ends
from torchrl_replay_ext.kernels.cuda import tree as trees
from torchrl_replay_ext.kernels.cuda.launch import for_each, jit, random_number, some, within


class Tables(NamedTuple):
    """Where the entries of tables are, as one argument of a kernel."""

    position_of: Tensor
    num_slots: int
    num_tables: int
    # 1 if the first table holds each slot at its own position, else 0
    first: int


def _tables_of(position_of: Tensor, num_tables: int) -> Tables:
    return Tables(position_of, position_of.shape[1], num_tables, num_tables - len(position_of))


@jit
def _position(tables, table, slot):
    """The position of a slot in a table; negative if the table does not hold it, or if it is out of range."""
    is_slot = (slot >= 0) & (slot < tables.num_slots)
    at = (table - tables.first).to(tl.int64) * tables.num_slots + slot
    listed = tl.load(tables.position_of + at, mask=is_slot & (table >= tables.first), other=-1).to(tl.int64)
    return tl.where(is_slot & (table < tables.first), slot, listed)


@jit
def _mass(state, number):
    """The position and the mass of an entry: first of those that changed, then of each slot in each table."""
    # what may be None, and a tree, keep their types only inside of the tuple
    tables, slots, journal, begin, length, num_changed, slot_at, capacity, alpha = state[0]
    is_changed, rest = number < num_changed, number - num_changed
    changed = tl.load(journal + 2 * ((begin + number) % length), mask=is_changed, other=0).to(tl.int64)
    slot = tl.load(slots + rest // tables.num_tables, mask=is_changed == 0, other=-1)
    position = tl.where(is_changed, changed, _position(tables, rest % tables.num_tables, slot))
    slot = tl.load(slot_at + within(position, capacity)).to(tl.int64)
    priority = tl.full(slot.shape, 1.0, tl.float64)
    if state[1] is not None:
        priority = tl.abs(tl.load(state[1] + within(slot, tables.num_slots))).to(tl.float64)
        priority = trees.power(priority, tl.load(alpha))
    return position, tl.where(slot >= 0, trees.mass_of(priority), 0)


@jit
def _mixture(state, slot):
    tables, per_mass, leaves, num_leaves = state
    result = tl.zeros(slot.shape, tl.float64)
    for table in range(tables.num_tables):
        position = _position(tables, table + tl.zeros_like(slot), slot)
        mass = tl.load(leaves + within(position, num_leaves), mask=position >= 0, other=0)
        result += mass * tl.load(per_mass + table)
    return result


@jit
def _draw(state, row):
    """The slot, the density and the probability of a row."""
    mixture, seed, table, ends, slot_at = state[0]
    k = within(tl.load(table + row), mixture[0].num_tables)
    begin = tl.load(ends + k)
    total = tl.load(ends + k + 1) - begin
    target = tl.minimum((random_number(seed, row) * total).to(tl.int64), total - 1)
    leaf, mass = trees.find_leaf(state[2], begin + tl.maximum(target, 0))
    slot = within(tl.load(slot_at + leaf), mixture[0].num_slots)
    probability = _mixture(mixture, slot)
    density = probability
    if state[1] is not None:
        density = mass * (tl.load(state[1] + k).to(tl.float64) / tl.maximum(total, 1))
    return slot, density, probability.to(tl.float32)


def set_masses(leaves, nodes, pages, d, alpha, slots, slot_at, position_of, counts, journal, begin, end):
    """See the loop of the same name."""
    tables, begin = _tables_of(position_of, len(counts)), max(begin, end - len(journal))
    index, mass = leaves.new_empty(2, end - begin + len(slots) * len(counts))
    if not len(index):
        return
    changes = slots, journal, begin, len(journal), end - begin
    for_each(_mass, ((tables, *changes, slot_at, len(slot_at), alpha), some(d)), None, index, mass)
    trees.write(leaves, nodes, nodes[:0], pages, len(slot_at), index, mass)


def draw(
    seed, shares, min_sizes, allocation, leaves, nodes, pages, _is_uniform, counts, begins, slot_at, position_of,
    is_mixed, table, eta, slots, density, probability,
):  # fmt: skip
    """See the loop of the same name. The rows are in another random order."""
    count, ends = len(table), torch.empty_like(begins)
    trees.prefix(leaves, nodes, pages, len(slot_at), begins, ends)
    total = ends.diff()
    used = shares * ((total > 0) & (counts >= min_sizes.masked_fill(min_sizes < 0, count)))
    # if no table is used, rows come from the default table
    used[:1].add_(used.sum() <= 0)
    torch.div(used, used.sum(), out=eta)
    # numbers after those of the rows: of their order and of their tables
    u = seed.new_empty(4 * count, dtype=torch.float64)
    for_each(random_number, seed, None, u)
    order, first = u[count : 2 * count], u[3 * count :]
    ends_of_rows = table_ends(eta, count, METHODS[allocation], first)
    torch.searchsorted(ends_of_rows, order.argsort(), right=True, out=table)
    tables = _tables_of(position_of, len(counts)), eta / total.clamp_min(1), leaves, len(leaves)
    tree = trees.tree_of(leaves, nodes, some(pages), len(slot_at))
    state = (tables, seed, table, ends, slot_at), None if is_mixed else counts, tree
    for_each(_draw, state, None, slots, density, probability, num_rows=16)


def mixture(slots, per_mass, leaves, position_of, probability):
    """See the loop of the same name."""
    state = _tables_of(position_of, len(per_mass)), per_mass, leaves, len(leaves)
    for_each(_mixture, state, slots, probability)
