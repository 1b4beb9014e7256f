"""TorchRL's trainers, configured by Hydra, with the samplers and the writer of this package."""

import copy
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf.errors import OmegaConfBaseException
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.data import rows
from tests.params import slow_but
from torchrl_replay_ext import EventSpec, Threshold

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "torchrl_replay_ext" / "plugins"
# warnings of TorchRL about its trainers, loggers and environments
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Trainer is an experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .* hook stage will be replaced:FutureWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def configs():
    """Registers the choices of TorchRL and of this package; removes them later, as recipes use the same group names."""
    store = ConfigStore.instance()
    before = {key: value for key, value in copy.deepcopy(store.repo).items() if not key.startswith("hydra")}
    yield importlib.import_module("torchrl_replay_ext.configs")
    # keep the entries that Hydra has added itself
    store.repo = {key: value for key, value in store.repo.items() if key.startswith(("hydra", "_"))} | before


SCRIPT = """
import hydra
from torchrl.trainers.algorithms.configs import *


@hydra.main(config_path=None, config_name="config", version_base="1.3")
def main(cfg):
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.train()


if __name__ == "__main__":
    main()
"""

TINY = [
    "collector.total_frames=200",
    "collector.frames_per_batch=50",
    "collector.init_random_frames=0",
    "replay_buffer.storage.max_size=120",
    "replay_buffer.batch_size=20",
    "trainer.optim_steps_per_batch=4",
    "trainer.progress_bar=false",
]
DQN = ["replay_dqn", *TINY, "network.num_cells=[16]"]
SAC = [
    "replay_sac",
    *TINY,
    "networks.policy.num_cells=[16]",
    "networks.qvalue.num_cells=[16]",
    "loss.num_qvalue_nets=1",
    "transforms.steps.max_steps=30",
]


MADE = "_target_: torchrl_replay_ext.configs.make"


def event_tables(
    end="{condition: [next, done], history: 5}",
    late=f"{{condition: {{{MADE}, kind: Threshold, key: step_count, op: '>=', value: 8}}, history: 3}}",
    capacity="{end: 60, late: 60}",
    eta="{default: 0.6, end: 0.2, late: 0.2}",
    priority="{kind: proportional, alpha: 0.65, td_error: '${td_error}'}",
):
    return [
        "writer@replay_buffer.writer=event_table",
        f"replay_buffer.writer.tables.events={{end: {end}, late: {late}}}",
        f"replay_buffer.writer.tables.capacity={capacity}",
        f"replay_buffer.sampler.eta={eta}",
        f"replay_buffer.sampler.priority={priority}",
        "replay_buffer.sampler.min_size=1",
    ]


SAMPLERS = {
    "proportional": ["replay_buffer.sampler.beta={start: 0.4, end: 1.0, num_updates: 10}"],
    "rank": ["replay_buffer.sampler.stratified=false"],
    "reaper": ["replay_buffer.sampler.omega=0.5"],
    "event_table": event_tables(),
    "trajectory_retrace": [
        "+sampler@replay_buffer.sampler.anchors=reaper",
        "replay_buffer.sampler.slice_len=5",
        "replay_buffer.sampler.behaviour_keys=[]",
    ],
    "compilable": [
        "sampler@replay_buffer.sampler=per",
        "replay_buffer.sampler.stratified=true",
        "replay_buffer=compilable",
        "storage@replay_buffer.storage=compilable_tensor",
        "writer@replay_buffer.writer=compilable",
    ],
}


def composed(overrides):
    with initialize_config_module("torchrl_replay_ext.conf", version_base="1.3"):
        return compose(overrides[0], overrides[1:])


def chosen(base, name, more=None, *, instead=None):
    """The configuration of a sampler with its overrides in SAMPLERS, or ``instead``, and further overrides."""
    choice = [] if name == "compilable" else [f"sampler@replay_buffer.sampler={name}"]
    return composed([*base, *choice, *(SAMPLERS[name] if instead is None else instead), *(more or [])])


