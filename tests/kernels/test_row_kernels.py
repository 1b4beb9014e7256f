"""Kernels of draws, writes and updates."""

import math

import pytest
import torch

from tests.kernels.implementations import INTERPRETED
from tests.reference import Draws
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.kernels import layouts, ops

SLOTS, LIMIT, EPS, LEAST = 20, 50.0, 0.01, 0.1
NONE = torch.empty(0, dtype=torch.int64)


class RowState:
    """The state of the kernels of rows, and the same as plain lists, changed by loops written from the definitions."""

    def __init__(self, run):
        self.run = run
        self.generation, self.d = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS)
        self.number, self.drawn_at = torch.zeros(1, dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
        self.draws, self.counts = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        self.largest, self.limit = torch.ones(1).double(), torch.full((1,), LIMIT).double()
        self.written, self.priority = [0] * SLOTS, [0.0] * SLOTS
        self.tree, self.alpha = SumTree(SLOTS, track_min=True), torch.tensor([0.6], dtype=torch.float64)
        self.last = Draws()
        self.greatest, self.dropped, self.rejected, self.writes = 1.0, 0, 0, 0

    def draw(self, slots, density, *, smallest=None):
        weight, stamp = torch.zeros(len(slots)), torch.zeros(len(slots), dtype=torch.int64)
        least = density[:0] if smallest is None else torch.tensor([smallest], dtype=density.dtype)
        counted = self.number, self.drawn_at, self.draws
        beta = torch.tensor([0.4], dtype=torch.float64)
        self.run(ops.rows_drawn, self.generation, slots, density, least, beta, *counted, weight, stamp)
        least = float(density.min()) if smallest is None else smallest
        expected = [(x / least) ** -0.4 if x > 0 and least > 0 else 0.0 for x in density.tolist()]
        assert weight.tolist() == pytest.approx(expected, rel=1e-6)
        assert stamp.tolist() == [self.written[slot] for slot in slots.tolist()]
        self.last.draw(slots.tolist())
        return stamp

    def record(self, slots, stays):
        state = self.generation, self.number, self.drawn_at, self.d, self.largest
        self.run(ops.rows_record, *state, *self.tree.views(), self.alpha, slots, stays)
        self.writes += 1
        for slot in slots.tolist():
            if not 0 <= slot < SLOTS:
                continue
            self.written[slot] = self.writes * stays
            self.priority[slot] = -self.greatest * stays
            self.last.write(slot)
            if not stays:
                # an empty slot is nobody's own
                del self.last.written[slot]

    def update(self, slots, error, stamp=NONE, *, squared=False, refuses=True):
        kept, kept_d, result = torch.empty_like(slots), torch.empty_like(error), torch.zeros(2, dtype=torch.int64)
        state = self.generation, self.drawn_at, self.draws, self.d, self.largest, self.counts, self.limit
        tree = *self.tree.views(), self.alpha
        given = slots, error, stamp, refuses
        self.run(ops.rows_update, *state, EPS, LEAST, squared, *tree, *given, kept, kept_d, result)
        stamps = stamp.tolist() if len(stamp) else None
        rows, slot, errors = range(len(slots)), slots.tolist(), error.tolist()
        priority = {i: max((errors[i] ** 0.5 if squared else errors[i]) + EPS, LEAST) for i in rows if errors[i] >= 0}
        why = {i: layouts.OUT_OF_RANGE for i in rows if not 0 <= slot[i] < SLOTS}
        why |= {i: layouts.INVALID for i in rows if i not in why and not priority.get(i, math.inf) <= LIMIT}
        if refuses:
            if stamps is None:
                unknown = [at for at in range(SLOTS) if not self.written[at] and at not in self.last.drawn]
                why |= {i: layouts.EMPTY for i in rows if i not in why and slot[i] in unknown}
            if why:
                assert result.tolist() == [why[min(why)], min(why)]
                return why[min(why)]
        self.rejected += len(why)
        valid, expected = [i for i in rows if i not in why], {}
        for i, is_late in zip(valid, self.last.late([slot[i] for i in valid]), strict=True):
            at = slot[i]
            is_late = stamps[i] != self.written[at] if stamps is not None else is_late
            is_late |= self.written[at] == 0
            self.dropped += is_late
            if not is_late:
                expected[at] = max(priority[i], expected.get(at, 0.0))
                self.greatest = max(self.greatest, priority[i])
        for at, value in expected.items():
            self.priority[at] = value
        found = {at: value for at, value in zip(kept.tolist(), kept_d.tolist(), strict=True) if at >= 0}
        assert len(found) == int((kept >= 0).sum()) and found == pytest.approx(expected, rel=1e-6)
        assert result[0] == 0
        return 0

    def check(self):
        assert self.generation.tolist() == self.written
        masses = SumTree.to_mass(self.d.abs().double() ** 0.6)
        assert (self.tree.leaves[:SLOTS] - masses).abs().max() <= 2
        assert self.d.tolist() == pytest.approx(self.priority, rel=1e-6)
        assert float(self.largest) == pytest.approx(self.greatest, rel=1e-6)
        assert self.counts.tolist() == [self.dropped, self.rejected]


@pytest.mark.parametrize("kind", [torch.int64, torch.float64])
def test_all_implementations_of_rows_do_the_same(run, kind):
    torch.manual_seed(0)
    rows, outcomes, batches = RowState(run), set(), []
    rows.record(torch.arange(SLOTS - 3), True)
    for number in range(30 if INTERPRETED else 150):
        # the last slot is never drawn
        slots = torch.randint(SLOTS - 1, (8,))
        density = torch.randint(0, 9, (8,)).to(kind) + (number % 3 > 0)
        smallest = None if number % 2 else 1
        batches.append((slots, rows.draw(slots, density, smallest=smallest)))
        if number % 3 == 0:
            rows.record(torch.randint(-1, SLOTS + 1, (4,)).unique(), number % 9 > 0)
        slots, stamp = batches.pop(int(torch.randint(len(batches), ())) if len(batches) > 4 else 0)
        slots, error = slots.clone(), 10 * torch.rand(8)
        # of two rows with the same priority, one is kept
        error[torch.randint(8, ())] = error[torch.randint(8, ())]
        if number % 7 == 0:
            error[5] = (-1.0, float("nan"), float("inf"), 2600.0)[number % 4]
        if number % 7 == 1:
            slots[5] = (-1, SLOTS, 2**40)[number % 3]
        if number % 7 == 2:
            slots[5] = SLOTS - 1
        stamp = torch.where(torch.rand(8) < 0.9, stamp, -1)[: 8 * (number % 2)]
        how = {"squared": number % 5 > 0, "refuses": number % 4 > 0}
        outcomes.add(rows.update(slots, error, stamp, **how))
        rows.check()
    assert INTERPRETED or outcomes == {0, layouts.OUT_OF_RANGE, layouts.INVALID, layouts.EMPTY}


def test_a_row_is_late_within_a_limited_number_of_draws(run):
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    rows.draw(torch.tensor([0, 1, 1]), torch.ones(3).double())
    rows.record(torch.tensor([0, 1]), True)
    rows.draws[0] += layouts.WINDOW - 1
    rows.last.number += layouts.WINDOW - 1
    rows.update(torch.tensor([1, 2]), torch.ones(2))
    rows.draws[0] += 1
    rows.last.number += 1
    rows.update(torch.tensor([0, 1]), torch.ones(2))
    rows.check()
    assert rows.dropped == 1


def test_all_rows_written_since_the_last_draw_are_the_callers_own(run):
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    rows.draw(torch.arange(SLOTS), torch.ones(SLOTS).double())
    rows.record(torch.tensor([0, 1]), True)
    rows.record(torch.tensor([2]), True)
    rows.update(torch.tensor([2, 0, 1, 0]), torch.tensor([3.0, 2.0, 4.0, 1.0]))
    assert rows.dropped == 0 and rows.d[:3].tolist() == pytest.approx([2.0 + EPS, 4.0 + EPS, 3.0 + EPS])
    # with a row that was not, the others are late
    rows.update(torch.tensor([2, 3]), torch.ones(2))
    rows.check()
    assert rows.dropped == 1


def test_more_rows_than_are_processed_together(run):
    """Of the rows of a slot the largest priority counts, wherever it is in the batch."""
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    slots = torch.randint(SLOTS, (3000,))
    rows.draw(slots, torch.ones(3000).double())
    rows.update(slots, 10 * torch.rand(3000))
    rows.check()
