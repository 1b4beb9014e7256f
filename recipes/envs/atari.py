"""Atari games (ale-py) with the preprocessing of the papers on deep Q-learning: env=atari/<game>."""

import importlib.util
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, ClipReward, FrameStackObservation

from recipes.common.atari_presets import AtariConfig
from recipes.common.errors import ConfigError

NOOP, FIRE = 0, 1


class Lives(gymnasium.Wrapper):
    """Starts episodes with FIRE and, optionally, ends them when a life is lost.

    ``info["scored"]`` says whether the reward of a step is positive, for an event table of it.

    Args:
        env: an environment with AtariPreprocessing.
        episodic: whether a lost life ends an episode. The next episode then continues the same game, unless the game is
            over.
        fire: see AtariConfig. If ``episodic`` is False, FIRE is also pressed after a lost life.
    """

    def __init__(self, env: gymnasium.Env, *, episodic: bool, fire: bool):
        super().__init__(env)
        world: Any = env.unwrapped
        self._ale, meanings = world.ale, world.get_action_meanings()
        self._episodic = episodic
        self._fire = fire and len(meanings) > FIRE and meanings[FIRE] == "FIRE"
        self._lives = 0
        self._goes_on = False  # whether the next reset continues the same game

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the game."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        lives, before = self._ale.lives(), self._lives
        self._lives = lives
        # in Qbert, the number of lives is 0 for a few frames before the game is over
        lost = 0 < lives < before and not (terminated or truncated)
        self._goes_on = self._episodic and lost
        if self._goes_on:
            terminated = True
        elif lost and self._fire:
            observation, more, terminated, truncated, info = self.env.step(FIRE)
            reward = float(reward) + float(more)
        return observation, reward, terminated, truncated, info | {"scored": float(reward) > 0}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode. After a lost life, it continues the same game unless a seed is given."""
        over = not self._goes_on or seed is not None
        self._goes_on = False
        if not over:
            # as at the start of a game, the agent does not choose the first action
            observation, _, terminated, truncated, info = self.env.step(FIRE if self._fire else NOOP)
            over = terminated or truncated
        if over:
            observation, info = self.env.reset(seed=seed, options=options)
            if self._fire:
                observation, _, terminated, truncated, info = self.env.step(FIRE)
                if terminated or truncated:
                    observation, info = self.env.reset(options=options)
        self._lives = self._ale.lives()
        return observation, info


def make_atari(env_id: str, atari: AtariConfig, options: dict[str, Any], *, training: bool) -> gymnasium.Env:
    """Make a preprocessed Atari game with observations uint8 [num_frames, screen_size, screen_size].

    Args:
        env_id: Gymnasium id, for example ALE/Pong-v5.
        atari: the preprocessing.
        options: keyword arguments for gymnasium.make.
        training: whether atari.life_loss and atari.clip_rewards apply. If False, episodes are whole games with the
            original rewards.

    Raises:
        ConfigError: if a package is missing.
    """
    for module, package in (("ale_py", "ale-py"), ("cv2", "opencv-python-headless")):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"env.id={env_id}: Atari needs {package}; pip install ale-py opencv-python-headless")
    import ale_py
    import cv2

    # else it resizes frames with all cores
    cv2.setNumThreads(1)
    # without it, the emulator prints a banner
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(
        env_id,
        obs_type="grayscale",
        frameskip=1,
        repeat_action_probability=atari.repeat_action_probability,
        full_action_space=atari.full_action_space,
        max_num_frames_per_episode=atari.max_frames,
        disable_env_checker=True,
        **options,
    )
    env = AtariPreprocessing(env, noop_max=atari.noop_max, frame_skip=atari.frame_skip, screen_size=atari.screen_size)
    env = Lives(env, episodic=training and atari.life_loss, fire=atari.fire)
    if training and atari.clip_rewards:
        env = ClipReward(env, -1.0, 1.0)
    return FrameStackObservation(env, atari.num_frames)
