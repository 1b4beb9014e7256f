"""EventTableSampler: mixtures of tables, allocations, corrections, priorities inside tables, state and bad input."""

import math
import pickle
import re

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler
from torchrl.data.replay_buffers.scheduler import LinearScheduler

from tests.chi_square import p_value
from tests.data import buffer_with, event_sampler
from tests.emulated_device import EmulatedDevice
from tests.events import NaiveTables, scripted
from tests.samplers.experience import assert_same_state
from torchrl_replay_ext import (
    Anneal,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
)
from torchrl_replay_ext.functional import allocate, reliability

ETA = {"default": 0.5, "a": 0.2, "b": 0.3}


def tables_of(retention="ring", default=20, a=12, b=20, history=(5, 3)):
    """Tables of the events "a" and "b" with these capacities and histories; ``default`` is used if pinned."""
    specs = [EventSpec(name, ("next", name), length) for name, length in zip("ab", history, strict=True)]
    capacity = {"a": a, "b": b} | ({"default": default} if retention == "pinned" else {})
    return EventTables(specs, capacity, retention=retention)


def make(retention="ring", size=60, batch_size=50, generator=None, **sampler):
    sampler = EventTableSampler(tables_of(retention, size - 32), **{"eta": ETA, "min_size": 1, **sampler})
    return buffer_with(sampler, size, batch_size=batch_size, priority_key="td_error", generator=generator)


def filled(count=150, **options):
    rb = make(**options)
    if not count:
        return rb
    rb.extend(scripted(count, seed=3, p_event=0.15, streams=options.get("streams", 1)))
    return rb


def expected_mixture(rb, eta=ETA, weights=None):
    """p(i) of each slot, from the lists of the tables; q is proportional to ``weights``, float64 [slots]."""
    probability = torch.zeros(rb.storage.max_size, dtype=torch.float64)
    for name, share in eta.items():
        index = rb.sampler.tables[name].index()
        q = torch.ones(len(index), dtype=torch.float64) if weights is None else weights[index]
        probability[index] += share * q / q.sum()
    return probability


def draw(rb, draws=50_000):
    batches = [rb.sample() for _ in range(draws // rb.batch_size)]
    return torch.cat([b["index"] for b in batches]), torch.cat([b["table"] for b in batches]), batches


@pytest.mark.parametrize("retention", ["ring", "pinned"])
@pytest.mark.parametrize("allocation", ["systematic", "multinomial", "largest_remainder"])
def test_draws_follow_the_mixture_and_the_test_can_fail(retention, allocation):
    torch.manual_seed(0)
    rb = filled(retention=retention, allocation=allocation)
    expected = expected_mixture(rb)
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected[: len(rb)])
    index, table, batches = draw(rb)
    assert p_value(index, expected) > 1e-4
    assert p_value(index, expected_mixture(rb, {"default": 0.6, "a": 0.15, "b": 0.25})) < 1e-4
    for number, name in enumerate(ETA):
        members = torch.zeros(60, dtype=torch.float64)
        members[rb.sampler.tables[name].index()] = 1
        assert p_value(index[table == number], members / members.sum()) > 1e-4
    batch = batches[0]
    torch.testing.assert_close(batch["sample_probability"], expected[batch["index"]].float())
    assert (batch["priority_weight"] == 1).all() and batch["priority_weight"].dtype == torch.float32
    if allocation != "multinomial":
        assert batch["table"].bincount(minlength=3).tolist() == [25, 10, 15]


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
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected[:40])


def test_tables_that_can_never_be_used_cause_a_warning():
    """Once, for each size of batches; a smaller size may use the table."""
    rb = make(min_size=None)
    rb.extend(scripted(40))
    capacity = {table: rb.sampler.tables[table].capacity for table in ("a", "b")}
    words = rf"table '{{}}' is never drawn from: it holds at most {{}} .* from {max(capacity.values()) + 1} on"
    sampler, storage = rb.sampler, rb.storage
    with pytest.warns(UserWarning) as caught:
        sampler.sample(storage, max(capacity.values()) + 1)
    found = [str(warning.message) for warning in caught]
    assert len(found) == 2
    for table, message in zip(("a", "b"), found, strict=True):
        assert re.search(words.format(table, capacity[table]), message)
    sampler.sample(storage, max(capacity.values()) + 1)
    sampler.sample(storage, min(capacity.values()))
    sampler.sample(storage, max(capacity.values()) + 1)


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
    state = rb.sampler.state_dict()
    other = filled(eta=eta, batch_size=10)
    other.sampler.load_state_dict(state)
    assert other.sample()["table"].sum().item() == 10


