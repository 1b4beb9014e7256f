"""Conditions of events against plain Python: thresholds, and those that adapt to the transitions written before."""

import copy
import math
import operator
from collections import Counter, deque

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.emulated_device import EmulatedDevice
from tests.events import scripted
from torchrl_replay_ext import EventSpec, EventTables, EventTableWriter, Novel, Quantile, Threshold

REWARD = ("next", "reward")
SPECS = [
    EventSpec("best", Quantile(REWARD, 0.9, window=50), 4),
    EventSpec("new", Novel("observation", 2, resolution=0.25), 3),
]

OPERATORS = {
    **{">": operator.gt, ">=": operator.ge, "<": operator.lt},
    **{"<=": operator.le, "==": operator.eq, "!=": operator.ne},
}
INTEGERS = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]


class NaiveQuantile:
    """Equal to ``Quantile``: the last numbers are sorted for each row."""

    def __init__(self, condition):
        self.q, self.recent = condition.q, deque(maxlen=condition.window)

    def __call__(self, value):
        if not math.isfinite(value):
            return False
        numbers = sorted(self.recent)
        self.recent.append(value)
        # the smallest number that at least q of all numbers do not exceed
        least = next((x for i, x in enumerate(numbers) if i + 1 >= self.q * len(numbers)), math.inf)
        return value > least


class NaiveNovel:
    """Equal to ``Novel``, with an exact count of each state."""

    def __init__(self, condition):
        self.times, self.resolution, self.seen = condition.times, condition.resolution, Counter()

    def __call__(self, state):
        if self.resolution is not None:
            state = [math.floor(x / self.resolution) for x in state]
        self.seen[tuple(state)] += 1
        return self.seen[tuple(state)] <= self.times


def make(device="cpu"):
    tables = EventTables(SPECS, {"best": 20, "new": 30})
    storage = LazyTensorStorage(60, device=device)
    return TensorDictReplayBuffer(storage=storage, writer=EventTableWriter(tables), batch_size=4), tables


def occurs(condition, values, pieces=1):
    """Whether the event occurs in each row, for rows that are written in pieces."""
    condition = copy.deepcopy(condition)
    return [bool(x) for part in values.chunk(pieces) for x in condition.occurs(part)]


def contents(rb, tables):
    stored = rb.storage[:]["number"]
    return {name: stored[tables[name].index()].tolist() for name in tables}


