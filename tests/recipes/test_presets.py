"""The settings in recipes/conf hold the constants of the papers."""

import pytest

from recipes.common.atari_presets import GAMES, AtariConfig
from recipes.envs import minatar_games
from tests.recipes.runs import composed

# ReaPER, appendix D
REAPER = dict(learning_starts=1000, initial_epsilon=1, evaluation_epsilon=0.001, num_evaluations=100, gamma=0.99)
REAPER |= dict(evaluation_episodes=5, max_grad_norm=10, hidden_sizes=[64, 64], n_step=1, tau=None, cagrad=None)
SMALL = dict(learning_rate=6.3e-4, total_steps=100_000, buffer_size=50_000, target_update_interval=250, batch_size=128)
SMALL |= REAPER | dict(train_interval=4, gradient_steps=4, exploration_fraction=0.12, final_epsilon=0.1)
CARTPOLE = dict(learning_rate=2.3e-3, total_steps=50_000, buffer_size=100_000, target_update_interval=10, batch_size=64)
CARTPOLE |= REAPER | dict(train_interval=256, gradient_steps=128, exploration_fraction=0.16, final_epsilon=0.04)
ATARI = dict(learning_rate=625e-7, total_steps=50_000_000, buffer_size=1_000_000, target_update_interval=30_000)
ATARI |= dict(batch_size=32, train_interval=4, gradient_steps=1, learning_starts=50_000, exploration_fraction=0.02)
ATARI |= dict(initial_epsilon=1, final_epsilon=0.01, evaluation_epsilon=0.001, evaluation_episodes=1, gamma=0.99)
# event tables, tables 1 and 2
SSET = dict(batch_size=32, tau=0.01, gamma=0.99, initial_epsilon=0.3, final_epsilon=0.3)
SAC = dict(hidden_sizes=[256, 256], actor_learning_rate=3e-4, critic_learning_rate=3e-4, alpha_learning_rate=3e-4)
SAC |= dict(tau=0.005, gamma=0.99, train_interval=1, gradient_steps=1, batch_size=256, buffer_size=1_000_000)
# the code of TD3's authors
TD3 = dict(batch_size=256, buffer_size=1_000_000, hidden_sizes=[256, 256], tau=0.005, gamma=0.99, policy_delay=2)
TD3 |= dict(actor_learning_rate=3e-4, critic_learning_rate=3e-4, policy_noise=0.2, noise_clip=0.5)
TD3 |= dict(exploration_noise=0.1, learning_starts=25_000)
# ACER, sections 4 and 6
ACER = dict(slice_len=20, c=10, delta=1, average=0.99, gamma=0.99, replay_ratio=4)
CONTINUOUS = dict(slice_len=50, c=5, average=0.995, num_samples=5, sigma=0.3, gamma=0.99, buffer_size=8 * 5000)
# MinAtar
MINATAR = dict(buffer_size=100_000, batch_size=32, learning_starts=5000, target_update_interval=1000, gamma=0.99)
MINATAR |= dict(hidden_sizes=[128], initial_epsilon=1, final_epsilon=0.1, loss_function="smooth_l1")

PRESETS = {
    "dqn env=cartpole": CARTPOLE,
    **dict.fromkeys(["dqn env=acrobot", "dqn env=lunarlander"], SMALL),
    **dict.fromkeys([f"dqn env=atari/{game}" for game in ("pong", "amidar", "qbert")], ATARI),
    "dqn env=threerooms": SSET | dict(buffer_size=20_000, hidden_sizes=[256], learning_rate=1e-3),
    "dqn env=obstacles": SSET | dict(buffer_size=100_000, hidden_sizes=[256, 256], learning_rate=5e-4),
    **dict.fromkeys([f"dqn env=minatar_{game}" for game in minatar_games.GAMES], MINATAR),
    "sac env=lunarlander_continuous": SAC | dict(target_entropy=-2, batch_size=32, buffer_size=20_000),
    "sac env=halfcheetah": SAC | dict(target_entropy=-6),
    "sac env=hopper": SAC | dict(target_entropy=-3),
    "sac env=walker2d": SAC | dict(target_entropy=-6),
    "sac env=humanoid": SAC | dict(target_entropy=-17),
    **dict.fromkeys([f"td3 env={env}" for env in ("halfcheetah", "hopper", "walker2d", "ant")], TD3),
    **dict.fromkeys(["td3 env=lunarlander_continuous", "td3 env=bipedalwalker"], TD3 | dict(learning_starts=1000)),
    **dict.fromkeys([f"acer env={env}" for env in ("cartpole", "acrobot", "lunarlander")], ACER | dict(on_policy=True)),
    **dict.fromkeys([f"acer env={env}" for env in ("halfcheetah", "walker2d", "humanoid")], CONTINUOUS),
    "acer env=humanoid acer=paper_continuous": CONTINUOUS | dict(on_policy=False, replay_ratio=4, batch_size=8 * 50),
    "acer env=atari/qbert num_envs=16": ACER | dict(buffer_size=16 * 50_000, hidden_sizes=[512], shared_layers=True),
}


@pytest.mark.parametrize("command", PRESETS)
def test_presets_hold_the_constants_of_the_papers(command):
    recipe, *words = command.split()
    settings = composed(recipe, *words).learning
    assert {key: getattr(settings, key) for key in PRESETS[command]} == PRESETS[command]


@pytest.mark.parametrize(
    ("command", "events"),
    [
        ("sac env=halfcheetah", {8: 0.2, 12: 0.1, 16: 0.1}),
        ("sac env=hopper", {2.5: 0.2, 3: 0.1, 3.5: 0.1}),
        ("sac env=walker2d", {4: 0.2, 5: 0.1, 6: 0.05, 7: 0.05}),
        ("sac env=humanoid", {5: 0.2, 7: 0.1, 10: 0.1}),
        ("dqn env=threerooms", {"at_gap": 0.2, "done": 0.3}),
        (
            "dqn env=obstacles",
            dict.fromkeys(["at_lava", "at_gap", "pickup_key"], 0.0625) | dict(at_spike=0.1, at_door=0.1125, done=0.1),
        ),
    ],
)
def test_events_and_their_shares_are_those_of_the_event_table_paper(command, events):
    found = composed(*command.split(), *["sampler=sset_per"] * command.startswith("dqn"))
    assert {event.above or name: event.eta for name, event in found.env.events.items()} == events
    assert {event.history for event in found.env.events.values()} == {50 if "obstacles" in command else 200}


def test_atari_games_are_preprocessed_and_scored_as_in_the_papers():
    config = composed("dqn", "env=atari/qbert")
    assert config.dqn.optimizer["name"] == "rmsprop" and config.env.reward_threshold is None
    assert (config.env.name, config.env.random_score, config.env.human_score) == ("qbert", *GAMES["qbert"])
    assert config.env.atari == AtariConfig()
    assert [config.env.human_normalized(score) for score in GAMES["qbert"]] == [0.0, 1.0]
    # the papers have no scores of this game
    klax = composed("dqn", "env=atari/klax").env
    assert klax.id == "ALE/Klax-v5" and klax.human_normalized(5.0) is None
