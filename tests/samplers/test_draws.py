"""Draws of all samplers follow their probabilities, and their rows are in random order.

So a part of a batch is a sample like the whole batch.
"""

import pytest
import torch
from scipy import stats

from tests.chi_square import p_value
from tests.data import buffer_with, linear_policy, random_rows
from tests.operations import CASES, Driven
from tests.params import slow_but
from tests.sharding.shards import PARTS, filled_pair
from torchrl_replay_ext import DecoupledSampler, ProportionalSampler

ROWS, DRAWS = 4, 400


def p_value_of_independence(position, what):
    """That of a test of independence of ``position`` [n] and ``what`` [n], from rows of different batches."""
    # classes of consecutive values, each with about a quarter of the rows, at most
    classes = [torch.zeros(ROWS)]
    for value in what.unique():
        if classes[-1].sum() >= max(8 * ROWS, len(what) // 4):
            classes.append(torch.zeros(ROWS))
        classes[-1] += position[what == value].bincount(minlength=ROWS)
    if len(classes) > 1 and classes[-1].sum() < 8 * ROWS:
        classes[-2] += classes.pop()
    assert len(classes) > 1
    return stats.chi2_contingency(torch.stack(classes).numpy()).pvalue


def assert_random_order(draw):
    """``draw()`` returns the slots of a batch, [ROWS], and possibly the tables. Only one row of a batch is used."""
    batches = [torch.stack(draw()).cpu() for _ in range(DRAWS)]
    position = torch.arange(DRAWS) % ROWS
    rows = torch.stack([batch[:, row] for batch, row in zip(batches, position.tolist(), strict=True)], 1)
    for what in rows:
        if what.max() > 0:
            assert p_value_of_independence(position, what) > 1e-4
    # the negative control
    in_order = [batch[0].sort().values[row] for batch, row in zip(batches, position.tolist(), strict=True)]
    assert p_value_of_independence(position, torch.stack(in_order)) < 1e-4


def filled(name, seed=1):
    """A buffer of the contract's tests with its model; TD errors increase with the slots."""
    # with these seeds, slices have several possible starts
    driven = Driven(name, seed, capacity=24)
    for _ in range(12):
        driven.extend()
    buffer = driven.buffer
    slots = (buffer.sampler.probabilities(buffer.storage) > 0).nonzero().squeeze(1).cpu()
    envs = driven.setting.num_envs
    index = torch.stack([slots // envs, slots % envs], 1) if driven.setting.ndim == 2 else slots
    buffer.update_priority(index, torch.linspace(0.5, 4.0, len(slots)))
    return driven


def draw_from(driven, rows=ROWS):
    unit = driven.unit

    def draw():
        index, info = driven.buffer.sampler.sample(driven.buffer.storage, rows * unit)
        index = torch.stack(index, 1) if isinstance(index, tuple) else index
        slots = torch.tensor(driven.slots(index))[::unit]
        return [slots, info["table"].cpu()] if "table" in info else [slots]

    return draw


@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_probabilities_and_the_test_can_fail(name, seed):
    """The seed decides about strata, layouts, and so on. Stratified draws vary less than independent ones."""
    driven = filled(name, seed)
    draw = draw_from(driven, rows=25)
    draw()
    # that of piecewise ranks depends on the size of the last batch
    expected = driven.buffer.sampler.probabilities(driven.buffer.storage).cpu()
    drawn = torch.cat([draw()[0] for _ in range(800)])
    assert p_value(drawn, expected) > 1e-4
    wrong = expected**0.7 * torch.linspace(1.5, 0.5, len(expected))
    assert p_value(drawn, wrong / wrong.sum()) < 1e-4


@pytest.mark.parametrize("name", CASES)
def test_the_position_of_a_row_does_not_depend_on_its_slot(name):
    assert_random_order(draw_from(filled(name)))


def buffer(sampler, **arguments):
    rb = buffer_with(sampler, 64, batch_size=ROWS, **arguments)
    rb.extend(random_rows(60))
    if getattr(sampler, "takes_priorities", False):
        rb.update_priority(torch.arange(60), torch.linspace(0.5, 4.0, 60))
    return rb


@pytest.mark.parametrize("granularity", ["batch", "group"])
def test_nor_does_it_in_the_actors_batch(granularity):
    arguments = {"granularity": granularity, "group_size": 2}
    sampler = DecoupledSampler(ProportionalSampler(64), linear_policy(3, 2), **arguments)
    actor_rb = sampler.actor_buffer(buffer(sampler))
    assert_random_order(lambda: [actor_rb.sample()["number"]])


@pytest.mark.parametrize("name", slow_but(["stratified", "event tables, mixture", "slices, priorities"], PARTS))
def test_nor_does_it_in_joint_draws(name, local_ray):
    _, many = filled_pair(name, 3)
    unit = 4 if name.startswith("slices") else 1

    def draw():
        batch = many.sample()[: ROWS * unit : unit]
        return [batch["shard"], batch["number"], *([batch["table"]] if "table" in batch else [])]

    assert_random_order(draw)
