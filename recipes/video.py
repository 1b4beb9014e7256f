"""Videos of the agent that is evaluated: video=true."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
from PIL import Image

from recipes.config import EnvConfig
from recipes.environment import make_env
from recipes.evaluation import evaluate
from recipes.files import atomic_write
from recipes.run import ConfigError

VIDEOS = "videos"  # in a run's directory
MAX_STEPS = 1000
WIDTH = 240  # pixels; smaller images stay as they are
FRAMES_PER_SECOND = 25


class Camera:
    """Plays an episode in an environment of its own at each evaluation, and keeps it as an animated GIF.

    It begins as the first episode of the evaluation does, and is cut off after MAX_STEPS.

    Args:
        config: the environment.
        run_dir: videos go to its subdirectory VIDEOS, by the number of steps trained.

    Raises:
        ConfigError: the environment cannot be rendered here.
    """

    def __init__(self, config: EnvConfig, run_dir: Path):
        # else pygame complains where there is no display
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        rendered = replace(config, options={**config.options, "render_mode": "rgb_array"})
        try:
            env = make_env(rendered)
            env.reset()
            if not isinstance(env.render(), np.ndarray):
                raise TypeError("it gives no images")
        # whatever a display or a graphics library may raise
        except Exception as error:
            message = str(error) or type(error).__name__
            raise ConfigError(f"video=true: {config.id} cannot be rendered here: {message}") from error
        self._env = gymnasium.wrappers.RenderCollection(gymnasium.wrappers.TimeLimit(env, MAX_STEPS))
        self._directory = run_dir / VIDEOS
        # Every so many frames make a GIF of the game's speed.
        speed = float(env.metadata.get("render_fps") or FRAMES_PER_SECOND)
        self._stride = max(1, round(speed / FRAMES_PER_SECOND))
        self._duration = 1000 * self._stride / speed

    def record(
        self, policy: Callable[[np.ndarray], np.ndarray], *, epsilon: float, seed: list[int], step: int
    ) -> np.ndarray:
        """Plays an episode, writes `step_<step>.gif`, and gives its frames, uint8 [frames, height, width, 3].

        Args:
            policy: see :func:`~recipes.evaluation.evaluate`.
            epsilon: likewise.
            seed: likewise.
            step: number of steps trained.

        Raises:
            OSError: the file cannot be written; there is none then.
        """
        evaluate(policy, [self._env], epsilon=epsilon, seed=seed)
        images = [Image.fromarray(np.asarray(frame)) for frame in self._env.render()[:: self._stride]]
        width, height = images[0].size
        if width > WIDTH:
            images = [image.resize((WIDTH, round(height * WIDTH / width))) for image in images]
        self._directory.mkdir(exist_ok=True)
        with atomic_write(self._directory / f"step_{step}.gif") as path:
            images[0].save(path, save_all=True, append_images=images[1:], duration=self._duration, loop=0)
        return np.stack([np.asarray(image) for image in images])

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
