"""TorchRL's DQN, TD3 and SAC scripts, changed by the diffs of the guide, run and resume with the samplers.

TorchRL's package does not have them. TORCHRL_REPOSITORY names a clone of https://github.com/pytorch/rl.
"""

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchrl.checkpoint import Checkpoint
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import torchrl_replay_ext
from tests.test_examples import ROOT

# the pages with diffs
PAGES = ("CONVERTING.md", "guide/checkpoints.md")
GUIDE = "\n".join((ROOT / "torchrl_replay_ext" / page).read_text(encoding="utf-8") for page in PAGES)
REPOSITORY = os.environ.get("TORCHRL_REPOSITORY")
CHECKPOINT = "TorchRL's TD3 and SAC scripts"
SIZE = 2_000
# transitions that the first run collects, and those of both runs
FIRST, BOTH = 600, 1_200
# each run makes 10 updates after every 100 transitions, the first ones after 200
UPDATES = {FIRST: 50, BOTH: 110}

needs_torchrl = pytest.mark.skipif(
    not REPOSITORY, reason="TORCHRL_REPOSITORY does not name a clone of https://github.com/pytorch/rl"
)


def guide_diffs(heading: str) -> list[str]:
    """The diffs of a section of the guide."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    assert section, f"{' and '.join(PAGES)} have no section {heading!r}"
    return re.findall(r"^```diff\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)


def hunks(diff: str, file: str) -> Iterator[tuple[str, str, str]]:
    """The file, the old and the new lines of each part of a diff, which has no line numbers.

    ``file`` is changed until a line ``--- name`` names another.
    """
    for part in re.split(r"^@@.*\n|^(?=--- )", diff, flags=re.MULTILINE):
        if part.startswith("--- "):
            file, _, part = part.removeprefix("--- ").partition("\n")
        lines = part.splitlines()
        assert all(line[:1] in ("", " ", "+", "-") for line in lines), f"not only lines of a diff:\n{part}"
        if lines:
            old, new = ("".join(f"{x[1:]}\n" for x in lines if not x.startswith(sign)) for sign in "+-")
            yield file, old, new


def apply(diff: str, folder: Path, file: str) -> None:
    """Replace the old lines of each part, which must occur exactly once in their file."""
    for name, old, new in hunks(diff, file):
        text = "\n" + (folder / name).read_text(encoding="utf-8")
        count = text.count(f"\n{old}")
        assert count == 1, f"{count} places of {name} have the lines of this part, not one:\n{old}"
        (folder / name).write_text(text.replace(f"\n{old}", f"\n{new}")[1:], encoding="utf-8")


class Script:
    """A script of TorchRL, exported with its folder at the commit that the guide names."""

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
        """Run the script in a process of its own."""
        command = [sys.executable, self.name, *self.overrides, f"collector.total_frames={num_frames}", *overrides]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        path = self.folder / "log.txt"
        with path.open("w") as file:
            try:
                result = subprocess.run(
                    command, cwd=self.folder, env=environment, stdout=file, stderr=file, timeout=240
                )
                status = result.returncode
            except subprocess.TimeoutExpired:
                # also after an error, since the script then waits for the processes of its environments
                status = "a timeout"
        assert status == 0, f"{' '.join(command)} ended with {status}:\n{path.read_text(errors='replace')[-8_000:]}"


def load(path: Path, diff: str, prefetch: int) -> tuple[TensorDictReplayBuffer, dict[str, Any]]:
    """The buffer of a checkpoint, and the objects that the diff builds for it."""
    built: dict[str, Any] = dict(vars(torchrl_replay_ext))
    for name, value in re.findall(r"^\+ *(tables|sampler|writer) ?= ?(.*?),?(?:  #.*)?$", diff, re.MULTILINE):
        built[name] = eval(value, built)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(SIZE),
        sampler=built["sampler"],
        writer=built.get("writer"),
        batch_size=32,
        prefetch=prefetch,
    )
    Checkpoint(replay_buffer=buffer).load(path, components={"replay_buffer"})
    return buffer, built


def check_used(buffer: TensorDictReplayBuffer, diff: str, num_frames: int) -> None:
    """The sampler has every transition, drew the batches of both runs, and got all TD errors."""
    sampler: Any = buffer.sampler
    stats = {key: value.item() for key, value in sampler.stats().items()}
    assert len(buffer) == stats["num_items"] == num_frames
    assert stats["dropped_updates"] == stats["rejected_updates"] == 0
    # the episode that the end of the first run interrupted, if there is no free stream
    assert stats.get("interrupted", 0) <= (num_frames == BOTH)
    assert stats["never_updated"] < 0.5
    if anneal := re.search(r"beta=Anneal\(([\d.]+), ([\d.]+), num_updates=([\d_]+)\)", diff):
        start, end, num_updates = map(float, anneal.groups())
        assert stats["beta"] == pytest.approx(start + (end - start) * UPDATES[num_frames] / num_updates, rel=1e-6)


def run_and_resume(
    script: Script, path: Path, diff: str, prefetch: int, resume: str
) -> tuple[TensorDictReplayBuffer, dict[str, Any]]:
    """Run a script, and resume it from its checkpoint; returns what ``load`` loads at the end.

    The second run keeps the transitions of the first one, and begins trajectories of its own.
    """
    script.run(FIRST)
    first, _ = load(path, diff, prefetch)
    check_used(first, diff, FIRST)
    script.run(BOTH, resume)
    both, built = load(path, diff, prefetch)
    check_used(both, diff, BOTH)
    assert (both[:FIRST] == first[:]).all()
    trajectories = both[:]["collector", "traj_ids"]
    assert trajectories[:FIRST].max() < trajectories[FIRST:].min()
    return both, built


COLLECTOR = ["logger.backend=", "collector.frames_per_batch=100", "collector.init_random_frames=200"]


@pytest.mark.slow
@needs_torchrl
@pytest.mark.parametrize("name", ["prioritized", "event tables"])
def test_dqn_runs_and_resumes(name, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    short = ["device=cpu", f"buffer.buffer_size={SIZE}", "buffer.batch_size=32", "loss.num_updates=10"]
    script = Script(tmp_path, "dqn/dqn_cartpole.py", [*COLLECTOR, *short, f"checkpoint.path={checkpoint}"])
    diff, of_tables = guide_diffs("DQN")
    diff = of_tables if name == "event tables" else diff
    script.apply(diff)
    both, built = run_and_resume(script, checkpoint, diff, 0, "checkpoint.resume=true")
    if name == "event tables":
        assert built["tables"].sizes()["fell"] > 0
        assert set(both.sample()["table"].tolist()) == {0, 1}


@pytest.mark.slow
@needs_torchrl
@pytest.mark.parametrize("name", ["prioritized", "dper"])
@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_td3_and_sac_run_and_resume(algorithm, name, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    short = ["network.device=cpu", f"replay_buffer.size={SIZE}", "optim.batch_size=32", "optim.utd_ratio=0.1"]
    short += ["replay_buffer.prb=True", "env.max_episode_steps=20", f"hydra.run.dir={tmp_path}"]
    # several environments, in processes of their own, for the sampler that tells them apart
    short += [f"collector.env_per_collector={2 if name == 'prioritized' else 1}"]
    script = Script(tmp_path, f"{algorithm}/{algorithm}.py", [*COLLECTOR, *short])
    diff, of_dper = guide_diffs(algorithm.upper())
    (resume,) = guide_diffs(CHECKPOINT)
    script.apply(diff)
    if name == "dper":
        script.apply(of_dper)
    if algorithm == "sac":
        both_optimizers = r"^\+ *optimizer_actor=.*\n\+ *optimizer_critic=.*$"
        resume, count = re.subn(both_optimizers, "+        optimizer=optimizer,", resume, flags=re.MULTILINE)
        assert count == 1
    script.apply(resume)
    run_and_resume(script, checkpoint, diff, 3, f"+resume={checkpoint}")


def test_every_diff_of_the_guide_is_applied_to_a_script():
    tested = [diff for heading in ("DQN", "TD3", "SAC", CHECKPOINT) for diff in guide_diffs(heading)]
    assert len(tested) == GUIDE.count("```diff") == 7
    assert all(old and new for diff in tested for _, old, new in hunks(diff, "script.py"))
