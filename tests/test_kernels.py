"""Kernels: compiled for the CPU, undecorated, and those for CUDA, on a device or interpreted (TRITON_INTERPRET=1)."""

import copy
import math
import os
import pathlib
import shutil
import subprocess
import sys
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch

from tests.chi_square import p_value
from tests.emulated_device import EmulatedDevice
from tests.reference import Draws
from tests.stacks import StackedStreams
from torchrl_replay_ext import EventSpec, EventTables, Novel, Quantile, SumTree, kernels
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.frame_pool import FramePool
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.rank_buckets import RankBuckets
from torchrl_replay_ext.core.sum_tree import MaxTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.functional import allocate
from torchrl_replay_ext.functional.allocation import METHODS
from torchrl_replay_ext.kernels import ops, reaper, reasons, tree_layout
from torchrl_replay_ext.samplers.rows import EpisodeReader
from torchrl_replay_ext.samplers.slice_starts import SliceStarts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNELS = [kernel for kernel in vars(ops).values() if isinstance(kernel, ops.Kernel)]
ON_DEVICE = pytest.param(
    "device",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
WAYS = ["interpreter"] if INTERPRETED else ["python", "operation", ON_DEVICE]
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="Triton interprets its kernels only")
CAPACITIES = [1, 16, 17, 257]
# rows of a draw that is compared with its distribution
ROWS = 400 if INTERPRETED else 800


def as_operation(kernel, *arguments):
    kernel._operation(*map(ops.as_tensor, arguments))


def as_interpreted(kernel, *arguments):
    kernel._on_cuda(*map(ops.as_tensor, arguments))


def on_device(kernel, *arguments):
    """Run the kernel on the device, with copies of its arguments; on the CPU if it has no version for CUDA."""
    here = [*map(ops.as_tensor, arguments)]
    if not torch._C._dispatch_has_kernel_for_dispatch_key(kernel._operation.name(), "CUDA"):
        return kernel._on_cpu(*here)
    copies = {id(each): (each, each.cuda()) for each in here if isinstance(each, torch.Tensor)}
    kernel._operation(*[copies.get(id(each), (None, each))[1] for each in here])
    for own, copy_of_it in copies.values():
        own.copy_(copy_of_it)


@pytest.fixture(params=WAYS)
def run(request, monkeypatch):
    """Runs a function with the kernels of another implementation."""

    # before any of them is patched: modules take parts of each other when they are imported
    for kernel in KERNELS:
        import_module(f"torchrl_replay_ext.kernels.{kernel._name.split('.')[0]}")

    def run(function, *arguments):
        with monkeypatch.context() as patch:
            if request.param == "python":
                prefix = f"{kernels.__name__}."
                for loops in [each for name, each in sys.modules.items() if name.startswith(prefix)]:
                    for part, compiled in [*vars(loops).items()]:
                        patch.setattr(loops, part, getattr(compiled, "py_func", compiled))
            for kernel in KERNELS:
                module, name = kernel._name.split(".")
                if request.param == "python":
                    patch.setattr(kernel, "_loop", getattr(sys.modules[f"{kernels.__name__}.{module}"], name))
                else:
                    ways = {"operation": as_operation, "interpreter": as_interpreted, "device": on_device}
                    patch.setattr(ops.Kernel, "__call__", ways[request.param])
                if request.param == "interpreter":
                    # as many proposals as on the CPU, in few thread blocks, of which each takes long to interpret
                    module = import_module("torchrl_replay_ext.kernels.cuda.reaper")
                    patch.setattr(module, "ROUNDS", module.tl.constexpr(reaper.ROUNDS))
                    patch.setattr(module, "_ROWS", 16)
            # random numbers wrap around
            with np.errstate(over="ignore"):
                return function(*arguments)

    run.has_rounds_of_cpu = request.param != "device"
    run.is_cuda = request.param in ("interpreter", "device")
    return run


def scramble(*tensors):
    """Fill tensors with any numbers, as damaged states may hold."""
    for tensor in tensors:
        most = 2 ** (30 if tensor.dtype == torch.int32 else 50)
        tensor.copy_(torch.randint(-most, most, tensor.shape))


def a_tree(capacity, paged=False):
    blocks = capacity // SumTree.PAGE + 1
    tree = SumTree(capacity, track_min=True, num_pages=blocks if paged else None)
    tree.pages.copy_(torch.randperm(blocks)[: len(tree.pages)])
    tree.write(torch.arange(capacity), torch.randint(0, 2**40, (capacity,)))
    return tree