def test_shares_that_exceed_a_limit_by_rounding_are_the_limit():
    rb = filled(eta={"default": 1 + 1e-7, "a": -1e-7, "b": 0.0})
    assert rb.sampler.eta == {"default": 1.0, "a": 0.0, "b": 0.0}
    rb.sampler.eta = {"default": 0.5, "a": 0.25, "b": 0.25}
    for value, share in ((1 + 2**-23, 1.0), (torch.tensor(-3e-8), 0.0)):
        rb.sampler.eta = {"default": 0.5, "a": 0.25, "b": 0.25}
        rb.sampler.event_share = value
        assert rb.sampler.event_share == pytest.approx(share, abs=1e-12)
    with pytest.raises(ValueError, match=r"must sum to 1, not 1\.000002"):
        rb.sampler.eta = {"default": 0.500002, "a": 0.25, "b": 0.25}


# --- corrections


def two_outcomes(count=4000, **sampler):
    """One (s, a) with two outcomes, where z = 1 is an event (the example of the paper), and another (s, a)."""
    torch.manual_seed(1)
    z = torch.arange(count) % 2
    other = torch.arange(count) % 5 == 4
    obs = torch.where(other, 7.0, 3.0)
    data = TensorDict(
        {
            "observation": obs.unsqueeze(1),
            "action": other.long(),
            "z": z,
            "next": {"done": torch.ones(count, 1, dtype=torch.bool), "hit": (z == 1) & ~other},
        },
        [count],
    )
    rb = buffer_with(event_sampler(count, ("next", "hit"), 1, name="hit", **sampler), count, batch_size=2000)
    rb.extend(data)
    return rb


def weighted_share(rb):
    """The weighted share of z = 1 in the draws of the first (s, a), and the weighted share of the first (s, a)."""
    samples = torch.cat([rb.sample() for _ in range(100)])
    first = samples["action"] == 0
    weight = samples["priority_weight"].double()
    share = (weight * (samples["z"] == 1))[first].sum() / weight[first].sum()
    return float(share), float(weight[first].sum() / weight.sum())


def test_corrections_of_the_sources_example():
    """With half of the outcomes events and η = .5, .75 of the draws are events without correction; .5 is correct."""
    assert weighted_share(two_outcomes())[0] == pytest.approx(0.777, abs=0.01)
    # |B| = 4000, of which 1600 are events and 1600 others of the same pair
    inside, outside = 0.5 / 1600 + 0.5 / 4000, 0.5 / 4000
    assert inside / (inside + outside) == pytest.approx(0.777, abs=1e-3)
    for correction in ("conditional", "mixture", "priority"):
        share, of_pair = weighted_share(two_outcomes(correction=correction))
        assert share == pytest.approx(0.5, abs=0.01), correction
        # the over-sampling of the pair remains, or is removed
        expected = 0.5 + 0.5 * 0.8 if correction == "conditional" else 0.8
        assert of_pair == pytest.approx(expected, abs=0.01), correction


def test_lemma_2_as_printed():
    """w = 1 - η P_out inside, 1 / (1 - η) outside: .5294 instead of .5 where .75 of the draws are events."""
    count = 4000
    rb = two_outcomes(count, correction="lemma2")
    batch = rb.sample()
    inside = (batch["z"] == 1) & (batch["action"] == 0)
    w_in, w_out = 1 - 0.5 * 0.5, 1 / (1 - 0.5)
    torch.testing.assert_close(batch["priority_weight"][inside].unique(), torch.tensor([w_in / w_out]))
    torch.testing.assert_close(batch["priority_weight"][~inside].unique(), torch.tensor([1.0]))
    assert 0.75 * w_in / (0.75 * w_in + 0.25 * w_out) == pytest.approx(0.5294, abs=1e-4)


