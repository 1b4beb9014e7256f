"""Late priority updates: whose slot was overwritten after the draw.

With write stamps, late rows are dropped. Without, as many updates of a slot are dropped as draws of it waited for one
when it was overwritten; a draw waits while at most 64 others follow. The model has these numbers for each slot.
"""

import math
import random
from collections import deque
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

LANES, SLICE = 2, 3
WINDOW = 64
EXACT = {"alpha": 1.0, "td_error": "absolute"}


def proportional(capacity):
    return ProportionalSampler(capacity, eps=0.0, **EXACT)


def rank(capacity):
    return RankBasedSampler(capacity, **EXACT)


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
# the same code serves all samplers, except for padded rows and several columns
some_samplers = pytest.mark.parametrize(("name", "ndim"), [("proportional", 1), ("slices", 1), ("rank", 2)])
both_buffers = pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])


def rounded(value: float) -> float:
    """The first 8 binary digits of a number: those that agree in them have ranks in any order."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(int(mantissa * 256), exponent)


@dataclass
class Drawn:
    """Rows of one or several batches.

    Args:
        batch: the rows.
        slots: slot of each row.
        numbers: number of the transition that was drawn.
        real: False for padded rows of a slice.
    """

    batch: TensorDict
    slots: list[int]
    numbers: list[int]
    real: list[bool]

    def __getitem__(self, rows: list[int]) -> "Drawn":
        columns = ([column[row] for row in rows] for column in (self.slots, self.numbers, self.real))
        return Drawn(self.batch[torch.tensor(rows)], *columns)

    def __add__(self, other: "Drawn") -> "Drawn":
        columns = (getattr(self, name) + getattr(other, name) for name in ("slots", "numbers", "real"))
        return Drawn(torch.cat([self.batch, other.batch]), *columns)

    def __len__(self) -> int:
        return len(self.slots)


@dataclass
class Slot:
    """The draws of a slot: the number of the last one, and how many wait; the same for those before the last write."""

    last: int = 0
    waiting: int = 0
    before: int = 0
    late: int = 0


class Model:
    """A buffer, and plain lists: the transition in each slot, its priority, and the draws that wait for an update.

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
        self.cursor, self.written, self.draws, self.returns = 0, 0, 0, 0
        self.numbers: dict[int, int] = {}
        self.priority: dict[int, float] = {}
        self.slots = [Slot() for _ in range(self.size)]
        self.padded: deque[tuple[list[int], list[bool]]] = deque(maxlen=WINDOW)
        self.buffer = buffer_with(SAMPLERS[name](self.size), self.size, compilable=not stock, ndim=ndim)
        self.write(steps)

    def stats(self, key: str) -> float:
        return float(self.buffer.sampler.stats()[key])

    def write(self, count: int) -> None:
        """Write ``count`` >= 2 steps to every lane, in episodes of 4."""
        data = rows(count, self.lanes if self.ndim == 2 else None, first=self.written, episode=4)
        data["action"] = torch.zeros(*data.shape, 1)
        data["next", "event"] = data["number"].unsqueeze(-1) % 5 == 0
        default = self.stats("max_priority")
        self.buffer.extend(data)
        for number in range(self.written, self.written + count * self.lanes):
            slot, self.cursor = self.cursor, (self.cursor + 1) % self.size
            self.numbers[slot] = number
            # with ranks, the newest transition is first
            self.priority[slot] = 1e9 + number if self.name == "rank" else default
            drawn = self.slots[slot]
            late = drawn.late * (self.draws - drawn.before <= WINDOW)
            late += drawn.waiting * (self.draws - drawn.last <= WINDOW)
            self.slots[slot] = Slot(0, 0, drawn.last or drawn.before, late)
        self.written += count * self.lanes

    def draw(self, size: int) -> Drawn:
        size *= SLICE if self.name == "slices" else 1
        batch = self.buffer.sample(size)
        index, self.draws = batch["index"], self.draws + 1
        slots = (index[:, 0] * self.lanes + index[:, 1] if self.ndim == 2 else index).tolist()
        numbers = batch["number"].tolist()
        assert numbers == [self.numbers[slot] for slot in slots]
        real = batch.get(("collector", "mask"), torch.ones(size, dtype=torch.bool)).tolist()
        for slot, is_real in zip(slots, real, strict=True):
            if is_real:
                drawn = self.slots[slot]
                drawn.waiting = 1 + drawn.waiting * (self.draws - drawn.last <= WINDOW)
                drawn.last = self.draws
        self.padded.append((slots, real))
        return Drawn(batch, slots, numbers, real)

    def is_late(self, slot: int, number: int) -> bool:
        """Whether a row of an update is late; the counts of the slot change accordingly."""
        drawn = self.slots[slot]
        late = drawn.late > 0 and self.draws - drawn.before <= WINDOW
        if not self.stock:
            late = self.numbers[slot] != number
        if late:
            drawn.late = max(drawn.late - 1, 0)
        else:
            drawn.waiting = max(drawn.waiting - 1, 0)
        return late

    def hand_back(self, drawn: Drawn) -> None:
        """Update with TD errors that identify each transition; check all priorities and the count of dropped rows."""
        self.returns += 1
        errors = [2.0 + number + self.returns / 1024 for number in drawn.numbers]
        drawn.batch["td_error"] = torch.tensor(errors)
        before, dropped = self.stats("dropped_updates"), 0
        self.buffer.update_tensordict_priority(drawn.batch)
        real_rows = drawn.real
        if self.stock:
            # padded rows are known in a whole batch only
            known = [real for slots, real in self.padded if slots == drawn.slots]
            real_rows = known[-1] if known else [True] * len(drawn)
        for slot, number, error, real in zip(drawn.slots, drawn.numbers, errors, real_rows, strict=True):
            if real:
                is_late = self.is_late(slot, number)
                dropped += is_late
                if not is_late:
                    self.priority[slot] = error
        assert self.stats("dropped_updates") - before == dropped
        self.check()

    def check(self) -> None:
        """Check the priority of each slot."""
        p = self.buffer.sampler.probabilities(self.buffer.storage).tolist()
        if self.name == "rank":
            held, last = self.buffer.sampler.state_dict()["priority"].tolist(), 1e30
            for slot in sorted(range(self.size), key=lambda slot: -p[slot]):
                # negative: a new transition
                expected = self.priority[slot]
                assert expected > 1e8 if held[slot] < 0 else held[slot] == pytest.approx(expected, abs=1e-4)
                assert rounded(expected) <= rounded(last), f"slot {slot} comes behind {last}"
                last = expected
            return
        total = sum(self.priority.values())
        assert p == pytest.approx([self.priority[slot] / total for slot in range(self.size)], rel=1e-5)


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


