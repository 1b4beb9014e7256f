"""FrameStackStorage: what is read is what was written, each frame is stored once, and errors change nothing."""

import copy
import random
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.emulated_device import EmulatedDevice
from tests.samplers.experience import assert_same_state
from tests.stacks import StackedStreams
from torchrl_replay_ext import CompilableReplayBuffer, Episodes, FrameStackStorage

TENSORS = [torch.tensor(3), torch.arange(-6, 6).view(3, 4), torch.arange(12) % 2 == 0]
SLICES = [slice(None), slice(2, 9, 3), ..., (), (slice(None),), range(12)]
KEYS = ["action", "observation", ("next", "observation"), "next"]


def pair(capacity, **arguments) -> tuple[Any, Any]:
    """A buffer that stores each frame once, and a plain buffer."""
    once = TensorDictReplayBuffer(storage=FrameStackStorage(capacity, **arguments), batch_size=8)
    return once, TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=8)


def extend(data, *buffers):
    for rb in buffers:
        rb.extend(data.clone())


def n_step(data, n):
    """The rows with the next observation up to n steps later: until the trajectory, or the data, ends."""
    trajectories, following = data["collector", "traj_ids"], data["next", "observation"].clone()
    for row, trajectory in enumerate(trajectories):
        later = (trajectories[row:] == trajectory).nonzero()[:n]
        data["next", "observation"][row] = following[row + later[-1, 0]]
    return data


def assert_same(once, plain):
    """By bits: -0.0 is not 0.0, and NaN is NaN."""
    ours, theirs = once[:].cpu(), plain[:]
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key, column in theirs.items(True, True):
        assert ours[key].numpy().tobytes() == column.numpy().tobytes(), key


