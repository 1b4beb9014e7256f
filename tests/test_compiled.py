"""The buffer as part of one compiled graph: the same draws and the same state as in eager mode."""

import copy
import itertools
import pickle
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from scipy import stats
from tensordict import TensorDict
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from tests.chi_square import p_value
from tests.params import slow_but
from tests.samplers.experience import assert_priorities
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    Threshold,
    TrajectoryRetraceSampler,
    compile_step,
)
from torchrl_replay_ext.compilation import uniform

pytestmark = pytest.mark.usefixtures("from_scratch")

BATCH = 8


@pytest.fixture
def same_numbers():
    """Make compiled code draw the same random numbers as eager code."""
    with torch._inductor.config.patch(fallback_random=True):
        yield


# --- experience


class Flat:
    """Transitions of one environment, in episodes of 7."""

    ndim = 1

    def __init__(self):
        self.time = 0

    def take(self, count: int) -> TensorDict:
        time = torch.arange(self.time, self.time + count)
        self.time += count
        return self.rows(time, (time + 1) % 7 == 0)

    @staticmethod
    def rows(number: torch.Tensor, done: torch.Tensor, **extra: Any) -> TensorDict:
        """Rows that contain their own number; td_error is computed from "error"."""
        return TensorDict(
            {
                "number": number,
                "obs": number.float().unsqueeze(-1).expand(*number.shape, 3).clone(),
                "error": (number * 37 % 101).float() / 64,
                "next": {"done": done.unsqueeze(-1), "terminated": done.unsqueeze(-1).clone()},
                **extra,
            },
            number.shape,
        )


