"""TrajectoryRetraceSampler by hand: its slices, padding, anchors, weights and state."""

import itertools

import pytest
import torch
from tensordict import TensorDict

from tests import data
from tests.params import both_buffers
from tests.samplers.experience import Refuses, assert_priorities, probabilities
from torchrl_replay_ext import DecoupledSampler, Episodes, ProportionalSampler, ReaPERSampler, TrajectoryRetraceSampler


def rows(count, **arguments):
    return data.rows(count, **{"logits": torch.randn(count, 2), **arguments})


def buffer_of(capacity=20, slice_len=4, *, slices=4, **arguments):
    return data.buffer_of(
        TrajectoryRetraceSampler, capacity, slice_len=slice_len, batch_size=slices * slice_len, **arguments
    )


def slices_by_start(buffer, key, slices=4):
    """The values of ``key`` in the slice of each start; many slices are drawn to find all of them."""
    found = {}
    for _ in range(200 // slices):
        for row in buffer.sample().reshape(slices, -1):
            found[int(row["number"][0])] = row[key].reshape(row.numel(), -1).squeeze(-1).tolist()
    return found


def test_marks_by_hand():
    buffer = buffer_of(slice_len=3)
    buffer.extend(rows(8, done=[3], truncated=[5]))  # 0 1 2 3T | 4 5C | 6 7
    no, yes = False, True
    assert slices_by_start(buffer, "number") == {
        0: [0, 1, 2],
        1: [1, 2, 3],
        2: [2, 3, 3],
        3: [3, 3, 3],
        4: [4, 5, 5],
        5: [5, 5, 5],
        6: [6, 7, 7],
        7: [7, 7, 7],
    }
    mask = slices_by_start(buffer, ("collector", "mask"))
    assert [mask[0], mask[2], mask[3]] == [[yes, yes, yes], [yes, yes, no], [yes, no, no]]
    done = slices_by_start(buffer, ("next", "done"))
    assert [done[0], done[1], done[2], done[4]] == [[no, no, yes], [no, no, yes], [no, yes, yes], [no, yes, yes]]
    truncated = slices_by_start(buffer, ("next", "truncated"))
    assert [truncated[0], truncated[1], truncated[4]] == [[no, no, yes], [no, no, no], [no, yes, yes]]
    terminated = slices_by_start(buffer, ("next", "terminated"))
    assert [terminated[0], terminated[1], terminated[2]] == [[no, no, no], [no, no, yes], [no, yes, yes]]
    # the stored transitions are unchanged
    assert buffer[:]["next", "done"].squeeze(-1).nonzero().squeeze(1).tolist() == [3, 5]
    assert ("collector", "mask") not in buffer[:].keys(True, True)


def test_flags_are_shaped_like_those_that_are_stored():
    buffer = buffer_of(slice_len=2)
    data = rows(6, done=[2])
    del data["next", "truncated"]
    data["next", "done"] = data["next", "done"].squeeze(-1)
    buffer.extend(data)
    batch = buffer.sample()
    assert batch["next", "done"].shape == batch["next", "truncated"].shape == (8,)
    cut = batch["next", "done"] & ~batch["next", "terminated"].squeeze(-1)
    assert torch.equal(batch["next", "truncated"], cut)


def test_other_keys():
    buffer = buffer_of(
        slice_len=2, episodes=Episodes(done_key="end", traj_key="id"), behaviour_keys=("mu", ("nested", "scale"))
    )
    data = TensorDict({"number": torch.arange(6), "mu": torch.zeros(6), "nested": {"scale": torch.zeros(6, 1)}}, [6])
    data["end"] = torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.uint8)
    data["id"] = torch.tensor([0, 0, 0, 1, 1, 1])
    buffer.extend(data)
    assert slices_by_start(buffer, "number")[2] == [2, 2]
    assert slices_by_start(buffer, "end")[3] == [False, True]
    assert slices_by_start(buffer, "truncated")[2] == [False, False]


# --- the distribution


# --- anchors


def proportional(**arguments):
    return ProportionalSampler(20, alpha=1.0, eps=0.0, td_error="absolute", **arguments)


