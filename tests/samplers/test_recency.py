"""RecencySampler: P decreases geometrically with age."""

import math
from functools import partial

import pytest
import torch
from torchrl.data import LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from tests import data
from tests.chi_square import p_value
from tests.data import rows
from tests.reference import NaiveRecency
from tests.samplers.experience import assert_priorities
from torchrl_replay_ext import RecencySampler

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


def test_a_full_ring_that_was_loaded_has_the_right_order_after_the_next_write(tmp_path):
    source = buffer_of()
    source.extend(rows(13))
    source.dumps(tmp_path)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=4)
    state = source.state_dict()
    buffer.load_state_dict({**state, "_sampler": buffer.sampler.state_dict()})
    buffer.set_sampler(RecencySampler(half_life=3.0))
    buffer.sample()
    buffer.extend(rows(1))
    assert_ages(buffer, [3, 2, 1, 0, *range(9, 3, -1)])
    restored = buffer_of()
    restored.loads(tmp_path)
    assert_ages(restored, [2, 1, 0, *range(9, 2, -1)])


def test_a_list_storage_wraps():
    buffer = ReplayBuffer(storage=ListStorage(4), sampler=RecencySampler(half_life=3.0), batch_size=4, collate_fn=list)
    for letters, newest_first in (("ab", [1, 0]), ("cde", [0, 3, 2, 1]), ("f", [1, 0, 3, 2]), ("ghijk", [2, 1, 0, 3])):
        buffer.extend(list(letters))
        assert_ages(buffer, newest_first)


# --- draws


def test_draws_follow_the_probabilities():
    buffer = buffer_of(10, ndim=2, half_life=4.0, batch_size=DRAWS)
    buffer.set_rng(torch.Generator().manual_seed(0))
    buffer.extend(rows(7, 2))
    drawn = buffer.sample()["index"] @ torch.tensor([2, 1])
    probabilities = buffer.sampler.probabilities(buffer.storage)
    assert p_value(drawn, probabilities) > LEVEL
    # a negative control: the test detects a shift by one slot and a slightly longer half-life
    assert p_value(drawn, probabilities.roll(1)) < LEVEL
    assert p_value(drawn, probabilities**0.8) < LEVEL


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