def assert_equal(first, second):
    for name, ours in vars(first).items():
        assert not isinstance(ours, torch.Tensor) or torch.equal(ours, vars(second)[name])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_all_implementations_write_the_same(run, capacity, paged):
    tree = a_tree(capacity, paged)
    other = copy.deepcopy(tree)
    for count in (1, 40):
        # with duplicates, and rows out of range
        index = torch.randint(-2, capacity + 2, (count,))
        # few values, so that minima have ties and rise
        for mass in (torch.randint(0, 2**40, (count,)), *torch.randint(0, 4, (3, count)), 7, 0):
            tree.write(index, mass)
            run(other.write, index, mass)
            assert_equal(tree, other)
            tree.check_valid()
    tree.leaves[: min(capacity, 9)] = 11
    other.leaves[: min(capacity, 9)] = 11
    tree.rebuild_()
    run(other.rebuild_)
    assert_equal(tree, other)
    run(other.write, torch.arange(capacity), torch.zeros(capacity, dtype=torch.int64))
    assert int(other.total()) == 0 and int(other.nodes.abs().max()) == 0
    assert other.minima.eq(tree_layout.NOTHING).all()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_all_implementations_read_the_same(run, capacity, paged):
    tree = a_tree(capacity, paged)
    u = torch.tensor([0.0, 0.5, 1 - 2.0**-53, *torch.rand(50).tolist()], dtype=torch.float64)
    border = tree.prefix(torch.arange(capacity + 1))[-100:]
    target = torch.cat([border, border - 1, torch.randint(int(tree.total()), (100,))])
    target = target[(target >= 0) & (target < tree.total())]
    index = torch.randint(-3, capacity + 3, (200,))
    for read in (
        lambda: tree.draw(u),
        lambda: tree.find(target),
        lambda: (tree.prefix(index), tree.get(index)),
        lambda: (tree.total(), torch.as_tensor(tree.min())),
    ):
        for ours, theirs in zip(read(), run(read), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_all_implementations_track_the_same_maximum(run, capacity):
    tree = MaxTree(capacity)
    other = copy.deepcopy(tree)
    for count in (1, 40):
        index = torch.randint(capacity, (count,))
        tree.leaves[index] = other.leaves[index] = torch.randint(2**40, (1,))
        for each, call in ((tree, plainly), (other, run)):
            call(each.refresh, torch.cat([index, torch.tensor([-1, capacity])]))
        assert_equal(tree, other)
        assert int(run(other.max)) == int(other.leaves.max())
    run(other.rebuild_)
    assert_equal(tree, other)


def test_empty_rows(run):
    tree = a_tree(20)
    none = torch.zeros(0, dtype=torch.int64)
    before = copy.deepcopy(tree)
    run(tree.write, none, none)
    assert_equal(tree, before)
    for read in (tree.find, tree.get, tree.prefix, lambda rows: tree.draw(rows.double())):
        result = run(read, none)
        assert all(len(part) == 0 for part in (result if isinstance(result, tuple) else (result,)))


def test_a_tree_without_mass_yields_leaf_0(run):
    tree = SumTree(300)
    leaf, mass = run(tree.find, torch.tensor([-1, -1]))
    assert leaf.tolist() == mass.tolist() == [0, 0]


@pytest.mark.parametrize("paged", [False, True])
def test_walks_stay_in_range_whatever_the_state_holds(run, paged):
    tree = a_tree(1000, paged)
    scramble(tree.leaves, tree.nodes, tree.minima, *[tree.pages] * paged)
    tree.nodes[0] = 2**61
    leaf, _ = run(tree.draw, torch.rand(500, dtype=torch.float64))
    assert int(leaf.min()) >= 0 and int(leaf.max()) < 1000
    leaf, _ = run(tree.find, torch.randint(-(2**62), 2**62, (500,)))
    assert int(leaf.min()) >= 0 and int(leaf.max()) < 1000
    run(tree.prefix, torch.randint(-(2**62), 2**62, (500,)))


# --- rows of draws, writes and updates

SLOTS, LIMIT = 20, 50.0


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

    def update(self, slots, error, stamp, real, *, squared, refuses, is_own, eps=0.01, least=0.1):
        kept, kept_d, result = torch.empty_like(slots), torch.empty_like(error), torch.zeros(2, dtype=torch.int64)
        state = self.generation, self.draws, self.num_draws, self.d, self.largest, self.counts, self.limit
        tree = *self.tree.views(), self.alpha
        given = slots, error, stamp, real, True, refuses, is_own
        self.run(ops.rows_update, *state, eps, least, squared, *tree, *given, kept, kept_d, result)
        known = [bool(r) for r in real.tolist()] if len(real) else [True] * len(slots)
        stamps = stamp.tolist() if len(stamp) else None
        rows = [i for i in range(len(slots)) if known[i] and (stamps is None or stamps[i] >= 0)]
        slot, errors = slots.tolist(), error.tolist()
        priority = {i: max((errors[i] ** 0.5 if squared else errors[i]) + eps, least) for i in rows if errors[i] >= 0}
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
    nothing = torch.empty(0, dtype=torch.int64)
    how = {"squared": False, "refuses": True, "is_own": False}
    rows.update(torch.tensor([1]), torch.ones(1), nothing, nothing, **how)
    rows.num_draws += 1
    rows.waits.number += 1
    rows.update(torch.tensor([0, 1]), torch.ones(2), nothing, nothing, **how)
    rows.check()
    assert rows.dropped == 1


def test_more_rows_than_are_processed_together(run):
    """Of the rows of a slot the last one wins, wherever it is in the batch."""
    rows = RowState(run)
    rows.record(torch.arange(SLOTS), True)
    nothing = torch.empty(0, dtype=torch.int64)
    slots = torch.randint(SLOTS, (3000,))
    rows.draw(slots, torch.ones(3000).double())
    how = {"squared": False, "refuses": True, "is_own": False}
    rows.update(slots, 10 * torch.rand(3000), nothing, nothing, **how)
    rows.check()


# --- lanes, episodes and slices

WRITTEN = [(False, 1), (False, 3), (True, 3)]


@pytest.fixture
def unchecked(monkeypatch):
    """Writes count interruptions, as in graphs, without warnings and errors."""
    monkeypatch.setattr("torchrl_replay_ext.core.lanes.is_traced", lambda: True)


def plainly(function, *arguments):
    return function(*arguments)


plainly.is_cuda, plainly.has_rounds_of_cpu = False, True


def random_writes(assigned, lanes, size):
    """Writes of steps of three environments. Some trajectories break off, with a mark at the next one or without."""
    torch.manual_seed(lanes)
    cursor, ids = 0, torch.arange(lanes)
    for _ in range(12):
        count = int(torch.randint(1, 4, ())) * lanes
        row = torch.arange(count)
        env = (row % lanes, row * lanes // count, torch.randint(lanes, (count,)))[int(torch.randint(3, ())) * assigned]
        ended, initial, trajectory = (torch.rand(count) < 0.2), torch.zeros(count, dtype=torch.bool), []
        for row in range(count):
            if torch.rand(()) < 0.2:
                ids[env[row]] = ids.max() + 1
                initial[row] = torch.rand(()) < 0.5
            trajectory.append(int(ids[env[row]]))
            if ended[row]:
                ids[env[row]] = ids.max() + 1
        marks = EpisodeMarks(ended, torch.tensor(trajectory), initial)
        yield (cursor + torch.arange(count)) % size, marks, ended & (torch.rand(count) < 0.7)
        cursor = (cursor + count) % size


def assert_same_tensors(first, second):
    for (name, ours), theirs in zip(first.items(), second.values(), strict=True):
        assert torch.equal(ours, theirs), name


def a_log(size, lanes, assigned):
    return WriteLog(Layout((size,) if assigned else (size // lanes, lanes), torch.device("cpu")))


def a_reader(lanes):
    return EpisodeReader(
        "tests", num_streams=lanes, done_key="done", traj_key="trajectory", init_key="initial", on_load="continue"
    )


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("assigned", "lanes"), WRITTEN)
def test_all_implementations_write_the_same_episodes(run, assigned, lanes):
    size = 42 if assigned else 18 * lanes
    index = EpisodeIndex(a_log(size, lanes, assigned), a_reader(lanes))
    other = copy.deepcopy(index)
    for number, (slots, marks, finished) in enumerate(random_writes(assigned, lanes, size), 1):
        updated, d = torch.randint(-2, size + 2, (9,)), 100 * torch.rand(9)
        for each, call in ((index, plainly), (other, run)):
            call(each.write, slots, torch.tensor([number / 8], dtype=torch.float64), marks, finished)
            each._log.generation[slots] = number
            each._log.num_writes.fill_(number)
            each._log.last_seen_step.copy_(slots[-1] // each._log.layout.slots_per_step)
            call(partial(each.update, updated, d, stays_new=number % 3 == 0))
            if number == 7:
                oldest = (slots[-1] + torch.arange(1, 1 + lanes)) % size
                call(each.remove, oldest)
                each._log.generation[oldest] = 0
            if number == 9:
                call(each.before_full_overwrite)
                each._log.generation.zero_()
        assert_same_tensors(index.tensors(), other.tensors())
        for ours, theirs in zip(index.arrays(), other.arrays(), strict=True):
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))
    other.check_valid()
    assert int(other.lanes.interrupted) > 0


def some_slices(size, lanes, *, assigned, padded, starts="any"):
    arguments = {"reader": a_reader(lanes), "behaviour_keys": (), "pad": padded, "starts": starts}
    return SliceStarts(a_log(size, lanes, assigned), slice_len=4, **arguments)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("starts", ["any", "episode"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("assigned", "lanes"), WRITTEN)
def test_all_implementations_write_the_same_slices(run, assigned, lanes, padded, starts):
    size = 42 if assigned else 18 * lanes
    index = some_slices(size, lanes, assigned=assigned, padded=padded, starts=starts)
    other = copy.deepcopy(index)
    for number, (slots, marks, _) in enumerate(random_writes(assigned, lanes, size), 1):
        other._log.generation[slots] = number
        oldest = (slots[-1] + torch.arange(1, 1 + lanes)) % size
        for each, call in ((index, plainly), (other, run)):
            call(each.write, slots, marks)
            if number == 7:
                call(each.remove, oldest)
                other._log.generation[oldest] = 0
        assert_same_tensors(index.tensors(), other.tensors())
        assert_equal(index.starts, other.starts)
        for ours, theirs in zip(index.walk(slots), run(other.walk, slots), strict=True):
            assert torch.equal(ours, theirs)
    other.check_valid()
    slots, mask = run(other.walk, torch.arange(size))
    assert mask[:, 0].tolist() == (other.starts.get(torch.arange(size)) > 0).tolist() and mask.any()
    assert padded or mask.all(1).equal(mask.any(1))
    assert torch.equal(mask[:, 1:], (slots[:, 1:] != slots[:, :-1]) & mask[:, :1])


def test_all_implementations_refuse_the_same_trajectories(run):
    index = EpisodeIndex(a_log(30, 2, assigned=True), a_reader(2))
    no = torch.zeros(6, dtype=torch.bool)
    before = copy.deepcopy(index.tensors())
    one = torch.ones(1, dtype=torch.float64)
    write = partial(index.write, torch.arange(6), one, EpisodeMarks(no, torch.tensor([0, 1, 2] * 2)), no)
    with pytest.raises(ValueError, match=r"trajectory 1 continues .* num_streams=2"):
        run(write)
    assert_same_tensors(before, index.tensors())
    marks = EpisodeMarks(no[:3], torch.tensor([0, 1, 2]))
    with pytest.warns(UserWarning, match="is closed at its last stored step"):
        run(index.write, torch.arange(3), one, marks, no[:3])
    assert int(index.lanes.interrupted) == 1
    index._log.generation[:3] = 1
    index._log.last_seen_step.fill_(2)
    index.check_valid()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("assigned", [False, True])
def test_writes_stay_in_range_whatever_the_state_holds(run, assigned):
    for seed in range(3 if INTERPRETED else 20):
        lanes = 2 if assigned else 1
        episodes = EpisodeIndex(a_log(120, lanes, assigned), a_reader(lanes))
        slices = some_slices(120, lanes, assigned=assigned, padded=False)
        torch.manual_seed(seed)
        for index in (episodes, slices):
            state = {name.partition("_")[2]: tensor for name, tensor in index.tensors().items()}
            scramble(*(state[name] for name in sorted(state.keys() - {"interrupted", "finished", "rows"})))
        marks = EpisodeMarks(torch.rand(12) < 0.5, torch.arange(12) // 3, None)
        slots = torch.randint(-5, 125, (12,))
        run(episodes.write, slots, torch.rand(1, dtype=torch.float64), marks, marks.ended)
        run(slices.write, slots, marks)
        run(episodes.update, slots, torch.rand(12))
        run(episodes.remove, slots)
        walked, _ = run(slices.walk, torch.randint(-(2**50), 2**50, (20,)))
        assert int(walked.min()) >= 0 and int(walked.max()) < 120


# --- ReaPER


def some_episodes(assigned=False, lanes=1):
    """An index whose ring has wrapped, with finished, ongoing and new episodes."""
    size, cursor = 300, 0
    log = a_log(size, lanes, assigned)
    index = EpisodeIndex(log, a_reader(lanes))
    for number in range(1, 20):
        count = 12 * lanes
        slots = (cursor + torch.arange(count)) % size
        cursor, stream, step = cursor + count, torch.arange(count) % lanes, torch.arange(count) // lanes
        ended = (12 * number + step) % (9 + stream) == 0
        trajectory = (12 * number + step - 1) // (9 + stream) * lanes + stream if assigned else None
        marks = EpisodeMarks(ended=ended, trajectory=trajectory, initial=None)
        index.write(slots, torch.ones(1, dtype=torch.float64), marks, finished=ended)
        log.generation[slots] = number
        log.num_writes.fill_(number)
        log.last_seen_step.copy_(slots[-1] // log.layout.slots_per_step)
        index.update(slots[::3], 2 * torch.rand(slots[::3].shape), stays_new=number % 4 == 0)
    index.check_valid()
    return index


def draw_by_reliability(index, omega, tree, batch_size=50, tables=0):
    """Draw from the whole tree, or from ``tables`` parts of it; the last part is empty."""
    shape = max(tables, 1)
    low, total = torch.zeros(shape, dtype=torch.int64), tree.total().reshape(1)
    if tables:
        low = tree.prefix(torch.arange(shape) * (tree.capacity // shape))
        total = torch.cat([low[1:] - low[:-1], torch.zeros(1, dtype=torch.int64)])
    leaf, density = torch.empty(batch_size, dtype=torch.int64), torch.empty(batch_size, dtype=torch.float64)
    acceptance = torch.zeros(2, tables, dtype=torch.float64)
    slot_at = torch.arange(tree.capacity, dtype=torch.int32).flip(0) % index._log.layout.size if tables else low[:0]
    omega = torch.tensor([omega], dtype=torch.float64)
    table = torch.arange(batch_size) % shape
    episodes, seed = index.arrays(), torch.randint(2**63 - 1, (1,))
    ops.reaper_draw(seed, table, low, total, omega, slot_at, *tree.arrays(), leaf, density, acceptance, *episodes)
    return leaf, density, acceptance


@pytest.mark.parametrize(("assigned", "lanes"), [(False, 1), (False, 3), (True, 3)])
def test_all_implementations_have_the_same_reliability(run, assigned, lanes):
    index = some_episodes(assigned, lanes)
    slots = torch.randint(300, (200,))
    reliability = index.reliability(slots)
    assert 0 <= reliability.min() < 0.2 and reliability.max() == 1
    torch.testing.assert_close(run(index.reliability, slots), reliability, rtol=1e-15, atol=0)


@pytest.mark.parametrize("omega", [0.0, 0.5, 3.0])
@pytest.mark.parametrize(("assigned", "lanes"), [(False, 1), (False, 3), (True, 3)])
def test_all_implementations_find_the_same_smallest_density(run, omega, assigned, lanes):
    index = some_episodes(assigned, lanes)
    masses = torch.randint(0, 2**24, (300,)) * (torch.arange(300) % 5 > 0)
    psi = masses * index.reliability(torch.arange(300)) ** omega
    result, exponent = torch.empty(1, dtype=torch.float64), torch.tensor([omega], dtype=torch.float64)
    run(ops.reaper_smallest, masses, exponent, result, *index.arrays())
    torch.testing.assert_close(result[0], psi[psi > 0].min(), rtol=1e-12, atol=0)
    run(ops.reaper_smallest, torch.zeros_like(masses), exponent, result, *index.arrays())
    assert result.isinf()


def where_proposals_are_rejected(mass, factor):
    """Masses with which nearly all proposals are rejected, so that passes over all Ψ draw the rows."""
    mass = (mass / (factor + 1e-7)).long()
    assert (mass * factor).sum() / mass.sum() < 1e-4
    return mass


@pytest.mark.parametrize("omega", [0.0, 0.5, 20.0])
@pytest.mark.parametrize("tables", [0, 4])
def test_all_implementations_draw_the_same_by_reliability(run, omega, tables):
    index = some_episodes()
    tree, slots = a_tree(300), torch.arange(300)
    if omega > 1:
        factor = index.reliability(slots.flip(0) if tables else slots) ** omega
        tree.write(slots, where_proposals_are_rejected(tree.get(slots) >> 20, factor))
    tree.write(torch.arange(0, 300, 7), 0)
    draw = partial(draw_by_reliability, index, omega, tree, tables=tables)
    torch.manual_seed(1)
    leaf, density, acceptance = draw()
    torch.manual_seed(1)
    drawn = run(draw)
    if omega > 1 and not run.has_rounds_of_cpu:
        leaf, density, acceptance = drawn
    for ours, theirs in zip(drawn, (leaf, density, acceptance), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    is_drawn = torch.arange(50) % 4 != 3 if tables else torch.ones(50, dtype=torch.bool)
    assert (density[is_drawn] > 0).all() and not leaf[~is_drawn].any() and not density[~is_drawn].any()
    slots = (299 - leaf) if tables else leaf
    psi = index.reliability(slots) ** omega * tree.get(leaf)
    torch.testing.assert_close(density[is_drawn], psi[is_drawn], rtol=1e-12, atol=0)
    if tables:
        assert (leaf // 75 == torch.arange(50) % 4)[is_drawn].all()
        assert (acceptance[1] > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("omega", [0.5, 20.0])
@pytest.mark.parametrize("tables", [0, 4])
def test_draws_follow_psi(run, omega, tables):
    index = some_episodes()
    slots = (39 - torch.arange(40)) if tables else torch.arange(40)
    factor = index.reliability(slots) ** omega
    mass = torch.randint(2**20, 2**21, (40,))
    if omega > 1:
        mass = where_proposals_are_rejected(mass, factor)
    tree = SumTree(40)
    tree.write(torch.arange(40), mass)
    psi = factor * mass
    draw = partial(draw_by_reliability, index, omega, tree, batch_size=ROWS, tables=tables)
    leaf, density, acceptance = run(draw)
    torch.testing.assert_close(density[:: max(tables, 1)], psi[leaf][:: max(tables, 1)], rtol=1e-9, atol=0)
    for table in range(max(tables - 1, 1)):
        own = torch.arange(40) // 10 == table if tables else torch.ones(40, dtype=torch.bool)
        drawn = leaf[table :: max(tables, 1)]
        assert own[drawn].all()
        # leaves with a small probability are one class
        share = psi * own / (psi * own).sum()
        number = torch.where(share * len(drawn) < 5, 0, torch.arange(1, 41))
        classes = torch.zeros(41, dtype=torch.float64).index_add_(0, number, share)
        kept = classes * len(drawn) >= 5
        assert kept.sum() == 1 or p_value(number[drawn][kept[number[drawn]]], torch.where(kept, classes, 0.0)) > 1e-4
        if tables:
            expected = (psi * own).sum() / (mass * own).sum()
            assert abs(acceptance[0, table] / acceptance[1, table] - expected) < 3 / ROWS**0.5


@pytest.mark.parametrize("assigned", [False, True])
def test_draws_by_reliability_stay_in_range_whatever_the_state_holds(run, assigned):
    index = some_episodes(assigned, 2)
    tree = a_tree(300)
    arrays = [torch.as_tensor(each) for each in (*tree.arrays(), *index.arrays()) if not isinstance(each, int)]
    scramble(*(array for array in arrays if array.numel() and array.dtype != torch.bool))
    for tables in (0, 4):
        leaf, *_ = run(partial(draw_by_reliability, index, 5.0, tree, tables=tables))
        assert int(leaf.min()) >= 0 and int(leaf.max()) < 300
    run(index.reliability, torch.randint(-(2**50), 2**50, (100,)))


# --- ranks


def some_ranks(size):
    return RankBuckets(size, torch.device("cpu"))


def arrays(ranks):
    constant = "_new", "_removed"
    return {key: each for key, each in vars(ranks).items() if isinstance(each, torch.Tensor) and key not in constant}


def test_all_implementations_have_the_same_ranks(run):
    size, generator = 40, np.random.default_rng(0)
    ranks, other = some_ranks(size), some_ranks(size)
    # the naive model: the slots of each bucket; the first bucket is in reverse
    buckets = {}
    for _ in range(40 if INTERPRETED else 150):
        count = int(generator.integers(0, 12))
        # with duplicates, and slots out of range
        slots = torch.from_numpy(generator.integers(-1, size + 1, count))
        d = torch.from_numpy(generator.choice([0.0, 1e-40, 0.5, 1.0, 1.001, 2.0, 3e38], count)).float()
        change = int(generator.integers(3))
        for each, call in ((ranks, plainly), (other, run)):
            call(*[(each.insert, slots), (each.remove, slots), (each.update, slots, d)][change])
        if run.is_cuda:
            # sorted, where a slot that leaves lets those behind it move up
            run(ops.rank_rebuild, *other._views())
        # the last of duplicates counts
        last = {}
        for slot, number in [*zip(slots.tolist(), d.view(torch.int32).tolist(), strict=True)][::-1]:
            last.setdefault(slot, number)
        for slot in last:
            for members in buckets.values():
                if slot in members and run.is_cuda:
                    members.remove(slot)
                elif slot in members:
                    members[members.index(slot)] = members[-1]
                    members.pop()
        for slot, number in [*last.items()][::-1]:
            if 0 <= slot < size and change != 1:
                buckets.setdefault(2**31 if change == 0 else number >> 16, []).append(slot)
        order = [s for key in sorted(buckets)[::-1] for s in buckets[key][:: -1 if key == 2**31 else 1]]
        for name, array in arrays(ranks).items():
            assert run.is_cuda or torch.equal(array, arrays(other)[name]), name
        assert int(run(other.total)) == len(order)
        assert run(other.find, torch.arange(-1, len(order) + 1)).tolist() == [0, *order, 0]
        where = {slot: rank for rank, slot in enumerate(order)}
        assert run(other.rank_of, torch.arange(-1, size + 1)).tolist() == [
            where.get(s, -1) for s in range(-1, size + 1)
        ]
        u, alpha = torch.rand(20, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
        weights = torch.arange(1.0, size + 1, dtype=torch.float64) ** -alpha
        found, density, smallest = map(ops.as_tensor, run(other.draw, u, weights.cumsum(0), alpha))
        if not order:
            assert not found.any() and not density.any()
            continue
        sums = np.cumsum(weights[: len(order)].numpy())
        rank = np.searchsorted(sums, u.numpy() * sums[-1], side="right").clip(0, len(order) - 1)
        assert found.tolist() == [order[r] for r in rank]
        torch.testing.assert_close(density, weights[rank])
        torch.testing.assert_close(smallest, weights[len(order) - 1 : len(order)])


def test_ranks_stay_in_range_whatever_the_state_holds(run):
    ranks = some_ranks(50)
    ranks.insert(torch.arange(50))
    for seed in range(20):
        torch.manual_seed(seed)
        for array in arrays(ranks).values():
            limit = 2 ** int(torch.randint(1, 29, ()))
            array.copy_(torch.randint(-limit, limit, array.shape))
        ranks._counts[0] = 10**6
        found = run(ranks.find, torch.randint(-5, 10**6, (100,)))
        assert int(found.min()) >= 0 and int(found.max()) < 50
        run(ranks.rank_of, torch.randint(-5, 60, (100,)))
        u = torch.rand(20, dtype=torch.float64)
        found, *_ = run(ranks.draw, u, u.cumsum(0), u)
        assert int(found.min()) >= 0 and int(found.max()) < 50
        run(ranks.update, torch.randint(-5, 60, (100,)), torch.rand(100))
    ranks._place.random_()
    run(ranks.rebuild, torch.rand(50), torch.rand(50) < 0.5)
    run(ranks.clear)
    assert int(ranks.total()) == 0 and run(ranks.find, torch.tensor([-1, 0])).tolist() == [0, 0]


def test_the_table_of_ranks_is_filled_when_alpha_has_changed_enough(run):
    table, exponent = torch.zeros(20, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for alpha, step, applied in ((0.0, 0.01, False), (0.7, 0.01, True), (0.705, 0.01, False), (0.705, 0.0, True)):
        before = table.clone()
        run(ops.rank_tabulate, table, exponent, torch.tensor([alpha], dtype=torch.float64), step)
        expected = torch.arange(1.0, 21.0, dtype=torch.float64).pow(-alpha).cumsum(0)
        torch.testing.assert_close(table, expected if applied else before, rtol=1e-12, atol=0)


# --- accelerators


@not_interpreted
def test_an_accelerator_runs_each_kernel_with_one_launch():
    with EmulatedDevice("torchrl_replay_ext") as device:
        tree, index = SumTree(300, track_min=True, device="emulated"), torch.arange(20, device="emulated")
        device.reset()
        tree.write(index, index + 1)
        leaf, mass = tree.find(index)
        launches = {name: n for name, n in device.operations.items() if "torchrl_replay_ext" in name}
        assert launches == {"torchrl_replay_ext.tree_write": 1, "torchrl_replay_ext.tree_find": 1}
        assert not device.waits
        assert mass.tolist() == (leaf + 1).tolist()


# --- imports


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_import_of_the_package_imports_neither_numba_nor_triton_kernels():
    code = "import sys, torchrl_replay_ext; assert not {'numba', 'torchrl_replay_ext.kernels.cuda'} & {*sys.modules}"
    assert python(code).returncode == 0


def test_an_error_names_the_way_to_install_numba():
    code = "import sys; sys.modules['numba'] = None\nimport torchrl_replay_ext as t; t.SumTree(4).clear_()"
    assert "pip install 'numba" in python(code).stderr.splitlines()[-1]


WRITE = """
import numpy as np
from torchrl_replay_ext.kernels.rows import record
numbers, leaves = [np.zeros(16, np.int64) for _ in range(3)], np.zeros(16, np.int64)
state = numbers[0], numbers[1][:1], np.zeros((16, 4), np.int32), numbers[1][1:2], np.zeros(16, np.float32), np.ones(1)
record(*state, leaves, numbers[2], leaves[:0], leaves[:0], 16, np.ones(1), np.arange(1), True)
print(leaves[0])
"""


def test_machine_code_on_disk_is_that_of_all_sources(tmp_path):
    package = pathlib.Path(ops.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": "", "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    layout = tmp_path / package.name / "kernels" / "tree_layout.py"
    for unit in (23, 22):
        # the loop is in another file
        layout.write_text(layout.read_text().replace("UNIT = 2**23", f"UNIT = 2**{unit}"))
        command = [sys.executable, "-c", WRITE]
        found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert found.stdout == f"{2**unit}\n", found.stderr


# --- event tables


def some_tables(retention):
    """Tables of three events, two of them in one table, for 60 slots."""
    specs = [EventSpec("a", "a", 5), EventSpec("b", "b", 9, table="t"), EventSpec("c", "c", 1, table="t")]
    capacity = {"a": 7, "t": 15} | ({"default": 30} if retention == "pinned" else {})
    tables = EventTables(specs, capacity, retention=retention)
    tables.allocate(60, torch.device("cpu"))
    return tables


def no_episodes(num_lanes):
    return np.full((num_lanes, 3), -1)


def random_rows(count, num_lanes):
    """Rows of lanes, some with a trajectory id or a mark of the first row."""
    trajectory, begins = torch.randint(2, (count,)), torch.rand(count) < 0.05
    columns = torch.randint(num_lanes, (count,)), trajectory, torch.rand(count) < 0.1, begins
    return [column.numpy() for column in (*columns, torch.rand(count, 3) < 0.15)]


def write_rows(tables, episodes, rows, slots):
    ops.events_write(episodes, slots, *rows, np.array([1, 2, 2]), np.array([5, 9, 1]), *tables.arrays())


def earlier(tables, episode):
    slots = np.empty(9, np.int64)
    ops.events_earlier(slots, *episode[:2].tolist(), *tables.arrays())
    return slots.tolist()


@not_interpreted
@pytest.mark.parametrize("num_lanes", [2, 60])
@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_all_implementations_fill_the_same_tables(run, retention, num_lanes):
    both = [(some_tables(retention), no_episodes(num_lanes), call) for call in (plainly, run)]
    for step, count in enumerate([1, 8, 30, 3, 30, 30, 17, 30, 30]):
        rows, found = random_rows(count, num_lanes), []
        for tables, episodes, call in both:
            first = int(tables.counters[1])
            slots = (first + np.arange(count)) % 60
            call(write_rows, tables, episodes, rows, slots)
            if step == 5:
                # this write fails
                call(tables.undo, slots, 60)
            if step == 6:
                tables.capacities[2] = 6
                call(tables.remove, np.array([-1, 3, 60, *slots[:5]]))
            before = [call(earlier, tables, episode) for episode in episodes[:2]]
            found.append([slots, episodes, before, *tables.arrays()])
            call(tables.check_valid)
        for mine, other in zip(*found, strict=True):
            assert np.array_equal(mine, other)


@not_interpreted
def test_tables_whose_arrays_hold_anything_are_changed_within_their_bounds():
    """Whatever the arrays hold, for example after loading a damaged file, no memory outside of them is changed."""
    for retention in ("ring", "pinned"):
        tables = some_tables(retention)
        begins = tables.begins.clone()
        for seed in range(20):
            torch.manual_seed(seed)
            for array in tables.arrays()[:10]:
                if array.dtype != np.int64 or array is tables.arrays()[7]:
                    array[...] = torch.randint(-(2**31), 2**31 - 1, array.shape).numpy()
            write_rows(tables, no_episodes(4), random_rows(30, 4), np.arange(30))
            tables.remove(np.arange(60))
            assert torch.equal(tables.begins, begins)


@pytest.mark.parametrize("allocation", METHODS)
@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_all_implementations_draw_the_same_from_tables(run, retention, allocation):
    tables, episodes = some_tables(retention), no_episodes(3)
    tree, seen = SumTree(len(tables.slot_at)), int(tables.counters[2])
    other = copy.deepcopy(tree)
    for step in range(4):
        slots = (30 * step + np.arange(30)) % 60
        write_rows(tables, episodes, random_rows(30, 3), slots)
        d, alpha = 0.1 + torch.rand(60), torch.tensor([0.5, 0.0], dtype=torch.float64)
        arrays = tables.slot_at, tables.places, tables.counts, tables.journal, seen, int(tables.counters[2])
        for power in ((d, alpha), (d[:0], alpha)):
            arguments = *power, torch.tensor([*slots, -1, 60]), *arrays
            for each, call in ((tree, plainly), (other, run)):
                each.clear_()
                # all slots, since the tree was cleared
                call(ops.events_set_masses, *each.arrays()[:3], *power, torch.arange(60), *arrays)
                call(ops.events_set_masses, *each.arrays()[:3], *arguments)
            assert (tree.leaves - other.leaves).abs().max() <= 1
            other.check_valid()
            other.leaves.copy_(tree.leaves)
            other.rebuild_()
            check_draws(run, tables, tree, allocation, is_uniform=not len(power[0]))
        seen = int(tables.counters[2])


def check_draws(run, tables, tree, allocation, *, is_uniform):
    shares, sizes = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64), torch.tensor([1, 1, -1])
    results = []
    for call in (plainly, run):
        slots, table, low, total = *torch.empty(2, 40, dtype=torch.int64), *torch.empty(2, 3, dtype=torch.int64)
        density, probability = torch.empty(40, dtype=torch.float64), torch.empty(40)
        eta, mixed = torch.empty(3, dtype=torch.float64), torch.empty(40, dtype=torch.float64)
        settings = torch.tensor([5]), shares, sizes, METHODS.index(allocation)
        arrays = *tree.arrays()[:3], is_uniform, tables.counts, tables.begins, tables.slot_at, tables.places
        drawn = table, eta, low, total, slots, density, probability
        call(ops.events_draw, *settings, *arrays, True, *drawn)
        again = [table.clone(), slots.clone(), density.clone()]
        torch.testing.assert_close(density.float(), probability, rtol=1e-6, atol=0)
        call(ops.events_draw, *settings, *arrays, False, *drawn)
        assert torch.equal(again[0], table) and torch.equal(again[1], slots)
        results.append([slots, table, density, again[2], eta, total])
        call(ops.events_mixture, slots, eta / total.clamp_min(1), tree.leaves, tables.places, mixed)
        torch.testing.assert_close(mixed, again[2], rtol=1e-12, atol=0)
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        # on CUDA, the rows are in another random order
        if number > 3 or not run.is_cuda:
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
    if allocation != "multinomial":
        assert torch.equal(results[0][1].bincount(minlength=3), results[1][1].bincount(minlength=3))
    slots, table, density, probability, eta, total = results[1]
    # the last table is smaller than the batch
    torch.testing.assert_close(eta, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    counts = table.bincount(minlength=3)
    if allocation != "multinomial":
        assert torch.equal(counts, allocate(eta, 40, allocation))
    first = 3 - len(tables.places)
    expected = torch.zeros(40, dtype=torch.float64)
    for k in range(2):
        place = slots if k < first else tables.places[k - first][slots].to(torch.int64)
        held, rows = place >= 0, table == k
        expected += held * tree.get(place) * eta[k] / total[k]
        assert held[rows].all()
        torch.testing.assert_close((tree.get(place) * (tables.counts[k] / total[k].double()))[rows], density[rows])
    torch.testing.assert_close(probability, expected, rtol=1e-12, atol=0)


# --- frames


def tensors_of(pool):
    return [tensor for tensor in vars(pool).values() if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("shape", [(3, 2), (4, 2)])
@pytest.mark.parametrize("depth", [1, 3])
def test_all_implementations_store_the_same_frames(run, depth, shape, monkeypatch):
    """Against a dict of what was written. Every third write is one of a graph, which stores what it cannot refuse."""
    pool = FramePool(20, 20, num_stacked=depth, shape=shape, num_streams=4)
    other, streams = copy.deepcopy(pool), StackedStreams(5, depth=depth, lost=0.1, still=0.3, shape=shape)
    written, outcomes = {}, set()
    for number in range(10 if INTERPRETED else 40):
        monkeypatch.setattr("torchrl_replay_ext.core.frame_pool.is_traced", lambda number=number: number % 3 == 2)
        data, lost = streams.chunk("any", 1 + number % 9), int(pool.counts[0])
        before, after = data["observation"], data["next", "observation"]
        if number % 10 > 7:
            after[-1] = 255 - after[-1]
        slots, apart = torch.randperm(20)[: len(data)], len(data) - 1 if depth > 1 and number % 10 > 7 else -1
        for each, call in ((pool, plainly), (other, run)):
            outcome = None
            try:
                call(each.write, slots, before, after, data["collector", "traj_ids"])
            except (RuntimeError, ValueError) as error:
                outcome = str(error)
                assert f"row {apart} of" in outcome if apart >= 0 else "need all" in outcome
            outcomes.add(outcome)
        for ours, theirs in zip(tensors_of(pool), tensors_of(other), strict=True):
            assert torch.equal(ours, theirs)
        other.check_valid()
        for row, slot in enumerate(slots.tolist() if outcome is None else ()):
            written[slot] = torch.cat([before[row], after[row, -1:]]) if int(pool.counts[0]) == lost else None
        for slot, frames in written.items():
            assert frames is None or torch.equal(run(other.read, torch.tensor(slot)), frames)
    assert None in outcomes and len(outcomes) > 1
    assert pool.counts[0] > 0 and (pool.counts[1] > 0) == (depth > 1)


def test_frames_stay_in_range_whatever_the_state_holds(run, monkeypatch):
    streams = StackedStreams(5, depth=3)
    for seed in range(2 if INTERPRETED else 20):
        torch.manual_seed(seed)
        pool = FramePool(20, 40, num_stacked=3, shape=(3, 2), num_streams=4)
        for tensor in tensors_of(pool)[1:]:
            tensor.copy_(torch.randint(-(2**30), 2**30, tensor.shape))
        monkeypatch.setattr("torchrl_replay_ext.core.frame_pool.is_traced", lambda seed=seed: seed % 2 == 1)
        data, slots = streams.chunk("any", 15), torch.randint(-5, 25, (15,))
        rows = slots, data["observation"], data["next", "observation"], data["collector", "traj_ids"]
        try:
            run(pool.write, *rows)
        except RuntimeError as error:
            assert "need all" in str(error)
            continue
        ids = pool._ids[slots.clamp(0, 19)]
        assert int(ids.min()) >= 0 and int(ids.max()) <= 40


@not_interpreted
def test_all_implementations_judge_events_alike(run):
    values, codes = torch.randint(0, 40, (300,)).double(), torch.randint(0, 60, (300,))
    found = []
    for call in (plainly, run):
        quantile, novel = Quantile("x", 0.8, window=50), Novel("x", 2, width=16)
        numbers, sketch = quantile.memory(), novel.memory()
        above = [call(quantile.detect, part.view(torch.int64).numpy(), numbers) for part in values.chunk(7)]
        rare = [call(novel.detect, part.numpy(), sketch) for part in codes.chunk(7)]
        found.append([*above, *rare, *numbers.values(), *sketch.values()])
    for mine, other in zip(*found, strict=True):
        assert np.array_equal(mine, other)


@not_interpreted
def test_memories_that_hold_anything_are_changed_within_their_bounds(run):
    quantile = Quantile("x", 0.8, window=50)
    for count in (-(2**40), -1, 0, 30, 50, 2**40):
        memory = quantile.memory()
        # views, whose surroundings must not change
        around = {name: torch.full((len(tensor) + 20,), -7, dtype=tensor.dtype) for name, tensor in memory.items()}
        inside = {name: tensor[10:-10] for name, tensor in around.items()}
        inside["recent"].copy_(torch.randn(50))
        inside["ordered"].copy_(torch.randn(50))
        inside["count"].fill_(count)
        run(quantile.detect, torch.randn(200, dtype=torch.float64).view(torch.int64).numpy(), inside)
        for tensor in around.values():
            assert (tensor[:10] == -7).all() and (tensor[-10:] == -7).all()