@pytest.mark.parametrize("device", ["cpu", "emulated"])
@pytest.mark.parametrize("layout", ["interleaved", "env_major", "any"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("capacity", "num_envs", "depth"), [(1, 1, 1), (7, 3, 4), (50, 4, 2), (50, 80, 4)])
def test_what_is_read_is_what_was_written(capacity, num_envs, depth, n, layout, device):
    rng, padding = random.Random(capacity * num_envs), "zero" if num_envs == 4 else "reset"
    shape = (4, 2) if num_envs == 3 else (3, 2)
    streams = StackedStreams(num_envs, depth=depth, padding=padding, lost=0.05, seed=num_envs, shape=shape)
    with EmulatedDevice("torchrl_replay_ext") if device == "emulated" else nullcontext():
        once, plain = pair(capacity, device=device, frame_capacity=2 * depth * capacity, n_step=n)
        for _ in range(20):
            data = n_step(streams.chunk(layout, rng.choice([1, 2, 5, 13, 2 * capacity])), n)
            plain.extend(data.clone())
            once.extend(data.to(rng.choice(["cpu", device])))
            assert_same(once, plain)


@pytest.mark.parametrize("layout", ["interleaved", "env_major"])
@pytest.mark.parametrize("n", [1, 3, 6])
def test_an_episode_of_l_steps_takes_l_plus_1_frames(layout, n):
    """For any division of its steps into writes; frames that no stored transition needs are freed."""
    once, _ = pair(400, n_step=n)
    streams = StackedStreams(4, end=0, still=0)
    for _ in range(10):
        once.extend(n_step(streams.chunk(layout, 40), n))
    assert once.storage.num_frames == 4 * 101
    for _ in range(40):
        once.extend(n_step(streams.chunk("interleaved", 40), n))
        # with the frames before the oldest step of each environment
        assert once.storage.num_frames == 4 * (100 + 4)
    once.empty()
    assert once.storage.num_frames == 0
    for padding in ("zero", "reset"):
        once.extend(StackedStreams(1, end=1, still=0, padding=padding).rollout([0] * 20, with_ids=False))
    assert once.storage.num_frames == 80


@pytest.mark.parametrize("n", [1, 3])
def test_a_frame_that_returns_is_stored_once(n):
    """It counts as seen again, so that no later frame is forgotten too early."""
    frames = torch.randint(256, (100, 3, 2), dtype=torch.uint8)
    frames[40], frames[60] = frames[38], frames[57]
    stacks, once = frames.unfold(0, 4, 1).movedim(-1, 1), pair(100, n_step=n)[0]
    for row in range(97 - n):
        once.extend(TensorDict({"observation": stacks[row], "next": {"observation": stacks[row + n]}}, []).unsqueeze(0))
    assert once.storage.num_frames == len(frames.flatten(1).unique(dim=0)) == 98


def test_slots_in_any_order_and_single_transitions():
    streams = StackedStreams(2)
    once, plain = pair(12)
    for _ in range(20):
        data = streams.rollout([0])[0]
        for rb in (once, plain):
            rb.add(data.clone())
    for slots in ([3, 9, 3, 0], [4, 5]):
        data = streams.rollout([0, 1, 0, 0])[: len(slots)].set("index", torch.tensor(slots))
        once.writer.write_at(torch.tensor(slots), data.clone())
        plain.writer.write_at(torch.tensor(slots), data.clone())
    once.storage[-1] = plain.storage[-1] = streams.rollout([1])[0].set("index", torch.tensor(11))
    assert_same(once, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_frames_of_floats_are_kept_bit_by_bit(dtype):
    frames = torch.randint(1, 255, (12, 20, 20)).to(dtype)
    frames[5], frames[6, 0], frames[8], frames[9] = -0.0, torch.nan, 0.0, 0.0
    frames[9, -1, -1] = -0.0
    stacks = frames.unfold(0, 4, 1).movedim(-1, 1)
    both = pair(20, frame_key="pixels")
    extend(TensorDict({"pixels": stacks[:-1], "next": {"pixels": stacks[1:]}}, [8]), *both)
    assert_same(*both)


@pytest.fixture
def full():
    """Both buffers, full, and the streams that go on."""
    streams = StackedStreams(2, seed=4)
    both = pair(12, frame_capacity=40)
    for _ in range(3):
        extend(streams.chunk("interleaved", 10), *both)
    return *both, streams


class TestReading:
    @pytest.mark.parametrize("index", [3, -1, [1, 4], *TENSORS, *SLICES, *KEYS])
    def test_every_index_reads_what_a_plain_storage_reads(self, full, index):
        once, plain, _ = full
        ours, theirs = once.storage.get(index), plain.storage.get(index)
        assert isinstance(theirs, torch.Tensor) or ours.batch_size == theirs.batch_size
        assert (ours == theirs).all()

    def test_reading_changes_nothing(self, full):
        once, plain, _ = full
        before = copy.deepcopy(once.storage.state_dict())
        for index in (slice(None), ..., ()):
            rows = once.storage.get(index)
            rows["extra"], rows["next", "extra"] = torch.zeros(12), torch.zeros(12)
        keys = ["action", "observation"]
        assert (once.storage.take(torch.arange(12), keys) == plain[:].select(*keys)).all()
        assert len(once.read_all_in_order()) == len(once.query()) == len([*once.storage]) == 12
        assert re.search(r"num_frames=\d+, stacks=\(4, 3, 2\)", repr(once))
        assert "<empty>" in repr(FrameStackStorage(10))
        assert_same_state(once.storage.state_dict(), before)


class TestSaving:
    def test_only_frames_that_are_needed_are_saved(self):
        storage = FrameStackStorage(1000)
        storage.set(torch.arange(5), StackedStreams(1, end=0, still=0).rollout([0] * 5))
        frames = [part for part in tree_leaves(storage.state_dict()) if getattr(part, "dtype", None) == torch.uint8]
        assert [len(part) for part in frames] == [7]

    def test_a_state_that_does_not_fit_is_refused(self, full):
        once, plain, streams = full
        before, other = copy.deepcopy(once.storage.state_dict()), FrameStackStorage(20)
        other.set(torch.arange(2), streams.rollout([0, 0]))
        # the rows of another storage have no frames
        without, shorter = plain.storage.state_dict(), copy.deepcopy(before)
        shorter["frames"]["frames"] = shorter["frames"]["frames"][:3]
        for state, error, message in (
            (other.state_dict(), ValueError, r"the state is for a storage of 20 slots.*this buffer has 12 slots"),
            (without, RuntimeError, "the loaded state has no frames"),
            (shorter, ValueError, r"the state has 3 frames of stacks .* \(\(4, 3, 2\), torch.uint8\)"),
        ):
            with pytest.raises(error, match=message):
                once.storage.load_state_dict(state)
        assert_same_state(once.storage.state_dict(), before)

    @pytest.mark.parametrize(("saved", "n"), [(1, 3), (3, 1)])
    def test_a_state_of_another_n_step_is_refused(self, saved, n):
        """A transition of one step with stacks of 3 frames has as many frames as one of n steps with stacks of 2."""
        storage, other = FrameStackStorage(20, n_step=saved), FrameStackStorage(20, n_step=n)
        storage.set(torch.arange(5), StackedStreams(1, depth=3 if saved == 1 else 2).rollout([0] * 5))
        with pytest.raises(ValueError, match=f"the state has .* expected .* for n_step={n}"):
            other.load_state_dict(storage.state_dict())
        assert len(other) == other.num_frames == 0


def changed(data, key, change):
    return data.set(key, change(data[key]))


APART = "the next observation of a row is not its observation shifted by one frame.*pass n_step="
REFUSED = {
    "missing": (lambda data: data.exclude("observation"), KeyError, r"no entry \('observation',\) with stacked frames"),
    "dtype": (
        lambda data: changed(data, ("next", "observation"), torch.Tensor.float),
        ValueError,
        "both must be stack",
    ),
    "depth": (lambda data: changed(data, "observation", lambda s: s[:, 1:]), ValueError, r"dtype \(\(4, 3, 2\), torch"),
    "apart": (lambda data: changed(data, "observation", lambda s: 255 - s), ValueError, APART),
    "[6, 10]": (lambda data: data.reshape(6, 10), ValueError, "Flatten it"),
    "tensor": (lambda data: data["observation"], TypeError, "must be a TensorDict, not Tensor"),
    "frames": (lambda data: data, RuntimeError, r"need all frames.*frame_capacity="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_write_leaves_nothing(name):
    """No row goes on from another one, and there are 60 + 4 frames."""
    change, error, message = REFUSED[name]
    storage = FrameStackStorage(60, frame_capacity=60, episodes=Episodes(num_streams=1))
    streams = StackedStreams(1, end=1, still=0)
    storage.set(torch.arange(3), streams.rollout([0] * 3))
    before, frames = copy.deepcopy(storage.state_dict()), storage.num_frames
    data = TensorDict.cat([StackedStreams(1, end=0, still=0, seed=seed).rollout([0] * 5)[4:] for seed in range(60)])
    with pytest.raises(error, match=message):
        storage.set(slice(0, len(data)), change(data))
    assert_same_state(storage.state_dict(), before)
    assert storage.num_frames == frames


def test_an_entry_of_ids_that_was_named_must_be_there_and_hold_integers():
    storage = FrameStackStorage(60, episodes=Episodes(traj_key="episode"))
    data = StackedStreams(1).rollout([0] * 3)
    with pytest.raises(KeyError, match="no entry 'episode'"):
        storage.set(slice(0, 3), data)
    with pytest.raises(TypeError, match="'episode' must hold integers"):
        storage.set(slice(0, 3), data.clone().set("episode", torch.zeros(3)))
    assert len(storage) == storage.num_frames == 0
    storage.set(slice(0, 3), data.clone().set("episode", torch.zeros(3, dtype=torch.int64)))
    assert len(storage) == 3


@pytest.mark.parametrize("slots", [[0, 20], [-21, 3], 20])
def test_slots_out_of_range_are_refused(slots):
    storage, data = FrameStackStorage(20), StackedStreams(1).rollout([0] * 2)
    with pytest.raises(IndexError, match=r"the slots .* are not all in a storage of 20 slots"):
        storage.set(slots, data if isinstance(slots, list) else data[0])
    assert len(storage) == storage.num_frames == 0


def test_a_graph_on_an_accelerator_cannot_write():
    with EmulatedDevice("torchrl_replay_ext") as device:
        rb = CompilableReplayBuffer(storage=FrameStackStorage(20, device="emulated"), batch_size=4)
        rb.extend(StackedStreams(1).rollout([0] * 3))
        data = StackedStreams(1).rollout([0] * 3)
        with device.capturing(), pytest.raises(RuntimeError, match="cannot write frames; call extend outside of it"):
            rb.extend(data)
