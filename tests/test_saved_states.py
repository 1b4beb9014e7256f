"""States of other sizes, other entries or two moments are refused, and samplers that missed writes."""

import copy
from functools import partial

import pytest
import torch
from torchrl.checkpoint import Checkpoint
from torchrl.data.replay_buffers import RandomSampler

from tests.data import SAMPLERS, buffer_with, event_sampler, random_rows
from tests.params import both_buffers
from tests.samplers.experience import Refuses, assert_same_state
from tests.stacks import numbered_stacks
from torchrl_replay_ext import (
    EventTableSampler,
    EventTableWriter,
    FrameStackStorage,
    ProportionalSampler,
    Quantile,
    RankBasedSampler,
    TrajectoryRetraceSampler,
)

SOME_SAMPLERS = ["proportional", "reaper", "slices", "tables"]
some_samplers = pytest.mark.parametrize("name", SOME_SAMPLERS)
samplers_and_frames = pytest.mark.parametrize("name", [*SOME_SAMPLERS, "frames"])


def sampler_of(name):
    """A sampler whose capacity is that of the storage; 20 is the capacity of a table."""
    if name == "pinned":
        return event_sampler(20, "event", default=44)
    return ProportionalSampler() if name == "frames" else SAMPLERS[name](20 if name == "tables" else None)


def rows_of(name, count, first=0):
    return numbered_stacks(count, first=first) if name == "frames" else random_rows(count, first=first)


def filled(name, size, count, compilable):
    storage = {"storage": FrameStackStorage(size)} if name == "frames" else {}
    buffer = buffer_with(sampler_of(name), size, compilable=compilable, batch_size=8, **storage)
    if count:
        buffer.extend(rows_of(name, count))
        buffer.sample()
    return buffer


def load(way, part, buffer, saved, path):
    """Load a part of ``saved``, or the whole, into ``buffer``."""
    ours, theirs = (rb if part == "buffer" else getattr(rb, part) for rb in (buffer, saved))
    if way == "state_dict":
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    elif way == "dumps":
        theirs.dumps(path / part)
        ours.loads(path / part)
    else:
        Checkpoint(part=theirs).save(path / part)
        Checkpoint(part=ours).load(path / part)


WAYS = [(way, part) for part in ("buffer", "sampler", "storage") for way in ("state_dict", "dumps")]


@both_buffers
@some_samplers
@pytest.mark.parametrize(("size", "count"), [(32, 0), (32, 10), (128, 10)])
@pytest.mark.parametrize(("way", "part"), [*WAYS, ("checkpoint", "buffer")])
def test_a_state_of_another_capacity_is_refused(name, way, part, size, count, compilable, tmp_path):
    if part == "storage" and not compilable:
        pytest.skip("a storage of TorchRL")
    saved, buffer = (filled(name, *sizes, compilable) for sizes in ((64, 64), (size, count)))
    before = copy.deepcopy(buffer.state_dict())
    # TorchRL's storage may refuse the state before the sampler
    by_ours = compilable or part == "sampler"
    with pytest.raises(Exception, match=rf"64 slots.*{size} slots|64 slots instead of {size}" if by_ours else "64"):
        load(way, part, buffer, saved, tmp_path)
    if compilable:
        assert_same_state(buffer.state_dict(), before)
        assert len(buffer) == count
        buffer.extend(random_rows(10))
        buffer.sample()


@both_buffers
@samplers_and_frames
@pytest.mark.parametrize("num_rows", [0, 3, 6])
def test_the_state_of_an_empty_buffer_can_be_loaded(name, compilable, num_rows):
    empty, rb = (filled(name, 4, 0, compilable) for _ in range(2))
    for row in range(num_rows):
        rb.extend(rows_of(name, 1, first=row))
    rb.load_state_dict(empty.state_dict())
    assert len(rb) == 0
    with pytest.raises((RuntimeError, ValueError), match="empty"):
        rb.sample()
    rb.extend(rows_of(name, 3))
    assert len(rb.sample()) == 8


