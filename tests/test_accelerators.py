"""Buffers on an accelerator, which is emulated: see ``emulated_device.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.emulated_device import DeviceMismatchError, EmulatedDevice
from tests.operations import CASES, Driven
from tests.recipes.emulated_runs import RUNS
from torchrl_replay_ext import CompilableTensorStorage
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


GRADIENTS = """
import torch
from tests.emulated_device import EmulatedDevice

with EmulatedDevice():
    ours = torch.nn.Linear(3, 2).to("emulated")
    ours(torch.ones(5, 3, device="emulated")).square().sum().backward()
    assert ours.weight.grad.device.type == "emulated"
    expected = torch.nn.Linear(3, 2)
    expected.load_state_dict({key: value.cpu() for key, value in ours.state_dict().items()})
    expected(torch.ones(5, 3)).square().sum().backward()
    torch.testing.assert_close(ours.weight.grad.cpu(), expected.weight.grad)
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


@pytest.mark.parametrize("name", CASES)
def test_random_operations_never_mix_devices(name, device):
    """Data comes from the device or from the CPU; see ``operations.py`` for what happens to the buffer."""
    for seed in (0, 3):
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
