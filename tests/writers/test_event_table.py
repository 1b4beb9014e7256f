"""EventTableWriter: the content of tables against plain Python lists, rejected writes, state."""

import copy
from functools import partial

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torchrl.data import LazyStackStorage, LazyTensorStorage, ListStorage, ReplayBuffer, TensorDictReplayBuffer

from tests.data import buffer_with, event_sampler, rows
from tests.events import NaiveTables, scripted
from tests.params import both_buffers
from tests.samplers.event_tables import sampler_of
from tests.samplers.experience import Refuses
from torchrl_replay_ext import Episodes, EventSpec, EventTables, EventTableWriter, FrameStackStorage
from torchrl_replay_ext.writers.round_robin import CompilableWriter

SPEC = EventSpec("a", ("next", "a"), 5)
# (event, history, table), capacities, storage size
LAYOUTS = {
    "one": ([("a", 5, "a")], {"a": 20}, 60),
    "each": ([("a", 7, "a"), ("b", 3, "b")], {"a": 12, "b": 6}, 50),
    "shared": ([("a", 9, "t"), ("b", 1, "t")], {"t": 15}, 40),
    "tight": ([("a", 6, "t"), ("b", 2, "t")], {"t": 8}, 11),
    "whole": ([("a", 30, "t")], {"t": 20}, 20),
}


def buffer(tables, size, ndim=1, storage=None, sampler=None, **writer):
    storage = LazyTensorStorage(size, ndim=ndim) if storage is None else storage
    writer = EventTableWriter(tables, **writer)
    return TensorDictReplayBuffer(storage=storage, writer=writer, sampler=sampler, batch_size=4)


def marked(*shape, event=(), **entries):
    """Numbered transitions of one episode; the event ("next", "a") occurs at the positions ``event``."""
    data = rows(torch.Size(shape).numel(), **entries)
    data["next", "a"] = torch.zeros_like(data["next", "done"])
    data["next", "a"][list(event)] = True
    return data.reshape(shape)


def make(specs, capacity, size=None, *, ndim=1, sampler=None, **writer):
    events = [EventSpec(event, ("next", event), history, table=table) for event, history, table in specs]
    if size is None:
        size, tables = sum(capacity.values()), EventTables(events, capacity, retention="pinned")
    else:
        tables = EventTables(events, capacity)
    return buffer(tables, size, ndim, sampler=None if sampler is None else sampler(tables), **writer), tables


def contents(rb, tables, name):
    stored = rb.storage[:]["number"].reshape(-1)
    return stored[tables[name].index()].tolist()


