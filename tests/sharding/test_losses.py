"""Processes of shards that end: what is lost, what goes on, and what a checkpoint restores."""

import itertools
import warnings
from functools import partial

import numpy as np
import pytest
import torch

from tests.params import slow_but
from tests.sharding.local_calls import LocalCalls
from tests.sharding.shards import (
    BATCH,
    STREAMS,
    agreement,
    draw,
    fill,
    learn,
    probability_of_rows,
    rows_in,
    set_priorities,
    sharded,
    td_errors,
    transitions,
    whole,
    written_slots,
)
from torchrl_replay_ext import (
    Anneal,
    ProportionalSampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.sharding.calls import Lost


@pytest.mark.parametrize(
    "name", ["uniform", "proportional", "reaper", "event tables, priorities", "slices, priorities"]
)
def test_a_lost_shard(name):
    """Draws go on with the others, by the probabilities of one buffer without the lost rows."""
    many = sharded(name, 3)
    fill(many)
    learn(many, 5)
    held = len(rows_in(many)[1])
    many._group.handles[1].kill()
    with pytest.warns(UserWarning, match=f"process of shard 1 .* has ended .* its {held} transitions,"):
        many.sample()
        batch = many.sample()
    assert len(batch) == BATCH and (batch["shard"] != 1).all()
    stats = many.stats()
    assert (stats["shards"], stats["lost_shards"], stats["lost_rows"]) == (2, 1, held)
    assert len(many) == 160 - held
    learn(many, 5)
    # started again by Ray: empty, and written to first
    many._group.handles[1].restart()
    learn(many, 3)
    for first in range(4000, 4400, 80):
        many.extend(transitions(first, 20))
    lengths = [len(rows) for rows in rows_in(many)]
    assert many.stats()["shards"] == 3 and min(lengths) > 100
    many.sample()
    assert 1 in many.sample()["shard"]
    many.check_valid()


def test_draws_after_a_loss_follow_one_buffer_without_the_lost_rows():
    one, many = whole("proportional"), sharded("proportional", 3)
    fill(one)
    fill(many)
    set_priorities(one, many)
    probability = probability_of_rows(one)
    probability[list(rows_in(many)[2])] = 0
    many._group.handles[2].kill()
    with pytest.warns(UserWarning, match="shard 2 of"):
        many.sample()
    assert agreement(draw(many)[0], probability / probability.sum()) > 1e-4


@pytest.mark.parametrize("when", ["write", "exchange", "state_dict", "dumps"])
def test_a_process_that_ends_during_a_call(when, tmp_path):
    ends = []

    def before(number, method):
        if ends and method == when and number == 1:
            ends.pop()
            many._group.handles[1].kill()

    many = sharded("reaper", 3, calls=LocalCalls(before))
    fill(many)
    many.dumps(tmp_path)
    written = sorted(path.name for path in tmp_path.iterdir())
    ends.append(True)
    if when == "write":
        many.extend(transitions(200, 20))
        lost = set(range(200, 280)) - set().union(*rows_in(many))
        # those of the episodes that ended in this batch
        assert 0 < len(lost) == many._writer.lost_rows < 40
        with pytest.warns(UserWarning, match="shard 1 of"):
            many.sample()
    elif when == "exchange":
        with pytest.warns(UserWarning, match="shard 1 of"):
            learn(many, 3)
    else:
        call = many.state_dict if when == "state_dict" else partial(many.dumps, tmp_path)
        with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="the process of shard 1 has ended"):
            call()
        assert (tmp_path / "checkpoint.json").is_file() and set(written) <= {p.name for p in tmp_path.iterdir()}
    many._group.handles[1].restart()
    learn(many, 3)
    # from the checkpoint
    assert len(rows_in(many)[1]) > 40
    many.check_valid()
    many.dumps(tmp_path)


