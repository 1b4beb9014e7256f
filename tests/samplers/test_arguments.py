"""Constructor arguments of all samplers: errors, signatures and representations."""

import inspect
from functools import partial

import pytest
import torch
from torchrl.data.replay_buffers import RandomSampler

from tests.data import event_sampler, linear_policy
from tests.samplers.event_tables import ETA, tables_of
from tests.samplers.event_tables import sampler_of as tables
from torchrl_replay_ext import (
    Anneal,
    DecoupledSampler,
    Episodes,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)

SAMPLERS = [ProportionalSampler, RankBasedSampler, ReaPERSampler]


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
        *((sampler, "eps", value) for sampler in (ProportionalSampler, ReaPERSampler) for value in (-1e-6, NAN)),
        *((sampler, "capacity", value) for sampler in SAMPLERS for value in (0, -1)),
        *((sampler, "alpha", value) for sampler in SAMPLERS for value in ("0.7", True)),
        *((sampler, "beta", value) for sampler in SAMPLERS for value in ([0.4], None)),
    ],
)
def test_wrong_values_are_named_by_constructor_and_assignment(sampler, name, value):
    message = rf"{sampler.__name__}\({name}=.*\): {name} must be "
    refuses = partial(pytest.raises, (TypeError, ValueError), match=message)
    with refuses():
        sampler(**{"capacity": 8, name: value})
    if name in ("alpha", "beta", "omega"):
        made = sampler(8)
        before = getattr(made, name)
        with refuses():
            setattr(made, name, value)
        assert getattr(made, name) == before


def test_numbers_of_any_kind_are_taken():
    for value in (torch.tensor(0.5), torch.tensor([0.5]).numpy()[0], 0.5):
        assert ProportionalSampler(8, alpha=value, eps=value).alpha == 0.5


slices = partial(TrajectoryRetraceSampler, capacity=5, slice_len=2)
unpadded, whole = partial(slices, pad=False), partial(slices, starts="episode")
decoupled = partial(DecoupledSampler, critic_sampler=RandomSampler(), policy=linear_policy(3, 2))
mixture, conditional = partial(tables, correction="mixture"), partial(tables, correction="conditional")
pinned = partial(tables, tables_of("pinned"))