def check(rb, tables, naive):
    for name, expected in naive.tables.items():
        assert contents(rb, tables, name) == list(expected), name
        assert len(tables[name]) == len(expected)
    assert contents(rb, tables, "default") == list(naive.default)
    if naive.size is None:
        stored = set().union(*(contents(rb, tables, name) for name in tables))
        assert stored == naive.stored()
        live = set().union(*(tables[name].index().tolist() for name in tables))
        assert len(live) == len(stored) <= sum(naive.capacity.values())


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_tables_hold_what_the_algorithm_says_however_the_data_is_cut(layout, chunk, streams, retention):
    """Streams are told apart by ids of trajectories or of environments."""
    specs, capacity, size = LAYOUTS[layout]
    if retention == "pinned":
        capacity, size = {**capacity, "default": max(30, size // 2)}, None
    rb, tables = make(specs, capacity, size, episodes=Episodes(traj_key="env") if chunk == 1 else None)
    naive = NaiveTables(specs, capacity, size)
    data = scripted(400, streams=streams, seed=streams, p_event=0.08)
    for number, part in enumerate(data.split(chunk)):
        if chunk == 1:
            rb.add(part[0].clone())
        else:
            rb.extend(part.clone())
        naive.extend(part)
        if chunk != 1 or number % 20 == 0:
            check(rb, tables, naive)
    check(rb, tables, naive)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
@pytest.mark.parametrize("is_first", [True, False])
@both_buffers
def test_a_write_of_no_rows_changes_nothing(compilable, shape, is_first):
    rb = buffer_with(event_sampler(5, ("next", "a"), 5), 20, compilable=compilable, ndim=len(shape), batch_size=4)
    tables = rb.writer.tables
    # environments and steps
    some = [2] * len(shape)
    if not is_first:
        rb.extend(marked(*some, event=[1]))
    length, before = len(rb), [tables[name].index().tolist() for name in tables]
    index = rb.extend(marked(*shape))
    assert len(index) == 0 and len(rb) == length
    assert [tables[name].index().tolist() for name in tables] == before
    rb.extend(marked(*some, event=[1]))
    assert len(rb) == length + 2 ** len(shape)


def test_is_init_ends_what_broke_off():
    rb, tables = make([("a", 10, "a")], {"a": 30}, 30, episodes=Episodes(traj_key=None))
    rb.extend(marked(6, event=[5], is_init=torch.arange(6) == 3))
    assert contents(rb, tables, "a") == [3, 4, 5]


def returned_for_three(data):
    """Whether the reward was above .8 four steps ago and has been below it for three since (Gran Turismo's event)."""
    high = torch.nn.functional.pad(data["next", "reward"].reshape(-1) > 0.8, (3, 0))
    return high[:-3] & ~high[1:-2] & ~high[2:-1] & ~high[3:]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_conditions_on_a_history_see_one_episode_however_the_data_is_cut(chunk):

    def rose(data):
        reward = data["next", "reward"].reshape(-1)
        # one row comes before those that are written
        assert len(reward) <= chunk + 1
        return torch.nn.functional.pad(reward.diff() > 0.5, (1, 0))

    specs = [EventSpec("back", returned_for_three, 5, context=3), EventSpec("rose", rose, 2, context=1)]
    tables = EventTables(specs, {"back": 200, "rose": 200})
    rb = buffer(tables, 300)
    data = scripted(200, streams=2, p_done=0.1, seed=4)
    for first in range(0, 200, chunk):
        rb.extend(data[first : first + chunk].clone())
    naive = NaiveTables([("back", 5, "back"), ("rose", 2, "rose")], {"back": 200, "rose": 200}, 300)
    history: dict = {}
    for row in data:
        trajectory = int(row["collector", "traj_ids"])
        rewards = history.setdefault(trajectory, [])
        rewards.append(row["next", "reward"].item())
        back = [reward > 0.8 for reward in rewards[-4:]] == [True, False, False, False]
        events = {"back": back, "rose": len(rewards) > 1 and rewards[-1] - rewards[-2] > 0.5}
        naive.write(trajectory, events, bool(row["next", "done"]))
    for name in ("back", "rose"):
        assert len(naive.tables[name]) > 20
        assert contents(rb, tables, name) == list(naive.tables[name])


@pytest.mark.parametrize(
    "storage",
    [partial(ListStorage, 30), partial(LazyStackStorage, 30), partial(FrameStackStorage, 30, frame_key="frames")],
)
def test_a_condition_on_a_history_reads_any_storage(storage):

    def grows(data):
        sums = data["next", "frames"].flatten(1).double().sum(1)
        return torch.nn.functional.pad(sums.diff() > 0, (1, 0))

    frames = torch.randint(1, 255, (22, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    stacks = frames.unfold(0, 2, 1).movedim(-1, 1)
    data = marked(20, frames=stacks[:-1]).exclude("collector")
    data["next", "frames"] = stacks[1:]
    tables = EventTables([EventSpec("a", grows, 1, context=1)], {"a": 20})
    rb = buffer(tables, 30, storage=storage())
    for first in range(0, 20, 5):
        rb.extend(data[first : first + 5].clone())
    sums = stacks[1:].flatten(1).double().sum(1)
    assert tables["a"].index().tolist() == ((sums.diff() > 0).nonzero().squeeze(1) + 1).tolist()


def test_a_condition_on_a_history_sees_nothing_before_the_first_write_nor_before_empty():
    lengths = []

    def count(data):
        lengths.append(len(data))
        return torch.zeros(len(data), dtype=torch.bool)

    rb = buffer(EventTables([EventSpec("a", count, 5, context=3)], {"a": 20}), 40)
    data = marked(6).exclude("collector")
    rb.extend(data.clone())
    rb.extend(data.clone())
    rb.empty()
    rb.extend(data.clone())
    assert lengths == [6, 9, 6]


@pytest.mark.parametrize("history", [1, 2, 9])
def test_a_state_can_be_loaded_with_another_history_and_its_episodes_end(history):
    data = marked(20, event=[10])
    saved, _ = make([("a", 5, "a")], {"a": 20}, 40)
    saved.extend(data[:10].clone())
    rb, tables = make([("a", history, "a")], {"a": 20}, 40)
    rb.load_state_dict(saved.state_dict())
    rb.extend(data[10:].clone())
    assert contents(rb, tables, "a") == [10]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.set("observation", torch.zeros(20, 5)), ValueError, r"'observation' has shape \(20, 5\)"),
        (lambda d: d.set("observation", d["observation"].double()), TypeError, "'observation' has dtype torch.float64"),
        (lambda d: d["next"].set("reward", d["next", "reward"].long()), TypeError, r"\('next', 'reward'\) has dtype"),
        (lambda d: d.set("extra", d["number"]), KeyError, r"has the entries \['extra'\], but the stored rows do not"),
        (lambda d: d["next"].set("logits", d["number"]), KeyError, r"has the entries \[\('next', 'logits'\)\]"),
        (lambda d: d.pop("number"), KeyError, "the data has no entry 'number', but the stored rows have it"),
    ],
)
@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_rows_that_do_not_fit_are_refused_by_name_and_change_nothing(retention, change, error, message):
    specs, capacity, size = LAYOUTS["each"]
    if retention == "pinned":
        capacity, size = {**capacity, "default": 30}, None
    rb, _ = make(specs, capacity, size, sampler=sampler_of)
    rb.extend(scripted(200, seed=6))
    before, bad = rb[:].clone(), scripted(20)
    change(bad)
    with Refuses(rb, error, message, ("sampler", "writer")):
        rb.extend(bad)
    assert (rb[:] == before).all()


@pytest.mark.parametrize("size", [40, None])
def test_writes_that_fail_in_the_storage_neither_end_an_episode_nor_take_slots(size, monkeypatch):
    rb, tables = make([("a", 5, "a")], {"a": 10} | ({} if size else {"default": 30}), size)
    data = marked(12, event=[9])
    rb.extend(data[:8].clone())
    with monkeypatch.context() as patch:
        patch.setattr(rb.storage, "set", lambda *_arguments, **_keywords: 1 / 0)
        # together they have more rows than there are slots
        for _ in range(20):
            with pytest.raises(ZeroDivisionError):
                rb.extend(data[8:].clone())
    assert contents(rb, tables, "default") == list(range(8))
    rb.extend(data[8:].clone())
    assert contents(rb, tables, "a") == [5, 6, 7, 8, 9] and contents(rb, tables, "default") == list(range(12))


def test_a_storage_that_was_filled_before():
    source = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=4)
    data = marked(100, event=[70, 95])
    source.extend(data[:30].clone())
    eta = {"default": 0.5, "a": 0.5}
    tables = EventTables([SPEC], {"a": 12})
    rb = buffer(tables, 40, storage=source.storage, sampler=sampler_of(tables, eta=eta))
    assert {number for _ in range(100) for number in rb.sample()["number"].tolist()} == {*range(30)}
    # writes go on after the stored rows
    for first, last, size in ((30, 33, 33), (33, 60, 40), (60, 100, 40)):
        rb.extend(data[first:last].clone())
        assert len(tables["default"]) == size
        assert rb.sample()["number"].max() < last
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage).sum(), torch.tensor(1.0).double())
    assert contents(rb, tables, "a") == [66, 67, 68, 69, 70, 91, 92, 93, 94, 95]
    pinned = EventTables([SPEC], {"a": 12, "default": 20}, retention="pinned")
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(40), batch_size=4)
    other.extend(data[:30].clone())
    with pytest.raises(ValueError, match="the storage must be empty at first"):
        buffer(pinned, 40, storage=other.storage, sampler=sampler_of(pinned, eta=eta)).sample()