def test_late_updates_of_an_earlier_incarnation_are_dropped():
    many = sharded("proportional", 2)
    fill(many)
    batch = many.sample()
    batch["td_error"] = torch.full((BATCH,), 100.0)
    many._group.handles[1].kill()
    with pytest.warns(UserWarning):
        many.sample()
    many._group.handles[1].restart()
    many.sample()
    # the same slots, with the same numbers of writes
    fill(many)
    many.update_tensordict_priority(batch)
    after = many._group.handles[1].replay._buffer.sampler.state_dict()["priority"]
    assert (after.abs() <= 1).all()
    assert many.stats()["dropped_updates"] == (batch["shard"] == 1).sum()


def test_batches_drawn_ahead_of_a_loss():
    many = sharded("proportional", 2, prefetch=3)
    fill(many)
    learn(many, 3)
    many._group.handles[0].kill()
    with pytest.warns(UserWarning, match="shard 0") as warned:
        learn(many, 8)
    assert len(warned) == 1
    many._group.handles[0].restart()
    learn(many, 8)
    assert many.stats()["lost_shards"] == 1 and many.stats()["shards"] == 2


def test_episodes_of_a_lost_shard_go_on_elsewhere_and_those_of_a_checkpoint_are_ended(tmp_path):
    many = sharded(
        "slices", 1, sampler=partial(TrajectoryRetraceSampler, slice_len=4, num_streams=STREAMS, behaviour_keys=())
    )
    many.extend(transitions(0, 5))
    many.dumps(tmp_path)
    many.extend(transitions(20, 1))
    many._group.handles[0].kill()
    many._group.handles[0].restart()
    with pytest.warns(UserWarning, match="its 24 transitions,"):
        many.sample()
    many.extend(transitions(24, 5))
    many.sample()
    buffer = many._group.handles[0].replay._buffer
    stored = buffer[:]
    # 5 steps of 4 environments, an end for each, and the new steps
    assert stored["number"].tolist() == [*range(20), 16, 17, 18, 19, *range(24, 44)]
    assert stored["next", "truncated"][20:24].all() and not stored["next", "terminated"][20:24].any()
    assert stored["collector", "traj_ids"][24:28].min() > 2**60
    for _ in range(20):
        slices = many.sample().reshape(-1, 4)
        number, mask = slices["number"], slices["collector", "mask"]
        step = number[:, 1:] - number[:, :-1]
        assert (step[mask[:, 1:] & (number[:, :-1] >= 24)] == STREAMS).all()
        assert not ((number[:, :-1] < 20) & (number[:, 1:] >= 24) & mask[:, 1:]).any()


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["reaper", "slices, priorities"],
        ["proportional", "reaper", "event tables, priorities", "slices, priorities"],
    ),
)
def test_a_thousand_random_operations_with_kills(name, tmp_path):
    """No row is drawn that is not stored, and no priority reaches another row."""
    rng = np.random.default_rng(3)
    many = sharded(name, 3, capacity=64 if "event" not in name else 96, prefetch=1, timeout=0.5)
    numbers, batches, saved = 0, [], False

    def kill():
        many._group.handles[rng.integers(3)].kill()

    def write():
        nonlocal numbers
        steps = int(rng.integers(1, 4))
        data = transitions(numbers * STREAMS, steps, seed=numbers)
        many.extend(data)
        numbers += steps

    def sample():
        batch = many.sample()
        # a batch drawn ahead may hold rows that have been overwritten or lost since, but none that never was
        assert (batch["number"] < numbers * STREAMS).all()
        now = many.sample()
        del now
        batches.append(batch)

    def update():
        if batches:
            batch = batches.pop(int(rng.integers(len(batches))))
            batch["td_error"] = td_errors(batch["number"] % 4096)
            many.update_tensordict_priority(batch)

    def revive():
        for handle in many._group.handles:
            if not handle.is_alive:
                handle.restart()

    def save():
        nonlocal saved
        try:
            many.dumps(tmp_path)
            saved = True
        except RuntimeError:
            pass

    def check():
        many.check_valid()
        for handle in many._group.handles:
            if not handle.is_alive or not len(handle.replay._buffer):
                continue
            buffer = handle.replay._buffer
            sampler = getattr(buffer.sampler, "starts_sampler", buffer.sampler)
            slots = written_slots(buffer)
            priority = sampler.state_dict()["priority"][slots]
            expected = td_errors(buffer[slots]["number"] % 4096).sqrt() + 1e-6
            torch.testing.assert_close(priority[priority > 0], expected[priority > 0])

    write()
    operations = [write, sample, update, revive, save, kill, check]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for choice in rng.choice(len(operations), 1000, p=[0.3, 0.25, 0.25, 0.1, 0.03, 0.03, 0.04]):
            if not any(handle.is_alive for handle in many._group.handles):
                revive()
            try:
                operations[choice]()
            except RuntimeError as error:
                assert "no transition can be drawn" in str(error)
        revive()
        write()
        sample()
        check()
    assert many.stats()["lost_shards"] > 10 and saved


