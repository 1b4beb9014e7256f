"""The statistics that decide the verdicts of the results page."""

import numpy as np
import pytest
from scipy import stats

from recipes.common import curves
from recipes.studies import intervals, report

STUDIES = 1500


def coverage(interval, draw, truth, seeds):
    """The share of simulated studies whose interval contains the truth."""
    rng = np.random.default_rng(seeds)
    found = [interval(*draw(rng, seeds)) for _ in range(STUDIES)]
    return np.mean([low <= truth <= high for low, high in found])


def lucky_steps(rng, seeds):
    """Steps of two variants: a part that both share with a seed, and skewed parts of their own; true ratio 0.8."""
    shared = rng.lognormal(0, 0.2, seeds)
    return 0.8 * 2e4 * shared * rng.gamma(6, 1 / 6, seeds), 2e4 * shared * rng.gamma(6, 1 / 6, seeds)


def returns(rng, seeds):
    """Returns with a true difference of 30 and spreads that differ."""
    return 130 + 80 * rng.standard_t(8, seeds), 100 + 40 * rng.standard_normal(seeds)


@pytest.mark.parametrize("seeds", [3, 5, 10, 20])
def test_intervals_cover_the_truth_in_95_percent_of_studies(seeds):
    assert 0.92 <= coverage(curves.ratio_interval, lucky_steps, 0.8, seeds) <= 0.98
    assert 0.92 <= coverage(curves.difference_interval, returns, 30, seeds) <= 0.98


def test_percentile_intervals_would_not():
    """The reason for intervals of Student's t, and a check that the test above can fail."""

    def percentile(values, baseline):
        rng = np.random.default_rng(0)
        chosen = rng.integers(len(values), size=(200, len(values)))
        return np.quantile(values[chosen].mean(1) / baseline[chosen].mean(1), [0.025, 0.975])

    assert coverage(percentile, lucky_steps, 0.8, 5) < 0.9


def test_intervals_by_hand():
    # differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t = 4.3027 with 2 degrees of freedom
    low, high = intervals.difference_interval([2, 4, 6], [1, 2, 3])
    assert (low, high) == pytest.approx((2 - 4.3027 / np.sqrt(3), 2 + 4.3027 / np.sqrt(3)), abs=1e-3)
    low, high = intervals.ratio_interval(np.exp([2, 4, 6]), np.exp([1, 2, 3]))
    assert np.log([low, high]) == pytest.approx((2 - 4.3027 / np.sqrt(3), 2 + 4.3027 / np.sqrt(3)), abs=1e-3)
    assert intervals.ratio_interval([2.0], [1.0]) == (0.0, np.inf)
    # both directions agree
    a, b = [3.0, 5.0, 9.0], [4.0, 4.0, 7.0]
    assert intervals.ratio_interval(a, b) == pytest.approx([1 / end for end in intervals.ratio_interval(b, a)[::-1]])


@pytest.mark.parametrize("values, baseline", [([1, 2], [1]), ([], []), ([1, np.nan], [1, 2]), ([[1]], [[1]])])
def test_numbers_that_are_not_pairs_are_refused(values, baseline):
    with pytest.raises(ValueError):
        intervals.difference_interval(values, baseline)
    with pytest.raises(ValueError):
        intervals.ratio_interval(values, baseline)


def test_bands_are_intervals_of_each_column():
    values = np.random.default_rng(2).normal(size=(6, 3))
    low, high = intervals.mean_interval(values)
    for column in range(3):
        expected = intervals.difference_interval(values[:, column], np.zeros(6))
        assert (low[column], high[column]) == pytest.approx(expected)


def test_ratios_of_negative_numbers_are_refused():
    with pytest.raises(ValueError, match="difference_interval"):
        intervals.ratio_interval([-100.0, 3.0], [1.0, 2.0])