class TwoStreams(Flat):
    """Two environments that alternate, with episodes of 5 and 8 steps and with trajectory ids."""

    def take(self, count: int) -> TensorDict:
        time = torch.arange(self.time, self.time + count)
        self.time += count
        step, env = time // 2, time % 2
        length = 5 + 3 * env
        ids = 2 * (step // length) + env
        return self.rows(time, (step + 1) % length == 0, collector={"traj_ids": ids})


class TwoColumns(Flat):
    """Two environments in separate columns, [2, count // 2], with episodes of 5 and 8 steps."""

    ndim = 2

    def take(self, count: int) -> TensorDict:
        assert count % 2 == 0
        step = torch.arange(self.time, self.time + count // 2)
        self.time += count // 2
        env = torch.arange(2).unsqueeze(1)
        return self.rows(2 * step + env, (step + 1) % (5 + 3 * env) == 0)


@dataclass(frozen=True)
class Case:
    """A sampler, the experience in its buffer, and the capacity of the buffer."""

    sampler: Callable[[int], Any]
    experience: type[Flat] = Flat
    capacity: int = 50

    # whether ``extend`` is part of the graph
    extends: bool = True

    def parts(self) -> dict[str, Any]:
        sampler = self.sampler(self.capacity)
        parts = {"sampler": sampler, "batch_size": BATCH}
        return parts if self.extends else parts | {"writer": EventTableWriter(sampler.tables)}

    def buffer(self, **arguments: Any) -> CompilableReplayBuffer:
        storage = CompilableTensorStorage(self.capacity, ndim=self.experience.ndim)
        return CompilableReplayBuffer(**{"storage": storage, **self.parts(), **arguments})


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
        if arguments.get("correction") == "priority":
            eta = {"default": 0.6, "rare": 0.1, "both": 0.3}
        return EventTableSampler(tables, **{"eta": eta, "min_size": 2, **arguments})

    return sampler


def inside(kind: str, **arguments: Any) -> dict[str, Any]:
    return {"kind": kind, "beta": Anneal(0.4, 1.0, 30), "td_error": "absolute", **arguments}


def slices(anchors: Callable[[int], Any] | None = None, **arguments: Any) -> Callable[[int], Any]:
    def sampler(capacity: int) -> Any:
        drawn_by = "uniform" if anchors is None else anchors(capacity)
        settings = {"slice_len": 4, "behaviour_keys": ("obs",), "anchors": drawn_by, **arguments}
        return TrajectoryRetraceSampler(capacity, **settings)

    return sampler


# add one line for a new sampler
CASES = {
    "uniform": Case(lambda _: RandomSampler()),
    "uniform, two columns": Case(lambda _: RandomSampler(), TwoColumns),
    "proportional": Case(proportional()),
    "proportional, stratified": Case(
        proportional(stratified=True, weight_norm="batch", max_priority_within_buffer=True)
    ),
    "rank": Case(rank()),
    "rank, piecewise": Case(rank(segments="piecewise", stratified=False, weight_norm="batch")),
    "rank, two columns": Case(rank(), TwoColumns),
    "reaper": Case(reaper()),
    # more than two pages of positions, so that pages are freed and used again
    "reaper, two streams": Case(reaper(num_streams=2), TwoStreams, capacity=150),
    "reaper, two columns": Case(reaper(weight_norm="buffer", max_priority_within_buffer=True), TwoColumns),
    "events, uniform": Case(events(), extends=False),
    "events, uniform, mixture": Case(events("pinned", correction="mixture", beta=Anneal(0.4, 1, 30)), extends=False),
    "events, uniform, conditional": Case(
        events(correction="conditional", allocation="multinomial", pair_keys=("obs",)), TwoStreams, extends=False
    ),
    "events, uniform, lemma2": Case(
        events(correction="lemma2", allocation="largest_remainder", pair_keys=("obs",)), extends=False
    ),
    "events, uniform, priority": Case(events(correction="priority"), TwoColumns, extends=False),
    "events, proportional": Case(
        events(priority=inside("proportional", alpha=Anneal(0.4, 0.9, 20))), TwoColumns, extends=False
    ),
    "events, proportional, pinned": Case(events("pinned", priority=inside("proportional")), TwoStreams, extends=False),
    "events, reaper": Case(events(priority=inside("reaper", omega=Anneal(0.1, 0.5, 20))), extends=False),
    "events, reaper, mixture": Case(
        events(priority={"kind": "reaper", "num_streams": 2, "td_error": "absolute"}, correction="mixture"),
        TwoStreams,
        extends=False,
    ),
    "events, rank": Case(events(priority=inside("rank")), extends=False),
    "slices, uniform": Case(slices()),
    "slices, uniform, two streams": Case(slices(num_streams=2), TwoStreams),
    "slices, uniform, two streams, not padded": Case(slices(num_streams=2, pad=False), TwoStreams),
    "slices, uniform, two columns": Case(slices(), TwoColumns),
    "slices, uniform, two columns, not padded": Case(slices(pad=False, slice_len=2), TwoColumns),
    "slices, proportional": Case(slices(proportional())),
    "slices, proportional, two streams": Case(slices(proportional(), num_streams=2), TwoStreams),
    "slices, reaper, two columns": Case(slices(reaper()), TwoColumns),
}
PRIORITIZED = [name for name in CASES if "uniform" not in name]
# Compilation is slow. The default run has one case of each kind; the others vary the layout or an option.
DEFAULT = (
    "uniform, two columns",
    "proportional",
    "rank",
    "reaper",
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


def is_ours(sampler: Any) -> bool:
    return not isinstance(sampler, RandomSampler)


def assert_valid(sampler: Any) -> None:
    if is_ours(sampler):
        sampler.check_valid()


def assert_same_sampler(first: Any, second: Any, but: tuple[str, ...] = ()) -> None:
    """Assert that two buffers have equal samplers up to rounding: ``pow`` differs in compiled and eager code.

    Args:
        first: a buffer.
        second: another buffer.
        but: stats that may differ.
    """
    assert_valid(first.sampler)
    assert_valid(second.sampler)
    if not is_ours(first.sampler):
        return
    for value in ("probabilities", "stats"):
        results = []
        for buffer in (first, second):
            arguments = (buffer.storage,) if value == "probabilities" else ()
            result = getattr(buffer.sampler, value)(*arguments)
            results.append(result.cpu() if value == "probabilities" else result.exclude(*but).cpu().to_dict())
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-9)


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
    if is_ours(eager.sampler):
        assert eager.sampler.stats().get("dropped_updates", torch.zeros(())) == 0


@pytest.mark.usefixtures("same_numbers")
@pytest.mark.parametrize(
    "name",
    slow_but(["reaper"], [name for name, case in CASES.items() if case.extends]),
)
def test_a_restored_buffer_may_begin_in_a_graph(name):
    case = CASES[name]
    experience, source, restored = case.experience(), case.buffer(), case.buffer()
    source.extend(experience.take(4))
    restored.load_state_dict(source.state_dict())
    data = experience.take(4)
    graph = torch.compile(lambda data: step(restored, data), fullgraph=True, backend="eager")
    results = []
    for function in (partial(step, source), graph):
        torch.manual_seed(1)
        results.append(function(data.clone()))
    assert_same_batch(*results)


@pytest.mark.usefixtures("same_numbers")
@pytest.mark.parametrize("name", slow_but(DEFAULT, CASES))
def test_one_graph_for_life_draws_what_eager_code_draws(name):
    compare(CASES[name])


@pytest.mark.usefixtures("same_numbers")
@pytest.mark.parametrize(
    ("name", "width"),
    slow_but(
        [("rank", 256)],
        itertools.product(
            [
                "proportional",
                "rank",
                "reaper",
                "events, uniform",
                "events, rank",
                "slices, uniform, two streams, not padded",
                "slices, proportional",
            ],
            [1, 256, 512],
        ),
    ),
)
def test_every_width_of_vector_code(name, width):
    if width == pick_vec_isa().bit_width():
        pytest.skip("what the test above compiles")
    with torch._inductor.config.patch({"cpp.simdlen": width}):
        compare(CASES[name])


def test_the_newest_slices_in_a_graph():
    case = CASES["slices, proportional, two streams"]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(2))
    newest = torch.compile(lambda: buffer.sampler.newest(buffer), fullgraph=True)
    for _ in range(case.capacity):
        assert_same_batch(buffer.sampler.newest(buffer), newest())
        buffer.extend(experience.take(3))


# --- random numbers


def test_numbers_in_a_graph_are_uniform_and_of_53_bits():
    draw = torch.compile(lambda: uniform(50_000, device=torch.device("cpu")), fullgraph=True)
    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    assert not torch.equal(first, second)
    assert first.dtype == torch.float64
    assert float(first.min()) >= 0 and float(first.max()) < 1
    assert torch.equal(first * 2**53, (first * 2**53).floor())
    # the last of the 53 bits is 0 or 1 with equal frequency, and so are all values of groups of higher bits
    for leading in (0, 18, 29, 45):
        value = ((first * 2.0**leading) % 1 * 256).floor().long()
        assert stats.chisquare(value.bincount(minlength=256).numpy()).pvalue > 1e-4
    coarse = (first * 2**24).floor() / 2**24
    assert stats.chisquare(((coarse * 2.0**18) % 1 * 256).floor().long().bincount(minlength=256).numpy()).pvalue < 1e-4


def fill_64(sampler: Any) -> CompilableReplayBuffer:
    """64 transitions with different priorities in a ring of 80 slots."""
    buffer = CompilableReplayBuffer(storage=CompilableTensorStorage(80), sampler=sampler, batch_size=500)
    buffer.extend(Flat().take(64))
    buffer.update_priority(torch.arange(64), torch.linspace(0.2, 3.0, 64)[torch.randperm(64)])
    return buffer


def one_error_at_the_end(sampler: Any) -> CompilableReplayBuffer:
    """An episode of 1,000 steps whose last TD error is 1e7 times the others."""
    parts = {"writer": EventTableWriter(sampler.tables)} if isinstance(sampler, EventTableSampler) else {}
    buffer = CompilableReplayBuffer(storage=CompilableTensorStorage(1_000), sampler=sampler, batch_size=32, **parts)
    number = torch.arange(1_000)
    buffer.extend(Flat.rows(number, number == 999))
    error = torch.full((1_000,), 1e-4)
    error[-1] = 1e3
    buffer.update_priority(number, error)
    return buffer


def reliable(alpha: float) -> ReaPERSampler:
    return ReaPERSampler(1_000, alpha=alpha, omega=1.0, eps=0.0, td_error="absolute")


def reliable_in_tables(alpha: float) -> EventTableSampler:
    tables = EventTables([EventSpec("never", Threshold("number", "<", 0), 1)], {"never": 10})
    priority = {"kind": "reaper", "alpha": alpha, "omega": 1.0, "eps": 0.0, "td_error": "absolute"}
    return EventTableSampler(tables, eta={"default": 1.0, "never": 0.0}, priority=priority)


@pytest.mark.parametrize(
    ("make", "alpha", "compiled"),
    slow_but(
        ((reliable, 0.0, True), (reliable, 0.0, False), (reliable_in_tables, 0.0, False)),
        itertools.product((reliable, reliable_in_tables), (0.0, 0.1), (True, False)),
    ),
)
def test_reaper_draws_are_exact_where_hardly_a_proposal_is_accepted(make, alpha, compiled):
    buffer = one_error_at_the_end(make(alpha))
    delta = torch.full((1_000,), 1e-4, dtype=torch.float64)
    delta[-1] = 1e3
    density = delta.cumsum(0) / delta.sum() * delta**alpha
    expected = float(density[-1] / density.sum())

    def draw() -> torch.Tensor:
        return buffer.sample()["index"]

    step = compile_step(draw) if compiled else draw
    drawn = torch.cat([step() for _ in range(300)])
    error = (expected * (1 - expected) / len(drawn)) ** 0.5
    assert abs(float((drawn == 999).double().mean()) - expected) < 4 * error
    # other slots are drawn, too: a batch does not repeat a few accepted proposals
    assert len(drawn.unique()) > 0.5 * len(drawn) * (1 - expected)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [compile_step, partial(torch.compile, fullgraph=True)])