def silently_restarted(many, number):
    """A process that ends and is started again before the next call."""
    many._group.handles[number].kill()
    many._group.handles[number].restart()


def test_a_checkpoint_after_a_silent_restart_keeps_the_content_of_the_one_before(tmp_path):
    many = sharded("proportional", 3)
    fill(many)
    learn(many, 3)
    many.dumps(tmp_path)
    held = [len(rows) for rows in rows_in(many)]
    for save in (partial(many.dumps, tmp_path), many.state_dict):
        silently_restarted(many, 1)
        with pytest.warns(UserWarning, match="shard 1 of"):
            save()
        assert [len(rows) for rows in rows_in(many)] == held
    restored = sharded("proportional", 3)
    restored.loads(tmp_path)
    assert len(restored) >= sum(held)


def test_statistics_after_a_silent_restart():
    many = sharded("proportional", 3)
    fill(many)
    learn(many, 3)
    silently_restarted(many, 1)
    with pytest.warns(UserWarning, match="shard 1 of"):
        stats = many.stats()
    assert stats["shards"] == 2 and stats["alpha"] == pytest.approx(0.7)
    assert many.stats()["shards"] == 3


@pytest.mark.parametrize("change", ["empty", "load_state_dict", "loads"])
def test_changes_of_all_shards_are_refused_while_one_is_lost(change, tmp_path):
    many = sharded("proportional", 3)
    fill(many)
    many.dumps(tmp_path)
    call = {"empty": many.empty, "load_state_dict": partial(many.load_state_dict, many.state_dict())}
    call["loads"] = partial(many.loads, tmp_path)
    held = rows_in(many)
    many._group.handles[1].kill()
    with pytest.warns(UserWarning, match="shard 1 of"), pytest.raises(RuntimeError, match="shard 1 has ended"):
        call[change]()
    assert [rows_in(many)[number] for number in (0, 2)] == [held[0], held[2]]
    many._group.handles[1].restart()
    call[change]()
    assert len(many) == (0 if change == "empty" else len(many)) and many.stats()["shards"] == 3
    many.check_valid()


def test_a_damaged_checkpoint_changes_nothing(tmp_path):
    many = sharded("proportional", 3)
    fill(many)
    many.dumps(tmp_path)
    (file,) = tmp_path.glob("*/shard2.pt")
    file.write_bytes(file.read_bytes()[:100])
    held = rows_in(many)
    with pytest.raises(Exception, match=r"archive|zip|file"):
        many.loads(tmp_path)
    assert rows_in(many) == held
    many.sample()


