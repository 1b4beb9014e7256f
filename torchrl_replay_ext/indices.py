"""Functions of index tensors, which may hold duplicates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, is_traced, values_can_be_read

# Up to this many numbers, a loop in Python is faster than tensor operations.
FEW = 1024
# Up to this many numbers, comparing all pairs is faster than sorting in a compiled graph.
_PAIRWISE = 512
# float32 represents integers below 2^24 exactly, and the compiler vectorises loops over pairs best for float32.
_FLOAT32_BITS = 24


def _along_rows_and_columns(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Two float32 matrices [n, n] with the entries ``numbers[i]`` and ``numbers[j]``.

    Both are strided views of one tensor: the compiler converts each number once instead of once per pair.
    """
    size = (numbers.shape[0], numbers.shape[0])
    numbers = numbers.to(torch.float32)
    return numbers.as_strided(size, (1, 0)), numbers.as_strided(size, (0, 1))


def last_occurrence(index: Tensor, preferred: Tensor | None = None) -> Tensor:
    """For each entry of ``index``, find the last position that holds the same value.

    ``values[last_occurrence(index)]`` gives all duplicates the value of the last one, so that a scatter of the result
    does not depend on the order of the writes.

    Args:
        index: integers, int64 [n].
        preferred: bool [n]. If any entry with a value is preferred, the last preferred entry with this value is found.
            Default: None, no entry is preferred.

    Returns:
        Positions, int64 [n]. An entry is the last with its value if its result is its own position.

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
        halves = (index >> _FLOAT32_BITS, index & (2**_FLOAT32_BITS - 1))
        (high, high_t), (low, low_t), (_, rank) = map(_along_rows_and_columns, (*halves, rank))
        # entries that differ are moved far below every rank
        matching = rank - 4 * count * ((high - high_t).abs() + (low - low_t).abs())
        return matching.amax(1).to(torch.int64) % count
    key = index.contiguous() if preferred is None else 2 * index + preferred
    ordered, order = key.sort(stable=True)
    probe = key if preferred is None else 2 * index + 1
    return order.index_select(0, torch.searchsorted(ordered, probe, right=True) - 1)


def is_last_occurrence(index: Tensor) -> Tensor:
    """For each entry of ``index``, whether no later entry holds the same value.

    Args:
        index: integers, int64 [n].

    Returns:
        bool [n].

    Examples:
        >>> is_last_occurrence(torch.tensor([7, 3, 7]))
        tensor([False,  True,  True])
    """
    return last_occurrence(index) == torch.arange(index.shape[0], device=index.device)


def as_index(numbers: Array) -> Array:
    """``numbers`` as an index: a slice if they are consecutive, which saves most of the time of a write.

    Args:
        numbers: integers, int64 [n].

    Returns:
        A slice or a NumPy array; where values cannot be read (in a compiled graph, on an accelerator), ``numbers``.

    Examples:
        >>> as_index(torch.tensor([3, 4, 5]))
        slice(3, 6, None)
    """
    array = numbers.numpy() if isinstance(numbers, Tensor) and values_can_be_read(numbers) else numbers
    if isinstance(array, (Tensor, slice)) or not len(array):
        return array
    first, end = int(array[0]), int(array[-1]) + 1
    if end - first != len(array):
        return array
    if len(array) <= FEW:
        is_range = array.tolist() == [*range(first, end)]
    else:
        is_range = np.array_equal(array, np.arange(first, end))
    return slice(first, end) if is_range else array