def test_eager_draws_inside_a_graph_see_what_the_graph_has_written(compiler):
    """Each graph call ends an episode whose last step has nearly all of the TD error, and must draw this step."""
    sampler = ReaPERSampler(1_000, alpha=0.0, omega=1.0, eps=0.0, td_error="absolute", beta=0.0)
    buffer = CompilableReplayBuffer(storage=CompilableTensorStorage(1_000), sampler=sampler, batch_size=32)
    number = torch.arange(1_000)
    buffer.extend(Flat.rows(number, number % 100 == 99))

    def step(data: TensorDict) -> TensorDict:
        index = buffer.extend(data)
        buffer.update_priority(index, data["error"])
        return buffer.sample()

    graph = compiler(step)
    for first in range(1_000, 3_000, 100):
        data = Flat.rows(torch.arange(first, first + 100), torch.arange(100) == 99)
        data["error"] = torch.where(torch.arange(100) == 99, 1e3, 1e-4)
        batch = graph(data)
        buffer.sampler.check_valid()
        assert int(batch["number"].amin()) >= first - 900
    last = batch["number"] % 100 == 99
    assert float(last.double().mean()) > 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: ProportionalSampler(80, alpha=0.6, td_error="absolute"),
        lambda: ReaPERSampler(80, alpha=0.6, omega=0.5, td_error="absolute"),
    ],
    ids=["proportional", "reaper"],
)
def test_compiled_draws_follow_the_probabilities(make):
    """Chi-square test with 64 items and 50,000 draws; another exponent must fail. The seed determines the draws."""
    buffer = fill_64(make())
    draw = torch.compile(lambda: buffer.sample()["index"], fullgraph=True)

    def indices() -> torch.Tensor:
        torch.manual_seed(2)
        return torch.cat([draw() for _ in range(100)])

    drawn = indices()
    assert torch.equal(drawn, indices())

    assert p_value(drawn, buffer.sampler.probabilities(buffer.storage)) > 1e-4
    buffer.sampler.alpha = 0.5
    assert p_value(drawn, buffer.sampler.probabilities(buffer.storage)) < 1e-4


