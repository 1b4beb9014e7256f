"""Kernels of event tables."""

import copy

import numpy as np
import pytest
import torch

from tests.kernels.implementations import assert_equal, not_interpreted, plainly
from torchrl_replay_ext import EventSpec, EventTables, SumTree
from torchrl_replay_ext.functional import METHODS, allocate
from torchrl_replay_ext.kernels import ops


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
    cut = np.zeros(1, np.int64)
    ops.events_write(episodes, cut, slots, *rows, np.array([1, 2, 2]), np.array([5, 9, 1]), *tables.arrays())


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
                call(tables.remove, np.array([-1, 3, 60, *slots[:5]]))
            before = [call(earlier, tables, episode) for episode in episodes[:2]]
            found.append([slots, episodes, before, *tables.arrays()])
        assert_equal(*found)


@not_interpreted
def test_tables_whose_arrays_hold_anything_are_changed_within_their_bounds():
    """Whatever the arrays hold, for example after loading a damaged file, no memory outside of them is changed."""
    for retention in ("ring", "pinned"):
        tables = some_tables(retention)
        begins = tables.begins.clone()
        for seed in range(20):
            torch.manual_seed(seed)
            for array in tables.arrays()[:9]:
                if array.dtype != np.int64 or array is tables.arrays()[6]:
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
        arrays = tables.slot_at, tables.position_of, tables.counts, tables.journal, seen, int(tables.counters[2])
        for power in ((d, alpha), (d[:0], alpha)):
            arguments = *power, torch.tensor([*slots, -1, 60]), *arrays
            for each, call in ((tree, plainly), (other, run)):
                each.clear_()
                # all slots, since the tree was cleared
                call(ops.events_set_masses, *each.arrays()[:3], *power, torch.arange(60), *arrays)
                call(ops.events_set_masses, *each.arrays()[:3], *arguments)
            assert (tree.leaves - other.leaves).abs().max() <= 1
            other.leaves.copy_(tree.leaves)
            other.rebuild_()
            check_draws(run, tables, tree, allocation, is_uniform=not len(power[0]))
        seen = int(tables.counters[2])


def check_draws(run, tables, tree, allocation, *, is_uniform):
    shares, sizes = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64), torch.tensor([1, 1, -1])
    results, total = [], tree.prefix(tables.begins).diff()
    for call in (plainly, run):
        slots, table = torch.empty(2, 40, dtype=torch.int64)
        density, probability = torch.empty(40, dtype=torch.float64), torch.empty(40)
        eta, mixed = torch.empty(3, dtype=torch.float64), torch.empty(40, dtype=torch.float64)
        settings = torch.tensor([5]), shares, sizes, METHODS.index(allocation)
        arrays = *tree.arrays()[:3], is_uniform, tables.counts, tables.begins, tables.slot_at, tables.position_of
        drawn = table, eta, slots, density, probability
        call(ops.events_draw, *settings, *arrays, True, *drawn)
        again = [table.clone(), slots.clone(), density.clone()]
        torch.testing.assert_close(density.float(), probability, rtol=1e-6, atol=0)
        call(ops.events_draw, *settings, *arrays, False, *drawn)
        assert torch.equal(again[0], table) and torch.equal(again[1], slots)
        results.append([slots, table, density, again[2], eta])
        call(ops.events_mixture, slots, eta / total.clamp_min(1), tree.leaves, tables.position_of, mixed)
        torch.testing.assert_close(mixed, again[2], rtol=1e-12, atol=0)
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        # on CUDA, the rows are in another random order
        if number > 3 or not run.is_cuda:
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=0)
    if allocation != "multinomial":
        assert torch.equal(results[0][1].bincount(minlength=3), results[1][1].bincount(minlength=3))
    slots, table, density, probability, eta = results[1]
    # the last table is smaller than the batch
    torch.testing.assert_close(eta, torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64))
    counts = table.bincount(minlength=3)
    if allocation != "multinomial":
        assert torch.equal(counts, allocate(eta, 40, allocation))
    first = 3 - len(tables.position_of)
    expected = torch.zeros(40, dtype=torch.float64)
    for k in range(2):
        place = slots if k < first else tables.position_of[k - first][slots].to(torch.int64)
        held, rows = place >= 0, table == k
        expected += held * tree.get(place) * eta[k] / total[k]
        assert held[rows].all()
        torch.testing.assert_close((tree.get(place) * (tables.counts[k] / total[k].double()))[rows], density[rows])
    torch.testing.assert_close(probability, expected, rtol=1e-12, atol=0)