def numbers_of(dtype):
    """Some numbers of an integer dtype, the smallest and the largest ones among them, as a list and as a column."""
    low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    numbers = sorted({low, min(low + 1, high), 0, 1, min(44, high), max(high - 1, low), high})
    return numbers, torch.tensor(numbers, dtype=dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", OPERATORS)
def test_thresholds_compare_integers_with_any_number(dtype, op):
    numbers, column = numbers_of(dtype)
    low, high = numbers[0], numbers[-1]
    values = [low - 1, low, low + 0.5, 0, 1, 44, 300, -212, high - 1, high, high + 1, 2**63, -(2**63) - 1, 2**70]
    values += [0.5, -0.5, 1 - 2.0**-40, 2.0**53 + 2, 2.0**63, -(2.0**63), 1e300, math.inf, -math.inf]
    for value in values:
        expected = [OPERATORS[op](number, value) for number in numbers]
        assert Threshold("x", op, value).occurs(column.unsqueeze(1)).flatten().tolist() == expected, value


@pytest.mark.parametrize("value", [np.float32(2.5), np.int64(2**62 + 1), torch.tensor(2**62 + 1), torch.tensor(2.5)])
def test_the_value_of_a_threshold_may_be_of_numpy_or_torch(value):
    numbers = [2, 3, 2**62, 2**62 + 1, 2**62 + 2]
    found = Threshold("x", ">=", value).occurs(torch.tensor(numbers))
    assert found.tolist() == [number >= value.item() for number in numbers]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("op", OPERATORS)
def test_thresholds_of_fractions_have_the_precision_of_the_entry(dtype, op):
    largest = torch.finfo(dtype).max
    column = torch.tensor([-math.inf, -2.0, 0.1, 300.0, largest, math.inf, math.nan], dtype=torch.float64).to(dtype)
    # the second to last ones round to the largest numbers of float16 and float32
    for value in (0.1, 300, 70_000.0, -1e300, 65_519.0, 3.4028235e38, math.inf):
        rounded = float(torch.tensor(value, dtype=torch.float64).to(dtype))
        if math.isinf(rounded):
            rounded = value
        assert Threshold("x", op, value).occurs(column).tolist() == [OPERATORS[op](x, rounded) for x in column.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_large_integers_are_compared_with_floats(dtype):
    column = torch.tensor([1e31, 1.0, -1e31], dtype=dtype)
    assert Threshold("x", ">", 10**30).occurs(column).tolist() == [True, False, False]
    assert Threshold("x", "<", -(10**30)).occurs(column).tolist() == [False, False, True]


@pytest.mark.parametrize("op", OPERATORS)
def test_a_graph_compares_integers_with_a_number_outside_of_their_range(op):
    steps = torch.tensor([0, 43, 44, 45, 255], dtype=torch.uint8)
    occurs = torch.compile(Threshold("steps", op, 300).occurs, backend="eager", fullgraph=True)
    assert occurs(steps).tolist() == [OPERATORS[op](step, 300) for step in steps.tolist()]


@pytest.mark.parametrize("saved", ["state_dict", "dumps", "copy"])
def test_a_restored_buffer_remembers_what_the_saved_one_did(saved, tmp_path):
    data = scripted(300, seed=2, p_done=1)
    rb, tables = make()
    rb.extend(data[:150].clone())
    if saved == "copy":
        other = copy.deepcopy(rb)
    else:
        other, _ = make()
        # what the other one remembers is replaced
        other.extend(scripted(40, seed=3))
        if saved == "dumps":
            rb.dumps(tmp_path)
            other.loads(tmp_path)
        else:
            other.load_state_dict(copy.deepcopy(rb.state_dict()))
    for each in (rb, other):
        each.extend(data[150:].clone())
    assert len(tables["best"]) > 5 and len(tables["new"]) > 5
    assert contents(other, other.writer.tables) == contents(rb, tables)


def assert_tables_of_a_new_buffer(rb, data):
    """The tables of ``rb`` are those of a buffer to which only ``data`` was written."""
    fresh, tables = make()
    fresh.extend(data.clone())
    assert contents(rb, rb.writer.tables) == contents(fresh, tables)


def test_an_emptied_buffer_forgets():
    data = scripted(60, seed=4, p_done=1)
    rb, _ = make()
    rb.extend(scripted(60, seed=5))
    rb.empty()
    rb.extend(data.clone())
    assert_tables_of_a_new_buffer(rb, data)


def test_a_refused_write_is_not_remembered():
    data = scripted(80, seed=6, p_done=1)
    rb, _ = make()
    rb.extend(data[:40].clone())
    for change in (lambda rows: rows.set("number", rows["number"].float()), lambda rows: rows["next"].pop("done")):
        rows = scripted(40, seed=7)
        change(rows)
        with pytest.raises((TypeError, KeyError)):
            rb.extend(rows)
    rb.extend(data[40:].clone())
    assert_tables_of_a_new_buffer(rb, data)


@pytest.mark.parametrize("q", [0.001, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("window", [1, 2, 7, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_values_above_the_quantile(q, window, ties):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(400, 1, generator=generator)
    if ties:
        values = (2 * values).round()
    values[::50] = torch.tensor([math.nan, math.inf] * 4).unsqueeze(1)
    condition = Quantile("x", q, window)
    naive = NaiveQuantile(condition)
    expected = [naive(float(value)) for value in values]
    assert occurs(condition, values) == occurs(condition, values, pieces=9) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize(("times", "resolution"), [(1, None), (3, None), (2, 2.0)])
def test_states_are_counted(dtype, times, resolution):
    states = torch.randint(0, 2 if dtype == torch.bool else 5, (400, 2, 2)).to(dtype)
    condition = Novel("x", times, resolution)
    naive = NaiveNovel(condition)
    expected = [naive(state.flatten().tolist()) for state in states]
    assert occurs(condition, states) == occurs(condition, states, pieces=9) == expected


def test_states_that_differ_little_are_told_apart_and_zeros_are_equal():
    states = torch.cat([torch.eye(300), torch.eye(300) + torch.eye(300) * 2.0**-20, torch.eye(300) / 2])
    assert all(occurs(Novel("x"), states))
    assert occurs(Novel("x"), torch.tensor([[0.0, 1.0], [-0.0, 1.0]])) == [True, False]
    one_hot = torch.nn.functional.one_hot(torch.arange(900)).bool()
    assert all(occurs(Novel("x"), one_hot))


def test_a_sketch_misses_as_many_states_as_documented():
    states = torch.arange(16_384).unsqueeze(1)
    for width, missed in ((16_384, 1 / 6), (32_768, 1 / 40)):
        late = torch.tensor(occurs(Novel("x", width=width), states, pieces=64)[-2_000:])
        # on average over the last eighth of them
        assert 0.6 * missed < 1 - late.float().mean() < 1.1 * missed
    # a count is never too small
    assert not any(occurs(Novel("x", width=64), states.repeat(2, 1))[16_384:])
    assert sum(occurs(Novel("x", 254), torch.zeros(600, 1))) == 254


def test_on_an_accelerator_events_are_the_same():
    data = scripted(120, seed=8, p_done=1)
    rb, tables = make()
    rb.extend(data.clone())
    with EmulatedDevice("torchrl_replay_ext") as device:
        on_device, other = make(device="emulated")
        on_device.extend(data.to("emulated"))
        on_device.empty()
        rows = data.to("emulated")
        device.waits.clear()
        on_device.extend(rows)
        # one copy for all flags, and one for each of the two conditions
        assert sum(device.waits.values()) == 3, device.waits
        for name in tables:
            assert other[name].index().cpu().tolist() == tables[name].index().tolist()


def test_entries_that_do_not_fit():
    rb, _ = make()
    for key in (REWARD, "observation"):
        with pytest.raises(KeyError, match="the data has no entry"):
            rb.extend(scripted(9).exclude(key))
    with pytest.raises(ValueError, match="one value per transition"):
        rb.extend(scripted(9).set(REWARD, torch.rand(9, 2)))
    assert not len(rb)


def test_the_rows_of_columns_are_read_in_the_order_of_time():
    tables = EventTables([EventSpec("new", Novel("x"), 1)], {"new": 20})
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(20, ndim=2), writer=EventTableWriter(tables), batch_size=4)
    x = torch.tensor([[1, 2], [1, 3], [3, 3], [4, 2]])
    done = torch.zeros(4, 2, 1, dtype=torch.bool)
    # the buffer takes [environments, steps]
    rb.extend(TensorDict({"x": x, "next": {"done": done}}, [4, 2]).transpose(0, 1))
    assert tables["new"].index().tolist() == [0, 1, 3, 6]
