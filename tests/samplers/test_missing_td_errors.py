"""An update without TD errors, or with a misspelt key for them, changes no priority."""

import pytest
import torch
from torchrl.data import Sequence
from torchrl.data.replay_buffers import RandomSampler

from tests.data import SAMPLERS, buffer_with, learn, linear_policy, random_rows
from tests.samplers.experience import assert_same_state
from torchrl_replay_ext import Anneal, DecoupledSampler, ProportionalSampler, RankBasedSampler

CAPACITY = 40
MAKERS = SAMPLERS | {
    "annealed": lambda capacity: ProportionalSampler(capacity, alpha=Anneal(0.6, 0.2, num_updates=9)),
    "no eps": lambda capacity: ProportionalSampler(capacity, eps=0.0),
    "decoupled, uniform": lambda capacity: DecoupledSampler(RandomSampler(), linear_policy(3, 2)),
}
PRIORITIZED = ["annealed", "no eps", "rank", "reaper", "tables, proportional", "slices, proportional", "decoupled"]
UNIFORM = ["uniform", "recency", "tables", "slices", "decoupled, uniform"]


def make(name, stock, **arguments):
    torch.manual_seed(0)
    rb = buffer_with(MAKERS[name](CAPACITY), CAPACITY, compilable=not stock, batch_size=8, **arguments)
    rb.extend(random_rows(30))
    return rb


def updated(rb):
    """A buffer in which some priorities are not the default priority."""
    for _ in range(3):
        learn(rb)
    return rb


def warned():
    return pytest.warns(UserWarning, match="the batch has no TD errors in the entry that the buffer's priority_key")


def visible(rb):
    """What a user sees of a sampler, but for the number of rows without a TD error."""
    return rb.sampler.stats().exclude("rejected_updates").to_dict() | {"P": rb.sampler.probabilities(rb.storage)}


@pytest.mark.parametrize("name", PRIORITIZED)
@pytest.mark.parametrize("misspelt", [False, True])
def test_a_compilable_buffer_names_the_key_and_changes_nothing(name, misspelt):
    rb = updated(make(name, stock=False))
    batch, before = rb.sample(), visible(rb)
    if misspelt:
        batch["td_eror"] = torch.ones(len(batch))
    with pytest.raises(KeyError, match=r"the sample has no entry 'td_error' with TD errors.*priority_key="):
        rb.update_tensordict_priority(batch)
    with pytest.raises(KeyError, match="no entry 'td_error'"):
        rb.update_tensordict_priority(batch[0])
    assert_same_state(visible(rb), before)
    # the batch can still be used for an update
    batch["td_error"] = torch.full((len(batch),), 0.25)
    rb.update_tensordict_priority(batch)
    assert rb.sampler.stats()["dropped_updates"] == 0


@pytest.mark.parametrize(("name", "unit"), [*((name, None) for name in PRIORITIZED), ("annealed", Sequence(length=3))])
def test_in_a_stock_buffer_it_is_harmless_and_counted(name, unit):
    rb = updated(make(name, stock=True, sample_unit=unit))
    batch, before = rb.sample(), visible(rb)
    for calls in (1, 2):
        with warned():
            rb.update_tensordict_priority(batch)
        assert_same_state(visible(rb), before)
        count = len(batch) if unit is None else len(batch["anchor_index"].unique())
        assert rb.sampler.stats()["rejected_updates"] == calls * count


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
@pytest.mark.parametrize("name", UNIFORM)
def test_samplers_without_priorities_need_no_td_errors(name, stock):
    rb = make(name, stock)
    rb.update_tensordict_priority(rb.sample())


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "compilable"])
def test_single_rows_are_added_without_td_errors(stock):
    rb = updated(make("no eps", stock))
    for slot, row in enumerate(random_rows(4), start=30):
        assert int(rb.add(row)) == slot
    assert len(rb) == 34 and rb.sampler.stats()["rejected_updates"] == 0
    new = rb.sampler.probabilities(rb.storage)[30:34]
    assert (new == new[0]).all() and new[0] == rb.sampler.probabilities(rb.storage).max()
    row = random_rows(1)[0]
    row["td_error"] = torch.tensor(0.25)
    if not stock:
        with pytest.raises(KeyError, match="td_error"):
            rb.add(row)
        return
    rb.add(row)
    p, largest = rb.sampler.probabilities(rb.storage), float(rb.sampler.stats()["max_priority"])
    assert float(p[34] / p[33]) == pytest.approx((0.5 / largest) ** 0.6, rel=1e-4)


@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("name", ["annealed", "rank", "tables, proportional"])
def test_a_single_row_may_have_the_shape_of_a_batch(name, first):
    """TorchRL's buffer takes rows [1] in add(), and fills in the default priority as for a sample."""
    rb = buffer_with(MAKERS[name](CAPACITY), CAPACITY, batch_size=1)
    rb.extend(random_rows(30))
    if first:
        updated(rb)
        rb.extend(random_rows(first, first=30))
    before, beta = rb.sampler.stats()["never_updated"] * (30 + first), rb.sampler.beta
    shaped = (lambda row: row) if name == "tables, proportional" else (lambda row: row.unsqueeze(0))
    for slot, row in enumerate(random_rows(3), start=30 + first):
        assert int(rb.add(shaped(row))) == slot
    stats = rb.sampler.stats()
    assert stats["rejected_updates"] == 0 and rb.sampler.beta == beta
    assert float(stats["never_updated"] * stats["num_items"]) == pytest.approx(float(before) + 3)
    # a sample of one row is still a sample
    with warned():
        rb.update_tensordict_priority(rb.sample().exclude("td_error"))
    assert rb.sampler.stats()["rejected_updates"] == 1


def test_a_number_after_extend_is_a_td_error_of_the_caller():
    """Only after ``add`` does TorchRL pass a number that stands for no TD error."""
    rb = buffer_with(RankBasedSampler(beta=Anneal(0.4, 1.0, 10)), 4)
    rb.extend(random_rows(3))
    rb.extend(random_rows(1, first=3))
    for number in range(1, 4):
        rb.update_priority(3, 1.0)
        assert rb.sampler.beta == pytest.approx(0.4 + 0.06 * number)
    assert rb.sampler.stats()["never_updated"] == 0.75


def test_rows_without_td_errors_may_have_a_wrong_index():
    rb = buffer_with(ProportionalSampler(), 8, batch_size=4)
    rb.extend(random_rows(8))
    before = rb.sampler.probabilities(rb.storage)
    rb.update_priority(torch.tensor([3, -1]), rb.sampler.default_priority)
    assert torch.equal(rb.sampler.probabilities(rb.storage), before)
