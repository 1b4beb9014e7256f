"""Pearson's chi-square test of draws."""

import torch
from scipy import stats


def p_value(drawn: torch.Tensor, probability: torch.Tensor) -> float:
    """That of ``drawn`` (items, int64 [n]) under ``probability`` [items], of which those with 0 must not be drawn.

    Items that are expected less than five times are counted together.
    """
    drawn, probability = drawn.cpu(), probability.double().cpu()
    counts = drawn.bincount(minlength=len(probability)).double()
    possible = probability > 0
    assert not counts[~possible].any()
    classes = [[0.0, 0.0]]
    for item in probability.argsort(descending=True)[: int(possible.sum())]:
        if classes[-1][1] >= 5:
            classes.append([0.0, 0.0])
        classes[-1][0] += float(counts[item])
        classes[-1][1] += float(probability[item] / probability.sum() * len(drawn))
    if classes[-1][1] < 5:
        rest = classes.pop()
        classes[-1] = [of_class + of_rest for of_class, of_rest in zip(classes[-1], rest, strict=True)]
    assert len(classes) > 1
    return stats.chisquare(*zip(*classes, strict=True)).pvalue