def test_priority_correction_draws_by_membership():
    torch.manual_seed(0)
    rb = two_outcomes(correction="priority")
    inside = torch.zeros(4000, dtype=torch.bool)
    inside[rb.sampler.tables["hit"].index()] = True
    p = 1 + 0.5 * (2.0 * inside.double() - 1)
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), p / p.sum())
    batch = rb.sample()
    assert (batch["table"] == 0).all()
    torch.testing.assert_close(
        batch["priority_weight"], torch.where(inside[batch["index"]], (1 - 0.5) / (1 + 0.5), 1.0).float()
    )
    rb.sampler.eta = {"default": 0.8, "hit": 0.2}
    p = 1 + 0.2 * (2.0 * inside.double() - 1)
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), p / p.sum(), atol=1e-9, rtol=1e-6)


def assert_weights_of_pairs(rb):
    """m of each slot is the mean of p over the slots with the same (s, a), found by comparing all pairs."""
    sizes = rb.sampler.tables.sizes()
    shares = {name: share for name, share in ETA.items() if sizes[name]}
    p = expected_mixture(rb, {name: share / sum(shares.values()) for name, share in shares.items()})[: len(rb)]
    pair = rb.storage[:]["observation"][:, 0] * 10 + rb.storage[:]["action"]
    same = (pair.unsqueeze(0) == pair.unsqueeze(1)).double()
    batch = rb.sample()
    weight = ((same @ p) / same.sum(1) / p)[batch["index"]]
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max()).float())


def with_pairs(data):
    """Give ``data`` [n] one of 6 pairs of observation and action in each row."""
    generator = torch.Generator().manual_seed(0)
    data["observation"] = torch.randint(3, (len(data), 1), generator=generator).float()
    data["action"] = torch.randint(2, (len(data),), generator=generator)
    return data


@pytest.mark.parametrize(("streams", "p_event"), [(1, 0.2), (5, 0.2), (5, 0.04)])
def test_pairs_are_counted_through_everything_that_happens_to_tables(streams, p_event):
    rb = make(size=40, correction="conditional", batch_size=20)
    data = with_pairs(scripted(400, seed=8, p_event=p_event, streams=streams))
    generator = torch.Generator().manual_seed(1)
    first = 0
    while first < 400:
        step = int(torch.randint(1, 30, (), generator=generator))
        rb.extend(data[first : first + step].clone())
        first += step
        if step % 3 == 0:
            rb.mark_update(torch.arange(3, min(9, len(rb))))
        rb.sampler.check_valid()
        assert_weights_of_pairs(rb)
    # a pair that appears later
    rb.set_sampler(EventTableSampler(rb.sampler.tables, eta=ETA, min_size=1, correction="conditional"))
    assert_weights_of_pairs(rb)


def test_schedules_of_beta_count_batches_without_priorities():
    rb = filled(correction="mixture", beta=Anneal(0.2, 1.0, 4))
    for expected in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0):
        assert rb.sampler.beta == pytest.approx(expected)
        rb.sample()


def test_exponents_without_effect_do_not_exist():
    plain, corrected, prioritized = make(), make(correction="mixture"), make(priority={"kind": "rank"})
    for rb, name, needed in ((plain, "alpha", "priority="), (corrected, "alpha", "priority=")):
        with pytest.raises(AttributeError, match=f"has no {name}; it needs {needed}"):
            setattr(rb.sampler, name, 0.5)
    with pytest.raises(AttributeError, match="has no beta; it needs correction= or priority="):
        plain.sampler.beta = 0.5
    assert {"alpha", "beta"}.isdisjoint(plain.sampler.stats().keys())
    assert corrected.sampler.beta == 1.0
    for beta in (0.5, Anneal(0.4, 1.0, 10)):
        for priority in (None, {"kind": "proportional"}):
            with pytest.raises(ValueError, match=r"beta is the exponent of correction=; .*priority=dict"):
                make(beta=beta, priority=priority)
    assert (prioritized.sampler.alpha, prioritized.sampler.beta) == (0.7, 0.5)


def test_mixture_makes_the_expected_loss_that_of_uniform_replay():
    """Σ_i p_i · loss_i / (n p_i) is the mean of the losses."""
    rb = filled(correction="mixture")
    batch = rb.sample()
    weight = 1 / batch["sample_probability"].double()
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max()).float())
    rb.sampler.beta = 0.4
    batch = rb.sample()
    weight = batch["sample_probability"].double() ** -0.4
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max()).float())


