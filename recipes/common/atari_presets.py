"""Configurations of the Atari games (env=atari/<game>)."""

from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from recipes.common.atari_scores import OTHER_GAMES, SCORES


@dataclass
class AtariConfig:
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

    num_frames: int = 4
    frame_skip: int = 4
    screen_size: int = 84
    noop_max: int = 30
    fire: bool = True
    life_loss: bool = True
    clip_rewards: bool = True
    max_frames: int = 108_000
    repeat_action_probability: float = 0.0
    full_action_space: bool = False

    def __post_init__(self) -> None:
        for key, least in (("num_frames", 1), ("frame_skip", 1), ("screen_size", 1), ("noop_max", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"env.atari.{key}={getattr(self, key)}: must be >= {least}")
        if not 0 <= self.repeat_action_probability <= 1:
            value = self.repeat_action_probability
            raise ValueError(f"env.atari.repeat_action_probability={value}: must be in [0, 1]")


def preset(game: str) -> dict[str, Any]:
    """The configuration of env=atari/<game>."""
    random, human = SCORES.get(game, (None, None))
    return {
        "name": game,
        "id": f"ALE/{game.title().replace('_', '')}-v5",
        "reward_threshold": None,
        "random_score": random,
        "human_score": human,
        "atari": asdict(AtariConfig()),
    }


for _game in (*SCORES, *OTHER_GAMES):
    ConfigStore.instance().store(group="env/atari", name=_game, node=preset(_game), package="env")
