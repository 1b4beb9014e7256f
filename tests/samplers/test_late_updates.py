"""Late priority updates: each row is applied to the transition that was drawn, or not at all.

The model is a plain list of the transition in each slot.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict

from tests.data import buffer_with, event_sampler, linear_policy, rows
from torchrl_replay_ext import (
    DecoupledSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.pending_draws import PendingDraws
from torchrl_replay_ext.core.write_log import WriteLog

LANES, SLICE = 2, 3
EXACT = {"alpha": 1.0, "td_error": "absolute"}


def proportional(capacity):
    return ProportionalSampler(capacity, eps=0.0, **EXACT)


def rank(capacity):
    return RankBasedSampler(capacity, stale_fraction=0.0, **EXACT)


def reaper(capacity):
    # reliabilities do not count: that is for other tests
    return ReaPERSampler(capacity, omega=0.0, eps=0.0, **EXACT)


def events(capacity):
    # only the default table is drawn from, and it holds every transition
    priority = {"kind": "proportional", "eps": 0.0, **EXACT}
    return event_sampler(capacity, ("next", "event"), 2, share=0.0, priority=priority)


def slices(capacity):
    anchors = proportional(capacity)
    return TrajectoryRetraceSampler(capacity, slice_len=SLICE, behaviour_keys=(), anchors=anchors)


def decoupled(capacity):
    return DecoupledSampler(proportional(capacity), linear_policy(), num_candidates=2)


SAMPLERS = {f.__name__: f for f in (proportional, rank, reaper, events, slices, decoupled)}
LAYOUTS = [(name, ndim) for name in SAMPLERS for ndim in (1, 2) if (name, ndim) != ("slices", 2)]
every_sampler = pytest.mark.parametrize(("name", "ndim"), LAYOUTS, ids=lambda value: str(value))
both_buffers = pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])


def rounded(value: float) -> float:
    """The first 8 binary digits of a number: those that agree in them have ranks in any order."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(int(mantissa * 256), exponent)


@dataclass
class Drawn:
    """Rows of one or several batches, and the data of the model for each row.

    Args:
        batch: the rows.
        slots: slot of each row.
        numbers: number of the transition that was drawn.
        writes: number of writes before the draw.
        order: number of the draw.
        clear: False if an update of an earlier content of the slot, or of a row that is not clear, was outstanding.
        real: False for padded rows of a slice.
        is_whole: True for a complete batch as it was drawn.
    """

    batch: TensorDict
    slots: list[int]
    numbers: list[int]
    writes: list[int]
    order: list[int]
    clear: list[bool]
    real: list[bool]
    is_whole: bool = False

    def __getitem__(self, rows: list[int]) -> "Drawn":
        columns = (self.slots, self.numbers, self.writes, self.order, self.clear, self.real)
        return Drawn(self.batch[torch.tensor(rows)], *([column[row] for row in rows] for column in columns))

    def __add__(self, other: "Drawn") -> "Drawn":
        columns = ("slots", "numbers", "writes", "order", "clear", "real")
        joined = {name: getattr(self, name) + getattr(other, name) for name in columns}
        return Drawn(torch.cat([self.batch, other.batch]), **joined)

    def __len__(self) -> int:
        return len(self.slots)

    def keys(self) -> list[tuple[int, int, int, bool]]:
        """The identity of each row in the model."""
        return list(zip(self.order, self.slots, self.numbers, self.clear, strict=True))


