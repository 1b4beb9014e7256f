import os
import signal
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from recipes.common import evaluation
from recipes.common.atari_presets import GAMES, AtariConfig, preset
from recipes.common.cli import INTERRUPTED
from recipes.common.collector import EpsilonRandom, VectorCollector
from recipes.common.networks import Convolutions, make_network
from recipes.common.update import RMSProp, make_step
from recipes.envs.atari import FIRE, NOOP, Lives, make_atari
from tests.recipes.runs import TINY_ACER, Recipe, buffer_of, composed, needs, tiny
from torchrl_replay_ext import FrameStackStorage

GAME = "env=atari/breakout"
SHORT = [GAME, "env.atari.max_frames=200"]
recipes = {
    "dqn": Recipe("dqn", [*SHORT, *tiny("dqn", hidden_sizes="[16]")]),
    "acer": Recipe("acer", [*SHORT, *TINY_ACER, "acer.hidden_sizes=[16]"]),
}


def make(game="breakout", training=True, **changes):
    return make_atari(preset(game)["id"], AtariConfig(**changes), {}, training=training)


def test_short_histories_have_room_for_the_frames_at_their_ends():
    """Of every eight steps, the table of points keeps two, which have 1.75 times as many frames as transitions."""
    event = "+env.events.scored={history: 2, eta: 0.5}"
    replay = buffer_of(composed("dqn", GAME, "sampler=sset", event, "dqn.buffer_size=33000"))
    for start in range(0, 72_000, 2_000):
        step = torch.arange(start, start + 2_000)
        frames = torch.arange(start, start + 2_004).view(torch.uint8).view(-1, 1, 8).unfold(0, 4, 1).movedim(-1, 1)
        done, scored = torch.zeros(2_000, 1, dtype=torch.bool), (step % 8 == 0)[:, None]
        following = {
            "observation": frames[1:],
            "events": {"scored": scored},
            "reward": step[:, None].float(),
            "done": done,
        }
        replay.extend(TensorDict({"observation": frames[:-1], "next": following}, [2_000]))
    assert replay.storage.num_frames > 1.5 * len(replay)


class ScriptedGame(gymnasium.Env):
    """A game of three lives, of which as many are left after each step as a test says in ``after``."""

    observation_space = gymnasium.spaces.Box(0, 255, (1,), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, meanings=("NOOP", "FIRE")):
        self.meanings, self.left, self.after = meanings, 3, []
        self.ale, self.resets, self.actions = self, 0, []

    def lives(self):
        return self.left

    def get_action_meanings(self):
        return list(self.meanings)

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        self.left = 3
        return np.zeros(1, np.uint8), {}

    def step(self, action):
        self.actions.append(action)
        if self.after:
            self.left = self.after.pop(0)
        return np.ones(1, np.uint8), 1.0, self.left == 0, False, {}


class TestLives:
    def test_an_episode_is_a_life_and_the_game_goes_on(self):
        game = ScriptedGame(("NOOP", "RIGHT"))
        env = Lives(game, episodic=True, fire=True)
        env.reset(seed=0)
        game.after = [3, 2, 2, 1, 1, 0]
        assert [env.step(1)[2] for _ in range(2)] == [False, True]
        env.reset()
        assert (game.resets, game.actions) == (1, [1, 1, NOOP])
        assert env.step(1)[2]
        env.reset()
        assert env.step(1)[2]
        env.reset()
        assert game.resets == 2

    def test_a_seed_or_the_end_of_the_game_begins_a_new_one(self):
        game = ScriptedGame()
        env = Lives(game, episodic=True, fire=False)
        env.reset(seed=0)
        game.after = [2]
        assert env.step(0)[2]
        env.reset(seed=1)
        assert game.resets == 2
        # the last life is lost by the no-op between two episodes
        game.after = [1, 0]
        assert env.step(0)[2]
        env.reset()
        assert game.resets == 3

    @pytest.mark.parametrize("episodic", [True, False])
    def test_fire_begins_each_life(self, episodic):
        game = ScriptedGame()
        env = Lives(game, episodic=episodic, fire=True)
        env.reset()
        game.after = [2]
        _, reward, terminated, _, _ = env.step(0)
        assert terminated == episodic
        if episodic:
            env.reset()
        assert game.actions == [FIRE, 0, FIRE]
        assert reward == (1 if episodic else 2)

    def test_no_lives_left_is_not_yet_the_end(self):
        """Qbert goes on for some frames; the end is the game's own."""
        game = ScriptedGame()
        env = Lives(game, episodic=True, fire=False)
        env.reset()
        game.left = 1
        env.step(0)
        game.step = lambda action: (np.ones(1, np.uint8), 0.0, False, False, {})
        game.left = 0
        assert not env.step(0)[2]