@pytest.mark.parametrize("step", [slice(None), 3], ids=["all steps", "one step"])
def test_td_errors_may_have_the_shape_of_the_slices(step):
    torch.manual_seed(0)
    sampler = TrajectoryRetraceSampler(20, slice_len=4, anchors=proportional())
    buffer = data.buffer_with(sampler, 20, compilable=True, batch_size=16)
    buffer.extend(rows(20, done=[9]))
    priority = torch.ones(20)
    batch = buffer.sample().reshape(-1, 4)[:, step]
    batch["td_error"] = 2.0 + batch["index"]
    buffer.update_tensordict_priority(batch)
    learned = batch[batch["collector", "mask"]]
    priority[learned["index"]] = learned["td_error"]
    assert_priorities(buffer, priority)


def test_event_tables_draw_anchors():
    anchors = data.event_sampler(6, priority={"kind": "proportional"})
    buffer = data.buffer_with(TrajectoryRetraceSampler(24, slice_len=3, anchors=anchors), 24, batch_size=12)
    for first in range(0, 100, 5):
        buffer.extend(rows(5, done=[first % 5], first=first))
        batch = data.learn(buffer)
        grid = batch.reshape(-1, 3)
        steps = grid["number"][:, 1:] - grid["number"][:, :-1]
        assert torch.equal(steps == 1, grid["collector", "mask"][:, 1:])
        assert grid["collector", "mask"][:, 0].all()
        assert "write_stamp" not in batch
        for key in ("priority_weight", "table", "sample_probability"):
            assert (grid[key] == grid[key][:, :1]).all()
        assert not torch.equal(batch["index"], buffer.sampler.newest(buffer)["index"])
    assert torch.equal(probabilities(buffer), anchors.probabilities(buffer.storage))
    assert buffer.sampler.stats()["never_updated"] < 1


def test_a_sampler_is_the_anchor_of_one_sampler_only():
    anchors = proportional()
    TrajectoryRetraceSampler(20, slice_len=5, anchors=anchors)
    with pytest.raises(ValueError, match="this anchors= already belongs to another TrajectoryRetraceSampler"):
        TrajectoryRetraceSampler(20, slice_len=2, anchors=anchors)
    assert len(anchors.followers) == 1


def test_inside_a_decoupled_sampler():
    sampler = DecoupledSampler(TrajectoryRetraceSampler(20, slice_len=4), data.linear_policy(1, 2))
    buffer = data.buffer_with(sampler, 20, batch_size=8)
    actor = sampler.actor_buffer(buffer)
    buffer.extend(rows(20, done=[9], action=torch.randn(20, 2)))
    assert buffer.sample()["collector", "mask"].view(2, 4)[:, 0].all()
    assert actor.sample().shape == (8,)
    assert sampler.critic_sampler.newest(buffer)["number"].tolist() == [16, 17, 18, 19]


# --- the newest


@pytest.mark.parametrize("is_passed", [True, False])
@pytest.mark.parametrize("order", ["env_major", "time_major"])
@pytest.mark.parametrize("num_envs, steps, length", [(4, 8, 8), (2, 2, 6)])
def test_the_newest_of_flat_batches_are_the_newest_of_each_environment(order, num_envs, steps, length, is_passed):
    """If the rows of one environment come after those of another, the next episodes of two may change lanes."""
    generator = torch.Generator().manual_seed(num_envs)
    buffer = buffer_of(400, slice_len=length, episodes=Episodes(num_streams=num_envs if is_passed else None))
    history: list[list[int]] = [[] for _ in range(num_envs)]  # of each environment, the numbers of its steps
    running, next_id, count = list(range(num_envs)), num_envs, num_envs * steps
    for first in range(0, 30 * count, count):
        done = torch.rand(num_envs, steps, generator=generator) < 0.15
        ids = torch.empty(num_envs, steps, dtype=torch.int64)
        for step, env in itertools.product(range(steps), range(num_envs)):
            ids[env, step] = running[env]
            if done[env, step]:
                running[env], next_id = next_id, next_id + 1
        number = torch.arange(first, first + count)
        of_env = number.view(num_envs, steps) if order == "env_major" else number.view(steps, num_envs).T
        for env in range(num_envs):
            history[env] += of_env[env].tolist()
        done, ids = (entry.reshape(-1) if order == "env_major" else entry.T.reshape(-1) for entry in (done, ids))
        buffer.extend(rows(count, done=done.nonzero().flatten().tolist(), ids=ids, first=first))
        batch = buffer.sampler.newest(buffer).reshape(num_envs, length)
        drawn = [row["number"][row["collector", "mask"]].tolist() for row in batch]
        if order == "time_major":
            assert sorted(drawn) == sorted(taken[-length:] for taken in history)
        running_ends = {history[env][-1] for env in range(num_envs) if running[env] in ids}
        assert running_ends <= {part[-1] for part in drawn}


