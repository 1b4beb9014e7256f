"""Late priority updates: whose slot was overwritten after the draw.

With write stamps, late rows are dropped. Without, as many updates of a slot are dropped as draws of it waited for one
when it was overwritten; a draw waits while at most 64 others follow. ``tests.reference.Draws`` has these numbers.
"""

import pytest
import torch

from tests.data import buffer_with, learn, rows
from tests.operations import Driven
from torchrl_replay_ext import ProportionalSampler

both_buffers = pytest.mark.parametrize("compilable", [False, True], ids=["stock", "compilable"])


@both_buffers
@pytest.mark.parametrize("first", ["oldest", "newest", "any"])
@pytest.mark.parametrize("name", ["proportional", "slices, proportional", "rank", "reaper"])
def test_many_outstanding_batches(name, first, compilable):
    """The reference of random operations compares the number of dropped rows, and all priorities."""
    used = Driven(name, 2, compilable=compilable, capacity=24)
    for size in (1, 4):
        for number in range(40):
            if number % 10 == 0:
                used.extend(4)
            used.sample(size)
        if first != "oldest":
            used.late.reverse() if first == "newest" else used.rng.shuffle(used.late)
        while used.late:
            used.hand_back(used.late.pop(0))
            used.check()


def test_updates_of_a_slot_in_order_never_reach_new_content():
    """Each row comes back once, in order, up to 60 draws later: nothing reaches a wrong row."""
    used = Driven("proportional", compilable=False, capacity=40)
    for number in range(120):
        if number % 5 == 0:
            used.extend()
        used.sample()
        if len(used.late) > 60:
            batch = used.late.pop(0)
            for row in range(len(batch)):
                before = used.dropped_updates()
                used.hand_back(batch[[row]])
                is_late = used.reference.stamps([batch.slots[row]]) != [batch.stamps[row]]
                assert used.dropped_updates() - before == is_late
    assert used.dropped_updates() > 0


@both_buffers
@pytest.mark.parametrize("name", ["proportional", "rank", "tables, proportional"])
def test_updates_by_index_need_no_draw(name, compilable):
    """Update slots that were never drawn, after the ring has wrapped around."""
    used = Driven(name, 1, compilable=compilable, capacity=12)
    for count in (1, 4, 16):
        used.extend(7)
        used.update_by_index(count)
        used.check()
    assert used.dropped_updates() == 0


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

    for _ in range(30):
        learn(buffer, error=1.0)
    index = buffer.extend(rows(16, first=200))
    learn(buffer, error=1.0)
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
        learn(buffer)
    assert buffer.sampler.stats()["dropped_updates"] <= 0.03 * 32 * 500
