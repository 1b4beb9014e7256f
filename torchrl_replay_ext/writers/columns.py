"""Reads entries with one value per transition from written data."""

from __future__ import annotations

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_replay_ext._torchrl import entry_of


def column_of(data: TensorDictBase, key: NestedKey, *, required: bool) -> Tensor | None:
    """The entry ``key`` of ``data`` [n], one value per row; None if it is missing and not ``required``."""
    column = entry_of(data, key)
    if column is None:
        if required:
            raise KeyError(
                f"EventTableWriter: the data has no entry {key!r}; pass the name of the right entry as an "
                "argument, or let the environment or collector write it."
            )
        return None
    if column.numel() != data.shape[0]:
        raise ValueError(
            f"EventTableWriter: the entry {key!r} has shape {tuple(column.shape)} for {data.shape[0]} transitions; "
            "one value per transition is needed."
        )
    return column.detach()


def holds_integers(column: Tensor) -> bool:
    """True if the dtype of ``column`` is an integer type."""
    return not (column.dtype.is_floating_point or column.dtype.is_complex or column.dtype == torch.bool)


def on_cpu(columns: dict[str | int, Tensor]) -> dict[str | int, np.ndarray]:
    """Copy ``columns``, n bools or integers each, to the CPU, [n]. A copy from an accelerator waits: make only one."""
    remote = {key: column.reshape(-1) for key, column in columns.items() if not column.is_cpu}
    result = {key: column.numpy().reshape(-1) for key, column in columns.items() if key not in remote}
    if remote:
        device = next(iter(remote.values())).device
        packed = torch.stack([column.to(device, torch.int64) for column in remote.values()]).cpu().numpy()
        for (key, column), values in zip(remote.items(), packed, strict=True):
            result[key] = values.astype(bool) if column.dtype == torch.bool else values
    return result
