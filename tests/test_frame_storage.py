"""FrameStackStorage: what is read is what was written; saved states, refused writes and errors."""

import copy
import pickle
import random
import re

import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.samplers.experience import assert_same_state
from tests.stacks import StackedStreams
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    FrameStackStorage,
    ProportionalSampler,
)
from torchrl_replay_ext.core.frame_pool import FramePool

KEYS = ("observation", ("next", "observation"), "action", ("next", "reward"), ("next", "done"))


def pair(capacity, **arguments):
    """A buffer that stores each frame once, and a plain buffer."""
    once = TensorDictReplayBuffer(storage=FrameStackStorage(capacity, **arguments), batch_size=8)
    return once, TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=8)


def extend(data, *buffers):
    for rb in buffers:
        rb.extend(data.clone())


def assert_same(once, plain, index=None):
    index = torch.arange(len(plain)) if index is None else index
    ours, theirs = once[index], plain[index]
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in theirs.keys(True, True):
        assert torch.equal(ours[key], theirs[key]), key


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("layout", ["interleaved", "env_major", "any"])
@pytest.mark.parametrize(("capacity", "num_envs"), [(1, 1), (7, 1), (7, 3), (50, 4), (50, 80)])
def test_what_is_read_is_what_was_written(capacity, num_envs, layout, padding):
    rng = random.Random(capacity * num_envs)
    streams = StackedStreams(num_envs, padding=padding, lost=0.05, seed=num_envs)
    once, plain = pair(capacity)
    for _ in range(20):
        extend(streams.chunk(layout, rng.choice([1, 2, 5, 13, 2 * capacity])), once, plain)
        assert_same(once, plain)
        # frames of overwritten transitions are freed: there are at most those of the stored stacks
        assert once.storage.num_frames <= len(once) * 5
    assert once.storage.lost_frames == once.storage.mismatched == 0


def test_without_ids_the_row_before_is_looked_at():
    streams = StackedStreams(1, end=0.05, still=0)
    once, plain = pair(40)
    for _ in range(20):
        extend(streams.rollout([0] * 9, with_ids=False), once, plain)
        assert_same(once, plain)
    # 40 transitions in a few episodes, and the frames before the oldest transition
    assert once.storage.num_frames < 40 + 4 + 8


@pytest.mark.parametrize("layout", ["interleaved", "env_major"])
def test_each_frame_is_kept_once(layout):
    """An episode of L steps takes L + 1 frames, for any division of its steps into writes."""
    streams = StackedStreams(4, end=0.0, still=0.0)
    once, _ = pair(400)
    for _ in range(10):
        once.extend(streams.chunk(layout, 40))
    assert once.storage.num_frames == 4 * 101
    # frames before the oldest step of each environment are kept
    once.extend(streams.chunk("interleaved", 40))
    assert once.storage.num_frames == 4 * (100 + 4)
    streams = StackedStreams(1, end=1.0, still=0.0, padding="zero")
    once, _ = pair(20)
    once.extend(streams.rollout([0] * 20))
    assert once.storage.num_frames == 40


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_other_depths_shapes_and_types(depth):
    once, plain = pair(30, frame_key="pixels")
    streams = StackedStreams(2, depth=depth)
    for _ in range(10):
        data = streams.chunk("any", 9)
        for key in ("observation", ("next", "observation")):
            stack = data.pop(key).float().unsqueeze(2) / 255
            data["pixels" if key == "observation" else ("next", "pixels")] = stack
        extend(data, once, plain)
        assert_same(once, plain)


def test_slots_in_any_order_and_single_transitions():
    """``add``, ``write_at`` with a duplicate slot, assignment, and all kinds of indices."""
    streams = StackedStreams(2)
    once, plain = pair(12)
    for _ in range(20):
        data = streams.rollout([0])[0]
        for rb in (once, plain):
            rb.add(data.clone())
    index = torch.tensor([3, 9, 3, 0])
    data = streams.rollout([0, 1, 0, 0])
    for rb in (once, plain):
        rb.writer.write_at(index, data.clone())
    data = streams.rollout([1, 1])
    for rb in (once, plain):
        rb.storage[4:6] = data.clone().set("index", torch.tensor([4, 5]))
    assert_same(once, plain)
    for index in (0, -1, [1, 4], torch.arange(12) % 2 == 0, torch.tensor(3), torch.arange(12).view(3, 4)):
        assert_same(once, plain, index)


