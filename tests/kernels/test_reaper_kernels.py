"""Kernels of ReaPER."""

from functools import partial

import pytest
import torch

from tests.chi_square import p_value
from tests.kernels.implementations import INTERPRETED, ROWS, a_reader, a_tree, scramble, some_slots
from torchrl_replay_ext import SumTree
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.streams import EpisodeMarks
from torchrl_replay_ext.kernels import ops


def some_episodes(assigned=False, lanes=1, begins_at_zero=False):
    """An index whose ring has wrapped, with finished, ongoing and new episodes; R of their first steps may be 0."""
    size, cursor = 300, 0
    written = some_slots(size, lanes, assigned)
    index = EpisodeIndex(written, a_reader(lanes))
    for number in range(1, 20):
        count = 12 * lanes
        slots = (cursor + torch.arange(count)) % size
        cursor, stream, step = cursor + count, torch.arange(count) % lanes, torch.arange(count) // lanes
        ended = (12 * number + step) % (9 + stream) == 0
        trajectory = (12 * number + step - 1) // (9 + stream) * lanes + stream if assigned else None
        marks = EpisodeMarks(ended=ended, trajectory=trajectory, initial=None)
        index.append(slots, torch.ones(1, dtype=torch.float64), marks, finished=ended)
        written.generation[slots] = number
        written.num_writes.fill_(number)
        written.last_seen_step.copy_(slots[-1] // written.layout.slots_per_step)
        written.priority[slots] = -1.0
        begins = ((12 * number + step - 1) % (9 + stream) == 0) & begins_at_zero
        for rows, errors in ((slots[::3], 2 * torch.rand(slots[::3].shape)), (slots[begins], torch.zeros(1))):
            index.update(rows, errors, stays_new=number % 4 == 0)
            written.priority[rows] = errors
    return index


def draw_by_reliability(index, omega, tree, batch_size=50):
    leaf, density = torch.empty(batch_size, dtype=torch.int64), torch.empty(batch_size, dtype=torch.float64)
    omega, seed = torch.tensor([omega], dtype=torch.float64), torch.randint(2**63 - 1, (1,))
    ops.reaper_draw(seed, omega, *tree.arrays(), leaf, density, *index.arrays())
    return leaf, density


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
    index = some_episodes(assigned, lanes, begins_at_zero=True)
    factor = index.reliability(torch.arange(300)) ** omega
    assert (factor == 0).any() or not omega
    result, exponent = torch.empty(1, dtype=torch.float64), torch.tensor([omega], dtype=torch.float64)
    some = torch.randint(0, 2**24, (300,)) * (torch.arange(300) % 5 > 0)
    d = index._slots.priority
    share = (d.abs() * SumTree.UNIT / index.largest_total()).clamp(1e-3, 1)
    larger = torch.where(factor < 1, (2**20 / share**omega).long(), 2**20 + 9)
    # some; alike, so that reliabilities decide; the larger, the less R may be; and the smallest ones where Ψ is 0
    for masses in (some, 2**23 + some // 2**10, larger, torch.where(factor == 0, 1, some)):
        psi = masses * factor
        run(ops.reaper_smallest, masses, d, exponent, result, *index.arrays())
        torch.testing.assert_close(result[0], psi[psi > 0].min(), rtol=1e-12, atol=0)
    run(ops.reaper_smallest, torch.zeros_like(some), d, exponent, result, *index.arrays())
    assert result.isinf()


def where_proposals_are_rejected(mass, factor):
    """Masses with which nearly all proposals are rejected, so that passes over all Ψ draw the rows."""
    mass = (mass / (factor + 1e-7)).long()
    assert (mass * factor).sum() / mass.sum() < 1e-4
    return mass


@pytest.mark.parametrize("omega", [0.0, 1.0, 20.0])
def test_all_implementations_draw_the_same_by_reliability(run, omega):
    index = some_episodes()
    tree, slots = a_tree(300), torch.arange(300)
    if omega > 1:
        tree.write(slots, where_proposals_are_rejected(tree.get(slots) >> 20, index.reliability(slots) ** omega))
    tree.write(torch.arange(0, 300, 7), 0)
    if omega == 1:
        # some rows reject more proposals than a thread block tests together
        tree.write(slots[index.reliability(slots) > 0.3], 0)
    draw = partial(draw_by_reliability, index, omega, tree)
    torch.manual_seed(1)
    expected = draw()
    torch.manual_seed(1)
    leaf, density = run(draw)
    # on CUDA, rows that reject all proposals get the last one
    if omega <= 1 or not run.is_cuda:
        torch.testing.assert_close((leaf, density), expected, rtol=1e-12, atol=0)
    assert (density > 0).all()
    torch.testing.assert_close(density, index.reliability(leaf) ** omega * tree.get(leaf), rtol=1e-12, atol=0)
    tree.write(slots, 0)
    leaf, density = run(draw)
    assert not leaf.any() and not density.any()


@pytest.mark.parametrize("omega", [0.5, 20.0])
def test_draws_follow_psi(run, omega):
    index = some_episodes()
    factor = index.reliability(torch.arange(40)) ** omega
    mass = torch.randint(2**20, 2**21, (40,))
    if omega > 1:
        mass = where_proposals_are_rejected(mass, factor)
    tree = SumTree(40)
    tree.write(torch.arange(40), mass)
    psi = factor * mass
    leaf, density = run(partial(draw_by_reliability, index, omega, tree, batch_size=ROWS))
    torch.testing.assert_close(density, psi[leaf], rtol=1e-9, atol=0)
    if omega > 1 and INTERPRETED:
        # rows that reject all proposals, of which there are 1000 times as many on a device, get the last one
        psi = mass.double()
    # leaves with a small probability are one class
    share = psi / psi.sum()
    number = torch.where(share * len(leaf) < 5, 0, torch.arange(1, 41))
    classes = torch.zeros(41, dtype=torch.float64).index_add_(0, number, share)
    kept = classes * len(leaf) >= 5
    assert kept.sum() == 1 or p_value(number[leaf][kept[number[leaf]]], torch.where(kept, classes, 0.0)) > 1e-4


@pytest.mark.parametrize("assigned", [False, True])
def test_draws_by_reliability_stay_in_range_whatever_the_state_holds(run, assigned):
    index = some_episodes(assigned, 2)
    tree = a_tree(300)
    arrays = [torch.as_tensor(each) for each in (*tree.arrays(), *index.arrays()) if not isinstance(each, int)]
    scramble(*(array for array in arrays if array.numel() and array.dtype != torch.bool))
    leaf, _ = run(partial(draw_by_reliability, index, 5.0, tree))
    assert int(leaf.min()) >= 0 and int(leaf.max()) < 300
    run(index.reliability, torch.randint(-(2**50), 2**50, (100,)))
