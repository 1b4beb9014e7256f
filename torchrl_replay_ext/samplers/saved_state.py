"""Checks of the saved states of samplers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_replay_ext.core.layout import Layout


def require_keys(call: str, state: dict[str, Any], expected: set[str]) -> None:
    """Raise ValueError if a state does not have exactly the expected entries; ``call`` names the method in errors."""
    if set(state) == expected:
        return
    raise ValueError(
        f"{call}: the state was saved by another sampler, or one with other arguments. Missing entries: "
        f"{_some(expected - set(state))}; unexpected entries: {_some(set(state) - expected)}."
    )


def _some(names: set[str]) -> str:
    """At most three names, and the number of the others."""
    shown, others = sorted(names)[:3], max(len(names) - 3, 0)
    return ", ".join(shown) + f" and {others} more" * (others > 0) if shown else "none"


def require_shapes(call: str, state: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raise ValueError if a tensor of a state has another shape than the one in ``tensors``."""
    for key, tensor in tensors.items():
        if tensor.shape != state[key].shape:
            raise ValueError(
                f"{call}: {key} has shape {tuple(state[key].shape)}, expected {tuple(tensor.shape)}; the sampler must "
                "have the arguments of the one that saved the state, such as capacity and num_streams."
            )


def layout_of_state(call: str, state: dict[str, Any], current: Layout, capacity: int | None) -> Layout | None:
    """The layout that a state needs; None if an empty sampler without a storage saved the state.

    Args:
        call: the method that error messages name.
        state: the saved state.
        current: the current layout of the sampler.
        capacity: capacity of the sampler; None if not given.

    Raises:
        ValueError: if the state belongs to a storage of another shape, or has fewer slots than ``capacity``.
    """
    size = state["generation"].numel()
    saved = tuple(state["storage_shape"].tolist()) or None
    is_empty = int(state["num_writes"]) == int(state["num_writes_at_clear"])
    if is_empty and (size < current.size or (saved is None and current.known)):
        return None
    shape = current.shape if current.known else None
    if shape is not None and saved not in (None, shape):
        raise ValueError(f"{call}: the state belongs to a storage of shape {saved}, not {shape}.")
    if capacity is not None and size < capacity:
        raise ValueError(f"{call}: the state has {size} slots, but the sampler has {capacity}.")
    shape = saved or shape
    return current._replace(shape=shape or (size,), size=size, known=shape is not None)
