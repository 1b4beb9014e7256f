"""Configurations of the recipes as tests need them, and what runs leave."""

import contextlib
import csv
import importlib.util
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from recipes import training
from recipes.run import parse_config, resumed_config

ROOT = Path(__file__).parents[2]


class Composer:
    """Composes configurations of a recipe from overrides.

    Args:
        name: the recipe's.
        schema: its configuration's class.
        tiny: overrides for a run of less than a second.
    """

    def __init__(self, name, schema, tiny):
        self.name, self.schema, self.tiny = name, schema, tiny

    def composed(self, *overrides):
        with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "recipes" / "conf")):
            return compose(self.name, overrides=list(overrides))

    def configuration(self, *overrides):
        return self.composed(*self.tiny, *overrides)

    def settings(self, *overrides):
        """The recipe's hyperparameters, checked, of the published configuration."""
        return parse_config(self.composed(*overrides), self.schema).learning

    def resumed(self, run_dir, *overrides):
        overrides = [f"resume={run_dir}", *overrides]
        return resumed_config(self.configuration(*overrides), run_dir, overrides)


def tiny(group, **more):
    """Overrides for a run of less than a second; settings of None are left out."""
    settings = {
        "total_steps": 96,
        "learning_starts": 32,
        "train_interval": 16,
        "gradient_steps": 2,
        "batch_size": 8,
        "buffer_size": 64,
        "num_evaluations": 3,
        "evaluation_episodes": 1,
        "hidden_sizes": "[8, 8]",
    } | more
    return [
        *(f"{group}.{key}={value}" for key, value in settings.items() if value is not None),
        "env.reward_threshold=null",
    ]


def stop_after(monkeypatch, batches):
    """Runs are interrupted after so many batches, as if by Ctrl-C."""
    answers = iter([False] * batches)
    monkeypatch.setattr(
        training, "interruption", lambda: contextlib.nullcontext(lambda: next(answers, True) is not False)
    )


def rows(run_dir):
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(run_dir):
    """The components of a checkpoint, as they were saved."""
    components = {}
    with zipfile.ZipFile(run_dir / "checkpoint.zip") as archive:
        for name, record in json.loads(archive.read("manifest.json"))["components"].items():
            (file,) = record["files"]
            data = archive.read(f"{record['path']}/{file}")
            components[name] = json.loads(data) if file.endswith(".json") else torch.load(io.BytesIO(data))
    return components


def leaves(value, path=""):
    """What a nested state holds, tensors as bytes."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = {path: (type(value).__name__, len(value))}
        for key, item in items:
            found |= leaves(item, f"{path}/{key}")
        return found
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, value.shape, value.cpu().contiguous().numpy().tobytes())}
    return {path: value.tobytes() if isinstance(value, np.ndarray) else repr(value)}


def assert_same_runs(one, other):
    """Two runs left the same checkpoint, bit by bit, and the same progress.csv, but for the time they took."""
    tables = [rows(run_dir) for run_dir in (one, other)]
    for row in tables[0] + tables[1]:
        del row["wall_time"]
    assert tables[0] == tables[1]
    states = [checkpoint(run_dir) for run_dir in (one, other)]
    for state in states:
        del state["counters"]["wall_time"]
    one, other = map(leaves, states)
    assert one.keys() == other.keys()
    assert not [path for path in one if one[path] != other[path]]


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")
