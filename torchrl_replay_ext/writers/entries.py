"""Compares the entries of rows with those of stored rows before a write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensordict import LazyStackedTensorDict, NestedKey, unravel_key
from torch import Tensor

from torchrl_replay_ext._torchrl import is_group


def new_entries(name: str, stored: Any, data: Any, ndim: int) -> list[NestedKey]:
    """Compare rows with the stored rows. Reads no values, and stacks no stored entries.

    Args:
        name: the class that error messages name.
        stored: the stored TensorDict or tensorclass.
        data: the rows.
        ndim: number of batch dimensions of ``data``.

    Returns:
        The entries of ``data`` that the stored rows do not have.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if an entry has another dtype than in the storage.
        ValueError: if an entry has another shape than in the storage.
    """
    return list(dict.fromkeys(map(unravel_key, _compare(name, stored, data, stored.ndim, ndim, ()))))


def _compare(
    name: str, stored: Any, data: Any, stored_ndim: int, ndim: int, path: tuple[str, ...]
) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of new entries. ``data`` is None if the whole group ``path`` is missing."""
    if isinstance(data, LazyStackedTensorDict) and data.stack_dim < ndim:
        for row in data.tensordicts:
            yield from _compare(name, stored, row, stored_ndim, ndim - 1, path)
        return
    if isinstance(stored, LazyStackedTensorDict):
        # agents with different shapes, for example
        agents, dim = stored.tensordicts, ndim + stored.stack_dim - stored_ndim
        rows: Any = [None] * len(agents) if data is None else data.unbind(dim) if data.ndim > dim else ()
        if data is not None and len(rows) != len(agents):
            found = tuple(data.shape)
            raise ValueError(
                f"{name}: the entry {unravel_key(path)!r} has batch shape {found}; the storage needs "
                f"{(*found[:ndim], *stored.shape[stored_ndim:])}."
            )
        for number, (agent, row) in enumerate(zip(agents, rows, strict=True)):
            yield from _compare(name, agent, row, stored_ndim, ndim, (*path, str(number)))
        return
    try:
        columns: dict[Any, Any] = {} if data is None else dict(data.items())
    except RuntimeError as error:
        raise ValueError(
            f"{name}: the parts of the entry {unravel_key(path)!r} differ in shape; those of the stored rows do not."
        ) from error
    for key, known in stored.items():
        here, column = (*path, key), columns.pop(key, None)
        if is_group(known):
            yield from _compare(name, known, column if is_group(column) else None, stored_ndim, ndim, here)
        elif isinstance(known, Tensor) and here != ("index",):
            needed = (*(() if data is None else data.shape[:ndim]), *known.shape[stored_ndim:])
            _require_like(name, unravel_key(here), known, column, needed)
    for key, column in columns.items():
        if is_group(column):
            for inner in column.keys(True, True):
                yield (*path, key, inner)
        elif isinstance(column, Tensor) and (path or key != "index"):
            yield (*path, key)


def _require_like(name: str, key: NestedKey, known: Tensor, column: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(column, Tensor):
        raise KeyError(
            f"{name}: the data has no entry {key!r}, but the stored rows have it. The environment, policy or transform "
            "that wrote it must write it into every row. For rows with other entries use a new storage."
        )
    if column.is_meta and not known.is_meta:
        raise ValueError(f"{name}: the entry {key!r} is on the meta device and has no values.")
    if tuple(column.shape) != shape:
        raise ValueError(f"{name}: the entry {key!r} has shape {tuple(column.shape)}; the storage needs {shape}.")
    if known.dtype != column.dtype:
        raise TypeError(
            f"{name}: the entry {key!r} has dtype {column.dtype}; the storage needs {known.dtype}. Convert it before "
            f"the write: data[{key!r}] = data[{key!r}].to({known.dtype})."
        )
