"""A sharded buffer draws as one buffer with all transitions does. The shards are in this process."""

from functools import partial

import pytest
import torch

from tests.chi_square import p_value
from tests.params import slow_but
from tests.sharding.shards import (
    BATCH,
    PARTS,
    STREAMS,
    draw,
    fill,
    filled,
    filled_pair,
    learn,
    probability_of_rows,
    set_priorities,
    sharded,
    slices,
    td_errors,
    transitions,
    update,
)
from torchrl_replay_ext import Anneal, Episodes, ProportionalSampler, ReaPERSampler
from torchrl_replay_ext.samplers.shard_draws import Sums

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize("num_shards", slow_but([3], [1, 2, 3, 5]))
@pytest.mark.parametrize("name", PARTS)
def test_rows_have_the_probabilities_of_one_buffer(name, num_shards):
    one, many = filled_pair(name, num_shards)
    numbers, _ = draw(many, unit=4 if name.startswith("slices") else 1)
    assert p_value(numbers, probability_of_rows(one)) > 1e-4


def test_draws_from_shards_equally_are_found_out(monkeypatch):
    """The negative control of the test above."""
    one, many = filled_pair("proportional", 3)
    in_first = many._shards.handles[0].replay._buffer[:]["number"]
    set_priorities(one, many, lambda number: torch.where(torch.isin(number, in_first), 4.0, 1.0))
    assert p_value(draw(many)[0], probability_of_rows(one)) > 1e-4
    monkeypatch.setattr(Sums, "mass", (1.0,))
    assert p_value(draw(many)[0], probability_of_rows(one)) < 1e-6


def test_shares_of_reaper_include_the_acceptance():
    """In shard 0, TD errors rise towards the end of episodes, so that reliabilities are small; elsewhere they fall."""
    one, many = filled_pair("reaper, ongoing", 2)
    in_first = many._shards.handles[0].replay._buffer[:]["number"]

    def td_error(number):
        length, step = 7 + number % STREAMS, number // STREAMS
        position = step % length
        return torch.where(torch.isin(number, in_first), position + 1, length - position).float() ** 6

    set_priorities(one, many, td_error)
    draw(many, 50)  # until the running means have forgotten the TD errors of before
    assert p_value(draw(many)[0], probability_of_rows(one)) > 1e-4


@pytest.mark.parametrize("num_shards", slow_but([3], [1, 2, 3, 5]))
@pytest.mark.parametrize(
    "name",
    ["proportional", "stratified", "reaper", "reaper, ongoing", "event tables, mixture", "slices, priorities"],
)
def test_weights_are_those_of_one_buffer(name, num_shards):
    """(P(i) / smallest P)^-beta; the smallest P of the buffer, or with weight_norm="batch" of the batch."""
    one, many = filled_pair(name, num_shards)
    probability = probability_of_rows(one)
    of_buffer = name in ("proportional", "stratified", "reaper, ongoing", "slices, priorities")
    for _ in range(5):
        batch = many.sample()
        unit = 4 if name.startswith("slices") else 1
        drawn = probability[batch["number"][::unit]].repeat_interleave(unit)
        smallest = probability[probability > 0].min() if of_buffer else drawn.min()
        torch.testing.assert_close(batch["priority_weight"].double(), (drawn / smallest) ** -0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["event tables, priorities", "event tables, pinned"])
def test_weights_of_priorities_inside_tables(name):
    """(1 / (n q(i)))^beta for a table of n transitions with probabilities q, divided by the largest of the batch."""
    one, many = filled_pair(name, 3)
    d = (td_errors(torch.arange(STREAMS * 40)).double().sqrt() + 1e-6) ** 0.6
    tables = one.writer.tables
    batch = many.sample()
    weight = torch.empty(len(batch), dtype=torch.float64)
    for k, table in enumerate(tables.names):
        members = one[tables[table].index()]["number"]
        q = torch.zeros_like(d)
        q[members] = d[members] / d[members].sum()
        inside = batch["table"] == k
        weight[inside] = (1 / (len(members) * q[batch["number"][inside]])) ** 0.5
    torch.testing.assert_close(batch["priority_weight"].double(), weight / weight.max(), rtol=1e-6, atol=0)


BETA = Anneal(0.4, 1.0, num_updates=10)


@pytest.mark.parametrize(
    "sampler",
    [
        partial(ProportionalSampler, beta=BETA),
        partial(
            ReaPERSampler, beta=BETA, omega=Anneal(0.0, 1.0, num_updates=10), episodes=Episodes(num_streams=STREAMS)
        ),
        lambda: slices(anchors=ProportionalSampler(beta=BETA)),
    ],
)
def test_annealed_exponents_are_those_of_one_buffer(sampler, local_ray):
    many = filled("", 3, sampler=sampler)
    for number in range(5):
        batch = many.sample()
        # an update of a few rows, all in one shard
        few = batch[batch["shard"] == number % 3]
        update(many, few, td_errors(few["number"]))
    assert many.stats()["beta"] == pytest.approx(0.7)
    many.sample()
    assert [actor.replay.stats()["beta"] for actor in local_ray.actors] == pytest.approx([0.7] * 3)


