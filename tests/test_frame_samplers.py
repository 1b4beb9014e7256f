"""Samples from a FrameStackStorage are those from a storage of complete stacks."""

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.data import buffer_with, event_sampler
from tests.params import slow_but
from tests.stacks import StackedStreams
from torchrl_replay_ext import (
    CompilableTensorStorage,
    Episodes,
    FrameStackStorage,
    ProportionalSampler,
    TrajectoryRetraceSampler,
)

SAMPLERS = {
    "proportional": ProportionalSampler,
    "slices": lambda capacity: TrajectoryRetraceSampler(
        capacity, slice_len=4, episodes=Episodes(num_streams=3), anchors=ProportionalSampler(capacity)
    ),
    # reads stored stacks, to count pairs of state and action
    "tables": lambda capacity: event_sampler(20, history=5, correction="conditional"),
    "pinned tables": lambda capacity: event_sampler(20, history=5, default=20),
}


def buffers(name):
    """The same buffer with frames stored once and with complete stacks."""
    return [
        buffer_with(SAMPLERS[name](40), 40, compilable=True, storage=storage, batch_size=8)
        for storage in (FrameStackStorage(40), CompilableTensorStorage(40))
    ]


def draw_and_update(rb):
    batch = rb.sample()
    batch["td_error"] = batch["next", "reward"].square().squeeze(1)
    rb.update_tensordict_priority(batch)
    return batch


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_those_of_whole_stacks(name):
    streams = StackedStreams(3, depth=2, end=0.1, still=0.9)
    both = buffers(name)
    for number in range(25):
        data = streams.chunk("interleaved", 9)
        for rb in both:
            rb.extend(data.clone())
            torch.manual_seed(number)
            rb.set_rng(torch.Generator().manual_seed(number))
        once, plain = map(draw_and_update, both)
        assert (once == plain).all() and once.keys() == plain.keys()


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.parametrize("name", slow_but(["proportional"], ["proportional", "slices"]))
def test_compiled_in_one_graph(name):
    """Writes, draws and updates in a graph give the samples that a plain buffer has in the same slots."""
    streams = StackedStreams(3, end=0.1)
    once, plain = buffers(name)[0], TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=8)

    def step(data):
        once.extend(data)
        return draw_and_update(once)

    compiled, first = torch.compile(step, fullgraph=True), streams.chunk("interleaved", 9)
    for rb in (once, plain):
        rb.extend(first.clone())
    for _ in range(25):
        data = streams.chunk("interleaved", 9)
        plain.extend(data.clone())
        batch = compiled(data)
        expected = plain.storage[batch["index"]]
        for key in ("observation", ("next", "observation"), "action", ("next", "reward")):
            assert torch.equal(batch[key], expected[key]), key
    data["observation"] = 255 - data["observation"]
    with pytest.raises(ValueError, match="the next observation of a row is not its observation shifted by one frame"):
        compiled(data)