class Model:
    """A buffer, and plain lists: the transition in each slot, its priority, and the draws without an update so far.

    Args:
        name: name of the sampler.
        ndim: number of dimensions of the storage.
        stock: True for a buffer class of TorchRL.
        steps: number of steps of the ring, all written at the beginning.
    """

    def __init__(self, name: str, ndim: int, stock: bool, steps: int = 12):
        torch.manual_seed(0)
        self.rng = random.Random(0)
        self.name, self.ndim, self.stock = name, ndim, stock
        self.lanes = LANES if ndim == 2 else 1
        self.size = steps * self.lanes
        self.cursor, self.written, self.writes, self.draws, self.returns = 0, 0, 0, 0, 0
        self.numbers: dict[int, int] = {}
        self.priority: dict[int, float] = {}
        # number of rows for each (draw, slot, transition, clear)
        self.outstanding: Counter[tuple[int, int, int, bool]] = Counter()
        self.buffer = buffer_with(SAMPLERS[name](self.size), self.size, compilable=not stock, ndim=ndim)
        self.write(steps)

    def stats(self, key: str) -> float:
        return float(self.buffer.sampler.stats()[key])

    def write(self, count: int) -> None:
        """Write ``count`` >= 2 steps to every lane, in episodes of 4."""
        data = rows(count, self.lanes if self.ndim == 2 else None, first=self.written, episode=4)
        data["action"] = torch.zeros(*data.shape, 1)
        data["next", "event"] = data["number"].unsqueeze(-1) % 5 == 0
        self.writes += 1
        default = self.stats("max_priority")
        self.buffer.extend(data)
        for number in range(self.written, self.written + count * self.lanes):
            slot, self.cursor = self.cursor, (self.cursor + 1) % self.size
            self.numbers[slot] = number
            # with ranks, the newest transition is first
            self.priority[slot] = 1e9 + number if self.name == "rank" else default
        self.written += count * self.lanes

    def draw(self, size: int) -> Drawn:
        size *= SLICE if self.name == "slices" else 1
        batch = self.buffer.sample(size)
        index, self.draws = batch["index"], self.draws + 1
        slots = (index[:, 0] * self.lanes + index[:, 1] if self.ndim == 2 else index).tolist()
        numbers = batch["number"].tolist()
        assert numbers == [self.numbers[slot] for slot in slots]
        unclear = {where for _, where, then, clear in self.outstanding if then != self.numbers[where] or not clear}
        clear = [slot not in unclear for slot in slots]
        self.outstanding.update(zip([self.draws] * size, slots, numbers, clear, strict=True))
        real = batch.get(("collector", "mask"), torch.ones(size, dtype=torch.bool)).tolist()
        return Drawn(batch, slots, numbers, [self.writes] * size, [self.draws] * size, clear, real, is_whole=True)

    def is_certain(self, drawn: Drawn, row: int) -> bool:
        """True if the buffer must apply this row, whose transition is still stored.

        TorchRL's buffers pass only indices to an update. If an update of an earlier content of the slot was outstanding
        at the draw, an update of the slot may belong to either draw.
        """
        if not self.stock:
            return True
        key = (drawn.order[row], drawn.slots[row], drawn.numbers[row], drawn.clear[row])
        is_outstanding = key in self.outstanding
        return drawn.clear[row] and (self.writes == drawn.writes[row] or is_outstanding)

    def is_unmistakable(self, drawn: Drawn) -> bool:
        """True if the draw of these rows can be identified by their indices.

        This is the case for a complete batch, many rows, or the outstanding rows of a batch. A few rows could be an
        index chosen by the caller. A second update of a batch could be that of a later draw of the same slots.
        """
        outstanding: dict[int, list[int]] = {}
        for (draw, slot, *_), count in self.outstanding.items():
            outstanding.setdefault(draw, []).extend([slot] * count)
        slots = sorted(drawn.slots)
        if not self.outstanding.keys().isdisjoint(drawn.keys()):
            return len(drawn) >= 8 or slots in [sorted(each) for each in outstanding.values()]
        if slots in [sorted(each) for each in outstanding.values()]:
            return False
        return drawn.is_whole and (self.ndim == 1 or len(drawn) >= 8)

    def hand_back(self, drawn: Drawn) -> None:
        """Update with TD errors that identify each transition; check all priorities and the count of dropped rows."""
        if self.stock and not self.is_unmistakable(drawn):
            return
        self.returns += 1
        errors = [2.0 + number + self.returns / 1024 for number in drawn.numbers]
        drawn.batch["td_error"] = torch.tensor(errors)
        before = self.stats("dropped_updates")
        self.buffer.update_tensordict_priority(drawn.batch)
        dropped = self.stats("dropped_updates") - before

        rows = [row for row in range(len(drawn)) if drawn.real[row]]
        fresh = [row for row in rows if self.numbers[drawn.slots[row]] == drawn.numbers[row]]
        certain = [row for row in fresh if self.is_certain(drawn, row)]
        allowed = {slot: {value} for slot, value in self.priority.items()}
        allowed |= {drawn.slots[row]: {errors[row]} for row in certain}
        # a TorchRL buffer cannot detect padded rows in a part of a batch; they repeat the last real one
        for row in range(len(drawn)) if self.stock else fresh:
            if self.numbers[drawn.slots[row]] == drawn.numbers[row]:
                allowed[drawn.slots[row]].add(errors[row])
        self.check(allowed)
        padded = len(drawn) - len(rows)
        assert len(rows) - len(fresh) <= dropped <= len(rows) - len(certain) + padded, "what is dropped is counted"
        self.outstanding -= Counter(drawn.keys())

    def check(self, allowed: dict[int, set[float]]) -> None:
        """Check that each slot has one of its allowed priorities."""
        p = self.buffer.sampler.probabilities(self.buffer.storage).tolist()
        if self.name == "rank":
            held, last = self.buffer.sampler.state_dict()["priority"].tolist(), 1e30
            for slot in sorted(range(self.size), key=lambda slot: -p[slot]):
                # negative: a new transition
                fitting = [v for v in allowed[slot] if (v > 1e8 if held[slot] < 0 else abs(v - held[slot]) < 1e-4)]
                assert fitting, f"transition {self.numbers[slot]} in slot {slot}: {held[slot]}, {allowed[slot]}"
                self.priority[slot] = fitting[0]
                assert rounded(fitting[0]) <= rounded(last), f"slot {slot} comes behind {last}"
                last = fitting[0]
            return
        # choose the unit in which most slots have an allowed priority
        units = [value / p[slot] for slot, values in allowed.items() for value in values]
        unit = max(units, key=lambda unit: sum(self.fitting(allowed[slot], p[slot] * unit) != [] for slot in allowed))
        for slot, values in allowed.items():
            fitting = self.fitting(values, p[slot] * unit)
            assert fitting, f"transition {self.numbers[slot]} in slot {slot}: {p[slot] * unit}, not one of {values}"
            self.priority[slot] = fitting[0]

    @staticmethod
    def fitting(values: set[float], found: float) -> list[float]:
        return [value for value in values if abs(found - value) < 1e-6 * value]


