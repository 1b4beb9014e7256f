"""Updates and notifications right after a write, by the rows of that write."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data.replay_buffers import TensorDictMaxValueWriter

from tests.data import buffer_of, buffer_with, rows
from torchrl_replay_ext import Anneal, Episodes, ProportionalSampler, RankBasedSampler, ReaPERSampler


def test_rows_of_a_refused_write_stay_undrawn_if_an_older_row_is_announced_again():
    buffer = buffer_of(ReaPERSampler, compilable=True, episodes=Episodes(num_streams=2))
    buffer.extend(rows(10, ids=[0, 1] * 5))
    # pytest turns the warning into an error
    with pytest.raises(UserWarning, match="num_streams="):
        buffer.extend(rows(3, ids=[2, 3, 4]))
    buffer.mark_update(torch.tensor([7]))
    assert buffer.sampler.probabilities(buffer.storage)[:3].tolist() == [0.0] * 3


def test_an_index_that_was_changed_after_the_write_cannot_update_empty_slots():
    buffer = buffer_of(ProportionalSampler)
    index = buffer.extend(rows(4))
    index += 3
    with pytest.raises(IndexError):
        buffer.update_priority(index, torch.full((4,), 5.0))


def test_the_update_of_a_write_can_be_repeated_after_an_invalid_one():
    buffer = buffer_of(ProportionalSampler, capacity=1, batch_size=1, td_error="absolute")
    buffer.extend(rows(1))
    buffer.sample()
    index = buffer.extend(rows(1))
    with pytest.raises(ValueError, match="TD error"):
        buffer.update_priority(index, torch.tensor([float("nan")]))
    buffer.update_priority(index, torch.tensor([9.0]))
    assert buffer.sampler.stats()["max_priority"] == pytest.approx(9.0)


def test_td_errors_of_rows_that_a_writer_did_not_store_change_nothing():
    def data(ranks):
        count = len(ranks)
        return TensorDict({"rank": torch.tensor(ranks), "td_error": torch.arange(1.0, count + 1)}, [count])

    writer = TensorDictMaxValueWriter(rank_key="rank")
    buffer = buffer_with(ProportionalSampler(4), 4, writer=writer, batch_size=4)
    buffer.extend(data([5.0, 6.0, 7.0, 8.0]))
    with pytest.raises(RuntimeError) as raised:
        buffer.extend(data([1.0, 9.0]))
    assert isinstance(raised.value.__cause__, IndexError)
    assert buffer.sampler.stats()["max_priority"] == pytest.approx(2.0, rel=1e-4)


def test_a_number_after_extend_is_an_update_of_the_caller():
    """Only after ``add`` does TorchRL pass a number, which then stands for no TD error."""
    buffer = buffer_of(RankBasedSampler, capacity=4, beta=Anneal(0.4, 1.0, 10))
    buffer.extend(rows(3))
    buffer.extend(rows(1, first=3))
    for number in range(1, 4):
        buffer.update_priority(3, 1.0)
        assert buffer.sampler.beta == pytest.approx(0.4 + 0.06 * number)
    assert buffer.sampler.stats()["never_updated"] == 0.75
