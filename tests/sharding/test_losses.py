"""Processes of shards that end: what is lost, what goes on, and what a checkpoint restores."""

import warnings
from functools import partial

import numpy as np
import pytest

from tests.params import slow_but
from tests.sharding.shards import (
    BATCH,
    STREAMS,
    fill,
    filled,
    learn,
    require_own_priorities,
    rows_in,
    sharded,
    td_errors,
    transitions,
)

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize(
    "name", ["uniform", "proportional", "reaper", "event tables, priorities", "slices, priorities"]
)
def test_a_lost_shard(name):
    """Draws go on with the others; the loss is reported; the shard is used again when it was started again."""
    many = filled(name, 3)
    learn(many, 5)
    held = len(rows_in(many)[1])
    many._shards.handles[1].kill()
    with pytest.warns(UserWarning, match=f"process of shard 1 .* has ended .* its {held} transitions,"):
        batch = many.sample()
    assert len(batch) == BATCH and (batch["shard"] != 1).all()
    stats = many.stats()
    assert (stats["shards"], stats["lost_shards"], stats["lost_rows"]) == (2, 1, held)
    assert len(many) == 160 - held
    learn(many, 5)
    # started again by Ray: empty, and new episodes go there first
    many._shards.handles[1].restart()
    learn(many, 3)
    for first in range(4000, 4400, 80):
        many.extend(transitions(first, 20))
    assert many.stats()["shards"] == 3 and min(len(rows) for rows in rows_in(many)) > 100
    assert 1 in many.sample()["shard"]


@pytest.mark.parametrize("when", ["draw", "state_dict", "save"])
def test_a_process_that_ends_during_a_call(when, tmp_path, local_ray):
    ends = []

    def before(number, method):
        if ends and method == when and number == 1:
            ends.pop()
            many._shards.handles[1].kill()

    local_ray.before = before
    many = filled("reaper", 3)
    many.dumps(tmp_path)
    held = rows_in(many)
    ends.append(True)
    if when == "draw":
        with pytest.warns(UserWarning, match="shard 1 of"):
            learn(many, 3)
    else:
        call = many.state_dict if when == "state_dict" else partial(many.dumps, tmp_path)
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="the process of shard 1 has ended"):
            call()
    many._shards.handles[1].restart()
    learn(many, 3)
    assert not rows_in(many)[1]
    # the checkpoint that is complete
    many.loads(tmp_path)
    assert rows_in(many) == held
    learn(many, 3)


def test_rows_on_the_way_to_a_process_that_has_ended_are_lost():
    many = filled("proportional", 3)
    for writer in (many, many.client()):
        many._shards.handles[1].kill()
        with pytest.warns(UserWarning, match="shard 1 of .* those on the way to it are gone"):
            writer.extend(transitions(400, 20))
        lost = set(range(400, 480)) - set().union(*rows_in(many))
        assert 0 < len(lost) < 80
        # the next rows go to the other shards, also those of the same episodes
        writer.extend(transitions(480, 5))
        assert set(range(480, 500)) <= set().union(*rows_in(many))
        if writer is not many:
            # the learner's process finds it out by itself
            with pytest.warns(UserWarning, match="shard 1 of"):
                many.sample()
        many._shards.handles[1].restart()
        many.empty()
        fill(many)


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["slices, priorities"],
        ["proportional", "reaper", "event tables, priorities", "slices, priorities"],
    ),
)
def test_a_thousand_random_operations_with_kills(name, tmp_path):
    """No row is drawn that is not stored, and no priority reaches another row."""
    rng = np.random.default_rng(3)
    many = sharded(name, 3, capacity=64 if "event" not in name else 96, timeout=0.5)
    numbers, batches, saved = 0, [], False

    def kill():
        many._shards.handles[rng.integers(3)].kill()

    def write():
        nonlocal numbers
        steps = int(rng.integers(1, 4))
        many.extend(transitions(numbers * STREAMS, steps, seed=numbers))
        numbers += steps

    def sample():
        batch = many.sample()
        for shard, held in enumerate(rows_in(many)):
            assert held.issuperset(batch["number"][batch["shard"] == shard].tolist())
        batches.append(batch)

    def update():
        if batches:
            batch = batches.pop(int(rng.integers(len(batches))))
            batch["td_error"] = td_errors(batch["number"] % 4096)
            many.update_tensordict_priority(batch)

    def revive():
        for handle in many._shards.handles:
            if not handle.is_alive:
                handle.restart()

    def save():
        nonlocal saved
        try:
            many.dumps(tmp_path)
            saved = True
        except RuntimeError:
            pass

    write()
    operations = [write, sample, update, revive, save, kill, partial(require_own_priorities, many)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for choice in rng.choice(len(operations), 1000, p=[0.3, 0.25, 0.25, 0.1, 0.03, 0.03, 0.04]):
            if not any(handle.is_alive for handle in many._shards.handles):
                revive()
            try:
                operations[choice]()
            except RuntimeError as error:
                assert "no transition can be drawn" in str(error)
        revive()
        write()
        sample()
        require_own_priorities(many)
    assert many.stats()["lost_shards"] > 10 and saved


@pytest.mark.parametrize("change", ["empty", "load_state_dict", "loads"])
def test_changes_of_all_shards_are_refused_while_one_is_lost(change, tmp_path):
    many = filled("proportional", 3)
    many.dumps(tmp_path)
    call = {"empty": many.empty, "load_state_dict": partial(many.load_state_dict, many.state_dict())}
    call["loads"] = partial(many.loads, tmp_path)
    held = rows_in(many)
    many._shards.handles[1].kill()
    with pytest.warns(UserWarning, match="shard 1 of"), pytest.raises(RuntimeError, match="shard 1 has ended"):
        call[change]()
    assert [rows_in(many)[number] for number in (0, 2)] == [held[0], held[2]]
    many._shards.handles[1].restart()
    call[change]()
    assert bool(len(many)) == (change != "empty") and many.stats()["shards"] == 3


def test_writes_end_if_no_shard_comes_back():
    messages = []
    many = filled("proportional", 2, on_loss=messages.append)
    for handle in many._shards.handles:
        handle.kill()
    many.extend(transitions(1000, 8))
    assert len(messages) == 2
    with pytest.raises(RuntimeError, match=r"none was started again in 0.1 s; 32 transitions were not written"):
        many.extend(transitions(1032, 8))
