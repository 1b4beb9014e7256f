"""Checks that a saved state fits before it is loaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.core.event_tables import EventTables


def require_fitting(call: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless a state has the keys of ``tensors``, each with the same shape and dtype.

    Args:
        call: the method that error messages name.
        state: the saved state.
        tensors: what it replaces.
    """
    missing, unexpected = tensors.keys() - state.keys(), state.keys() - tensors.keys()
    if missing or unexpected:
        raise ValueError(
            f"{call}: the state was saved by another sampler, or one with other arguments. Missing entries: "
            f"{_some(missing)}; unexpected entries: {_some(unexpected)}."
        )
    for key, tensor in tensors.items():
        expected = f"shape {tuple(tensor.shape)} and {tensor.dtype}"
        saved = state[key]
        actual = f"shape {tuple(saved.shape)} and {saved.dtype}" if isinstance(saved, Tensor) else type(saved).__name__
        if actual != expected:
            raise ValueError(
                f"{call}: the entry {key} has {actual}, expected {expected}; the sampler must have the arguments of "
                "the one that saved the state, such as capacity and num_streams."
            )


def _some(names: set[str]) -> str:
    """At most three names, and the number of the others."""
    shown, others = sorted(names)[:3], max(len(names) - 3, 0)
    return ", ".join(shown) + f" and {others} more" * (others > 0) if shown else "none"


def shape_of(call: str, state: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the storage for which a sampler saved its state; ValueError if there is none."""
    shape, generation = state.get("storage_shape"), state.get("generation")
    if isinstance(shape, Tensor) and isinstance(generation, Tensor) and shape.dtype == torch.int64 and shape.ndim == 1:
        sizes = tuple(shape.tolist())
        if min(sizes, default=0) > 0 and math.prod(sizes) == generation.numel():
            return sizes
    raise ValueError(
        f"{call}: the entries storage_shape and generation must be the sizes of a storage, int64 [ndim], and one "
        "number per slot, int64 [slots]. Pass the state_dict() of a sampler of this package."
    )


def lanes_of(state: Mapping[str, Any]) -> Any:
    """The lanes of the index of episodes in a state, see :meth:`EpisodeReader.adopt_streams`; None without one."""
    return state.get("episodes_lanes", state.get("slices_lanes"))


def require_fitting_tables(call: str, state: Mapping[str, Any], tables: EventTables, num_slots: int) -> None:
    """Raise ValueError unless a state of event tables fits ``tables`` in a storage of ``num_slots`` slots."""
    if not tables.is_allocated:
        tables = copy.deepcopy(tables)
        tables.allocate(num_slots, torch.device("cpu"))
    if not torch.equal(torch.as_tensor(state["begins"], device="cpu"), tables.begins):
        raise ValueError(
            f"{call}: the state is for tables of other capacities; create the tables with those of the saved ones."
        )
    saved_slots = len(state["number"])
    if not saved_slots == num_slots == tables.num_slots:
        raise ValueError(
            f"{call}: the state of the tables is for {saved_slots} slots instead of {num_slots}; create the buffer "
            "with the storage size of the saved one."
        )
    require_fitting(call, state, tables.tensors())
