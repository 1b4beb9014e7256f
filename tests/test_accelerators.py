"""Buffers on an accelerator, which is emulated: see ``emulated_device.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Sequence

from tests.data import linear_policy
from tests.emulated_device import DeviceMismatchError, EmulatedDevice
from tests.operations import CASES, Driven
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.stacks import StackedStreams
from tests.test_compiled import Flat, TwoColumns, TwoStreams
from torchrl_replay_ext import (
    AdamStep,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    FrameStackStorage,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.compilation import is_traced

ROOT = Path(__file__).parent.parent


@pytest.fixture
def device():
    with EmulatedDevice("torchrl_replay_ext", "tests") as device:
        yield device


def test_the_emulated_device_refuses_operands_of_two_devices(device):
    ours, other = torch.arange(4, device="emulated"), torch.arange(4)
    with pytest.raises(DeviceMismatchError, match=r"aten\.add"):
        ours + other
    with pytest.raises(DeviceMismatchError):
        other[ours]
    with pytest.raises(DeviceMismatchError):
        torch.rand(4, device="emulated", generator=torch.Generator())
    # CUDA takes these
    assert (ours + other[1]).tolist() == [1, 2, 3, 4]
    assert torch.rand(4, device="emulated", generator=torch.Generator("emulated")).shape == (4,)


def test_the_emulated_device_counts_what_waits_for_it_and_where(device):
    ours, many = torch.arange(4, device="emulated"), torch.arange(40, device="emulated")
    few, number = ours[:2].clone(), ours[2].clone()
    for wait, kind in [
        (lambda: ours.sum().item(), "item"),
        (lambda: bool(ours.any()), "item"),
        (ours.tolist, "tolist"),
        (ours.cpu, "copy to the CPU"),
        (ours.nonzero, "nonzero"),
        (lambda: ours[ours > 1], "mask as index"),
        (lambda: torch.arange(4).to("emulated"), "copy to the device"),
        (lambda: torch.tensor(5, device="emulated"), "number to the device"),
        (lambda: ours.__setitem__(0, 5), "number to the device"),
        (lambda: ours.__setitem__(few, 5), "number to the device"),
        (lambda: ours.__setitem__(ours > 1, number), "mask as index"),
        (lambda: ours.index_fill(0, few, number), "index_fill"),
        (lambda: ours.index_fill_(0, few, number), "index_fill_"),
        (lambda: ours.masked_fill(ours > 1, number), "masked_fill"),
        (lambda: ours.masked_fill_(ours > 1, number), "masked_fill_"),
        (lambda: torch.isin(many, many), "isin"),
        (lambda: torch.normal(0.0, many.float()), "normal"),
        (lambda: torch.searchsorted(many, many, sorter=many), "searchsorted"),
        (lambda: many.repeat_interleave(many), "repeat_interleave"),
        (lambda: torch.histc(many.float()), "histc"),
        (lambda: torch.linalg.cholesky(torch.eye(2, device="emulated")), "_linalg_check_errors"),
    ]:
        device.reset()
        wait()
        ((found, place),) = device.waits
        assert found == kind
        assert place.startswith("tests/test_accelerators.py:")


def test_the_emulated_device_counts_no_wait_where_cuda_does_not_wait(device):
    ours, many = torch.arange(4, device="emulated"), torch.arange(40, device="emulated")
    few, number, cpu_number = ours[:2].clone(), ours[2].clone(), torch.tensor(2)
    device.reset()
    _ = ours + 1
    _ = ours[few]
    _ = torch.arange(4).to("emulated", non_blocking=True)
    ours[:2] = 5
    ours[ours > 1] = 5
    ours[few] = number
    ours.fill_(number)
    ours.index_fill_(0, few, 5).index_fill_(0, few, cpu_number)
    ours.masked_fill_(ours > 1, 5).masked_fill_(ours > 1, cpu_number)
    # positions of a CPU mask are copied from pinned memory
    _ = ours[torch.tensor([True, False, True, False])]
    _ = torch.isin(many, few), torch.isin(many, many, assume_unique=True), torch.isin(many, 5)
    _ = torch.normal(many.float(), 1.0), torch.multinomial(many + 1.0, 2), torch.randperm(4, device="emulated")
    _ = torch.searchsorted(many, many), torch.searchsorted(many, 5), many.argsort(), many.cummax(0)
    _ = many.repeat_interleave(2), many.repeat_interleave(torch.ones_like(many), output_size=40)
    _ = torch.zeros_like(many).scatter_reduce_(0, few, ours, "amax").index_put_((few,), ours[:2], accumulate=True)
    _ = many.clamp(number, number), torch.nn.functional.one_hot(few, 4), torch.histc(many.float(), 4, 0, 9)
    assert not device.waits


def test_the_emulated_device_counts_operations_that_launch_kernels(device):
    ours = torch.arange(4, device="emulated")
    device.reset()
    _ = (ours[1:].view(1, 3) + 1).sum()
    assert device.operations == {"aten.add": 1, "aten.sum": 1}


def test_code_on_the_emulated_device_can_take_the_path_of_cuda_graphs(device):
    assert not is_traced()
    with device.capturing():
        assert is_traced()
    assert not is_traced()


@pytest.mark.parametrize("foreach", [None, False])
def test_step_counts_of_adam_lie_on_the_accelerator(foreach, device):
    parameter = torch.ones(3, device="emulated", requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.1, foreach=foreach)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["step"].device.type == "cpu"
    step = AdamStep(optimizer)
    device.reset()
    step([torch.ones(3, device="emulated")])
    assert not device.waits
    count = optimizer.state[parameter]["step"]
    assert count.device.type == "emulated" and count == 2
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), 0.8))


def test_step_counts_of_parameters_on_both_devices_stay_on_the_cpu(device):
    parameters = [torch.ones(3, device=place, requires_grad=True) for place in ("emulated", "cpu")]
    optimizer = torch.optim.Adam(parameters, lr=0.1)
    AdamStep(optimizer)([torch.ones(3, device=parameter.device) for parameter in parameters])
    assert {optimizer.state[parameter]["step"].device.type for parameter in parameters} == {"cpu"}
    torch.testing.assert_close(parameters[0].detach().cpu(), torch.full((3,), 0.9))


GRADIENTS = """
import torch
from tests.emulated_device import EmulatedDevice, leave