@pytest.mark.parametrize("first", ["oldest", "newest", "any"])
@some_samplers
@both_buffers
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
def test_any_order_of_writes_draws_and_updates(name, ndim, stock):
    model, batches = Model(name, ndim, stock), []
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


def test_updates_of_a_slot_in_order_never_reach_new_content():
    """Each batch comes back once, in order, up to 60 draws later, in parts or joined: nothing reaches a wrong row."""
    model, batches = Model("proportional", 1, True, steps=40), []
    for number in range(120):
        batches.append(model.draw(model.rng.choice([1, 4, 16])))
        if number % 5 == 0:
            model.write(model.rng.choice([2, 5]))
        if len(batches) > 60:
            batch = batches.pop(0)
            for drawn in [batch[[row]] for row in range(len(batch))]:
                fresh = [model.numbers[slot] == number for slot, number in zip(drawn.slots, drawn.numbers, strict=True)]
                before = model.stats("dropped_updates")
                model.hand_back(drawn)
                assert model.stats("dropped_updates") - before == len(drawn) - sum(fresh)


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
        model.priority |= errors
        model.check()
        assert model.stats("dropped_updates") == 0


def test_the_rows_of_the_last_write_are_updated_in_any_case():
    """The slots were drawn, and their updates are still expected."""
    buffer = buffer_with(ProportionalSampler(20), 20, batch_size=64)
    buffer.extend(rows(20))
    buffer.sample()
    index = buffer.extend(rows(20, first=20))
    buffer.update_priority(index, torch.full((20,), 5.0))
    assert buffer.sampler.stats()["dropped_updates"] == 0


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


def test_draws_without_updates_cost_few_of_the_others():
    buffer = buffer_with(ProportionalSampler(1000), 1000, batch_size=32)
    buffer.extend(rows(1000))
    row = rows(1)
    for _ in range(500):
        buffer.extend(row)
        buffer.sample()
        batch = buffer.sample()
        batch["td_error"] = torch.rand(32)
        buffer.update_tensordict_priority(batch)
    assert buffer.sampler.stats()["dropped_updates"] <= 0.03 * 32 * 500
