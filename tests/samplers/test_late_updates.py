"""Which rows of priority updates are applied: late rows, the caller's own, duplicates and padding."""

import pytest
import torch
from torchrl.data.replay_buffers import TensorDictMaxValueWriter

from tests.data import SAMPLERS, buffer_with, learn, random_rows, rows
from tests.params import both_buffers
from torchrl_replay_ext import (
    ProportionalSampler,
    TrajectoryRetraceSampler,
)

PRIORITIZED = ["proportional", "rank", "reaper", "tables, proportional", "slices, proportional", "decoupled"]


def proportional(capacity, *, compilable=False, **arguments):
    """A buffer that draws in proportion to the TD errors."""
    sampler = ProportionalSampler(capacity, alpha=1.0, eps=0.0, td_error="absolute")
    return buffer_with(sampler, capacity, compilable=compilable, **arguments)


def dropped(rb):
    return int(rb.sampler.stats()["dropped_updates"])


# --- late rows


@both_buffers
@pytest.mark.parametrize("in_flight", [0, 1, 11, 60])
def test_with_updates_in_order_no_error_of_an_old_row_stays_on_a_new_one(in_flight, compilable):
    """After all updates, each row has the TD error of its last update, or that of a new row."""
    torch.manual_seed(0)
    rb = proportional(40, compilable=compilable, batch_size=8)
    rb.extend(rows(40))
    expected, contents, batches, late = dict.fromkeys(range(40), 1.0), list(range(40)), [], 0

    def hand_back(batch):
        batch["td_error"] = torch.rand(8).clamp_min(1e-3)
        rb.update_tensordict_priority(batch)
        largest = {}
        for number, error in zip(batch["number"].tolist(), batch["td_error"].tolist(), strict=True):
            largest[number] = max(error, largest.get(number, 0.0))
        expected.update(largest)
        return sum(number not in contents for number in batch["number"].tolist())

    for step in range(150):
        batches.append(rb.sample())
        new = range(40 + 2 * step, 42 + 2 * step)
        for slot, number in zip(rb.extend(rows(2, first=new[0])).tolist(), new, strict=True):
            contents[slot], expected[number] = number, 1.0
        if len(batches) > in_flight:
            late += hand_back(batches.pop(0))
    for batch in batches:
        late += hand_back(batch)
    found = rb.sampler.probabilities(rb.storage)
    wanted = torch.tensor([expected[number] for number in contents], dtype=torch.float64)
    torch.testing.assert_close(found, wanted / wanted.sum(), rtol=1e-5, atol=0)
    assert late > 0 and dropped(rb) <= late
    if compilable or in_flight == 0:
        assert dropped(rb) == late


@both_buffers
def test_draws_that_get_no_update_cost_nothing(compilable):
    """A delayed actor, or statistics: two further draws for each update, and a row that is written in time."""
    torch.manual_seed(0)
    rb = proportional(64, compilable=compilable, batch_size=16)
    rb.extend(rows(64))
    for number in range(300):
        rb.extend(rows(4, first=64 + 4 * number))
        rb.sample()
        rb.sample()
        learn(rb)
    assert dropped(rb) == 0


@both_buffers
def test_a_refresh_of_all_priorities_reaches_all_rows_but_those_that_were_just_overwritten(compilable):
    rb = proportional(200, compilable=compilable, batch_size=64)
    rb.extend(rows(200))
    for _ in range(30):
        learn(rb, error=1.0)
    written = rb.extend(rows(16, first=200))
    learn(rb, error=1.0)
    rb.update_priority(torch.randperm(200), torch.full((200,), 5.0))
    assert 0 < dropped(rb) <= 16
    kept = rb.sampler.probabilities(rb.storage)
    assert (kept == kept.max()).sum() == 200 - dropped(rb) and (kept < kept.max())[written].sum() == dropped(rb)
    for _ in range(64):
        rb.sample()
    rb.update_priority(torch.randperm(200), torch.full((200,), 5.0))
    assert rb.sampler.probabilities(rb.storage).unique().numel() == 1


# --- the caller's own


