"""Statistics that decide: paired intervals, tests for censored runs, and aggregates over tasks. Does not import torch.

Percentile intervals of a bootstrap are too narrow for few seeds: nominal 95 % intervals of the ratio cover .72 with 3
seeds and .80 to .84 with 5. Those of Student's t on paired values cover .92 to .98 with 3 to 50 seeds, see
tests/recipes/test_intervals.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

LEVEL = 0.95
RESAMPLES = 2000

# Steps of (baseline, variant) for each seed of a task, [n, 2].
Pairs = np.ndarray


def difference_interval(values: ArrayLike, baseline: ArrayLike) -> tuple[float, float]:
    """95 % interval of the mean difference ``values - baseline`` over pairs of the same seed.

    Student's t on the differences. With one pair, the interval is unbounded.

    Args:
        values: one number per seed, [n].
        baseline: numbers of the same seeds in the same order, [n].

    Returns:
        The ends (low, high).

    Raises:
        ValueError: if the lengths differ, or there are no values, or one is not finite.
    """
    a, b = _paired(values, baseline)
    return _t_interval(a - b)


def ratio_interval(values: ArrayLike, baseline: ArrayLike) -> tuple[float, float]:
    """95 % interval of the geometric mean of the ratios ``values / baseline`` over pairs of the same seed.

    Student's t on the logarithms of the ratios. With one pair, the interval is (0, inf).

    Args:
        values: one positive number per seed, such as steps to a threshold, [n].
        baseline: numbers of the same seeds in the same order, [n].

    Returns:
        The ends (low, high).

    Raises:
        ValueError: as :func:`difference_interval`; also if a number is not positive.
    """
    a, b = _paired(values, baseline)
    if min(a.min(), b.min()) <= 0:
        raise ValueError("ratio_interval: all numbers must be > 0; compare others by difference_interval")
    low, high = _t_interval(np.log(a / b))
    return float(np.exp(low)), float(np.exp(high))


def mean_interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval of the mean over the first axis of ``values`` [n, ...], by Student's t; n > 1."""
    half = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return values.mean(axis=0) - half, values.mean(axis=0) + half


def geometric_mean_ratio(pairs: Pairs) -> float:
    """Geometric mean of the second column of ``pairs`` [n, 2], divided by that of the first."""
    return float(np.exp(np.log(pairs[:, 1] / pairs[:, 0]).mean()))


def paired_p_value(differences: ArrayLike) -> float:
    """Two-sided p value of a t test of paired differences [n] against 0; 1 if they are all 0, NaN with one pair."""
    found = np.asarray(differences, dtype=float)
    if len(found) < 2:
        return float("nan")
    if np.ptp(found) == 0:
        return float(found[0] == 0)
    result: Any = stats.ttest_1samp(found, 0.0)
    return float(result.pvalue)


def censored_p_value(pairs: Pairs, censored: np.ndarray) -> float:
    """Two-sided p value of the log-rank test between both columns of ``pairs`` [n, 2].

    Args:
        pairs: steps to the threshold, or all steps of runs that did not reach it.
        censored: whether a run did not reach the threshold, [n, 2].

    Returns:
        The p value; 1 if no run reached the threshold.
    """
    if censored.all():
        return 1.0
    sides: Any = [
        stats.CensoredData.right_censored(steps, missing) for steps, missing in zip(pairs.T, censored.T, strict=True)
    ]
    # NaN if only one run is at risk at each event
    with np.errstate(invalid="ignore"):
        return float(stats.logrank(*sides).pvalue)


def spread_p_value(pairs: Pairs) -> float:
    """Two-sided p value of the Brown-Forsythe test that both columns of ``pairs`` [n, 2] have the same spread.

    It is Levene's test with medians. Unlike an F test of the variances, it holds where one run is far from the others.
    """
    result: Any = stats.levene(*pairs.T, center="median")
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> np.ndarray:
    """The p values of several tests, adjusted by Holm's method: all that are < 0.05 hold together at that level."""
    found = np.asarray(p_values, dtype=float)
    order = np.argsort(found)
    adjusted = np.maximum.accumulate(found[order] * np.arange(len(found), 0, -1))
    result = np.empty_like(found)
    result[order] = np.minimum(adjusted, 1.0)
    return result


def aggregate_ratio(tasks: Mapping[str, Pairs]) -> tuple[float, float, float]:
    """Geometric mean over tasks of their mean ratios, with the ends of its 95 % interval (Agarwal et al. 2021).

    Each task counts alike. The interval is that of a bootstrap that resamples the pairs of each task (stratified).
    """

    def mean(sample: Mapping[str, Pairs]) -> float:
        return float(np.exp(np.mean([np.log(pairs[:, 1] / pairs[:, 0]).mean() for pairs in sample.values()])))

    return (mean(tasks), *_stratified(tasks, mean))


def probability_of_improvement(tasks: Mapping[str, Pairs]) -> tuple[float, float, float]:
    """Probability that a run of the variant takes fewer steps than one of the baseline, with its 95 % interval.

    The mean over tasks of the share of all pairs of runs, of any seeds; a tie counts half (Agarwal et al. 2021). The
    interval is that of a stratified bootstrap.
    """

    def probability(sample: Mapping[str, Pairs]) -> float:
        shares = []
        for pairs in sample.values():
            gain = pairs[:, :1] - pairs[:, 1]
            shares.append(((gain > 0) + 0.5 * (gain == 0)).mean())
        return float(np.mean(shares))

    return (probability(tasks), *_stratified(tasks, probability))


def _paired(values: ArrayLike, baseline: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"values and baseline must be two lists of one number per seed, not {a.shape} and {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("values and baseline must be finite; leave out the seeds of which a number is missing")
    return a, b


def _t_interval(found: np.ndarray) -> tuple[float, float]:
    if len(found) < 2:
        return -np.inf, np.inf
    low, high = mean_interval(found)
    return float(low), float(high)


def _stratified(tasks: Mapping[str, Pairs], statistic: Callable[[Mapping[str, Pairs]], float]) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    found = [
        statistic({name: pairs[rng.integers(len(pairs), size=len(pairs))] for name, pairs in tasks.items()})
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(found, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