def test_compiled_uniform_draws_keep_to_what_is_stored():
    buffer = CompilableReplayBuffer(storage=CompilableTensorStorage(80), sampler=RandomSampler(), batch_size=500)
    buffer.extend(Flat().take(20))
    draw = torch.compile(lambda: buffer.sample()["index"], fullgraph=True)
    for stored in (20, 64):
        assert p_value(torch.cat([draw() for _ in range(20)]), torch.ones(stored) / stored) > 1e-4
        buffer.extend(Flat().take(44))


# --- updates


def update_of(buffer: CompilableReplayBuffer, slots: list[int], error: list[float]) -> TensorDict:
    """A batch of ``slots`` with TD errors, with the current write stamps."""
    index = torch.tensor(slots)
    stamp = stamps_of(buffer)[index]
    return TensorDict({"index": index, "td_error": torch.tensor(error), "write_stamp": stamp}, [len(slots)])


def stamps_of(buffer: CompilableReplayBuffer) -> torch.Tensor:
    """The write stamp of each slot of a flat buffer, collected from samples."""
    stamps = torch.full((len(buffer),), -1)
    while (stamps < 0).any():
        index, info = buffer.sampler.sample(buffer.storage, 400)
        stamps[index.cpu()] = info["write_stamp"].cpu()
    return stamps