def require_one_home(many, traj_key):
    homes = {}
    for number, handle in enumerate(many._shards.handles):
        for trajectory in handle.replay._buffer[:][traj_key].unique().tolist():
            assert homes.setdefault(trajectory, number) == number
    assert {*homes.values()} == {0, 1, 2}


def test_episodes_stay_in_one_shard_and_shards_have_equal_loads():
    many = sharded("reaper", 3)
    fill(many, 160)
    require_one_home(many, ("collector", "traj_ids"))
    assert many.write_count == 640
    lengths = [report.written for report in many._shards.reports.values()]
    assert max(lengths) - min(lengths) < 3 * 11


def test_episodes_are_marked_by_other_entries():
    many = sharded("uniform", 3, episodes=Episodes(traj_key="episode", done_key="end"))
    for first in range(0, 160, 8):
        data = transitions(first * STREAMS, 8)
        own = {"episode": data["collector", "traj_ids"], "end": data["next", "done"]}
        many.extend(data.exclude("collector", "next").update(own))
    require_one_home(many, "episode")
    # the writer forgets episodes that have ended
    assert len(many._writer._homes) <= STREAMS


def test_writers_of_several_processes():
    many = sharded("proportional", 2)
    writers = many.clients(2)
    for number, writer in enumerate(writers):
        data = transitions(1000 * number, 8)
        data["collector", "traj_ids"] = data["collector", "traj_ids"] * 2 + number
        writer.extend(data)
    assert len(many) == 64 and [writer.write_count for writer in writers] == [32, 32]
    assert many.sample().shape == (BATCH,)


# --- staleness


def test_weights_correct_for_the_probability_of_a_stale_draw():
    """The priorities of shard 0 change after the sums are known, so its share of the batch is that of before."""
    many = filled("proportional", 2)
    many.sample()
    before = [report.sums.mass[0] for report in many._shards.reports.values()]
    buffers = [handle.replay._buffer for handle in many._shards.handles]
    buffers[0].update_priority(torch.arange(4), torch.full((4,), 1e6))
    batch = many.sample()
    inside = [buffer.sampler.probabilities(buffer.storage) for buffer in buffers]
    probability = [p * mass / sum(before) for p, mass in zip(inside, before, strict=True)]
    rows = zip(batch["shard"], batch["index"], strict=True)
    drawn = torch.stack([probability[shard][slot] for shard, slot in rows])
    smallest = min(p.min() for p in probability)
    torch.testing.assert_close(batch["priority_weight"].double(), (drawn / smallest) ** -0.5, rtol=1e-6, atol=0)


def test_weights_ignore_what_could_not_be_drawn():
    """Another process has written to a shard that was empty at its last report."""
    many = filled("proportional", 2)
    many._shards.handles[1].restart()
    with pytest.warns(UserWarning, match="shard 1"):
        many.sample()
    many.client().extend(transitions(1000, 8))
    batch = many.sample()
    assert (batch["shard"] == 0).all() and batch["priority_weight"].max() == 1
    assert 1 in many.sample()["shard"]


def test_draws_follow_the_newest_updates_and_writes():
    many = filled("proportional", 2)
    batch = many.sample()
    update(many, batch, torch.where(batch["shard"] == 0, 1e6, 1e-6))
    assert (many.sample()["shard"] == 0).double().mean() > 0.9
    # new rows have the largest priority of all shards
    many.extend(transitions(1000, 40))
    batch = many.sample()
    assert (batch["number"] >= 1000).double().mean() > 0.5 and (batch["shard"] == 1).double().mean() > 0.25


def test_a_shard_without_rows_learns_the_largest_priority_before_its_first_write():
    sampler = partial(ProportionalSampler, td_error="absolute", eps=0.0, alpha=1.0)
    many = sharded("", 2, sampler=sampler)
    data = transitions(0, 4 * STREAMS)
    stream = data["collector", "traj_ids"].reshape(-1)
    many.extend(data[stream == 0])
    for _ in range(3):
        batch = many.sample()
        update(many, batch, torch.full_like(batch["priority_weight"], 50.0))
    many.sample()
    many.extend(data[stream == 1])
    many.extend(data[stream == 0])
    assert {shard.replay.stats()["max_priority"] for shard in many._shards.handles} == {50.0}


def test_a_started_shard_and_a_loaded_buffer_continue_the_schedules(tmp_path):
    sampler = partial(ProportionalSampler, beta=BETA)
    many = filled("", 2, sampler=sampler)
    learn(many, 5)
    many.dumps(tmp_path)
    many._shards.handles[1].restart()
    with pytest.warns(UserWarning, match="shard 1"):
        learn(many, 2)
    fill(many)
    learn(many, 1)
    assert [many._shards.handles[1].replay.stats()["beta"], many.stats()["beta"]] == pytest.approx([0.88, 0.88])
    for loaded in (many, sharded("", 2, sampler=sampler)):
        loaded.loads(tmp_path)
        learn(loaded, 1)
        assert loaded.stats()["beta"] == pytest.approx(0.76)