def test_writing_at_given_slots_takes_them_out_of_the_event_tables():
    rb, tables = make([("a", 5, "a")], {"a": 10}, 40)
    data = marked(30, event=[10])
    rb.extend(data.clone())
    rb.writer.write_at(torch.tensor([7, 9, 20]), data[:3].clone())
    assert tables["a"].index().tolist() == [6, 8, 10]
    rb, _ = make([("a", 5, "a")], {"a": 10, "default": 20})
    with pytest.raises(RuntimeError, match="the tables choose the slots"):
        rb.writer.write_at(3, data[0])


def test_a_copy_may_hold_any_function():
    tables = EventTables([EventSpec("low", lambda td: td["next", "reward"] < 0.5, 2)], {"low": 9})
    rb = buffer(tables, 30)
    rb.extend(scripted(20))
    other = copy.deepcopy(rb)
    for each in (rb, other):
        each.extend(scripted(20, seed=1))
    assert torch.equal(tables["low"].index(), other.writer.tables["low"].index())
    assert other.writer.tables is not tables


@pytest.mark.parametrize(
    ("condition", "change", "error", "message"),
    [
        (("next", "a"), lambda d: d["next"].pop("a"), KeyError, "the data has no entry"),
        (("next", "a"), lambda d: d["next"].set("a", torch.ones(20, 1)), TypeError, "must be bool"),
        (("next", "a"), lambda d: d["next"].set("a", torch.ones(20, 2, dtype=torch.bool)), ValueError, "one value per"),
        (lambda td: td["next", "a"][1:], lambda d: None, ValueError, "one value per transition"),
        (lambda td: True, lambda d: None, TypeError, "must be a tensor, not bool"),
        (("next", "a"), lambda d: d["next"].pop("done"), KeyError, r"no entry \('next', 'done'\)"),
        (("next", "a"), lambda d: d["next"].set("done", torch.ones(20, 2)), ValueError, "one value per transition"),
        (("next", "a"), lambda d: d["collector"].set("traj_ids", torch.ones(20)), TypeError, "must hold integers"),
    ],
)
@pytest.mark.parametrize("retention", ["ring", "pinned"])
def test_bad_data_changes_nothing(condition, change, error, message, retention):
    capacity = {"a": 10} if retention == "ring" else {"a": 10, "default": 30}
    tables = EventTables([EventSpec("a", condition, 3)], capacity, retention=retention)
    rb = buffer(tables, 40)
    bad = scripted(20)
    change(bad)
    with pytest.raises(error, match=message):
        rb.extend(bad)
    assert len(rb) == 0 and rb.write_count == 0 and tables.sizes() == {"default": 0, "a": 0}


