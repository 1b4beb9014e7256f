"""Arguments of all samplers, of events and of storages: errors, signatures and representations."""

import inspect
import math
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
    EventSpec,
    EventTables,
    EventTableWriter,
    FrameStackStorage,
    Novel,
    ProportionalSampler,
    Quantile,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    Threshold,
    TrajectoryRetraceSampler,
)

NAN = math.nan
slices = partial(TrajectoryRetraceSampler, capacity=5, slice_len=2)
unpadded, whole = partial(slices, pad=False), partial(slices, starts="episode")
decoupled = partial(DecoupledSampler, critic_sampler=RandomSampler(), policy=linear_policy(3, 2))
mixture, conditional, lemma2 = (partial(tables, correction=name) for name in ("mixture", "conditional", "lemma2"))
pinned = partial(tables, tables_of("pinned"))
frames = partial(FrameStackStorage, max_size=10)
event = partial(EventSpec, name="a", condition="k", history=2)
novel, quantile = partial(Novel, key="x"), partial(Quantile, key="x", q=0.9)
SPEC = EventSpec("a", ("next", "a"), 5)
tables_for_a, pinned_for_a = partial(EventTables, [SPEC]), partial(EventTables, [SPEC], retention="pinned")

# --- values of a wrong kind

WRONG = {
    "integer": (0, -1, 2.5, True, "3"),
    "number": (-0.1, NAN, "0.7", True, [0.4], None),
    "flag": ("no", 1, None),
    "choice": ("sqared", 2),
    "key": (5, ["next", "done"], (), ""),
}
ARGUMENTS = {
    ProportionalSampler: {
        "integer": ["capacity"],
        "number": ["alpha", "beta", "eps", "min_priority"],
        "flag": ["stratified", "max_priority_within_buffer"],
        "choice": ["td_error", "weight_norm"],
    },
    RankBasedSampler: {
        "integer": ["capacity"],
        "number": ["alpha", "beta"],
        "flag": ["stratified"],
        "choice": ["td_error", "weight_norm", "segments"],
    },
    ReaPERSampler: {
        "integer": ["capacity"],
        "number": ["alpha", "beta", "omega", "eps"],
        "flag": ["max_priority_within_buffer"],
        "choice": ["td_error", "weight_norm", "truncated"],
        "key": ["terminated_key"],
    },
    RecencySampler: {"integer": ["capacity"], "number": ["half_life", "beta"]},
    slices: {"integer": ["capacity", "slice_len"], "flag": ["pad"], "choice": ["starts", "anchors"]},
    decoupled: {
        "integer": ["num_candidates", "group_size"],
        "number": ["eps"],
        "choice": ["granularity"],
        "key": ["action_key"],
    },
    tables: {"integer": ["min_size"], "choice": ["allocation", "correction"]},
    mixture: {"number": ["beta"]},
    Episodes: {"integer": ["num_streams"], "key": ["done_key", "init_key", "traj_key"]},
    partial(Anneal, 0, 1): {"integer": ["num_updates"]},
    frames: {"integer": ["max_size"], "key": ["frame_key"]},
    event: {"integer": ["history"], "key": ["condition"]},
    novel: {"integer": ["times", "width"], "key": ["key"]},
    quantile: {"integer": ["window"], "number": ["q"], "key": ["key"]},
    partial(Threshold, key="x", op=">", value=1.0): {"choice": ["op"], "key": ["key"]},
    partial(EventTables, [SPEC], {"a": 5}): {"choice": ["retention"]},
}
CASES = [
    pytest.param(make, name, value, id=f"{getattr(make, 'func', make).__name__}-{name}-{value}")
    for make, kinds in ARGUMENTS.items()
    for kind, names in kinds.items()
    for name in names
    for value in WRONG[kind]
]


@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_wrong_values_are_named_by_constructor_and_assignment(make, name, value):
    refuses = partial(pytest.raises, (TypeError, ValueError), match=rf"\b{name}\b.* must be ")
    with refuses():
        make(**{name: value})
    if name in ("alpha", "beta", "omega") and make is not RecencySampler:
        made = make()
        before = getattr(made, name)
        with refuses():
            setattr(made, name, value)
        assert getattr(made, name) == before


