"""The kernels of draws from event tables for CUDA, in torch; see :mod:`torchrl_replay_ext.kernels.events`.

Indices are clamped, because the arrays may hold anything.
"""

from __future__ import annotations

import torch

from torchrl_replay_ext.functional import METHODS, table_ends
from torchrl_replay_ext.kernels.cuda import tree as trees
from torchrl_replay_ext.kernels.layouts import UNIT
from torchrl_replay_ext.kernels.splitmix import uniform

_MULTINOMIAL = METHODS.index("multinomial")


def _positions(slots, counts, position_of):
    """The positions of ``slots`` [n] in each table, negative where a table does not hold them; int64 [tables, n]."""
    slots = slots.clamp(0, position_of.shape[1] - 1)
    listed = position_of.index_select(1, slots).to(torch.int64)
    return listed if len(counts) == len(position_of) else torch.cat([slots.unsqueeze(0), listed])


def set_masses(leaves, nodes, pages, d, alpha, slots, slot_at, position_of, counts, journal, begin, end):
    """See the loop of the same name."""
    numbers = torch.arange(max(begin, end - len(journal)), end, device=journal.device)
    changed = journal[numbers % max(len(journal), 1), 0].to(torch.int64)
    exists = (slots >= 0) & (slots < position_of.shape[1])
    index = torch.cat([changed, torch.where(exists, _positions(slots, counts, position_of), -1).reshape(-1)])
    if not len(index):
        return
    slot = slot_at[index.clamp(0, len(slot_at) - 1)].to(torch.int64)
    mass = (slot >= 0).to(torch.int64) * UNIT
    if len(d):
        priority = d[slot.clamp(0, len(d) - 1)].abs().to(torch.float64)
        mass = torch.where(slot >= 0, (priority ** alpha[0] * UNIT).ceil(), 0.0).to(torch.int64)
    trees.write(leaves, nodes, nodes[:0], pages, len(slot_at), index, mass)


def draw(
    seed, shares, min_sizes, allocation, leaves, nodes, pages, _is_uniform, counts, begins, slot_at, position_of,
    is_mixed, table, eta, slots, density, probability,
):  # fmt: skip
    """See the loop of the same name. The rows are in another random order."""
    count, capacity = len(table), len(slot_at)
    ends, leaf, mass = torch.empty_like(begins), torch.empty_like(table), torch.empty_like(table)
    trees.prefix(leaves, nodes, pages, capacity, begins, ends)
    total = ends.diff()
    needed = torch.where(min_sizes < 0, count, min_sizes)
    used = shares * ((total > 0) & (counts >= needed))
    is_default = (torch.arange(len(counts), device=table.device) == 0).to(torch.float64)
    eta.copy_(torch.where(used.sum() > 0, used / used.sum(), is_default))
    # of the rows, their order and their tables
    u, order, first = uniform(seed, 4 * count + 1).tensor_split((count, 3 * count))
    rows_before = table_ends(eta, count, METHODS[allocation], first[: count if allocation == _MULTINOMIAL else 1])
    number = torch.searchsorted(rows_before, torch.arange(count, device=table.device), right=True)
    table.copy_(number.clamp_max(len(counts) - 1)[order[:count].argsort()])
    width = total[table]
    target = ends[table] + torch.minimum((u * width).to(torch.int64), width - 1).clamp_min(0)
    trees.find(leaves, nodes, pages, capacity, target, leaf, mass)
    slots.copy_(slot_at[leaf.clamp(0, capacity - 1)].clamp(0, position_of.shape[1] - 1))
    mixture(slots, eta / total.clamp_min(1), leaves, position_of, density)
    probability.copy_(density)
    if not is_mixed:
        density.copy_(mass * (counts / total.clamp_min(1))[table])


def mixture(slots, per_mass, leaves, position_of, probability):
    """See the loop of the same name."""
    position = _positions(slots, per_mass, position_of)
    mass = leaves[position.clamp(0, len(leaves) - 1)] * (position >= 0)
    probability.copy_((mass * per_mass.unsqueeze(1)).sum(0))
