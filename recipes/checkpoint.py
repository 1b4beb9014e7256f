"""A run's whole state in one file."""

import zipfile
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.checkpoint import Checkpoint, CheckpointAdapter, CheckpointError, StateDictCheckpointAdapter

from recipes.files import atomic_write
from recipes.run import CHECKPOINT, ConfigError


def save_checkpoint(run_dir: Path, **components: Any) -> None:
    """Writes the components to `run_dir/checkpoint.zip`, replacing the last one atomically.

    Args:
        run_dir: directory of the run.
        **components: objects with `state_dict()`, or JSON-compatible values.

    Raises:
        OSError: the disk is full, for example; the last checkpoint is as it was.
    """
    with atomic_write(run_dir / CHECKPOINT) as path:
        _bind(components).save(path)


def load_checkpoint(run_dir: Path, device: torch.device, **components: Any) -> None:
    """Restores the components, in place, from `run_dir/checkpoint.zip`.

    Args:
        run_dir: directory of the run.
        device: where tensors go.
        **components: as they were saved; dicts and lists are filled in place.

    Raises:
        ConfigError: the checkpoint is damaged, before anything is restored; it does not fit, as when it comes from a
            CUDA machine and there is none here; or there is no room to unpack it, where temporary files are.
    """
    path = run_dir / CHECKPOINT
    _require_whole(path)
    try:
        _bind(components).load(path, map_location=device)
    except (CheckpointError, OSError) as error:
        raise ConfigError(f"{run_dir}: {error}") from error


def _require_whole(path: Path) -> None:
    """ConfigError if a part of the archive is missing or is not what was written (CRC-32)."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            records = Checkpoint.manifest(path)["components"].values()
            listed = {f"{record['path']}/{name}" for record in records for name in record["files"]}
            missing = listed.difference(archive.namelist())
    except Exception as error:  # damage has many faces: wrong flags, lengths, names, compressions
        raise ConfigError(f"{path} is damaged: {error}") from error
    if damaged is not None or missing:
        raise ConfigError(f"{path} is damaged: {damaged or min(missing)} is not what was written")


class _TorchFile(CheckpointAdapter):
    """State dicts as one file of torch.save.

    TorchRL's adapter maps files into memory and writes there: on a full disk that kills the process (SIGBUS).
    """

    adapter_id = StateDictCheckpointAdapter.adapter_id

    def save(self, component: Any, path: Path, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write the state of ``component`` under ``path``."""
        path.mkdir(parents=True, exist_ok=True)
        try:
            with (path / StateDictCheckpointAdapter.state_torch).open("wb") as file:
                torch.save(_compact(component.state_dict(*args, **kwargs)), file)
        except RuntimeError as error:
            # torch's own, as it cleans up after the file's
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    def load(self, component: Any, path: Path, **options: Any) -> None:
        """Restore the state of ``component``."""
        StateDictCheckpointAdapter().load(component, path, **options)


def _compact(state: Any) -> Any:
    """The same without what tensors that are views do not show, which would be saved too."""
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
        # A replay buffer would offer dump/load, which leaves its storage mapped to the checkpoint's files.
        adapter = _TorchFile() if hasattr(component, "load_state_dict") else None
        checkpoint.register(name, component, adapter=adapter)
    return checkpoint
