"""Checks of the saved states of samplers."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.layout import Layout


def require_keys(call: str, state: dict[str, Any], expected: set[str]) -> None:
    """Raise ValueError if a state does not have exactly the expected entries; ``call`` names the method in errors."""
    if set(state) != expected:
        raise ValueError(
            f"{call}: the state was saved by another sampler, or one with other arguments. Missing entries: "
            f"{_some(expected - set(state))}; unexpected entries: {_some(set(state) - expected)}."
        )
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{call}: {key} is {type(value).__name__}, expected a tensor; the state was damaged.")


def _some(names: set[str]) -> str:
    """At most three names, and the number of the others."""
    shown, others = sorted(names)[:3], max(len(names) - 3, 0)
    return ", ".join(shown) + f" and {others} more" * (others > 0) if shown else "none"


def require_fitting(call: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a tensor of a state has another shape or dtype than that in ``tensors``, or NaN or inf."""
    for key, tensor in tensors.items():
        saved = state[key]
        if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{call}: {key} has shape {tuple(saved.shape)} and {saved.dtype}, expected {tuple(tensor.shape)} and "
                f"{tensor.dtype}; the sampler must have the arguments of the one that saved the state, such as "
                "capacity and num_streams."
            )
        if not bool(saved.isfinite().all()):
            raise ValueError(f"{call}: {key} has NaN or infinite numbers; the state was damaged.")


def require_valid_tables(call: str, state: Mapping[str, Any], tables: EventTables, num_slots: int) -> None:
    """Raise ValueError if a state of event tables for ``num_slots`` slots cannot be loaded; a copy is tried."""
    trial = copy.deepcopy(tables)
    if not trial.is_allocated:
        trial.allocate(num_slots, torch.device("cpu"))
    if not torch.equal(state["begins"].cpu(), trial.begins) or num_slots != trial.num_slots:
        raise ValueError(
            f"{call}: the state is for tables of other capacities or another storage size ({num_slots} slots); create "
            "the buffer with the same capacities and size."
        )
    require_fitting(call, state, trial.tensors())
    trial.load(state)
    try:
        trial.check_valid()
    except (AssertionError, IndexError, RuntimeError) as error:
        raise contradiction(call, error) from error


def require_open_episodes(call: str, episodes: Tensor, num_slots: int) -> None:
    """Raise ValueError unless ``episodes`` has stream, slot, number and trajectory of open episodes, int64 [n, 4]."""
    fits = episodes.ndim == 2 and episodes.shape[1] == 4 and episodes.dtype == torch.int64
    if not fits or bool(((episodes[:, 1] < 0) | (episodes[:, 1] >= num_slots)).any()):
        raise ValueError(
            f"{call}: open must be torch.int64 of shape (n, 4), with slots of {num_slots} in the second column; the "
            "state was damaged."
        )


def contradiction(call: str, error: Exception) -> ValueError:
    """The error for entries that fit, but not together."""
    return ValueError(f"{call}: entries contradict each other: {error}; the state was damaged.")


def layout_of_state(call: str, state: dict[str, Any], current: Layout) -> Layout | None:
    """The layout that a state needs; None if it is the state of an empty sampler for another storage.

    Args:
        call: the method that error messages name.
        state: the saved state.
        current: the current layout of the sampler.

    Raises:
        ValueError: if the state belongs to a storage of another shape.
    """
    given, size = state["storage_shape"], state["generation"].numel()
    if given.ndim != 1 or given.dtype != torch.int64 or bool((given < 1).any()) or math.prod(given.tolist()) != size:
        raise ValueError(
            f"{call}: storage_shape is {given.tolist()}, expected the positive sizes of a storage of {size} slots, the "
            "length of the entry generation; the state was damaged."
        )
    shape = tuple(given.tolist())
    if shape == current.shape:
        return current
    if not bool(state["generation"].any()):
        return None
    if current.known:
        raise ValueError(f"{call}: the state belongs to a storage of shape {shape}, not {current.shape}.")
    return current._replace(shape=shape, known=True)