@pytest.mark.parametrize("count", [12, 100])
@pytest.mark.parametrize(
    "sampler",
    [lambda c: ProportionalSampler(c, td_error="absolute"), lambda c: ReaPERSampler(c, td_error="absolute")],
    ids=["proportional", "reaper"],
)
def test_bad_and_duplicate_td_errors_in_a_graph(sampler, count):
    """Valid rows have the same effect as in eager mode, the last valid duplicate wins, and invalid rows are counted."""
    compiled, eager = Case(sampler).buffer(), Case(sampler).buffer()
    for buffer in (compiled, eager):
        buffer.extend(Flat().take(40))
    in_graph = torch.compile(compiled.update_tensordict_priority, fullgraph=True, dynamic=False)
    bad = [float("nan"), -1.0, float("inf"), 3e38, -float("inf")]
    rng, last = random.Random(count), {}
    rejected = 0
    for number in range(6):
        # in the last round all TD errors are invalid; before, those of the first slots and some others
        slots = [rng.randrange(40) for _ in range(count)]
        error = [
            rng.choice(bad) if number == 5 or slot < 5 or rng.random() < 0.3 else rng.uniform(0, 3) for slot in slots
        ]
        good = [position for position, each in enumerate(error) if each not in bad and each == each]
        rejected += count - len(good)
        in_graph(update_of(compiled, slots, error))
        if good:
            eager.update_tensordict_priority(update_of(eager, [slots[i] for i in good], [error[i] for i in good]))
        assert_same_sampler(compiled, eager, but=("rejected_updates", "acceptance_rate"))
        assert int(compiled.sampler.stats()["rejected_updates"]) == rejected
        last |= {slot: each for slot, each in zip(slots, error, strict=True) if each not in bad and each == each}
        if isinstance(compiled.sampler, ProportionalSampler):
            d = torch.tensor([last.get(slot, 1.0 - 1e-6) + 1e-6 for slot in range(40)])
            assert_priorities(compiled, d, compiled.sampler.alpha)
    assert not last.keys() & set(range(5)), "still those of new transitions"


