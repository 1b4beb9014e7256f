"""The kernels of episodes for CUDA; see :mod:`torchrl_replay_ext.kernels.episodes`. One program does all rows.

Writes go row by row: each step may read what the step before has stored, so barriers separate them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]: part of torch's builds for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from torchrl_replay_ext.kernels.cuda.lanes import assign
from torchrl_replay_ext.kernels.cuda.tree import _levels, _num_pages, jit, place_of
from torchrl_replay_ext.kernels.tree_layout import BITS, CHILDREN, PAGE_BITS, UNIT

_BITS, _CHILDREN = tl.constexpr(BITS), tl.constexpr(CHILDREN)
_PAGE_BITS, _LAST_OF_PAGE = tl.constexpr(PAGE_BITS), tl.constexpr((1 << PAGE_BITS) - 1)


@jit
def _add(pointer, value, mask):
    tl.store(pointer, tl.load(pointer) + value, mask=mask)


@jit
def put(
    leaves, nodes, num_nodes, pages, num_pages, capacity, leaf, mass, mask, has_pages: tl.constexpr,
    levels: tl.constexpr,
):  # fmt: skip
    """``leaves[leaf] = mass`` where ``mask``; returns the change."""
    tl.debug_barrier()
    place = place_of(leaf, pages, num_pages, has_pages)
    change = tl.where(mask, mass - tl.load(leaves + place), 0)
    tl.debug_barrier()
    tl.store(leaves + place, mass, mask=mask)
    node, last, begin = leaf, tl.cast(capacity, tl.int64) - 1, tl.cast(num_nodes, tl.int64)
    for _ in tl.static_range(levels):
        node = node >> _BITS
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        _add(nodes + begin + node, change, mask)
    tl.debug_barrier()
    return change


@jit
def _refresh_maximum(leaves, maxima, num_maxima, capacity, leaf, mask, levels: tl.constexpr):
    children = tl.arange(0, _CHILDREN)
    node, last, begin = leaf, tl.cast(capacity, tl.int64) - 1, tl.cast(num_maxima, tl.int64)
    below = leaves
    for _ in tl.static_range(levels):
        tl.debug_barrier()
        node = node >> _BITS
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        largest = tl.max(tl.load(below + node * _CHILDREN + children), axis=0)
        tl.store(maxima + begin + node, largest, mask=mask)
        below = maxima + begin


@jit
def _take(free, num_free, mask):
    """Take one of the free ids; ``num_free`` is the length of ``free`` without the last element."""
    tl.debug_barrier()
    left = tl.minimum(tl.maximum(tl.load(free + num_free).to(tl.int64) - 1, 0), tl.maximum(num_free - 1, 0))
    number = tl.load(free + left).to(tl.int64)
    tl.debug_barrier()
    tl.store(free + num_free, left, mask=mask)
    return number


@jit
def _give_back(free, num_free, number, mask):
    tl.debug_barrier()
    place = tl.minimum(tl.maximum(tl.load(free + num_free).to(tl.int64), 0), tl.maximum(num_free - 1, 0))
    tl.debug_barrier()
    tl.store(free + place, tl.minimum(tl.maximum(number, 0), num_free), mask=mask)
    tl.store(free + num_free, place + 1, mask=mask)


@jit
def _position_of(slot, capacity, position_of, num_lanes, span, is_assigned: tl.constexpr):
    in_lane = slot % num_lanes * span + slot // num_lanes
    position = tl.load(position_of + slot).to(tl.int64) if is_assigned else in_lane
    return tl.minimum(tl.maximum(position, 0), tl.cast(capacity, tl.int64) - 1)


@jit
def _remove(
    slot, mask, lane_episode, count, free_records, free_pages, num_free_pages,
    leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span, lane_total,
    episode, start_of, totals, maxima, num_maxima, none,
    is_assigned: tl.constexpr, levels: tl.constexpr, record_levels: tl.constexpr,
):  # fmt: skip
    record = tl.load(episode + slot).to(tl.int64)
    is_stored = mask & (record >= 0) & (record < none)
    record = tl.where(is_stored, record, none)
    position = _position_of(slot, capacity, position_of, num_lanes, span, is_assigned)
    lane = tl.minimum(position // span, num_lanes - 1)
    change = put(
        leaves, nodes, num_nodes, pages, num_pages, capacity, position, tl.full((), 0, tl.int64), is_stored,
        is_assigned, levels,
    )  # fmt: skip
    _add(totals + record, change, is_stored)
    _add(lane_total + lane, change, is_stored)
    left = tl.load(count + record) - 1
    tl.debug_barrier()
    tl.store(count + record, left, mask=is_stored)
    tl.store(start_of + record, lane * span + (position - lane * span + 1) % span, mask=is_stored)
    tl.store(episode + slot, none, mask=is_stored)
    if is_assigned:
        tl.store(position_of + slot, tl.cast(num_lanes, tl.int64) * span, mask=is_stored)
        is_end = is_stored & ((position & _LAST_OF_PAGE) == _LAST_OF_PAGE)
        block = position >> _PAGE_BITS
        _give_back(free_pages, num_free_pages, tl.load(pages + block), is_end)
        tl.store(pages + block, num_free_pages, mask=is_end)
    is_free = is_stored & (left == 0) & (tl.load(lane_episode + lane) != record)
    _give_back(free_records, none, record, is_free)
    _refresh_maximum(totals, maxima, num_maxima, none + 1, record, is_stored, record_levels)
    tl.debug_barrier()


@jit
def _stop(lane, mask, lane_episode, count, free_records, none):
    tl.debug_barrier()
    record = tl.minimum(tl.maximum(tl.load(lane_episode + lane), 0), none)
    is_empty = mask & (record < none) & (tl.load(count + record) == 0)
    tl.debug_barrier()
    tl.store(lane_episode + lane, none, mask=mask)
    _give_back(free_records, none, record, is_empty)


@jit
def _write(
    slots, lane_of, begins, ended, finished, mass, number, num_rows,
    lane_episode, lane_next, count, free_records, free_pages, num_free_pages,
    leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span, lane_total,
    episode, size, start_of, is_finished, updated_at, totals, maxima, num_maxima, none,
    is_assigned: tl.constexpr, levels: tl.constexpr, record_levels: tl.constexpr,
):  # fmt: skip
    num_lanes = tl.cast(num_lanes, tl.int64)
    none = tl.cast(none, tl.int64)
    new, now = tl.load(mass), tl.load(number)
    for row in range(num_rows):
        tl.debug_barrier()
        slot, lane = tl.load(slots + row), tl.load(lane_of + row)
        mask = (slot >= 0) & (slot < size) & (lane >= 0) & (lane < num_lanes)
        slot, lane = tl.where(mask, slot, 0), tl.where(mask, lane, 0)
        _remove(
            slot, mask, lane_episode, count, free_records, free_pages, num_free_pages,
            leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span, lane_total,
            episode, start_of, totals, maxima, num_maxima, none, is_assigned, levels, record_levels,
        )  # fmt: skip
        if is_assigned:
            offset = tl.load(lane_next + lane) % span
            is_page = mask & ((offset & _LAST_OF_PAGE) == 0)
            page = _take(free_pages, num_free_pages, is_page)
            tl.store(lane_next + lane, offset + 1, mask=mask)
            tl.store(position_of + slot, lane * span + offset, mask=mask)
            tl.store(pages + ((lane * span + offset) >> _PAGE_BITS), page, mask=is_page)
            tl.debug_barrier()
        position = _position_of(slot, capacity, position_of, num_lanes, span, is_assigned)
        is_new = mask & (tl.load(begins + row) != 0)
        _stop(lane, is_new, lane_episode, count, free_records, none)
        record = tl.minimum(tl.maximum(_take(free_records, none, is_new), 0), none - 1)
        tl.store(lane_episode + lane, record, mask=is_new)
        tl.store(start_of + record, position, mask=is_new)
        tl.store(count + record, 0, mask=is_new)
        tl.store(totals + record, 0, mask=is_new)
        tl.store(updated_at + record, 0, mask=is_new)
        tl.store(is_finished + record, tl.full((), 0, tl.int1), mask=is_new)
        tl.debug_barrier()
        record = tl.minimum(tl.maximum(tl.load(lane_episode + lane), 0), none - 1)
        put(leaves, nodes, num_nodes, pages, num_pages, capacity, position, new, mask, is_assigned, levels)
        _add(totals + record, new, mask)
        _add(lane_total + lane, new, mask)
        _add(count + record, 1, mask)
        tl.store(episode + slot, record, mask=mask)
        _refresh_maximum(totals, maxima, num_maxima, none + 1, record, mask, record_levels)
        is_end = mask & (tl.load(ended + row) != 0)
        tl.store(is_finished + record, tl.load(finished + row) != 0, mask=is_end)
        tl.store(updated_at + record, now, mask=is_end)
        tl.store(lane_episode + lane, none, mask=is_end)


@jit
def _remove_all(
    slots, num_rows, lane_episode, count, free_records, free_pages, num_free_pages,
    leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span, lane_total,
    episode, size, start_of, totals, maxima, num_maxima, none,
    stops: tl.constexpr, is_assigned: tl.constexpr, levels: tl.constexpr, record_levels: tl.constexpr,
):  # fmt: skip
    num_lanes = tl.cast(num_lanes, tl.int64)
    none = tl.cast(none, tl.int64)
    for row in range(num_rows):
        tl.debug_barrier()
        slot = tl.load(slots + row)
        mask = (slot >= 0) & (slot < size)
        _remove(
            tl.where(mask, slot, 0), mask, lane_episode, count, free_records, free_pages, num_free_pages,
            leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span, lane_total,
            episode, start_of, totals, maxima, num_maxima, none, is_assigned, levels, record_levels,
        )  # fmt: skip
    if stops:
        for lane in range(num_lanes):
            _stop(lane, lane >= 0, lane_episode, count, free_records, none)


@jit
def _update(
    slots, mass, number, count, leaves, nodes, num_nodes, pages, num_pages, capacity, position_of, num_lanes, span,
    lane_total, episode, size, updated_at, totals, maxima, num_maxima, none,
    is_one_mass: tl.constexpr, has_number: tl.constexpr, is_assigned: tl.constexpr, levels: tl.constexpr,
    record_levels: tl.constexpr, num_rows: tl.constexpr, num_together: tl.constexpr,
):  # fmt: skip
    """All rows at once: exchanges and sums of integers give the same result in any order."""
    last_lane = tl.cast(num_lanes, tl.int64) - 1
    none = tl.cast(none, tl.int64)
    for start in range(0, count, num_rows):
        rows = start + tl.arange(0, num_rows)
        slot = tl.load(slots + rows, mask=rows < count, other=-1)
        in_range = (slot >= 0) & (slot < size)
        slot = tl.where(in_range, slot, 0)
        record = tl.load(episode + slot).to(tl.int64)
        mask = in_range & (record >= 0) & (record < none)
        record = tl.where(mask, record, none)
        position = _position_of(slot, capacity, position_of, last_lane + 1, span, is_assigned)
        place = place_of(position, pages, num_pages, is_assigned)
        new = tl.load(mass + (0 if is_one_mass else 1) * rows, mask=mask, other=0)
        change = tl.where(mask, new - tl.atomic_xchg(leaves + place, new, mask=mask), 0)
        node, last, begin = position, tl.cast(capacity, tl.int64) - 1, tl.cast(num_nodes, tl.int64)
        for _ in tl.static_range(levels):
            node = node >> _BITS
            last = last >> _BITS
            begin -= ((last >> _BITS) + 1) * _CHILDREN
            tl.atomic_add(nodes + begin + node, change, mask=mask)
        tl.atomic_add(totals + record, change, mask=mask)
        tl.atomic_add(lane_total + tl.minimum(position // span, last_lane), change, mask=mask)
        if has_number:
            tl.store(updated_at + record, tl.load(number) + tl.zeros([num_rows], tl.int64), mask=mask)
    tl.debug_barrier()
    children = tl.arange(0, _CHILDREN)
    last, begin, below = none, tl.cast(num_maxima, tl.int64), totals
    for level in tl.static_range(record_levels):
        last = last >> _BITS
        begin -= ((last >> _BITS) + 1) * _CHILDREN
        for start in range(0, count, num_together):
            rows = start + tl.arange(0, num_together)
            slot = tl.load(slots + rows, mask=rows < count, other=-1)
            in_range = (slot >= 0) & (slot < size)
            record = tl.load(episode + tl.where(in_range, slot, 0)).to(tl.int64)
            mask = in_range & (record >= 0) & (record < none)
            node = tl.where(mask, record, none) >> (_BITS * (level + 1))
            values = tl.load(below + node[:, None] * _CHILDREN + children[None, :])
            tl.store(maxima + begin + node, tl.max(values, axis=1), mask=mask)
        below = maxima + begin
        tl.debug_barrier()


def _shapes(leaves: Tensor, capacity: int, position_of: Tensor, start_of: Tensor) -> dict[str, Any]:
    """What all kernels are specialised for, and the numbers that follow from shapes."""
    return {
        "num_pages": _num_pages(leaves),
        "none": len(start_of) - 1,
        "is_assigned": len(position_of) > 0,
        "levels": _levels(capacity),
        "record_levels": _levels(len(start_of)),
        "num_warps": 1,
    }


def write(
    lanes: Tensor, interrupted: Tensor, result: Tensor, slots: Tensor, trajectory: Tensor, ended: Tensor,
    initial: Tensor, is_assigned: bool, strictness: int, finished: Tensor, d: Tensor, num_writes: Tensor,
    lane_episode: Tensor, lane_next: Tensor, count: Tensor, free_records: Tensor, free_pages: Tensor,
    leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, position_of: Tensor, num_lanes: int, span: int,
    lane_total: Tensor, episode: Tensor, start_of: Tensor, is_finished: Tensor, updated_at: Tensor, totals: Tensor,
    maxima: Tensor,
) -> None:  # fmt: skip
    """See the loop of the same name."""
    rows = slots, trajectory, ended, initial
    assigned = assign(lanes, interrupted, result, *rows, is_assigned, strictness)
    if assigned is None:
        return
    _write[(1,)](
        slots, *assigned, ended, finished, d.mul(UNIT).ceil_().to(torch.int64), num_writes + 1, len(slots),
        lane_episode, lane_next, count, free_records, free_pages, len(free_pages) - 1, leaves, nodes, len(nodes), pages,
        capacity=capacity, position_of=position_of, num_lanes=num_lanes, span=span, lane_total=lane_total,
        episode=episode, size=len(episode), start_of=start_of, is_finished=is_finished, updated_at=updated_at,
        totals=totals, maxima=maxima, num_maxima=len(maxima), **_shapes(leaves, capacity, position_of, start_of),
    )  # fmt: skip


def remove(
    slots: Tensor, stops: bool,
    lane_episode: Tensor, lane_next: Tensor, count: Tensor, free_records: Tensor, free_pages: Tensor,
    leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, position_of: Tensor, num_lanes: int, span: int,
    lane_total: Tensor, episode: Tensor, start_of: Tensor, is_finished: Tensor, updated_at: Tensor, totals: Tensor,
    maxima: Tensor,
) -> None:  # fmt: skip
    """See the loop of the same name."""
    _remove_all[(1,)](
        slots, len(slots), lane_episode, count, free_records, free_pages, len(free_pages) - 1, leaves, nodes,
        len(nodes), pages,
        capacity=capacity, position_of=position_of, num_lanes=num_lanes, span=span, lane_total=lane_total,
        episode=episode, size=len(episode), start_of=start_of, totals=totals, maxima=maxima, num_maxima=len(maxima),
        stops=stops, **_shapes(leaves, capacity, position_of, start_of),
    )  # fmt: skip


def update(
    slots: Tensor, d: Tensor, number: Tensor,
    leaves: Tensor, nodes: Tensor, pages: Tensor, capacity: int, position_of: Tensor, num_lanes: int, span: int,
    lane_total: Tensor, episode: Tensor, start_of: Tensor, is_finished: Tensor, updated_at: Tensor, totals: Tensor,
    maxima: Tensor,
) -> None:  # fmt: skip
    """See the loop of the same name."""
    if len(slots):
        rows, mass = (
            min(256, triton.next_power_of_2(len(slots))),
            d.to(torch.float64).mul_(UNIT).ceil_().to(torch.int64),
        )
        _update[(1,)](
            slots, mass, number, len(slots), leaves, nodes, len(nodes), pages,
            capacity=capacity, position_of=position_of, num_lanes=num_lanes, span=span, lane_total=lane_total,
            episode=episode, size=len(episode), updated_at=updated_at, totals=totals, maxima=maxima,
            num_maxima=len(maxima), is_one_mass=len(d) == 1, has_number=len(number) > 0,
            num_rows=rows, num_together=min(64, rows),
            **_shapes(leaves, capacity, position_of, start_of) | {"num_warps": 8},
        )  # fmt: skip