def naive_class_weights(naive, eta, priority):
    """w of each stored transition up to a factor, from plain lists; w and ``priority`` are indexed by number."""
    tables = {"default": list(naive.default), **{name: list(table) for name, table in naive.tables.items()}}
    stored = naive.stored()
    rate, drawn = {}, {}
    for label in {frozenset(naive.entered[number]) for number in stored}:
        members = [number for number in stored if naive.entered[number] == label]
        complete_from = 1 + min(naive.dropped[name] for name in ("default", *label))
        rate[label] = len(members) / (naive.count - complete_from)
        drawn[label] = sum(
            eta[name] * sum(naive.entered[number] == label for number in table) / len(table)
            for name, table in tables.items()
        )
    weights = {}
    for number in stored:
        label = frozenset(naive.entered[number])
        holding = {name: table for name, table in tables.items() if number in table}
        evenly = sum(eta[name] / len(table) for name, table in holding.items())
        by_priority = sum(
            eta[name] * priority[number] / sum(priority[other] for other in table) for name, table in holding.items()
        )
        weights[number] = rate[label] / drawn[label] * evenly / by_priority
    return weights


@pytest.mark.parametrize("kind", [None, "proportional"])
def test_mixture_weighs_classes_by_how_often_they_were_written_where_tables_pin(kind):
    specs, capacity = [("a", 4, "a"), ("b", 2, "b")], {"default": 40, "a": 15, "b": 50}
    tables = tables_of("pinned", history=(4, 2), **capacity)
    sampler = EventTableSampler(
        tables, eta=ETA, min_size=1, correction="mixture", priority=kind and {"kind": kind, "alpha": 1.0}
    )
    rb = buffer_with(sampler, 105, batch_size=200)
    naive, data = NaiveTables(specs, capacity), scripted(900, streams=3, p_event=0.06, seed=5)
    for first in range(0, 900, 7):
        naive.extend(data[first : first + 7])
        rb.extend(data[first : first + 7].clone())
        if first % 70 or not min(tables.sizes().values()):
            continue
        rb.sampler.check_valid()
        live = torch.cat([tables[name].index() for name in tables]).unique()
        mass = torch.ones(105)
        if kind is not None:
            mass = 0.1 + torch.rand(105)
            rb.update_priority(live, (mass[live] - 1e-6) ** 2)
        batch = rb.sample()
        # no update of the batch follows
        rb.sampler.state.log.draws.zero_()
        number_of_slot = rb.storage[:]["number"]
        priority = {int(number_of_slot[slot]): float(mass[slot]) for slot in range(len(rb))}
        expected = naive_class_weights(naive, ETA, priority)
        expected = torch.tensor([expected[number] for number in batch["number"].tolist()])
        torch.testing.assert_close(batch["priority_weight"], expected / expected.max(), rtol=1e-4, atol=1e-6)
    assert set(naive.dropped.values()).isdisjoint({-1}), "every table has dropped something"


def outcomes(retention, correction):
    """Mean and error over batches of the weighted shares of four outcomes of one (s, a): no event, a, b, both."""
    torch.manual_seed(0)
    tables = tables_of(retention, default=300, a=150, b=450, history=(1, 1))
    rb = buffer_with(EventTableSampler(tables, eta=ETA, min_size=1, correction=correction), 900, batch_size=200)
    shares = []
    for step in range(400):
        z = torch.multinomial(torch.tensor(OUTCOMES), 300, replacement=True)
        done = torch.ones(300, 1, dtype=torch.bool)
        rb.extend(TensorDict({"z": z, "next": {"a": z % 2 == 1, "b": z >= 2, "done": done}}, [300]))
        if step >= 50:
            batch = rb.sample()
            weight = batch["priority_weight"].double()
            shares.append(torch.zeros(4, dtype=torch.float64).index_add_(0, batch["z"], weight) / weight.sum())
    shares = torch.stack(shares)
    return shares.mean(0), shares.std(0) / math.sqrt(len(shares))


OUTCOMES = (0.85, 0.05, 0.05, 0.05)


@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_mixture_gives_each_outcome_its_probability_however_long_tables_keep_it(retention):
    """The default table keeps 300 transitions, table a its entries of about 1500 steps, table b of 4500."""
    truth = torch.tensor(OUTCOMES, dtype=torch.float64)
    mean, error = outcomes(retention, "mixture")
    # successive batches are drawn from almost the same transitions
    assert ((mean - truth).abs() < 8 * error).all() and ((mean - truth).abs() < 0.01).all(), mean
    mean, _ = outcomes(retention, None)
    assert ((mean - truth).abs() > 0.03).all(), "without correction they are biased"