@pytest.mark.parametrize(
    "name", slow_but(["event_table", "trajectory_retrace", "compilable"], [*SAMPLERS, "reaper, sac"])
)
def test_trains(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = instantiate((chosen(SAC, "reaper") if name == "reaper, sac" else chosen(DQN, name)).trainer)
    trainer.train()
    buffer = trainer.replay_buffer
    sampler = buffer.sampler
    stats = sampler.stats()
    assert stats["num_items"] == len(buffer) == buffer.storage.max_size == 120
    # most transitions were updated with TD errors
    assert stats["never_updated"] < 0.7 and stats["max_priority"] != 1 and stats["effective_sample_size"] < 1
    assert stats["dropped_updates"] == stats["rejected_updates"] == 0
    if name == "proportional":
        assert sampler.beta == 1.0
    if name == "event_table":
        assert sampler.tables is buffer.writer.tables
        assert min(sampler.tables.sizes().values()) > 0


@pytest.mark.parametrize("base", [DQN, SAC], ids=["dqn", "sac"])
def test_td_errors_are_what_the_loss_writes(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = instantiate(
        chosen(base, "proportional", ["collector.total_frames=50", "replay_buffer.batch_size=1"]).trainer
    )
    trainer.train()
    row = trainer.replay_buffer.sample()
    row["priority_weight"] = torch.ones(1)
    losses = trainer.loss_module(row)
    squared = losses["loss" if base is DQN else "loss_qvalue"]
    trainer.replay_buffer.update_tensordict_priority(row)
    # compare with a transition whose TD error is known
    index, other = row["index"].reshape(1), (row["index"].reshape(1) + 1) % 50
    trainer.replay_buffer.update_priority(other, torch.ones(1))
    trainer.replay_buffer.sampler.alpha = 1.0
    p = trainer.replay_buffer.sampler.probabilities(trainer.replay_buffer.storage)
    torch.testing.assert_close((p[index] / p[other]).float().reshape(()), squared.detach().sqrt(), rtol=1e-4, atol=1e-5)


def test_values_become_arguments():
    threshold = f"{{{MADE}, kind: Threshold, key: [next, seen], op: '>=', value: 8}}"
    overrides = event_tables(
        late=f"{{condition: {threshold}, history: 3, table: end}}",
        capacity="{end: 50}",
        eta="{default: {start: 1.0, end: 0.5, num_updates: 9}, end: {start: 0.0, end: 0.5, num_updates: 9}}",
        priority="{kind: proportional, alpha: {start: 0.0, end: 1.0, num_updates: 5}}",
    )
    buffer = instantiate(chosen(DQN, "event_table", instead=overrides).replay_buffer)
    assert buffer.writer.tables.specs == (
        EventSpec("end", ("next", "done"), 5),
        EventSpec("late", Threshold(("next", "seen"), ">=", 8), 3, table="end"),
    )
    assert buffer.sampler.eta == {"default": 1.0, "end": 0.0}
    steps = rows(8, episode=4, ids=torch.arange(8) // 4, logits=torch.zeros(8, 2))
    steps["next", "seen"] = torch.arange(8).unsqueeze(1)
    buffer.extend(steps)
    for _ in range(9):
        buffer.sample()
        buffer.update_priority(torch.arange(8), torch.rand(8))
    assert buffer.sampler.alpha == 1.0 and buffer.sampler.eta == pytest.approx({"default": 0.5, "end": 0.5})
    keys = [
        "+replay_buffer.sampler.episodes={_target_: torchrl_replay_ext.configs.make, kind: Episodes, "
        "_convert_: all, done_key: [next, finished]}",
        "+replay_buffer.sampler.anchors.episodes=${replay_buffer.sampler.episodes}",
    ]
    slices = instantiate(chosen(DQN, "trajectory_retrace", keys).replay_buffer).sampler
    assert "anchors=ReaPERSampler(" in repr(slices)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(120), sampler=slices)
    with pytest.raises(KeyError, match=r"\('next', 'finished'\)"):
        buffer.extend(steps)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("omega=-1", r"ReaPERSampler\(omega=-1\): omega must be >= 0"),
        ("beta={start: 1, end: 0}", "missing 1 required .*'num_updates'"),
    ],
)
def test_wrong_values_are_named(value, message):
    config = chosen(DQN, "reaper", instead=[f"replay_buffer.sampler.{value}"])
    with pytest.raises((InstantiationException, OmegaConfBaseException)) as error:
        instantiate(config.replay_buffer)
    assert re.search(message, str(error.value).replace("\\'", "'")), error.value


def test_an_unchanged_script_finds_them(tmp_path):
    """With the directory of the plugin on the path, as after an installation."""
    (tmp_path / "train.py").write_text(SCRIPT)
    path = os.pathsep.join([str(PLUGINS), str(ROOT)])
    choice = ["--config-name", "replay_dqn", "sampler@replay_buffer.sampler=rank"]
    result = subprocess.run(
        [sys.executable, "train.py", *choice, "--cfg", "job", "--package", "replay_buffer.sampler"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "kind: RankBasedSampler" in result.stdout, result.stderr


def test_the_wheel_has_the_plugin():
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"]["sources"] == {"torchrl_replay_ext/plugins": ""}
    assert "torchrl_replay_ext/plugins" in build["dev-mode-dirs"]
    # no __init__.py: a namespace package, to which other distributions may add
    assert [path.name for path in (PLUGINS / "hydra_plugins").glob("*.py")] == ["torchrl_replay_ext.py"]
