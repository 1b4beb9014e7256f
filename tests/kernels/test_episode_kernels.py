"""Kernels of lanes, episodes and slices."""

import copy
from functools import partial

import pytest
import torch

from tests.kernels.implementations import (
    INTERPRETED,
    a_reader,
    assert_equal,
    plainly,
    scramble,
    some_slots,
    tensors_of,
)
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.samplers.slice_starts import SliceStarts

WRITTEN = [(False, 1), (False, 3), (True, 3)]


@pytest.fixture
def unchecked(monkeypatch):
    """Writes count interruptions, as in graphs, without warnings and errors."""
    monkeypatch.setattr("torchrl_replay_ext.core.lanes.is_traced", lambda: True)


def random_writes(assigned, lanes, size):
    """Writes of steps of three environments. Some trajectories break off, with a mark at the next one or without."""
    torch.manual_seed(lanes)
    cursor, ids = 0, torch.arange(lanes)
    for _ in range(12):
        count = int(torch.randint(1, 4, ())) * lanes
        row = torch.arange(count)
        env = (row % lanes, row * lanes // count, torch.randint(lanes, (count,)))[int(torch.randint(3, ())) * assigned]
        ended, initial, trajectory = (torch.rand(count) < 0.2), torch.zeros(count, dtype=torch.bool), []
        for row in range(count):
            if torch.rand(()) < 0.2:
                ids[env[row]] = ids.max() + 1
                initial[row] = torch.rand(()) < 0.5
            trajectory.append(int(ids[env[row]]))
            if ended[row]:
                ids[env[row]] = ids.max() + 1
        marks = EpisodeMarks(ended, torch.tensor(trajectory), initial)
        yield (cursor + torch.arange(count)) % size, marks, ended & (torch.rand(count) < 0.7)
        cursor = (cursor + count) % size


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("assigned", "lanes"), WRITTEN)
def test_all_implementations_write_the_same_episodes(run, assigned, lanes):
    size = 42 if assigned else 18 * lanes
    index = EpisodeIndex(some_slots(size, lanes, assigned), a_reader(lanes))
    other = copy.deepcopy(index)
    for number, (slots, marks, finished) in enumerate(random_writes(assigned, lanes, size), 1):
        updated, d = torch.randperm(size + 4)[:9] - 2, 100 * torch.rand(9)
        for each, call in ((index, plainly), (other, run)):
            call(each.append, slots, torch.tensor([number / 8], dtype=torch.float64), marks, finished)
            each._slots.generation[slots] = number
            each._slots.num_writes.fill_(number)
            each._slots.last_seen_step.copy_(slots[-1] // each._slots.layout.slots_per_step)
            call(partial(each.update, updated, d, stays_new=number % 3 == 0))
            if number == 7:
                oldest = (slots[-1] + torch.arange(1, 1 + lanes)) % size
                call(each.remove, oldest)
                each._slots.generation[oldest] = 0
            if number == 9:
                call(each.before_full_overwrite)
                each._slots.generation.zero_()
        assert_equal(index.tensors(), other.tensors())
        assert_equal(index.arrays(), other.arrays())
    assert int(other.lanes.interrupted) > 0


def some_slices(size, lanes, *, assigned, padded, starts="any"):
    slices = SliceStarts(slice_len=4, reader=a_reader(lanes), behaviour_keys=(), pad=padded, starts=starts)
    slices.allocate(some_slots(size, lanes, assigned))
    return slices


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("starts", ["any", "episode"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("assigned", "lanes"), WRITTEN)
def test_all_implementations_write_the_same_slices(run, assigned, lanes, padded, starts):
    size = 42 if assigned else 18 * lanes
    index = some_slices(size, lanes, assigned=assigned, padded=padded, starts=starts)
    other = copy.deepcopy(index)
    for number, (slots, marks, _) in enumerate(random_writes(assigned, lanes, size), 1):
        other._slots.generation[slots] = number
        oldest = (slots[-1] + torch.arange(1, 1 + lanes)) % size
        for each, call in ((index, plainly), (other, run)):
            call(each.append, slots, marks)
            if number == 7:
                call(each.remove, oldest)
                other._slots.generation[oldest] = 0
        assert_equal(index.tensors(), other.tensors())
        assert_equal(tensors_of(index.starts), tensors_of(other.starts))
        assert_equal(index.walk(slots), run(other.walk, slots))
    slots, mask = run(other.walk, torch.arange(size))
    assert mask[:, 0].tolist() == (other.starts.get(torch.arange(size)) > 0).tolist() and mask.any()
    assert padded or mask.all(1).equal(mask.any(1))
    assert torch.equal(mask[:, 1:], (slots[:, 1:] != slots[:, :-1]) & mask[:, :1])


def test_all_implementations_refuse_the_same_trajectories(run):
    index = EpisodeIndex(some_slots(30, 2, assigned=True), a_reader(2))
    no = torch.zeros(6, dtype=torch.bool)
    before = copy.deepcopy(index.tensors())
    one = torch.ones(1, dtype=torch.float64)
    write = partial(index.append, torch.arange(6), one, EpisodeMarks(no, torch.tensor([0, 1, 2] * 2)), no)
    with pytest.raises(ValueError, match=r"trajectory 1 continues .* num_streams=2"):
        run(write)
    assert_equal(before, index.tensors())
    marks = EpisodeMarks(no[:3], torch.tensor([0, 1, 2]))
    with pytest.warns(UserWarning, match="is closed at its last stored step"):
        run(index.append, torch.arange(3), one, marks, no[:3])
    assert int(index.lanes.interrupted) == 1
    index._slots.generation[:3] = 1
    index._slots.last_seen_step.fill_(2)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("assigned", [False, True])
def test_writes_stay_in_range_whatever_the_state_holds(run, assigned):
    for seed in range(3 if INTERPRETED else 20):
        lanes = 2 if assigned else 1
        episodes = EpisodeIndex(some_slots(120, lanes, assigned), a_reader(lanes))
        slices = some_slices(120, lanes, assigned=assigned, padded=False)
        torch.manual_seed(seed)
        for index in (episodes, slices):
            state = {name.partition("_")[2]: tensor for name, tensor in index.tensors().items()}
            scramble(*(state[name] for name in sorted(state.keys() - {"interrupted", "finished", "rows"})))
        marks = EpisodeMarks(torch.rand(12) < 0.5, torch.arange(12) // 3, None)
        slots = torch.randint(-5, 125, (12,))
        run(episodes.append, slots, torch.rand(1, dtype=torch.float64), marks, marks.ended)
        run(slices.append, slots, marks)
        run(episodes.update, slots, torch.rand(12))
        run(episodes.remove, slots)
        walked, _ = run(slices.walk, torch.randint(-(2**50), 2**50, (20,)))
        assert int(walked.min()) >= 0 and int(walked.max()) < 120
