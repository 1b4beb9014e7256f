"""Kernels of draws, writes and updates."""

import math

import pytest
import torch

from tests.kernels.implementations import INTERPRETED
from tests.reference import Draws
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.kernels import ops, reasons

SLOTS, LIMIT, EPS, LEAST = 20, 50.0, 0.01, 0.1
NONE = torch.empty(0, dtype=torch.int64)


class RowState:
    """The state of the kernels of rows, and the same as plain lists, changed by loops written from the definitions."""

    def __init__(self, run):
        self.run = run
        self.generation, self.d = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS)
        self.number, self.num_draws = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.draws, self.counts = torch.zeros(SLOTS, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        self.largest, self.limit = torch.ones(1).double(), torch.full((1,), LIMIT).double()
        self.written, self.priority = [0] * SLOTS, [0.0] * SLOTS
        self.tree, self.alpha = SumTree(SLOTS, track_min=True), torch.tensor([0.6], dtype=torch.float64)
        self.waits = Draws()
        self.greatest, self.dropped, self.rejected, self.writes = 1.0, 0, 0, 0

    def draw(self, slots, density, *, smallest=None):
        weight, stamp = torch.zeros(len(slots)), torch.zeros(len(slots), dtype=torch.int64)
        least = density[:0] if smallest is None else torch.tensor([smallest], dtype=density.dtype)
        counted = self.draws, self.num_draws
        beta = torch.tensor([0.4], dtype=torch.float64)
        self.run(ops.rows_drawn, self.generation, slots, density, least, beta, *counted, weight, stamp)
        least = float(density.min()) if smallest is None else smallest
        expected = [(x / least) ** -0.4 if x > 0 and least > 0 else 0.0 for x in density.tolist()]
        assert weight.tolist() == pytest.approx(expected, rel=1e-6)
        assert stamp.tolist() == [self.written[slot] for slot in slots.tolist()]
        self.waits.draw(slots.tolist())
        return stamp

    def record(self, slots, stays):
        state = self.generation, self.number, self.draws, self.num_draws, self.d, self.largest
        self.run(ops.rows_record, *state, *self.tree.views(), self.alpha, slots, stays)
        self.writes += 1
        for slot in slots.tolist():
            if not 0 <= slot < SLOTS:
                continue
            self.written[slot] = self.writes * stays
            self.priority[slot] = -self.greatest * stays
            self.waits.write(slot)

    def update(self, slots, error, stamp=NONE, real=NONE, *, squared=False, refuses=True, is_own=False):
        kept, kept_d, result = torch.empty_like(slots), torch.empty_like(error), torch.zeros(2, dtype=torch.int64)
        state = self.generation, self.draws, self.num_draws, self.d, self.largest, self.counts, self.limit
        tree = *self.tree.views(), self.alpha
        given = slots, error, stamp, real, True, refuses, is_own
        self.run(ops.rows_update, *state, EPS, LEAST, squared, *tree, *given, kept, kept_d, result)
        known = [bool(r) for r in real.tolist()] if len(real) else [True] * len(slots)
        stamps = stamp.tolist() if len(stamp) else None
        rows = [i for i in range(len(slots)) if known[i] and (stamps is None or stamps[i] >= 0)]
        slot, errors = slots.tolist(), error.tolist()
        priority = {i: max((errors[i] ** 0.5 if squared else errors[i]) + EPS, LEAST) for i in rows if errors[i] >= 0}
        why = {i: reasons.OUT_OF_RANGE for i in rows if not 0 <= slot[i] < SLOTS}
        why |= {i: reasons.INVALID for i in rows if i not in why and not priority.get(i, math.inf) <= LIMIT}
        if refuses:
            if stamps is None:
                seen = [self.written[at] or self.waits.slots[at].before for at in range(SLOTS)]
                empty = [i for i in rows if i not in why and not seen[slot[i]]]
                why |= dict.fromkeys(empty, reasons.EMPTY)
            if why:
                assert result.tolist() == [why[min(why)], min(why)]
                return why[min(why)]
        self.rejected += len(why)
        expected = {}
        for i in rows:
            if i in why:
                continue
            at = slot[i]
            is_late = self.written[at] == 0
            if stamps is not None:
                is_late |= stamps[i] != self.written[at]
            elif not is_own:
                is_late |= self.waits.expects_late(at)
            if not is_own:
                self.waits.update(at, is_late)
            self.dropped += is_late
            if not is_late:
                expected[at] = priority[i]
                self.greatest = max(self.greatest, priority[i])
        for at, value in expected.items():
            self.priority[at] = value
        found = {at: value for at, value in zip(kept.tolist(), kept_d.tolist(), strict=True) if at >= 0}
        assert len(found) == int((kept >= 0).sum()) and found == pytest.approx(expected, rel=1e-6)
        assert result[0] == 0
        return 0

    def check(self):
        assert self.generation.tolist() == self.written
        self.tree.check_valid()
        masses = SumTree.to_mass(self.d.abs().double() ** 0.6)
        assert (self.tree.leaves[:SLOTS] - masses).abs().max() <= 2
        assert self.d.tolist() == pytest.approx(self.priority, rel=1e-6)
        assert float(self.largest) == pytest.approx(self.greatest, rel=1e-6)
        assert self.counts.tolist() == [self.dropped, self.rejected]
        # below 0 means the same as 0
        waits = [(self.waits.slots[slot].last, self.waits.slots[slot].waiting) for slot in range(SLOTS)]
        assert [*map(tuple, self.draws.clamp_min(0)[:, :2].tolist())] == waits


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_all_implementations_of_rows_do_the_same(run, kind):
    torch.manual_seed(0)
    rows, outcomes, batches = RowState(run), set(), []
    rows.record(torch.arange(SLOTS - 3), True)
    for number in range(30 if INTERPRETED else 150):
        slots = torch.randint(SLOTS, (8,))
        density = torch.randint(0, 9, (8,)).to(kind) + (number % 3 > 0)
        smallest = None if number % 2 else 1
        batches.append((slots, rows.draw(slots, density, smallest=smallest)))
        if number % 3 == 0:
            rows.record(torch.randint(-1, SLOTS + 1, (4,)).unique(), number % 9 > 0)
        slots, stamp = batches.pop(int(torch.randint(len(batches), ())) if len(batches) > 4 else 0)
        slots, error, real = slots.clone(), 10 * torch.rand(8), torch.rand(8) < 0.9
        if number % 7 == 0:
            error[5] = (-1.0, float("nan"), float("inf"), 2600.0)[number % 4]
        if number % 7 == 1:
            slots[5] = (-1, SLOTS, 2**40)[number % 3]
        stamp = torch.where(torch.rand(8) < 0.9, stamp, -1)[: 8 * (number % 2)]
        how = {"squared": number % 5 > 0, "refuses": number % 4 > 0, "is_own": number % 11 == 0}
        outcomes.add(rows.update(slots, error, stamp, real[: 8 * (number % 3 > 0)], **how))
        rows.check()
    assert INTERPRETED or outcomes == {0, reasons.OUT_OF_RANGE, reasons.INVALID, reasons.EMPTY}


def test_draws_wait_for_a_limited_time(run):
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    rows.draw(torch.tensor([0, 1, 1]), torch.ones(3).double())
    rows.record(torch.tensor([0, 1]), True)
    rows.num_draws += reasons.WINDOW
    rows.waits.number += reasons.WINDOW
    rows.update(torch.tensor([1]), torch.ones(1))
    rows.num_draws += 1
    rows.waits.number += 1
    rows.update(torch.tensor([0, 1]), torch.ones(2))
    rows.check()
    assert rows.dropped == 1


def test_more_rows_than_are_processed_together(run):
    """Of the rows of a slot the last one wins, wherever it is in the batch."""
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    slots = torch.randint(SLOTS, (3000,))
    rows.draw(slots, torch.ones(3000).double())
    rows.update(slots, 10 * torch.rand(3000))
    rows.check()