@pytest.mark.parametrize("name", ["reaper", "slices"])
def test_copies_of_a_loaded_buffer_with_columns_go_on(name):
    """Two environments in columns, with trajectory ids: their number says nothing about the number of streams."""

    def steps(first):
        return (
            random_rows(6, first=first, episode=1000)
            .reshape(2, 3)
            .set(("collector", "traj_ids"), torch.arange(2).unsqueeze(1).expand(2, 3).clone())
        )

    saved, rb = (buffer_with(SAMPLERS[name](None), 40, ndim=2, batch_size=8) for _ in range(2))
    for buffer in (saved, rb):
        buffer.extend(steps(0))
    slots = getattr(rb.sampler, "starts_sampler", rb.sampler).slots
    rb.load_state_dict(copy.deepcopy(saved.state_dict()))
    # in place, as graphs need it
    assert getattr(rb.sampler, "starts_sampler", rb.sampler).slots is slots
    rb.extend(steps(6))
    copied = copy.deepcopy(rb)
    for buffer in (rb, copied):
        buffer.extend(steps(12))
    assert_same_state(copied.sampler.state_dict(), rb.sampler.state_dict())


@both_buffers
@pytest.mark.parametrize("name", [*SOME_SAMPLERS, "pinned"])
def test_the_state_of_an_emptied_buffer_can_be_loaded_into_a_new_one(name, compilable):
    emptied, rb = (filled(name, 64, count, compilable) for count in (10, 0))
    emptied.empty()
    rb.load_state_dict(emptied.state_dict())
    rb.extend(rows_of(name, 3))
    assert len(rb) == 3 and len(rb.sample()) == 8


@both_buffers
def test_a_checkpoint_of_torchrls_sampler_gives_its_rows(compilable, tmp_path):
    filled("uniform", 64, 10, False).dumps(tmp_path)
    rb = filled("proportional", 64, 0, compilable)
    with pytest.raises(FileNotFoundError, match=r"no state of a sampler of this package.*its storage and writer"):
        rb.loads(tmp_path)
    rb = filled("proportional", 64, 0, compilable)
    rb.storage.loads(tmp_path / "storage")
    rb.writer.loads(tmp_path / "writer")
    assert rb.sample()["index"].max() < len(rb) == 10
    assert rb.extend(random_rows(3)).tolist() == [10, 11, 12]


@both_buffers
def test_a_cursor_beyond_the_storage_is_refused(compilable):
    saved, buffer = filled("tables", 64, 60, compilable), filled("tables", 32, 0, compilable)
    assert isinstance(buffer.writer, EventTableWriter)
    with pytest.raises(ValueError, match="step 60, but the storage has 32 steps"):
        buffer.writer.load_state_dict(saved.writer.state_dict())


@both_buffers
@some_samplers
def test_states_with_other_entries_shapes_or_dtypes_are_refused(name, compilable):
    buffer = filled(name, 64, 64, compilable)
    state = buffer.sampler.state_dict()
    for key in state.keys() - {"latest_write"}:
        for wrong in (state[key].to(torch.float16), state[key].new_zeros(3, 5, *state[key].shape), [1, 2], None):
            bad = {**state, key: wrong}
            if wrong is None:
                del bad[key]
            with pytest.raises(ValueError, match=key):
                buffer.sampler.load_state_dict(bad)
            assert_same_state(buffer.sampler.state_dict(), state)
    with pytest.raises(ValueError, match="surplus"):
        buffer.sampler.load_state_dict({**state, "surplus": state["num_writes"]})


@pytest.mark.parametrize("change", [{"observation": torch.zeros(64, 2)}, {"number": torch.zeros(64)}, {"other": None}])
def test_stored_rows_with_other_entries_are_refused(change):
    buffer, saved = (filled("proportional", 64, 40, True) for _ in range(2))
    state = copy.deepcopy(saved.state_dict())
    rows, before = state["_storage"]["_storage"], copy.deepcopy(buffer.state_dict())
    (key,) = change
    rows[key] = rows["number"].clone() if change[key] is None else change[key]
    with pytest.raises(ValueError, match=f"CompilableTensorStorage.load_state_dict: the stored rows have .*{key}"):
        buffer.load_state_dict(state)
    assert_same_state(buffer.state_dict(), before)


def slices(anchors="uniform", slice_len=4):
    return TrajectoryRetraceSampler(20, slice_len=slice_len, anchors=anchors)


