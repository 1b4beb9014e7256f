"""Faults while a buffer is used: wrong data, late updates, and processes that are killed during a write."""

import contextlib
import os
import signal
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data import buffer_with, event_sampler, learn
from tests.data import rows as data_rows
from tests.operations import CASES, Driven
from tests.params import both_buffers, slow_but
from torchrl_replay_ext import (
    EventTableSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.slots import Slots
from torchrl_replay_ext.samplers.slice_starts import SliceStarts

pytestmark = [
    # a warning of TorchRL for each checkpoint of a storage that was loaded
    pytest.mark.filterwarnings("ignore:last_cursor is None:UserWarning"),
]

# Number of operations for each sampler in the slow run.
OPERATIONS = int(os.environ.get("FAULT_OPERATIONS", "1000000"))
SEQUENCE = 2000


# --- random operations


def drive(name, seed, count, **setting):
    torch.manual_seed(seed)
    driven = Driven(name, seed, **setting)
    for number in range(count):
        driven.operate()
        if number % 10 == 0:
            driven.check()
    driven.check()


@pytest.mark.parametrize("name", CASES)
def test_some_random_operations(name):
    # a reference compares the probabilities
    for seed in range(2 if "tables" in name else 5):
        drive(name, seed, 150)


@pytest.mark.parametrize(
    "name", ["reaper", "slices", "slices, unpadded", "slices, reaper", "tables", "frames, slices, rank"]
)
def test_environments_that_idle_while_others_overwrite_the_ring(name):
    """No episode continues in a row that has replaced its last step."""
    for seed in range(3):
        drive(name, seed, 60, layout="uneven", num_envs=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_million_random_operations(name):
    """The environment variable ``FAULT_OPERATIONS`` sets the number of operations."""

    for seed in range(max(OPERATIONS // SEQUENCE, 1)):
        drive(name, 1000 + seed, SEQUENCE)


# --- processes that are killed

CAPACITY = 24


def rows(numbers, done=()):
    """Transitions of one environment; every entry contains the number of its transition."""
    data = data_rows(len(numbers), first=numbers[0], done=[number - numbers[0] for number in done])
    data["action"] = data["observation"].clone()
    data["next", "number"] = data.pop("number")
    return data


ends = partial(event_sampler, 8, ("next", "terminated"), 4)
slices = partial(TrajectoryRetraceSampler, CAPACITY, slice_len=2, behaviour_keys=())
SAMPLERS = {
    "proportional": lambda: ProportionalSampler(CAPACITY),
    "rank": lambda: RankBasedSampler(CAPACITY),
    "reaper": lambda: ReaPERSampler(CAPACITY),
    "slices": lambda: slices(anchors=ProportionalSampler(CAPACITY)),
    "slices, reaper": lambda: slices(anchors=ReaPERSampler(CAPACITY)),
    "tables": ends,
    "tables, proportional": lambda: ends(priority={"kind": "proportional"}),
}
MADE = {**SAMPLERS, "recency": lambda: RecencySampler(CAPACITY)}


def make(name, *, compilable=True, **arguments):
    return buffer_with(MADE[name](), CAPACITY, compilable=compilable, batch_size=16, **arguments)


class Killed(BaseException):
    """Stands for SIGKILL in tests that use a single process."""


def stop(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise Killed


class DieAfter(TorchDispatchMode):
    """Stops the program after ``count`` torch operations whose names contain ``of``."""

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
    """Make the next write of ``buffer`` stop at a given place of the write path."""
    storage = buffer.storage
    written = type(storage).set

    def halfway(cursor, data, *, set_cursor=True):
        if where == "before the data":
            stop(how)
        # "within the data": the storage has moved its cursor, and only one of several entries is written
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


def drawn_numbers(buffer):
    """The numbers of drawn transitions; asserts that every drawn row is complete."""
    drawn = set()
    for _ in range(60):
        batch = buffer.sample()
        assert whole(batch)
        drawn |= set(batch["next", "number"].tolist())
    return drawn


def go_on(buffer):
    """Assert that the buffer still works: later writes replace the interrupted one."""
    buffer.extend(rows(range(200, 210), done=[209]))
    learn(buffer)
    for first in range(300, 340, 5):
        buffer.extend(rows(range(first, first + 5), done=[first + 4]))
        assert whole(buffer.sample())
    if isinstance(buffer.sampler, EventTableSampler):
        numbers = buffer.storage[:]["next", "number"]
        found = numbers[buffer.sampler.tables["end"].index()].tolist()
        assert found == [*range(331, 335), *range(336, 340)]
    assert drawn_numbers(buffer) == set(range(340 - CAPACITY, 340))


def filled(name, **arguments):
    buffer = make(name, **arguments)
    for first in range(0, 40, 10):
        buffer.extend(rows(range(first, first + 10), done=[first + 9]))
    return buffer


def extend_and_break_off(buffer, where):
    """Write 5 transitions, of which nothing may be drawn."""
    break_off(buffer, where, "raise")
    with pytest.raises(Killed):
        buffer.extend(rows(range(100, 105)))
    del buffer.storage.set


@pytest.mark.parametrize("where", ["before the data", "within the data", "after the data"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_write_that_breaks_off(name, where):
    """After a write of our own writers is interrupted at any place, batches contain nothing of it."""
    buffer = filled(name)
    drawn = buffer.sample()
    extend_and_break_off(buffer, where)
    drawn["td_error"] = torch.ones(16)
    buffer.update_tensordict_priority(drawn)
    # the interrupted write overwrites rows 16 to 20
    assert drawn_numbers(buffer) == set(range(40 - CAPACITY, 40)) - set(range(16, 21))
    go_on(buffer)


@both_buffers
@pytest.mark.parametrize("name", MADE)
def test_a_write_that_is_interrupted_after_a_kernel(name, compilable, monkeypatch):
    """Ctrl-C is noticed when a kernel has changed the state: nothing of the write is drawn all the same."""
    takers = RankBasedSampler, EpisodeIndex, SliceStarts, RecencySampler, EventTableSampler
    for owner, method in (*((taker, "write") for taker in takers), (Slots, "record")):
        buffer, changes = filled(name, compilable=compilable), getattr(owner, method)

        def interrupted(*arguments, changes=changes, **keywords):
            changes(*arguments, **keywords)
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(owner, method, interrupted)
            try:
                buffer.extend(rows(range(100, 105)))
            except Killed:
                assert drawn_numbers(buffer) == set(range(40 - CAPACITY, 40)) - set(range(16, 21))
        go_on(buffer)


@pytest.mark.parametrize(
    ("name", "compilable", "kept"),
    [
        *((name, True, range(21, 40)) for name in SAMPLERS),
        # TorchRL's writer has moved its cursor: samplers that need the order see that the rows in between were lost
        *((name, False, range(24, 40)) for name in ("reaper", "slices", "slices, reaper")),
    ],
)
def test_a_write_after_one_that_broke_off(name, compilable, kept):
    buffer = filled(name, compilable=compilable)
    extend_and_break_off(buffer, "within the data")
    buffer.extend(rows(range(105, 108)))
    assert drawn_numbers(buffer) == {*kept, *range(105, 108)}
    go_on(buffer)


@pytest.mark.parametrize("name", slow_but(["tables, proportional"], ["proportional", "tables, proportional"]))
def test_a_process_that_is_killed_as_it_writes(name):
    buffer = filled(name)
    buffer.share()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=write_and_die, args=(buffer, "within the data"))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    # the killed process held the lock; share() makes a new one, as the README says
    buffer.share()
    go_on(buffer)