def whole(model: Model, batches: list[Drawn]) -> list[Drawn]:
    return batches


def split(model: Model, batches: list[Drawn]) -> list[Drawn]:
    return [
        batch[rows]
        for batch in batches
        for rows in (list(range(0, len(batch), 2)), list(range(1, len(batch), 2)))
        if rows
    ]


def shuffled(model: Model, batches: list[Drawn]) -> list[Drawn]:
    return [batch[model.rng.sample(range(len(batch)), len(batch))] for batch in batches]


def concatenated(model: Model, batches: list[Drawn]) -> list[Drawn]:
    return [first + second for first, second in zip(batches[::2], batches[1::2], strict=True)]


def repeated(model: Model, batches: list[Drawn]) -> list[Drawn]:
    return [batch for batch in batches for _ in range(2)]


WAYS = [whole, split, shuffled, concatenated, repeated]
every_way = pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])


@every_sampler
@both_buffers
@every_way
def test_rows_that_come_back_before_the_next_write_are_applied(name, ndim, stock, way):
    model = Model(name, ndim, stock)
    for size in (1, 4, 16):
        for drawn in way(model, [model.draw(size) for _ in range(4)]):
            model.hand_back(drawn)
        model.write(5)


@every_sampler
@both_buffers
@every_way
def test_rows_that_come_back_after_writes_reach_what_was_drawn_alone(name, ndim, stock, way):
    """While updates are outstanding, the ring is overwritten in part or completely, and drawn from again."""
    model = Model(name, ndim, stock)
    for size in (1, 4, 16):
        for written in (2, 5, 12, 20):
            batches = [model.draw(size), model.draw(size)]
            model.write(written)
            batches += [model.draw(size), model.draw(size)]
            for drawn in way(model, batches):
                model.hand_back(drawn)


@every_sampler
@both_buffers
def test_a_batch_handed_back_again_later_does_not_reach_new_content(name, ndim, stock):
    model = Model(name, ndim, stock)
    for size in (1, 4, 16):
        drawn = model.draw(size)
        model.hand_back(drawn)
        model.write(12)
        model.hand_back(drawn)


@every_sampler
@both_buffers
@pytest.mark.parametrize("first", ["oldest", "newest", "any"])
def test_many_outstanding_batches(name, ndim, stock, first):
    model = Model(name, ndim, stock)
    for size in (1, 4):
        batches = []
        for number in range(40):
            batches.append(model.draw(size))
            if number % 10 == 9:
                model.write(4)
        if first != "oldest":
            batches.reverse() if first == "newest" else model.rng.shuffle(batches)
        for drawn in batches:
            model.hand_back(drawn)


@every_sampler
@both_buffers
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_writes_draws_and_updates(name, ndim, stock, seed):
    model, batches = Model(name, ndim, stock), []
    model.rng.seed(seed)
    for _ in range(120):
        what = model.rng.random()
        if what < 0.3:
            model.write(model.rng.choice([2, 3, 5, 15]))
        elif what < 0.65 or len(batches) < 4:
            batches.append(model.draw(model.rng.choice([1, 4, 16])))
        else:
            chosen = [batches.pop(model.rng.randrange(len(batches))) for _ in range(2)]
            for drawn in model.rng.choice(WAYS)(model, chosen):
                model.hand_back(drawn)


