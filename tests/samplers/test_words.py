"""What samplers say to calls that are slightly wrong, and what they take in place of Python's own types."""

import numpy as np
import pytest
import torch

from tests.data import SAMPLERS, buffer_with, event_sampler, random_rows
from tests.params import both_buffers
from torchrl_replay_ext import EventTableSampler, FrameStackStorage, ProportionalSampler, TrajectoryRetraceSampler

CAPACITY, BATCH = 40, 8
every_sampler = pytest.mark.parametrize("name", SAMPLERS)
OURS = [name for name in SAMPLERS if name != "uniform"]


def filled(name, compilable):
    rb = buffer_with(SAMPLERS[name](CAPACITY), CAPACITY, compilable=compilable, batch_size=BATCH)
    rb.extend(random_rows(20))
    return rb


@both_buffers
@pytest.mark.parametrize("name", OURS)
def test_the_batch_size_is_an_integer_of_python_or_numpy(name, compilable):
    rb = filled(name, compilable)
    sampler = type(rb.sampler).__name__ if name != "decoupled" else "ProportionalSampler"
    assert len(rb.sampler.sample(rb.storage, np.int64(BATCH))[0]) == BATCH
    for wrong in (0, 8.0, np.float64(8), True, "8"):
        error = ValueError if wrong == 0 else TypeError
        with pytest.raises(error, match=rf"{sampler}.*\.sample\(batch_size=.*must be"):
            rb.sampler.sample(rb.storage, wrong)


def test_integers_of_numpy_are_arguments():
    four = np.int64(4)
    sampler = TrajectoryRetraceSampler(np.int32(CAPACITY), slice_len=four, anchors=ProportionalSampler(four * 10))
    rb = buffer_with(sampler, CAPACITY, batch_size=BATCH)
    rb.extend(random_rows(20))
    assert rb.sample().shape == (BATCH,) and type(sampler.slice_len) is int
    tables = event_sampler(four * 3, "event", history=four, min_size=four)
    rb = buffer_with(tables, CAPACITY, batch_size=BATCH)
    rb.extend(random_rows(20))
    assert rb.sample().shape == (BATCH,) and isinstance(tables, EventTableSampler)
    assert FrameStackStorage(four, frame_capacity=four + four).max_size == 4
    with pytest.raises(TypeError, match=r"capacity must be an integer >= 1"):
        ProportionalSampler(np.bool_(True))


@both_buffers
def test_a_slice_as_index_is_refused_with_the_way_out(compilable):
    rb = filled("proportional", compilable)
    before = rb.sampler.probabilities(rb.storage)
    with pytest.raises(TypeError, match=r"ProportionalSampler: the index slice\(0, 4, None\) .*torch\.arange"):
        rb.update_priority(slice(0, 4), torch.ones(4))
    assert torch.equal(rb.sampler.probabilities(rb.storage), before)


@both_buffers
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
@pytest.mark.parametrize("name", ["reaper", "slices", "tables"])
def test_ends_and_beginnings_of_episodes_may_be_numbers_of_any_dtype(name, dtype, compilable):
    def drawn(kind):
        torch.manual_seed(0)
        rb = buffer_with(SAMPLERS[name](CAPACITY), CAPACITY, compilable=compilable, batch_size=BATCH)
        data = random_rows(20, episode=5).exclude(("collector", "traj_ids"))
        data["next", "done"] = data["next", "done"].to(kind)
        data["is_init"] = (torch.arange(20) % 5 == 3).to(kind)
        rb.extend(data)
        for _ in range(3):
            if name == "reaper":
                rb.update_priority(torch.arange(20), torch.arange(20.0))
        return rb.sampler.probabilities(rb.storage), rb.sample()["number"]

    for found, expected in zip(drawn(dtype), drawn(torch.bool), strict=True):
        assert torch.equal(found, expected)