with EmulatedDevice():
    ours = torch.nn.Linear(3, 2).to("emulated")
    ours(torch.ones(5, 3, device="emulated")).square().sum().backward()
    assert ours.weight.grad.device.type == "emulated"
    expected = torch.nn.Linear(3, 2)
    expected.load_state_dict({key: value.cpu() for key, value in ours.state_dict().items()})
    expected(torch.ones(5, 3)).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), expected.weight.grad)
leave()
"""


def test_the_emulated_device_computes_gradients():
    """In a process of its own: torch's autograd ignores devices that are registered after its first backward pass."""
    subprocess.run([sys.executable, "-c", GRADIENTS], check=True, cwd=ROOT)


@pytest.fixture(scope="module")
def emulated_runs(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("runs"))
    command = [sys.executable, "-m", "tests.recipes.emulated_runs", directory]
    finished = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS)
def test_each_recipe_trains_on_an_accelerator(name, emulated_runs):
    """Collects, updates priorities and networks, evaluates and saves checkpoints; mixed devices would be an error."""
    expected = {"code": 0, "device": "emulated", "updated": True, "losses": True}
    assert emulated_runs[name] == expected, emulated_runs[name].get("error")


@pytest.mark.parametrize(
    "name", slow_but(("decoupled", "rank", "slices, reaper", "tables, proportional, pinned", "frames, slices"), CASES)
)
def test_random_operations_never_mix_devices(name, device):
    """Data comes from the device or from the CPU; see ``operations.py`` for what happens to the buffer."""
    for seed in (0, 3):
        used = Driven(name, seed, device="emulated", validate=seed == 0)
        for _ in range(30):
            used.operate()
        used.go_on_with_a_copy()
        for _ in range(10):
            used.operate()
        used.check()
        assert used.sampler.stats()["num_items" if "slices" not in name else "num_starts"].device.type == "emulated"


