"""The layout of the slots of a buffer, and index tensors: TorchRL's indices, slot numbers, and duplicates."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_bool
from torchrl_replay_ext.compilation import Array, raise_if, values_can_be_read

_accelerators_are_validated = False


def validate_on_accelerators(enabled: bool = True) -> None:
    """Let invalid input raise errors in eager code on accelerators too, in the whole process.

    To see it, the host must wait for the device, about once per draw and update. Without this, eager code on
    accelerators does what a compiled step does: it leaves out invalid rows of updates and counts them in ``stats()``.
    On the CPU, eager code always raises errors.

    Args:
        enabled: False switches it off again. Default: True.
    """
    require_bool("validate_on_accelerators", "enabled", enabled)
    global _accelerators_are_validated
    _accelerators_are_validated = enabled


class Layout(NamedTuple):
    """The slots of a buffer, numbered in row-major order.

    Args:
        shape: shape of the storage. The first dimension is the ring; the product of the others is the number of lanes.
        device: device of the state.
        for_graphs: True if compiled graphs use the state; all state must then be in tensors. Default: False.
        known: True if ``shape`` was read from a storage, False if it is a guess before the first write. Default:
            False.
    """

    shape: tuple[int, ...]
    device: torch.device
    for_graphs: bool = False
    known: bool = False

    @property
    def validate(self) -> bool:
        """True if invalid input raises errors on accelerators too, see :func:`validate_on_accelerators`."""
        return _accelerators_are_validated

    @property
    def skip_checks_on(self) -> torch.device | None:
        """The device on which checks of values are skipped, because the host would wait; None if they are made."""
        return None if self.validate else self.device

    @property
    def counters(self) -> torch.device:
        """The device of numbers that the host needs: the CPU, unless graphs change them."""
        return self.device if self.for_graphs else torch.device("cpu")

    @property
    def steps(self) -> int:
        """Number of steps of the ring."""
        return self.shape[0]

    @property
    def slots_per_step(self) -> int:
        """Number of slots per step: the number of columns of the storage, 1 in flat storage."""
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        """Number of slots."""
        return math.prod(self.shape)

    def slots_from(self, step: int, count: int, device: torch.device | str | None = None) -> Tensor:
        """The next ``count`` slots of the ring from ``step`` on, int64 [count]; ``device``: by default the layout's."""
        return (step * self.slots_per_step + torch.arange(count, device=device or self.device)) % self.size


def require_capacity(call: str, shape: tuple[int, ...], max_size: int) -> None:
    """Raise ValueError unless a state for a storage of ``shape`` fits one of ``max_size`` slots.

    TorchRL rounds the number of slots up to whole steps. ``call`` names the method in errors.
    """
    if -(max_size // -math.prod(shape[1:])) != shape[0]:
        raise ValueError(
            f"{call}: the state is for a storage of {math.prod(shape)} slots, shape {tuple(shape)}, and this buffer "
            f"has {max_size} slots. Create it with the capacity with which the state was saved."
        )


def row_major(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert an index [n, ndim] into a storage of shape ``shape`` to flat slots [n], in row-major order."""
    slots = index[:, 0]
    for dim, length in enumerate(shape[1:], start=1):
        slots = slots * length + index[:, dim]
    return slots


def unravel(slots: Tensor, shape: tuple[int, ...]) -> Tensor | tuple[Tensor, ...]:
    """Convert flat ``slots`` [n] to TorchRL's index: [n], or a tuple of ndim tensors [n] if ndim > 1."""
    if len(shape) == 1:
        return slots
    index = []
    for length in reversed(shape[1:]):
        index.append(slots % length)
        slots = slots // length
    return (slots, *reversed(index))


def _as_tensor(owner: str, index: Any) -> Tensor:
    """An index, or a part of it, as a tensor. torch.as_tensor would move a tensor to torch's default device."""
    if isinstance(index, Tensor):
        return index
    try:
        return torch.as_tensor(index, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{owner}: the index {index!r} must be integers: an int, a list, an array or a tensor; for a slice, "
            "torch.arange(start, stop)."
        ) from error


def flat_slots(owner: str, index: int | Tensor | tuple, layout: Layout) -> Tensor:
    """Convert TorchRL's index to flat slots, int64 [n], on the device of the index.

    Args:
        owner: the class that error messages name.
        index: an int, a tensor [n] or [n, ndim], or a tuple of ndim tensors.
        layout: the layout of the storage.

    Raises:
        TypeError: if the index does not hold integers.
        ValueError: if the last dimension of the index is not ndim > 1.
        IndexError: if ndim > 1 and an index is out of range. For ndim = 1 the caller must check the range. In graphs
            and on accelerators, such a row becomes slot -1, unless ``layout.validate``.
    """
    shape = layout.shape
    if len(shape) == 1 and isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64:
        return index
    coordinates = (
        torch.stack([_as_tensor(owner, i) for i in index], -1) if isinstance(index, tuple) else _as_tensor(owner, index)
    )
    # an empty list becomes a float tensor
    if coordinates.numel() and (coordinates.dtype.is_floating_point or coordinates.dtype == torch.bool):
        raise TypeError(f"{owner}: index must hold integers, got {coordinates.dtype}.")
    coordinates = coordinates.to(torch.int64)
    if len(shape) == 1:
        return coordinates.reshape(-1)
    if coordinates.ndim < 1 or coordinates.shape[-1] != len(shape):
        raise ValueError(
            f"{owner}: index has shape {tuple(coordinates.shape)}; a storage of shape {shape} needs [n, {len(shape)}]."
        )
    coordinates = coordinates.reshape(-1, len(shape))
    outside = torch.stack([(i < 0) | (i >= n) for i, n in zip(coordinates.unbind(1), shape, strict=True)]).any(0)
    raise_if(
        outside.any, lambda: out_of_range(owner, coordinates[outside][0].tolist(), shape), skip_on=layout.skip_checks_on
    )
    return row_major(coordinates, shape).masked_fill(outside, -1)


def out_of_range(owner: str, index: int | list[int], shape: tuple[int, ...]) -> IndexError:
    """The error for an index outside of a storage of shape ``shape``."""
    return IndexError(f"{owner}: index {index} is out of range for a storage of shape {shape}.")


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
