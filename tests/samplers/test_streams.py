"""Streams of samplers that need the order of rows: ids, marks, episodes that break off, and rejected writes."""

from functools import partial

import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler, TensorDictMaxValueWriter

from tests.data import buffer_of, buffer_with, rows
from tests.params import both_buffers
from tests.reference import NaiveReaPER
from tests.samplers.experience import INTERRUPTED, assert_priorities, probabilities
from torchrl_replay_ext import Episodes, ProportionalSampler, ReaPERSampler, RecencySampler, TrajectoryRetraceSampler

ONE, TWO = Episodes(num_streams=1), Episodes(num_streams=2)

slices = partial(TrajectoryRetraceSampler, slice_len=2, behaviour_keys=())


def assert_episodes(buffer, expected):
    """Check the probabilities against those of the given episode of each slot; -1: the slot is never drawn."""
    size = len(buffer)
    oldest = buffer.write_count % size if size == buffer.storage.max_size else 0
    order = [slot % size for slot in range(oldest, oldest + size) if expected[slot % size] >= 0]
    error = torch.linspace(0.5, 2.0, len(order))
    buffer.update_priority(torch.tensor(order), error.square())
    done = buffer.storage[:]["next", "done"].squeeze(-1)
    reference = NaiveReaPER(eps=0.0, td_error="absolute")
    for slot in order:
        reference.write(slot, expected[slot], terminated=bool(done[slot]))
    reference.update(order, error.tolist())
    assert_priorities(buffer, [reference.criterion().get(slot, 0.0) for slot in range(size)])


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
@pytest.mark.parametrize("sampler", [ReaPERSampler, slices])
def test_a_new_collector_may_use_the_ids_of_trajectories_that_it_cut_off(sampler):
    buffer = buffer_of(sampler, capacity=20, episodes=Episodes(num_streams=2))
    buffer.extend(rows(2, ids=[0, 1]))
    buffer.extend(rows(2, ids=[0, 2], done=[0]))
    # trajectory 0 takes the lane that was written to least recently, that of trajectory 1, and 1 takes that of 2
    for ids in ([0, 0], [0, 1], [1, 0]):
        buffer.extend(rows(2, ids=ids))
    assert buffer.sampler.stats()["interrupted"] == 2
    assert len(buffer) == 10


def prioritized_slices(size, **arguments):
    return slices(size, anchors=ProportionalSampler(size), **arguments)


@pytest.mark.parametrize("sampler", [ReaPERSampler, prioritized_slices])
def test_writes_go_on_after_a_refused_one(sampler):
    buffer = buffer_of(sampler, capacity=6, episodes=ONE)
    buffer.extend(rows(6, done=[5], ids=[0] * 6))
    with pytest.raises(ValueError, match="num_streams=1"):
        buffer.extend(rows(3, ids=[1, 2, 1]))
    # the rejected rows are in the storage, but are never drawn, even if another row is announced again
    buffer.mark_update(torch.tensor([4]))
    assert probabilities(buffer)[:3].tolist() == [0.0] * 3
    assert buffer.sampler.stats()["num_items"] == 3
    buffer.extend(rows(2, done=[1], ids=[3, 3]))
    assert (probabilities(buffer) > 0).tolist() == [False] * 3 + [True] * 3
    if sampler is ReaPERSampler:
        assert_episodes(buffer, [-1, -1, -1, 0, 0, 1])
    buffer.extend(rows(2, done=[1], ids=[4, 4]))
    buffer.extend(rows(2, ids=[5, 5]))
    assert (probabilities(buffer) > 0).all()
    if sampler is ReaPERSampler:
        assert_episodes(buffer, [1, 2, 2, 0, 0, 1])


ONE_STREAM = {
    "reaper": partial(ReaPERSampler, episodes=ONE),
    "slices": partial(slices, episodes=ONE),
    "slices, reaper": lambda size: slices(size, episodes=ONE, anchors=ReaPERSampler(size, episodes=ONE)),
}
BROKE_OFF = "is closed at its last stored step"


