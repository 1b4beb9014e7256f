"""Checks of the constructor arguments, for all samplers."""

import inspect

import pytest
import torch

from torchrl_replay_ext import (
    Anneal,
    DecoupledSampler,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    TrajectoryRetraceSampler,
)

SAMPLERS = [ProportionalSampler, RankBasedSampler, ReaPERSampler]


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("name", "value"), [("alpha", "0.7"), ("beta", [0.4]), ("alpha", True), ("beta", None)])
def test_what_is_not_a_number_is_a_type_error_that_names_it(sampler, name, value):
    with pytest.raises(TypeError, match=rf"{sampler.__name__}\({name}=.*\): {name} must be a number, not "):
        sampler(8, **{name: value})
    made = sampler(8)
    before = getattr(made, name)
    with pytest.raises(TypeError, match=f"{name} must be a number"):
        setattr(made, name, value)
    assert getattr(made, name) == before


NAN = float("nan")


@pytest.mark.parametrize(
    ("sampler", "name", "value"),
    [
        *((sampler, name, value) for sampler in SAMPLERS for name in ("alpha", "beta") for value in (-0.1, NAN)),
        *((sampler, "weight_norm", "maximum") for sampler in SAMPLERS),
        *((sampler, "td_error", value) for sampler in SAMPLERS for value in ("sqared", None, 2)),
        (ProportionalSampler, "alpha", float("inf")),
        (ProportionalSampler, "alpha", Anneal(-0.1, 1.0, 10)),
        (ProportionalSampler, "min_priority", -1.0),
        (RankBasedSampler, "beta", 1.5),
        (RankBasedSampler, "segments", "linear"),
        (ReaPERSampler, "omega", -0.1),
        (ReaPERSampler, "truncated", "terminated"),
        (ReaPERSampler, "num_streams", 0),
        *((sampler, "eps", value) for sampler in (ProportionalSampler, ReaPERSampler) for value in (-1e-6, NAN)),
        *((sampler, "capacity", value) for sampler in SAMPLERS for value in (0, -1)),
    ],
)
def test_values_out_of_range_are_named_by_constructor_and_assignment(sampler, name, value):
    with pytest.raises(ValueError, match=name):
        sampler(**{"capacity": 8, name: value})
    if name in ("alpha", "beta", "omega"):
        made = sampler(8)
        before = getattr(made, name)
        with pytest.raises(ValueError, match=name):
            setattr(made, name, value)
        assert getattr(made, name) == before


def test_numbers_of_any_kind_are_taken():
    for value in (torch.tensor(0.5), torch.tensor([0.5]).numpy()[0], 0.5):
        assert ProportionalSampler(8, alpha=value, eps=value).alpha == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Anneal("0.4", 1.0, 10), r"Anneal\(start='0.4'\): start must be a number"),
        (lambda: ProportionalSampler(8, eps="0"), r"ProportionalSampler\(eps='0'\): eps must be a number"),
        (lambda: ProportionalSampler(8, min_priority="1"), r"\(min_priority='1'\): min_priority must be a number"),
        (lambda: ProportionalSampler(8, stratified="no"), r"stratified='no'\): stratified must be True or False"),
        (lambda: ReaPERSampler(8, omega="1"), r"ReaPERSampler\(omega='1'\): omega must be a number"),
        (
            lambda: ReaPERSampler(8, max_priority_within_buffer=1),
            r"max_priority_within_buffer=1\): max_priority_within_buffer must be True or False",
        ),
        (lambda: TrajectoryRetraceSampler(8, slice_len=2, pad="yes"), r"pad='yes'\): pad must be True or False"),
    ],
)
def test_other_wrong_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "public",
    [*SAMPLERS, DecoupledSampler, EventTableSampler, TrajectoryRetraceSampler, EventTableWriter],
)
def test_signatures_show_the_arguments(public):
    shown = inspect.signature(public).parameters
    given = list(inspect.signature(public.__init__).parameters.values())[1:]
    assert list(shown.values()) == given and len(given) > 3


def test_the_signature_of_a_subclass_is_its_own():
    class Mine(ReaPERSampler):
        def __init__(self, size: int):
            super().__init__(size)

    assert str(inspect.signature(Mine)) == "(size: int)"
    assert list(inspect.signature(ReaPERSampler).parameters)[:3] == ["capacity", "alpha", "omega"]
