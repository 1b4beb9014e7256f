"""Means over seeds and their 95 % bootstrap intervals."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import norm

RESAMPLES = 1000
FEW = 5
# Resamples that are in memory at the same time.
AT_ONCE = 100

# Maps values [n, ...] to a statistic over axis 0, such as their mean. Resamples are side by side, [n, resamples, ...].
# So it may reduce no other axis but the last one, as a ratio of the two columns of [n, 2] does.
Statistic = Callable[[np.ndarray], np.ndarray | np.floating]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; with fewer than 4 values, the mean."""
    cut = len(values) // 4  # scipy's trim_mean gives the same and takes 25 times as long
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def bootstrap_interval(values: np.ndarray, statistic: Statistic = interquartile_mean) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of a statistic; resamples axis 0 of `values` [n, ...].

    Percentiles of the resamples; with few values, FEW or less, those of BCa, since plain percentiles are too narrow.
    """
    rng = np.random.default_rng(0)
    rows = rng.integers(len(values), size=(RESAMPLES, len(values)))
    found = np.concatenate([statistic(values[some.T]) for some in np.split(rows, RESAMPLES // AT_ONCE)])
    levels = [0.025, 0.975]
    if 1 < len(values) <= FEW:
        low, high = bca_percentiles(found, values, statistic, levels)
    else:
        low, high = np.quantile(found, levels, axis=0)
    return low, high


def bca_percentiles(
    found: np.ndarray, values: np.ndarray, statistic: Statistic, levels: Sequence[float]
) -> list[np.ndarray]:
    """Percentiles of bootstrap resamples, corrected for bias and acceleration (BCa; Efron 1987, Eq. 6.8).

    The corrected level is Φ(z0 + (z0 + z) / (1 - a (z0 + z))). z is the normal quantile of the level, z0 that of the
    share of resamples below the estimate. The acceleration is a = Σ u³ / (6 (Σ u²)^1.5) of the jackknife's deviations
    u. Where all resamples lie on one side of the estimate, z0 is infinite, and the level stays as it is.

    Args:
        found: the statistic of each resample, [resamples, ...].
        values: the sample, [n, ...] with n > 1.
        statistic: the statistic.
        levels: the levels of the percentiles, each in (0, 1).

    Returns:
        The percentile of each level, [...].
    """
    estimate = statistic(values)
    share = ((found < estimate).mean(0) + (found <= estimate).mean(0)) / 2
    finite = (share > 0) & (share < 1)
    bias = norm.ppf(np.where(finite, share, 0.5))
    without = np.array([statistic(np.delete(values, row, axis=0)) for row in range(len(values))])
    deviations = without.mean(0) - without
    spread = (deviations**2).sum(0) ** 1.5
    acceleration = np.where(finite & (spread > 0), (deviations**3).sum(0) / np.where(spread > 0, 6 * spread, 1.0), 0.0)
    ordered = np.sort(found, axis=0)
    percentiles = []
    for level in levels:
        shifted = bias + norm.ppf(level)
        place = norm.cdf(bias + shifted / (1 - acceleration * shifted)) * (len(found) - 1)
        below = np.floor(place).astype(int)
        above = np.ceil(place).astype(int)
        ends = [np.take_along_axis(ordered, at[None], axis=0)[0] for at in (below, above)]
        percentiles.append(ends[0] + (place - below) * (ends[1] - ends[0]))
    return percentiles


def median_of(values: np.ndarray) -> np.ndarray:
    """Median over axis 0."""
    return np.median(values, axis=0)


def median_with_bound(steps: np.ndarray, censored: np.ndarray) -> tuple[float, bool]:
    """The median of steps [n], and whether it is only a lower bound because runs were `censored` [n]."""
    median = float(np.median(steps))
    return median, bool(median != np.median(np.where(censored, np.inf, steps)))


def ratio_of_means(pairs: np.ndarray) -> np.ndarray:
    """Mean of the second column of `pairs` [n, ..., 2], divided by the mean of the first."""
    return pairs[..., 1].mean(0) / pairs[..., 0].mean(0)
