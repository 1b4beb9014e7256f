"""RecencySampler: P decreases geometrically with age."""

import math
from functools import partial

import pytest
import torch
from torchrl.data import ListStorage, ReplayBuffer

from tests import data
from tests.chi_square import p_value
from tests.data import rows
from tests.reference import NaiveRecency
from tests.samplers.experience import assert_priorities
from torchrl_replay_ext import Anneal, RecencySampler

DRAWS, LEVEL = 20_000, 1e-4

buffer_of = partial(data.buffer_of, RecencySampler, half_life=3.0, batch_size=8)


def assert_ages(buffer, newest_first, half_life=3.0):
    """The slots were written in this order; others are not drawn."""
    reference = NaiveRecency(half_life=half_life, beta=0.0)
    for slot in reversed(newest_first):
        reference.write(slot)
    assert_priorities(buffer, [reference.criterion().get(slot, 0.0) for slot in range(len(buffer))])


@pytest.mark.parametrize("half_life", [2.0, math.inf])
def test_a_slot_whose_write_was_not_announced_is_not_drawn_and_has_no_age(half_life):
    buffer = buffer_of(half_life=half_life, batch_size=2000)
    buffer.extend(rows(10))
    # a write that was interrupted before the sampler was notified
    buffer.storage.set(torch.arange(3), rows(3, first=90))
    buffer.writer._cursor = 3
    buffer.extend(rows(2, first=100))
    assert_ages(buffer, [4, 3, 9, 8, 7, 6, 5], half_life)
    numbers = buffer.sample()["number"]
    assert set(numbers.tolist()) == {100, 101, 5, 6, 7, 8, 9}


def test_an_announced_rewrite_keeps_the_age():
    buffer = buffer_of()
    buffer.extend(rows(13))
    for again in (torch.arange(5, 8), 4):
        buffer.mark_update(again)
        assert_ages(buffer, [2, 1, 0, *range(9, 2, -1)])


def test_a_list_storage_wraps():
    buffer = ReplayBuffer(storage=ListStorage(4), sampler=RecencySampler(half_life=3.0), batch_size=4, collate_fn=list)
    for letters, newest_first in (("ab", [1, 0]), ("cde", [0, 3, 2, 1]), ("f", [1, 0, 3, 2]), ("ghijk", [2, 1, 0, 3])):
        buffer.extend(list(letters))
        assert_ages(buffer, newest_first)


# --- draws


def test_a_schedule_cannot_be_assigned():
    sampler = RecencySampler(beta=0.5)
    with pytest.raises(TypeError, match="beta must be a number, not Anneal"):
        sampler.beta = Anneal(0.0, 1.0, 10)
    assert sampler.beta == 0.5


@pytest.mark.parametrize("half_life", [1e-320, 0.001, 1e12, 1e300])
def test_extreme_half_lives(half_life):
    buffer = buffer_of(1000, half_life=half_life, beta=1.0, batch_size=DRAWS)
    buffer.extend(rows(1000))
    batch = buffer.sample()
    if half_life < 1:
        assert batch["number"].unique().tolist() == [999]
    else:
        assert p_value(batch["number"] // 100, torch.ones(10)) > LEVEL
    weight = batch["priority_weight"]
    assert bool((weight.isfinite() & (weight >= 0) & (weight <= 1)).all())
