"""SumTree: random operations against a plain list of ints, limits of its fixed-point numbers, errors and draws."""

import copy
import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torchrl_replay_ext.compilation import stratified_uniform, uniform
from torchrl_replay_ext.core.sum_tree import SumTree

UNIT, PAGE = SumTree.UNIT, SumTree.PAGE

# 0, less than one unit, and up to large priorities; in float32, so that tree and model get exactly the same numbers
PRIORITIES = st.one_of(
    st.just(0.0),
    st.floats(0.0, 4.0, width=32),
    st.floats(0.0, 2.0**-22, width=32),
    st.floats(0.0, 1e6, width=32),
)


def mass_of(priority: float) -> int:
    """Round up to a multiple of 2^-23 in exact arithmetic."""
    return math.ceil(Fraction(priority) * UNIT)


def scan(masses: list[int], target: int) -> int:
    """Find the leaf that contains ``target`` with a loop over all leaves."""
    for leaf, upto in enumerate(accumulate(masses)):
        if target < upto:
            return leaf
    raise AssertionError("target is not below the total")


def assert_same_tree(tree: SumTree, masses: list[int], track_min: bool) -> None:
    """Check that leaves, total, minimum and all prefix sums of ``tree`` agree with the list ``masses``."""
    assert tree.get(torch.arange(len(masses))).tolist() == masses
    assert int(tree.total()) == sum(masses)
    assert tree.prefix(torch.arange(len(masses) + 1)).tolist() == list(accumulate(masses, initial=0))
    if track_min and sum(masses):
        assert int(tree.min()) == min(mass for mass in masses if mass)


