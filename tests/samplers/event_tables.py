"""Samplers with the event tables "a" and "b", and their expected probabilities."""

import torch

from tests.data import buffer_with
from tests.events import scripted
from torchrl_replay_ext import EventSpec, EventTables, EventTableSampler

ETA = {"default": 0.5, "a": 0.2, "b": 0.3}


def tables_of(retention="ring", default=20, a=12, b=20, history=(5, 3)):
    """Tables of the events "a" and "b" with these capacities and histories; ``default`` is used if pinned."""
    specs = [EventSpec(name, ("next", name), length) for name, length in zip("ab", history, strict=True)]
    capacity = {"a": a, "b": b} | ({"default": default} if retention == "pinned" else {})
    return EventTables(specs, capacity, retention=retention)


def sampler_of(tables=None, **arguments):
    """A sampler of these tables, by default those of ``tables_of``, which draws from all that are not empty."""
    tables = tables_of() if tables is None else tables
    return EventTableSampler(tables, **{"eta": ETA, "min_size": 1, **arguments})


def make(retention="ring", size=60, batch_size=50, **sampler):
    """An empty buffer; with pinned tables, ``size`` is the sum of all capacities."""
    return buffer_with(sampler_of(tables_of(retention, size - 32), **sampler), size, batch_size=batch_size)


def filled(**options):
    """A buffer after 150 random transitions."""
    rb = make(**options)
    rb.extend(scripted(150, seed=3, p_event=0.15))
    return rb


def expected_mixture(rb, eta=ETA, weights=None):
    """p(i) of each slot, from the lists of the tables; q is proportional to ``weights``, float64 [slots]."""
    probability = torch.zeros(rb.storage.max_size, dtype=torch.float64)
    for name, share in eta.items():
        index = rb.sampler.tables[name].index()
        q = torch.ones(len(index), dtype=torch.float64) if weights is None else weights[index]
        probability[index] += share * q / q.sum()
    return probability


def with_pairs(data):
    """Give ``data`` [n] one of 6 pairs of observation and action in each row."""
    generator = torch.Generator().manual_seed(0)
    data["observation"] = torch.randint(3, (len(data), 1), generator=generator).float()
    data["action"] = torch.randint(2, (len(data),), generator=generator)
    return data


def update(rb, seed=0):
    """Update all priorities by random TD errors; returns their absolute values, float64 [slots]."""
    delta = torch.rand(len(rb), generator=torch.Generator().manual_seed(seed)) + 0.05
    rb.update_priority(torch.arange(len(rb)), delta**2)
    return torch.nn.functional.pad(delta.double(), (0, rb.storage.max_size - len(rb)))