def test_class_counts_follow_tables_through_all_that_happens_to_them():
    rb = make("pinned", size=80, correction="mixture")
    with pytest.raises(ValueError, match="needs tables of retention='ring'"):
        EventTableSampler(rb.sampler.tables, eta=ETA, correction="conditional")
    data = scripted(600, seed=4, p_event=0.1, streams=2)
    for number, rows in enumerate(data.split(20)):
        if number == 10:
            rb.sampler.tables["b"].capacity = 9
        elif number == 15:
            rb.sampler.tables["b"].capacity = 20
            rb.mark_update(torch.arange(5))
        elif number == 20:
            rb.set_sampler(EventTableSampler(rb.sampler.tables, eta=ETA, min_size=1, correction="mixture"))
        elif number == 25:
            rb = pickle.loads(pickle.dumps(rb))
        elif number == 28:
            rb.empty()
        rb.extend(rows.clone())
        rb.sampler.check_valid()
        weight = rb.sample()["priority_weight"]
        # also of a sampler that was attached later
        assert weight.isfinite().all() and weight.max() == 1 and (weight > 0).all()


def test_too_many_sets_of_pinned_tables_are_refused():
    names = [f"e{number}" for number in range(17)]
    tables = EventTables(
        [EventSpec(name, ("next", name), 1) for name in names],
        dict.fromkeys(["default", *names], 2),
        retention="pinned",
    )
    eta = {"default": 1.0} | dict.fromkeys(names, 0.0)
    with pytest.raises(ValueError, match="for at most 16"):
        EventTableSampler(tables, eta=eta, correction="mixture")
    EventTableSampler(tables, eta=eta)


# --- priorities inside tables


def update(rb, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(len(rb))
    delta = torch.rand(len(rb), generator=generator) + 0.05
    rb.update_priority(slots, delta**2)
    return torch.zeros(rb.storage.max_size, dtype=torch.float64).index_copy_(0, slots, delta.double())


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
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected[: len(rb)], atol=1e-7, rtol=1e-5)
    index, _, batches = draw(rb)
    assert p_value(index, expected) > 1e-4
    assert p_value(index, expected_mixture(rb, weights=delta**0.3)) < 1e-4
    # corrects for the priorities inside the tables
    batch = batches[0]
    weight = torch.zeros(50, dtype=torch.float64)
    for number, name in enumerate(ETA):
        members = rb.sampler.tables[name].index()
        rows = batch["table"] == number
        weight[rows] = (len(members) * mass[batch["index"][rows]] / mass[members].sum()) ** -0.4
    torch.testing.assert_close(batch["priority_weight"], (weight / weight.max()).float(), rtol=1e-4, atol=1e-6)


def test_rank_based_priorities_inside_tables():
    torch.manual_seed(0)
    rb = filled(priority={"kind": "rank", "alpha": 0.7})
    # no ties
    delta = 1.02 ** torch.randperm(60).double()
    rb.update_priority(torch.arange(60), delta**2)
    expected = torch.zeros(60, dtype=torch.float64)
    for name, share in ETA.items():
        members = rb.sampler.tables[name].index()
        rank = delta[members].argsort(descending=True).argsort() + 1
        q = rank.double() ** -0.7
        expected[members] += share * q / q.sum()
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected, atol=1e-7, rtol=1e-6)
    index, *_ = draw(rb)
    assert p_value(index, expected) > 1e-4


@pytest.mark.parametrize("omega", [0.2, 12.0])
def test_reliabilities_inside_tables(omega):
    torch.manual_seed(0)
    rb = make(priority={"kind": "reaper", "alpha": 0.5, "omega": omega}, min_size=1)
    data = scripted(150, seed=3, p_event=0.15, p_done=0.2)
    rb.extend(data)
    delta = update(rb)
    d = delta + 1e-6
    number = rb.storage[:]["number"]
    order = number.argsort()
    trajectory = rb.storage[:]["collector", "traj_ids"]
    finished = torch.isin(trajectory, trajectory[rb.storage[:]["next", "done"].squeeze(-1)])
    ratio = torch.zeros(60, dtype=torch.float64)
    ratio[order] = reliability(d[order], trajectory[order], finished[order])
    psi = ratio**omega * d**0.5
    expected = expected_mixture(rb, weights=psi)
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), expected, atol=1e-6, rtol=1e-4)
    index, _, batches = draw(rb)
    if omega < 10:
        assert p_value(index, expected) > 1e-4
        assert p_value(index, expected_mixture(rb, weights=d**0.5)) < 1e-4
        batch = batches[-1]
        error = (batch["sample_probability"] / expected[batch["index"]].float()).log().abs().max()
        assert error < 0.15, "estimated from proposals"
    else:
        # almost no proposal is accepted, so all Ψ are computed
        counts = index.bincount(minlength=60) / len(index)
        assert (counts - expected).abs().max() < 0.01


