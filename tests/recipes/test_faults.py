"""Kills, full disks and damaged files."""

import contextlib
import os
import resource
import signal
import subprocess
import time

import pytest

from recipes.common import run as training
from recipes.common.cli import FAILED
from recipes.common.errors import ConfigError
from recipes.common.files import read_csv
from tests.recipes.runs import FILES, Recipe, command, tiny, wait_until

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
    with pytest.raises(ConfigError, match=r"checkpoint.zip is damaged: ") as error:
        recipe.resume(stopped)
    assert "\n" not in str(error.value)
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


@contextlib.contextmanager
def limited(size):
    """No file of this process may become larger, once the checkpoint has been unpacked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    load = training.load_checkpoint

    def load_and_limit(*arguments, **components):
        load(*arguments, **components)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    training.load_checkpoint = load_and_limit
    try:
        yield
    finally:
        training.load_checkpoint = load
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_files_that_cannot_grow(stopped, capfd):
    """A run whose checkpoints cannot be written goes to its end, and can be gone on with from the one before."""
    before = contents(stopped)
    with limited(4096):
        table = recipe.train(recipe.resumed(stopped, "checkpoint_interval=16"), stopped, FAILED)
    errors = capfd.readouterr().err
    for step in (64, 80, 96):
        assert f"warning: step {step} could not be saved in {stopped}: File too large\n" in errors
    assert f"the final checkpoint could not be saved; continue with resume={stopped}\n" in errors
    after = contents(stopped)
    assert after["checkpoint.zip"] == before["checkpoint.zip"]
    assert after.keys() <= before.keys()
    assert [row["env_steps"] for row in table] == ["32", "64", "96"]
    assert [row["env_steps"] for row in recipe.resume(stopped)] == ["32", "64", "96"]


def test_killed_run(tmp_path):
    """SIGKILL while it saves one checkpoint after the other."""
    words = ["dqn.total_steps=3200", "dqn.train_interval=64", "dqn.num_evaluations=10", "dqn.buffer_size=1000"]
    run_dir = tmp_path / "killed"
    words = [*recipe.tiny, *words, "checkpoint_interval=64", f"hydra.run.dir={run_dir}"]
    process = command("dqn", *words, stdout=subprocess.DEVNULL)
    wait_until((run_dir / "checkpoint.zip").is_file)
    time.sleep(0.3)
    process.kill()
    _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    table = recipe.resume(run_dir, "checkpoint_interval=100000")
    assert [row["env_steps"] for row in table] == [str(320 * number) for number in range(1, 11)]
