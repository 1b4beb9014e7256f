"""Which rows of priority updates are applied: late rows and the caller's own.

The random operations have further ones: duplicates, padded slices, updates in parts, first priorities of new rows.
"""

import pytest
import torch
from torchrl.data.replay_buffers import TensorDictMaxValueWriter

from tests.data import buffer_with, rows
from tests.params import both_buffers
from torchrl_replay_ext import ProportionalSampler


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
def test_an_overwritten_row_that_is_not_drawn_again_is_late_for_64_draws(compilable):
    rb = proportional(4, compilable=compilable, batch_size=64)
    rb.extend(rows(4))
    rb.sample()
    written = rb.extend(rows(2, first=4))
    # never drawn
    rb.update_priority(written, torch.zeros(2))
    for draws in range(1, 65):
        rb.sample()
        rb.update_priority(torch.arange(4), torch.full((4,), 5.0))
        assert dropped(rb) == min(2 * draws, 126)
    assert rb.sampler.probabilities(rb.storage).tolist() == [0.25] * 4


# --- the caller's own


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
