"""What goes wrong while a buffer is used: wrong data, late updates, threads, processes killed as they write."""

import contextlib
import copy
import itertools
import os
import random
import signal
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.operations import CASES, Driven
from tests.reference import NaiveReaPER
from torchrl_replay_ext import (
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)

pytestmark = [
    # torchrl's, at each checkpoint of a storage that was loaded
    pytest.mark.filterwarnings("ignore:last_cursor is None:UserWarning"),
]

# For each sampler, in the slow run.
OPERATIONS = int(os.environ.get("FAULT_OPERATIONS", "1000000"))
SEQUENCE = 2000


# --- random operations


class RandomOperations(RuleBasedStateMachine):
    """Operations chosen by hypothesis, which finds the shortest sequence that fails."""

    name = "proportional"

    @initialize(seed=st.integers(0, 2**32))
    def create(self, seed):
        torch.manual_seed(seed)
        self.driven = Driven(self.name, seed)

    @rule(name=st.sampled_from([name for _, name in Driven.OPERATIONS]))
    def operate(self, name):
        self.driven.operate(name)

    @rule(count=st.integers(1, 4))
    def write_and_learn(self, count):
        self.driven.operate("extend")
        for _ in range(count):
            self.driven.operate("sample")
            self.driven.operate("update")

    @invariant()
    def agrees(self):
        if hasattr(self, "driven"):
            self.driven.check()


@pytest.mark.parametrize("name", CASES)
def test_random_operations(name):
    case = type(name, (RandomOperations,), {"name": name}).TestCase
    case.settings = settings(max_examples=2, stateful_step_count=12, deadline=None, derandomize=True)
    case("runTest").runTest()


def drive(name, seed, count):
    torch.manual_seed(seed)
    driven = Driven(name, seed)
    for number in range(count):
        driven.operate()
        if number % 10 == 0:
            driven.check()
    driven.check()


