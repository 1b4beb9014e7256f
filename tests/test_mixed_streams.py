"""Warnings of streams that are mixed, because nothing tells them apart, and of histories that are cut."""

import warnings

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.data import buffer_with, event_sampler
from torchrl_replay_ext import FrameStackStorage, ProportionalSampler, ReaPERSampler, TrajectoryRetraceSampler

MIXED = "Most rows do not go on with the row before"
CUT = "an event took fewer earlier steps than its history="
DEPTH, SIZE = 3, 60


def frames_buffer():
    storage = FrameStackStorage(SIZE, frame_capacity=5 * SIZE)
    return TensorDictReplayBuffer(storage=storage, sampler=ProportionalSampler(), batch_size=4)


BUFFERS = {
    "reaper": lambda: buffer_with(ReaPERSampler(), SIZE),
    "slices": lambda: buffer_with(TrajectoryRetraceSampler(slice_len=2, behaviour_keys=()), SIZE),
    "tables": lambda: buffer_with(event_sampler(10), SIZE),
    "pinned tables": lambda: buffer_with(event_sampler(10, default=SIZE), SIZE + 10),
    "frames": frames_buffer,
}


def steps(num_envs, count, *, done=0.0, lag=1) -> TensorDict:
    """``count`` steps of each environment, time-major, with stacks of frames; no two frames are equal."""
    frame = torch.arange(num_envs * (count + DEPTH + lag), dtype=torch.int32).reshape(num_envs, -1, 1)
    stacks = frame.unfold(1, DEPTH, 1).movedim(-1, 2)[:, : count + lag]
    ended = torch.rand(num_envs, count, 1) < done
    following = {"observation": stacks[:, lag:], "done": ended, "reward": torch.zeros(num_envs, count, 1)}
    data = TensorDict({"observation": stacks[:, :-lag], "reward": torch.ones(num_envs, count, 1)}, [num_envs, count])
    data["next"] = TensorDict(following, data.shape)
    data["collector", "traj_ids"] = torch.arange(num_envs).unsqueeze(1).expand(num_envs, count)
    return data.transpose(0, 1).reshape(-1)


def caught(buffer, data, rows):
    """The warnings of writes of ``rows`` rows each that name mixed streams."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for first in range(0, len(data), rows):
            buffer.extend(data[first : first + rows].clone())
    return [str(each.message) for each in caught if MIXED in str(each.message)]


def test_slots_that_pinned_tables_use_again_are_no_consecutive_steps():
    for num_envs in (1, 2, 3, 4):
        buffer = buffer_with(event_sampler(10, default=20), 30)
        assert not caught(buffer, steps(num_envs, 400 // num_envs, done=0.1), num_envs)


@pytest.mark.parametrize("rows", [1, 3, 60])
@pytest.mark.parametrize("name", BUFFERS)
def test_interleaved_environments_without_ids_are_warned_of_once(name, rows):
    data = steps(3, 20, done=0.1).exclude(("collector", "traj_ids"))
    found = caught(BUFFERS[name](), data, rows)
    assert len(found) == 1
    assert "('collector', 'traj_ids')" in found[0] and "num_streams=" in found[0]


SEPARATE = {
    "one environment": lambda: steps(1, 60, done=0.1).exclude(("collector", "traj_ids")),
    "one environment, some steps missing": lambda: steps(1, 60)[torch.arange(60) % 4 != 2],
    "trajectory ids": lambda: steps(3, 20),
    "episodes of one step": lambda: steps(3, 20, done=1.0).exclude(("collector", "traj_ids")),
    "several steps": lambda: (
        steps(1, 50, lag=3).exclude(("collector", "traj_ids")).update({"steps_to_next_obs": torch.full((50,), 3)})
    ),
    "flags only": lambda: steps(3, 20).exclude(("collector", "traj_ids"), "observation", ("next", "observation")),
}


@pytest.mark.filterwarnings("ignore:A trajectory began before the last one had ended")
@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("data", SEPARATE.values(), ids=SEPARATE)
def test_streams_that_are_not_mixed_are_not_warned_of(data, rows):
    sampler = event_sampler(10)
    assert not caught(buffer_with(sampler, SIZE), data(), rows)


def test_columns_are_streams():
    buffer = buffer_with(ReaPERSampler(), SIZE, ndim=2)
    data = steps(3, 20).exclude(("collector", "traj_ids")).reshape(20, 3).transpose(0, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer.extend(data)
    mixed = buffer_with(ReaPERSampler(), SIZE, ndim=2)
    with pytest.warns(UserWarning, match=MIXED):
        mixed.extend(data.clone()[:, torch.randperm(20)])


def test_nothing_is_compared_after_the_first_writes():
    buffer, data = BUFFERS["reaper"](), steps(1, 60).exclude(("collector", "traj_ids"))
    assert not caught(buffer, data, 30)
    assert not caught(buffer, data[torch.randperm(60)], 30)
    assert isinstance(buffer.storage, LazyTensorStorage)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_a_history_that_is_cut_by_other_streams_is_warned_of_once(num_envs, pinned):
    """A history of 5 steps of 4 streams spans 4 · 4 + 1 rows, and there are 16; of 3 streams, 13 rows."""
    default, size = (16, 16 + 20) if pinned else (None, 16)
    buffer = buffer_with(event_sampler(20, history=5, default=default), size)
    data = steps(num_envs, 12)
    data["next", "done"][-num_envs:] = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for first in range(0, len(data), num_envs):
            buffer.extend(data[first : first + num_envs].clone())
        assert len(buffer.writer.tables["end"]) == num_envs * (4 if num_envs == 4 else 5)
        # again, without a second warning
        for _ in range(5):
            buffer.extend(steps(num_envs, 1))
        buffer.extend(data[-num_envs:])
    found = [str(each.message) for each in caught]
    assert len(found) == (num_envs == 4)
    assert all(CUT in each and "τ · S" in each for each in found)
