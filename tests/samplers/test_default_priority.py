"""The priority of new transitions with ``max_priority_within_buffer``, against a maximum over a plain dict."""

import copy
import random
from functools import partial

import pytest
import torch

from tests.data import buffer_with, event_sampler, rows
from tests.samplers.experience import assert_priorities, assert_same_state
from torchrl_replay_ext import ProportionalSampler, ReaPERSampler

CAPACITY, BATCH = 30, 6


def event_tables(kind):
    # with this eta and omega, draws depend only on the priorities
    priority = {"kind": kind, "max_priority_within_buffer": True} | (
        {"omega": 0.0, "on_load": "continue"} if kind == "reaper" else {}
    )
    return event_sampler(9, share=0.0, priority=priority)


SAMPLERS = {
    "proportional": lambda: ProportionalSampler(CAPACITY, max_priority_within_buffer=True),
    "absolute": lambda: ProportionalSampler(CAPACITY, max_priority_within_buffer=True, td_error="absolute", eps=0.25),
    "reaper": lambda: ReaPERSampler(CAPACITY, omega=0.0, max_priority_within_buffer=True),
    "events, proportional": lambda: event_tables("proportional"),
    "events, reaper": lambda: event_tables("reaper"),
}
data_of = partial(rows, episode=5)


def buffer_of(name, compilable=False):
    return buffer_with(SAMPLERS[name](), CAPACITY, compilable=compilable, batch_size=BATCH)


class Naive:
    """|δ| + eps of each slot, None if it was never updated, and the priorities that new transitions got."""

    def __init__(self, eps):
        self.eps, self.stored, self.cursor, self.default = eps, {}, 0, 1.0
        self.new = {}

    def largest(self):
        updated = [d for d in self.stored.values() if d is not None]
        self.default = max(updated) if updated else self.default
        return self.default

    def write(self, count):
        slots = [(self.cursor + k) % CAPACITY for k in range(count)]
        self.cursor = (self.cursor + count) % CAPACITY
        for slot in slots:
            self.stored[slot] = None
        self.new |= dict.fromkeys(slots, self.largest())
        return slots

    def priorities(self):
        return torch.tensor([self.new[slot] if d is None else d for slot, d in sorted(self.stored.items())])

    def update(self, slots, errors):
        for slot, error in zip(slots, errors, strict=True):
            self.stored[slot] = error + self.eps
        self.largest()


def drive(buffer, *, update, absolute=False, steps=100):
    """After random writes and updates with outliers, the priorities of new rows are the naive maximum."""
    rng, sampler = random.Random(1), buffer.sampler
    naive = Naive(0.25 if absolute else 1e-6)
    fell = 0
    for _ in range(steps):
        before = naive.default
        buffer.extend(data_of(len(naive.write(rng.choice([1, 2, 4, 4, 4, CAPACITY + 3])))))
        assert_priorities(buffer, naive.priorities(), sampler.alpha)
        errors = [1e3 if rng.random() < 0.005 else rng.uniform(0.5, 2.0) for _ in range(BATCH)]
        index = update(buffer, torch.tensor(errors) if absolute else torch.tensor(errors).square())
        naive.update(index.tolist(), errors)
        fell += naive.default < before / 100
        assert float(sampler.stats()["max_priority"]) == pytest.approx(naive.default, rel=1e-6)
        sampler.check_valid()
    assert fell, "outliers were overwritten"


def sample_and_update(buffer, errors):
    batch = buffer.sample()
    # equal values for duplicates, so the order does not matter
    last = {int(slot): float(error) for slot, error in zip(batch["index"], errors, strict=True)}
    errors[:] = torch.tensor([last[int(slot)] for slot in batch["index"]])
    batch["td_error"] = errors
    buffer.update_tensordict_priority(batch)
    return batch["index"]


@pytest.mark.parametrize(("name", "compilable"), [("proportional", True), *((name, False) for name in SAMPLERS)])
def test_new_transitions_get_the_largest_priority_of_those_stored(name, compilable):
    drive(buffer_of(name, compilable), update=sample_and_update, absolute=name == "absolute")


@pytest.mark.parametrize("name", ["absolute", "events, reaper"])
def test_state_goes_on_where_it_was(name, tmp_path):
    buffer, other = buffer_of(name), buffer_of(name)
    drive(buffer, update=sample_and_update, absolute=name == "absolute")
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for restored in (other, copy.deepcopy(buffer)):
        assert_same_state(restored.sampler.state_dict(), buffer.sampler.state_dict())
        restored.sampler.check_valid()
        data = data_of(20)
        restored.extend(data.clone())
        expected = copy.deepcopy(buffer)
        expected.extend(data)
        assert_same_state(restored.sampler.state_dict(), expected.sampler.state_dict())
    buffer.empty()
    buffer.sampler.check_valid()
    buffer.extend(data_of(2))
    assert float(buffer.sampler.stats()["max_priority"]) == 1
    assert_priorities(buffer, torch.ones(2))


def test_without_it_the_largest_priority_ever_seen_stays():
    buffer = buffer_with(ProportionalSampler(4, eps=0.0, td_error="absolute"), 4)
    buffer.extend(data_of(4))
    buffer.update_priority(torch.arange(4), torch.tensor([1e4, 1.0, 1.0, 1.0]))
    buffer.extend(data_of(2))
    assert_priorities(buffer, torch.tensor([1e4, 1e4, 1.0, 1.0]), buffer.sampler.alpha)