@both_buffers
@pytest.mark.parametrize("writes", [1, 3])
@pytest.mark.parametrize("name", PRIORITIZED)
def test_first_priorities_of_new_rows_are_applied(name, writes, compilable):
    """All slots were drawn, and a batch is in flight. The random operations pass the index in other forms."""
    torch.manual_seed(0)
    rb = buffer_with(SAMPLERS[name](40), 40, compilable=compilable, batch_size=32)
    rb.extend(random_rows(40))
    for _ in range(9):
        learn(rb)
    rb.sample()
    before = float(rb.sampler.stats()["never_updated"])
    index = torch.cat([rb.extend(random_rows(4, first=40 + 4 * number)) for number in range(writes)])
    largest = rb.sampler.stats()["max_priority"]
    rb.update_priority(index, torch.full((4 * writes,), 100.0))
    stats = rb.sampler.stats()
    assert stats["dropped_updates"] == 0 and stats["max_priority"] > largest
    assert stats["never_updated"] <= before


def test_td_errors_of_written_data_are_applied():
    rb = proportional(8, batch_size=8)
    rb.extend(rows(8))
    rb.sample()
    rb.extend(rows(3, first=8, td_error=torch.tensor([1.0, 2.0, 3.0])))
    rb.add(rows(1, first=11, td_error=torch.tensor([4.0]))[0])
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64) / 14
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected)
    assert dropped(rb) == 0


def test_td_errors_of_rows_that_a_writer_did_not_store_change_nothing():
    def data(ranks):
        return rows(len(ranks), rank=torch.tensor(ranks), td_error=torch.arange(1.0, len(ranks) + 1))

    rb = proportional(4, writer=TensorDictMaxValueWriter(rank_key="rank"), batch_size=4)
    rb.extend(data([5.0, 6.0, 7.0, 8.0]))
    with pytest.raises(RuntimeError) as raised:
        rb.extend(data([1.0, 9.0]))
    assert isinstance(raised.value.__cause__, IndexError)
    assert rb.sampler.stats()["max_priority"] == 4


# --- duplicates and padding


@both_buffers
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_the_largest_td_error_of_a_slot_counts_in_any_order(compiled, compilable):
    if compiled and not compilable:
        pytest.skip("TorchRL's buffer is not compiled")
    rb = proportional(4, compilable=compilable, batch_size=4)
    rb.extend(rows(4))
    index, error = torch.tensor([0, 1, 1, 2, 1, 0]), torch.tensor([1.0, 2.0, 4.0, 3.0, 0.0, 0.5])
    update = torch.compile(rb.update_priority, fullgraph=True) if compiled else rb.update_priority
    for order in (torch.arange(6), torch.arange(5, -1, -1), torch.tensor([2, 0, 4, 1, 3, 5])):
        update(index[order], error[order])
        expected = torch.tensor([1.0, 4.0, 3.0, 1.0], dtype=torch.float64) / 9
        torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected)
    assert dropped(rb) == 0


@both_buffers
@pytest.mark.parametrize("way", ["whole", "split", "shuffled", "shuffled copies"])
@pytest.mark.parametrize("name", ["proportional", "rank", "reaper"])
def test_padded_slices_come_back_in_any_way(name, way, compilable):
    """Episodes of 3 steps in slices of 4: the padding, with TD error 0, takes no priority from the last steps."""
    torch.manual_seed(0)
    sampler = TrajectoryRetraceSampler(30, slice_len=4, anchors=SAMPLERS[name](30))
    rb = buffer_with(sampler, 30, compilable=compilable, batch_size=256)
    rb.extend(random_rows(30, episode=3))
    for _ in range(8):
        slices = rb.sample()
        slices["td_error"] = 5.0 * slices["collector", "mask"]
        slices = slices.reshape(64, 4)
        order = torch.arange(64) if way in ("whole", "split") else torch.randperm(64)
        for index in order.split(64 if way == "whole" else 16):
            part = slices[index] if "copies" not in way else slices[index].clone().to(torch.device("cpu"))
            rb.update_tensordict_priority(part.reshape(-1))
    stats = sampler.stats()
    assert stats["dropped_updates"] == stats["rejected_updates"] == stats["never_updated"] == 0
    # d is the same for all, so PER draws all steps alike; the other samplers never leave out a step
    p = rb.sampler.probabilities(rb.storage)
    assert float(p.min()) > 0
    if name == "proportional":
        torch.testing.assert_close(p, torch.full((30,), 1 / 30, dtype=torch.float64))