@pytest.mark.parametrize("name", slow_but(["proportional"], ["proportional", "rank", "reaper"]))
def test_late_updates_of_overwritten_slots_are_dropped(name):
    case = CASES[name]
    buffer, experience = case.buffer(batch_size=40), case.experience()
    buffer.extend(experience.take(case.capacity))
    draw = torch.compile(buffer.sample, fullgraph=True)
    update = torch.compile(buffer.update_tensordict_priority, fullgraph=True)
    dropped = 0
    for sample, late_update in (
        (draw, update),
        (draw, buffer.update_tensordict_priority),
        (buffer.sample, update),
        (buffer.sample, buffer.update_tensordict_priority),
    ):
        batch = sample()
        before = buffer.storage[:]["number"].clone()
        buffer.extend(experience.take(2 * case.capacity // 5))
        fresh = buffer.storage[:]["number"] == before
        twin = copy.deepcopy(buffer)
        batch["td_error"] = torch.rand(40)
        late_update(batch)
        was_kept = fresh[batch["index"]]
        assert 0 < int(was_kept.sum()) < 40
        dropped += int((~was_kept).sum())
        assert int(buffer.sampler.stats()["dropped_updates"]) == dropped
        # an update of the other rows drops nothing
        rest = batch[was_kept]
        twin.sampler.update_priority(rest["index"], rest["td_error"], storage=twin.storage, stamp=rest["write_stamp"])
        assert_same_sampler(buffer, twin, but=("dropped_updates", "update_counts"))


# --- limits


def test_stock_storage_is_refused():
    with pytest.raises(TypeError, match=r"storage=LazyTensorStorage.*pass storage=CompilableTensorStorage"):
        CompilableReplayBuffer(storage=LazyTensorStorage(10), sampler=RandomSampler(), batch_size=2)


def test_rows_must_be_whole():
    buffer = CASES["proportional"].buffer()
    data = Flat().take(4)
    buffer.extend(data.clone())
    with pytest.raises(KeyError, match="no entry 'obs', but the stored rows have it"):
        buffer.extend(data.exclude("obs"))
    assert len(buffer) == 4 and buffer.write_count == 4
    buffer.sampler.check_valid()
    buffer.extend(data.clone())
    assert len(buffer) == 8


@pytest.mark.parametrize("filled", [False, True])
def test_nothing_may_be_written(filled):
    buffer = CASES["proportional"].buffer()
    data = Flat().take(4)
    if filled:
        buffer.extend(data.clone())
    before = len(buffer)
    assert buffer.extend(data[:0].clone()).shape == (0,)
    assert len(buffer) == before
    buffer.extend(data.clone())
    assert len(buffer) == before + 4
    buffer.sampler.check_valid()


def whole_text(error: BaseException) -> str:
    """The messages of an error and of all its causes."""
    text, cause = "", error
    while cause is not None:
        text, cause = f"{text}{cause}\n", cause.__cause__ or cause.__context__
    return text


@pytest.mark.parametrize("name", ["uniform", "proportional", "reaper"])
def test_the_first_write_must_run_outside(name):
    buffer = CASES[name].buffer()
    with pytest.raises(Exception) as caught:
        torch.compile(lambda data: buffer.extend(data), fullgraph=True)(Flat().take(4))
    assert "the first write must run outside the compiled function" in whole_text(caught.value)
    torch._dynamo.reset()
    if name != "uniform":
        buffer = CASES[name].buffer()
        with pytest.raises(Exception) as caught:
            torch.compile(lambda: buffer.sample(), fullgraph=True)()
        assert "must run outside the compiled function" in whole_text(caught.value)


@pytest.mark.parametrize("missing", ["td_error", "batch_size"])
def test_what_is_missing_is_named(missing):
    buffer = CASES["proportional"].buffer(**({"batch_size": None} if missing == "batch_size" else {}))
    buffer.extend(Flat().take(4))

    def sample_and_update():
        buffer.update_tensordict_priority(buffer.sample())

    with pytest.raises(Exception) as caught:
        torch.compile(sample_and_update, fullgraph=True)()
    expected = "no entry 'td_error' with TD errors" if missing == "td_error" else "pass batch_size="
    assert expected in whole_text(caught.value)


def test_a_sampler_in_a_stock_buffer_is_not_for_graphs():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), sampler=ProportionalSampler(10, td_error="absolute"), batch_size=4
    )
    buffer.extend(Flat().take(4))
    batch = buffer.sample()
    assert "write_stamp" not in batch
    batch["td_error"] = torch.full((4,), 3.0)
    buffer.update_tensordict_priority(batch)
    priority = torch.ones(4)
    priority[batch["index"]] = 3.0
    assert_priorities(buffer, priority, buffer.sampler.alpha)
    with pytest.raises(Exception) as caught:
        torch.compile(lambda: buffer.sampler.sample(buffer.storage, 4), fullgraph=True)()
    assert "LazyTensorStorage cannot be compiled; use CompilableReplayBuffer" in whole_text(caught.value)


