"""MinAtar: its games as images, the network of its paper, and the presets of DQN."""

import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env

from recipes.common.networks import Convolutions, make_network
from recipes.envs.minatar_games import GAMES, MinAtar
from tests.params import slow_but
from tests.recipes.runs import needs


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