def test_a_loaded_storage_lies_on_its_own_device(device):
    def data(device):
        return TensorDict({"observation": torch.arange(6.0, device=device)}, [6])

    saved = CompilableTensorStorage(10)
    saved.set(torch.arange(6), data("cpu"))
    loaded = CompilableTensorStorage(10, device="emulated")
    loaded.load_state_dict(saved.state_dict())
    loaded.set(torch.arange(6, 9, device="emulated"), data("cpu")[:3])
    assert loaded[:].device.type == "emulated"
    assert loaded[:]["observation"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


def sampler_in_tables(capacity, priority=None):
    tables = EventTables([EventSpec("end", ("next", "done"), 3)], {"end": 5})
    return EventTableSampler(tables, eta={"default": 0.6, "end": 0.4}, min_size=1, priority=priority)


# name: sampler by capacity, and setters
SETTERS = {
    "proportional": (lambda capacity: ProportionalSampler(capacity, alpha=0.6), {"alpha": 0.9, "beta": 0.7}),
    "rank": (lambda capacity: RankBasedSampler(capacity, alpha=0.6), {"alpha": 0.9, "beta": 0.7}),
    "reaper": (lambda capacity: ReaPERSampler(capacity, alpha=0.6), {"alpha": 0.9, "omega": 0.8, "beta": 0.7}),
    "recency": (lambda capacity: RecencySampler(capacity, half_life=5), {"beta": 0.7}),
    "tables": (sampler_in_tables, {"eta": {"default": 0.2, "end": 0.8}}),
    "tables, reaper": (
        lambda capacity: sampler_in_tables(capacity, {"kind": "reaper"}),
        {"alpha": 0.9, "omega": 0.8, "eta": {"default": 0.2, "end": 0.8}},
    ),
}
CAPACITY = 20


def twins(make_sampler, ndim):
    """Two equal buffers of transitions of 2 environments, on the CPU and on the emulated device."""
    buffers = []
    for device in ("cpu", "emulated"):
        sampler = make_sampler(CAPACITY)
        writer = EventTableWriter(sampler.tables) if isinstance(sampler, EventTableSampler) else None
        storage = CompilableTensorStorage(CAPACITY, ndim=ndim, device=device)
        buffers.append(CompilableReplayBuffer(storage=storage, sampler=sampler, writer=writer, batch_size=CAPACITY))
    return buffers


def write(buffers, data):
    """Write the same data to both; on the device, once from the CPU and once from the device."""
    half = data.shape[-1] // 2
    for piece, place in ((data[..., :half], "cpu"), (data[..., half:], "emulated")):
        buffers[0].extend(piece.clone())
        buffers[1].extend(piece.clone().to(place))


def assert_twins(buffers):
    on_cpu, on_device = buffers
    assert len(on_cpu) == len(on_device)
    found = on_device.sampler.probabilities(on_device.storage)
    assert found.device.type == "emulated"
    torch.testing.assert_close(found.cpu(), on_cpu.sampler.probabilities(on_cpu.storage), rtol=1e-5, atol=1e-9)
    expected = on_cpu.sampler.stats()
    for key, value in on_device.sampler.stats().items():
        assert value.device.type == "emulated"
        torch.testing.assert_close(value.cpu(), expected[key], rtol=1e-4, atol=1e-6, equal_nan=True, msg=key)
    on_device.sampler.check_valid()


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("name", SETTERS)
def test_a_buffer_on_an_accelerator_equals_one_on_the_cpu(name, ndim, device, tmp_path):
    make_sampler, setters = SETTERS[name]
    experience = Flat() if ndim == 1 else TwoColumns()
    buffers = twins(make_sampler, ndim)
    write(buffers, experience.take(16))
    assert_twins(buffers)
    if buffers[1].sampler.takes_priorities:
        # the ranks of new transitions are not the same on both devices
        count = 16 if name == "rank" else 8
        index = torch.arange(count)
        index = index if ndim == 1 else torch.stack([index // 2, index % 2], -1)
        for buffer, place in zip(buffers, ("cpu", "emulated"), strict=True):
            buffer.update_priority(index.to(place), torch.linspace(0.5, 3, count).to(place))
        assert_twins(buffers)
        drawn = buffers[1].sample()
        # these TD errors come after all rows of the batch were overwritten
        write(buffers, experience.take(CAPACITY))
        drawn["td_error"] = torch.full((CAPACITY,), 9.0, device="emulated")
        buffers[1].update_tensordict_priority(drawn)
        assert int(buffers[1].sampler.stats()["dropped_updates"]) == CAPACITY
        buffers[1].sampler.load_state_dict(buffers[0].sampler.state_dict())
    for key, value in setters.items():
        for buffer in buffers:
            setattr(buffer.sampler, key, value)
    assert_twins(buffers)
    if "tables" in name:
        for buffer in buffers:
            buffer.sampler.tables["end"].capacity = 2
        assert_twins(buffers)
    buffers[1].dumps(tmp_path)
    loaded, buffers[1] = buffers[1], twins(make_sampler, ndim)[1]
    buffers[1].loads(tmp_path)
    assert_twins(buffers)
    assert_twins([buffers[0], loaded])
    for buffer in buffers:
        buffer.empty()
        assert not len(buffer)
    write(buffers, experience.take(8))
    assert_twins(buffers)


@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_frames_on_an_accelerator_are_the_frames_that_were_written(place, device):
    streams = StackedStreams(2, depth=3)
    frames = FrameStackStorage(24, frame_capacity=120, device="emulated")
    buffer = CompilableReplayBuffer(storage=frames, sampler=ProportionalSampler(24), batch_size=8)
    whole = CompilableTensorStorage(24)
    reference = CompilableReplayBuffer(storage=whole, batch_size=8)
    for _ in range(4):
        data = streams.chunk("interleaved", 10)
        buffer.extend(data.clone().to(place))
        reference.extend(data.clone())
    saved = FrameStackStorage(24, frame_capacity=120, device="emulated")
    saved.load_state_dict(frames.state_dict())
    batch = buffer.sample()
    for stored, index in ((frames, torch.arange(24)), (saved, torch.arange(24)), (frames, batch["index"].cpu())):
        for key in ("observation", ("next", "observation")):
            found = stored.get(index.to("emulated"))[key]
            assert found.device.type == "emulated"
            assert torch.equal(found.cpu(), whole.get(index)[key])


@pytest.mark.parametrize("granularity", ["batch", "transition"])
def test_the_actors_batch_is_chosen_on_an_accelerator(granularity, device):
    policy = linear_policy(observation=3).to("emulated")
    sampler = DecoupledSampler(ProportionalSampler(40), policy, num_candidates=4, granularity=granularity)
    storage = CompilableTensorStorage(40, device="emulated")
    buffer = CompilableReplayBuffer(storage=storage, sampler=sampler, batch_size=8)
    data = Flat().take(40)
    with torch.no_grad():
        data["observation"] = data.pop("obs").div(40)
        data["action"] = policy.cpu()(data.select("observation"))["action"] + 3.0
        policy.to("emulated")
        # the policy of the first transitions is the present one
        data["action"][:10] -= 3.0
    buffer.extend(data)
    actor = sampler.actor_buffer(buffer)
    numbers = torch.cat([actor.sample()["number"] for _ in range(20)]).cpu()
    drawn = torch.cat([buffer.sample()["number"] for _ in range(20)]).cpu()
    assert (numbers < 10).float().mean() > (drawn < 10).float().mean()
    assert actor.sample()["observation"].device.type == "emulated"


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": ProportionalSampler},
        {"sampler": ReaPERSampler},
        {"sampler": ProportionalSampler, "sample_unit": Sequence(length=4)},
        {
            "sampler": lambda capacity: TrajectoryRetraceSampler(
                capacity, slice_len=4, behaviour_keys=(), anchors=ProportionalSampler(capacity)
            )
        },
    ],
    ids=["per", "reaper", "sequences", "slices"],
)
@pytest.mark.parametrize(("stored_on", "moved_to"), [("cpu", "emulated"), ("emulated", "cpu")])
def test_a_batch_may_be_moved_before_its_update(arguments, stored_on, moved_to, device):
    arguments = {**arguments, "sampler": arguments["sampler"](100)}
    storage = CompilableTensorStorage(100, device=stored_on)
    buffer = CompilableReplayBuffer(storage=storage, batch_size=8, priority_key="td_error", **arguments)
    done = (torch.arange(50) % 10 == 9).unsqueeze(1)
    data = TensorDict({"x": torch.randn(50, 3), "next": {"done": done, "terminated": done}}, [50])
    buffer.extend(data.to(stored_on))
    # newer than the batch, which is not overwritten
    batch = buffer.sample().to(moved_to)
    buffer.extend(data.to(stored_on))
    batch["td_error"] = torch.full(batch.shape, 9.0, device=moved_to)
    buffer.update_tensordict_priority(batch)
    stats = buffer.sampler.stats().cpu()
    assert stats["dropped_updates"] == stats["rejected_updates"] == 0
    assert stats["never_updated"] < 1


@pytest.mark.parametrize("ndim", [1, 2])
def test_the_newest_slices_on_an_accelerator(ndim, device):
    buffers = twins(
        lambda capacity: TrajectoryRetraceSampler(
            capacity, slice_len=4, num_streams=2 - (ndim == 2), behaviour_keys=()
        ),
        ndim,
    )
    experience = TwoStreams() if ndim == 1 else TwoColumns()
    for _ in range(4):
        write(buffers, experience.take(8))
        on_cpu, on_device = (buffer.sampler.newest(buffer) for buffer in buffers)
        assert on_device["number"].device.type == "emulated"
        assert torch.equal(on_device["number"].cpu(), on_cpu["number"])
        assert torch.equal(on_device["next", "done"].cpu(), on_cpu["next", "done"])
