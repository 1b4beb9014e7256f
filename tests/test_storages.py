"""What storages hold: rows without graphs, agents of different shapes, lists, rows from before."""

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack, tensorclass
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyMemmapStorage, LazyStackStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from tests.data import SAMPLERS, buffer_with, event_sampler, learn, random_rows, rows
from tests.params import both_buffers
from tests.stacks import numbered_stacks
from torchrl_replay_ext import CompilableReplayBuffer, CompilableTensorStorage, FrameStackStorage, ProportionalSampler
from torchrl_replay_ext.writers.round_robin import CompilableWriter

CAPACITY = 20
NAMES = ["uniform", "proportional", "rank", "recency", "reaper", "tables", "slices", "decoupled"]
# these read no stored entries, so they work with lists
ON_LISTS = ["proportional", "rank", "recency"]


# --- rows with a graph


WRITES = {
    "extend": lambda rb, data: rb.extend(data),
    "wrapping": lambda rb, data: [rb.extend(data.clone()) for _ in range(4)],
    "add": lambda rb, data: [rb.add(row) for row in data],
    "set": lambda rb, data: rb.storage.set(torch.arange(len(data)), data),
    "set slice": lambda rb, data: rb.storage.set(slice(0, len(data)), data),
    "lazy stack": lambda rb, data: rb.extend(lazy_stack(list(data.unbind(0)))),
    "write_at": lambda rb, data: rb.writer.write_at(torch.arange(len(data)), data),
}


def without_graph(rb):
    return not any(column.requires_grad for column in rb.storage[:].values(True, True))


def rows_with_graph(parameter):
    data = numbered_stacks(3, first=1, dtype=torch.float32).set("value", torch.ones(3))
    return data.apply(lambda column: column * parameter if column.is_floating_point() else column)


@pytest.mark.parametrize("storage", [CompilableTensorStorage, FrameStackStorage])
@pytest.mark.parametrize("write", WRITES)
def test_rows_are_stored_without_their_graph(write, storage):
    rb = CompilableReplayBuffer(storage=storage(10), batch_size=2)
    parameter = torch.ones((), requires_grad=True)
    for _ in range(2):
        data = rows_with_graph(parameter)
        WRITES[write](rb, data)
        # fails if a stored row has the graph of an earlier write
        data["value"].sum().backward()
        assert without_graph(rb)
    assert torch.equal(rb[:]["value"], torch.ones(len(rb)))


@pytest.mark.parametrize("storage", [CompilableTensorStorage, FrameStackStorage])
def test_graphs_store_rows_without_their_graph(storage):
    rb = CompilableReplayBuffer(storage=storage(10), batch_size=2)
    rb.extend(rows_with_graph(torch.ones(())))
    parameter = torch.ones((), requires_grad=True)

    @torch.compile(fullgraph=True)
    def write():
        data = rows_with_graph(parameter)
        rb.extend(data)
        return data["value"].sum()

    for _ in range(2):
        write().backward()
        assert without_graph(rb)
    assert len(rb) == 9 and parameter.grad == 6


# --- agents with different shapes


def multi_agent(count, first=0, how="columns", *, sizes=(2, 3), key="position", dtype=torch.float32) -> TensorDict:
    """Rows of agents whose observations have different sizes."""
    data = random_rows(count, first=first)
    agents = [TensorDict({key: torch.full((count, size), first, dtype=dtype)}, [count]) for size in sizes]
    data["agents"] = lazy_stack(agents, 1)
    return data if how == "columns" else lazy_stack([*data.unbind(0)])


