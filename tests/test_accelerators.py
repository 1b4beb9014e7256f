"""Buffers on an accelerator, which is emulated: see ``emulated_device.py``."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Sequence

from tests.data import SAMPLERS, buffer_with, linear_policy, random_rows
from tests.emulated_device import DeviceMismatchError, EmulatedDevice
from tests.operations import CASES, Driven
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from torchrl_replay_ext import (
    AdamStep,
    CompilableTensorStorage,
    DecoupledSampler,
    ProportionalSampler,
    validate_on_accelerators,
)
from torchrl_replay_ext.compilation import uniform

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
    ours, few = torch.arange(4, device="emulated"), torch.arange(2, device="emulated")
    for wait, kind in [
        (lambda: bool(ours.any()), "item"),
        (ours.tolist, "tolist"),
        (ours.cpu, "copy to the CPU"),
        (ours.nonzero, "nonzero"),
        (lambda: ours[ours > 1], "mask as index"),
        (lambda: torch.arange(4).to("emulated"), "copy to the device"),
        (lambda: ours.__setitem__(few, 5), "number to the device"),
    ]:
        device.reset()
        wait()
        ((found, place),) = device.waits
        assert found == kind
        assert place.startswith("tests/test_accelerators.py:")
    device.reset()
    _ = ours[few] + 1, torch.arange(4).to("emulated", non_blocking=True)
    ours[ours > 1] = 5
    assert not device.waits


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
    "name",
    slow_but(
        ("decoupled", "rank", "of one's own", "slices, reaper", "tables, proportional, pinned", "frames, slices, rank"),
        CASES,
    ),
)
def test_random_operations_never_mix_devices(name, device):
    """Data comes from the device or from the CPU; see ``operations.py`` for what happens to the buffer."""
    for seed in (0, 3):
        validate_on_accelerators(seed == 0)
        used = Driven(name, seed, device="emulated")
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


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_a_device_without_kernels_is_refused_before_anything_is_made(name, monkeypatch):
    monkeypatch.setattr("torchrl_replay_ext._torchrl.shape_and_device", lambda storage: ((10,), torch.device(name)))
    buffer = buffer_with(ProportionalSampler(), 10)
    with pytest.raises(ValueError, match=rf"ProportionalSampler: the storage is on {name}.*device='cpu'"):
        buffer.extend(random_rows(4))


def test_without_triton_an_error_names_it():
    code = """
import sys
sys.modules["triton"] = None
try:
    import torchrl_replay_ext.kernels.cuda.launch
except ImportError as error:
    assert "needs triton" in str(error) and "device='cpu'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("granularity", ["batch", "group"])
def test_the_actors_batch_is_chosen_on_an_accelerator(granularity, device):
    policy = linear_policy(observation=3).to("emulated")
    arguments = {"num_candidates": 4, "granularity": granularity, "group_size": 2}
    sampler = DecoupledSampler(ProportionalSampler(40), policy, **arguments)
    buffer = buffer_with(sampler, 40, compilable=True, device="emulated", batch_size=8)
    data = random_rows(40)
    with torch.no_grad():
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
    ("name", "unit"),
    [("proportional", None), ("reaper", None), ("proportional", Sequence(length=4)), ("slices, proportional", None)],
)
@pytest.mark.parametrize(("stored_on", "moved_to"), [("cpu", "emulated"), ("emulated", "cpu")])
def test_a_batch_may_be_moved_before_its_update(name, unit, stored_on, moved_to, device):
    buffer = buffer_with(SAMPLERS[name](100), 100, compilable=True, device=stored_on, batch_size=8, sample_unit=unit)
    data = random_rows(50)
    buffer.extend(data.to(stored_on))
    # newer than the batch, which is not overwritten
    batch = buffer.sample().to(moved_to)
    buffer.extend(data.to(stored_on))
    batch["td_error"] = torch.full(batch.shape, 9.0, device=moved_to)
    buffer.update_tensordict_priority(batch)
    stats = buffer.sampler.stats().cpu()
    assert stats["dropped_updates"] == stats["rejected_updates"] == 0
    assert stats["never_updated"] < 1


@pytest.mark.parametrize("name", ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("size", [1, 1000])
def test_draws_on_a_device_repeat_with_a_generator_of_the_cpu(size, name):
    with EmulatedDevice() if name == "emulated" else nullcontext():
        device, source = torch.device(name), torch.Generator()
        first = uniform(size, device=device, generator=source.manual_seed(1))
        state = source.get_state()
        second = uniform(size, device=device, generator=source)
        assert first.device.type == name and not torch.equal(first, second)
        assert torch.equal(uniform(size, device=device, generator=source.manual_seed(1)), first)
        source.set_state(state)
        assert torch.equal(uniform(size, device=device, generator=source), second)
