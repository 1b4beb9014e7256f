"""Pearson's chi-square test of draws."""

import torch
from scipy import stats


def p_value(drawn: torch.Tensor, probability: torch.Tensor) -> float:
    """That of ``drawn`` (items, int64 [n]) under ``probability`` [items], of which those with 0 must not be drawn."""
    drawn, probability = drawn.cpu(), probability.double().cpu()
    counts = drawn.bincount(minlength=len(probability)).double()
    possible = probability > 0
    assert not counts[~possible].any()
    expected = probability[possible] / probability.sum() * len(drawn)
    assert expected.min() >= 5
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue
