"""MinAtar: its games as images, the network of its paper, and the presets of DQN."""

import sys

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from recipes import dqn
from recipes.common.cli import DONE
from recipes.common.environment import make_discrete_env
from recipes.common.errors import ConfigError
from recipes.common.networks import Convolutions, make_network
from recipes.envs import MinAtar
from recipes.envs.minatar_games import GAMES
from tests.params import slow_but
from tests.recipes.runs import Composer, needs, rows, tiny

PRESETS = ("minatar_breakout", "minatar_space_invaders")
composer = Composer("dqn", dqn.Config, tiny("dqn", evaluation_episodes=2, hidden_sizes=None))


@needs("minatar")
@pytest.mark.parametrize("game", slow_but(["breakout"], GAMES))
def test_observations_are_the_bits_of_the_game(game):
    from minatar import Environment

    env, twin = MinAtar(game, sticky_action_prob=0.0), Environment(game, sticky_action_prob=0.0)
    check_env(env, skip_render_check=True)
    # the seed that the first episode gets from the generator of the environment
    twin.seed(int(np.random.default_rng(3).integers(2**31)))
    twin.reset()
    observation, info = env.reset(seed=3)
    assert info == {} and env.action_space.n == len(twin.minimal_action_set())
    rng, over = np.random.default_rng(0), False
    for _ in range(60):
        assert observation.shape == env.observation_space.shape and observation.flags.c_contiguous
        assert np.array_equal(observation, np.moveaxis(twin.state(), 2, 0) * 255)
        if over:
            break
        action = int(rng.integers(env.action_space.n))
        observation, reward, over, truncated, _ = env.step(action)
        assert (reward, over) == twin.act(twin.minimal_action_set()[action]) and not truncated
        assert type(reward) is float and type(over) is bool


@needs("minatar")
def test_episodes_are_reproducible_by_their_seed_and_differ():
    def episode(env, seed):
        observation, over, seen = env.reset(seed=seed)[0], False, []
        rng = np.random.default_rng(0)
        while not over:
            seen.append(observation)
            observation, _, over, _, _ = env.step(int(rng.integers(env.action_space.n)))
        return np.stack(seen)

    env = MinAtar("asterix")
    first, second = episode(env, 1), episode(env, None)
    assert np.array_equal(episode(env, 1), first)
    assert np.array_equal(episode(env, None), second)
    assert first.shape != second.shape or not np.array_equal(first, second)


@needs("minatar")
def test_it_renders():
    env = gymnasium.make("recipes.envs:MinAtar-v0", render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    assert first.shape == (160, 160, 3) and first.dtype == np.uint8
    # the bricks of Breakout fill three rows and the paddle is below
    assert first[16:64].any(2).all() and first[144:].any()
    env.step(0)
    assert not np.array_equal(env.render(), first)
    assert MinAtar().render() is None


@needs("minatar")
def test_errors():
    with pytest.raises(ValueError, match=r"MinAtar\(game='pong'\): must be one of 'asterix', 'breakout', 'freeway'"):
        MinAtar("pong")
    with pytest.raises(ValueError, match=r"MinAtar\(sticky_action_prob=2\): must be in \[0, 1\]"):
        MinAtar(sticky_action_prob=2)
    with pytest.raises(ValueError, match=r"MinAtar\(render_mode='ansi'\): must be one of None, 'rgb_array'"):
        MinAtar(render_mode="ansi")
    env = MinAtar()
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(0)
    env.reset()
    for action in (-1, 3):
        with pytest.raises(ValueError, match="action must be in"):
            env.step(action)


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar", None)
    config = dqn.parse_config(composer.composed("env=minatar_breakout"), dqn.Config)
    with pytest.raises(ConfigError, match="pip install minatar"):
        make_discrete_env(config.env)


def test_small_images_get_the_network_of_the_paper():
    trunk = Convolutions((4, 10, 10))
    (convolution,) = (layer for layer in trunk.layers if isinstance(layer, torch.nn.Conv2d))
    assert (convolution.out_channels, convolution.kernel_size, convolution.stride) == (16, (3, 3), (1, 1))
    assert trunk.num_features == 16 * 8 * 8
    network = make_network((4, 10, 10), 3, [128])
    weights = 4 * 9 * 16 + 16 + 1024 * 128 + 128 + 128 * 3 + 3
    assert sum(parameter.numel() for parameter in network.parameters()) == weights
    assert network(torch.zeros(7, 4, 10, 10, dtype=torch.uint8)).shape == (7, 3)
    # larger images get that of Atari
    assert Convolutions((4, 36, 36)).num_features == 64


@needs("minatar")
@pytest.mark.parametrize(
    ("env", "sampler"), slow_but([(PRESETS[0], "per")], [(env, name) for env in PRESETS for name in ("uniform", "per")])
)
def test_dqn_trains(tmp_path, env, sampler):
    words = (f"env={env}", f"sampler={sampler}", "num_envs=4", *composer.tiny)
    assert dqn.train(composer.composed(*words), tmp_path) == DONE
    table = rows(tmp_path)
    assert [int(row["env_steps"]) for row in table] == [32, 64, 96]
    assert all(float(row["return_mean"]) >= 0 for row in table)


@pytest.mark.parametrize("env", PRESETS)
def test_presets_are_those_of_the_paper_but_for_the_listed_differences(env):
    settings = dqn.parse_config(composer.composed(f"env={env}"), dqn.Config).dqn
    assert (settings.buffer_size, settings.batch_size, settings.learning_starts) == (100_000, 32, 5000)
    assert (settings.target_update_interval, settings.gamma, settings.hidden_sizes) == (1000, 0.99, [128])
    assert (settings.initial_epsilon, settings.final_epsilon, settings.loss_function) == (1.0, 0.1, "smooth_l1")
    assert settings.optimizer == {"name": "adam"}