@pytest.mark.parametrize("how", ["columns", "rows"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, CompilableTensorStorage, ListStorage, LazyStackStorage])
@pytest.mark.parametrize("name", NAMES)
def test_agents_with_different_shapes(name, storage, how):
    if storage in (ListStorage, LazyStackStorage) and name not in ("uniform", *ON_LISTS):
        pytest.skip("reads stored entries, which a list does not have")
    is_compilable, storage = storage is CompilableTensorStorage, storage(CAPACITY)
    rb = buffer_with(SAMPLERS[name](CAPACITY), CAPACITY, compilable=is_compilable, storage=storage, batch_size=4)
    for first in (0, 8, 16):
        rb.extend(multi_agent(8, first, how))
    batch = learn(rb)
    for agent, size in enumerate((2, 3)):
        position = batch["agents"][..., agent]["position"]
        assert position.shape == (4, size)
        assert torch.equal(position[:, 0], batch["number"] // 8 * 8.0)
    rb.sample()


@pytest.mark.parametrize("how", ["columns", "rows"])
@pytest.mark.parametrize("storage", [LazyTensorStorage, CompilableTensorStorage])
def test_agents_that_do_not_fit_the_stored_ones_are_refused(storage, how):
    rb = TensorDictReplayBuffer(storage=storage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(multi_agent(4, how=how))
    stored = rb[:]
    other_shape = r"the entry \('agents', '1', 'position'\) has shape .*4,?\); the storage needs .*3,?\)"
    for agents, error, message in (
        ({"sizes": (2, 4)}, ValueError, other_shape),
        ({"sizes": (2, 3, 3)}, ValueError, "the entry 'agents' has batch shape"),
        ({"dtype": torch.float64}, TypeError, "needs torch.float32"),
        ({"key": "velocity"}, KeyError, "no entry .*'position'"),
    ):
        with pytest.raises(error, match=message):
            rb.extend(multi_agent(2, how=how, **agents))
        assert len(rb) == 4
    with pytest.raises(KeyError, match=r"no entry \('agents', '0', 'position'\)"):
        rb.extend(random_rows(2))
    assert len(rb) == 4
    rb.extend(multi_agent(4, how=how))
    assert torch.equal(rb[:4]["agents"][:, 1]["position"], stored["agents"][:, 1]["position"])


def test_agents_that_are_stored_with_one_shape():
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(random_rows(4).set("agents", TensorDict({"position": torch.zeros(4, 2, 2)}, [4, 2])))
    with pytest.raises(ValueError, match="the parts of the entry 'agents' differ in shape"):
        rb.extend(multi_agent(4))
    rb.extend(multi_agent(4, 1, sizes=(2, 2)))
    assert rb[:]["agents", "position"].sum(0).tolist() == [[4, 4], [4, 4]]


# --- lists


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("name", ON_LISTS)
def test_a_list_without_a_size(name, storage):
    rb = TensorDictReplayBuffer(storage=storage(), sampler=SAMPLERS[name](CAPACITY))
    rb.extend(random_rows(12))
    rb.extend(random_rows(8, first=12))
    batch = rb.sample(200)
    assert batch["number"].max() > 11
    rb.update_priority(batch["index"], torch.rand(200))
    with pytest.raises(ValueError, match=rf"capacity=20\): the {storage.__name__} has no size and holds 21 rows"):
        rb.add(random_rows(1)[0])
    assert rb.sample(200)["index"].max() < CAPACITY
    with pytest.raises(ValueError, match="holds 21 rows, more than the sampler's capacity"):
        TensorDictReplayBuffer(storage=rb.storage, sampler=SAMPLERS[name](CAPACITY)).sample(8)


@pytest.mark.parametrize("storage", [ListStorage, LazyStackStorage])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("uniform", "tables")])
def test_a_list_and_a_sampler_without_a_size(name, storage):
    rb = TensorDictReplayBuffer(storage=storage(), sampler=SAMPLERS[name](None), batch_size=8)
    message = rf"has no size. Pass a size to the storage, {storage.__name__}\(1000\), or to the sampler, \w+\(capacity="
    with pytest.raises(ValueError, match=message):
        rb.extend(random_rows(4))


def test_event_tables_need_a_storage_with_a_size():
    sampler = event_sampler(10, "event")
    with pytest.raises(ValueError, match=r"EventTableWriter: the ListStorage has no size; pass one"):
        buffer_with(sampler, CAPACITY, storage=ListStorage())


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyStackStorage])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("uniform", "tables")])
def test_one_transition_per_slot(name, storage, filled):
    if filled and (storage is LazyTensorStorage or name not in ON_LISTS):
        pytest.skip("only lists whose entries are not read take such rows after others")
    rb = TensorDictReplayBuffer(storage=storage(CAPACITY), sampler=SAMPLERS[name](CAPACITY))
    if filled:
        rb.extend(random_rows(5))
    with pytest.raises(ValueError, match=r"each slot of the storage holds entries of shape \(5,\)"):
        rb.extend(torch.stack([random_rows(5) for _ in range(4)]))
    assert not filled or rb.sample(100)["index"].max() < 5