@pytest.mark.parametrize("sampler", ONE_STREAM.values(), ids=ONE_STREAM)
def test_with_one_stream_a_new_trajectory_closes_one_that_broke_off_and_warns_once(sampler):
    """Another collector starts new episodes; the last one of the first collector is unfinished."""
    buffer = buffer_of(sampler, capacity=20)
    buffer.extend(rows(4, done=[1], ids=[187, 187, 188, 188]))
    with pytest.warns(UserWarning, match=BROKE_OFF):
        buffer.extend(rows(3, ids=[189, 189, 189]))
    # there is no second warning
    buffer.extend(rows(2, ids=[190, 190]))
    buffer.extend(rows(2, ids=[0, 0]))
    # an id of a trajectory that was interrupted may begin another one
    buffer.extend(rows(4, done=[0, 1, 2, 3], ids=[0, 187, 188, 189]))
    assert len(buffer) == 15
    assert int(buffer.sampler.stats()["interrupted"]) == 3
    if isinstance(buffer.sampler, ReaPERSampler):
        assert_episodes(buffer, [0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7])


@pytest.mark.filterwarnings(f"ignore:.*{BROKE_OFF}:UserWarning")
@pytest.mark.parametrize("sampler", ONE_STREAM.values(), ids=ONE_STREAM)
@pytest.mark.parametrize("envs", [2, 20])
@pytest.mark.parametrize("at_once", [False, True])
def test_more_environments_than_streams_are_an_error(sampler, envs, at_once):
    buffer = buffer_of(sampler, capacity=100)
    with pytest.raises(ValueError, match=r"num_streams=1\. Pass episodes=Episodes\(num_streams=<"):
        if at_once:
            buffer.extend(rows(2 * envs, ids=[*range(envs)] * 2))
        for env in [*range(envs)] * 2:
            buffer.extend(rows(1, ids=[env]))
    assert int(buffer.sampler.stats()["num_items"]) == (0 if at_once else envs)


@pytest.mark.parametrize("sampler", [ReaPERSampler, RecencySampler, partial(TrajectoryRetraceSampler, slice_len=2)])
def test_only_writers_in_turn(sampler):
    writer = TensorDictMaxValueWriter(rank_key="rank")
    buffer = buffer_with(sampler(6), 6, writer=writer)
    with pytest.raises(ValueError, match="round-robin"):
        buffer.extend(rows(6, rank=torch.tensor([5.0, 0.0, 4.0, 1.0, 3.0, 2.0])))


