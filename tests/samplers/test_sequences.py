"""Buffers that expand each draw to a window of steps (TorchRL's sample_unit=Sequence): priorities belong to anchors."""

import copy
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torchrl.data import Sequence

from tests.data import SAMPLERS, buffer_with, event_sampler, linear_policy, random_rows
from tests.samplers.experience import probabilities, sorted_within
from torchrl_replay_ext import DecoupledSampler, ProportionalSampler, compile_step
from torchrl_replay_ext.buffers import CompilableSequence

CAPACITY, EPISODE = 40, 10
UNIT = Sequence(length=3, burn_in=1, bootstrap=1)


def make(sampler, stock, lanes=1, capacity=CAPACITY, unit=UNIT, batch_size=8, **arguments):
    rb = buffer_with(
        sampler,
        capacity,
        compilable=not stock,
        ndim=2 if lanes > 1 else 1,
        batch_size=batch_size,
        sample_unit=unit,
        **arguments,
    )
    data = random_rows(CAPACITY, episode=EPISODE)
    if lanes > 1:
        data = data.reshape(lanes, -1)
        data["next", "done"][:, -1] = True
    rb.extend(data)
    return rb


def drawn(rb):
    batch = rb.sample()
    batch["td_error"] = torch.rand(len(batch)) + 0.1
    return batch


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


def assert_equal_probabilities(name, sampler, found, wanted):
    if name == "rank":
        # the order of new transitions, and of equal TD errors, depends on the order of the rows of updates
        priority = sampler.state_dict()["priority"]
        bucket = torch.where(priority < 0, torch.inf, priority).view(torch.int32) >> 16
        found, wanted = sorted_within(bucket, found), sorted_within(bucket, wanted)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", ["proportional", "rank", "reaper", "tables, proportional", "decoupled"])
def test_only_anchors_get_priorities(name, stock, lanes):
    if name == "tables, proportional" and lanes > 1:
        pytest.skip("event tables are for flat storage")
    torch.manual_seed(len(name))
    sampler = SAMPLERS[name](CAPACITY)
    rb = make(sampler, stock, lanes)
    for number in range(6):
        batch = drawn(rb)
        wanted, anchors = expected(rb, batch, lanes)
        # our buffer also takes a batch in the shape of its windows
        rb.update_tensordict_priority(batch if stock or number % 2 else batch.reshape(8, -1))
        assert set(anchors) < set(batch["index"].reshape(len(batch), -1)[:, 0].tolist()) or lanes > 1
        assert_equal_probabilities(name, sampler, probabilities(rb), wanted)
    assert sampler.stats()["dropped_updates"] == 0


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.parametrize("kind", ["stock", "compilable", "compiled"])
def test_anchors_that_were_overwritten_since_keep_the_default_priority(kind):
    torch.manual_seed(0)
    stock = kind == "stock"
    rb = make(ProportionalSampler(CAPACITY), stock)
    batch = drawn(rb)
    rb.extend(random_rows(20, first=CAPACITY, episode=EPISODE))
    wanted, fresh = expected(rb, batch, stale=range(20))

    def update(batch):
        rb.update_tensordict_priority(batch)

    (torch.compile(update, fullgraph=True, backend="eager") if kind == "compiled" else update)(batch)
    torch.testing.assert_close(probabilities(rb), wanted)
    # TorchRL's buffer passes each anchor once, ours all rows of its windows
    anchors = set(batch["anchor_index"].tolist()) if stock else batch["anchor_index"].tolist()
    assert 0 < rb.sampler.stats()["dropped_updates"] == sum(anchor not in fresh for anchor in anchors)


# --- the windows of a CompilableReplayBuffer, in graphs too