# --- compiled writes


@tensorclass
class Row:
    """Two entries of a row."""

    first: torch.Tensor
    second: torch.Tensor


def numbers(first, count, *shape):
    return torch.arange(first, first + count).view(-1, *[1] * len(shape)).expand(count, *shape).float()


def row_class(first, count):
    return Row(first=numbers(first, count), second=numbers(first, count, 2), batch_size=[count])


DATA = {
    "tensor": lambda first, count: numbers(first, count, 3),
    "pytree": lambda first, count: {"x": numbers(first, count), "y": (numbers(first, count, 2), numbers(first, count))},
    "nested": lambda first, count: TensorDict({"x": numbers(first, count), "y": {"z": numbers(first, count)}}, [count]),
    "tensorclass": row_class,
    "nested tensorclass": lambda first, count: TensorDict({"row": row_class(first, count)}, [count]),
    "agents": lambda first, count: multi_agent(count, first),
}


@pytest.mark.parametrize("kind", DATA)
def test_a_graph_writes_data_of_any_kind(kind):
    make = DATA[kind]
    storage, eager, data = CompilableTensorStorage(10), CompilableTensorStorage(10), make(0, 2)
    for each in (storage, eager):
        each.set(torch.arange(2), data)
    write = torch.compile(storage.set, fullgraph=True)
    for first in (2, 5, 7):
        index, data = torch.arange(first, first + 3), make(first, 3)
        write(index, data)
        eager.set(index, data)
        assert len(storage) == len(eager) == first + 3
    for got, expected in zip(tree_leaves(storage[:]), tree_leaves(eager[:]), strict=True):
        assert torch.equal(got, expected)


def test_a_graph_refuses_data_of_another_kind():
    storage = CompilableTensorStorage(10)
    storage.set(torch.arange(2), numbers(0, 2))
    write = torch.compile(storage.set)
    with pytest.raises(KeyError, match=r"the data has the entries \[.*\], the storage Tensor"):
        write(torch.arange(2), DATA["nested"](0, 2))


# --- rows from before


def steps(first, count):
    return TensorDict({"step": torch.arange(first, first + count)}, [count])


@pytest.mark.parametrize("make", [LazyTensorStorage, CompilableTensorStorage, LazyMemmapStorage, ListStorage])
@pytest.mark.parametrize(("filled", "index"), [(6, [6, 7, 8]), (9, [9, 0, 1]), (10, [0, 1, 2]), (13, [3, 4, 5])])
def test_a_new_buffer_goes_on_after_the_stored_rows(make, filled, index):
    storage = make(10)
    TensorDictReplayBuffer(storage=storage).extend(steps(0, filled))
    if make is ListStorage and filled == 13:
        pytest.skip("a list does not know which of its rows was written last")
    is_compilable = make is CompilableTensorStorage
    writer = None if is_compilable else CompilableWriter()
    rb = (CompilableReplayBuffer if is_compilable else TensorDictReplayBuffer)(storage=storage, writer=writer)
    assert sorted(int(row["step"]) for row in rb[:]) == list(range(max(filled - 10, 0), filled))
    assert rb.extend(steps(filled, 3)).tolist() == index
    assert sorted(int(row["step"]) for row in rb[:]) == list(range(max(filled - 7, 0), filled + 3))
    rb.add(steps(filled + 3, 1)[0])
    assert sorted(int(row["step"]) for row in rb[:]) == list(range(max(filled - 6, 0), filled + 4))


@pytest.mark.parametrize("make", [LazyTensorStorage, CompilableTensorStorage])
def test_a_new_buffer_of_several_environments_goes_on_after_the_stored_rows(make):
    storage = make(12, ndim=2)
    TensorDictReplayBuffer(storage=storage, dim_extend=0).extend(steps(0, 6).reshape(2, 3))
    rb = TensorDictReplayBuffer(storage=storage, writer=CompilableWriter(), dim_extend=0)
    rb.extend(steps(6, 3).reshape(1, 3))
    assert rb[:]["step"].flatten().tolist() == list(range(9))