class TestSaving:
    @pytest.fixture
    def filled(self):
        streams = StackedStreams(3, end=0.05)
        once, plain = pair(30)
        for _ in range(7):
            extend(streams.chunk("interleaved", 9), once, plain)
        return streams, once, plain

    @pytest.mark.parametrize("fresh", [True, False])
    @pytest.mark.parametrize("way", ["state_dict", "dumps", "pickle"])
    def test_a_restored_buffer_goes_on(self, filled, way, fresh, tmp_path):
        streams, once, plain = filled
        restored = pair(30)[0]
        if not fresh:
            restored.extend(StackedStreams(1, seed=5).rollout([0] * 40))
        if way == "state_dict":
            restored.load_state_dict(once.state_dict())
        elif way == "dumps":
            once.dumps(tmp_path)
            restored.loads(tmp_path)
        else:
            restored = pickle.loads(pickle.dumps(once))
        assert_same(restored, plain)
        for _ in range(4):
            extend(streams.chunk("interleaved", 9), restored, once, plain)
        assert_same(restored, plain)
        # ongoing episodes continue after the restart
        assert restored.storage.num_frames == once.storage.num_frames

    def test_the_state_of_an_empty_buffer(self, filled):
        _, once, _ = filled
        once.load_state_dict(pair(30)[0].state_dict())
        assert len(once) == once.storage.num_frames == 0
        plain = pair(30)[1]
        extend(StackedStreams(1, seed=5).rollout([0] * 20), once, plain)
        assert_same(once, plain)

    def test_another_size_is_refused(self, filled):
        _, once, _ = filled
        other = FrameStackStorage(40)
        other.set(torch.arange(2), StackedStreams(1).rollout([0, 0]))
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=r"the state is for a storage of 30 slots.*this buffer has 40 slots"):
            other.load_state_dict(once.storage.state_dict())
        assert_same_state(other.state_dict(), before)

    def test_only_frames_that_were_needed_are_saved(self):
        storage = FrameStackStorage(1000)
        storage.set(torch.arange(5), StackedStreams(1, end=0, still=0).rollout([0] * 5))
        frames = [part for part in tree_leaves(storage.state_dict()) if getattr(part, "dtype", None) == torch.uint8]
        assert [len(part) for part in frames] == [7]


class TestErrors:
    def refused(self, data, error, message):
        storage = FrameStackStorage(20)
        storage.set(torch.arange(3), StackedStreams(1, seed=3).rollout([0] * 3))
        frames, kept = storage.num_frames, storage.get(torch.arange(3)).clone()
        with pytest.raises(error, match=message):
            storage.set(torch.arange(len(data)), data)
        assert storage.num_frames == frames
        assert (storage.get(torch.arange(3)) == kept).all()

    def test_without_stacks(self):
        data = StackedStreams(1).rollout([0])
        self.refused(data.exclude("observation"), KeyError, r"no entry \('observation',\) with stacked frames")

    def test_other_stacks(self):
        self.refused(StackedStreams(1, depth=3).rollout([0]), ValueError, r"of the shape and dtype \(\(1, 4, 3, 2\)")
        data = StackedStreams(1).rollout([0])
        data["next", "observation"] = data["next", "observation"].float()
        self.refused(data, ValueError, "both must be stacks of frames")

    def test_arguments(self):
        with pytest.raises(ValueError, match=r"frame_capacity=9\): frame_capacity must be an integer >= 10"):
            FrameStackStorage(10, frame_capacity=9)
        for max_size in (-1, 2.5, "x"):
            with pytest.raises(ValueError, match=rf"\(max_size={max_size!r}\): max_size must be an integer >= 1"):
                FrameStackStorage(max_size)
        with pytest.raises(TypeError, match="frame_key"):
            FrameStackStorage(10, frame_key=5)
        with pytest.raises(TypeError, match="episodes must be an Episodes object"):
            FrameStackStorage(10, episodes=5)
        with pytest.raises(TypeError, match="must be a TensorDict, not Tensor"):
            FrameStackStorage(10).set(torch.arange(2), torch.zeros(2, 4, 3, 2))
        with pytest.raises(ValueError, match="Flatten it"):
            FrameStackStorage(10).set(torch.arange(2), StackedStreams(1).rollout([0] * 4).reshape(2, 2))


