"""Random numbers on the device of a buffer's state, from a generator of another device."""

from contextlib import nullcontext

import pytest
import torch

from tests.emulated_device import EmulatedDevice
from torchrl_replay_ext.compilation import uniform


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
