"""Anneal and the hyperparameters that follow it: values, limits, errors and saved states."""

import dataclasses

import numpy as np
import pytest
import torch

from torchrl_replay_ext import Anneal
from torchrl_replay_ext.annealing import Hyperparameter


def beta(value, **limits):
    return Hyperparameter("SomeSampler", "beta", value, **limits)


def test_anneal_holds_numbers():
    """A graph cannot read tensors."""
    schedule = Anneal(torch.tensor(0.25), torch.tensor([1.0]), torch.tensor(10))
    assert [type(value) for value in dataclasses.astuple(schedule)] == [float, float, int]
    assert schedule == Anneal(0.25, 1.0, 10.0)


def test_set_restarts():
    hyperparameter = beta(Anneal(0.0, 1.0, 2))
    hyperparameter.step()
    hyperparameter.set(Anneal(1.0, 3.0, 2))
    assert hyperparameter.value == 1.0
    hyperparameter.step()
    assert hyperparameter.value == 2.0
    hyperparameter.set(5.0)
    hyperparameter.step()
    assert hyperparameter.value == 5.0


@pytest.mark.parametrize(
    ("value", "limit"), [(1.0000000015, 1.0), (1 + 2**-23, 1.0), (torch.tensor(-3e-8), 0.0), (np.float32(-1e-7), 0.0)]
)
def test_a_limit_that_is_exceeded_by_rounding_is_the_limit(value, limit):
    assert beta(value, high=1.0).value == limit
    schedule = beta(Anneal(0.5, value, 2), high=1.0)
    for _ in range(3):
        schedule.step()
    assert schedule.value == limit


def test_a_schedule_ends_at_its_end():
    schedule = beta(Anneal(1.0, 0.3, 3))
    for _ in range(3):
        schedule.step()
    assert schedule.value == 0.3


@pytest.mark.parametrize("value", [-1.0, Anneal(0.5, 9.0, 3)])
def test_a_refused_value_changes_nothing(value):
    hyperparameter = beta(Anneal(0.0, 1.0, 4), high=1.0)
    hyperparameter.step()
    state = hyperparameter.state()
    with pytest.raises(ValueError, match="beta"):
        hyperparameter.set(value)
    assert torch.equal(hyperparameter.state(), state)
    hyperparameter.step()
    assert hyperparameter.value == 0.5


@pytest.mark.parametrize("steps", [0, 1, 3, 9])
def test_state_round_trips(steps):
    """A restored schedule continues like the original, whatever its state before."""
    original, restored = beta(Anneal(0.1, 0.9, 5)), beta(Anneal(0.5, 0.0, 77))
    for _ in range(steps):
        original.step()
    restored.step()
    state = original.state()
    assert state.dtype == torch.float64
    restored.load(state.clone())
    for _ in range(8):
        assert restored.value == original.value
        assert torch.equal(restored.state(), original.state())
        original.step()
        restored.step()


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_a_saved_value_out_of_range_is_refused(value):
    hyperparameter = beta(Anneal(0.0, 0.5, 4))
    with pytest.raises(ValueError, match=r"beta"):
        hyperparameter.load(torch.tensor([value, 1.0, 0.0, 0.5, 4.0], dtype=torch.float64))
    assert hyperparameter.state().tolist() == [0.0, 0.0, 0.0, 0.5, 4.0]