def test_parts_of_a_batch_are_updates_of_their_own():
    many = sharded("proportional", 2)
    fill(many)
    for _ in range(10):
        batch = many.sample()
        batch["td_error"] = td_errors(batch["number"])
        for part in batch.split(BATCH // 4):
            many.update_tensordict_priority(part)
        assert len(many._requests) <= 1
    assert many.stats()["stale_updates"] <= 4
    many.check_valid()


def loss_of_another_process():
    """A sharded buffer, and the writer of another process that lost rows with shard 1 and has reported them."""
    many = sharded("proportional", 3)
    fill(many)
    writer = many.client()
    writer.extend(transitions(400, 5))
    many._group.handles[1].kill()
    writer.extend(transitions(420, 40))
    writer.extend(transitions(580, 5))
    assert writer.lost_rows > 0
    return many, writer


def test_rows_that_other_processes_lose_are_reported():
    many, writer = loss_of_another_process()
    with pytest.warns(UserWarning, match="shard 1 of"):
        many.sample()
    held = many._group.lost_rows
    assert many.stats()["lost_rows"] == held + writer.lost_rows


def test_writers_lose_nothing_when_the_buffer_is_emptied():
    many = sharded("proportional", 3)
    writer = many.client()
    writer.extend(transitions(0, 5))
    many.empty()
    writer.extend(transitions(20, 20))
    assert writer.lost_rows == 0 and len(many) == 80


def test_schedules_survive_the_loss_of_all_shards():
    beta = Anneal(0.4, 1.0, num_updates=10)
    many = sharded("", 3, sampler=partial(ProportionalSampler, beta=beta))
    fill(many)
    learn(many, 5)
    many.sample()
    for number in range(3):
        silently_restarted(many, number)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="no transition can be drawn"):
        many.sample()
    fill(many)
    assert many.stats()["beta"] == pytest.approx(0.7)


def test_a_shard_without_priorities_is_left_out():
    many = sharded("", 2, sampler=partial(ProportionalSampler, eps=0.0))
    fill(many)
    many.sample()
    buffer = many._group.handles[0].replay._buffer
    # after the sums are known
    buffer.update_priority(torch.arange(len(buffer)), torch.zeros(len(buffer)))
    for _ in range(3):
        batch = many.sample()
        assert len(batch) == BATCH and (batch["shard"] == 1).all()


def restarted(many, number):
    """Kill and restart a shard, and note it with a draw, without the warnings."""
    silently_restarted(many, number)
    with pytest.warns(UserWarning):
        many.sample()
        many.sample()


def test_rows_written_to_a_new_process_before_it_is_restored_are_kept(tmp_path):
    many = sharded("proportional", 2)
    fill(many)
    many.dumps(tmp_path)
    old = set(rows_in(many)[1])
    writer = many.client()
    silently_restarted(many, 1)
    writer.extend(transitions(400, 30))
    new = set(rows_in(many)[1])
    assert len(new) > 20 and min(new) >= 400
    with pytest.warns(UserWarning, match="shard 1 of"):
        many.sample()
        many.sample()
    assert set(rows_in(many)[1]) == old | new and writer.lost_rows == 0
    many.check_valid()


def test_reports_of_a_lost_shard_that_arrive_late_are_ignored():
    many = sharded("proportional", 2, prefetch=2)
    fill(many)
    learn(many, 3)
    many.sample()
    many._group.handles[1].kill()
    with pytest.warns(UserWarning, match="shard 1 of"):
        len(many)
    # drawn before the loss
    many.sample()
    assert many._group.reports[1].mass == (0.0,)
    many.extend(transitions(400, 1))
    assert many._group.reports[1].mass == (0.0,)


def test_the_learner_does_not_write_to_a_shard_that_it_knows_to_be_lost():
    many = sharded("proportional", 2)
    fill(many)
    many._group.handles[1].kill()
    many.extend(transitions(400, 20))
    lost = many._writer.lost_rows
    for first in range(480, 880, 80):
        many.extend(transitions(first, 20))
    assert many._writer.lost_rows == lost
    with pytest.warns(UserWarning, match="shard 1 of"):
        many.sample()
    other = sharded("proportional", 2)
    fill(other)
    other._group.handles[1].kill()
    with pytest.warns(UserWarning, match="shard 1 of"):
        other.sample()
    other.extend(transitions(400, 20))
    assert other._writer.lost_rows == 0


def test_a_restarted_shard_of_full_ones_gets_its_share_only():
    many = sharded("proportional", 2, capacity=64)
    episodes = iter(range(100_000))

    def write(count):
        for number in itertools.islice(episodes, count):
            episode = transitions(0, 7)[:7]
            episode["collector", "traj_ids"] = torch.full((7,), number)
            episode["next", "done"] = (torch.arange(7) == 6).unsqueeze(1)
            many.extend(episode)

    def written():
        return [handle.replay._buffer.write_count for handle in many._group.handles]

    write(150)
    restarted(many, 1)
    write(20)
    before = written()
    write(40)
    added = np.subtract(written(), before)
    assert added.min() > 0.4 * added.sum()