def test_omega_can_be_scheduled():
    rb = filled(priority={"kind": "reaper", "omega": 0.2})
    LinearScheduler(rb, "omega", final_value=0.9, num_steps=1).step()
    assert rb.sampler.omega == pytest.approx(0.9) and float(rb.sampler.stats()["omega"]) == pytest.approx(0.9)
    with pytest.raises(AttributeError, match="kind='reaper'"):
        _ = filled().sampler.omega


def test_a_refused_write_leaves_no_entry_behind():
    rb = make(priority={"kind": "reaper"}, size=40)
    data = scripted(40, p_event=0, p_done=0)
    data["next", "a"][[4, 30]] = True
    rb.extend(data)
    bad = scripted(6, p_event=0, p_done=0)
    bad["collector", "traj_ids"] = torch.arange(6) % 2
    with pytest.raises(ValueError, match="num_streams"):
        rb.extend(bad)
    assert rb.sampler.tables["a"].index().tolist() == [26, 27, 28, 29, 30]
    # the rows that the rejected ones have replaced are gone, and the next write begins where the rejected one did
    rb.extend(scripted(2, p_event=0, p_done=0))
    assert set(rb.sample()["index"].tolist()) <= {0, 1, *range(6, 40)}


# --- state


def test_writer_and_sampler_built_apart_meet_through_the_storage():
    def tables():
        return EventTables([EventSpec("a", ("next", "a"), 5)], {"a": 12})

    eta = {"default": 0.5, "a": 0.5}
    sampler = EventTableSampler(tables(), eta=eta, min_size=1)
    rb = buffer_with(sampler, 60, writer=EventTableWriter(tables()), batch_size=8)
    rb.extend(scripted(50, seed=1))
    assert sampler.tables is rb.writer.tables
    assert (rb.sample()["table"] == 1).sum() == 4
    other = EventTables([EventSpec("a", ("next", "a"), 6)], {"a": 12})
    rb = buffer_with(EventTableSampler(other, eta=eta), 60, writer=EventTableWriter(tables()), batch_size=8)
    with pytest.raises(ValueError, match="the buffer's writer has other tables"):
        rb.extend(scripted(10))


def test_stats_count_the_tables():
    stats_ = filled().sampler.stats()
    assert stats_["num_items"] == 60 and stats_["size_a"] == 12 and stats_["eta_b"] == pytest.approx(0.3)
    assert all(math.isfinite(value) for value in stats_.values())
    assert stats_["never_updated"] == 1
    rb = filled(retention="pinned", priority={"kind": "proportional"})
    held = rb.sampler.state.distribution.stored_slots()
    assert 28 <= len(held) < 60
    rb.update_priority(held[:7], torch.ones(7))
    stats_ = rb.sampler.stats()
    assert stats_["num_items"] == len(held)
    # slots that no table holds do not count
    assert stats_["never_updated"] == pytest.approx(1 - 7 / len(held))


@pytest.mark.parametrize(
    ("kind", "alone"), [("proportional", ProportionalSampler), ("rank", RankBasedSampler), ("reaper", ReaPERSampler)]
)
def test_the_exponents_are_by_default_those_of_the_sampler_of_the_same_kind(kind, alone):
    inside, outside = make(priority={"kind": kind}).sampler, alone()
    assert inside.hyperparameters.keys() == outside.hyperparameters.keys()
    for name in inside.hyperparameters:
        assert getattr(inside, name) == getattr(outside, name)


