"""The buffer in one compiled graph: draws, state and errors of eager code, at the same cost for every capacity."""

import copy
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from tensordict import TensorDict
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RandomSampler

from tests.data import buffer_with, rows
from tests.params import slow_but
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    Threshold,
    TrajectoryRetraceSampler,
    compile_step,
)

pytestmark = pytest.mark.usefixtures("from_scratch")

BATCH = 8


@pytest.fixture
def same_numbers():
    """Make compiled code draw the same random numbers as eager code."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


# --- experience


class Experience:
    """Numbered transitions that contain their own number; td_error is computed from "error".

    Args:
        layout: "flat", one environment with episodes of 7 steps; "streams", two that alternate, with episodes of 5 and
            8 steps and with trajectory ids; "columns", such two in separate columns, [2, count // 2].
    """

    def __init__(self, layout: str):
        self.layout, self.ndim, self.time = layout, 1 + (layout == "columns"), 0

    def take(self, count: int) -> TensorDict:
        number = torch.arange(count) + self.time * self.ndim
        num_envs = 1 if self.layout == "flat" else 2
        step, env = number // num_envs, number % num_envs
        length = torch.tensor(7) if num_envs == 1 else 5 + 3 * env
        ids = 2 * (step // length) + env if self.layout == "streams" else None
        done = ((step + 1) % length == 0).nonzero().squeeze(1).tolist()
        data = rows(count, first=int(number[0]), done=done, ids=ids, error=(number * 37 % 101).float() / 64)
        self.time += count // self.ndim
        return data if self.ndim == 1 else data.reshape(-1, 2).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Case:
    """A sampler, the experience in its buffer, and the capacity of the buffer."""

    sampler: Callable[[int], Any]
    layout: str = "flat"
    capacity: int = 50

    # whether ``extend`` is part of the graph
    extends: bool = True

    def experience(self) -> Experience:
        return Experience(self.layout)

    def buffer(self, **arguments: Any) -> CompilableReplayBuffer:
        settings = {"ndim": self.experience().ndim, "batch_size": BATCH, **arguments}
        return buffer_with(self.sampler(self.capacity), self.capacity, compilable=True, **settings)


# TD errors are absolute, because a float32 root may differ by one unit in the last place in compiled and eager code.
def proportional(**arguments: Any) -> Callable[[int], Any]:
    arguments = {"alpha": Anneal(0.4, 0.9, 20), "beta": Anneal(0.4, 1.0, 30), "td_error": "absolute", **arguments}
    return lambda capacity: ProportionalSampler(capacity, **arguments)


def reaper(**arguments: Any) -> Callable[[int], Any]:
    arguments = {"omega": Anneal(0.1, 0.5, 20), "beta": Anneal(0.4, 1.0, 30), "td_error": "absolute", **arguments}
    return lambda capacity: ReaPERSampler(capacity, **arguments)


def rank(**arguments: Any) -> Callable[[int], Any]:
    arguments = {"beta": Anneal(0.4, 1.0, 30), **arguments}
    return lambda capacity: RankBasedSampler(capacity, **arguments)


def events(retention: str = "ring", **arguments: Any) -> Callable[[int], Any]:
    def sampler(capacity: int) -> Any:
        specs = [
            EventSpec("rare", Threshold("error", ">", 1.4), 4),
            EventSpec("end", ("next", "done"), 3, table="both"),
            EventSpec("low", Threshold("error", "<", 0.2), 2, table="both"),
        ]
        sizes = {"rare": 9, "both": 15}
        if retention == "pinned":
            sizes["default"] = capacity - 24
        tables = EventTables(specs, sizes, retention=retention)
        eta = {"default": Anneal(0.6, 0.3, 40), "rare": Anneal(0.1, 0.5, 40), "both": Anneal(0.3, 0.2, 40)}
        return EventTableSampler(tables, **{"eta": eta, "min_size": 2, **arguments})

    return sampler


def inside(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"kind": kind, "beta": Anneal(0.4, 1.0, 30), "td_error": "absolute", **arguments}


def slices(anchors: Callable[[int], Any] | None = None, **arguments: Any) -> Callable[[int], Any]:
    def sampler(capacity: int) -> Any:
        drawn_by = "uniform" if anchors is None else anchors(capacity)
        settings = {"slice_len": 4, "behaviour_keys": ("observation",), "anchors": drawn_by, **arguments}
        return TrajectoryRetraceSampler(capacity, **settings)

    return sampler


# add one line for a new sampler
CASES = {
    "uniform, two columns": Case(lambda _: RandomSampler(), "columns"),
    "proportional": Case(proportional()),
    "proportional, stratified": Case(
        proportional(stratified=True, weight_norm="batch", max_priority_within_buffer=True)
    ),
    "rank": Case(rank()),
    "rank, piecewise": Case(rank(segments="piecewise", stratified=False, weight_norm="batch"), "columns"),
    "reaper": Case(reaper()),
    # more than two pages of positions, so that pages are freed and used again
    "reaper, two streams": Case(reaper(episodes=Episodes(num_streams=2)), "streams", capacity=150),
    "reaper, two columns": Case(reaper(weight_norm="buffer", max_priority_within_buffer=True), "columns"),
    "recency": Case(lambda capacity: RecencySampler(capacity, half_life=7.0, beta=0.5)),
    "events, uniform, conditional": Case(
        events(correction="conditional", allocation="multinomial", pair_keys=("observation",)), "streams", extends=False
    ),
    "events, proportional": Case(
        events(priority=inside("proportional", alpha=Anneal(0.4, 0.9, 20))), "columns", extends=False
    ),
    "events, proportional, pinned": Case(events("pinned", priority=inside("proportional")), "streams", extends=False),
    "events, proportional, mixture": Case(
        events(
            priority={"kind": "proportional", "td_error": "absolute"}, correction="mixture", beta=Anneal(0.4, 1.0, 30)
        ),
        extends=False,
    ),
    "slices, uniform, two columns, not padded": Case(slices(pad=False, slice_len=2), "columns"),
    "slices, proportional, two streams": Case(slices(proportional(), episodes=Episodes(num_streams=2)), "streams"),
    "slices, reaper, two columns": Case(slices(reaper()), "columns"),
}
PRIORITIZED = [name for name in CASES if "uniform" not in name and name != "recency"]
# Compilation is slow. The default run has one case of each kind; the others vary the layout or an option.
DEFAULT = (
    "uniform, two columns",
    "proportional",
    "rank",
    "reaper",
    "recency",
    "events, proportional, pinned",
    "slices, proportional, two streams",
)


def step(buffer: CompilableReplayBuffer, data: TensorDict, extends: bool = True) -> TensorDict:
    if extends:
        buffer.extend(data)
    batch = buffer.sample()
    # large TD errors, so that a difference of one unit of mass is unlikely to change a draw
    batch["td_error"] = 1024 * (batch["error"] + data["error"].amax())
    buffer.update_tensordict_priority(batch)
    return batch


def assert_same_batch(first: TensorDict, second: TensorDict) -> None:
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    for key, value in first.items(True, True):
        if key in ("priority_weight", "sample_probability"):
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, second[key])
        else:
            assert torch.equal(value, second[key]), key


def assert_same_sampler(first: Any, second: Any, but: tuple[str, ...] = ()) -> None:
    """Assert that two buffers have equal samplers up to rounding: ``pow`` differs in compiled and eager code.

    Args:
        first: a buffer.
        second: another buffer.
        but: stats that may differ.
    """
    if isinstance(first.sampler, RandomSampler):
        return
    found = []
    for buffer in (first, second):
        stats = buffer.sampler.stats().exclude(*but).cpu().to_dict()
        found.append({**stats, "P": buffer.sampler.probabilities(buffer.storage).cpu()})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


def compare(case: Case) -> None:
    """Feed a compiled and an eager buffer the same experience, from nearly empty until the ring has wrapped often."""
    experience, eager, compiled = case.experience(), case.buffer(), case.buffer()
    counter = CompileCounterWithBackend("inductor")
    graph = torch.compile(lambda data: step(compiled, data, case.extends), fullgraph=True, backend=counter)

    def in_graph(data: TensorDict) -> TensorDict:
        if not case.extends:
            compiled.extend(data)
        return graph(data)

    def both(count: int, write: bool = False) -> None:
        data = experience.take(count)
        seed = random.Random(experience.time).randrange(2**31)
        if write:
            eager.extend(data.clone())
            compiled.extend(data)
            return
        torch.manual_seed(seed)
        expected = step(eager, data.clone())
        torch.manual_seed(seed)
        assert_same_batch(expected, in_graph(data))

    both(4, write=True)
    for buffer in (eager, compiled):
        # tensordict remembers the classes that it has seen, and graphs depend on their number
        buffer.load_state_dict(copy.deepcopy(buffer.state_dict()))
    for number in range(case.capacity):
        both(4)
        if number % 10 == 6:
            # another batch size, in eager code
            both(10, write=True)
        if number == case.capacity // 2:
            # return to a checkpoint
            for buffer, run in ((compiled, in_graph), (eager, lambda data: step(eager, data))):
                saved, ahead = copy.deepcopy(buffer.state_dict()), copy.deepcopy(experience)
                for _ in range(3):
                    run(ahead.take(4))
                buffer.load_state_dict(saved)
    assert counter.frame_count == 1
    assert experience.time * experience.ndim > 3 * case.capacity
    assert len(eager) == len(compiled) == case.capacity
    assert eager.write_count == compiled.write_count
    for key, value in eager[:].items(True, True):
        assert torch.equal(value, compiled[:][key]), key
    assert_same_sampler(eager, compiled)
    if getattr(eager.sampler, "takes_priorities", False):
        assert eager.sampler.stats()["dropped_updates"] == 0


@pytest.mark.usefixtures("same_numbers")
@pytest.mark.parametrize("name", slow_but(DEFAULT, CASES))
def test_one_graph_for_life_draws_what_eager_code_draws(name):
    compare(CASES[name])


def test_the_newest_slices_in_a_graph():
    case = CASES["slices, proportional, two streams"]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(2))
    newest = torch.compile(lambda: buffer.sampler.newest(buffer), fullgraph=True)
    for _ in range(case.capacity):
        assert_same_batch(buffer.sampler.newest(buffer), newest())
        buffer.extend(experience.take(3))


# --- limits


def test_stock_storage_is_refused():
    with pytest.raises(TypeError, match=r"storage=LazyTensorStorage.*pass storage=CompilableTensorStorage"):
        CompilableReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=2)


def test_a_sampler_in_a_stock_buffer_is_not_for_graphs():
    buffer = buffer_with(ProportionalSampler(10), 10, batch_size=4)
    buffer.extend(Experience("flat").take(4))
    with pytest.raises(Exception, match="LazyTensorStorage cannot be compiled; use CompilableReplayBuffer"):
        torch.compile(lambda: buffer.sampler.sample(buffer.storage, 4), fullgraph=True)()


def test_draws_from_an_emptied_buffer_have_no_weight():
    case = CASES["proportional"]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(20))
    in_graph = torch.compile(lambda: sample_and_update(buffer), fullgraph=True)
    assert (in_graph()["priority_weight"] > 0).all()
    buffer.empty()
    batch = in_graph()
    assert batch["priority_weight"].tolist() == [0.0] * BATCH
    assert batch["index"].tolist() == [0] * BATCH
    assert len(buffer) == 0
    assert buffer.sampler.stats()["num_items"] == 0 and buffer.sampler.stats()["max_priority"] == 1
    buffer.extend(experience.take(4))
    batch = in_graph()
    assert (batch["priority_weight"] > 0).all() and int(batch["index"].max()) < 4


def sample_and_update(buffer: CompilableReplayBuffer) -> TensorDict:
    batch = buffer.sample()
    batch["td_error"] = batch["error"]
    buffer.update_tensordict_priority(batch)
    return batch


# --- a step takes the same time for every capacity: its code copies and allocates nothing of that size

LARGE_CAPACITY = 40_000
# below the number of sums in a sum tree, which is a fifteenth of the number of leaves
LARGE = LARGE_CAPACITY // 16
WRITING = [name for name, case in CASES.items() if case.extends]
# the original case normalises weights over the whole buffer, which takes a pass over the buffer
OVER_THE_BATCH = {"reaper, two columns": replace(CASES["reaper, two columns"], sampler=reaper())}
LOOP = re.compile(r"<\s*static_cast<\w+>\((\d+)L?\)")
ALLOCATION = re.compile(r"empty_strided\w*\(\(([\d, ]+)\)")


def large_steps(code: str) -> list[str]:
    """Lines of generated code with a loop over, or an allocation of, at least ``LARGE`` entries."""
    found = []
    for line in code.splitlines():
        loops = [int(bound) for bound in LOOP.findall(line)]
        sizes = [math.prod(int(n) for n in shape.split(",") if n.strip()) for shape in ALLOCATION.findall(line)]
        if max([*loops, *sizes], default=0) >= LARGE:
            found.append(line.strip())
    return found


def code_of(function, *arguments) -> str:
    without_graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with without_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        return "\n".join(run_and_get_code(function, *arguments)[1])


@pytest.mark.parametrize("name", slow_but(("proportional",), WRITING))
def test_a_step_with_writes_touches_nothing_of_the_size_of_the_capacity(name):
    case = replace({**CASES, **OVER_THE_BATCH}[name], capacity=LARGE_CAPACITY)
    experience, buffer = case.experience(), case.buffer()
    for _ in range(5):
        buffer.extend(experience.take(LARGE_CAPACITY // 4))
    compiled = compile_step(lambda data: step(buffer, data))
    code = code_of(compiled, experience.take(8))
    assert len(code) > 1000
    assert not large_steps(code)


def test_a_copy_of_the_size_of_the_capacity_is_found():
    """Negative control: the check finds a write that copies the tensor that it changes."""
    stored = torch.zeros(LARGE_CAPACITY)

    def write(index):
        return torch.index_copy(stored, 0, index, torch.ones(8))[index] + 1

    assert large_steps(code_of(compile_step(write), torch.arange(8)))
