"""ReaPER's kernels for CUDA; see :mod:`torchrl_replay_ext.kernels.reaper`."""

from __future__ import annotations

import math

import torch
import triton.language as tl

from torchrl_replay_ext.kernels.cuda.episodes import episodes_of, position_of
from torchrl_replay_ext.kernels.cuda.launch import for_each, in_blocks, jit, random_number, some, within
from torchrl_replay_ext.kernels.cuda.tree import find_leaf, power, sum_before, tree_of

# Rows that reject so many proposals get the last one: a pass over all Ψ, as on the CPU, would take a thread block
# longer. If one of 5000 proposals is accepted, this happens to 2 rows in 10^6.
ROUNDS = tl.constexpr(1 << 16)
# Rows of a thread block of draws, and proposals of a row that are tested together; the first accepted one counts.
_ROWS, _TRIES = 4, 16


@jit
def _reliability(episodes, slot):
    """R of ``slot`` [n], float64; slots out of range are clamped."""
    slot = within(slot, episodes.num_slots)
    record = within(tl.load(episodes.arrays.episode + slot), episodes.totals.capacity)
    largest = tl.maximum(tl.load(episodes.totals.nodes), tl.cast(episodes.least_largest, tl.int64))
    whole = tl.where(tl.load(episodes.arrays.is_finished + record), tl.load(episodes.totals.leaves + record), largest)
    is_one = (tl.load(episodes.generation + slot) > tl.load(episodes.arrays.updated_at + record)) | (whole <= 0)
    position = position_of(episodes, slot)
    start = tl.load(episodes.arrays.start_of + record).to(tl.int64)
    total = sum_before(episodes.tree, position + 1) - sum_before(episodes.tree, start)
    # add the total of the lane if the episode wraps around the end of its ring
    lane = within(position // episodes.arrays.span, episodes.arrays.num_lanes)
    total += tl.where(position < start, tl.load(episodes.arrays.lane_total + lane), 0)
    share = total.to(tl.float64) / tl.where(is_one, 1, whole).to(tl.float64)
    return tl.where(is_one, 1.0, tl.minimum(tl.maximum(share, 0.0), 1.0))


@jit
def _draw(seed, omega, masses, leaf, density, episodes, count, num_rows: tl.constexpr, num_tries: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    tries = tl.arange(0, num_tries)
    exponent, pending = tl.load(omega), (rows < count) & (tl.load(masses.nodes) > 0)
    found, psi = tl.zeros([num_rows], tl.int64), tl.zeros([num_rows], tl.float64)
    attempt = 0
    while (tl.max(pending.to(tl.int32), axis=0) > 0) & (attempt < ROUNDS):
        number = (rows[:, None] << 32) + 2 * (attempt + tries[None, :])
        proposed, mass = find_leaf(masses, tl.reshape(random_number(seed, number), [num_rows * num_tries]))
        factor = power(_reliability(episodes, proposed), exponent)
        weight = tl.reshape(factor * mass.to(tl.float64), [num_rows, num_tries])
        factor, proposed = tl.reshape(factor, [num_rows, num_tries]), tl.reshape(proposed, [num_rows, num_tries])
        accepted = random_number(seed, number + 1) < factor
        # the first accepted proposal, or the last one
        which = tl.min(tl.where(accepted, tries[None, :], num_tries - 1), axis=1)
        is_it = tries[None, :] == which[:, None]
        found = tl.where(pending, tl.sum(tl.where(is_it, proposed, 0), axis=1), found)
        psi = tl.where(pending, tl.sum(tl.where(is_it, weight, 0.0), axis=1), psi)
        pending = pending & (tl.max(accepted.to(tl.int32), axis=1) == 0)
        attempt += num_tries
    tl.store(leaf + rows, found, mask=rows < count)
    tl.store(density + rows, psi, mask=rows < count)


def reliability(slots, result, *episodes):
    """See the loop of the same name."""
    for_each(_reliability, episodes_of(*episodes), slots, result)


def smallest(masses, _d, omega, result, *episodes):
    """See the loop of the same name."""
    factor = torch.empty(len(masses), dtype=torch.float64, device=masses.device)
    for_each(_reliability, episodes_of(*episodes), None, factor)
    psi = masses * factor**omega
    result.copy_(torch.where(psi > 0, psi, math.inf).min())


def draw(seed, omega, leaves, nodes, pages, capacity, leaf, density, *episodes):
    """See the loop of the same name."""
    state = tree_of(leaves, nodes, some(pages), capacity), leaf, density, episodes_of(*episodes)
    in_blocks(_draw, _ROWS, len(leaf), seed, omega, *state, num_tries=_TRIES)
