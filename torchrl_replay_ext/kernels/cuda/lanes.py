"""The kernel that assigns lanes for CUDA; see :mod:`torchrl_replay_ext.kernels.lanes`. One program does all rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchrl_replay_ext.kernels import lanes_layout
from torchrl_replay_ext.kernels.cuda.tree import jit

_NONE = tl.constexpr(lanes_layout.NONE)
_TRAJECTORY, _WRITTEN = tl.constexpr(lanes_layout.TRAJECTORY), tl.constexpr(lanes_layout.WRITTEN)
_OPEN, _CHAIN = tl.constexpr(lanes_layout.OPEN), tl.constexpr(lanes_layout.CHAIN)
_DONE, _TOO_MANY = tl.constexpr(lanes_layout.DONE), tl.constexpr(lanes_layout.TOO_MANY)
_INTERRUPTS = tl.constexpr(lanes_layout.INTERRUPTS)


@jit
def _assign(
    lanes, interrupted, slots, trajectory, ended, initial, lane_of, begins, result, count, num_lanes,
    has_ids: tl.constexpr, has_initial: tl.constexpr, is_assigned: tl.constexpr, can_refuse: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block).to(tl.int64)
    exists = column < num_lanes
    ids, written = lanes + _TRAJECTORY * num_lanes, lanes + _WRITTEN * num_lanes
    is_open, chain = lanes + _OPEN * num_lanes, lanes + _CHAIN * num_lanes
    now = tl.max(tl.load(written + column, mask=exists, other=0), axis=0)
    num_runs = tl.full((), 0, tl.int64)
    if has_ids:
        for row in range(1, count):
            num_runs += (tl.load(trajectory + row) == tl.load(trajectory + row - 1)).to(tl.int64)
    per_lane = tl.where(count % num_lanes == 0, count // num_lanes, count)
    num_interrupted = tl.full((), 0, tl.int64)
    outcome = tl.full((), _DONE, tl.int64)
    cause = tl.full((), 0, tl.int64)
    lane = tl.full((), 0, tl.int64)
    for row in range(count):
        tl.debug_barrier()
        number = tl.load(trajectory + row) if has_ids else tl.full((), _NONE, tl.int64)
        is_initial = (tl.load(initial + row) if has_initial else tl.full((), 0, tl.int64)) != 0
        if is_assigned:
            last = lane
            taken = tl.load(is_open + column, mask=exists, other=1) > 0
            matches = exists & taken & (tl.load(ids + column, mask=exists, other=0) == number)
            distance = tl.min(tl.where(matches, (column - last + num_lanes) % num_lanes, num_lanes), axis=0)
            all_taken = tl.min(taken.to(tl.int64), axis=0) > 0
            age = tl.load(written + column, mask=exists, other=0)
            age = tl.where(exists & (all_taken | (taken == 0)), age, 2**62)
            oldest = tl.min(tl.where(age == tl.min(age, axis=0), column, num_lanes), axis=0)
            goes_on = (num_runs > 0) & (row % per_lane > 0) & (tl.load(is_open + last) == 0)
            lane = tl.where(goes_on, last, oldest)
            lane = tl.where(distance < num_lanes, (last + distance) % num_lanes, lane)
        else:
            lane = tl.load(slots + row) % num_lanes
        was_open = tl.load(is_open + lane) > 0
        before, first = tl.load(ids + lane), tl.load(chain + lane)
        interrupts = was_open & (before != number)
        counts = interrupts & (is_initial == 0)
        returns = first == number
        if is_assigned:
            known = tl.load(chain + column, mask=exists, other=_NONE) == number
            returns = (first != _NONE) & (tl.max(known.to(tl.int64), axis=0) > 0)
        num_interrupted += counts.to(tl.int64)
        if can_refuse:
            refused = counts & returns & (outcome != _TOO_MANY)
            cause = tl.where(refused, number, cause)
            outcome = tl.where(refused, _TOO_MANY, outcome)
        is_first = counts & (outcome == _DONE)
        cause = tl.where(is_first, number, cause)
        outcome = tl.where(is_first, _INTERRUPTS, outcome)
        begun = interrupts | is_initial | (was_open == 0)
        tl.debug_barrier()
        tl.store(lane_of + row, lane)
        tl.store(begins + row, begun)
        tl.store(chain + lane, tl.where(interrupts, tl.where(first == _NONE, before, first), _NONE), mask=begun)
        tl.store(ids + lane, number)
        tl.store(written + lane, now + 1 + row)
        tl.store(is_open + lane, (tl.load(ended + row) == 0).to(tl.int64))
    tl.store(interrupted, tl.load(interrupted) + num_interrupted)
    tl.store(result, outcome)
    tl.store(result + 1, cause)


def assign(lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness):
    """See the loop of the same name. Only if ``strictness`` is not ``UNCHECKED``, the host waits for the outcome.

    Returns the lanes of the rows and whether episodes begin with them; None if the write is refused.
    """
    lane_of, begins = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool)
    can_refuse = strictness > lanes_layout.UNCHECKED
    state, total = (lanes.clone(), interrupted.clone()) if can_refuse else (lanes, interrupted)
    num_lanes, rows = lanes.shape[1], (slots, trajectory, ended, initial, lane_of, begins)
    _assign[(1,)](
        state, total, *rows, result, len(slots), num_lanes,
        has_ids=len(trajectory) > 0, has_initial=len(initial) > 0, is_assigned=is_assigned, can_refuse=can_refuse,
        block=triton.next_power_of_2(num_lanes), num_warps=1,
    )  # fmt: skip
    if can_refuse:
        outcome = int(result[0])
        careful = outcome == lanes_layout.INTERRUPTS and strictness == lanes_layout.CAREFUL
        if outcome == lanes_layout.TOO_MANY or careful:
            return None
        lanes.copy_(state)
        interrupted.copy_(total)
    return lane_of, begins
