"""Random numbers on the device of a buffer's state, from a generator of another device."""

import pytest
import torch

from torchrl_replay_ext.compilation import generator_on, uniform


def test_a_generator_gives_the_seed_of_one_on_the_device():
    source = torch.Generator().manual_seed(7)
    first, second = (generator_on(torch.device("cpu"), source) for _ in range(2))
    assert first.initial_seed() != second.initial_seed()
    source.manual_seed(7)
    again = generator_on(torch.device("cpu"), source)
    assert again is not source and torch.equal(torch.rand(9, generator=again), torch.rand(9, generator=first))


def test_its_state_decides_what_is_drawn_next():
    source = torch.Generator().manual_seed(7)
    state = source.get_state()
    first = generator_on(torch.device("cpu"), source).initial_seed()
    source.set_state(state)
    assert generator_on(torch.device("cpu"), source).initial_seed() == first


class Elsewhere(torch.Generator):
    """A generator on another device than the numbers."""

    device = torch.device("meta")  # pyright: ignore


def test_numbers_on_another_device_are_drawn_by_a_generator_made_for_it(monkeypatch):
    made = []

    def generator_of_the_device(device, source):
        made.append((device, source))
        return torch.Generator(device).manual_seed(3)

    monkeypatch.setattr("torchrl_replay_ext.compilation.generator_on", generator_of_the_device)
    own = torch.Generator().manual_seed(3)
    here = uniform(5, device=torch.device("cpu"), generator=own)
    assert not made
    source = Elsewhere()
    assert torch.equal(uniform(5, device=torch.device("cpu"), generator=source), here)
    assert made == [(torch.device("cpu"), source)]


@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 1000])
def test_draws_on_a_device_repeat_with_a_generator_of_the_cpu(size):
    device, source = torch.device("cuda"), torch.Generator()
    first = uniform(size, device=device, generator=source.manual_seed(1))
    second = uniform(size, device=device, generator=source)
    assert first.device.type == "cuda" and not torch.equal(first, second)
    assert torch.equal(uniform(size, device=device, generator=source.manual_seed(1)), first)
