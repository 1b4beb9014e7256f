"""Kernels of lanes, episodes and slices."""

import copy
from functools import partial

import pytest
import torch

from tests.kernels.implementations import INTERPRETED, a_reader, assert_equal, on_cpu, plainly, scramble, some_slots
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.streams import EpisodeMarks
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.samplers.slice_starts import SliceStarts

WRITTEN = [(False, 1), (False, 3), (True, 3)]


@pytest.fixture
def unchecked(monkeypatch):
    """Writes count interruptions, as in graphs, without warnings and errors."""
    monkeypatch.setattr("torchrl_replay_ext.core.streams.is_traced", lambda: True)


def random_writes(assigned, lanes, size, steps=4):
    """Writes of fewer ``steps``. Some trajectories break off, with a mark at the next one or without."""
    torch.manual_seed(lanes)
    cursor, ids = 0, torch.arange(lanes)
    for _ in range(12):
        count = int(torch.randint(1, steps, ())) * lanes
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
def test_an_accelerator_gets_the_episodes_that_the_cpu_has(run, accelerator, assigned, lanes):
    # so long that pages of assigned lanes are freed and used again
    size, steps = (600, 200) if assigned else (18 * lanes, 4)
    index, other = (
        EpisodeIndex(some_slots(size, lanes, assigned, where), a_reader(lanes)) for where in ("cpu", accelerator)
    )
    for number, (slots, marks, finished) in enumerate(random_writes(assigned, lanes, size, steps), 1):
        updated, d = torch.randperm(size + 4)[:9] - 2, 100 * torch.rand(9)
        for each, call in ((index, plainly), (other, run)):
            there = each._slots.generation.device
            call(each.append, slots, torch.tensor([number / 8], dtype=torch.float64).to(there), marks, finished)
            each._slots.generation[slots] = number
            each._slots.num_writes.fill_(number)
            call(partial(each.update, updated.to(there), d.to(there), stays_new=number % 3 == 0))
            if number == 7:
                call(each.remove, (slots[-1] + torch.arange(1, 1 + lanes)) % size)
            if number == 9:
                assert not assigned or int(each.tensors()["episodes_lane_next"].max()) > 2 * SumTree.PAGE
                call(each.before_full_overwrite)
        assert_equal(*(on_cpu(each.tensors()) for each in (index, other)))
        assert_equal(*(on_cpu(each.arrays()) for each in (index, other)))
    assert int(other.lanes.interrupted) > 0


def some_slices(size, lanes, where="cpu", *, assigned, padded, starts="any"):
    slices = SliceStarts(slice_len=4, reader=a_reader(lanes), behaviour_keys=(), pad=padded, starts=starts)
    slices.allocate(some_slots(size, lanes, assigned, where))
    return slices


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("starts", ["any", "episode"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("assigned", "lanes"), WRITTEN)
def test_an_accelerator_gets_the_slices_that_the_cpu_has(run, accelerator, assigned, lanes, padded, starts):
    size = 42 if assigned else 18 * lanes
    kind = {"assigned": assigned, "padded": padded, "starts": starts}
    index, other = some_slices(size, lanes, **kind), some_slices(size, lanes, accelerator, **kind)
    for number, (slots, marks, _) in enumerate(random_writes(assigned, lanes, size), 1):
        for each, call in ((index, plainly), (other, run)):
            call(each.append, slots, marks)
            if number == 7:
                call(each.remove, (slots[-1] + torch.arange(1, 1 + lanes)) % size)
        for read in (lambda each: each.tensors(), lambda each: each.starts.views(), lambda each: each.newest()):
            assert_equal(*(on_cpu(read(each)) for each in (index, other)))
        assert_equal(index.walk(slots), on_cpu(run(other.walk, slots.to(accelerator))))
    slots, mask = on_cpu(run(other.walk, torch.arange(size).to(accelerator)))
    assert mask[:, 0].tolist() == (index.starts.get(torch.arange(size)) > 0).tolist() and mask.any()
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


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("where", ["cpu", "accelerator"])
def test_writes_stay_in_range_whatever_the_state_holds(run, accelerator, assigned, where):
    device = accelerator if where == "accelerator" else torch.device("cpu")
    for seed in range(3 if INTERPRETED else 20):
        lanes = 2 if assigned else 1
        episodes = EpisodeIndex(some_slots(120, lanes, assigned, device), a_reader(lanes))
        slices = some_slices(120, lanes, device, assigned=assigned, padded=False)
        torch.manual_seed(seed)
        for index in (episodes, slices):
            state = {name.partition("_")[2]: tensor for name, tensor in index.tensors().items()}
            scramble(*(state[name] for name in sorted(state.keys() - {"interrupted", "finished", "rows"})))
            index._send()
        marks = EpisodeMarks(torch.rand(12) < 0.5, torch.arange(12) // 3, None)
        slots = torch.randint(-5, 125, (12,))
        run(episodes.append, slots, torch.rand(1, dtype=torch.float64).to(device), marks, marks.ended)
        run(slices.append, slots, marks)
        run(episodes.update, slots.to(device), torch.rand(12).to(device))
        run(episodes.remove, slots)
        walked, _ = on_cpu(run(slices.walk, torch.randint(-(2**50), 2**50, (20,)).to(device)))
        assert int(walked.min()) >= 0 and int(walked.max()) < 120