@pytest.mark.slow
def test_what_is_an_error_outside_is_counted_in_a_graph():
    torch._dynamo.reset()
    storage = FrameStackStorage(20, frame_capacity=24)
    rb = CompilableReplayBuffer(storage=storage, batch_size=4)
    streams = StackedStreams(1, end=1, still=0)
    rb.extend(streams.rollout([0] * 3))
    compiled = torch.compile(lambda data: rb.extend(data), fullgraph=True)
    whole = []
    for number in range(6):
        data = streams.rollout([0] * 3)
        whole.append(data.clone())
        compiled(data)
        assert (storage.lost_frames > 0) == (number >= 3)
    # 3 transitions have 2 frames each; the frames that were stored are correct
    assert torch.equal(storage.get(torch.arange(3, 6))["observation"], whole[0]["observation"])
    data = streams.rollout([0] * 3)
    data["next", "observation"] = data["next", "observation"].flip(0)
    compiled(data)
    assert storage.mismatched == 2


LOOKS = {
    "read_all_in_order": lambda rb: rb.read_all_in_order(),
    "query": lambda rb: rb.query(),
    "iteration": lambda rb: list(rb.storage),
    "repr of the buffer": repr,
    "repr of the storage": lambda rb: repr(rb.storage),
    "take": lambda rb: rb.storage.take(torch.arange(len(rb))),
    "take, some entries": lambda rb: rb.storage.take(torch.arange(len(rb)), list(KEYS)),
    "state_dict": lambda rb: rb.state_dict(),
    "sample": lambda rb: rb.sample(),
}


class TestLookingChangesNothing:
    """No kind of read changes a full storage."""

    @staticmethod
    def full():
        once, plain = pair(12)
        extend(StackedStreams(2, seed=4).chunk("interleaved", 30), once, plain)
        return once, plain

    @pytest.mark.parametrize("name", LOOKS)
    def test_it_stores_nothing(self, name):
        once, plain = self.full()
        before = copy.deepcopy(once.storage.state_dict())
        LOOKS[name](once)
        assert_same_state(once.storage.state_dict(), before)
        assert_same(once, plain)

    def test_what_is_added_to_what_was_read_is_not_stored(self):
        once, plain = self.full()
        for index in (slice(None), ..., (), (...,), (slice(None),)):
            rows = once.storage.get(index)
            rows["extra"], rows["next", "extra"] = torch.zeros(12), torch.zeros(12)
        assert_same(once, plain)

    @pytest.mark.parametrize("index", [slice(None), ..., slice(2, 9, 3), (), (...,), range(12), *KEYS, "next"])
    def test_every_index_reads_what_a_plain_storage_reads(self, index):
        once, plain = self.full()
        before = copy.deepcopy(once.storage.state_dict())
        ours, theirs = once.storage.get(index), plain.storage.get(index)
        assert isinstance(theirs, torch.Tensor) or ours.batch_size == theirs.batch_size
        assert (ours == theirs).all()
        assert_same_state(once.storage.state_dict(), before)

    def test_a_repr_shows_the_shapes_without_building_the_stacks(self, monkeypatch):
        once, _ = self.full()
        monkeypatch.setattr(FramePool, "read", lambda *_: pytest.fail("frames were read"))
        for text in (repr(once), repr(once.storage)):
            # tensordict prints the shape, after 0.14 that of a row
            assert re.search(r"observation: .*\b4, ?3, ?2\]", text)
            assert f"len=12, max_size=12, num_frames={once.storage.num_frames}" in text
        assert "<empty>" in repr(FrameStackStorage(10))


