"""Checks of saved states."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_replay_ext.core.write_log import Layout


def require_keys(call: str, state: dict[str, Any], expected: set[str]) -> None:
    """ValueError if the entries of a state are not the expected ones."""
    if set(state) == expected:
        return
    if {"stamp", "clock"} <= set(state):
        raise ValueError(
            f"{call}: this state was saved by torchrl_replay_ext before its write log was introduced, and cannot be "
            "loaded. Load it with the version that saved it, or start with new priorities: leave the sampler's state "
            "out, and the stored transitions get the priority of new ones."
        )
    raise ValueError(f"{call}: missing {sorted(expected - set(state))}, unexpected {sorted(set(state) - expected)}.")


def require_shapes(call: str, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """ValueError if a tensor of a state has another shape than ours."""
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape:
            raise ValueError(f"{call}: {key} has shape {tuple(state[key].shape)}, expected {tuple(tensor.shape)}.")


def layout_of(
    call: str, state: dict[str, Any], current: Layout, shape: tuple[int, ...] | None, capacity: int | None
) -> Layout | None:
    """The layout that a state needs; None if it is that of a sampler that had no storage yet.

    Args:
        call: for messages.
        state: the state.
        current: the sampler's layout.
        shape: of the sampler's storage, if known.
        capacity: of the sampler, if given.

    Raises:
        ValueError: if the state is for another storage.
    """
    size = state["generation"].numel()
    saved = tuple(state["storage_shape"].tolist()) or None
    is_empty = int(state["num_writes"]) == int(state["num_writes_at_clear"])
    if is_empty and (size < current.size or (saved is None and current.known)):
        return None
    if shape is not None and saved not in (None, shape):
        raise ValueError(f"{call}: the state is for a storage of shape {saved}, not {shape}.")
    if capacity is not None and size < capacity:
        raise ValueError(f"{call}: the state has {size} slots, the sampler {capacity}.")
    shape = saved or shape
    return current._replace(shape=shape or (size,), size=size, known=shape is not None)