def test_several_streams_must_be_told_apart():
    rb, _ = make([("a", 3, "a")], {"a": 10}, 40)
    with pytest.raises(ValueError, match="with trajectory ids"):
        rb.extend(torch.stack([scripted(10), scripted(10)]))
    rb, _ = make([("a", 3, "a")], {"a": 10}, 40, episodes=Episodes(traj_key="worker"))
    with pytest.raises(KeyError, match="no entry 'worker'"):
        rb.extend(scripted(10))


def test_storages_that_do_not_fit():
    tables = EventTables([SPEC], {"a": 5, "default": 10}, retention="pinned")
    with pytest.raises(ValueError, match=r"has 12 slots, the capacities add up to 15"):
        buffer(tables, 12)
    with pytest.raises(ValueError, match="needs a flat storage"):
        buffer(tables, 20, ndim=2)


@pytest.mark.parametrize("writer", [EventTableWriter, CompilableWriter])
def test_a_row_that_is_no_tensordict_is_refused_before_anything_changes(writer):
    rb, _ = make([("a", 3, "a")], {"a": 10}, 40)
    if writer is CompilableWriter:
        rb = TensorDictReplayBuffer(storage=LazyTensorStorage(40), writer=writer(), batch_size=4)
    rb.extend(marked(3))
    row = marked(1)[0].to_dict()
    for add in (rb.add, rb.writer.add):
        with pytest.raises(TypeError, match=rf"{writer.__name__}\.add: the data must be a TensorDict, not dict; write"):
            add(row)
    assert len(rb) == rb.write_count == 3
    assert rb.add(TensorDict(row)) == 3


def test_add_is_refused_in_several_columns_before_anything_changes():
    rb, _ = make([("a", 3, "a")], {"a": 10}, 40, ndim=2)
    rb.extend(marked(2, 3))
    with pytest.raises(ValueError, match=r"EventTableWriter\.add: the storage has ndim=2.*Use extend"):
        rb.add(marked(2))
    assert rb.write_count == 3 and rb.storage.shape[0] == 3


@tensorclass
class Row:
    end: torch.Tensor


@pytest.mark.parametrize("capacity", [{"end": 4}, {"end": 4, "default": 6}])
def test_a_row_may_be_a_tensorclass(capacity):
    retention = "pinned" if "default" in capacity else "ring"
    tables = EventTables([EventSpec("end", "end", history=2)], capacity, retention=retention)
    rb = ReplayBuffer(
        storage=LazyTensorStorage(10), writer=EventTableWriter(tables, episodes=Episodes(done_key="end")), batch_size=4
    )
    for number in range(3):
        assert rb.add(Row(end=torch.tensor([number == 2]), batch_size=[])) == number
    assert tables["end"].index().tolist() == [1, 2]


def test_tables_belong_to_one_buffer():
    events, capacity, size = LAYOUTS["one"]
    rb, tables = make(events, capacity, size)
    with pytest.raises(ValueError, match="give each buffer its own EventTables"):
        TensorDictReplayBuffer(storage=LazyTensorStorage(size), writer=EventTableWriter(tables), batch_size=4)
    rb.extend(scripted(12, events=("a",), p_event=0.5))
    # another writer of the same buffer
    rb.set_writer(EventTableWriter(tables))
    rb.extend(scripted(12, events=("a",), p_event=0.5))
    assert len(tables["default"]) == 24


def test_data_with_another_number_of_lanes_is_refused():
    buffer, tables = make([("a", 1, None)], {"a": 6}, 12, ndim=2)
    buffer.extend(marked(3, 2, event=range(6)))
    with pytest.raises(ValueError, match=r"data of shape \(3, 14\) does not fit a storage of shape \(4, 3\)"):
        buffer.extend(marked(14, 3))
    assert tables.sizes() == {"default": 6, "a": 6}


def test_a_writer_is_restored_over_a_list_storage():
    saved, restored = (buffer(EventTables([SPEC], {"a": 9}), 16, storage=ListStorage(16)) for _ in range(2))
    saved.extend(marked(10, event=[4]))
    restored.load_state_dict(saved.state_dict())
    assert restored.writer.tables["a"].index().tolist() == [0, 1, 2, 3, 4]
