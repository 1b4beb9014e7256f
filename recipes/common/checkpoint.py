"""Saves and loads the complete state of a run in one file."""

import zipfile
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.common.errors import ConfigError, reason
from recipes.common.files import CHECKPOINT, atomic_write


def save_checkpoint(run_dir: Path, **components: Any) -> None:
    """Write the components to `run_dir/checkpoint.zip`, a file of torch.save that is replaced atomically.

    Args:
        run_dir: directory of the run.
        **components: objects with `state_dict()`, or dicts of numbers.
    """
    states = {name: each if isinstance(each, dict) else each.state_dict() for name, each in components.items()}
    with atomic_write(run_dir / CHECKPOINT) as path, path.open("wb") as file:
        torch.save(_compact(states), file)


def load_checkpoint(run_dir: Path, device: torch.device, **components: Any) -> dict[str, Any]:
    """Restore the components in place from `run_dir/checkpoint.zip`.

    Args:
        run_dir: directory of the run.
        device: device of the restored tensors.
        **components: components with the same names as in save_checkpoint, or some of them.

    Returns:
        The states of all components of the checkpoint.

    Raises:
        ConfigError: if the checkpoint is damaged (raised before anything is restored).
    """
    path = run_dir / CHECKPOINT
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"{damaged} is corrupt")
        states = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # damaged archives raise many kinds of errors
        raise ConfigError(f"{path} is damaged: {reason(error)}") from error
    for name, component in components.items():
        if isinstance(component, dict):
            component.update(states[name])
        else:
            component.load_state_dict(states[name])
    return states


def _compact(state: Any) -> Any:
    """Copy tensors that are views of larger storages: torch.save would save the whole storage."""
    if isinstance(state, Tensor):
        return state.clone() if state.untyped_storage().nbytes() > state.nbytes else state
    if isinstance(state, dict):
        compact = copy(state)  # OrderedDict.copy() would drop its attributes
        for key, value in state.items():
            compact[key] = _compact(value)
        return compact
    if type(state) in (list, tuple):
        return type(state)(map(_compact, state))
    return state