@pytest.mark.parametrize("name", slow_but(["proportional"], ["proportional", "reaper, two streams"]))
def test_draws_from_an_emptied_buffer_have_no_weight(name):
    case = CASES[name]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(20))
    in_graph = torch.compile(lambda: sample_and_update(buffer), fullgraph=True)
    assert (in_graph()["priority_weight"] > 0).all()
    buffer.empty()
    batch = in_graph()
    assert batch["priority_weight"].tolist() == [0.0] * BATCH
    assert batch["index"].tolist() == [0] * BATCH
    assert len(buffer) == 0
    assert_valid(buffer.sampler)
    assert buffer.sampler.stats()["num_items"] == 0 and buffer.sampler.stats()["max_priority"] == 1
    buffer.extend(experience.take(4))
    batch = in_graph()
    assert (batch["priority_weight"] > 0).all() and int(batch["index"].max()) < 4


def sample_and_update(buffer: CompilableReplayBuffer) -> TensorDict:
    batch = buffer.sample()
    batch["td_error"] = batch["error"]
    buffer.update_tensordict_priority(batch)
    return batch


# --- eager mode


def constant(name: str) -> Case:
    """A case with constant alpha: a compilable buffer applies the end of a schedule later than a stock buffer."""
    case = CASES[name]

    def sampler(capacity: int) -> Any:
        result = case.sampler(capacity)
        getattr(result, "anchors", result).alpha = 0.6
        return result

    return Case(sampler, case.experience, case.capacity, case.extends)


def stock(case: Case, **arguments: Any) -> TensorDictReplayBuffer:
    storage = LazyTensorStorage(case.capacity, ndim=case.experience.ndim)
    return TensorDictReplayBuffer(storage=storage, **{**case.parts(), **arguments})


def through_pickle(buffer: CompilableReplayBuffer) -> CompilableReplayBuffer:
    return pickle.loads(pickle.dumps(buffer))


