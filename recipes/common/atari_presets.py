"""Configurations of the Atari games (env=atari/<game>).

recipes/conf/atari_games.csv has reference scores, mean returns of uniformly random actions and of a professional human
tester. Games start with 1 to 30 no-ops and end after 108,000 frames. Sources: Mnih et al. 2015 (Human-level control
through deep reinforcement learning, extended data table 2) for 49 games, Wang et al. 2016 (Dueling network
architectures, table 2) for all 57 games. The numbers are those of DeepMind's DQN Zoo (dqn_zoo/atari_data.py). The
human-normalized score is (score - random) / (human - random). The papers give no scores for the other games of ale-py.
"""

import csv
from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from recipes.common.checked import Checked, within
from recipes.common.files import CONF

# game in lower case with underscores -> score of random actions, score of humans; None: unknown
with (CONF / "atari_games.csv").open(newline="") as file:
    GAMES = {
        row["game"]: (float(row["random"]), float(row["human"])) if row["random"] else (None, None)
        for row in csv.DictReader(file)
    }


@dataclass
class AtariConfig(Checked):
    """Preprocessing of Atari games (Mnih et al. 2015; stable-baselines3's AtariWrapper, which the ReaPER paper uses).

    Args:
        num_frames: frames per observation, the newest last, >= 1. At the start of an episode, the first frame is
            repeated. Default: 4.
        frame_skip: emulator frames for which an action is repeated, >= 1; the last two are max-pooled. Default: 4.
        screen_size: width and height of the gray frames in pixels, >= 1. Default: 84.
        noop_max: a game starts with a random number of no-ops from 1 to this number. Default: 30.
        fire: press FIRE at the start of an episode if the game has this action; some games wait for it. Default: True.
        life_loss: in training, a lost life ends an episode; the next episode continues the game. Default: True.
        clip_rewards: in training, clip rewards to [-1, 1]. Default: True.
        max_frames: number of emulator frames after which a game is truncated. Default: 108,000.
        repeat_action_probability: probability of sticky actions, in [0, 1]. Default: 0.
        full_action_space: use all 18 actions instead of the actions that the game uses. Default: False.
    """

    prefix = "env.atari."

    num_frames: int = within(">= 1", default=4)
    frame_skip: int = within(">= 1", default=4)
    screen_size: int = within(">= 1", default=84)
    noop_max: int = within(">= 0", default=30)
    fire: bool = True
    life_loss: bool = True
    clip_rewards: bool = True
    max_frames: int = 108_000
    repeat_action_probability: float = within("[0, 1]", default=0.0)
    full_action_space: bool = False


def preset(game: str) -> dict[str, Any]:
    """The configuration of env=atari/<game>."""
    random, human = GAMES[game]
    return {
        "name": game,
        "id": f"ALE/{game.title().replace('_', '')}-v5",
        "reward_threshold": None,
        "random_score": random,
        "human_score": human,
        "atari": asdict(AtariConfig()),
    }


for _game in GAMES:
    ConfigStore.instance().store(group="env/atari", name=_game, node=preset(_game), package="env")
