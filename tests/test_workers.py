"""Collectors in spawned processes write to a buffer, and a learner draws and updates."""

import multiprocessing.context
import pickle
from functools import partial

import pytest
import torch
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs import GymEnv

from tests.data import buffer_with, event_sampler, rows
from tests.reference import NaivePER, NaiveReaPER
from tests.samplers.experience import INTERRUPTED
from torchrl_replay_ext import (
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
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


@PrioritizedSampler.register
class SideBySide(Sampler):
    """Many samplers in one buffer: workers start slowly, so all samplers are tested with the same workers."""

    reduction = "max"
    default_priority = 1.0

    def __init__(self, samplers):
        self.samplers = samplers

    def mark_update(self, index, *, storage=None):
        for sampler in self.samplers.values():
            sampler.mark_update(index, storage=storage)

    def sample(self, storage, batch_size):
        return self.samplers["per"].sample(storage, batch_size)

    def state_dict(self):
        raise NotImplementedError

    load_state_dict = dumps = loads = state_dict

    def _empty(self):
        for sampler in self.samplers.values():
            sampler._empty()

    def update_priority(self, index, priority, *, storage=None, **_):
        """Call ``locked``; the buffer holds its locks here, so there are no writes."""
        self.locked()


def make_buffer():
    tables = EventTables([EventSpec("end", ("next", "terminated"), HISTORY)], {"end": CAPACITY})
    eta = {"default": 0.5, "end": 0.5}
    samplers = {
        "per": ProportionalSampler(CAPACITY),
        "reaper": ReaPERSampler(CAPACITY, episodes=Episodes(num_streams=2), omega=0.5),
        "tables": EventTableSampler(tables, eta=eta, min_size=1, priority={"kind": "proportional"}),
    }
    writer = EventTableWriter(tables)
    return buffer_with(SideBySide(samplers), CAPACITY, compilable=True, writer=writer, batch_size=10)


class Learner:
    """Draws and updates, and compares with references that read only the stored data."""

    def __init__(self, buffer):
        self.buffer, self.samplers = buffer, buffer.sampler.samplers
        self.references = {"per": NaivePER(), "reaper": NaiveReaPER(omega=0.5)}
        self.written = 0
        self.drawn = []
        self.dropped = 0

    @property
    def data(self):
        return self.buffer.storage[:]

    def read(self):
        """Give the references the transitions written since the last call, in the order of writing."""
        count = self.buffer.write_count - self.written
        slots = (self.written + torch.arange(count)) % CAPACITY
        rows = self.data[slots]
        columns = [rows["collector", "traj_ids"], rows["next", "terminated"], rows["next", "truncated"]]
        for reference in self.references.values():
            for slot, *row in zip(slots.tolist(), *(c.reshape(-1).tolist() for c in columns), strict=True):
                reference.write(slot, *row)
        self.written += count

    def draw(self):
        """Draw batches, and remember their slots."""
        drawn = {}
        for name, reference in self.references.items():
            slots, _ = self.samplers[name].sample(self.buffer.storage, 10)
            reference.draws.draw(slots.tolist())
            drawn[name] = slots
        self.drawn.append(drawn)

    def update(self):
        """Update with TD errors of the oldest batch; late rows must be dropped."""
        for name, slots in self.drawn.pop(0).items():
            reference, error = self.references[name], torch.rand(len(slots))
            late = torch.tensor(reference.draws.late(slots.tolist()))
            before = self.samplers[name].stats()["dropped_updates"]
            self.samplers[name].update_priority(slots, error, storage=self.buffer.storage)
            assert self.samplers[name].stats()["dropped_updates"] - before == late.sum()
            self.dropped += late.sum()
            reference.update(slots[~late].tolist(), error[~late].tolist())

    def step(self):
        self.read()
        self.draw()
        if len(self.drawn) > 3:
            self.update()
            self.check()

    def check(self):
        for name, reference in self.references.items():
            expected = torch.tensor(reference.probabilities(), dtype=torch.float64)
            probabilities = self.samplers[name].probabilities(self.buffer.storage)
            torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-9)

    def episodes(self):
        """Slots of each stored episode, in time order."""
        order = (self.written + torch.arange(CAPACITY)) % CAPACITY
        ids = self.data["collector", "traj_ids"].reshape(-1)[order]
        return [order[ids == number] for number in ids.unique()]

    def check_tables(self):
        ended = self.data["next", "terminated"].reshape(-1)
        expected = [slots[-HISTORY:] for slots in self.episodes() if ended[slots[-1]]]
        expected = sorted(slot for slots in expected for slot in slots.tolist())
        assert sorted(self.buffer.writer.tables["end"].index().tolist()) == expected and expected
        slots, info = self.samplers["tables"].sample(self.buffer.storage, 40)
        assert set(slots[info["table"] == 1].tolist()) <= set(expected)
        assert (info["table"] == 1).sum() == 20


def test_workers_write_to_the_buffer():
    buffer = make_buffer()
    buffer.share()
    learner = Learner(buffer)
    collector = MultiAsyncCollector(
        [make_env] * 2,
        frames_per_batch=40,
        total_frames=400,
        replay_buffer=buffer,
        auto_register_policy_transforms=False,
    )
    try:
        for _ in collector:
            buffer.sampler.locked = learner.step
            buffer.update_priority(torch.zeros(1, dtype=torch.int64), torch.zeros(1))
            buffer.sampler.locked = None
    finally:
        collector.shutdown()
    learner.read()
    assert len(buffer) == CAPACITY < learner.written
    assert learner.dropped > 0
    learner.check()
    learner.check_tables()


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
