"""Rare situations: buffers that were emptied, entries that are not tensors, states of empty buffers."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from tests.data import buffer_with, rows
from tests.params import both_buffers
from torchrl_replay_ext import ProportionalSampler


@both_buffers
@pytest.mark.parametrize("kind", [NonTensorData, NonTensorStack])
def test_entries_that_are_not_tensors_are_written_and_overwritten(kind, compilable):
    def named(names, first):
        data = rows(2, first=first)
        data["name"] = NonTensorData(names[0], batch_size=[2]) if kind is NonTensorData else NonTensorStack(*names)
        return data

    rb = buffer_with(ProportionalSampler(5), 5, compilable=compilable, batch_size=2)
    expected = [None] * 5
    for number, names in enumerate((["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"])):
        rb.extend(named(names, 2 * number))
        for row, name in enumerate(names[:1] * 2 if kind is NonTensorData else names):
            expected[(2 * number + row) % 5] = name
    assert [rb[slot]["name"] for slot in range(5)] == expected


@both_buffers
@pytest.mark.parametrize("num_rows", [0, 3, 6])
def test_the_state_of_an_empty_buffer_can_be_loaded(compilable, num_rows):
    empty, rb = (buffer_with(ProportionalSampler(4), 4, compilable=compilable, batch_size=2) for _ in range(2))
    for row in range(num_rows):
        rb.extend(rows(1, first=row))
    rb.load_state_dict(empty.state_dict())
    assert len(rb) == 0
    with pytest.raises((RuntimeError, ValueError), match="empty"):
        rb.sample()
    rb.extend(rows(3))
    assert len(rb.sample()) == 2


def test_data_on_the_meta_device_is_refused():
    rb = buffer_with(ProportionalSampler(4), 4, compilable=True, batch_size=2)
    rb.extend(rows(2))
    data = rows(1, first=2)
    data["next", "done"] = data["next", "done"].to("meta")
    with pytest.raises(ValueError, match="meta device"):
        rb.extend(data)
    assert len(rb) == rb.write_count == 2


def test_a_smallest_priority_that_the_sums_cannot_hold_is_refused():
    with pytest.raises(ValueError, match=r"ProportionalSampler\(min_priority=10000000000\): must be <= "):
        rb = buffer_with(ProportionalSampler(1000, alpha=1.0, min_priority=1e10), 1000, batch_size=2)
        rb.extend(rows(10))
    fitting = buffer_with(ProportionalSampler(1000, alpha=0.5, min_priority=1e10), 1000, batch_size=2)
    fitting.extend(rows(10))


def test_a_state_with_a_smaller_smallest_priority_is_raised():
    def buffer(smallest):
        rb = buffer_with(ProportionalSampler(10, alpha=1.0, eps=0.0, min_priority=smallest), 10, batch_size=2)
        rb.extend(rows(4))
        return rb

    rb, saved = buffer(3.0), buffer(0.0).sampler.state_dict()
    rb.sampler.load_state_dict(saved)
    rb.extend(rows(2, first=4))
    rb.update_priority(torch.arange(4), torch.full((4,), 0.5))
    probability = rb.sampler.probabilities(rb.storage)
    torch.testing.assert_close(probability, torch.full_like(probability, 1 / 6))


def test_one_step_per_environment_can_be_written_to_columns():
    rb = buffer_with(ProportionalSampler(12, td_error="absolute", alpha=1.0, eps=0.0), 12, compilable=True, ndim=2)

    def step(number):
        return rows(3, first=3 * number, td_error=torch.arange(3.0) + 3 * number + 1).reshape(3, 1)

    rb.extend(step(0))
    for number in range(1, 6):
        assert rb.extend(step(number)).tolist() == [[number % 4, env] for env in range(3)]
    written = rb.storage[:]["number"]
    assert written.tolist() == [[12, 13, 14], [15, 16, 17], [6, 7, 8], [9, 10, 11]]
    priority = written.flatten() + 1.0
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), (priority / priority.sum()).double())
