"""Environments come back to where they were."""

import gymnasium
import numpy as np
import pytest
from omegaconf import OmegaConf

from recipes.common.atari_presets import AtariConfig
from recipes.common.cli import parse_config
from recipes.common.collector import ReplayableEnv
from recipes.common.config import EnvConfig
from recipes.common.environment import make_env
from recipes.envs.atari import make_atari
from tests.recipes.runs import PRESETS, ROOT, needs

QUICK = ("cartpole", "tworooms", "doorkey", "minatar_space_invaders", "bipedalwalker", "hopper")


def play(recording, steps, rng):
    """The transitions of so many random steps."""
    seen = []
    for _ in range(steps):
        space = recording.env.action_space
        discrete = isinstance(space, gymnasium.spaces.Discrete)
        action = rng.integers(space.n) if discrete else rng.uniform(-1, 1, space.shape).astype(np.float32)
        observation, *rest, _ = recording.step(action)
        seen.append((np.array(observation).tobytes(), *rest))
        if any(rest[1:]):
            seen.append(np.array(recording.reset()).tobytes())
    return seen


def check(make, steps, following):
    for count in steps:
        source, rng = ReplayableEnv(make(), seed=3), np.random.default_rng(0)
        play(source, count, rng)
        state, generator = source.state_dict(), rng.bit_generator.state
        expected = play(source, following, rng)
        twin = ReplayableEnv(make(), seed=8)
        play(twin, 5, np.random.default_rng(1))
        assert twin.load_state_dict(state)
        rng.bit_generator.state = generator
        assert play(twin, following, rng) == expected
        # and once more, from what came back
        assert source.load_state_dict(state)
        rng.bit_generator.state = generator
        assert play(source, following, rng) == expected
        source.env.close(), twin.env.close()


@pytest.mark.filterwarnings("ignore:WARNING. compiler attribute:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[*([needs(module)] if module else []), *([] if name in QUICK else [pytest.mark.slow])])
        for module, names in PRESETS.items()
        for name in names
    ],
)
def test_presets_come_back(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its log there
    config = parse_config(OmegaConf.load(ROOT / "recipes" / "conf" / "env" / f"{name}.yaml"), EnvConfig)
    long = name not in QUICK
    check(lambda: make_env(config), (0, 7, 333) if long else (150,), 700 if long else 150)


@needs("ale_py")
@needs("cv2")
@pytest.mark.parametrize(
    ("game", "sticky", "steps"),
    [
        ("Breakout", 0.25, (110,)),
        pytest.param("Breakout", 0.0, (0, 200, 600), marks=pytest.mark.slow),
        pytest.param("SpaceInvaders", 0.25, (0, 200, 600), marks=pytest.mark.slow),
    ],
)
def test_games_come_back(game, sticky, steps):
    """In the middle of a game of several lives, too."""
    config = AtariConfig(max_frames=600, repeat_action_probability=sticky)
    check(lambda: make_atari(f"ALE/{game}-v5", config, {}, training=True), steps, 150)


class Drifting(gymnasium.Env):
    """Observes a number that comes from nowhere but this process."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    number = 0

    def _observe(self):
        Drifting.number += 1
        return np.array([Drifting.number], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 5
        return self._observe(), {}

    def step(self, action):
        self.left -= 1
        return self._observe(), 0.0, self.left == 0, False, {}


class Hasty(Drifting):
    """Observes nothing, and each of its episodes is shorter than the one before."""

    def _observe(self):
        return np.zeros(1, np.float32)

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed)
        Drifting.number += 1
        self.left = 5 - Drifting.number
        return result


@pytest.mark.parametrize("kind", [Drifting, Hasty])
def test_what_is_not_deterministic_begins_anew(kind):
    Drifting.number = 0
    source = ReplayableEnv(kind(), seed=0)
    play(source, 3, np.random.default_rng(0))
    state = source.state_dict()
    twin = ReplayableEnv(kind(), seed=0)
    assert not twin.load_state_dict(state)
    assert twin.state_dict()["actions"].numel() == 0
    assert twin.state_dict()["random"] == state["random"]