def stacked(index):
    return torch.stack(index, -1) if isinstance(index, tuple) else index


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("writes", [[7], [40], [30, 26], [40, 40, 4]], ids=str)
@pytest.mark.parametrize("episode", [3, 7, 100])
def test_windows_are_those_of_torchrl(episode, writes, lanes):
    """All combinations of the arguments, from every stored step, in partly filled and overwritten rings."""
    rb, first = buffer_with(ProportionalSampler(), CAPACITY, compilable=True, ndim=lanes), 0
    for count in writes:
        data = random_rows(count - count % lanes, first=first, episode=episode)
        rb.extend(data if lanes == 1 else data.reshape(-1, lanes).transpose(0, 1).contiguous())
        first += count
    anchors, weight = torch.arange(len(rb)), torch.rand(len(rb))
    anchors = anchors if lanes == 1 else (anchors // lanes, anchors % lanes)
    values = ((1, 3, 8), (0, 2), (0, 2), (1, 3), ("pad", "stop", "include_reset"), (("next", "done"), None))
    for length, burn_in, bootstrap, dilation, boundary, done_key in itertools.product(*values):
        unit = Sequence(length, boundary, done_key, burn_in, bootstrap, dilation)
        both = [each.expand(anchors, {"weight": weight}, rb.storage) for each in (unit, CompilableSequence(unit))]
        theirs, ours = ({**info, "index": stacked(index)} for index, info in both)
        assert theirs.keys() == ours.keys()
        assert all(torch.equal(value, ours[key]) for key, value in theirs.items())


def test_without_the_entry_that_marks_ends_of_episodes_windows_are_an_error():
    rb = make(ProportionalSampler(CAPACITY), stock=False, unit=Sequence(length=3, done_key="ended"))
    with pytest.raises(KeyError, match="no entry 'ended', which marks ends of episodes"):
        rb.sample()


def learn_in_graph(rb, backend):
    def step(data):
        rb.extend(data)
        batch = rb.sample()
        # exact in float32; all anchors differ, so that their ranks are unique
        batch["td_error"] = 1.0 + batch["anchor_index"].reshape(len(batch), -1)[:, 0] / 64 + batch["step_in_sequence"]
        rb.update_tensordict_priority(batch)
        return batch

    return torch.compile(step, fullgraph=True, backend=backend)


# the columns of reshaped data begin within episodes
@pytest.mark.filterwarnings("ignore:A trajectory began:UserWarning")
@pytest.mark.usefixtures("from_scratch")
@pytest.mark.parametrize(
    ("name", "lanes", "boundary", "backend"),
    [
        ("proportional", 1, "stop", "inductor"),
        ("rank", 1, "pad", "eager"),
        ("reaper", 1, "stop", "eager"),
        ("reaper", 2, "pad", "eager"),
    ],
)
def test_in_a_graph_windows_and_priorities_are_those_of_eager_code(name, lanes, boundary, backend):
    unit = Sequence(length=3, burn_in=1, bootstrap=1, dilation=2, episode_boundary=boundary)
    sampler = SAMPLERS[name](CAPACITY)
    rb = make(sampler, stock=False, lanes=lanes, unit=unit)
    twin = copy.deepcopy(rb)
    graph = learn_in_graph(rb, CompileCounterWithBackend(backend))
    for number in range(4):
        data = random_rows(8, first=CAPACITY + 8 * number, episode=EPISODE)
        data = data if lanes == 1 else data.reshape(lanes, -1)
        twin.extend(data.clone())
        batch = graph(data)
        anchors = batch["anchor_index"].reshape(8, -1, *batch["anchor_index"].shape[1:])[:, 0]
        index, info = unit.expand(anchors if lanes == 1 else tuple(anchors.unbind(1)), {}, twin.storage)
        assert torch.equal(batch["index"], stacked(index))
        assert all(torch.equal(batch[key], value) for key, value in info.items())
        assert torch.equal(batch["number"], rb.storage.get(index)["number"])
        twin.update_tensordict_priority(batch)
        assert_equal_probabilities(name, sampler, probabilities(rb), probabilities(twin))
    assert rb.sampler.stats()["rejected_updates"] == rb.sampler.stats()["dropped_updates"] == 0


class Other(Sequence):
    """A sample unit of the user."""


def test_in_a_graph_other_sample_units_are_refused_by_name():
    rb = make(ProportionalSampler(CAPACITY), stock=False, unit=Other(3))
    with pytest.raises(Exception, match=r"sample_unit=Other\(...\)\): a graph can contain no sample unit other than"):
        compile_step(lambda: rb.sample())()
    assert rb.sample().shape == (24,)


REFUSED = {
    "slices": (SAMPLERS["slices"], "sample_unit=Sequence"),
    "decoupled": (lambda size: DecoupledSampler(SAMPLERS["slices"](size), linear_policy(3, 2)), "sample_unit=Sequence"),
    "pinned": (lambda size: event_sampler(size, "event", default=size), "retention='pinned'"),
}


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", REFUSED)
def test_samplers_that_cannot_be_expanded_are_refused_by_name(name, stock):
    sampler, message = REFUSED[name]
    rb = make(sampler(CAPACITY), stock, capacity=2 * CAPACITY if name == "pinned" else CAPACITY)
    with pytest.raises(ValueError, match=message):
        rb.sample()
    if name == "slices":
        with pytest.raises(ValueError, match=message):
            rb.sampler.newest(rb)
    if not stock and name != "decoupled":
        with pytest.raises(Exception, match=message):
            torch.compile(lambda: rb.sample(), fullgraph=True, backend="eager")()
