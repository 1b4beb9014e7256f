"""A loop that assigns the rows of a write to lanes, and finds where episodes begin; ``layouts`` has the array."""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.layouts import (
    CAREFUL,
    CHAIN,
    DONE,
    INTERRUPTS,
    LAST_ROW,
    NO_ID,
    OPEN,
    TOO_MANY,
    TRAJECTORY,
    UNCHECKED,
)
from torchrl_replay_ext.kernels.loop import inlined, loop, part


@inlined
def _lane_of(lanes, trajectory, first):
    """The lane with the unfinished ``trajectory``, searched from ``first`` on; -1 if there is none."""
    for k in range(lanes.shape[1]):
        lane = (first + k) % lanes.shape[1]
        if lanes[OPEN, lane] > 0 and lanes[TRAJECTORY, lane] == trajectory:
            return lane
    return -1


@inlined
def _lane_for(lanes):
    """The lane for a new trajectory: a free one, else any, and of these the one written least recently.

    A free lane that was never written comes after the other free ones, so no more lanes are used than are needed.
    """
    best, earliest = 0, 2**63 - 1
    for lane in range(lanes.shape[1]):
        written = lanes[LAST_ROW, lane]
        if lanes[OPEN, lane] > 0:
            written += 2**62
        elif written == 0:
            written = 2**61
        if written < earliest:
            best, earliest = lane, written
    return best


@inlined
def _is_in_a_chain(lanes, trajectory):
    is_in_chain = False
    for lane in range(lanes.shape[1]):
        is_in_chain |= lanes[CHAIN, lane] == trajectory
    return is_in_chain


@part
def _copy(lanes, to):
    for kind in range(lanes.shape[0]):
        for lane in range(lanes.shape[1]):
            to[kind, lane] = lanes[kind, lane]


@inlined
def _has_runs(trajectory):
    """True if two rows that follow each other have the same id: the rows of one environment come after another's."""
    has_runs = False
    for row in range(1, trajectory.shape[0]):
        has_runs |= trajectory[row] == trajectory[row - 1]
    return has_runs


@loop
def assign(lanes, interrupted, result, slots, trajectory, ended, initial, is_assigned, strictness, lane_of, is_first):
    """Assign each row of a write to a lane; False if the write is refused. The kernels of writes begin with it.

    A row goes on with the unfinished episode of its trajectory. Any other trajectory takes a free lane, or the lane
    written to least recently, whose unfinished episode it then interrupts. ``ended`` rows end an episode, ``initial``
    rows begin one. If the rows of one environment come after those of another, the next trajectory of an environment
    takes the lane that the row before has left.

    * ``lanes`` is the state; ``interrupted`` [1] counts the episodes interrupted by rows that are not initial.
    * ``slots``, ``trajectory``, ``ended``, ``initial`` are the rows [n]; ids and marks are empty if there are none.
    * If ``is_assigned`` is False, lanes are fixed: slot s is in lane s modulo the number of lanes.
    * The results are the lane of each row, ``lane_of`` [n], and whether it ``is_first`` in an episode [n].
    * ``result`` is the outcome and the id that caused it. It is ``TOO_MANY`` if a trajectory goes on that was
      interrupted, and interrupts another one that did the same. ``INTERRUPTS`` is the outcome if there was any
      interruption. If ``strictness`` says so, the write is then refused, and nothing else is changed.
    """
    num_lanes, count = lanes.shape[1], slots.shape[0]
    has_ids, has_runs = trajectory.shape[0] > 0, _has_runs(trajectory)
    state = np.empty(lanes.shape, np.int64)
    _copy(lanes, state)
    now, num_interrupted, lane = 0, 0, np.int64(0)
    for k in range(num_lanes):
        now = max(now, state[LAST_ROW, k])
    result[0] = DONE
    for row in range(count):
        own_id = trajectory[row] if has_ids else NO_ID
        is_initial = initial.shape[0] > 0 and initial[row]
        if is_assigned:
            last = lane
            lane = _lane_of(state, own_id, last)
            if lane < 0:
                goes_on = has_runs and row > 0 and state[OPEN, last] == 0
                lane = last if goes_on else _lane_for(state)
        else:
            lane = slots[row] % num_lanes
        is_open = state[OPEN, lane] > 0
        interrupts = is_open and state[TRAJECTORY, lane] != own_id
        if interrupts and not is_initial:
            num_interrupted += 1
            returns = state[CHAIN, lane] == own_id
            if is_assigned and state[CHAIN, lane] != NO_ID:
                returns = _is_in_a_chain(state, own_id)
            if returns and strictness > UNCHECKED:
                result[0], result[1] = TOO_MANY, own_id
                return False
            if result[0] == DONE:
                result[0], result[1] = INTERRUPTS, own_id
        lane_of[row], is_first[row] = lane, not is_open or interrupts or is_initial
        if not interrupts and is_first[row]:
            state[CHAIN, lane] = NO_ID
        elif interrupts and state[CHAIN, lane] == NO_ID:
            state[CHAIN, lane] = state[TRAJECTORY, lane]
        state[TRAJECTORY, lane], state[LAST_ROW, lane], state[OPEN, lane] = own_id, now + 1 + row, not ended[row]
    if result[0] == INTERRUPTS and strictness == CAREFUL:
        return False
    interrupted[0] += num_interrupted
    _copy(state, lanes)
    return True