def test_numbers_of_any_kind_are_taken():
    for value in (torch.tensor(0.5), torch.tensor([0.5]).numpy()[0], 0.5):
        assert ProportionalSampler(8, alpha=value, eps=value).alpha == 0.5


# --- values that do not fit each other


def annealed(default, a, b=0.3):
    return {"default": Anneal(*default), "a": Anneal(*a), "b": b}


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (ProportionalSampler, {"alpha": math.inf}, ValueError, r"ProportionalSampler\(alpha=inf\): alpha must be"),
        (ProportionalSampler, {"alpha": Anneal(-0.1, 1.0, 10)}, ValueError, "alpha must be"),
        (RankBasedSampler, {"beta": 1.5}, ValueError, r"RankBasedSampler\(beta=1.5\): beta must be in \[0, 1\]"),
        (RecencySampler, {"half_life": 0}, ValueError, "half_life must be > 0; use math.inf"),
        (RecencySampler, {"half_life": Anneal(1, 2, 3)}, TypeError, "half_life must be a number, not Anneal"),
        (RecencySampler, {"beta": Anneal(0.4, 1.0, 10)}, TypeError, "beta must be a number, not Anneal"),
        (Anneal, {"start": "0.4", "end": 1, "num_updates": 9}, TypeError, r"Anneal\(start='0.4'\): start must be a"),
        (Episodes, {"num_streams": 2, "traj_key": None}, ValueError, "pass the name of their entry as traj_key="),
        (ReaPERSampler, {"episodes": 3}, TypeError, "episodes must be an Episodes object"),
        (slices, {"episodes": Episodes}, TypeError, "episodes must be an Episodes object"),
        (slices, {"episodes": Episodes(done_key="terminated")}, ValueError, r"use \('next', 'done'\)"),
        (slices, {"behaviour_keys": [5]}, TypeError, "behaviour_keys must be the name of an entry"),
        (slices, {"anchors": RandomSampler()}, ValueError, "anchors must be 'uniform' or a prioritized sampler"),
        (slices, {"anchors": event_sampler(6, default=14)}, ValueError, "retention='ring'"),
        (unpadded, {"anchors": ProportionalSampler(5)}, ValueError, "pad=False.*use pad=True, or anchors='uniform'"),
        (whole, {"anchors": ReaPERSampler(5)}, ValueError, "starts='episode', anchors=ReaPER.*use .*anchors='uniform'"),
        (
            slices,
            {"anchors": ReaPERSampler(5), "episodes": Episodes(num_streams=2)},
            ValueError,
            "anchors= have .*one object to both",
        ),
        (decoupled, {"critic_sampler": "per"}, TypeError, "critic_sampler must be a Sampler"),
        (decoupled, {"policy": lambda data: data}, ValueError, "must be a TensorDictModule"),
        (decoupled, {"action_key": "act"}, ValueError, "it must write 'act'"),
        (decoupled, {"noise_scale": "0.1"}, TypeError, "noise_scale must be"),
        (decoupled, {"noise_scale": torch.tensor([True])}, TypeError, "noise_scale must hold real numbers"),
        (decoupled, {"noise_scale": torch.tensor([1j])}, TypeError, "noise_scale must hold real numbers"),
        (tables, {"tables": {"a": 3}}, TypeError, "tables must be EventTables"),
        (tables, {"eta": 0.5}, TypeError, "eta must be a dict"),
        (tables, {"eta": {**ETA, "a": "0.2"}}, TypeError, "every eta must be a number or Anneal"),
        (tables, {"eta": {"default": True, "a": False, "b": False}}, TypeError, "every eta must be a number or"),
        (tables, {"eta": {"default": 0.5, "a": 0.5}}, ValueError, r"eta names \['a', 'default'\], but the tables are"),
        (tables, {"eta": {**ETA, "b": 0.2}}, ValueError, "must sum to 1, not 0.9"),
        (tables, {"eta": {"default": 1.5, "a": -0.5, "b": 0.0}}, ValueError, r"every eta must be in \[0, 1\]"),
        (tables, {"eta": {**ETA, "default": Anneal(0.5, 0.6, 9)}}, ValueError, "at the end of their schedules"),
        (tables, {"eta": annealed((0.5, 0.6, 9), (0.2, 0.1, 8))}, ValueError, "must have the same num_updates"),
        (tables, {"eta": annealed((1, 0, 5), (0, 1, 5), b=0), "correction": "priority"}, ValueError, "annealed"),
        (tables, {"min_size": {"x": 3}}, ValueError, r"min_size names \['x'\]"),
        (tables, {"min_size": {"default": 3}}, ValueError, r"\['default'\], but the event tables are \['a', 'b'\]"),
        (mixture, {"beta": 1.5}, ValueError, r"beta must be in \[0, 1\]"),
        (conditional, {"pair_keys": "observation"}, TypeError, "pair_keys must be a tuple of the names"),
        (tables, {"priority": "proportional"}, TypeError, "priority must be a dict"),
        (tables, {"priority": {"kind": "rank"}}, ValueError, "kind must be 'proportional'"),
        (tables, {"priority": {"kind": ["proportional"]}}, ValueError, "kind must be 'proportional'"),
        (tables, {"priority": {"kind": "proportional", "omega": 1.0}}, ValueError, "_within_buffer, not omega"),
        (tables, {"priority": {"kind": "proportional", "alpha": -1.0}}, ValueError, "alpha must be >= 0"),
        (lemma2, {"priority": {"kind": "proportional"}}, ValueError, "does not support priorities inside"),
        (mixture, {"priority": {"kind": "proportional", "beta": 0.5}}, ValueError, "its exponent is beta="),
        (pinned, {"correction": "conditional"}, ValueError, "needs tables of retention='ring'"),
        (frames, {"frame_capacity": 9}, ValueError, r"frame_capacity=9\): frame_capacity must be an integer >= 10"),
        (frames, {"episodes": 5}, TypeError, "episodes must be an Episodes object"),
        (event, {"context": -1}, ValueError, "context must be an integer >= 0"),
        (event, {"name": "default"}, ValueError, "use another name"),
        (event, {"name": 3}, TypeError, "name must be a non-empty string"),
        (event, {"table": 3}, TypeError, "table must be a non-empty string"),
        (event, {"condition": Novel("x"), "context": 2}, ValueError, "a Novel sees single transitions"),
        (partial(Threshold, "r", ">"), {"value": NAN}, ValueError, "value must be a number, not NaN"),
        (partial(Threshold, "r", ">"), {"value": True}, TypeError, "value must be a number"),
        (quantile, {"q": 1}, ValueError, r"q must be in \(0, 1\)"),
        (novel, {"resolution": 0}, ValueError, "resolution must be positive"),
        (partial(EventTables, []), {"capacity": {}}, ValueError, "at least one EventSpec"),
        (partial(EventTables, [SPEC, SPEC]), {"capacity": {"a": 5}}, ValueError, "same name"),
        (partial(EventTables, SPEC), {"capacity": {"a": 5}}, TypeError, "specs must be a list of EventSpec, and capa"),
        (tables_for_a, {"capacity": [("a", 5)]}, TypeError, "specs must be a list of EventSpec, and capacity a dict"),
        (tables_for_a, {"capacity": {"a": 5, "default": 9}}, ValueError, "remove 'default'"),
        (tables_for_a, {"capacity": {"b": 5}}, ValueError, r"capacity names \['b'\], but the tables are \['a'\]"),
        (tables_for_a, {"capacity": {"a": 0}}, ValueError, "must be an integer >= 1"),
        (tables_for_a, {"capacity": {"a": 5.0}}, TypeError, "must be an integer >= 1"),
        (partial(EventTables, None), {"capacity": {"a": 5}}, TypeError, "specs must be a list of EventSpec, and capa"),
        (pinned_for_a, {"capacity": {"a": 5}}, ValueError, r"the tables are \['a', 'default'\]"),
        (pinned_for_a, {"capacity": {"a": 5, "default": 4}}, ValueError, "history=5, more than"),
        (EventTableWriter, {"tables": {}}, TypeError, "tables must be EventTables"),
        (partial(EventTableWriter, tables_of()), {"episodes": 3}, TypeError, "episodes must be an Episodes object"),
    ],
)
def test_bad_arguments_are_named(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


def test_tables_are_found_by_their_names():
    with pytest.raises(KeyError, match="there is no table 'x'"):
        tables_of()["x"]


# --- signatures


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
