"""Collectors in spawned processes write to a buffer, and a learner draws and updates."""

import multiprocessing
import multiprocessing.context
import pickle
from functools import partial

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv

from tests.data import SAMPLERS, buffer_with, event_sampler, learn, random_rows, rows
from tests.samplers.experience import INTERRUPTED
from tests.samplers.test_streams import assert_episodes
from torchrl_replay_ext import (
    Episodes,
    EventSpec,
    EventTables,
    EventTableWriter,
    Novel,
    ProportionalSampler,
    Quantile,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)

CAPACITY = 150
HISTORY = 4
make_env = partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)


def test_workers_write_to_the_buffer():
    """Meanwhile, the learner draws and updates. It hands back its first batch when all of its rows are overwritten."""
    sampler = ReaPERSampler(CAPACITY, episodes=Episodes(num_streams=2))
    buffer, drawn = buffer_with(sampler, CAPACITY, compilable=True, batch_size=10), None
    buffer.share()
    collector = MultiAsyncCollector(
        [make_env] * 2,
        frames_per_batch=40,
        total_frames=400,
        replay_buffer=buffer,
        auto_register_policy_transforms=False,
    )
    try:
        for _ in collector:
            drawn = learn(buffer) if drawn is None else drawn
            learn(buffer)
    finally:
        collector.shutdown()
    assert len(buffer) == CAPACITY and buffer.write_count > 2 * CAPACITY
    before = sampler.stats()
    drawn["td_error"] = torch.full((10,), 1e9)
    buffer.update_tensordict_priority(drawn)
    after = sampler.stats()
    assert (
        after["dropped_updates"] == before["dropped_updates"] + 10 and after["max_priority"] == before["max_priority"]
    )
    # then no row counts as late
    for _ in range(64):
        buffer.sample()
    assert_episodes(buffer, buffer[:]["collector", "traj_ids"].reshape(-1).tolist())


# --- without workers


SEQUENTIAL = {
    "reaper": partial(ReaPERSampler, 20),
    "slices": partial(TrajectoryRetraceSampler, 20, slice_len=2, behaviour_keys=()),
}


@pytest.mark.parametrize("name", SEQUENTIAL)
def test_columns_belong_to_one_environment_each(name):
    def buffer():
        return buffer_with(SEQUENTIAL[name](), 20, ndim=2, batch_size=2)

    first, second = [[0, 0], [1, 1]], [[2, 2], [3, 3]]
    mixed = buffer()
    mixed.extend(rows(2, 2, ids=first))
    # a new trajectory is accepted: the first one may have been interrupted
    with pytest.warns(UserWarning, match=INTERRUPTED):
        mixed.extend(rows(2, 2, ids=second))
    with pytest.raises(ValueError, match=r"trajectory 0 continues in a column .*\(ndim=1\) with episodes="):
        mixed.extend(rows(2, 2, ids=first))
    # an id may be used again if its first row is marked as initial, or if its episode has ended
    for marks in ({"is_init": torch.ones(2, 2, 1, dtype=torch.bool)}, {"episode": 2}):
        again = buffer()
        for ids in (first, second, first):
            again.extend(rows(2, 2, ids=ids, **marks))


def event_buffer(**storage):
    sampler = event_sampler(CAPACITY, ("next", "terminated"), HISTORY)
    return buffer_with(sampler, CAPACITY, storage=LazyTensorStorage(CAPACITY, **storage), batch_size=2)


def test_tables_must_be_there_before_they_are_shared():
    buffer = event_buffer(shared_init=True)
    process = torch.multiprocessing.get_context("spawn").Process(target=print, args=(buffer,))
    with pytest.raises(RuntimeError, match=r"sent to another process before its first write.* rb.extend"):
        process.start()


def test_only_the_learner_makes_the_state():
    sampler = ReaPERSampler(9)
    # pickle as for a spawned process
    multiprocessing.context.set_spawning_popen(object())
    sampler = pickle.loads(pickle.dumps(sampler))
    multiprocessing.context.set_spawning_popen(None)
    buffer = buffer_with(sampler, 9, ndim=2, batch_size=2)
    with pytest.raises(
        RuntimeError, match=r"ReaPERSampler: .* storage of shape \(5, 2\), because the learner would not see it"
    ):
        buffer.extend(rows(2, 2, ids=[[0, 0], [1, 1]]))


def test_no_counter_of_a_shared_buffer_is_remembered():
    """On an accelerator the learner must read the cursor, which other processes move."""
    buffer = buffer_with(ProportionalSampler(), 9, compilable=True, batch_size=2)
    buffer.extend(rows(2))
    multiprocessing.context.set_spawning_popen(object())
    try:
        copied = pickle.loads(pickle.dumps((buffer.storage, buffer.writer)))
    finally:
        multiprocessing.context.set_spawning_popen(None)
    assert [part.known_counters for part in (*copied, buffer.storage, buffer.writer)] == [None] * 4


def numbers(*x, done=()):
    return rows(len(x), ids=[0] * len(x), done=done, x=torch.tensor(x))


def empty_and_write(emptied, written):
    emptied.empty()
    written.extend(numbers(2, 9))


def test_what_another_process_empties_or_writes_is_known():
    """The tables, what conditions remember, and the cursor are shared, but not the writer's list of open episodes."""
    emptied = event_buffer()
    emptied.extend(numbers(1, 2, 3))
    tables = EventTables(
        [EventSpec("best", Quantile("x", 0.5), 1), EventSpec("new", Novel("x"), 1)], {"best": 20, "new": 20}
    )
    written = TensorDictReplayBuffer(storage=LazyTensorStorage(20), writer=EventTableWriter(tables), batch_size=2)
    written.extend(numbers(1))
    for buffer in (emptied, written):
        buffer.share()
    context = torch.multiprocessing.get_context("spawn")
    process = context.Process(target=empty_and_write, args=(emptied, written))
    process.start()
    process.join(120)
    assert process.exitcode == 0 and len(emptied) == 0 and len(written) == 3
    emptied.extend(numbers(4, 5, done=[1]))
    assert emptied.writer.tables["end"].index().tolist() == [0, 1]
    written.extend(numbers(2, 3, 1))
    # the quantiles are 1, 1, 2, 2 and 2
    assert tables["best"].index().tolist() == [1, 2, 4] and tables["new"].index().tolist() == [0, 1, 2, 4]


def use_and_report(buffer, update, errors):
    try:
        buffer.sample()
        if update:
            buffer.update_priority(torch.tensor([0]), torch.ones(1))
        else:
            buffer.extend(random_rows(1))
        errors.put("")
    except RuntimeError as error:
        errors.put(str(error))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["proportional", "slices, proportional", "tables, proportional"])
def test_a_forked_process_does_not_change_its_copy_in_silence(name):
    buffer = buffer_with(SAMPLERS[name](9), 9, batch_size=4)
    buffer.extend(random_rows(4))
    context = torch.multiprocessing.get_context("fork")
    errors = context.Queue()
    for update in (True, False):
        process = context.Process(target=use_and_report, args=(buffer, update, errors))
        process.start()
        assert "'spawn', or make the buffer in this one" in errors.get(timeout=60)
        process.join(60)
    buffer.extend(random_rows(4))
    assert len(buffer.sample()) == 4
