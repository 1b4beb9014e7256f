"""The presets of the Atari games: env=atari/<game>."""

from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.config_store import ConfigStore

from recipes.atari_scores import OTHER_GAMES, SCORES


@dataclass
class AtariConfig:
    """Preprocessing (Mnih et al. 2015; stable-baselines3's AtariWrapper, which the ReaPER paper uses).

    Args:
        num_frames: frames of an observation, the newest last; an episode begins with the first repeated.
        frame_skip: emulator frames that an action is repeated for; the last two are max-pooled.
        screen_size: of the gray frames, in pixels.
        noop_max: a game begins with 1 to so many no-ops.
        fire: press FIRE where an episode begins, in games with such an action: some wait for it.
        life_loss: a lost life ends an episode, in training only. The game goes on with the next episode.
        clip_rewards: to [-1, 1], in training only.
        max_frames: emulator frames after which a game is truncated.
        repeat_action_probability: of sticky actions.
        full_action_space: all 18 actions, not only those that matter in the game.
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
