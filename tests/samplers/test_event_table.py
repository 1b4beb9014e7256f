"""EventTableSampler: mixtures of tables, allocations, priorities inside tables, and state."""

import math
import re

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from tests.data import buffer_with
from tests.events import scripted
from tests.samplers.event_tables import ETA, expected_mixture, filled, make, sampler_of, tables_of, update
from tests.samplers.experience import probabilities
from torchrl_replay_ext import Anneal, EventTableSampler, EventTableWriter
from torchrl_replay_ext.functional import allocate

# --- allocation


def test_systematic_counts_are_rounded_and_unbiased():
    eta = torch.tensor([0.5, 0.1, 0.0625, 0.0625, 0.0625, 0.1125, 0.1], dtype=torch.float64)
    torch.manual_seed(0)
    counts = torch.stack([allocate(eta, 32) for _ in range(4000)])
    share = 32 * eta
    assert (counts.sum(1) == 32).all()
    assert (counts >= share.floor()).all() and (counts <= share.ceil()).all()
    assert (counts[:, 2] == 2).all()
    torch.testing.assert_close(counts.double().mean(0), share, atol=0.05, rtol=0)


@pytest.mark.parametrize("u", [0.0, 0.5, 0.99999, 1 - 2**-24, 1 - 2**-53])
@pytest.mark.parametrize("batch_size", [32, 1024, 7000])
def test_systematic_counts_add_up_for_every_random_number(batch_size, u):
    for eta in ([0.5, 0.5], [1 / 7, 2 / 7, 4 / 7], [0.0, 0.25, 0.0, 0.75, 0.0]):
        eta = torch.tensor(eta, dtype=torch.float64)
        counts = allocate(eta, batch_size, u=torch.tensor(u, dtype=torch.float64))
        assert int(counts.sum()) == batch_size and not counts[eta == 0].any()
        assert ((counts - batch_size * eta).abs() < 1 + 1e-9).all()


def test_multinomial_counts_are_those_of_independent_rows():
    eta = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    torch.manual_seed(0)
    counts = torch.stack([allocate(eta, 32, "multinomial") for _ in range(4000)]).double()
    assert (counts.sum(1) == 32).all()
    torch.testing.assert_close(counts.mean(0), 32 * eta, atol=0.15, rtol=0)
    torch.testing.assert_close(counts.var(0), 32 * eta * (1 - eta), atol=0.5, rtol=0)


def test_largest_remainder_counts_do_not_change():
    assert allocate(torch.tensor([0.5, 0.2, 0.3]), 32, "largest_remainder").tolist() == [16, 6, 10]
    assert allocate(torch.tensor([1.0, 1.0, 1.0]), 32, "largest_remainder").tolist() == [11, 11, 10]


@pytest.mark.parametrize("method", ["systematic", "multinomial", "largest_remainder"])
def test_one_table_and_one_row(method):
    assert allocate(torch.tensor([3.0]), 7, method).tolist() == [7]
    assert int(allocate(torch.tensor([0.0, 0.4, 0.6]), 1, method).sum()) == 1
    assert allocate(torch.tensor([0.0, 1.0, 0.0]), 5, method).tolist() == [0, 5, 0]


def test_bad_allocations():
    with pytest.raises(ValueError, match="method must be 'systematic', 'multinomial' or 'largest_remainder'"):
        allocate(torch.ones(2), 4, "random")
    for batch_size in (0, 2.5):
        with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
            allocate(torch.ones(2), batch_size)
    for eta in ([0.0, 0.0], [1.0, -0.5], [math.nan, 1.0], [math.inf, 1.0]):
        for method in ("systematic", "multinomial", "largest_remainder"):
            with pytest.raises(ValueError, match="eta must be >= 0 and finite, and one of them > 0"):
                allocate(torch.tensor(eta), 4, method)


# --- which tables


def test_small_tables_are_left_out():
    rb = make(min_size=None, batch_size=10)
    data = scripted(40, p_event=0, p_done=0)
    data["next", "b"][[5, 12, 19, 26]] = True
    data["next", "a"][5] = True
    rb.extend(data)
    assert rb.sampler.tables.sizes() == {"default": 40, "a": 5, "b": 12}
    expected = expected_mixture(rb, {"default": 0.5 / 0.8, "b": 0.3 / 0.8})
    batch = rb.sample()
    assert (batch["table"] != 1).all()
    torch.testing.assert_close(batch["sample_probability"], expected[batch["index"]].float())
    torch.testing.assert_close(probabilities(rb), expected[:40])


def test_tables_that_can_never_be_used_cause_a_warning():
    """Once, for each size of batches; a smaller size may use the table."""
    rb = make(min_size=None, batch_size=None)
    rb.extend(scripted(40))
    with pytest.warns(UserWarning) as caught:
        rb.sample(21)
    # capacities are 12 and 20
    for (table, capacity), warning in zip({"a": 12, "b": 20}.items(), caught, strict=True):
        message = rf"table '{table}' is never drawn from: it holds at most {capacity} .* from 21 on"
        assert re.search(message, str(warning.message))
    for batch_size in (21, 12, 21):
        rb.sample(batch_size)


def test_only_the_default_table_where_no_other_will_do():
    rb = make(eta={"default": 0.0, "a": 0.5, "b": 0.5}, batch_size=8)
    rb.extend(scripted(10, p_event=0))
    batch = rb.sample()
    assert (batch["table"] == 0).all()
    torch.testing.assert_close(batch["sample_probability"], torch.full((8,), 0.1))


