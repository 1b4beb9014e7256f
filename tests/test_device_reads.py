"""How often the host waits for an accelerator, which is emulated, and what happens there to invalid input."""

from functools import cache, partial
from statistics import median

import pytest
import torch
from torchrl.data import LazyTensorStorage
from torchrl.data.replay_buffers import RandomSampler

from tests.data import buffer_with, event_sampler, learn, random_rows
from tests.emulated_device import EmulatedDevice
from tests.params import both_buffers, slow_but
from torchrl_replay_ext import (
    CompilableTensorStorage,
    Episodes,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
    validate_on_accelerators,
)

SIZE, BATCH, CHUNK = 240, 32, 8
SAMPLERS = {
    "proportional": ProportionalSampler,
    "proportional, stratified": partial(ProportionalSampler, stratified=True),
    "rank": RankBasedSampler,
    "reaper": ReaPERSampler,
    "reaper, several streams": partial(ReaPERSampler, episodes=Episodes(num_streams=3)),
    "recency": RecencySampler,
    "slices": partial(TrajectoryRetraceSampler, slice_len=4),
    "slices, several streams": partial(TrajectoryRetraceSampler, slice_len=4, episodes=Episodes(num_streams=3)),
    "slices, proportional": lambda: TrajectoryRetraceSampler(slice_len=4, anchors=ProportionalSampler()),
}
WRONG = {"nan": float("nan"), "infinite": float("inf"), "negative": -1.0, "too large": 1e38}


@pytest.fixture(scope="module")
def emulated():
    return EmulatedDevice("torchrl_replay_ext")


@pytest.fixture
def device(emulated):
    with emulated:
        yield emulated


def on_device(count, first=0, ndim=1):
    data = random_rows(count, first=first)
    if ndim == 2:
        # an episode ends in both columns
        data["next", "done"] |= data["number"].unsqueeze(1) % 10 == 8
        data = data.reshape(-1, 2).transpose(0, 1)
    return data.to("emulated")


def make(sampler, compilable=False, ndim=1):
    return buffer_with(sampler, SIZE, compilable=compilable, ndim=ndim, device="emulated", batch_size=BATCH)


def filled(sampler, compilable=False, ndim=1):
    buffer = make(sampler, compilable, ndim)
    for first in range(0, SIZE + 60, 60):
        buffer.extend(on_device(60, first, ndim))
    return buffer


@cache
def waits_of_torchrl(device, ndim):
    """Those of TorchRL's uniform buffer."""
    return waits(device, filled(RandomSampler(), ndim=ndim))


def waits(device, buffer):
    """Median numbers of waits in a write, and in a sample with its priority update."""
    writes, cycles = [], []
    for number in range(9):
        data = on_device(CHUNK, SIZE + CHUNK * number, buffer.storage.ndim)
        device.reset()
        buffer.extend(data)
        writes.append(sum(device.waits.values()))
        device.reset()
        learn(buffer)
        cycles.append(sum(device.waits.values()))
    return median(writes), median(cycles)


@pytest.mark.parametrize("ndim", slow_but([2], [1, 2]))
@both_buffers
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_host_waits_at_most_once_for_a_write_and_for_a_draw_with_its_update(name, compilable, ndim, device):
    """Beyond the waits of TorchRL's uniform buffer."""
    write, cycle = waits(device, filled(SAMPLERS[name](), compilable, ndim))
    uniform = waits_of_torchrl(device, ndim)
    assert write <= uniform[0] + 1
    assert cycle <= uniform[1] + 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_host_never_waits_while_a_graph_is_captured(name, device):
    buffer = filled(SAMPLERS[name](), compilable=True)
    data = on_device(CHUNK, SIZE)
    device.reset()
    with device.capturing():
        if buffer.sampler.writes_in_graphs:
            buffer.extend(data)
        else:
            with pytest.raises(RuntimeError, match="a write on emulated:0 cannot be part of a graph"):
                buffer.extend(data)
        learn(buffer)
    assert not device.waits


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_captured_graph_ignores_the_generator_of_the_buffer(name, device):
    """CUDA registers only its own generator with a graph, and cannot copy numbers from another one."""
    buffer, generator = filled(SAMPLERS[name](), compilable=True), torch.Generator().manual_seed(0)
    buffer.set_rng(generator)
    before = generator.get_state()
    device.reset()
    with device.capturing():
        learn(buffer)
    assert not device.waits and torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("name", ["proportional", "rank", "reaper"])
def test_draws_and_updates_of_a_compilable_buffer_never_wait(name, device):
    assert waits(device, filled(SAMPLERS[name](), compilable=True))[1] == 0


@pytest.mark.parametrize(
    "options",
    [
        {"correction": "conditional", "pair_keys": ("event",)},
        {"priority": {"kind": "proportional"}},
        {"priority": {"kind": "proportional"}, "default": SIZE - 60},
    ],
    ids=str,
)
def test_with_event_tables_a_write_waits_once_and_draws_and_updates_never(options, device):
    assert waits(device, filled(event_sampler(60, "event", **options), compilable=True)) == (1, 0)


def test_a_write_goes_on_after_the_rows_that_a_graph_has_written_since(device):
    """The host knows the cursor without a wait, but replays of a graph change it."""
    buffer = filled(ProportionalSampler(), compilable=True)
    with device.capturing():
        buffer.extend(on_device(CHUNK))
    for _ in range(2):
        # what a replay of the graph does to the counters
        buffer.writer.cursor_value.add_(CHUNK)
        buffer.storage.num_rows.sub_(CHUNK)
        assert buffer.extend(on_device(CHUNK))[0] == (buffer.writer.cursor_value - CHUNK) % SIZE
        assert buffer.writer.cursor_value == buffer.writer.state_dict()["_cursor"]
        assert len(buffer) == buffer.storage.num_rows
    assert buffer.writer.cursor_value == (300 + 5 * CHUNK) % SIZE


