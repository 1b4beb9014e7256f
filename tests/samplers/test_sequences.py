"""Buffers that expand each draw to a window of steps (TorchRL's sample_unit=Sequence): priorities belong to anchors."""

import copy
from functools import partial

import pytest
import torch
from torchrl.data import Sequence

from tests.data import buffer_with, event_sampler, linear_policy, random_rows
from tests.samplers.experience import probabilities
from torchrl_replay_ext import (
    DecoupledSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
    compile_step,
)

CAPACITY, EPISODE, EPS = 40, 10, 1e-6
events = partial(event_sampler, CAPACITY, "event", priority={"kind": "proportional"})
policy = partial(linear_policy, 3, 2)


def make(sampler, stock, lanes=1, capacity=CAPACITY):
    rb = buffer_with(
        sampler,
        capacity,
        compilable=not stock,
        ndim=2 if lanes > 1 else 1,
        batch_size=8,
        sample_unit=Sequence(length=3, burn_in=1, bootstrap=1),
    )
    data = random_rows(CAPACITY, episode=EPISODE)
    if lanes > 1:
        data = data.reshape(lanes, -1)
        data["next", "done"][:, -1] = True
    rb.extend(data)
    return rb


MAKERS = {
    "proportional": lambda: ProportionalSampler(CAPACITY, eps=EPS),
    "rank": lambda: RankBasedSampler(CAPACITY),
    "reaper": lambda: ReaPERSampler(CAPACITY, eps=EPS),
    "events": events,
    "decoupled": lambda: DecoupledSampler(ProportionalSampler(CAPACITY, eps=EPS), policy()),
}


def expected(rb, batch, lanes=1, stale=()):
    """A model in plain Python: each anchor gets the largest TD error of the valid rows of its windows.

    Returns:
        The probabilities of a copy of ``rb`` after an update with these TD errors; the TD errors by slot.
    """
    largest = {}
    for anchor, error, valid in zip(
        batch["anchor_index"].reshape(len(batch), -1).tolist(),
        batch["td_error"].reshape(-1).tolist(),
        batch["validity_mask"].tolist(),
        strict=True,
    ):
        slot = anchor[0] if lanes == 1 else anchor[0] * lanes + anchor[1]
        if valid and slot not in stale:
            largest[slot] = max(largest.get(slot, 0.0), error)
    twin, slots = copy.deepcopy(rb), torch.tensor(list(largest))
    index = slots if lanes == 1 else torch.stack([slots // lanes, slots % lanes], -1)
    twin.update_priority(index, torch.tensor(list(largest.values())))
    return probabilities(twin), largest


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", MAKERS)
def test_only_anchors_get_priorities(name, stock, lanes):
    if name == "events" and lanes > 1:
        pytest.skip("event tables are for flat storage")
    torch.manual_seed(len(name))
    sampler = MAKERS[name]()
    rb = make(sampler, stock, lanes)
    for _ in range(6):
        batch = rb.sample()
        batch["td_error"] = torch.rand(len(batch)) + 0.1
        wanted, anchors = expected(rb, batch, lanes)
        rb.update_tensordict_priority(batch)
        assert set(anchors) < set(batch["index"].reshape(len(batch), -1)[:, 0].tolist()) or lanes > 1
        torch.testing.assert_close(probabilities(rb), wanted)
        sampler.check_valid()
    assert sampler.stats()["dropped_updates"] == 0


def test_a_sample_in_the_shape_of_its_windows_is_the_same():
    torch.manual_seed(0)
    rb = make(ProportionalSampler(CAPACITY, eps=EPS), stock=False)
    batch = rb.sample()
    batch["td_error"] = torch.rand(len(batch)) + 0.1
    wanted, _ = expected(rb, batch)
    rb.update_tensordict_priority(batch.reshape(8, -1))
    torch.testing.assert_close(probabilities(rb), wanted)


def test_anchors_that_were_overwritten_since_keep_the_default_priority():
    torch.manual_seed(0)
    rb = make(ProportionalSampler(CAPACITY, eps=EPS), stock=False)
    batch = rb.sample()
    batch["td_error"] = torch.rand(len(batch)) + 0.1
    rb.extend(random_rows(20, first=CAPACITY, episode=EPISODE))
    wanted, fresh = expected(rb, batch, stale=range(20))
    rb.update_tensordict_priority(batch)
    torch.testing.assert_close(probabilities(rb), wanted)
    anchors = set(batch["anchor_index"].tolist())
    assert 0 < rb.sampler.stats()["dropped_updates"] == len(anchors) - len(fresh)


@pytest.mark.parametrize("what", ["sample", "update"])
def test_in_a_graph_sequences_are_refused_by_name(what):
    rb = make(ProportionalSampler(CAPACITY), stock=False)
    batch, before = rb.sample(), probabilities(rb)
    batch["td_error"] = torch.ones(len(batch))

    def step():
        return rb.sample() if what == "sample" else rb.update_tensordict_priority(batch)

    with pytest.raises(Exception, match=r"Call sample\(\) and update_tensordict_priority\(\) outside"):
        compile_step(step)()
    assert torch.equal(probabilities(rb), before)
    rb.update_tensordict_priority(batch)


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_samplers_of_slices_are_refused_by_name(stock, decoupled):
    slices = TrajectoryRetraceSampler(CAPACITY, slice_len=4)
    rb = make(DecoupledSampler(slices, policy()) if decoupled else slices, stock)
    with pytest.raises(ValueError, match="sample_unit=Sequence"):
        rb.sample()
    with pytest.raises(ValueError, match="sample_unit=Sequence"):
        slices.newest(rb)


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
def test_pinned_tables_are_refused_by_name(stock):
    rb = make(events(default=CAPACITY), stock, capacity=2 * CAPACITY)
    with pytest.raises(ValueError, match="retention='pinned'"):
        rb.sample()