def test_eta_can_be_assigned_annealed_and_scheduled():
    rb = filled()
    rb.sampler.eta = {"default": 0.2, "a": 0.8, "b": 0.0}
    assert rb.sample()["table"].bincount(minlength=3).tolist() == [10, 40, 0]
    rb.sampler.event_share = 0.4
    assert rb.sampler.eta == pytest.approx({"default": 0.6, "a": 0.4, "b": 0.0})
    scheduler = LinearScheduler(rb, "event_share", final_value=0.9, num_steps=5)
    for _ in range(5):
        scheduler.step()
    assert rb.sampler.eta == pytest.approx({"default": 0.1, "a": 0.9, "b": 0.0})
    rb.sampler.eta = {"default": 0.69, "a": 0.05, "b": 0.26}
    rb.sampler.event_share = 1.0
    assert rb.sampler.eta["default"] == pytest.approx(0)
    eta = {"default": Anneal(1.0, 0.0, 10), "a": Anneal(0.0, 1.0, 10), "b": 0.0}
    rb = filled(eta=eta, batch_size=10)
    assert [rb.sample()["table"].sum().item() for _ in range(12)] == [*range(11), 10]
    loaded = filled(eta=eta, batch_size=10)
    loaded.sampler.load_state_dict(rb.sampler.state_dict())
    assert loaded.sample()["table"].sum().item() == 10


def test_shares_that_exceed_a_limit_by_rounding_are_the_limit():
    rb = filled(eta={"default": 1 + 1e-7, "a": -1e-7, "b": 0.0})
    assert rb.sampler.eta == {"default": 1.0, "a": 0.0, "b": 0.0}
    for value, share in ((1 + 2**-23, 1.0), (torch.tensor(-3e-8), 0.0)):
        rb.sampler.eta = {"default": 0.5, "a": 0.25, "b": 0.25}
        rb.sampler.event_share = value
        assert rb.sampler.event_share == pytest.approx(share, abs=1e-12)
    with pytest.raises(ValueError, match=r"must sum to 1, not 1\.000002"):
        rb.sampler.eta = {"default": 0.500002, "a": 0.25, "b": 0.25}


# --- priorities inside tables


@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_proportional_priorities_inside_tables(retention):
    torch.manual_seed(0)
    rb = filled(retention=retention, priority={"kind": "proportional", "alpha": 0.65, "beta": 0.4})
    delta = update(rb)
    before = rb.storage[:].clone()
    rb.extend(scripted(20, seed=9, p_event=0.2))
    # all new rows get the largest earlier priority
    delta[(rb.storage[:]["observation"] != before["observation"]).any(1)] = max(1.0, float(delta.max()))
    mass = (delta + 1e-6) ** 0.65
    expected = expected_mixture(rb, weights=mass)
    torch.testing.assert_close(probabilities(rb), expected[: len(rb)], atol=1e-7, rtol=1e-5)
    # corrects for the priorities inside the tables
    batch = rb.sample()
    weight = torch.zeros(50, dtype=torch.float64)
    for number, name in enumerate(ETA):
        members = rb.sampler.tables[name].index()
        rows = batch["table"] == number
        weight[rows] = (len(members) * mass[batch["index"][rows]] / mass[members].sum()) ** -0.4
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max()).float(), rtol=1e-4, atol=1e-6)


# --- state


def test_writer_and_sampler_built_apart_meet_through_the_storage():
    rb = buffer_with(sampler_of(tables_of()), 60, writer=EventTableWriter(tables_of()), batch_size=10)
    rb.extend(scripted(50, seed=1))
    assert rb.sampler.tables is rb.writer.tables
    assert rb.sample()["table"].bincount().tolist() == [5, 2, 3]
    other = sampler_of(tables_of(history=(6, 3)))
    rb = buffer_with(other, 60, writer=EventTableWriter(tables_of()), batch_size=8)
    with pytest.raises(ValueError, match="the buffer's writer has other tables"):
        rb.extend(scripted(10))


def test_stats_count_the_tables():
    stats_ = filled().sampler.stats()
    assert stats_["num_items"] == 60 and stats_["size_a"] == 12 and stats_["eta_b"] == pytest.approx(0.3)
    assert all(math.isfinite(value) for value in stats_.values())
    assert stats_["never_updated"] == 1
    rb = filled(retention="pinned", priority={"kind": "proportional"})
    held = rb.sampler.stored_slots()
    assert 28 <= len(held) < 60
    rb.update_priority(held[:7], torch.ones(7))
    stats_ = rb.sampler.stats()
    assert stats_["num_items"] == len(held)
    # slots that no table holds do not count
    assert stats_["never_updated"] == pytest.approx(1 - 7 / len(held))


def test_what_does_not_fit_together():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=sampler_of())
    with pytest.raises(RuntimeError, match=r"pass writer=EventTableWriter\(tables\)"):
        rb.extend(scripted(10))
    rb = make(correction="conditional")
    with pytest.raises(KeyError, match="no entry 'action'"):
        rb.extend(scripted(10))
    with pytest.raises(RuntimeError, match="empty"):
        make().sample()
    rb = make()
    assert isinstance(rb.sampler, EventTableSampler) and not isinstance(rb.sampler, RandomSampler)
    rb.extend(scripted(20))
    for value in (-0.1, 1.1, math.nan, True, "0.5", None):
        with pytest.raises(ValueError, match="event_share"):
            rb.sampler.event_share = value
