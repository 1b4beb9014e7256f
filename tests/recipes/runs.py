"""Configurations of the recipes as tests need them, and what runs leave."""

import contextlib
import csv
import importlib.util
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir

from recipes.common import run as training
from recipes.common.cli import DONE, parse_config, resumed_config
from recipes.common.errors import ConfigError

ROOT = Path(__file__).parents[2]


def composed(name, *overrides):
    """The configuration of a recipe, or of another command, as Hydra composes it."""
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "recipes" / "conf")):
        return compose(name, overrides=list(overrides))


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
        return composed(self.name, *overrides)

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


TINY_R2D2 = [*tiny("r2d2", hidden_sizes="[8]", units=8, burn_in=2, sequence_length=4, target_steps=2), "num_envs=4"]


class Replay:
    """Returns these batches one after the other and keeps the batches of the updates."""

    def __init__(self, *batches):
        self.batches, self.returned = list(batches), []

    def sample(self):
        return self.batches.pop(0).clone()

    def update_tensordict_priority(self, sample):
        self.returned.append(sample)


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
    """The content of a nested state, tensors as bytes."""
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
        del row["wall_time"], row["cpu_time"]
    assert tables[0] == tables[1]
    states = [checkpoint(run_dir) for run_dir in (one, other)]
    for state in states:
        del state["counters"]["wall_time"], state["counters"]["cpu_time"]
    one, other = map(leaves, states)
    assert one.keys() == other.keys()
    assert [path for path in one if one[path] != other[path]] == []


def assert_trained(run_dir, sampler, printed):
    """A run with ``tiny`` settings left its files, finite numbers, and a last printed line about its returns."""
    table = rows(run_dir)
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    assert [int(row["updates"]) for row in table] == [0, 4, 8]
    assert all(np.isfinite(float(value)) for value in table[-1].values())
    assert any(key.startswith("sampler/") for key in table[0]) == (sampler != "uniform")
    names = {"config.yaml", "progress.csv", "learning_curve.png", "checkpoint.zip"}
    assert {path.name for path in run_dir.iterdir()} == names
    assert printed.splitlines()[-1] == (
        f"96 steps | best return {max(float(row['return_mean']) for row in table):g}, "
        f"last {float(table[-1]['return_mean']):g} | files in {run_dir}"
    )


def assert_config_error(train, config, run_dir, message):
    """The configuration is refused with this message, before a file is written."""
    with pytest.raises(ConfigError) as error:
        train(config, run_dir)
    assert message in str(error.value)
    assert not list(run_dir.iterdir())


def eager_and_compiled(train, configuration, path, *words):
    """The rows of two runs that draw the same random numbers: the first one eager, the second one compiled."""
    torch._dynamo.reset()
    tables = []
    for compiled in (False, True):
        run_dir = path / str(compiled)
        run_dir.mkdir()
        with torch._inductor.config.patch(fallback_random=True):
            assert train(configuration(*words, f"compile={compiled}"), run_dir) == DONE
        tables.append(rows(run_dir))
    return tables


def command(recipe, *words, **options):
    """Starts the command of a recipe."""
    return subprocess.Popen(
        [sys.executable, "-m", f"recipes.{recipe}", *words],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


def assert_commands(recipe, expected):
    """Runs the command of a recipe once per entry; ``expected`` maps its words to exit code and start of stderr."""
    processes = [command(recipe, *words) for words in expected]
    for process, (code, message) in zip(processes, expected.values(), strict=True):
        _, errors = process.communicate(timeout=300)
        assert process.returncode == code and errors.lstrip().startswith(message), errors


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")
