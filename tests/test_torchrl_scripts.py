"""TorchRL's DQN, TD3 and SAC scripts, changed by the diffs of CONVERTING.md, run and resume with the samplers.

TorchRL's package has no scripts. TORCHRL_REPOSITORY names a clone of https://github.com/pytorch/rl, or its git directory.
"""

import io
import math
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import torchrl_replay_ext
from tests.test_examples import ROOT

GUIDE = (ROOT / "torchrl_replay_ext" / "CONVERTING.md").read_text(encoding="utf-8")
REPOSITORY = os.environ.get("TORCHRL_REPOSITORY")
SIZE = 10_000


class Hunk(NamedTuple):
    file: str
    old: list[str]
    new: list[str]


def guide_diffs(heading: str) -> list[str]:
    """The diffs of a section of the guide."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert section, f"CONVERTING.md has no section {heading!r}"
    return re.findall(r"^```diff\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)


def hunks(diff: str, file: str) -> list[Hunk]:
    """The parts of a diff that has no line numbers. ``file`` is changed until a line ``--- name`` names another."""
    found = [Hunk(file, [], [])]
    for line in diff.splitlines():
        if line.startswith("--- "):
            file = line.removeprefix("--- ")
        if line.startswith(("--- ", "@@")):
            found.append(Hunk(file, [], []))
            continue
        assert line[:1] in ("", " ", "+", "-"), f"{line!r} is not a line of a diff"
        if not line.startswith("+"):
            found[-1].old.append(line[1:])
        if not line.startswith("-"):
            found[-1].new.append(line[1:])
    return [hunk for hunk in found if hunk.old or hunk.new]


def apply(diff: str, folder: Path, file: str) -> None:
    """Replace the lines of each hunk, which must occur exactly once in their file."""
    for hunk in hunks(diff, file):
        path = folder / hunk.file
        lines = path.read_text(encoding="utf-8").splitlines()
        places = [i for i in range(len(lines)) if hunk.old and lines[i : i + len(hunk.old)] == hunk.old]
        text = "\n".join(hunk.old)
        assert len(places) == 1, f"{len(places)} places of {hunk.file} have the lines of this hunk, not one:\n{text}"
        lines[places[0] : places[0] + len(hunk.old)] = hunk.new
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def sampler_of(diff: str) -> str:
    """The expression that a diff passes as ``sampler=``."""
    (expression,) = re.findall(r"^\+ *sampler=(.*),(?:  #.*)?$", diff, re.MULTILINE)
    return expression


def with_sampler(diff: str, expression: str | None) -> str:
    """The diff with another sampler in place of its own."""
    if expression is None:
        return diff
    names = ", ".join(sorted(set(re.findall(r"\b([A-Z]\w+)\(", expression))))
    diff = re.sub(r"^\+from torchrl_replay_ext import .*$", f"+from torchrl_replay_ext import {names}", diff, flags=re.M)
    return diff.replace(sampler_of(diff), expression)


class Script:
    """One of TorchRL's folders, exported at the commit that the guide names.

    Args:
        path: an empty folder.
        file: the script, for example "td3/td3.py".
        overrides: of its configuration.
    """

    def __init__(self, path: Path, file: str, overrides: list[str]):
        assert REPOSITORY is not None
        (commit,) = set(re.findall(r"github\.com/pytorch/rl/(?:blob|tree)/(\w+)/sota-implementations", GUIDE))
        folder = f"sota-implementations/{Path(file).parent}"
        export = subprocess.run(["git", "-C", REPOSITORY, "archive", commit, folder], capture_output=True)
        assert export.returncode == 0, export.stderr.decode()
        with tarfile.open(fileobj=io.BytesIO(export.stdout)) as archive:
            archive.extractall(path, filter="data")
        self.folder, self.name, self.overrides = path / folder, Path(file).name, overrides

    def apply(self, diff: str) -> None:
        apply(diff, self.folder, self.name)

    def run(self, num_frames: int, *overrides: str) -> None:
        command = [sys.executable, self.name, *self.overrides, f"collector.total_frames={num_frames}", *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-2_000:]}\n{result.stderr[-8_000:]}"


def load(path: Path, sampler, writer=None) -> TensorDictReplayBuffer:
    """The buffer of a script's checkpoint."""
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(SIZE), sampler=sampler, writer=writer, batch_size=32)
    Checkpoint(replay_buffer=buffer).load(path, components={"replay_buffer"})
    sampler.check_valid()
    return buffer


def check(buffer: TensorDictReplayBuffer, num_frames: int, num_updates: int) -> None:
    """The sampler has all transitions, and the TD errors of all updates were applied."""
    stats = {key: value.item() for key, value in buffer.sampler.stats().items()}
    assert len(buffer) == stats["num_items"] == num_frames
    assert stats["dropped_updates"] == stats["rejected_updates"] == 0
    print(num_updates, stats)
    assert buffer.sample()["index"].shape == (32,)