class TreeAgainstList(RuleBasedStateMachine):
    """The same random operations on a SumTree and on a plain list of ints."""

    paged = False

    @initialize(
        # up to three levels above the leaves
        capacity=st.one_of(st.integers(1, 90), st.sampled_from([255, 256, 257, 300])),
        track_min=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def create(self, capacity, track_min, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.track_min = track_min and not self.paged
        # up to 20 blocks
        capacity = 17 * capacity if self.paged else capacity
        self.masses = [0] * capacity
        # pages for half of the blocks, so that pages are freed and used again
        self.free = list(range((capacity // PAGE + 2) // 2))
        self.pages: dict[int, int] = {}  # block -> page
        self.tree = SumTree(capacity, track_min=self.track_min, num_pages=len(self.free) if self.paged else None)

    def choose_leaves(self, data, most=12) -> list[int]:
        leaves = [i for i in range(len(self.masses)) if not self.paged or i // PAGE in self.pages]
        return data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=most)) if leaves else []

    @rule(data=st.data())
    def write_priorities(self, data):
        index = self.choose_leaves(data)
        priority = [data.draw(PRIORITIES) for _ in index]
        self.tree.write(torch.tensor(index, dtype=torch.int64), SumTree.to_mass(torch.tensor(priority).double()))
        for i, p in zip(index, priority, strict=True):
            self.masses[i] = mass_of(p)

    @rule(data=st.data())
    def write(self, data):
        index = self.choose_leaves(data)
        mass = torch.tensor([data.draw(st.integers(0, 2**40)) for _ in index], dtype=torch.int64)
        if index and data.draw(st.booleans()):
            # one mass for all leaves, with stride 0
            mass = mass[0].expand(len(index))
        self.tree.write(torch.tensor(index, dtype=torch.int64), mass)
        for i, m in zip(index, mass.tolist(), strict=True):
            self.masses[i] = m

    @rule(data=st.data())
    def change_leaves_and_rebuild(self, data):
        if not self.paged:
            for i in self.choose_leaves(data, most=3):
                self.masses[i] = int(self.tree.leaves[i].add_(7))
        self.tree.rebuild_()

    @rule()
    def clear(self):
        self.tree.clear_()
        self.masses = [0] * len(self.masses)

    @rule()
    def continue_with_a_copy(self):
        self.tree = copy.deepcopy(self.tree)

    @precondition(lambda self: sum(self.masses) > 0)
    @rule(data=st.data())
    def find(self, data):
        total = sum(self.masses)
        borders = [b + d for b in accumulate(self.masses) for d in (-1, 0) if 0 <= b + d < total]
        target = [0, total - 1, *data.draw(st.lists(st.sampled_from(borders), max_size=6))]
        target += data.draw(st.lists(st.integers(0, total - 1), max_size=6))
        leaf, mass = self.tree.find(torch.tensor(target))
        assert leaf.tolist() == [scan(self.masses, t) for t in target]
        assert mass.tolist() == [self.masses[i] for i in leaf.tolist()]

    @rule(num=st.integers(1, 20), numbers=st.sampled_from([uniform, stratified_uniform]))
    def draw(self, num, numbers):
        u = numbers(num, device=torch.device("cpu"), generator=self.generator)
        if not sum(self.masses):
            with pytest.raises(RuntimeError, match="all priorities are 0"):
                self.tree.draw(u)
            return
        leaf, mass = self.tree.draw(u)
        assert leaf.shape == mass.shape == (num,)
        assert leaf.dtype == mass.dtype == torch.int64
        assert mass.tolist() == [self.masses[i] for i in leaf.tolist()]
        assert int(mass.min()) > 0

    @invariant()
    def agrees(self):
        if hasattr(self, "tree"):
            assert_same_tree(self.tree, self.masses, self.track_min)


class PagedTreeAgainstList(TreeAgainstList):
    """The same with a page table, which this state machine owns; only some blocks are stored."""

    paged = True

    @precondition(lambda self: self.free and len(self.pages) < len(self.tree.pages))
    @rule(data=st.data())
    def store_block(self, data):
        block = data.draw(st.sampled_from([b for b in range(len(self.tree.pages)) if b not in self.pages]))
        self.pages[block] = self.free.pop(0)
        self.tree.pages[block] = self.pages[block]

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def drop_block(self, data):
        block = data.draw(st.sampled_from(sorted(self.pages)))
        index = range(block * PAGE, min((block + 1) * PAGE, len(self.masses)))
        self.tree.write(torch.tensor(index, dtype=torch.int64), torch.zeros(len(index), dtype=torch.int64))
        for i in index:
            self.masses[i] = 0
        self.free.append(self.pages.pop(block))
        self.tree.pages[block] = len(self.tree.leaves) // PAGE - 1


TestTree = TreeAgainstList.TestCase
TestPagedTree = PagedTreeAgainstList.TestCase
TestTree.settings = TestPagedTree.settings = settings(
    max_examples=50, stateful_step_count=20, deadline=None, derandomize=True
)


# --- fixed point


@pytest.mark.parametrize("priority", [2.0**-23, 2.0**-24, 1e-15, 1e-38, 5e-324])
def test_any_positive_priority_is_at_least_one_unit(priority):
    tree = SumTree(3, track_min=True)
    tree.write(torch.tensor([1]), SumTree.to_mass(torch.tensor([priority], dtype=torch.float64)))
    assert_same_tree(tree, [0, 1, 0], track_min=True)
    assert tree.draw(torch.rand(4, dtype=torch.float64))[0].tolist() == [1] * 4


@pytest.mark.parametrize("capacity", [1, 3, 8, 1000])
def test_up_to_max_priority(capacity):
    tree = SumTree(capacity, track_min=True)
    largest = torch.full((capacity,), tree.max_supported_priority, dtype=torch.float64)
    tree.write(torch.arange(capacity), SumTree.to_mass(largest))
    masses = [mass_of(tree.max_supported_priority)] * capacity
    assert sum(masses) <= 2**62
    assert_same_tree(tree, masses, track_min=True)
    _, mass = tree.draw(torch.rand(100, dtype=torch.float64))
    assert mass.tolist() == masses[:1] * 100
    leaf, _ = tree.draw(stratified_uniform(capacity, device=torch.device("cpu")))
    assert leaf.sort().values.tolist() == list(range(capacity))


# --- errors


@pytest.mark.parametrize("capacity", [0, -3])
def test_constructor_refuses(capacity):
    with pytest.raises(ValueError, match="capacity"):
        SumTree(capacity)


# --- draws


def test_largest_random_number(monkeypatch):
    """The largest number that torch.rand can return selects the last leaf with a positive mass."""
    tree, cpu = SumTree(10), torch.device("cpu")
    tree.write(torch.arange(8), SumTree.to_mass(torch.ones(8)))
    largest = 1 - 2.0**-53
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, largest, dtype=torch.float64))
    assert tree.draw(uniform(4, device=cpu))[0].tolist() == [7] * 4
    assert tree.draw(stratified_uniform(32, device=cpu))[0].max() == 7