def stacks_of(frames):
    """The transitions of one episode, from its frames [L + 1 + k, ...], with stacks of k = 4."""
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
    return TensorDict({"observation": stacks[:-1], "next": {"observation": stacks[1:]}}, [len(stacks) - 1]).clone()


def frames_of(count, dtype=torch.uint8):
    return torch.randint(1, 255, (count, 2, 2)).to(dtype)


@pytest.mark.parametrize("sampler", [None, ProportionalSampler])
@pytest.mark.parametrize(("capacity", "count", "row"), [(4000, 1500, 1300), (100, 120, 90)])
def test_a_refused_write_leaves_nothing(sampler, capacity, count, row):
    """Of many rows, and of more rows than the ring has."""
    error = f"FrameStackStorage: row {row - max(count - capacity, 0)} of the data: the next observation is not"
    rb = CompilableReplayBuffer(storage=FrameStackStorage(capacity), sampler=sampler and sampler(), batch_size=32)
    good, wrong = stacks_of(frames_of(54)), stacks_of(frames_of(count + 4))
    rb.extend(good[:10].clone())
    wrong["observation"][row] = 255 - wrong["observation"][row]
    with pytest.raises(ValueError, match=error):
        rb.extend(wrong)
    assert (len(rb), rb.write_count) == (10, 10)
    rb.extend(good[10:].clone())
    assert_same(rb[:].exclude("index"), good)
    assert int(rb.sample()["index"].max()) < 50


def test_a_write_that_runs_out_of_frames_is_undone():
    alone = TensorDict.cat([stacks_of(frames_of(5)) for _ in range(40)])
    alone["collector", "traj_ids"] = torch.arange(1, 41)
    first = stacks_of(frames_of(14)).set(("collector", "traj_ids"), torch.zeros(10, dtype=torch.int64))
    rb = CompilableReplayBuffer(storage=FrameStackStorage(80, frame_capacity=120), sampler=ProportionalSampler())
    rb.extend(first.clone())
    with pytest.raises(RuntimeError, match=r"need all 120 frames.*frame_capacity="):
        rb.extend(alone)
    assert (len(rb), rb.write_count, rb.storage.num_frames) == (10, 10, 14)
    for _ in range(10):
        rb.extend(first.clone())
        assert_same(rb[-10:].exclude("index"), first)
    assert set(rb.sample(1000)["index"].tolist()) == {*range(80)}


@pytest.mark.parametrize("slots", [[0, 20], [-21, 3], 20])
def test_slots_out_of_range_are_refused(slots):
    storage = FrameStackStorage(20)
    storage.set(slice(0, 20), stacks_of(frames_of(24)))
    before = copy.deepcopy(storage.state_dict())
    data = stacks_of(frames_of(6))
    with pytest.raises(IndexError, match=r"the slots .* are not all in a storage of 20 slots"):
        storage.set(slots, data if isinstance(slots, list) else data[0])
    assert_same_state(storage.state_dict(), before)
    storage.set(-1, data[0])
    assert torch.equal(storage.get(19)["observation"], data[0]["observation"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_frames_of_floats_are_kept_bit_by_bit(dtype):
    frames = frames_of(12, dtype)
    frames[5], frames[6, 0], frames[8] = -0.0, torch.nan, 0.0
    data = stacks_of(frames)
    rb = CompilableReplayBuffer(storage=FrameStackStorage(20), batch_size=4)
    rb.extend(data.clone())
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[frames.itemsize]
    for key in ("observation", ("next", "observation")):
        assert torch.equal(rb[:][key].view(bits), data[key].view(bits))


def test_a_state_without_frames_is_refused():
    """The rows of another storage have no frames; without the error, all observations would be zeros."""
    once, plain = pair(20)
    extend(StackedStreams(1, seed=0).chunk("any", 10), once, plain)
    state = plain.storage.state_dict()
    with pytest.raises(RuntimeError, match="the loaded state has no frames"):
        once.storage.load_state_dict(state)
    assert_same(once, plain)
