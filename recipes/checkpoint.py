"""A run's whole state in one file."""

import os
from pathlib import Path
from typing import Any

import torch
from torchrl.checkpoint import Checkpoint, CheckpointError, StateDictCheckpointAdapter

from recipes.run import CHECKPOINT, ConfigError


def save_checkpoint(run_dir: Path, **components: Any) -> None:
    """Writes the components to `run_dir/checkpoint.zip`, replacing the last one atomically.

    Args:
        run_dir: directory of the run.
        **components: objects with `state_dict()`, or JSON-compatible values.
    """
    # Checkpoint.save moves the old file away before the new one is in place: give it a name of its own.
    partial = run_dir / f"{CHECKPOINT}.partial"
    _bind(components).save(partial)
    os.replace(partial, run_dir / CHECKPOINT)


def load_checkpoint(run_dir: Path, device: torch.device, **components: Any) -> None:
    """Restores the components, in place, from `run_dir/checkpoint.zip`.

    Args:
        run_dir: directory of the run.
        device: where tensors go.
        **components: as they were saved; dicts and lists are filled in place.

    Raises:
        ConfigError: the checkpoint does not fit, as when it comes from a CUDA machine and there is none here.
    """
    try:
        _bind(components).load(run_dir / CHECKPOINT, map_location=device)
    except CheckpointError as error:
        raise ConfigError(f"{run_dir}: {error}") from error


def _bind(components: dict[str, Any]) -> Checkpoint:
    checkpoint = Checkpoint(format="archive")
    for name, component in components.items():
        # A replay buffer would offer dump/load, which leaves its storage mapped to the checkpoint's files.
        adapter = StateDictCheckpointAdapter() if hasattr(component, "load_state_dict") else None
        checkpoint.register(name, component, adapter=adapter)
    return checkpoint
