"""Configurations of the recipes as tests need them, and what runs leave."""

import contextlib
import csv
import importlib.util
import subprocess
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from recipes.common import run as training
from recipes.common.checkpoint import load_checkpoint
from recipes.common.cli import DONE, INTERRUPTED, compose_job, explained, parse_config
from recipes.common.options import compose_config
from recipes.common.replay import make_sampler, make_storage, make_writer
from recipes.common.schemas import SCHEMAS
from recipes.envs.minatar_games import GAMES
from torchrl_replay_ext import CompilableReplayBuffer

ROOT = Path(__file__).parents[2]


def composed(name, *overrides):
    """The checked configuration of a recipe, or of another command."""
    with explained(name, overrides):
        return parse_config(compose_config(name, overrides), SCHEMAS[name])


class Recipe:
    """Composes configurations of a recipe from overrides, and runs it.

    Args:
        name: the recipe's.
        tiny: overrides for a run of less than a second.
    """

    def __init__(self, name, tiny):
        self.name, self.tiny = name, tiny

    def composed(self, *overrides):
        return composed(self.name, *overrides)

    def configuration(self, *overrides):
        return self.composed(*self.tiny, *overrides)

    def settings(self, *overrides):
        """The recipe's hyperparameters, checked, of the published configuration."""
        return self.composed(*overrides).learning

    def resumed(self, run_dir, *overrides):
        return compose_job(self.name, [f"resume={run_dir}", *overrides])[0]

    def train(self, config, run_dir, code=DONE):
        """The rows of progress.csv that a run leaves; it must end with the exit code."""
        assert import_module(f"recipes.{self.name}").train(config, run_dir) == code
        return rows(run_dir)

    def run(self, run_dir, *overrides):
        """The rows of a run of less than a second."""
        return self.train(self.configuration(*overrides), run_dir)

    def resume(self, run_dir, *overrides):
        """The rows of a run that was interrupted, after the rest of it."""
        return self.train(self.resumed(run_dir, *overrides), run_dir)

    def stop(self, run_dir, batches, *overrides):
        """A run that is interrupted after so many batches, as if by Ctrl-C."""
        with stopping(batches):
            return self.train(self.configuration(*overrides), run_dir, INTERRUPTED)


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
TINY_ACER = [
    *tiny("acer", learning_starts=None, train_interval=None, gradient_steps=None, evaluation_episodes=2, slice_len=4),
    "num_envs=4",
]

RECIPES = {
    "dqn": Recipe("dqn", tiny("dqn", evaluation_episodes=2, hidden_sizes=None)),
    "sac": Recipe("sac", tiny("sac")),
    "td3": Recipe("td3", tiny("td3")),
    "r2d2": Recipe("r2d2", TINY_R2D2),
    "acer": Recipe("acer", TINY_ACER),
}

FILES = {"config.yaml", "progress.csv", "learning_curve.png", "checkpoint.zip"}  # of a run

# the package that environments need -> their presets
PRESETS = {
    None: ["cartpole", "acrobot", "pendulum", "threerooms", "tworooms", "obstacles", "skills", "deepsea"],
    "minatar": [f"minatar_{game}" for game in GAMES],
    "Box2D": ["lunarlander", "lunarlander_continuous", "bipedalwalker"],
    "mujoco": ["ant", "halfcheetah", "hopper", "humanoid", "invertedpendulum", "walker2d"],
}


class Replay:
    """Returns these batches one after the other and keeps the batches of the updates."""

    def __init__(self, *batches):
        self.batches, self.returned = list(batches), []

    def sample(self):
        return self.batches.pop(0).clone()

    def update_tensordict_priority(self, sample):
        self.returned.append(sample)


def copies(values):
    return [value.detach().clone() for value in values]


def states(networks, names):
    """Copies of the networks that have targets, and of the targets."""
    if not names:  # recipes.r2d2 has two networks and no loss
        return tuple(copies(network.parameters()) for network in networks)
    pair = [[getattr(networks[0], f"{kind}{name}_params") for name in names] for kind in ("", "target_")]
    return tuple(copies(value for each in kind for value in each.flatten_keys().values()) for kind in pair)


def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def assert_soft_updates(found, tau):
    """(online, target) before the first and after each update: each moves the targets this share of the way."""
    assert distance(*found[0]) == 0
    for (_, before), (online, after) in pairwise(found):
        expected = [old + tau * (new - old) for old, new in zip(before, online, strict=True)]
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)
    assert distance(found[0][1], found[2][1]) > 1e-5  # and the targets have moved


@contextlib.contextmanager
def noted_replays():
    """A list of the buffers of the runs in the block."""
    attach, found = training.Run.attach, []

    def noted(run, behaviour, replay, **options):
        found.append(replay)
        attach(run, behaviour, replay, **options)

    with patch.object(training.Run, "attach", noted):
        yield found


def buffer_of(config, td_error="squared"):
    """An empty buffer with the sampler of a configuration, as recipes.dqn builds it."""
    sampler = make_sampler(config, td_error=td_error)
    storage = make_storage(config, torch.device("cpu"))
    size = config.learning.batch_size
    return CompilableReplayBuffer(storage=storage, sampler=sampler, writer=make_writer(sampler), batch_size=size)


def stopping(batches):
    """Runs are interrupted after so many batches, as if by Ctrl-C."""
    answers = iter([False] * batches)
    return patch.object(
        training, "interruption", lambda: contextlib.nullcontext(lambda: next(answers, True) is not False)
    )


def rows(run_dir):
    with (run_dir / "progress.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint(run_dir):
    """The states of the components in a checkpoint."""
    return load_checkpoint(run_dir, torch.device("cpu"))


def eager_and_compiled(recipe, path, *words):
    """The rows of two runs that draw the same random numbers: the first one eager, the second one compiled."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):
        return [recipe.run(path / str(compiled), *words, f"compile={compiled}") for compiled in (False, True)]


def command(recipe, *words, **options):
    """Starts the command of a recipe."""
    return subprocess.Popen(
        [sys.executable, "-m", f"recipes.{recipe}", *words],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    )


def wait_until(condition, seconds=300):
    """Returns when the condition is true, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def needs(module):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}")
