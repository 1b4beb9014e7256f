"""Buffers do not depend on torch's global settings: inference mode, the default dtype and the default device."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests import data
from tests.data import buffer_with, learn, random_rows
from tests.emulated_device import EmulatedDevice
from tests.params import both_buffers
from tests.stacks import numbered_stacks
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    DecoupledSampler,
    FrameStackStorage,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)

CAPACITY, BATCH = 40, 8
POLICY = data.linear_policy(3, 2)
SAMPLERS = {
    **data.SAMPLERS,
    "decoupled": lambda capacity: DecoupledSampler(ProportionalSampler(capacity), POLICY),
    "annealed": lambda capacity: ProportionalSampler(
        capacity, alpha=Anneal(0.5, 0.6, 3), beta=Anneal(0.4, 1.0, 3), max_priority_within_buffer=True
    ),
    "piecewise ranks": lambda capacity: RankBasedSampler(capacity, segments="piecewise"),
    "slices, reaper": lambda capacity: TrajectoryRetraceSampler(capacity, slice_len=4, anchors=ReaPERSampler(capacity)),
    "tables, conditional": lambda capacity: data.event_sampler(
        capacity, "event", correction="conditional", pair_keys=("number", "action")
    ),
    "frames": ProportionalSampler,
}
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def made(name, compilable):
    sampler = SAMPLERS[name](CAPACITY)
    if name == "frames":
        return CompilableReplayBuffer(storage=FrameStackStorage(CAPACITY), sampler=sampler, batch_size=BATCH)
    return buffer_with(sampler, CAPACITY, compilable=compilable, batch_size=BATCH)


def life(name, compilable, settings):
    """All batches of a short life of a buffer, and its state at the end.

    Args:
        name: name of the sampler.
        compilable: our buffer, or TorchRL's.
        settings: makes a context for each call of the buffer.
    """
    torch.manual_seed(0)
    make = numbered_stacks if name == "frames" else random_rows
    written = [make(20, first=first).to("cpu") for first in (0, 20, 40)]
    errors = torch.rand(10, BATCH) + 0.1
    rb, batches = None, []

    def call(method, *arguments):
        with settings():
            return getattr(rb, method)(*arguments)

    with settings():
        rb = made(name, compilable)
    for rows in written:
        call("extend", rows)
        for _ in range(2):
            batches.append(call("sample"))
            batches[-1]["td_error"] = errors[len(batches)]
            call("update_tensordict_priority", batches[-1])
    if name != "uniform":
        call("update_priority", torch.arange(4, device="cpu"), errors[0, :4])
    state = call("state_dict")
    call("load_state_dict", state)
    batches.append(call("sample"))
    call("empty")
    call("extend", written[0])
    batches.append(call("sample"))
    if stats := getattr(rb.sampler, "stats", None):
        with settings():
            batches.append(stats())
    return [batch.to_dict() for batch in batches], rb.sampler.state_dict()


def assert_same(found, expected):
    """Also dtypes and devices; ``expected`` lies on the CPU."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)


def alternating(first):
    """Every other context is inference mode."""
    inside = [not first]

    def settings():
        inside[0] = not inside[0]
        return torch.inference_mode() if inside[0] else nullcontext()

    return settings


@every_sampler
@pytest.mark.parametrize("first", [True, False], ids=["made in inference mode", "made outside"])
def test_buffers_are_used_inside_and_outside_of_inference_mode(name, first):
    found = life(name, True, alternating(first))
    assert_same(found, life(name, True, nullcontext))
    assert not any(tensor.is_inference() for tensor in tree_leaves(found[1]))


@every_sampler
def test_rows_of_inference_mode_are_drawn_and_updated_outside_of_it(name):
    """TorchRL's storage keeps the mode of its first write: later writes are in inference mode too."""
    if name == "frames":
        pytest.skip("a storage for our buffer")
    rb = made(name, compilable=False)
    for first in (0, 20, 40):
        with torch.inference_mode():
            rb.extend(random_rows(20, first=first))
        learn(rb)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@both_buffers
@every_sampler
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_draws_and_states_do_not_depend_on_the_default_dtype(name, compilable, dtype):
    if name == "uniform" and not compilable:
        pytest.skip("a sampler of TorchRL in a buffer of TorchRL")
    assert_same(life(name, compilable, lambda: default_dtype(dtype)), life(name, compilable, nullcontext))


@both_buffers
@every_sampler
def test_a_buffer_on_the_cpu_stays_there_whatever_the_default_device_is(name, compilable):
    if name == "uniform" and not compilable:
        pytest.skip("a sampler of TorchRL in a buffer of TorchRL")
    expected = life(name, compilable, nullcontext)
    with EmulatedDevice("torchrl_replay_ext", "torchrl") as device:
        found = life(name, compilable, lambda: torch.device("emulated"))
    assert_same(found, expected)
    if compilable:
        # TorchRL's buffer moves TD errors to the default device
        assert not [wait for wait in device.waits if "torchrl_replay_ext" in wait[1]]


def test_td_errors_as_numbers_keep_their_precision():
    rb = made("proportional", compilable=True)
    rb.extend(random_rows(4))
    with default_dtype(torch.bfloat16):
        rb.update_priority([0, 1, 2, 3], [1e-3, 1.001, 1.002, 1e6])
    found = rb.sampler.state_dict()["priority"][:4]
    torch.testing.assert_close(found, torch.tensor([1e-3, 1.001, 1.002, 1e6]).sqrt() + 1e-6)