@pytest.mark.parametrize("priority", [None, "reaper"])
def test_a_row_that_is_added_is_as_new_as_one_of_extend(priority):
    """After ``add``, TorchRL passes the default priority to the sampler, with a number as the index."""
    data = scripted(30)
    buffers = [make(priority=priority and {"kind": priority, "beta": Anneal(0.4, 1.0, 100)}) for _ in range(2)]
    for buffer in buffers:
        buffer.extend(data[:20])
        if priority:
            buffer.update_priority(torch.arange(20), torch.linspace(0.1, 5.0, 20))
    for row in data[20:]:
        buffers[0].add(row)
        buffers[1].extend(row.unsqueeze(0))
    added, extended = (buffer.sampler for buffer in buffers)
    assert_same_state(added.state_dict(), extended.state_dict())
    torch.testing.assert_close(
        added.probabilities(buffers[0].storage), extended.probabilities(buffers[1].storage), rtol=0, atol=0
    )


@pytest.mark.parametrize("parts", [("storage", "writer", "sampler"), ("sampler", "storage", "writer")])
@pytest.mark.parametrize("options", [{"correction": "conditional"}, {"priority": {"kind": "proportional"}}])
def test_tables_and_sampler_can_be_loaded_in_any_order(options, parts):
    buffers = [make(**options) for _ in range(2)]
    for rb, count in zip(buffers, (150, 90), strict=True):
        rb.extend(with_pairs(scripted(count, seed=count, p_event=0.15)))
        if "priority" in options:
            update(rb, seed=count)
    for part in parts:
        first, second = (getattr(rb, part) for rb in buffers)
        second.load_state_dict(first.state_dict())
    ours, theirs = (rb.sampler.probabilities(rb.storage) for rb in buffers)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    buffers[1].sampler.check_valid()
    if "correction" in options:
        assert_weights_of_pairs(buffers[1])


@pytest.mark.parametrize("kind", [None, "reaper"])
def test_loading_the_state_of_a_buffer_that_was_never_written_to(kind):
    rb = filled(priority=kind and {"kind": kind})
    rb.load_state_dict(make(priority=kind and {"kind": kind}).state_dict())
    assert len(rb) == 0 and rb.sampler.tables.sizes() == {"default": 0, "a": 0, "b": 0}
    rb.extend(scripted(100, seed=1))
    expected = filled(count=0, priority=kind and {"kind": kind})
    expected.extend(scripted(100, seed=1))
    probabilities = [each.sampler.probabilities(each.storage) for each in (rb, expected)]
    torch.testing.assert_close(*probabilities)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": {"default": 0.5, "a": 0.5}}, r"eta names \['a', 'default'\], but the tables are"),
        ({"eta": {**ETA, "c": 0.0}}, "eta names"),
        ({"eta": {"default": 0.5, "a": 0.2, "b": 0.2}}, "must sum to 1, not 0.9"),
        ({"eta": {"default": 1.5, "a": -0.5, "b": 0.0}}, r"every eta must be in \[0, 1\]"),
        ({"eta": {"default": math.nan, "a": 0.5, "b": 0.5}}, r"every eta must be in \[0, 1\]"),
        ({"eta": {"default": Anneal(0.5, 0.6, 9), "a": 0.2, "b": 0.3}}, "at the end of their schedules"),
        (
            {"eta": {"default": Anneal(0.5, 0.6, 9), "a": Anneal(0.2, 0.1, 8), "b": 0.3}},
            "must have the same num_updates",
        ),
        ({"min_size": 0}, "must be an integer >= 1"),
        ({"min_size": {"x": 3}}, r"min_size names \['x'\]"),
        ({"allocation": "fair"}, "allocation must be 'systematic', 'multinomial' or 'largest_remainder'"),
        ({"correction": "none"}, "correction must be None, 'mixture', 'conditional', 'lemma2' or 'priority'"),
        ({"correction": "some"}, "correction must be None"),
        ({"priority": {"kind": "magic"}}, "kind must be one of proportional, rank, reaper"),
        ({"priority": {"kind": "rank", "eps": 1.0}}, "has the entries alpha, beta, td_error, not eps"),
        ({"priority": {"kind": "proportional", "alpha": -1.0}}, "alpha must be >= 0"),
        ({"priority": {"kind": "reaper", "truncated": "maybe"}}, "truncated must be"),
        ({"correction": "lemma2", "priority": {"kind": "rank"}}, "does not support priorities inside"),
        ({"correction": "mixture", "priority": {"kind": "rank", "beta": 0.5}}, "its exponent is beta="),
        ({"beta": 1.5, "correction": "mixture"}, r"beta must be in \[0, 1\]"),
        ({"beta": 1.5}, "beta is the exponent of correction="),
        ({"priority": {"kind": ["rank"]}}, "kind must be one of"),
        ({"correction": "priority", "eta": {"default": Anneal(1, 0, 5), "a": Anneal(0, 1, 5), "b": 0}}, "annealed"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        EventTableSampler(tables_of(), **{"eta": ETA, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": 0.5}, "eta must be a dict"),
        ({"eta": {**ETA, "a": "0.2"}}, "every eta must be a number or Anneal"),
        ({"eta": {"default": True, "a": False, "b": False}}, "every eta must be a number or Anneal"),
        ({"priority": "proportional"}, "priority must be a dict"),
        ({"beta": "1", "correction": "mixture"}, "beta must be a number"),
        ({"beta": True, "correction": "mixture"}, "beta must be a number"),
        ({"correction": "conditional", "pair_keys": "observation"}, "pair_keys must be a tuple of the names"),
        ({"correction": "conditional", "pair_keys": ()}, "pair_keys must be a tuple of the names"),
    ],
)
def test_arguments_of_the_wrong_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        EventTableSampler(tables_of(), **{"eta": ETA, **arguments})


@pytest.mark.parametrize("arguments", [{"correction": "conditional"}, {"priority": {"kind": "reaper"}}])
def test_what_pinned_tables_cannot_do(arguments):
    with pytest.raises(ValueError, match="needs tables of retention='ring'"):
        EventTableSampler(tables_of("pinned"), eta=ETA, **arguments)


def test_what_does_not_fit_together():
    with pytest.raises(TypeError, match="tables must be EventTables"):
        EventTableSampler({"a": 3}, eta=ETA)
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), sampler=EventTableSampler(tables_of(), eta=ETA))
    with pytest.raises(RuntimeError, match=r"pass writer=EventTableWriter\(tables\)"):
        rb.extend(scripted(10))
    rb = make(correction="conditional")
    with pytest.raises(KeyError, match="no entry 'action'"):
        rb.extend(scripted(10))
    with pytest.raises(RuntimeError, match="empty"):
        make().sample()
    rb = make()
    assert isinstance(rb.sampler, EventTableSampler) and not isinstance(rb.sampler, (RandomSampler, ReaPERSampler))
    rb.extend(scripted(20))
    for value in (-0.1, 1.1, math.nan, True, "0.5", None):
        with pytest.raises(ValueError, match="event_share"):
            rb.sampler.event_share = value


