"""Functions of index tensors, which may hold duplicates."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, values_can_be_read

# Up to this many numbers, a loop in Python is faster than tensor operations.
FEW = 1024


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
    ordered, order = index.contiguous().sort(stable=True)
    return torch.ones_like(ordered, dtype=torch.bool).scatter(0, order[:-1], ordered[1:] != ordered[:-1])


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
    if len(array) <= FEW:
        # Python's numbers are read in less time than those of the array
        listed = array.tolist()
        first = listed[0]
        is_range = listed == [*range(first, first + len(listed))]
    else:
        first = int(array[0])
        is_range = np.array_equal(array, np.arange(first, first + len(array)))
    return slice(first, first + len(array)) if is_range else array
