"""Kills and damaged files."""

import os

import pytest

from recipes.common.errors import ConfigError
from recipes.common.files import read_csv
from tests.recipes.runs import FILES, Recipe, tiny

recipe = Recipe("dqn", [*tiny("dqn"), "sampler=per"])


@pytest.fixture
def stopped(tmp_path):
    """The directory of a run that was interrupted after half of its steps."""
    recipe.stop(tmp_path / "stopped", 3)
    return tmp_path / "stopped"


def contents(run_dir):
    return {path.name: path.read_bytes() for path in run_dir.iterdir()}


def cut(path, keep=2 / 3):
    os.truncate(path, int(path.stat().st_size * keep))


def flip(path, where=0.5):
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip])
def test_damaged_checkpoints_are_refused_before_anything_is_changed(stopped, damage):
    damage(stopped / "checkpoint.zip")
    before = contents(stopped)
    with pytest.raises(ConfigError, match=r"checkpoint.zip is damaged: "):
        recipe.resume(stopped)
    assert contents(stopped) == before


def test_what_a_kill_leaves_does_no_harm(stopped):
    """Files that were not complete yet, and a row of the table that is cut off, or follows the checkpoint."""
    (stopped / ".checkpoint.zip.partial").mkdir()
    (stopped / ".checkpoint.zip.partial" / "checkpoint.zip").write_bytes(b"PK")
    (stopped / ".config.yaml.partial").mkdir()
    line = (stopped / "progress.csv").read_text().splitlines()[-1]
    for more in (f"64{line[2:]}\r\n32,4", "4", f"{line}\r"):
        with (stopped / "progress.csv").open("a", newline="") as file:
            file.write(more)
        assert read_csv(stopped / "progress.csv")[0]["env_steps"] == "32"
    table = recipe.resume(stopped)
    assert [row["env_steps"] for row in table] == ["32", "64", "96"]
    assert {*contents(stopped)} == FILES
