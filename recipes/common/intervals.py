"""Means over seeds and their 95 % bootstrap intervals; rank correlations."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import bootstrap, spearmanr

RESAMPLES = 1000
FEW = 5
# Resamples that are in memory at the same time.
AT_ONCE = 100

# Maps values [n, ...] to a statistic over axis 0, such as their mean. Resamples are side by side, [n, ..., resamples].
Statistic = Callable[[np.ndarray], np.ndarray | np.floating]


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """Mean of the middle half over axis 0; with fewer than 4 values, the mean."""
    cut = len(values) // 4  # scipy's trim_mean gives the same and takes 25 times as long
    return np.sort(values, axis=0)[cut : len(values) - cut].mean(axis=0)


def bootstrap_interval(values: np.ndarray, statistic: Statistic = interquartile_mean) -> tuple[np.ndarray, np.ndarray]:
    """95 % bootstrap interval of a statistic; resamples axis 0 of `values` [n, ...].

    Percentiles of the resamples; with few values, FEW or less, those of BCa (Efron 1987), since plain percentiles are
    too narrow. Where BCa is undefined, as for equal values, they stay as they are.
    """

    def ends(method: str) -> np.ndarray:
        options = {"n_resamples": RESAMPLES, "batch": AT_ONCE, "rng": np.random.default_rng(0)}
        return np.array(bootstrap((values,), over, axis=0, method=method, **options).confidence_interval)

    def over(sample: np.ndarray, axis: int) -> np.ndarray | np.floating:
        return statistic(np.moveaxis(sample, axis, 0))

    if len(values) == 1:
        return np.asarray(statistic(values)), np.asarray(statistic(values))
    found = ends("percentile")
    if len(values) <= FEW:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            corrected = ends("BCa")
        found = np.where(np.isnan(corrected), found, corrected)
    return found[0], found[1]


def median_of(values: np.ndarray) -> np.ndarray:
    """Median over axis 0."""
    return np.median(values, axis=0)


def median_with_bound(steps: np.ndarray, censored: np.ndarray) -> tuple[float, bool]:
    """The median of steps [n], and whether it is only a lower bound because runs were `censored` [n]."""
    median = float(np.median(steps))
    return median, bool(median != np.median(np.where(censored, np.inf, steps)))


def ratio_of_means(pairs: np.ndarray) -> np.ndarray:
    """Mean of the second column of `pairs` [n, 2, ...], divided by the mean of the first."""
    return pairs[:, 1].mean(0) / pairs[:, 0].mean(0)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The rank correlation (Spearman); NaN if one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    found: Any = spearmanr(a, b)
    return float(found.statistic)