@pytest.mark.parametrize("name", PRIORITIZED)
def test_outside_graphs_it_is_a_stock_buffer(name, tmp_path):
    """The buffer behaves like a stock buffer, also after it was saved, copied and restored in any way."""
    case = constant(name)
    ours, theirs, experience = case.buffer(), stock(case), case.experience()

    def continued(number: int) -> CompilableReplayBuffer:
        if number % 4 == 0:
            return copy.deepcopy(ours)
        if number % 4 == 1:
            return through_pickle(ours)
        restored = case.buffer()
        if number % 4 == 2:
            restored.load_state_dict(copy.deepcopy(ours.state_dict()))
        else:
            ours.dumps(tmp_path / str(number))
            restored.loads(tmp_path / str(number))
        return restored

    for number in range(case.capacity):
        data = experience.take(4)
        torch.manual_seed(number)
        first = step(ours, data.clone())
        torch.manual_seed(number)
        second = step(theirs, data)
        del first["write_stamp"]
        assert_same_batch(first, second)
        if number % 5 == 4:
            ours = continued(number // 5)
            ours.extend(data := experience.take(6))
            theirs.extend(data)
    assert len(ours) == len(theirs) == case.capacity
    assert ours.write_count == theirs.write_count
    assert_same_sampler(ours, theirs)


@pytest.mark.parametrize("name", ["proportional", "reaper, two streams"])
def test_prefetch(name):
    case = CASES[name]
    buffer, experience = case.buffer(prefetch=2), case.experience()
    buffer.extend(experience.take(20))
    for _ in range(50):
        batch = step(buffer, experience.take(4))
        assert batch.shape == (BATCH,)
        # the rows are those of the draw, even if the slots have been overwritten since
        assert torch.equal(batch["obs"][:, 0], batch["number"].float())
        assert (batch["index"] == batch["number"] % case.capacity).all()
    assert_valid(buffer.sampler)


@pytest.mark.parametrize("name", PRIORITIZED)
def test_threads(name):
    case = CASES[name]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(20))
    failures: list[Exception] = []
    written, reads = threading.Event(), [0, 0]

    def write() -> None:
        while min(reads) < 20:
            buffer.extend(experience.take(4))

    def read(reader: int, what: Callable[[], Any]) -> None:
        while not written.is_set():
            what()
            reads[reader] += 1

    def noting_failures(what: Callable[..., None], *arguments: Any) -> None:
        try:
            what(*arguments)
        except Exception as failure:
            failures.append(failure)
            reads[:] = [20, 20]

    readers = [
        threading.Thread(target=noting_failures, args=(read, reader, what))
        for reader, what in enumerate((lambda: sample_and_update(buffer), buffer.sample))
    ]
    for thread in readers:
        thread.start()
    noting_failures(write)
    for _ in range(case.capacity // 4):
        noting_failures(buffer.extend, experience.take(4))
    written.set()
    for thread in readers:
        thread.join()
    assert not failures
    assert len(buffer) == case.capacity
    assert_valid(buffer.sampler)


# --- no device reads


@pytest.fixture
def traced(monkeypatch):
    """A switch that runs the code for compiled graphs in eager mode."""
    switch = {"on": False}
    # replace the function in every module that imports it
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrl_replay_ext") and hasattr(module, "is_traced"):
            monkeypatch.setattr(module, "is_traced", lambda: switch["on"])
    return switch


class OnDevice:
    """Replaces all state by fake tensors, whose values cannot be read and which cannot be mixed with CPU tensors.

    Their device is "meta", which needs no driver.
    """

    device = torch.device("meta")

    def __init__(self):
        self.mode = FakeTensorMode()
        # original and replacement; a reference to the original keeps its id from being used again
        self.seen: dict[int, tuple[Any, Any]] = {}

    def __call__(self, part: Any) -> Any:
        if id(part) not in self.seen:
            self.seen[id(part)] = (part, part)
            replaced = self.replace(part)
            self.seen[id(part)] = (part, replaced)
        return self.seen[id(part)][1]

    def replace(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            with self.mode:
                return torch.empty(part.shape, dtype=part.dtype, device=self.device)
        if isinstance(part, torch.device):
            return self.device
        if isinstance(part, TensorDict):
            leaves = {key: self(value) for key, value in part.items(True, True)}
            with self.mode:
                return TensorDict(leaves, part.shape, device=self.device)
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(self, part))
        if isinstance(part, list):
            part[:] = map(self, part)
        elif isinstance(part, dict):
            part |= {key: self(value) for key, value in part.items()}
        elif type(part).__module__.startswith("torchrl_replay_ext."):
            self(vars(part))
        return part


class CopiesFromTheCPU(TorchFunctionMode):
    """Records tensors that are made from numbers; on a device, they are copied from the CPU, and the CPU waits."""

    def __init__(self):
        super().__init__()
        self.made_of: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], torch.Tensor)
        if made and torch.device(kwargs.get("device") or "cpu") == OnDevice.device:
            self.made_of.append(args[0])
            return torch.empty(torch.tensor(args[0]).shape, **kwargs)
        if func is torch.unravel_index:
            # unravel_index makes a tensor from the shape
            shape = kwargs["shape"] if "shape" in kwargs else args[1]
            self.made_of.append(shape)
            return tuple(torch.empty_like(args[0]) for _ in shape)
        return func(*args, **kwargs)


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_a_step_waits_for_the_device(traced, name):
    case = CASES[name]
    buffer, experience, on_device = case.buffer(), case.experience(), OnDevice()
    buffer.extend(experience.take(8))
    for _ in range(3):
        step(buffer, experience.take(4))
    for part in (buffer.storage, buffer.writer, buffer.sampler):
        on_device(part)
    data = on_device(experience.take(4))
    traced["on"] = True
    with on_device.mode:
        with CopiesFromTheCPU() as copies:
            batch = step(buffer, data, case.extends)
        assert copies.made_of == []
        assert batch.device == batch["obs"].device == on_device.device
        if is_ours(buffer.sampler) and not isinstance(buffer.sampler, TrajectoryRetraceSampler):
            traced["on"] = False
            # negative control: the eager step does read values
            with pytest.raises(DataDependentOutputException):
                step(buffer, data, case.extends)
