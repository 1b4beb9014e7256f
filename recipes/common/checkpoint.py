"""Saves and loads the complete state of a run in one file."""

import zipfile
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.checkpoint import Checkpoint, CheckpointAdapter, CheckpointError, StateDictCheckpointAdapter

from recipes.common.cli import CHECKPOINT
from recipes.common.errors import ConfigError
from recipes.common.files import atomic_write


def save_checkpoint(run_dir: Path, **components: Any) -> None:
    """Write the components to `run_dir/checkpoint.zip`; an existing checkpoint is replaced atomically.

    Args:
        run_dir: directory of the run.
        **components: objects with `state_dict()`, or JSON-compatible values.

    Raises:
        OSError: if the file cannot be written, for example because the disk is full. The old checkpoint is kept.
    """
    with atomic_write(run_dir / CHECKPOINT) as path:
        _bind(components).save(path)


def load_checkpoint(run_dir: Path, device: torch.device, **components: Any) -> None:
    """Restore the components in place from `run_dir/checkpoint.zip`.

    Args:
        run_dir: directory of the run.
        device: device of the restored tensors.
        **components: components with the same names as in save_checkpoint; dicts and lists are filled in place.

    Raises:
        ConfigError: if the checkpoint is damaged (raised before anything is restored), if it does not match the
            components or the hardware, such as a checkpoint from CUDA on a host without it, or if the directory of
            temporary files has no space to unpack it.
    """
    path = run_dir / CHECKPOINT
    _require_whole(path)
    try:
        _bind(components).load(path, map_location=device)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{run_dir}: {error}") from error


def _require_whole(path: Path) -> None:
    """Raise ConfigError if a file of the archive is missing or its CRC-32 does not match."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            records = Checkpoint.manifest(path)["components"].values()
            listed = {f"{record['path']}/{name}" for record in records for name in record["files"]}
            missing = listed.difference(archive.namelist())
    except Exception as error:  # damaged archives raise many kinds of errors
        raise ConfigError(f"{path} is damaged: {error}") from error
    if damaged is not None or missing:
        raise ConfigError(f"{path} is damaged: {damaged or min(missing)} is missing or corrupt")


class _TorchFile(CheckpointAdapter):
    """Saves a state dict with torch.save as one file.

    TorchRL's adapter writes through memory-mapped files; on a full disk, that kills the process (SIGBUS).
    """

    adapter_id = StateDictCheckpointAdapter.adapter_id

    def save(self, component: Any, path: Path, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write the state of ``component`` under ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        try:
            with (path / StateDictCheckpointAdapter.state_torch).open("wb") as file:
                torch.save(_compact(component.state_dict(*args, **kwargs)), file)
        except RuntimeError as error:
            # torch raises its own error while it handles the OSError of the file
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def load(self, component: Any, path: Path, **options: Any) -> None:
        """Restore the state of ``component``."""
        StateDictCheckpointAdapter().load(component, path, **options)


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


def _bind(components: dict[str, Any]) -> Checkpoint:
    checkpoint = Checkpoint(format="archive")
    for name, component in components.items():
        # Do not use dump/load of a replay buffer: after it, the storage is mapped to the checkpoint's files.
        adapter = _TorchFile() if hasattr(component, "load_state_dict") else None
        checkpoint.register(name, component, adapter=adapter)
    return checkpoint
