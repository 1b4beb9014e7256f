"""Samples that come back without TD errors, or with them under another name, change no priority."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, Sequence, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)

CAPACITY = 40


def rows(count=30):
    done = (torch.arange(count) % 10 == 9).unsqueeze(1)
    return TensorDict(
        {
            "observation": torch.randn(count, 3),
            "action": torch.randn(count, 2),
            "logits": torch.randn(count, 2),
            "event": torch.arange(count) % 4 == 0,
            "next": {"done": done, "terminated": done.clone(), "truncated": torch.zeros_like(done)},
        },
        [count],
    )


def policy():
    return TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])


def events(priority):
    tables = EventTables([EventSpec("event", "event", 3)], {"event": CAPACITY})
    sampler = EventTableSampler(tables, eta={"default": 0.5, "event": 0.5}, priority=priority)
    return sampler, EventTableWriter(tables)


PRIORITIZED = {
    "proportional": lambda: (ProportionalSampler(CAPACITY, alpha=Anneal(0.6, 0.2, num_updates=9)), None),
    "no eps": lambda: (ProportionalSampler(CAPACITY, eps=0.0), None),
    "rank": lambda: (RankBasedSampler(CAPACITY), None),
    "reaper": lambda: (ReaPERSampler(CAPACITY, td_error="absolute"), None),
    "events": lambda: events({"kind": "proportional"}),
    "decoupled": lambda: (DecoupledSampler(ProportionalSampler(CAPACITY), policy()), None),
    "slices": lambda: (TrajectoryRetraceSampler(CAPACITY, slice_len=4, anchors=ProportionalSampler(CAPACITY)), None),
}
UNIFORM = {
    "uniform": lambda: (RandomSampler(), None),
    "events": lambda: events(None),
    "slices": lambda: (TrajectoryRetraceSampler(CAPACITY, slice_len=4), None),
    "decoupled": lambda: (DecoupledSampler(RandomSampler(), policy()), None),
}


def make(maker, stock, **arguments):
    torch.manual_seed(0)
    sampler, writer = maker()
    if writer is not None:
        arguments["writer"] = writer
    storage = (LazyTensorStorage if stock else CompilableTensorStorage)(CAPACITY)
    rb = (TensorDictReplayBuffer if stock else CompilableReplayBuffer)(
        storage=storage, sampler=sampler, batch_size=8, **arguments
    )
    rb.extend(rows())
    return rb


def updated(rb):
    """A buffer with some priorities that are not the default one."""
    for _ in range(3):
        batch = rb.sample()
        batch["td_error"] = torch.rand(len(batch)) + 2
        rb.update_tensordict_priority(batch)
    return rb


def flat(state, prefix=""):
    for key, value in state.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def assert_unchanged(rb, before, counted=0):
    now = dict(flat(rb.sampler.state_dict()))
    counter = "rejected_updates"
    assert now.keys() == before.keys()
    for key, value in now.items():
        if key == counter:
            assert int(value) == int(before[key]) + counted
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, before[key]), key
    rb.sampler.check_valid()


@pytest.mark.parametrize("name", PRIORITIZED)
@pytest.mark.parametrize("misspelt", [False, True])
def test_a_compilable_buffer_names_the_key_and_changes_nothing(name, misspelt):
    rb = updated(make(PRIORITIZED[name], stock=False))
    batch, before = rb.sample(), dict(flat(rb.sampler.state_dict()))
    if misspelt:
        batch["td_eror"] = torch.ones(len(batch))
    with pytest.raises(KeyError, match=r"the sample has no entry 'td_error' with TD errors.*priority_key="):
        rb.update_tensordict_priority(batch)
    with pytest.raises(KeyError, match="no entry 'td_error'"):
        rb.update_tensordict_priority(batch[0])
    assert_unchanged(rb, before)
    # the batch can still be handed back
    batch["td_error"] = torch.full((len(batch),), 0.25)
    rb.update_tensordict_priority(batch)
    assert rb.sampler.stats()["dropped_updates"] == 0


@pytest.mark.parametrize("name", PRIORITIZED)
def test_in_a_stock_buffer_it_is_harmless_and_counted(name):
    rb = updated(make(PRIORITIZED[name], stock=True))
    batch, before = rb.sample(), dict(flat(rb.sampler.state_dict()))
    for calls in (1, 2):
        rb.update_tensordict_priority(batch)
        assert_unchanged(rb, before, counted=calls * len(batch))
        assert rb.sampler.stats()["rejected_updates"] == calls * len(batch)


@pytest.mark.parametrize("ndim", [1, 2])
def test_so_it_is_in_other_layouts(ndim):
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, ndim=ndim), sampler=ProportionalSampler(CAPACITY), batch_size=8
    )
    rb.extend(rows().reshape(3, 10) if ndim == 2 else rows())
    updated(rb)
    batch, before = rb.sample(), dict(flat(rb.sampler.state_dict()))
    rb.update_tensordict_priority(batch)
    assert_unchanged(rb, before, counted=8)


def test_so_it_is_with_sequences():
    rb = updated(make(PRIORITIZED["proportional"], stock=True, sample_unit=Sequence(length=3)))
    batch, before = rb.sample(), dict(flat(rb.sampler.state_dict()))
    rb.update_tensordict_priority(batch)
    assert_unchanged(rb, before, counted=len(batch["anchor_index"].unique()))


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", UNIFORM)
def test_samplers_without_priorities_need_no_td_errors(name, stock):
    rb = make(UNIFORM[name], stock)
    rb.update_tensordict_priority(rb.sample())


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
def test_the_actors_buffer_says_that_it_takes_no_priorities(stock):
    rb = make(PRIORITIZED["decoupled"], stock)
    actor_rb = rb.sampler.actor_buffer(rb)
    with pytest.raises(ValueError, match="actor's buffer takes no priorities"):
        actor_rb.update_tensordict_priority(actor_rb.sample())


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
def test_single_rows_are_added_without_td_errors(stock):
    rb = updated(make(PRIORITIZED["no eps"], stock))
    for slot, row in enumerate(rows(4), start=30):
        assert int(rb.add(row)) == slot
    assert len(rb) == 34 and rb.sampler.stats()["rejected_updates"] == 0
    new = rb.sampler.probabilities(rb.storage)[30:34]
    assert (new == new[0]).all() and new[0] == rb.sampler.probabilities(rb.storage).max()
    row = rows(1)[0]
    row["td_error"] = torch.tensor(0.25)
    if not stock:
        with pytest.raises(KeyError, match="td_error"):
            rb.add(row)
        return
    rb.add(row)
    p, largest = rb.sampler.probabilities(rb.storage), float(rb.sampler.stats()["max_priority"])
    assert float(p[34] / p[33]) == pytest.approx((0.5 / largest) ** 0.6, rel=1e-4)


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", ["no eps", "rank", "reaper"])
def test_td_errors_that_equal_the_default_priority_are_applied(name, stock):
    """At first that is 1, a likely TD error."""
    rb = make(PRIORITIZED[name], stock)
    default = rb.sampler.default_priority
    priority = torch.tensor([default])
    constants = {
        "a sample": lambda index: rb.update_tensordict_priority(
            TensorDict({"index": index, "td_error": torch.full((len(index),), default)}, [len(index)])
        ),
        "a tensor": lambda index: rb.update_priority(index, priority.repeat(len(index))),
        "one tensor for all": lambda index: rb.update_priority(index, priority[0]),
        "a number": lambda index: rb.update_priority(index, default),
    }
    for number, update in enumerate(constants.values()):
        index = torch.arange(4 * number, 4 * number + 4)
        # what logs it must not change what comes next
        assert rb.sampler.default_priority == default
        update(index)
        assert rb.sampler.stats()["never_updated"] == pytest.approx((26 - 4 * number) / 30)
    assert rb.sampler.stats()["rejected_updates"] == 0


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
def test_anchors_without_priorities_need_no_td_errors(stock):
    tables = EventTables([EventSpec("event", "event", 2)], {"event": 10})
    anchors = EventTableSampler(tables, eta={"default": 0.5, "event": 0.5})
    parts = {
        "sampler": TrajectoryRetraceSampler(CAPACITY, slice_len=4, anchors=anchors),
        "writer": EventTableWriter(tables),
        "batch_size": 8,
    }
    if stock:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), **parts)
    else:
        rb = CompilableReplayBuffer(storage=CompilableTensorStorage(CAPACITY), **parts)
    rb.extend(rows())
    rb.update_tensordict_priority(rb.sample())
    assert rb.sampler.stats().get("rejected_updates", torch.zeros(())) == 0
