"""Kernels of ReaPER."""

from functools import partial

import pytest
import torch

from tests.chi_square import p_value
from tests.kernels.implementations import ROWS, a_log, a_reader, a_tree, scramble
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.kernels import ops


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
