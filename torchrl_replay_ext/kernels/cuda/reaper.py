"""ReaPER's kernels for CUDA; see :mod:`torchrl_replay_ext.kernels.reaper`."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.episodes import episodes_of, position_of
from torchrl_replay_ext.kernels.cuda.launch import for_each, in_blocks, jit, random_number, some, within
from torchrl_replay_ext.kernels.cuda.tree import find_leaf, place_of, power, sum_before, tree_of
from torchrl_replay_ext.kernels.reaper import LAST

_LAST = tl.constexpr(LAST)
# Rows that reject so many proposals are drawn by a pass over all Ψ. It takes longer than on the CPU, because a
# single thread block makes it.
ROUNDS = tl.constexpr(1024)
# Rows of a thread block of draws, and proposals of a row that are tested together; the first accepted one counts.
_ROWS, _TRIES = 4, 16
# slots that are processed together
_SLOTS = 64


@jit
def _reliability(episodes, slot):
    """R of ``slot`` [n], float64; slots out of range are clamped."""
    slot = within(slot, episodes.num_slots)
    record = within(tl.load(episodes.episode + slot), episodes.totals.capacity)
    largest = tl.maximum(tl.load(episodes.totals.nodes), tl.cast(episodes.least_largest, tl.int64))
    whole = tl.where(tl.load(episodes.is_finished + record), tl.load(episodes.totals.leaves + record), largest)
    is_one = (tl.load(episodes.generation + slot) > tl.load(episodes.updated_at + record)) | (whole <= 0)
    position = position_of(episodes, slot)
    start = tl.load(episodes.start_of + record).to(tl.int64)
    total = sum_before(episodes.tree, position + 1) - sum_before(episodes.tree, start)
    # add the total of the lane if the episode wraps around the end of its ring
    lane = within(position // episodes.span, episodes.num_lanes)
    total += tl.where(position < start, tl.load(episodes.lane_total + lane), 0)
    share = total.to(tl.float64) / tl.where(is_one, 1, whole).to(tl.float64)
    return tl.where(is_one, 1.0, tl.minimum(tl.maximum(share, 0.0), 1.0))


@jit
def _draw(
    seed, omega, masses, leaf, density, episodes, count, num_rows: tl.constexpr, num_tries: tl.constexpr,
    num_leaves: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    tries = tl.arange(0, num_tries)
    exponent, width = tl.load(omega), tl.load(masses.nodes)
    pending = (rows < count) & (width > 0)
    found, psi = tl.zeros([num_rows], tl.int64), tl.zeros([num_rows], tl.float64)
    attempt = 0
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (attempt < ROUNDS):
        number = (rows[:, None] << 32) + 2 * (attempt + tries[None, :])
        # the product may be rounded up to the total
        rest = (random_number(seed, number) * width.to(tl.float64)).to(tl.int64)
        rest = tl.maximum(tl.minimum(rest, width - 1), 0)
        proposed, mass = find_leaf(masses, tl.reshape(rest, [num_rows * num_tries]))
        factor = power(_reliability(episodes, proposed), exponent)
        weight = tl.reshape(factor * mass.to(tl.float64), [num_rows, num_tries])
        factor, proposed = tl.reshape(factor, [num_rows, num_tries]), tl.reshape(proposed, [num_rows, num_tries])
        accepted = (random_number(seed, number + 1) < factor) & pending[:, None]
        # the first accepted proposal, or the last one
        which = tl.min(tl.where(accepted, tries[None, :], num_tries - 1), axis=1)
        is_it = pending[:, None] & (tries[None, :] == which[:, None])
        found = tl.where(pending, tl.sum(tl.where(is_it, proposed, 0), axis=1), found)
        psi += tl.sum(tl.where(is_it & accepted, weight, 0.0), axis=1)
        pending = pending & (psi == 0)
        attempt += num_tries
    if tl.max(pending.to(tl.int32), axis=0) > 0:
        # of exponential numbers with the rates Ψ, the smallest one
        best = tl.full([num_rows], float("inf"), tl.float64)
        for block in range(0, masses.capacity, num_leaves):
            node = block + tl.arange(0, num_leaves).to(tl.int64)
            is_leaf = node < masses.capacity
            node = tl.where(is_leaf, node, 0)
            mass = tl.load(masses.leaves + place_of(masses, node), mask=is_leaf, other=0)
            rate = mass.to(tl.float64) * power(_reliability(episodes, node), exponent)
            number = (rows[:, None] << 32) + _LAST + node[None, :]
            time = -tl.log(1 - random_number(seed, number)) / tl.where(rate > 0, rate, 1.0)[None, :]
            time = tl.where((rate > 0)[None, :] & pending[:, None], time, float("inf"))
            first = tl.min(time, axis=1)
            is_it = (time == first[:, None]) & (first < best)[:, None]
            found = tl.where(first < best, tl.max(tl.where(is_it, node[None, :], 0), axis=1), found)
            psi = tl.where(first < best, tl.max(tl.where(is_it, rate[None, :], 0.0), axis=1), psi)
            best = tl.minimum(best, first)
    tl.store(leaf + rows, found, mask=rows < count)
    tl.store(density + rows, psi, mask=rows < count)


def reliability(slots, result, *episodes):
    """See the loop of the same name."""
    for_each(_reliability, episodes_of(*episodes), slots, result)


def smallest(masses, omega, result, *episodes):
    """See the loop of the same name."""
    slots = torch.arange(len(masses), device=masses.device)
    factor = torch.empty(len(masses), dtype=torch.float64, device=masses.device)
    reliability(slots, factor, *episodes)
    psi = masses * factor**omega
    result.copy_(torch.where(psi > 0, psi, math.inf).min())


def draw(seed, omega, leaves, nodes, pages, capacity, leaf, density, *episodes):
    """See the loop of the same name."""
    in_blocks(
        _draw, _ROWS, len(leaf), seed, omega, tree_of(leaves, nodes, some(pages), capacity), leaf, density,
        episodes_of(*episodes), num_tries=_TRIES, num_leaves=_SLOTS,
    )  # fmt: skip
