"""The kernel that assigns lanes for CUDA; see :mod:`torchrl_replay_ext.kernels.lanes`.

One program does all rows, one after the other. It keeps the state of all lanes in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torchrl_replay_ext.kernels import lanes_layout
from torchrl_replay_ext.kernels.cuda.launch import jit, some

_NONE, _NEVER = tl.constexpr(lanes_layout.NONE), tl.constexpr(2**63 - 1)
_TRAJECTORY, _WRITTEN = tl.constexpr(lanes_layout.TRAJECTORY), tl.constexpr(lanes_layout.WRITTEN)
_OPEN, _CHAIN = tl.constexpr(lanes_layout.OPEN), tl.constexpr(lanes_layout.CHAIN)
_DONE, _TOO_MANY = tl.constexpr(lanes_layout.DONE), tl.constexpr(lanes_layout.TOO_MANY)
_INTERRUPTS = tl.constexpr(lanes_layout.INTERRUPTS)
_UNCHECKED, _CAREFUL = tl.constexpr(lanes_layout.UNCHECKED), tl.constexpr(lanes_layout.CAREFUL)


@jit
def _of(values, is_it):
    return tl.sum(tl.where(is_it, values, 0), axis=0)


@jit
def _assign(
    lanes, interrupted, result, slots, trajectory, ended, initial, lane_of, begins, num_lanes, count,
    is_assigned: tl.constexpr, strictness: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, block).to(tl.int64)
    exists, state = column < num_lanes, lanes + column
    ids = tl.load(state + _TRAJECTORY * num_lanes, mask=exists, other=_NONE)
    written = tl.load(state + _WRITTEN * num_lanes, mask=exists, other=0)
    is_open = tl.load(state + _OPEN * num_lanes, mask=exists, other=0)
    chain = tl.load(state + _CHAIN * num_lanes, mask=exists, other=_NONE)
    no = tl.full((), 0, tl.int1)
    has_runs = no
    if trajectory is not None:
        for row in range(1, count):
            has_runs = has_runs | (tl.load(trajectory + row) == tl.load(trajectory + row - 1))
    now, lane = tl.max(written, axis=0), tl.cast(0, tl.int64)
    num_interrupted, outcome, cause = tl.cast(0, tl.int64), tl.cast(_DONE, tl.int64), tl.cast(0, tl.int64)
    row = 0
    while (row < count) & (outcome != _TOO_MANY):
        number = tl.load(trajectory + row) if trajectory is not None else tl.cast(_NONE, tl.int64)
        is_initial = tl.load(initial + row) != 0 if initial is not None else no
        if is_assigned:
            goes_on = has_runs & (row > 0) & (_of(is_open, column == lane) == 0)
            # a free lane, else any, and of these the one written least recently; never written ones are the last free
            late = tl.where(is_open > 0, 2**62, tl.where(written == 0, 2**61, 0))
            oldest = tl.argmin(tl.where(exists, written + late, _NEVER), axis=0)
            matches = exists & (is_open > 0) & (ids == number)
            distance = tl.min(tl.where(matches, (column - lane + num_lanes) % num_lanes, num_lanes), axis=0)
            found = tl.where(goes_on, lane, oldest.to(tl.int64))
            lane = tl.where(distance < num_lanes, (lane + distance) % num_lanes, found)
        else:
            lane = tl.load(slots + row) % num_lanes
        is_it = column == lane
        was_open, before, first = _of(is_open, is_it) > 0, _of(ids, is_it), _of(chain, is_it)
        interrupts = was_open & (before != number)
        returns = first == number
        if is_assigned:
            returns = (first != _NONE) & (tl.max((exists & (chain == number)).to(tl.int32), axis=0) > 0)
        if interrupts & (is_initial == 0):
            num_interrupted += 1
            if outcome == _DONE:
                outcome, cause = tl.cast(_INTERRUPTS, tl.int64), number
            if returns & (strictness > _UNCHECKED):
                outcome, cause = tl.cast(_TOO_MANY, tl.int64), number
        begun = interrupts | is_initial | (was_open == 0)
        tl.store(lane_of + row, lane)
        tl.store(begins + row, begun)
        new_chain = tl.where(interrupts, tl.where(first == _NONE, before, first), _NONE)
        chain = tl.where(is_it & begun, new_chain, chain)
        ids, written = tl.where(is_it, number, ids), tl.where(is_it, now + 1 + row, written)
        is_open = tl.where(is_it, (tl.load(ended + row) == 0).to(tl.int64), is_open)
        row += 1
    tl.store(result, outcome)
    tl.store(result + 1, cause)
    if (outcome == _TOO_MANY) | ((outcome == _INTERRUPTS) & (strictness == _CAREFUL)):
        for row in range(count):
            tl.store(lane_of + row, -1)
    else:
        tl.store(interrupted, tl.load(interrupted) + num_interrupted)
        tl.store(state + _TRAJECTORY * num_lanes, ids, mask=exists)
        tl.store(state + _WRITTEN * num_lanes, written, mask=exists)
        tl.store(state + _OPEN * num_lanes, is_open, mask=exists)
        tl.store(state + _CHAIN * num_lanes, chain, mask=exists)


def assign(lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness):
    """See the loop of the same name.

    Returns ``lane_of``, which is -1 in all rows if the write is refused, and ``begins``.
    """
    lane_of, begins = torch.empty_like(slots), torch.empty_like(slots, dtype=torch.bool)
    num_lanes, rows = lanes.shape[1], (slots, some(trajectory), ended, some(initial), lane_of, begins)
    block = triton.next_power_of_2(num_lanes)
    _assign[(1,)](
        lanes, interrupted, result, *rows, num_lanes, len(slots),
        is_assigned=is_assigned, strictness=strictness, block=block, num_warps=max(1, min(8, block // 64)),
    )  # fmt: skip
    return lane_of, begins
