"""How many kernels eager code launches on an accelerator, and how often the host waits, both on an emulated device."""

import pytest
import torch

from tests.data import buffer_with, random_rows
from tests.emulated_device import EmulatedDevice, EmulatedTensor
from torchrl_replay_ext import (
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.kernels import ops

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

SIZE, BATCH, CHUNK, COLUMNS = 240, 32, 8, 10


@pytest.fixture
def device(monkeypatch):
    """An emulated device that counts what the versions for CUDA of kernels launch, and runs the loops."""
    device, call = EmulatedDevice("torchrl_replay_ext"), ops.Kernel.__call__

    def copied(each):
        return EmulatedTensor(each.values.clone()) if isinstance(each, EmulatedTensor) else each

    def count_and_call(kernel, *arguments):
        if isinstance(arguments[0], EmulatedTensor):
            kernel._on_cuda(*map(copied, arguments))
        operations = device.operations.copy()
        call(kernel, *arguments)
        device.operations = operations

    def count(kernel, *_, **__):
        device.operations[kernel.fn.__name__] += 1

    monkeypatch.setattr(ops.Kernel, "__call__", count_and_call)
    monkeypatch.setattr(JITFunction, "run", count)
    with device:
        yield device


def tables():
    lists = EventTables([EventSpec("end", ("next", "done"), 5)], capacity={"end": 60})
    settings = {"min_size": 1, "priority": {"kind": "proportional"}}
    sampler = EventTableSampler(lists, eta={"default": 0.5, "end": 0.5}, **settings)
    return {"sampler": sampler, "writer": EventTableWriter(lists)}


# The waits and the launches of a write of 8 rows, and the launches of a sample of 32 rows and of its update. A copy of
# each of 10 columns is part of a write. A sample copies 9: the index of the drawn rows is known.
LAUNCHES = {
    "proportional": (lambda: {"sampler": ProportionalSampler()}, 0, 18, 12, 2),
    "rank": (lambda: {"sampler": RankBasedSampler()}, 0, 18, 39, 2),
    "reaper": (lambda: {"sampler": ReaPERSampler()}, 1, 22, 12, 3),
    "recency": (lambda: {"sampler": RecencySampler()}, 1, 22, 42, 0),
    "slices": (lambda: {"sampler": TrajectoryRetraceSampler(slice_len=4)}, 1, 24, 24, 1),
    "event tables": (tables, 1, 21, 40, 3),
}


def launched(device, function, *arguments):
    """The result, and how many kernels were launched."""
    device.reset()
    return function(*arguments), sum(device.operations.values())


@pytest.mark.parametrize("name", LAUNCHES)
def test_eager_calls_launch_few_kernels_and_at_most_a_write_waits_once(name, device):
    make, *most = LAUNCHES[name]
    parts = make()
    buffer = buffer_with(parts.pop("sampler"), SIZE, compilable=True, device="emulated", batch_size=BATCH, **parts)
    for first in range(0, SIZE + 60, 60):
        buffer.extend(random_rows(60, first=first).to("emulated"))
    data = random_rows(CHUNK).to("emulated")
    assert len(list(buffer.storage[:1].keys(True, True))) == COLUMNS
    _, write = launched(device, buffer.extend, data)
    waits = sum(device.waits.values())
    buffer.sample()
    batch, sample = launched(device, buffer.sample)
    assert not device.waits
    batch["td_error"] = torch.rand(BATCH, device="emulated")
    _, update = launched(device, buffer.update_tensordict_priority, batch)
    assert not device.waits
    assert [waits, write, sample, update] == most


@pytest.mark.parametrize("make", [make for make, *_ in LAUNCHES.values()], ids=LAUNCHES)
def test_running_sums_are_of_integers_which_do_not_depend_on_the_order(make, device, monkeypatch):
    """torch.use_deterministic_algorithms(True): CUDA then refuses running sums of floating-point numbers."""
    run = device.run

    def refuse(function, args, kwargs):
        result = run(function, args, kwargs)
        assert function.overloadpacket is not torch.ops.aten.cumsum or not result.is_floating_point()
        return result

    monkeypatch.setattr(device, "run", refuse)
    parts = make()
    buffer = buffer_with(parts.pop("sampler"), SIZE, compilable=True, device="emulated", batch_size=BATCH, **parts)
    buffer.extend(random_rows(60).to("emulated"))
    batch = buffer.sample()
    batch["td_error"] = torch.rand(BATCH, device="emulated")
    buffer.update_tensordict_priority(batch)


@pytest.mark.parametrize("make", [make for make, *_ in LAUNCHES.values()], ids=LAUNCHES)
def test_columns_from_the_cpu_are_sent_without_waiting(make, device):
    parts = make()
    buffer = buffer_with(parts.pop("sampler"), SIZE, compilable=True, device="emulated", batch_size=BATCH, **parts)
    buffer.extend(random_rows(60))
    device.reset()
    buffer.extend(random_rows(CHUNK))
    assert not any("_torchrl.py" in place for _, place in device.waits)