def test_annealed_exponents_of_a_restored_shard_hold_at_once():
    beta = Anneal(0.0, 1.0, num_updates=5)
    many = sharded("", 2, sampler=partial(ProportionalSampler, beta=beta), prefetch=2)
    fill(many)
    learn(many, 20)
    silently_restarted(many, 0)
    with pytest.warns(UserWarning, match="shard 0 of"):
        batches = [many.sample() for _ in range(8)]
    assert all((batch["priority_weight"] < 1).any() for batch in batches)


@pytest.mark.parametrize("change", ["empty", "load_state_dict"])
def test_an_earlier_checkpoint_is_not_restored_after_the_content_was_replaced(change, tmp_path):
    many = sharded("proportional", 2)
    state = many.state_dict()
    fill(many)
    many.dumps(tmp_path)
    many.empty() if change == "empty" else many.load_state_dict(state)
    many.extend(transitions(400, 20))
    restarted(many, 1)
    assert all(number >= 400 for rows in rows_in(many) for number in rows)


def test_entries_are_those_of_the_stored_rows_also_after_a_loss():
    many = sharded("proportional", 2)
    fill(many)
    silently_restarted(many, 0)
    with pytest.raises(ValueError, match="'value'"):
        many.client().extend(transitions(400, 5).exclude("value"))
    with pytest.raises(ValueError, match="'value'"):
        many.client().extend(transitions(400, 5).exclude("value"))


def test_a_state_that_does_not_fit_one_shard():
    many = sharded("proportional", 3)
    fill(many)
    state = many.state_dict()
    state["shards"][2]["_sampler"] = {}
    with pytest.raises(ValueError, match="state"):
        many.load_state_dict(state)
    many.sample()
    assert many.stats()["lost_shards"] == 0


def test_a_shard_that_is_started_again_while_a_state_is_loaded():
    def before(number, method):
        if armed and method == "restore" and number == 1:
            armed.pop()
            silently_restarted(many, 1)

    armed = []
    many = sharded("proportional", 2, calls=LocalCalls(before))
    fill(many)
    state = many.state_dict()
    armed.append(True)
    with pytest.raises(RuntimeError, match="started again while a checkpoint was loaded"):
        many.load_state_dict(state)


def test_the_loss_of_the_only_shard_is_an_error_of_its_own():
    many = sharded("proportional", 1)
    fill(many)
    many.sample()
    silently_restarted(many, 0)
    with pytest.warns(UserWarning), pytest.raises(Lost, match="no transition can be drawn"):
        for _ in range(2):
            many.sample()


def test_rows_that_a_lost_shard_has_counted_are_not_forgotten():
    many, writer = loss_of_another_process()
    with pytest.warns(UserWarning, match="shard 1 of"):
        many.sample()
        many.sample()
    # the lost rows were reported to one of the others
    (number,) = (number for number, report in enumerate(many._group.reports) if report.lost == writer.lost_rows)
    counted = many._group.lost_rows + many._group.reports[number].length
    many._group.handles[number].kill()
    with pytest.warns(UserWarning, match=f"shard {number} of"):
        many.sample()
    assert many._group.lost_rows == counted + writer.lost_rows


def test_a_report_of_lost_rows_that_is_lost_itself_is_made_again():
    many = sharded("proportional", 3)
    fill(many)
    writer = many.client()
    writer.extend(transitions(400, 5))
    for number in (0, 1):
        many._group.handles[number].kill()
        # a batch in which episodes end, for the shard that was killed and with the report of the rows lost before
        writer.extend(transitions(420 + 160 * number, 40))
    writer.extend(transitions(740, 5))
    assert writer.lost_rows > 0
    assert many._group.handles[2].replay._lost + many._group.handles[0].replay._lost == writer.lost_rows