tables = partial(event_sampler, 20, "event")
quantile = partial(event_sampler, 20, Quantile("number", 0.9, window=50))
# samplers of a saved buffer and of one that loads its state, and the error
OTHERS = {
    "no anchors": (slices, lambda: slices(ProportionalSampler(20)), "load_state_dict"),
    "anchors": (lambda: slices(RankBasedSampler(20)), lambda: slices(ProportionalSampler(20)), "load_state_dict"),
    "slice_len": (lambda: slices(slice_len=3), slices, "load_state_dict"),
    "sampler": (lambda: RankBasedSampler(20), lambda: ProportionalSampler(20), "another sampler"),
    "capacities": (lambda: event_sampler(11, "event"), tables, "tables of other capacities"),
    "names": (lambda: tables(name="other"), tables, r"the tables \['ring', 'default', 'other'\], this writer has"),
    "window": (quantile, lambda: event_sampler(20, Quantile("number", 0.9, window=9)), r"end.recent has shape \(50,\)"),
    "condition": (quantile, tables, "unexpected entries: end"),
}


@pytest.mark.parametrize(("saved", "loading", "message"), OTHERS.values(), ids=OTHERS)
def test_a_state_of_other_arguments_is_refused(saved, loading, message):
    donor, buffer = (buffer_with(make(), 20) for make in (saved, loading))
    for each in (donor, buffer):
        each.extend(random_rows(20))
    part = "writer" if isinstance(buffer.sampler, EventTableSampler) else "sampler"
    with Refuses(buffer, ValueError, message, (part,)):
        getattr(buffer, part).load_state_dict(getattr(donor, part).state_dict())


@samplers_and_frames
def test_a_state_in_memory_is_that_of_its_moment(name):
    buffer = filled(name, 64, 50, True)
    state, rows = buffer.state_dict(), buffer[:].clone()
    before = buffer.sampler.probabilities(buffer.storage)
    buffer.extend(rows_of(name, 30, first=100))
    buffer.load_state_dict(state)
    assert len(buffer) == buffer.write_count == 50
    assert (buffer[:] == rows).all()
    assert torch.equal(buffer.sampler.probabilities(buffer.storage), before)


@some_samplers
def test_torchrls_storage_and_a_sampler_of_two_moments_are_refused(name):
    """TorchRL's storage puts its tensors into a state, and no copies."""
    buffer = filled(name, 64, 50, False)
    state, copied = buffer.state_dict(), copy.deepcopy(buffer.state_dict())
    buffer.sampler.load_state_dict(buffer.sampler.state_dict())
    buffer.extend(random_rows(30, first=1000))
    with pytest.raises(ValueError, match=r"not of one moment.*copy\.deepcopy\(rb\.state_dict\(\)\)"):
        buffer.load_state_dict(state)
    buffer.load_state_dict(copied)
    assert len(buffer) == 50 and buffer[:]["number"].max() == 49


# --- samplers that were out of their buffer


@both_buffers
@some_samplers
def test_a_sampler_that_missed_writes_is_refused(name, compilable):
    buffer = filled(name, 64, 30, compilable)
    own = buffer.sampler
    uses = [
        buffer.sample,
        lambda: own.probabilities(buffer.storage),
        lambda: buffer.update_priority(torch.arange(3), torch.ones(3)) if own.takes_priorities else buffer.sample(),
    ]
    buffer.set_sampler(RandomSampler())
    buffer.sample()
    buffer.set_sampler(own)
    # a write of no rows is none
    buffer.writer.write_at(torch.empty(0, dtype=torch.int64), random_rows(2)[:0])
    for use in uses:
        use()
    buffer.set_sampler(RandomSampler())
    for _ in range(2):
        buffer.extend(random_rows(5, first=1000))
    buffer.set_sampler(own)
    for use in uses:
        with pytest.raises(RuntimeError, match=r"has missed . writes.*Pass a new sampler to rb\.set_sampler"):
            use()
    if name == "tables":
        return
    buffer.set_sampler(sampler_of(name))
    assert buffer.sample()["number"].numel() == 8
    assert (buffer.sampler.probabilities(buffer.storage) > 0).all()


@both_buffers
def test_a_sampler_that_missed_writes_may_load_a_state(compilable):
    buffer = filled("proportional", 64, 30, compilable)
    own = buffer.sampler
    buffer.set_sampler(ProportionalSampler())
    buffer.extend(random_rows(5))
    buffer.sample()
    state = buffer.sampler.state_dict()
    buffer.set_sampler(own)
    own.load_state_dict(state)
    assert (own.probabilities(buffer.storage) > 0).all() and len(buffer.sample()) == 8