def annealed(default, a, b=0.3):
    return {"default": Anneal(*default), "a": Anneal(*a), "b": b}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (Anneal, {"start": "0.4", "end": 1.0, "num_updates": 10}, TypeError, r"Anneal\(start='0.4'\): start must be a"),
        (ProportionalSampler, {"eps": "0"}, TypeError, r"ProportionalSampler\(eps='0'\): eps must be a number"),
        (ProportionalSampler, {"min_priority": "1"}, TypeError, r"\(min_priority='1'\): min_priority must be a number"),
        (ProportionalSampler, {"stratified": "no"}, TypeError, r"stratified='no'\): stratified must be True or False"),
        (ReaPERSampler, {"omega": "1"}, TypeError, r"ReaPERSampler\(omega='1'\): omega must be a number"),
        (ReaPERSampler, {"max_priority_within_buffer": 1}, TypeError, r"=1\): max_priority_within_buffer must be True"),
        (RecencySampler, {"half_life": 0}, ValueError, r"Sampler\(half_life=0\): half_life must be > 0; use math.inf"),
        (RecencySampler, {"half_life": NAN}, ValueError, "half_life must be > 0"),
        (RecencySampler, {"half_life": Anneal(1, 2, 3)}, TypeError, "half_life must be a number, not Anneal"),
        (RecencySampler, {"beta": 1.5}, ValueError, r"beta must be in \[0, 1\]"),
        (RecencySampler, {"beta": Anneal(0.4, 1.0, 10)}, TypeError, "beta must be a number, not Anneal"),
        (RecencySampler, {"capacity": 0}, ValueError, "capacity must be an integer >= 1"),
        (slices, {"capacity": 0}, ValueError, r"capacity=0\): capacity must be an integer >= 1"),
        (slices, {"slice_len": 0}, ValueError, "slice_len must be an integer >= 1"),
        (Episodes, {"num_streams": 0}, ValueError, r"Episodes\(num_streams=0\): num_streams must be an integer >= 1"),
        (Episodes, {"num_streams": 2, "traj_key": None}, ValueError, "pass the name of their entry as traj_key="),
        (ReaPERSampler, {"episodes": 3}, TypeError, "episodes must be an Episodes object"),
        (slices, {"episodes": Episodes}, TypeError, "episodes must be an Episodes object"),
        (slices, {"episodes": Episodes(done_key="terminated")}, ValueError, r"use \('next', 'done'\)"),
        (slices, {"pad": "yes"}, TypeError, r"pad='yes'\): pad must be True or False"),
        (slices, {"starts": "first"}, ValueError, "starts must be 'any' or 'episode'"),
        (slices, {"anchors": RandomSampler()}, ValueError, "anchors must be 'uniform' or a prioritized sampler"),
        (slices, {"anchors": event_sampler(6, default=14)}, ValueError, "retention='ring'"),
        (unpadded, {"anchors": ProportionalSampler(5)}, ValueError, "pad=False.*use pad=True, or anchors='uniform'"),
        (whole, {"anchors": ReaPERSampler(5)}, ValueError, "starts='episode', anchors=ReaPER.*use .*anchors='uniform'"),
        (decoupled, {"critic_sampler": "per"}, TypeError, "critic_sampler must be a Sampler"),
        (decoupled, {"policy": lambda data: data}, ValueError, "must be a TensorDictModule"),
        (decoupled, {"num_candidates": 0}, ValueError, "num_candidates must be an integer >= 1"),
        (decoupled, {"granularity": "row"}, ValueError, "granularity must be 'batch' or 'group'"),
        (decoupled, {"noise_scale": torch.eye(2)}, ValueError, r"must be a number or standard deviations \[A\]"),
        (decoupled, {"eps": -1.0}, ValueError, "eps must be >= 0"),
        (decoupled, {"action_key": "act"}, ValueError, "it must write 'act'"),
        (decoupled, {"action_key": None}, TypeError, "action_key must be the name of an entry"),
        *((decoupled, {"noise_scale": value}, TypeError, "noise_scale must be") for value in ("0.1", True, None)),
        (tables, {"tables": {"a": 3}}, TypeError, "tables must be EventTables"),
        (tables, {"eta": 0.5}, TypeError, "eta must be a dict"),
        (tables, {"eta": {**ETA, "a": "0.2"}}, TypeError, "every eta must be a number or Anneal"),
        (tables, {"eta": {"default": True, "a": False, "b": False}}, TypeError, "every eta must be a number or"),
        (tables, {"eta": {"default": 0.5, "a": 0.5}}, ValueError, r"eta names \['a', 'default'\], but the tables are"),
        (tables, {"eta": {**ETA, "b": 0.2}}, ValueError, "must sum to 1, not 0.9"),
        (tables, {"eta": {"default": 1.5, "a": -0.5, "b": 0.0}}, ValueError, r"every eta must be in \[0, 1\]"),
        (tables, {"eta": {"default": NAN, "a": 0.5, "b": 0.5}}, ValueError, r"every eta must be in \[0, 1\]"),
        (tables, {"eta": {**ETA, "default": Anneal(0.5, 0.6, 9)}}, ValueError, "at the end of their schedules"),
        (tables, {"eta": annealed((0.5, 0.6, 9), (0.2, 0.1, 8))}, ValueError, "must have the same num_updates"),
        (tables, {"eta": annealed((1, 0, 5), (0, 1, 5), b=0), "correction": "priority"}, ValueError, "annealed"),
        (tables, {"min_size": 0}, ValueError, "must be an integer >= 1"),
        (tables, {"min_size": {"x": 3}}, ValueError, r"min_size names \['x'\]"),
        (tables, {"allocation": "fair"}, ValueError, "must be 'systematic', 'multinomial' or 'largest_remainder'"),
        (tables, {"correction": "none"}, ValueError, "None, 'mixture', 'conditional', 'lemma2' or 'priority'"),
        (mixture, {"beta": 1.5}, ValueError, r"beta must be in \[0, 1\]"),
        (mixture, {"beta": True}, TypeError, "beta must be a number"),
        (conditional, {"pair_keys": "observation"}, TypeError, "pair_keys must be a tuple of the names"),
        (tables, {"priority": "proportional"}, TypeError, "priority must be a dict"),
        (tables, {"priority": {"kind": "rank"}}, ValueError, "kind must be 'proportional'"),
        (tables, {"priority": {"kind": ["proportional"]}}, ValueError, "kind must be 'proportional'"),
        (
            tables,
            {"priority": {"kind": "proportional", "omega": 1.0}},
            ValueError,
            "max_priority_within_buffer, not omega",
        ),
        (tables, {"priority": {"kind": "proportional", "alpha": -1.0}}, ValueError, "alpha must be >= 0"),
        (
            tables,
            {"priority": {"kind": "proportional"}, "correction": "lemma2"},
            ValueError,
            "does not support priorities inside",
        ),
        (mixture, {"priority": {"kind": "proportional", "beta": 0.5}}, ValueError, "its exponent is beta="),
        (pinned, {"correction": "conditional"}, ValueError, "needs tables of retention='ring'"),
    ],
)
def test_bad_arguments_are_named(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Episodes, "done_key"),
        (Episodes, "init_key"),
        (Episodes, "traj_key"),
        (ReaPERSampler, "terminated_key"),
        (slices, "behaviour_keys"),
    ],
)
@pytest.mark.parametrize("key", [5, ["next", "done"], (), ""])
def test_keys_are_names_of_entries(make, name, key):
    with pytest.raises(TypeError, match=rf"{name} must be the name of an entry, a string or a tuple of strings"):
        make(**{name: [key] if name == "behaviour_keys" else key})


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (ProportionalSampler(10), "ProportionalSampler(capacity=10, alpha=0.6, beta=0.4, td_error='squared')"),
        (RecencySampler(), "RecencySampler(capacity=None, half_life=100000, beta=0)"),
        (tables(), "EventTableSampler(capacity=None)"),
        (slices(), "TrajectoryRetraceSampler(capacity=5, slice_len=2, pad=True, anchors='uniform')"),
    ],
)
def test_the_representation_shows_the_arguments(sampler, expected):
    assert repr(sampler) == expected


@pytest.mark.parametrize(
    "public",
    [*SAMPLERS, DecoupledSampler, EventTableSampler, TrajectoryRetraceSampler, EventTableWriter],
)
def test_signatures_show_the_arguments(public):
    shown = inspect.signature(public).parameters
    given = list(inspect.signature(public.__init__).parameters.values())[1:]
    assert list(shown.values()) == given and len(given) > 1


@pytest.mark.parametrize(("sampler", "name"), [(RecencySampler(), "half_life"), (decoupled(), "num_candidates")])
def test_arguments_that_are_no_exponents_cannot_be_assigned(sampler, name):
    with pytest.raises(AttributeError):
        setattr(sampler, name, 3)


def test_the_signature_of_a_subclass_is_its_own():
    class Mine(ReaPERSampler):
        def __init__(self, size: int):
            super().__init__(size)

    assert str(inspect.signature(Mine)) == "(size: int)"
    assert list(inspect.signature(ReaPERSampler).parameters)[:3] == ["capacity", "alpha", "omega"]