@pytest.mark.parametrize("name", CASES)
def test_some_random_operations(name):
    for seed in range(4):
        drive(name, seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_million_random_operations(name):
    """``FAULT_OPERATIONS`` sets their number."""

    @settings(max_examples=max(OPERATIONS // SEQUENCE, 1), deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def drives(seed):
        drive(name, seed, SEQUENCE)

    drives()


# --- refused writes


def test_the_turn_is_kept_after_a_refused_write():
    """The write that follows ends where the last one had ended; it was taken for that one, marked again."""
    buffer, reference = make("reaper"), NaiveReaPER()

    def write(numbers, done=()):
        slots = buffer.extend(rows(numbers, done)).tolist()
        for slot, number in zip(slots, numbers, strict=True):
            reference.write(slot, "one", number in done, False)

    buffer.extend(rows(range(CAPACITY)))
    wrong = rows(range(12))
    wrong["action"] = torch.zeros(12, 3)
    with pytest.raises(RuntimeError):
        buffer.extend(wrong)
    buffer.sample(4)
    write(range(40, 52))
    write(range(52, 54), done=[53])
    index, error = torch.arange(12, CAPACITY), torch.linspace(0.1, 2.0, 12)
    buffer.update_priority(index, error)
    reference.update(index.tolist(), error.tolist())
    expected = torch.zeros(CAPACITY, dtype=torch.float64)
    for slot, value in reference.criterion().items():
        expected[slot] = value
    torch.testing.assert_close(
        buffer.sampler.probabilities(buffer.storage), expected / expected.sum(), rtol=1e-4, atol=1e-9
    )


# --- processes that are killed

CAPACITY = 24


def rows(numbers, done=()):
    """Transitions of one environment, in which every entry tells the number."""
    numbers = torch.as_tensor(list(numbers))
    ended = torch.isin(numbers, torch.as_tensor(list(done), dtype=torch.int64)).unsqueeze(1)
    return TensorDict(
        {
            "observation": numbers.float().unsqueeze(1),
            "action": numbers.float().unsqueeze(1).clone(),
            "next": {"done": ended, "terminated": ended.clone(), "number": numbers},
        },
        numbers.shape,
    )


def tables():
    return EventTables([EventSpec("end", ("next", "terminated"), 4)], {"end": 8})


def event_sampler(priority):
    def sampler(shared):
        return EventTableSampler(shared, eta={"default": 0.5, "end": 0.5}, min_size=1, priority=priority)

    return sampler


SAMPLERS = {
    "proportional": lambda shared: ProportionalSampler(CAPACITY),
    "rank": lambda shared: RankBasedSampler(CAPACITY),
    "reaper": lambda shared: ReaPERSampler(CAPACITY),
    "slices": lambda shared: TrajectoryRetraceSampler(
        CAPACITY, slice_len=2, behaviour_keys=(), anchors=ProportionalSampler(CAPACITY)
    ),
    "slices, reaper": lambda shared: TrajectoryRetraceSampler(
        CAPACITY, slice_len=2, behaviour_keys=(), anchors=ReaPERSampler(CAPACITY)
    ),
    "tables": event_sampler(None),
    "tables, proportional": event_sampler({"kind": "proportional"}),
    "tables, reaper": event_sampler({"kind": "reaper"}),
}


def make(name):
    shared = tables()
    arguments = {"writer": EventTableWriter(shared)} if name.startswith("tables") else {}
    return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[name](shared), **arguments)


class Killed(BaseException):
    """In the place of SIGKILL, where the test is in one process."""


def stop(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Killed


class DieAfter(TorchDispatchMode):
    """Stops when so many operations of torch have been done, of those with ``of`` in their name."""

    def __init__(self, count, how="raise", of=""):
        super().__init__()
        self.left, self.how, self.of = count, how, of

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.left -= self.of in str(func)
        if not self.left:
            stop(self.how)
        return result


def break_off(buffer, where, how):
    """Let the next write of ``buffer`` end at a place of the write path."""
    storage = buffer.storage
    written = type(storage).set

    def halfway(cursor, data, *, set_cursor=True):
        if where == "before the data":
            stop(how)
        # within: the storage has moved on, and one entry of several is written
        within = DieAfter(1, how, of="index_put_") if where == "within the data" else contextlib.nullcontext()
        with within:
            written(storage, cursor, data, set_cursor=set_cursor)
        stop(how)

    storage.set = halfway


def write_and_die(buffer, where):
    torch.set_num_threads(1)
    break_off(buffer, where, "kill")
    buffer.extend(rows(range(100, 105)))


def whole(batch):
    return torch.equal(batch["observation"], batch["action"]) and torch.equal(
        batch["observation"][:, 0], batch["next", "number"].float()
    )


def drawn_numbers(buffer, batches=60):
    """What is drawn, of which all is whole."""
    drawn = set()
    for _ in range(batches):
        batch = buffer.sample(16)
        assert whole(batch)
        drawn |= set(batch["next", "number"].tolist())
    return drawn


def check_survivors(buffer, lost):
    """Only whole rows that were written to the end are drawn, and all of those, but the ``lost`` ones."""
    drawn = drawn_numbers(buffer)
    kept = set(range(40 - CAPACITY, 40)) - set(lost)
    assert drawn == kept, (sorted(drawn), sorted(kept))
    buffer.sampler.check_valid()


def go_on(buffer):
    """The buffer works as ever: what was broken off is overwritten in its time."""
    buffer.extend(rows(range(200, 210), done=[209]))
    batch = buffer.sample(8)
    batch["td_error"] = torch.rand(8)
    buffer.update_tensordict_priority(batch)
    buffer.sampler.check_valid()
    for first in range(300, 340, 5):
        buffer.extend(rows(range(first, first + 5), done=[first + 4]))
        assert whole(buffer.sample(8))
        buffer.sampler.check_valid()
    if isinstance(buffer.sampler, EventTableSampler):
        numbers = buffer.storage[:]["next", "number"]
        found = numbers[buffer.sampler.tables["end"].index()].tolist()
        assert found == [*range(331, 335), *range(336, 340)]
    assert drawn_numbers(buffer) == set(range(340 - CAPACITY, 340))


def fill(buffer):
    for first in range(0, 40, 10):
        buffer.extend(rows(range(first, first + 10), done=[first + 9]))
    return buffer


def filled(name):
    return fill(make(name))


# rows 16 to 20 are those in the slots of the write that breaks off
PLACES = {"before the data": (), "within the data": range(16, 21), "after the data": range(16, 21)}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_write_that_breaks_off(name, where):
    """An interrupt, say, between what is done at a write; the next batches hold nothing half-written."""
    buffer = filled(name)
    break_off(buffer, where, "raise")
    drawn = buffer.sample(16)
    with pytest.raises(Killed):
        buffer.extend(rows(range(100, 105)))
    del buffer.storage.set
    drawn["td_error"] = torch.ones(16)
    buffer.update_tensordict_priority(drawn)
    lost = PLACES[where]
    if name.startswith("tables"):
        # its writer cleans up
        buffer.sample(4)
        assert all(whole(buffer.sample(16)) for _ in range(20))
    else:
        check_survivors(buffer, lost)
    go_on(buffer)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_write_after_one_that_broke_off(name):
    """Nothing is drawn in between: what was half-written is seen by the place of the next write alone."""
    buffer = filled(name)
    break_off(buffer, "within the data", "raise")
    with pytest.raises(Killed):
        buffer.extend(rows(range(100, 105)))
    del buffer.storage.set
    buffer.extend(rows(range(105, 108)))
    assert drawn_numbers(buffer) == {*range(24, 40), *range(105, 108)}
    buffer.sampler.check_valid()
    go_on(buffer)


def test_an_end_that_was_lost_frees_its_stream():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=ReaPERSampler(CAPACITY, num_streams=2))

    def write(numbers, trajectories, done=()):
        buffer.extend(rows(numbers, done).set(("collector", "traj_ids"), torch.tensor(trajectories)))

    write(range(10), [0, 1] * 5)
    break_off(buffer, "within the data", "raise")
    with pytest.raises(Killed):
        write(range(10, 14), [0, 1, 0, 1], done=[12, 13])
    del buffer.storage.set
    write(range(14, 18), [2, 3, 2, 3])
    assert set(buffer.sample(400)["next", "number"].tolist()) == {*range(10), *range(14, 18)}
    buffer.sampler.check_valid()


@pytest.mark.parametrize("name", ["proportional", "tables, reaper"])
def test_a_process_that_is_killed_as_it_writes(name):
    buffer = filled(name)
    buffer.share()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=write_and_die, args=(buffer, "within the data"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    # the lock died with it; what the README says
    buffer.share()
    check_survivors(buffer, range(16, 21))
    go_on(buffer)


# --- changes of a sampler's state that break off


def broken_write(buffer, count):
    with DieAfter(count):
        buffer.extend(rows(range(100, 105), done=[104]))


def broken_rows(buffer, count):
    with DieAfter(count):
        buffer.extend(rows(range(100, 105)))


def broken_mark(buffer, count):
    """A write of which the data is stored, but not all that the sampler makes of it."""
    sampler, mode = buffer.sampler, DieAfter(count)
    mark = sampler.mark_update

    def dying(*arguments, **keywords):
        with mode:
            mark(*arguments, **keywords)

    sampler.mark_update = dying
    try:
        buffer.extend(rows(range(100, 105)))
    finally:
        del sampler.mark_update


def broken_update(buffer, count):
    batch = buffer.sample(8)
    batch["td_error"] = torch.rand(8)
    with DieAfter(count):
        buffer.update_tensordict_priority(batch)


def broken_sample(buffer, count):
    with DieAfter(count):
        buffer.sample(8)


def dies(change, buffer, count):
    try:
        change(buffer, count)
    except Killed:
        return True
    return False


# what is done, and which rows it may or may not have lost
CHANGES = {
    "write": (broken_write, {*range(16, 21), *range(100, 105)}),
    "mark": (broken_mark, {*range(16, 21), *range(100, 105)}),
    "update": (broken_update, set()),
    "sample": (broken_sample, set()),
}


def by_td_errors(buffer):
    """How likely each slot would be drawn by its TD error alone."""
    buffer = copy.deepcopy(buffer)
    own = getattr(buffer.sampler, "anchors", buffer.sampler)
    if hasattr(own, "omega"):
        own.omega = 0.0
    if isinstance(own, EventTableSampler):
        own.eta = {"default": 1.0, "end": 0.0}
    return buffer.sampler.probabilities(buffer.storage)


def survive(name, what, count):
    """Breaks off after ``count`` operations; whether there were so many."""
    torch.manual_seed(count)
    buffer, (change, open_) = filled(name), CHANGES[what]
    has_priorities = name != "tables"
    errors = 0.5 + torch.rand(CAPACITY)
    buffer.update_priority(torch.arange(CAPACITY), errors)
    numbers, before = buffer.storage[:]["next", "number"].clone(), by_td_errors(buffer)
    if not dies(change, buffer, count):
        return False
    # a checkpoint is as good as a batch
    buffer.sampler.state_dict()
    if has_priorities and what != "update":
        same = torch.isin(numbers, torch.tensor(list(open_)), invert=True)
        now = by_td_errors(buffer)[same]
        if name == "rank":
            assert torch.equal(now.argsort(), before[same].argsort())
        else:
            torch.testing.assert_close(now / now.sum(), before[same] / before[same].sum(), rtol=1e-6, atol=0)
    drawn = drawn_numbers(buffer, 40)
    assert set(range(16, 40)) - open_ <= drawn <= set(range(16, 40)) | open_
    if name.startswith("tables"):
        # the table holds the ends of episodes, as before; or there was room made in it, or it was filled
        table = buffer.storage[:]["next", "number"][buffer.sampler.tables["end"].index()].tolist()
        ends = [*range(26, 30), *range(36, 40)]
        assert table in (ends, ends[4:], [*ends[4:], *range(101, 105)]), table
    buffer.sampler.check_valid()
    go_on(buffer)
    return True


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_change_that_breaks_off(name, what):
    """Ctrl-C, wherever it comes: nothing is lost but the rows of that write, and all goes on."""
    for count in (1, 4, 12, 20, 28, 35, 70, 130, 200):
        if not survive(name, what, count):
            break
    assert count > 1


@pytest.mark.slow
@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_change_that_breaks_off_anywhere(name, what):
    count = 1
    while survive(name, what, count):
        count += 1


@pytest.mark.parametrize("name", ["tables", "tables, reaper"])
def test_an_event_table_never_holds_a_row_that_has_replaced_its_entry(name):
    filled_once = filled(name)
    # the next write replaces entries 26 to 29
    filled_once.extend(rows(range(40, 50)))
    for count in itertools.count(1, 4):
        buffer = copy.deepcopy(filled_once)
        if not dies(broken_rows, buffer, count):
            break
        buffer.sample(8)
        table = buffer.storage[:]["next", "number"][buffer.sampler.tables["end"].index()].tolist()
        assert set(table) <= {*range(26, 30), *range(36, 40)}, (count, table)
        assert set(table) >= set(range(36, 40)), (count, table)
        buffer.sampler.check_valid()
    assert count > 50


def survive_pinned(count):
    """As survive: no slot is lost for good, and what is in a table is whole."""
    shared = EventTables([EventSpec("end", ("next", "terminated"), 4)], {"default": 16, "end": 8}, retention="pinned")
    sampler = EventTableSampler(shared, eta={"default": 0.5, "end": 0.5}, min_size=1, priority={"kind": "proportional"})
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=sampler, writer=EventTableWriter(shared)
    )
    if not dies(broken_write, fill(buffer), count):
        return False
    for _ in range(8):
        assert whole(buffer.sample(16))
    sampler.check_valid()
    for first in range(200, 260, 10):
        buffer.extend(rows(range(first, first + 10), done=[first + 9]))
        assert whole(buffer.sample(16))
        sampler.check_valid()
    numbers = buffer.storage[:]["next", "number"]
    assert numbers[shared["default"].index()].tolist() == list(range(244, 260))
    assert numbers[shared["end"].index()].tolist() == [*range(246, 250), *range(256, 260)]
    return True


@pytest.mark.parametrize("counts", [(1, 30, 90, 130, 160, 200, 240), pytest.param(None, marks=pytest.mark.slow)])
def test_a_write_to_pinned_tables_that_breaks_off(counts):
    for count in counts or itertools.count(1):
        if not survive_pinned(count):
            break
    assert count > 150


# --- threads


@pytest.mark.parametrize("name", ["proportional", "rank", "reaper", "slices", "tables, proportional"])
def test_writes_and_updates_while_batches_are_drawn_ahead(name):
    shared = tables()
    arguments = {"writer": EventTableWriter(shared)} if name.startswith("tables") else {}
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=SAMPLERS[name](shared), batch_size=8, prefetch=3, **arguments
    )
    buffer.extend(rows(range(CAPACITY), done=[CAPACITY - 1]))
    until, failures, written = time.monotonic() + 0.5, [], [CAPACITY]

    def write():
        first = written[0]
        written[0] += 3
        buffer.extend(rows(range(first, first + 3), done=[first + 2] if random.random() < 0.3 else []))

    def learn():
        batch = buffer.sample()
        assert whole(batch)
        batch["td_error"] = torch.rand(8)
        buffer.update_tensordict_priority(batch)

    def repeat(what):
        try:
            while time.monotonic() < until and not failures:
                what()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=repeat, args=(what,)) for what in (write, learn, learn)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)
    buffer.synchronize()
    buffer.sampler.check_valid()
    stored = buffer.storage[:]["next", "number"].sort().values.tolist()
    assert stored == list(range(written[0] - CAPACITY, written[0]))