@needs("ale_py")
@needs("cv2")
class TestGame:
    def test_preprocessing(self):
        env = make()
        assert env.observation_space.shape == (4, 84, 84) and env.observation_space.dtype == np.uint8
        first = env.reset(seed=3)[0]
        assert (first[0] == first[1]).all() and (first[0] == first[3]).all()
        second = env.step(2)[0]
        assert (second[:3] == first[1:]).all()
        np.testing.assert_array_equal(make().reset(seed=3)[0], first)
        assert any((make().reset(seed=seed)[0] != first).any() for seed in range(3))
        assert env.unwrapped.ale.getFloat("repeat_action_probability") == 0

    def test_training_is_on_lives_and_evaluation_on_games(self):
        lives = {}
        for of_lives in (True, False):
            env, rng = make("breakout", of_lives), np.random.default_rng(0)
            env.reset(seed=0)
            lives[of_lives] = []
            for _ in range(700):
                _, _, terminated, truncated, info = env.step(int(rng.integers(4)))
                if terminated or truncated:
                    lives[of_lives].append(info["lives"])
                    env.reset()
        assert lives[True][:6] == [4, 3, 2, 1, 0, 4]
        assert set(lives[False]) == {0} and len(lives[False]) >= 2

    @pytest.mark.parametrize(("game", "steps", "points"), [("qbert", 60, 25.0), ("pong", 150, -1.0)])
    def test_rewards_are_clipped_in_training_only(self, game, steps, points):
        """Both say which are positive, for an event table: +env.events.scored={history: 100, eta: 0.25}."""
        for clipped, points_here in ((True, max(min(points, 1.0), -1.0)), (False, points)):
            env, rng = make(game, clipped), np.random.default_rng(0)
            env.reset(seed=0)
            found = [env.step(int(rng.integers(6))) for _ in range(steps)]
            assert {reward: info["scored"] for _, reward, _, _, info in found} == {0.0: False, points_here: points > 0}

    @pytest.mark.parametrize("n", [1, 3])
    def test_stored_frames_are_the_wrapper_s_stacks(self, n):
        """Random play of three games side by side, over the ring several times; single steps, and n-step returns."""
        behaviour = EpsilonRandom(None, gymnasium.spaces.Discrete(4), seed=0)
        env = partial(make, "breakout", max_frames=400)
        collector = VectorCollector([env] * 3, behaviour, frames_per_batch=30, seed=0, n_step=n)
        once = TensorDictReplayBuffer(storage=FrameStackStorage(170, n_step=n), batch_size=32)
        plain = TensorDictReplayBuffer(storage=LazyTensorStorage(170), batch_size=32)
        ends = 0
        for number in range(24):
            data = collector.collect()
            assert data["observation"].dtype == torch.uint8
            ends += int(data["next", "done"].sum())
            for rb in (once, plain):
                rb.extend(data.clone())
            if number % 6 == 5:
                for key in plain[:].keys(True, True):
                    assert torch.equal(once[:][key], plain[:][key]), key
        assert ends > 10
        assert once.storage.num_frames < 170 * 1.2
        collector.shutdown()

    @pytest.mark.parametrize("name", ["dqn", "acer"])
    def test_trains_resumes_and_leaves_its_files(self, tmp_path, monkeypatch, capsys, name):
        recipe, evaluate = recipes[name], evaluation.evaluate

        def interrupt(*arguments, **options):
            os.kill(os.getpid(), signal.SIGINT)
            return evaluate(*arguments, **options)

        monkeypatch.setattr(evaluation, "evaluate", interrupt)
        recipe.train(recipe.configuration(), tmp_path, INTERRUPTED)
        monkeypatch.setattr(evaluation, "evaluate", evaluate)
        table = recipe.resume(tmp_path)
        assert len(table) == 3
        random, human = GAMES["breakout"]
        for row in table:
            expected = (float(row["return_mean"]) - random) / (human - random)
            assert float(row["human_normalized"]) == pytest.approx(expected)
        loss = "loss" if name == "dqn" else "loss_qvalue"
        assert np.isfinite(float(table[-1][loss]))


def test_networks_of_the_papers():
    images = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    trunk = Convolutions((4, 84, 84))
    kernels = [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in trunk.layers if isinstance(m, torch.nn.Conv2d)]
    assert kernels == [(32, 8, 4), (64, 4, 2), (64, 3, 1)] and trunk.num_features == 3136
    network = make_network((4, 84, 84), 6, [512])
    assert sum(parameter.numel() for parameter in make_network((4, 84, 84), 4, [512]).parameters()) == 1_686_180
    result = network(images)
    assert result.shape == (2, 3, 6)
    torch.testing.assert_close(network(images[1, 2]), result[1, 2])
    torch.testing.assert_close(trunk(images), trunk.layers(images.flatten(0, 1) / 255).view(2, 3, -1))
    assert make_network((5,), 2, [8])(torch.zeros(7, 5)).shape == (7, 2)


@pytest.mark.parametrize("centered", [True, False])
def test_rmsprop_is_that_of_the_paper(centered):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    expected, square, mean = parameter.detach().clone(), torch.zeros(5).double(), torch.zeros(5).double()
    optimizer = RMSProp([parameter], 0.1, decay=0.9, eps=0.01, centered=centered)
    for _ in range(20):
        gradient = torch.randn(5, dtype=torch.float64)
        square, mean = 0.9 * square + 0.1 * gradient**2, 0.9 * mean + 0.1 * gradient
        expected -= 0.1 * gradient / (square - centered * mean**2 + 0.01).sqrt()
        make_step(optimizer)([gradient])
    torch.testing.assert_close(parameter.detach(), expected)