def test_a_used_writer_keeps_its_position():
    writer = CompilableWriter()
    TensorDictReplayBuffer(storage=LazyTensorStorage(10), writer=writer).extend(steps(0, 3))
    storage = LazyTensorStorage(10)
    TensorDictReplayBuffer(storage=storage).extend(steps(0, 6))
    rb = TensorDictReplayBuffer(storage=storage, writer=writer)
    assert rb.extend(steps(3, 2)).tolist() == [3, 4]


CURSORS = [
    (2, 3),
    (-1, 10),
    (slice(1, 4), 4),
    (range(2, 5), 5),
    ([0, 6], 7),
    (torch.tensor([4, 1]), 5),
    (torch.tensor([-2]), 9),
    (torch.arange(10) == 3, 4),
]


@pytest.mark.parametrize(("cursor", "length"), CURSORS)
def test_rows_that_are_written_again_do_not_count_twice(cursor, length):
    storage = CompilableTensorStorage(10)
    data = steps(0, 10)[cursor]
    for _ in range(2):
        storage.set(cursor, data)
        assert len(storage) == length


def test_a_slot_that_does_not_exist_changes_nothing():
    storage = CompilableTensorStorage(10)
    storage.set(torch.arange(5), steps(0, 5))
    with pytest.raises(IndexError, match="step 12 is not in a storage of 10 steps"):
        storage.set(torch.tensor([12]), steps(0, 1))
    assert len(storage) == 5


def test_flags_of_rows_that_were_never_written_are_false(monkeypatch):
    # other bytes than 0 and 1 count as themselves in graphs, which compute with flags as numbers
    init = LazyTensorStorage._init

    def fill(storage, data):
        init(storage, data)
        storage._storage["next", "done"].view(torch.uint8).fill_(127)

    monkeypatch.setattr(LazyTensorStorage, "_init", fill)
    storage = CompilableTensorStorage(10)
    storage.set(range(3), random_rows(3))
    assert not storage._storage["next", "done"][3:].view(torch.uint8).any()


# --- unusual rows


@both_buffers
@pytest.mark.parametrize("kind", [NonTensorData, NonTensorStack])
def test_entries_that_are_not_tensors_are_written_and_overwritten(kind, compilable):
    def named(names, first):
        data = rows(2, first=first)
        data["name"] = NonTensorData(names[0], batch_size=[2]) if kind is NonTensorData else NonTensorStack(*names)
        return data

    rb = buffer_with(ProportionalSampler(5), 5, compilable=compilable, batch_size=2)
    expected = [None] * 5
    for number, names in enumerate((["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"])):
        rb.extend(named(names, 2 * number))
        for row, name in enumerate(names[:1] * 2 if kind is NonTensorData else names):
            expected[(2 * number + row) % 5] = name
    assert [rb[slot]["name"] for slot in range(5)] == expected


def test_data_on_the_meta_device_is_refused():
    rb = buffer_with(ProportionalSampler(4), 4, compilable=True, batch_size=2)
    rb.extend(rows(2))
    data = rows(1, first=2)
    data["next", "done"] = data["next", "done"].to("meta")
    with pytest.raises(ValueError, match="meta device"):
        rb.extend(data)
    assert len(rb) == rb.write_count == 2


def test_one_step_per_environment_can_be_written_to_columns():
    rb = buffer_with(ProportionalSampler(12, td_error="absolute", alpha=1.0, eps=0.0), 12, compilable=True, ndim=2)

    def step(number):
        return rows(3, first=3 * number, td_error=torch.arange(3.0) + 3 * number + 1).reshape(3, 1)

    rb.extend(step(0))
    for number in range(1, 6):
        assert rb.extend(step(number)).tolist() == [[number % 4, env] for env in range(3)]
        assert len(rb) == 3 * min(number + 1, 4)
    written = rb.storage[:]["number"]
    assert written.tolist() == [[12, 13, 14], [15, 16, 17], [6, 7, 8], [9, 10, 11]]
    priority = written.flatten() + 1.0
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage), (priority / priority.sum()).double())
