"""The rule that decides the claims of the sources."""

import numpy as np
import pytest
from scipy import stats

from recipes.studies import claims
from recipes.studies.claims import NO, OPEN, YES, Comparison

RNG = np.random.default_rng(0)


def comparison(ratio, expect, *, spread=0.1, seeds=20, censored=False, number=np.nan, p_value=None):
    baseline = np.exp(RNG.normal(0, spread, seeds))
    pairs = np.stack([baseline, baseline * ratio * np.exp(RNG.normal(0, spread, seeds))], 1)
    found = Comparison("", pairs, np.full((seeds, 2), censored), expect, number)
    found.adjusted = found.p_value if p_value is None else p_value
    return found


@pytest.mark.parametrize(
    ("ratio", "expect", "verdict"),
    [
        (0.5, "less", YES),
        (0.5, "more", NO),
        (2.0, "more", YES),
        (2.0, "less", NO),
        (1.0, "same", YES),
        (0.5, "same", NO),
    ],
)
def test_clear_differences_are_decided_by_their_direction(ratio, expect, verdict):
    assert comparison(ratio, expect).verdict == verdict


def test_unclear_differences_are_inconclusive():
    assert comparison(0.98, "less", spread=1.0, seeds=5).verdict == OPEN
    assert comparison(1.0, "same", spread=1.0, seeds=5).verdict == OPEN
    # clear by itself, but not among many
    assert comparison(0.5, "less", p_value=0.2).verdict == OPEN
    assert comparison(0.5, None).verdict == OPEN


def test_a_number_that_the_interval_excludes_is_named():
    assert comparison(1.0, "less", number=0.7).text.endswith(", which excludes 0.7")
    assert "excludes" not in comparison(0.7, "less", number=0.7).text


@pytest.mark.parametrize(("sides", "excluded"), [([], (0.7, 1.4)), ([0], (1.4,)), ([1], (0.7,)), ([0, 1], ())])
def test_a_bound_excludes_only_numbers_on_its_side_and_shows_no_equality(sides, excluded):
    """Of the baseline (0) and the variant (1), one run is censored; their ratio is 1."""
    for number in (0.7, 1.4):
        found = comparison(1.0, "same", number=number, p_value=0.5)
        found.censored[0, sides] = True
        assert ("excludes" in found.text) == (number in excluded)
        assert found.verdict == (OPEN if sides else YES)


def test_last_returns_are_compared_by_their_difference():
    pairs = np.stack([np.arange(10.0), np.arange(10.0) + 5 + RNG.normal(0, 0.1, 10)], 1)
    found = Comparison("returns", pairs, None, "more", np.nan, adjusted=0.001)
    assert found.verdict == YES and found.text.startswith("returns: 5.0 [") and found.interval[0] > 4.8


def test_spreads_between_seeds_are_compared_whatever_the_means():
    """By the analysis of variance of the distances from the medians; one run far from the others decides nothing."""
    wide, narrow = RNG.normal(0, 10, 20), RNG.normal(500, 1, 20)
    found = Comparison("", np.stack([wide, narrow], 1), None, "less", np.nan, spread=True)
    found.adjusted = found.p_value
    expected = stats.f_oneway(abs(wide - np.median(wide)), abs(narrow - np.median(narrow))).pvalue
    assert found.p_value == pytest.approx(expected)
    assert found.verdict == YES
    assert found.text == f"SD {narrow.std(ddof=1):.1f} against {wide.std(ddof=1):.1f}"
    one_far = np.stack([[*narrow[1:], 700.0], narrow], 1)
    assert Comparison("", one_far, None, "less", np.nan, spread=True).p_value > 0.05


def test_a_row_names_the_comparisons_with_each_verdict():
    found = [comparison(0.5, "less"), comparison(2.0, "less"), comparison(0.5, "less")]
    assert claims.verdict_of(found) == "yes: 1, 3; no: 2"
    assert claims.verdict_of(found[:1]) == YES


def test_comparisons_of_one_source_are_corrected_together(monkeypatch):
    rows = [{"source": "A", "compare": [{}, {}]}, {"source": "B", "compare": [{}]}, {"source": "A", "found": "by hand"}]
    made = iter([comparison(0.9, "less", p_value=np.nan) for _ in range(3)])
    monkeypatch.setattr(claims, "compare", lambda row: next(made))
    (first, second), (alone,), nothing = claims.decide(rows)
    smaller, larger = sorted([first.p_value, second.p_value])
    assert sorted([first.adjusted, second.adjusted]) == pytest.approx([2 * smaller, max(2 * smaller, larger)])
    assert alone.adjusted == pytest.approx(alone.p_value)
    assert nothing == []


def test_tables_are_put_between_their_marks():
    page = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb"
    once = claims.inserted(page, {"x": "new"})
    assert once == "a\n<!-- begin x -->\n\nnew\n\n<!-- end x -->\nb" == claims.inserted(once, {"x": "new"})