@pytest.mark.parametrize("sampler", [ReaPERSampler, slices])
def test_a_marked_first_transition_ends_the_one_that_was_silent_longest(sampler):
    """In flat storage with several streams, the mark does not identify the stream."""
    buffer = buffer_of(sampler, capacity=20, episodes=Episodes(num_streams=2))
    first = torch.tensor([True, False] * 2)
    buffer.extend(rows(4, ids=[0, 0, 1, 1], is_init=first))
    buffer.extend(rows(4, ids=[2, 2, 3, 3], is_init=first))
    # 3 continues, 4 takes the lane of 2
    buffer.extend(rows(4, ids=[3, 3, 4, 4], is_init=torch.tensor([False, False, True, False])))
    if sampler is ReaPERSampler:
        assert_episodes(buffer, [0, 0, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
    assert buffer.sampler.stats()["interrupted"] == 0
    # a trajectory that was ended like this continues without a mark
    with pytest.warns(UserWarning, match=BROKE_OFF):
        buffer.extend(rows(2, ids=[2, 2], is_init=torch.zeros(2, dtype=torch.bool)))
    assert buffer.sampler.stats()["interrupted"] == 1


retrace = partial(TrajectoryRetraceSampler, slice_len=2)


@both_buffers
@pytest.mark.parametrize(
    ("sampler", "missing", "message"),
    [
        (ReaPERSampler, ("next", "done"), r"'done'.*environment.*done_key="),
        (partial(ReaPERSampler, truncated="ongoing"), ("next", "terminated"), r"'terminated'.*environment"),
        (partial(ReaPERSampler, episodes=TWO), ("collector", "traj_ids"), r"'traj_ids'.*collector.*traj_key="),
        (retrace, ("next", "done"), r"'done'.*environment.*done_key="),
        (partial(retrace, episodes=TWO), ("collector", "traj_ids"), r"'traj_ids'.*collector.*traj_key="),
        (retrace, "logits", "'logits'.*policy in the collector.*ProbabilisticActor.*behaviour_keys="),
        (lambda size: retrace(size, anchors=ProportionalSampler(size)), "logits", "'logits'.*behaviour_keys="),
        (lambda size: retrace(size, anchors=ReaPERSampler(size)), ("next", "done"), r"'done'.*environment.*done_key="),
    ],
)
def test_a_first_write_that_lacks_an_entry_is_refused_by_its_name_and_is_not_drawn(
    sampler, missing, message, compilable
):
    data = rows(4, done=[3], ids=[0] * 4, logits=torch.zeros(4, 2))
    buffer = buffer_with(sampler(20), 20, compilable=compilable, batch_size=20)
    for _ in range(2):
        with pytest.raises(KeyError, match=message):
            buffer.extend(data.exclude(missing))
        with pytest.raises(RuntimeError, match="empty"):
            buffer.sample()
    # the rows were there when the sampler was attached
    filled = buffer_with(RandomSampler(), 20, compilable=compilable, batch_size=4)
    filled.extend(data.exclude(missing))
    filled.set_sampler(sampler(20))
    with pytest.raises(KeyError, match=message):
        filled.sample()
    index = buffer.extend(data.clone())
    assert set(buffer.sample()["index"].tolist()) == set(index.tolist())
    assert probabilities(buffer).nonzero().squeeze(1).tolist() == index.tolist()


@pytest.mark.parametrize("sampler", [ReaPERSampler, slices, lambda size: slices(size, anchors=ReaPERSampler(size))])
@pytest.mark.parametrize("envs", [3, 64])
def test_up_to_64_environments_need_no_argument(sampler, envs):
    """Episodes of three steps of interleaved environments; some are seen first in a later write."""
    buffer = buffer_of(sampler, capacity=500)
    ids = [*range(envs)]
    for step in range(6):
        done, of_step = ids if step % 3 == 2 else (), [step // 3 * envs + env for env in ids]
        data = rows(envs, ids=of_step, done=done, first=step * envs)
        for part in data.split([2, envs - 2]):
            buffer.extend(part)
    assert buffer.sampler.stats()["interrupted"] == 0
    if isinstance(buffer.sampler, ReaPERSampler):
        assert_episodes(buffer, [step // 3 * envs + env for step in range(6) for env in ids])
        return
    batch = buffer.sample(64).reshape(-1, 2)
    number = batch["number"][batch["collector", "mask"].all(1)]
    assert (number[:, 1] == number[:, 0] + envs).all()
    ends = number[:, 0] // envs % 3
    assert {0, 1} == {*ends.tolist()}


def test_more_environments_need_their_number():
    buffer = buffer_of(ReaPERSampler, capacity=500)
    with pytest.raises(ValueError, match=r"num_streams=64\. Pass episodes=Episodes\(num_streams=<"), pytest.warns():
        for _ in range(2):
            buffer.extend(rows(80, ids=[*range(80)]))


@pytest.mark.parametrize("sampler", [ReaPERSampler, slices])
def test_an_entry_of_ids_that_was_named_must_be_there_and_hold_integers(sampler):
    buffer = buffer_of(partial(sampler, episodes=Episodes(traj_key="episode")), capacity=20)
    with pytest.raises(KeyError, match=r"'episode'.*traj_key="):
        buffer.extend(rows(4, ids=[0, 1, 0, 1]))
    data = rows(4, ids=[0, 1, 0, 1])
    with pytest.raises(TypeError, match=r"'episode' must hold integers, from the first write on"):
        buffer.extend(data.clone().set("episode", torch.tensor([0.0, 0.5, 0.0, 0.5])))