@both_buffers
def test_td_errors_of_the_newest_are_priorities_but_not_those_of_a_stream_without_steps(compilable):
    buffer = buffer_of(episodes=Episodes(num_streams=2), anchors=proportional(), compilable=compilable)
    buffer.extend(rows(3, ids=[0] * 3))
    batch = buffer.sampler.newest(buffer)
    assert batch["collector", "mask"].tolist() == [True] * 3 + [False] * 5
    assert batch["next", "done"][4:].all()
    assert batch["priority_weight"].tolist() == [1.0] * 8
    batch["td_error"] = torch.tensor([1.0, 2.0, 3.0] + [0.0] * 5)
    buffer.update_tensordict_priority(batch)
    assert_priorities(buffer, [1.0, 2.0, 3.0])


def test_the_newest_goes_through_transforms_and_beside_prefetched_batches():
    buffer = buffer_of(slice_len=4, prefetch=2)
    buffer.append_transform(lambda td: td.set("number", td["number"] + 100))
    buffer.extend(rows(20))
    buffer.sample()
    buffer.extend(rows(2, first=20))
    assert buffer.sampler.newest(buffer)["number"].tolist() == [118, 119, 120, 121]
    assert buffer.sample().shape == (16,)


def test_the_newest_of_nothing():
    buffer = buffer_of()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sampler.newest(buffer)
    buffer.extend(rows(3))
    with pytest.raises(ValueError, match="must be the buffer that has this sampler"):
        buffer.sampler.newest(buffer_of())
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sampler.newest(buffer)


# --- state


def test_the_state_of_a_sampler_with_padding_fits_one_without():
    donor, restored = buffer_of(), buffer_of(pad=False)
    donor.extend(rows(20, done=[9]))
    restored.load_state_dict(donor.state_dict())
    assert int(restored.sampler.stats()["num_starts"]) == 14


# --- whole episodes


def test_without_a_first_step_no_slice_can_begin():
    buffer = buffer_of(20, starts="episode")
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(rows(20))
    buffer.extend(rows(1))
    with pytest.raises(RuntimeError, match="no first step of such an episode is stored; use a larger buffer"):
        buffer.sample()


@pytest.mark.parametrize("index", [7, torch.tensor([0, 1]), 20])
def test_only_episodes_of_stored_transitions_can_be_read(index):
    buffer = buffer_of()
    buffer.extend(rows(7))
    with pytest.raises(IndexError, match=r"episode\(index=|out of range"):
        buffer.sampler.episode(buffer.storage, index)


# --- bad input


@pytest.mark.parametrize("batch_size", [0, 3, 6])
def test_batches_hold_whole_slices(batch_size):
    buffer = buffer_of()
    buffer.extend(rows(10))
    with Refuses(buffer, ValueError, rf"batch_size={batch_size}.*multiple of slice_len=4"):
        buffer.sampler.sample(buffer.storage, batch_size)


def test_no_slice_is_long_enough():
    buffer = buffer_of(pad=False)
    buffer.extend(rows(9, done=[2, 5]))
    with Refuses(buffer, RuntimeError, r"pad=False, no stored episode has 4 .*smaller slice_len=, or pad=True"):
        buffer.sample()
    buffer.extend(rows(1, first=9))
    assert buffer.sample()["number"].tolist() == [6, 7, 8, 9] * 4


@pytest.mark.parametrize("own", [None, Episodes(num_streams=1)])
def test_no_slice_goes_on_in_rows_that_slices_and_anchors_refuse(own):
    """The slices take the episodes of their anchors."""
    anchors = ReaPERSampler(10, episodes=Episodes(num_streams=1))
    buffer = buffer_of(10, slice_len=2, episodes=own, anchors=anchors)
    buffer.extend(rows(2, ids=[0, 0]))
    with pytest.warns(UserWarning, match="began before the last one had ended"):
        buffer.extend(rows(1, ids=[1], first=2))
    with pytest.raises(ValueError, match="num_streams=1"):
        buffer.extend(rows(1, ids=[0], first=3))
    assert slices_by_start(buffer, "number") == {0: [0, 1], 1: [1, 1], 2: [2, 2]}
