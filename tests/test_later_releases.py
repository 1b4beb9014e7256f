"""What releases of torchrl after 0.14 add to a buffer: waits, counters, rate limits and further sample units."""

import threading

import pytest
import torch
import torchrl.data
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SampleUnit, Sequence

from tests.data import SAMPLERS, buffer_with, learn, random_rows
from tests.params import both_buffers
from tests.samplers.experience import probabilities
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    EventTableWriter,
    ProportionalSampler,
    compile_step,
)

CAPACITY, BATCH = 40, 8
RateLimited = getattr(torchrl.data, "RateLimitedReplayBuffer", object)
later = pytest.mark.skipif(RateLimited is object, reason="torchrl 0.14 has no waits and no rate limits")
every_kind = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def make_buffer(**arguments):
    return buffer_with(ProportionalSampler(), CAPACITY, compilable=True, batch_size=BATCH, **arguments)


# --- waiting


@later
@every_kind
def test_a_sample_waits_for_the_first_write(compiled):
    rb = make_buffer(compile=compiled)
    writer = threading.Timer(0.2, rb.extend, [random_rows(10)])
    writer.start()
    with torch.compiler.set_stance("force_eager"):
        assert rb.sample(wait=True, timeout=60.0).shape == (BATCH,)
        assert rb.sample(wait=True).shape == (BATCH,)
    writer.join()


@later
@every_kind
def test_a_wait_ends_at_its_timeout_or_when_it_is_cancelled(compiled):
    rb, cancelled = make_buffer(compile=compiled), threading.Event()
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    cancelled.set()
    with pytest.raises(RuntimeError, match="cancelled"):
        rb.sample(wait=True, cancel_event=cancelled)
    rb.extend(random_rows(10))
    with pytest.raises(RuntimeError, match="cancelled"):
        rb.sample(wait=True, cancel_event=cancelled)


def test_a_graph_refuses_to_wait():
    rb = make_buffer()
    rb.extend(random_rows(10))
    with pytest.raises(Exception, match="a graph cannot wait; leave wait= out"):
        compile_step(lambda: rb.sample(wait=True))()


# --- counters and rate limits


@later
@every_kind
@pytest.mark.parametrize("length", [1, 3])
def test_samples_are_counted_in_rows(length, compiled):
    rb = make_buffer(compile=compiled, sample_unit=Sequence(length))
    rb.extend(random_rows(10))
    with torch.compiler.set_stance("force_eager"):
        rb.sample()
        rb.sample(return_info=True)
    assert (rb.stats()["sample_calls"], rb.stats()["samples_returned"]) == (2, 2 * BATCH * length)


@later
@pytest.mark.parametrize("base", [TensorDictReplayBuffer, CompilableReplayBuffer], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", ["proportional", "rank", "reaper", "tables, proportional", "slices, proportional"])
def test_a_rate_limit_combines_with_buffers_of_tensordicts(name, base):
    class Limited(RateLimited, base):
        pass

    sampler = SAMPLERS[name](CAPACITY)
    writer = {"writer": EventTableWriter(sampler.tables)} if name == "tables, proportional" else {}
    make_storage = CompilableTensorStorage if base is CompilableReplayBuffer else LazyTensorStorage
    rb = Limited(storage=make_storage(CAPACITY), sampler=sampler, batch_size=BATCH, samples_per_insert=1.0, **writer)
    rb.extend(random_rows(2 * BATCH))
    for _ in range(2):
        learn(rb)
    assert not rb.can_sample() and sampler.stats()["never_updated"] < 1
    with pytest.raises(TimeoutError):
        rb.sample(wait=True, timeout=0.01)
    rb.extend(random_rows(BATCH, first=2 * BATCH))
    learn(rb)


# --- sample units and generations


class Pairs(SampleUnit):
    """Each row with the next row, as TorchRL's own units do it."""

    def expand(self, index, info, storage):
        info = {key: torch.as_tensor(value).repeat_interleave(2, 0) for key, value in info.items()}
        info["anchor_index"] = index.repeat_interleave(2)
        return torch.stack([index, (index + 1) % len(storage)], 1).flatten(), info


class PairsOfOneValidRow(Pairs):
    def expand(self, index, info, storage):
        slots, info = super().expand(index, info, storage)
        return slots, info | {"validity_mask": torch.tensor([True, False] * len(index))}


@both_buffers
@pytest.mark.parametrize("unit", [Pairs, PairsOfOneValidRow, pytest.param("SubgoalTriplet", marks=later)])
def test_with_any_sample_unit_only_anchors_get_priorities(unit, compilable):
    if unit is PairsOfOneValidRow and not compilable:
        pytest.skip("TorchRL's buffer reduces only its own units to anchors")
    make = torchrl.data.replay_buffers.SubgoalTriplet if isinstance(unit, str) else unit
    sampler = ProportionalSampler(alpha=1.0, eps=0.0, td_error="absolute")
    rb = buffer_with(sampler, CAPACITY, compilable=compilable, batch_size=BATCH, sample_unit=make())
    rb.extend(random_rows(CAPACITY))
    batch = rb.sample()
    # units without a mask have only valid rows; of these, TorchRL's buffer updates all
    valid = batch.get("validity_mask", torch.ones(len(batch), dtype=torch.bool))
    anchor = batch["anchor_index" if compilable or unit is not Pairs else "index"]
    batch["td_error"] = torch.where(valid, 2.0, 9.0)
    before = probabilities(rb)
    rb.update_tensordict_priority(batch)
    expected = before.index_fill(0, anchor[valid].unique(), 2 * float(before[0]))
    torch.testing.assert_close(probabilities(rb), expected / expected.sum())
    assert sampler.stats()["dropped_updates"] == 0
