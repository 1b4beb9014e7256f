"""What all training recipes have in common: their runs, environments, samplers and compiled updates."""

import importlib.util
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch

from recipes.common.config import DECOUPLED, EVENT_TABLES
from recipes.common.options import environments
from recipes.common.schemas import SCHEMAS
from tests.params import slow_but
from tests.recipes.runs import FILES, PRESETS, RECIPES, ROOT, eager_and_compiled


def installed(env):
    modules = [module for module, envs in PRESETS.items() if module and env in envs]
    return all(importlib.util.find_spec(module) is not None for module in modules)


def samplers(name):
    return [sampler for sampler in SCHEMAS[name].samplers if sampler not in (*EVENT_TABLES, *DECOUPLED)]


# a recipe differs from the others in the samplers that are in the default run
QUICK = [*(("dqn", sampler) for sampler in samplers("dqn")), ("td3", "lap")]
QUICK += [(name, sampler) for name in ("sac", "r2d2", "acer") for sampler in ("uniform", "per")]


@pytest.mark.parametrize(
    ("name", "sampler"), slow_but(QUICK, [(name, sampler) for name in RECIPES for sampler in samplers(name)])
)
def test_every_sampler_trains_and_leaves_its_files(tmp_path, capsys, name, sampler):
    huber = [f"{name}.loss_function=smooth_l1"] * (sampler == "lap")
    table = RECIPES[name].run(tmp_path, f"sampler={sampler}", *huber)
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    if name != "acer":  # its numbers of updates are random, and its sampler that of slices
        assert [int(row["updates"]) for row in table] == [0, 4, 8]
        assert any(key.startswith("sampler/") for key in table[0]) == (sampler not in ("uniform", "recency"))
    # no episode of training may have ended
    assert all(np.isfinite(float(value)) for key, value in table[-1].items() if key != "training_return")
    for row in table:
        returns = [float(value) for key, value in row.items() if key[7:].isdecimal()]
        assert float(row["return_mean"]) == pytest.approx(np.mean(returns))
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    best, last = max(float(row["return_mean"]) for row in table), float(table[-1]["return_mean"])
    printed = f"96 steps | best return {best:g}, last {last:g} | files in {tmp_path}"
    assert capsys.readouterr().out.splitlines()[-1] == printed


@pytest.mark.filterwarnings("ignore:WARNING. compiler attribute:UserWarning")
@pytest.mark.parametrize(
    ("name", "env"),
    slow_but(
        # the first recipe of each environment
        [*{env: (name, env) for name in [*RECIPES][::-1] for env in environments(name)}.values()],
        [(name, env) for name in RECIPES for env in environments(name) if env != "atari"],
    ),
)
def test_every_environment_trains(tmp_path, monkeypatch, name, env):
    if not installed(env):
        pytest.skip("needs an extra package")
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    words = [f"{name}.num_evaluations=1", f"{name}.evaluation_episodes=1", "num_envs=2"]
    (row,) = RECIPES[name].run(tmp_path / "run", f"env={env}", *words)
    assert row["env_steps"] == "96" and ("q_sum" in row) == (env in ("threerooms", "tworooms"))


@pytest.mark.parametrize("name", ["td3", "sac"])
def test_random_actions_come_first(tmp_path, monkeypatch, name):
    module = importlib.import_module(f"recipes.{name}")
    shares, act = [], module.EpsilonRandom.__call__
    monkeypatch.setattr(
        module.EpsilonRandom, "__call__", lambda self, observed: shares.append(self.epsilon) or act(self, observed)
    )
    RECIPES[name].run(tmp_path, "num_envs=2")
    assert shares == [1.0] * 16 + [0.0] * 32


@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("dqn", "inductor", ["sampler=per"]),
        ("r2d2", "aot_eager", ["sampler=per"]),
        # two updates of the critics and one of the actor
        ("td3", "aot_eager", ["sampler=per"]),
        # the numbers of replayed updates are random
        ("acer", "aot_eager", ["acer.replay_ratio=0"]),
        pytest.param("td3", "inductor", ["sampler=per"], marks=pytest.mark.slow),
        pytest.param("sac", "inductor", ["sampler=per"], marks=pytest.mark.slow),
        pytest.param("dqn", "inductor", ["sampler=reaper"], marks=pytest.mark.slow),
        pytest.param("r2d2", "inductor", ["sampler=per"], marks=pytest.mark.slow),
        pytest.param("acer", "inductor", ["acer.replay_ratio=0"], marks=pytest.mark.slow),
        pytest.param("acer", "inductor", ["env=pendulum", "acer.replay_ratio=0"], marks=pytest.mark.slow),
    ],
)
def test_the_compiled_update_learns_what_the_eager_one_does(tmp_path, monkeypatch, name, backend, words):
    """The same draws, and the same parameters but for rounding."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    results = [
        [float(value) for row in table[1:] for key, value in row.items() if key.startswith("loss")]
        for table in eager_and_compiled(RECIPES[name], tmp_path, *words)
    ]
    assert results[0] and results[0] == pytest.approx(results[1], rel=2e-3, abs=1e-6)


# eager code that ran before could leave results in caches of torch, without which a function cannot be traced
FIRST = """
import sys
from functools import partial
from pathlib import Path
import torch
from tests.recipes.runs import RECIPES

torch.compile = partial(torch.compile, backend="eager")
for words in (["dqn"], ["td3"], ["sac"], ["r2d2"], ["acer"], ["acer", "env=pendulum"]):
    RECIPES[words[0]].run(Path(sys.argv[1], *words), "compile=true", *words[1:])
"""


def test_the_first_updates_of_a_process_can_be_compiled(tmp_path):
    found = subprocess.run([sys.executable, "-c", FIRST, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