# --- accelerators

# the files of event tables
TABLE_FILES = (
    *("core/event_", "core/pair_counts", "writers/event_"),
    *("samplers/event_table_mixture", "samplers/table_", "samplers/within_table"),
)
ON_DEVICE = [("ring", None, "conditional"), ("ring", "reaper", None), ("pinned", "proportional", "mixture")]


def learn(rb):
    batch = rb.sample()
    if rb.sampler.takes_priorities:
        batch["td_error"] = torch.linspace(0.1, 2.0, len(batch), device="emulated")
        rb.update_tensordict_priority(batch)


@pytest.mark.parametrize(("retention", "kind", "correction"), ON_DEVICE)
def test_on_an_accelerator_a_write_reads_the_data_once_and_draws_and_updates_read_nothing(retention, kind, correction):
    priority = kind and {"kind": kind} | ({"num_streams": 2} if kind == "reaper" else {})
    arguments = {"eta": ETA, "min_size": 1, "correction": correction, "priority": priority}
    with EmulatedDevice("torchrl_replay_ext") as device:
        sampler = EventTableSampler(tables_of(retention, 28), **arguments)
        rb = buffer_with(sampler, 60, compilable=True, device="emulated", batch_size=16)
        # evictions, full lists and sorts occur in the second half
        data = with_pairs(scripted(240, streams=2, seed=3, p_event=0.15)).to("emulated")
        for part in data[:120].split(20):
            rb.extend(part)
            learn(rb)

        def waits():
            found = {wait: n for wait, n in device.waits.items() if any(name in wait[1] for name in TABLE_FILES)}
            device.reset()
            return found

        device.reset()
        for part in data[120:].split(8):
            rb.extend(part)
            ((kind_of_wait, place), count), *others = waits().items()
            assert (kind_of_wait, count, others) == ("copy to the CPU", 1, []) and "writers/event_table" in place
            learn(rb)
            assert not waits()
        rb.sampler.check_valid()