@every_sampler
@both_buffers
def test_updates_by_index_need_no_draw(name, ndim, stock):
    """Update slots that were never drawn, after the ring has wrapped around."""
    model = Model(name, ndim, stock)
    for count in (1, 4, 16):
        model.write(7)
        slots = model.rng.sample(range(model.size), min(count, model.size))
        errors = {slot: 2.0 + model.rng.random() for slot in slots}
        index = torch.tensor(slots)
        index = torch.stack([index // model.lanes, index % model.lanes], -1) if ndim == 2 else index
        model.buffer.update_priority(index, torch.tensor(list(errors.values())))
        model.check({slot: {errors.get(slot, old)} for slot, old in model.priority.items()})
        assert model.stats("dropped_updates") == 0


def sorted_by_index(batch: TensorDict) -> list[TensorDict]:
    index = batch["index"].reshape(len(batch), -1)
    return [batch[(index[:, 0] * LANES + index[:, -1]).argsort()]]


def two_epochs(batch: TensorDict) -> list[TensorDict]:
    return [part for _ in range(2) for part in batch[torch.randperm(len(batch))].split(8)]


@every_sampler
@both_buffers
@pytest.mark.parametrize("way", [sorted_by_index, two_epochs])
def test_copied_rows_do_not_reach_new_content(name, ndim, stock, way):
    """All slots are overwritten before the rows come back in increasing order, or in shuffled parts, twice."""
    model = Model(name, ndim, stock, steps=40)
    batch = model.draw(16).batch
    model.write(40)
    before = model.buffer.sampler.probabilities(model.buffer.storage)
    real = int(batch.get(("collector", "mask"), torch.ones(len(batch))).sum())
    batch["td_error"] = torch.full((len(batch),), 7.0)
    parts = way(batch)
    for part in parts:
        model.buffer.update_tensordict_priority(part)
    assert torch.equal(model.buffer.sampler.probabilities(model.buffer.storage), before)
    assert model.stats("dropped_updates") >= real * sum(map(len, parts)) / len(batch)


@pytest.mark.parametrize("stratified", [False, True])
def test_indices_of_ones_own_reach_rows_written_after_all_draws(stratified):
    """All draws were updated, and they contain the slots of later writes; a refresh of all slots is not late."""
    buffer = buffer_with(ProportionalSampler(200, stratified=stratified), 200, batch_size=64)
    buffer.extend(rows(200))

    def sample_and_update():
        batch = buffer.sample()
        batch["td_error"] = torch.ones(64)
        buffer.update_tensordict_priority(batch)

    for _ in range(30):
        sample_and_update()
    index = buffer.extend(rows(16, first=200))
    sample_and_update()
    buffer.update_priority(index, torch.full((16,), 5.0))
    buffer.extend(rows(16, first=216))
    buffer.update_priority(torch.randperm(200), torch.full((200,), 5.0))
    assert buffer.sampler.stats()["dropped_updates"] == 0


def test_an_invalidated_slot_is_drawn_and_updated_again():
    """The draws of a slot that a refused write has emptied are late, and do not count once they were updated."""
    log = WriteLog(Layout((3,), 3, torch.device("cpu"), known=True))
    log.generation.fill_(1)
    log.num_writes.fill_(1)
    pending = PendingDraws(log)

    def draw_twice(slots):
        for _ in range(2):
            pending.add(torch.tensor(slots), int(log.num_writes))

    def late(slots):
        is_drawn, mask = pending.find_late_rows(torch.tensor(slots), int(log.num_writes))
        assert is_drawn
        return [False] * len(slots) if mask is None else mask.tolist()

    draw_twice([0, 1])
    assert late([0, 1]) == [False, False]
    log.invalidate(torch.tensor([1]))
    assert late([0, 1]) == [False, True]
    log.num_writes.add_(1)
    log.generation[1] = log.num_writes
    draw_twice([1])
    assert late([1]) == [False]
    log.num_writes.add_(1)
    log.generation[1] = log.num_writes
    assert late([1]) == [True]
    draw_twice([1])
    assert late([1]) == [False]


def test_an_update_of_slices_registers_one_of_two_equal_draws():
    sampler = TrajectoryRetraceSampler(20, slice_len=2, behaviour_keys=(), anchors=proportional(20))
    buffer = buffer_with(sampler, 20, ndim=2)
    data = rows(10, 2, episode=5)
    data["action"] = torch.zeros(*data.shape, 1)
    buffer.extend(data)
    batch = buffer.sample(4)
    pending = sampler.anchors.state.updates.pending
    (drawn,) = pending._draws.values()
    pending.add(drawn.slots.clone(), drawn.num_writes, is_unpadded=drawn.is_unpadded)
    batch["td_error"] = torch.ones(4)
    buffer.update_tensordict_priority(batch)
    assert [draw.waiting for draw in pending._draws.values()] == [4, 0]
