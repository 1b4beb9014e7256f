"""Importance-sampling weights and the order of writes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import is_traced, values_can_be_read

# Up to here, numbers are looked at faster in Python than by tensor operations.
FEW = 1024
# Up to here, comparing all pairs is faster than sorting in a compiled graph.
_PAIRWISE = 512
# Integers below 2^24 are exact in float32, for which loops over pairs are vectorised best.
_EXACT_BITS = 24


def importance_weights(
    probability: Tensor, num_items: int | Tensor, beta: float | Tensor, normalize: bool = True
) -> Tensor:
    r"""Importance-sampling weights of prioritized draws.

    w = (1 / (N · P))^β, divided by the largest of them if ``normalize`` (Schaul et al. 2016, Sec. 3.4; ReaPER, Eq. 18).

    Args:
        probability: probabilities of the drawn items, any shape, > 0.
        num_items: N, the number of items in the buffer.
        beta: correction exponent in [0, 1]; 0 is no correction, 1 the full one.
        normalize: divide by the largest weight given, so that weights only scale updates down.

    Returns:
        The weights, in the shape and dtype of ``probability``.

    Examples:
        >>> importance_weights(torch.tensor([0.5, 0.25]), 2, 1.0)
        tensor([0.5000, 1.0000])
    """
    weights = (num_items * probability) ** -beta
    return weights / weights.max() if normalize else weights


def rank_probabilities(num_items: int, alpha: float) -> Tensor:
    r"""Probabilities of rank-based prioritization, P(r) = r^−α / Σ_{k≤N} k^−α (Schaul et al. 2016, Sec. 3.3).

    Args:
        num_items: N, the number of items, >= 1.
        alpha: exponent, >= 0; 0 is uniform.

    Returns:
        The probability of each rank from 1 on, which is that of the largest TD error; float64 [N].

    Raises:
        ValueError: if an argument is out of range.

    Examples:
        >>> rank_probabilities(3, 1.0)
        tensor([0.5455, 0.2727, 0.1818], dtype=torch.float64)
    """
    if num_items < 1:
        raise ValueError(f"rank_probabilities(num_items={num_items}): num_items must be >= 1.")
    if not (math.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"rank_probabilities(alpha={alpha}): alpha must be >= 0 and finite.")
    mass = torch.arange(1, num_items + 1, dtype=torch.float64) ** -alpha
    return mass / mass.sum()


def _along_rows_and_columns(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """``numbers`` [n] as float32, repeated along the rows, and along the columns, of an [n, n] matrix.

    As strided views of memory: so the compiler converts each number once, not for every pair.
    """
    size = (numbers.shape[0], numbers.shape[0])
    numbers = numbers.to(torch.float32)
    return numbers.as_strided(size, (1, 0)), numbers.as_strided(size, (0, 1))


def last_occurrence(index: Tensor, preferred: Tensor | None = None) -> Tensor:
    """For each entry of ``index`` [n], the position at which its value occurs last.

    ``values[last_occurrence(index)]`` gives all duplicates the value of the last one: a scatter of it no longer depends
    on the order of the writes, and an entry is the last of its kind where the result equals ``arange(n)``.

    Args:
        index: integers, shape [n].
        preferred: bool [n]; where a value has entries that are preferred, the last of those is meant.

    Examples:
        >>> last_occurrence(torch.tensor([7, 3, 7]))
        tensor([2, 1, 2])
        >>> last_occurrence(torch.tensor([7, 3, 7]), torch.tensor([True, True, False]))
        tensor([0, 1, 0])
    """
    count = index.shape[0]
    if is_traced() and 0 < count <= _PAIRWISE:
        rank = torch.arange(count, device=index.device)
        if preferred is not None:
            rank = rank + count * preferred
        halves = (index >> _EXACT_BITS, index & (2**_EXACT_BITS - 1))
        (high, high_t), (low, low_t), (_, rank) = map(_along_rows_and_columns, (*halves, rank))
        # far below every rank where two entries differ
        matching = rank - 4 * count * ((high - high_t).abs() + (low - low_t).abs())
        return matching.amax(1).to(torch.int64) % count
    key = index.contiguous() if preferred is None else 2 * index + preferred
    ordered, order = key.sort(stable=True)
    probe = key if preferred is None else 2 * index + 1
    return order.index_select(0, torch.searchsorted(ordered, probe, right=True) - 1)


def is_last_occurrence(index: Tensor) -> Tensor:
    """For each entry of ``index`` [n], whether it is the last of its value; bool [n].

    Examples:
        >>> is_last_occurrence(torch.tensor([7, 3, 7]))
        tensor([False,  True,  True])
    """
    return last_occurrence(index) == torch.arange(index.shape[0], device=index.device)


def extremes(values: Tensor) -> tuple[float, float]:
    """The smallest and the largest of ``values`` [n], n >= 1; both NaN if one is."""
    if values.shape[0] > FEW:
        low, high = torch.aminmax(values)
        return low.item(), high.item()
    numbers = values.tolist()
    total = sum(numbers)
    return (math.nan, math.nan) if total != total else (min(numbers), max(numbers))


def all_different(index: Tensor) -> bool:
    """Whether ``index`` [n] is known to hold no value twice. Only a short one is examined, and only on the CPU."""
    count = index.shape[0]
    return count <= FEW and values_can_be_read(index) and len(set(index.tolist())) == count


def write_last(destination: Tensor, index: Tensor, values: Tensor) -> None:
    """``destination[index] = values`` in place for 1-D tensors; of duplicates in ``index`` the last one wins.

    Only eager code on the CPU runs through the index of a ``scatter_`` in order. Compiled, ``scatter_`` would also copy
    all of ``destination``.
    """
    if values_can_be_read(index):
        destination.scatter_(0, index, values)
    else:
        destination.index_copy_(0, index, values.index_select(0, last_occurrence(index)))