@both_buffers
def test_slices_come_back_as_shuffled_copies_without_a_wait(compilable, device):
    buffer = filled(SAMPLERS["slices, proportional"](), compilable)
    batch = buffer.sample()
    buffer.sample()
    batch["td_error"] = 1.0 * batch["collector", "mask"]
    slices = batch.reshape(-1, 4)[torch.randperm(BATCH // 4, device="emulated")].reshape(-1)
    device.reset()
    buffer.update_tensordict_priority(slices)
    assert not device.waits


def invalid_updates():
    """Updates of one valid and one invalid row: their index, TD errors, and the valid slot."""
    index = torch.tensor([3, 5], device="emulated")
    for value in WRONG.values():
        yield index, torch.tensor([0.25, value], device="emulated"), 3
    for slot in (-1, SIZE, 10**9):
        for place in ("emulated", "cpu"):
            yield torch.tensor([slot, 5], device=place), torch.tensor([0.5, 0.25], device="emulated"), 5


@pytest.mark.parametrize("validate", [False, True])
@both_buffers
@pytest.mark.parametrize("name", ["proportional", "reaper", "rank"])
def test_an_accelerator_leaves_out_invalid_rows_and_counts_them_or_raises_with_validate(
    name, compilable, validate, device
):
    validate_on_accelerators(validate)
    buffer = filled(SAMPLERS[name](td_error="absolute"), compilable)
    before = buffer.sampler.state_dict()
    for number, (index, error, valid) in enumerate(invalid_updates(), start=1):
        if name == "rank" and error[1] == WRONG["too large"]:
            error[1] = -error[1]
        if validate:
            with pytest.raises((ValueError, IndexError), match=r"TD errors must be|out of range"):
                buffer.update_priority(index, error)
            after = buffer.sampler.state_dict()
            assert all(torch.equal(after[key], value) for key, value in before.items())
            continue
        buffer.update_priority(index, error)
        assert buffer.sampler.stats()["rejected_updates"] == number
        assert buffer.sampler.stats()["dropped_updates"] == 0
        assert 0 < buffer.sampler.probabilities(buffer.storage)[valid] < 1
    assert buffer.sample()["index"].max() < SIZE


@both_buffers
def test_if_all_priorities_are_0_an_accelerator_draws_rows_of_weight_0_or_raises_with_validate(compilable, device):
    for validate in (False, True):
        validate_on_accelerators(validate)
        buffer = filled(ProportionalSampler(eps=0), compilable)
        buffer.update_priority(torch.arange(SIZE, device="emulated"), torch.zeros(SIZE, device="emulated"))
        if validate:
            with pytest.raises(RuntimeError, match="all priorities are 0"):
                buffer.sample()
        else:
            assert buffer.sample()["priority_weight"].tolist() == [0.0] * BATCH


@both_buffers
@pytest.mark.parametrize("name", ["reaper", "slices"])
def test_too_many_trajectories_raise_on_an_accelerator(name, compilable, device):
    data = random_rows(12)
    data["next", "done"][:] = False
    data["collector", "traj_ids"] = torch.arange(12) % 4
    buffer = make(SAMPLERS[name](episodes=Episodes(num_streams=2)), compilable)
    with pytest.raises(ValueError, match="num_streams=2"):
        buffer.extend(data.to("emulated"))


def test_a_write_from_the_cpu_tells_its_place_without_a_wait(device):
    buffer = filled(ProportionalSampler())
    data = random_rows(CHUNK)
    device.reset()
    buffer.extend(data)
    assert not any("compilation.py" in place for _, place in device.waits)


@pytest.mark.parametrize("ndim", [1, 2])
def test_a_storage_on_an_accelerator_returns_only_rows_that_were_written(ndim, device):
    storages = [
        kind(20, ndim=ndim, device=place)
        for kind, place in ((LazyTensorStorage, "cpu"), (CompilableTensorStorage, "emulated"))
    ]
    for storage in storages:
        data = random_rows(6)
        data["observation"] = torch.arange(6.0)
        index = torch.arange(6)
        if ndim == 2:
            data, index = data.reshape(3, 2), torch.arange(3)
        storage.set(index, data)
    for index in ((slice(None),), torch.tensor([-1]), torch.tensor([True] * len(storages[0][:])), 1, slice(1, None)):
        found = [storage.get(index)["observation"].tolist() for storage in storages]
        assert found[0] == found[1], index


def test_slices_are_refused_on_an_accelerator_until_an_episode_is_long_enough(device):
    buffer = make(TrajectoryRetraceSampler(slice_len=4, pad=False))
    buffer.extend(on_device(3))
    with pytest.raises(RuntimeError, match="no stored episode has 4 consecutive steps"):
        buffer.sample()
    buffer.extend(on_device(7, 3))
    buffer.sample()
    device.reset()
    buffer.sample()
    assert not device.waits


def test_a_default_device_does_not_move_what_the_host_reads(device):
    torch.set_default_device("emulated")
    try:
        write, cycle = waits(device, filled(ProportionalSampler(), compilable=True))
    finally:
        torch.set_default_device(None)
    assert (write, cycle) <= (4, 1)
