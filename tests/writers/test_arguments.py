"""Arguments of events, tables and their writer: errors name what is wrong."""

import pytest

from torchrl_replay_ext import EventSpec, EventTables, EventTableWriter, Novel, Quantile, Threshold

NAN = float("nan")
SPEC = EventSpec("a", ("next", "a"), 5)
CONDITION = "must be a key, a Threshold, Quantile or Novel, or a callable"


def tables(capacity, **arguments):
    return EventTables([SPEC], capacity, **arguments)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: EventSpec("a", "k", 0), ValueError, "history must be an integer >= 1"),
        (lambda: EventSpec("a", "k", 2, context=-1), ValueError, "context must be an integer >= 0"),
        (lambda: EventSpec("default", "k", 2), ValueError, "use another name"),
        (lambda: EventSpec(3, "k", 2), TypeError, "name must be a non-empty string"),
        (lambda: EventSpec("a", "k", 2, table=3), TypeError, "table must be a non-empty string"),
        (lambda: EventSpec("a", 3, 2), TypeError, CONDITION),
        (lambda: EventSpec("a", Novel("x"), 3, context=2), ValueError, "a Novel sees single transitions"),
        (lambda: Threshold("r", "=>", 1.0), ValueError, "op must be '>'"),
        (lambda: Threshold("r", ">", NAN), ValueError, "value must be a number, not NaN"),
        (lambda: Threshold("r", ">", True), TypeError, "value must be a number"),
        (lambda: Threshold(3, ">", 1.0), TypeError, "key must be the name of an entry"),
        (lambda: Quantile("r", 1), ValueError, r"q must be in \(0, 1\)"),
        (lambda: Quantile("r", 0.9, 0), ValueError, "window must be an integer >= 1"),
        (lambda: Quantile(3, 0.9), TypeError, "must be the name of an entry"),
        (lambda: Novel("x", 0), ValueError, "times must be an integer >= 1"),
        (lambda: Novel("x", resolution=0), ValueError, "resolution must be positive"),
        (lambda: Novel("x", width=0.5), ValueError, "width must be an integer >= 1"),
        (lambda: EventTables([], {}), ValueError, "at least one EventSpec"),
        (lambda: EventTables([SPEC, SPEC], {"a": 5}), ValueError, "same name"),
        (lambda: EventTables(SPEC, {"a": 5}), TypeError, "specs must be a list of EventSpec, and capacity a dict"),
        (lambda: tables([("a", 5)]), TypeError, "specs must be a list of EventSpec, and capacity a dict"),
        (lambda: tables({"a": 5}, retention="forever"), ValueError, "must be 'ring' or 'pinned'"),
        (lambda: tables({"a": 5, "default": 9}), ValueError, "remove 'default'"),
        (lambda: tables({"b": 5}), ValueError, r"capacity names \['b'\], but the tables are \['a'\]"),
        (lambda: tables({"a": 5}, retention="pinned"), ValueError, r"the tables are \['a', 'default'\]"),
        (lambda: tables({"a": 0}), ValueError, "must be an integer >= 1"),
        (lambda: tables({"a": 5, "default": 4}, retention="pinned"), ValueError, "history=5, more than"),
        (lambda: tables({"a": 5})["x"], KeyError, "there is no table 'x'"),
        (lambda: EventTableWriter({}), TypeError, "tables must be EventTables"),
        (lambda: EventTableWriter(tables({"a": 5}), episodes=3), TypeError, "episodes must be an Episodes object"),
    ],
)
def test_bad_arguments_are_named(build, error, message):
    with pytest.raises(error, match=message):
        build()
