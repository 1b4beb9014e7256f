"""Corrections of EventTableSampler: importance weights, counts of pairs and of classes, and their schedules."""

import pytest
import torch

from tests.data import buffer_with, event_sampler, rows
from tests.events import scripted
from tests.samplers.event_tables import ETA, expected_mixture, filled, make, sampler_of, update, with_pairs
from tests.samplers.experience import probabilities
from torchrl_replay_ext import Anneal


def two_outcomes(count=4000, **sampler):
    """One (s, a) with two outcomes, where z = 1 is an event (the example of the paper), and another (s, a)."""
    torch.manual_seed(1)
    z = torch.arange(count) % 2
    other = torch.arange(count) % 5 == 4
    obs = torch.where(other, 7.0, 3.0)
    data = rows(count, episode=1, observation=obs.unsqueeze(1), action=other.long(), z=z)
    data["next", "hit"] = (z == 1) & ~other
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
    """Of the 4000 transitions, 1600 are events, and 1600 are other outcomes of the same pair."""
    # .5 / 1600 + .5 / 4000 against .5 / 4000
    assert weighted_share(two_outcomes())[0] == pytest.approx(0.777, abs=0.01)
    for correction in ("conditional", "mixture", "priority"):
        share, of_pair = weighted_share(two_outcomes(correction=correction))
        assert share == pytest.approx(0.5, abs=0.01), correction
        # the over-sampling of the pair remains, or is removed
        expected = 0.5 + 0.5 * 0.8 if correction == "conditional" else 0.8
        assert of_pair == pytest.approx(expected, abs=0.01), correction


def test_lemma_2_as_printed():
    """w = 1 - η P_out inside, 1 / (1 - η) outside: .5294 instead of .5 where .75 of the draws are events."""
    batch = two_outcomes(correction="lemma2").sample()
    inside = (batch["z"] == 1) & (batch["action"] == 0)
    w_in, w_out = 1 - 0.5 * 0.5, 1 / (1 - 0.5)
    torch.testing.assert_close(batch["priority_weight"], torch.where(inside, w_in / w_out, 1.0))


def test_priority_correction_draws_by_membership():
    torch.manual_seed(0)
    rb = two_outcomes(correction="priority")
    inside = torch.zeros(4000, dtype=torch.bool)
    inside[rb.sampler.tables["hit"].index()] = True
    p = 1 + 0.5 * (2.0 * inside.double() - 1)
    torch.testing.assert_close(probabilities(rb), p / p.sum())
    batch = rb.sample()
    assert (batch["table"] == 0).all()
    expected = torch.where(inside[batch["index"]], (1 - 0.5) / (1 + 0.5), 1.0)
    torch.testing.assert_close(batch["priority_weight"], expected)
    rb.sampler.eta = {"default": 0.8, "hit": 0.2}
    p = 1 + 0.2 * (2.0 * inside.double() - 1)
    torch.testing.assert_close(probabilities(rb), p / p.sum(), atol=1e-9, rtol=1e-6)


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
        assert_weights_of_pairs(rb)
    # a pair that appears later
    rb.set_sampler(sampler_of(rb.sampler.tables, correction="conditional"))
    assert_weights_of_pairs(rb)


def test_schedules_of_beta_count_batches_without_priorities():
    rb = filled(correction="mixture", beta=Anneal(0.2, 1.0, 4))
    for expected in (0.2, 0.4, 0.6, 0.8, 1.0, 1.0):
        assert rb.sampler.beta == pytest.approx(expected)
        rb.sample()


def test_exponents_without_effect_do_not_exist():
    plain, corrected, prioritized = make(), make(correction="mixture"), make(priority={"kind": "proportional"})
    for rb, name, needed in ((plain, "alpha", ""), (corrected, "alpha", ""), (plain, "beta", "correction= or ")):
        with pytest.raises(AttributeError, match=f"has no {name}; it needs {needed}priority="):
            setattr(rb.sampler, name, 0.5)
    assert {"alpha", "beta"}.isdisjoint(plain.sampler.stats().keys())
    assert corrected.sampler.beta == 1.0
    for arguments in ({"beta": 0.5}, {"beta": Anneal(0.4, 1.0, 10), "priority": {"kind": "proportional"}}):
        with pytest.raises(ValueError, match=r"beta is the exponent of correction=; .*priority=dict"):
            make(**arguments)
    assert (prioritized.sampler.alpha, prioritized.sampler.beta) == (0.6, 0.4)


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
    torch.testing.assert_close(*map(probabilities, buffers), rtol=0, atol=0)
    if "correction" in options:
        assert_weights_of_pairs(buffers[1])