def test_one_censored_run_does_not_hide_a_gain_in_all_pairs():
    """Seeds differ more than the two variants, as in Deep Sea; the full length would only add to the gain."""
    rng = np.random.default_rng(0)
    baseline = 1e4 * rng.lognormal(0, 1, 20)
    pairs = np.stack([baseline, 0.7 * baseline * rng.lognormal(0, 0.1, 20)], 1)
    censored = np.zeros((20, 2), dtype=bool)
    censored[baseline.argmax(), 0] = True
    assert report.p_value_of(pairs, censored) < 1e-6 < 0.1 < intervals.censored_p_value(pairs, censored)
    # the full length of the run would add to the loss, or take away from it: then it is not known
    reverse = pairs[:, ::-1], censored[:, ::-1]
    assert report.p_value_of(*reverse) < 1e-6
    assert report.p_value_of(pairs, censored[:, ::-1]) > 0.1


@pytest.mark.parametrize("sides", [[0], [1], [0, 1]])
def test_comparisons_of_equals_are_seldom_decided_if_runs_are_censored(sides):
    """Runs of 1.3 times the mean steps; a side that is not named runs until it reaches the threshold."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(400):
        pairs = np.stack(lucky_steps(rng, 10), 1) / [0.8, 1]
        limit = np.where(np.isin([0, 1], sides), 2.6e4, np.inf)
        found.append(report.p_value_of(np.minimum(pairs, limit), pairs > limit))
    assert np.mean(np.array(found) < 0.05) < 0.08


def test_censored_runs_are_compared_by_the_log_rank_test():
    """By hand: at each time, the events expected on one side, and their hypergeometric variance."""
    pairs = np.array([[5.0, 3.0], [8.0, 4.0], [10.0, 6.0], [10.0, 10.0]])
    censored = np.array([[False, False], [False, False], [True, False], [True, True]])
    time, side, event = pairs.ravel(), np.tile([0, 1], 4), ~censored.ravel()
    gap, variance = 0.0, 0.0
    for at in np.unique(time[event]):
        risk, deaths = time >= at, (time == at) & event
        n, ours, d = risk.sum(), (risk & (side == 1)).sum(), deaths.sum()
        gap += (deaths & (side == 1)).sum() - d * ours / n
        variance += d * ours / n * (1 - ours / n) * (n - d) / max(n - 1, 1)
    expected = stats.chi2.sf(gap**2 / variance, 1)
    assert intervals.censored_p_value(pairs, censored) == pytest.approx(expected)
    assert intervals.censored_p_value(pairs, np.ones_like(censored)) == 1


def test_paired_p_values():
    assert intervals.paired_p_value([1.0, 2.0, 3.0]) == pytest.approx(stats.ttest_1samp([1, 2, 3], 0).pvalue)
    assert intervals.paired_p_value([0.0, 0.0]) == 1
    assert np.isnan(intervals.paired_p_value([1.0]))


def test_holm_by_hand():
    assert intervals.holm([0.03, 0.005, 0.04]) == pytest.approx([0.06, 0.015, 0.06])
    assert intervals.holm([0.9, 0.8]).tolist() == [1, 1]


def test_aggregates_count_each_task_alike():
    tasks = {"a": np.array([[10.0, 5.0]] * 20), "b": np.array([[10.0, 20.0]] * 4)}
    assert intervals.aggregate_ratio(tasks) == pytest.approx((1, 1, 1))
    assert intervals.probability_of_improvement(tasks) == pytest.approx((0.5, 0.5, 0.5))
    rng = np.random.default_rng(1)
    spread = {name: np.stack([lucky_steps(rng, 10)[1], lucky_steps(rng, 10)[0]], 1) for name in "abc"}
    ratio, low, high = intervals.aggregate_ratio(spread)
    assert low < ratio < high
    assert high / low < np.divide(*intervals.ratio_interval(spread["a"][:, 1], spread["a"][:, 0])[::-1])
    share, low, high = intervals.probability_of_improvement(spread)
    expected = np.mean([(pairs[:, None, 0] > pairs[None, :, 1]).mean() for pairs in spread.values()])
    assert share == pytest.approx(expected) and low < share < high
