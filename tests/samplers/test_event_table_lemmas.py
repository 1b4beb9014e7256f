"""Lemma 1 of the SSET paper by exact probabilities: how often the rows of event tables are drawn in the three rooms.

P_mix ≥ (1 − η)^−m P_0 for all rows of an event table, if τ ≤ (1 − η)^m / ((m + 1) n μ), where μ bounds the share of the
event in the default table. `recipes.experiments.sset_tabular` has the world, the experience and the tables.
"""

import pytest
import torch

from recipes.experiments import sset_tabular

ETA, EVENTS = 0.5, 2  # share of the event tables together; their number


def largest_m(history, share):
    """The largest whole m that the condition of the lemma allows; None if there is none."""
    fits = [m for m in range(60) if history * (m + 1) * EVENTS * share <= (1 - ETA) ** m]
    return max(fits, default=None)


def oversampling(method, event):
    """m, and P_mix / P_0 of each pair of state and action in the table of an event, for those in the default table."""
    world = sset_tabular.make_world()
    stream = sset_tabular.make_stream(world, world.dynamics.optimal_q(sset_tabular.DISCOUNT), 0)
    buffer = sset_tabular.make_buffer(method)
    buffer.extend(stream)
    rows, tables = buffer.storage[:], buffer.sampler.tables
    pair, default = rows["state"] * 3 + rows["action"], tables["default"].index()
    drawn = (
        torch.zeros(pair.max() + 1).double().index_add_(0, pair, buffer.sampler.probabilities(buffer.storage).double())
    )
    alone = pair[default].bincount(minlength=len(drawn)).double() / len(default)
    of_event = pair[tables[event].index()].unique()
    share = rows["next", "events", event][default].double().mean().item()
    ratio = (drawn / alone)[of_event]
    return largest_m(sset_tabular.METHODS[method][0], share), ratio[ratio.isfinite()]


@pytest.mark.parametrize(("event", "m"), [("at_gap", 1), ("done", 5)])
def test_transitions_into_events_are_drawn_as_often_as_lemma_1_says(event, m):
    found, ratio = oversampling("history 1", event)
    assert found == m and ratio.min() >= (1 - ETA) ** -m


def test_lemma_1_does_not_hold_for_the_beginning_of_histories():
    """Its proof counts a state in the default table only where an event follows; most visits have none."""
    m, ratio = oversampling("history 60", "done")
    assert m == 1
    assert ratio.median() > 1.5 and ratio.max() > 10
    assert 0.5 <= ratio.min() < 0.7 and 0.4 < (ratio >= (1 - ETA) ** -m).double().mean() < 0.55
    # the gaps are visited too often for any m
    assert oversampling("history 60", "at_gap")[0] is None
