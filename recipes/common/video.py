"""Records videos of evaluations (video=true)."""

import os
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
from PIL import Image

from recipes.common.config import EnvConfig
from recipes.common.environment import make_env
from recipes.common.errors import ConfigError
from recipes.common.evaluation import Policy, evaluate
from recipes.common.files import atomic_write

VIDEOS = "videos"  # subdirectory of a run directory
MAX_STEPS = 1000
WIDTH = 240  # pixels; wider images are scaled down
FRAMES_PER_SECOND = 25


class Camera:
    """Plays one episode in a separate environment at each evaluation and saves it as an animated GIF.

    The episode starts like the first episode of the evaluation and has at most MAX_STEPS steps.

    Args:
        config: the environment.
        run_dir: directory of the run; videos are saved in its subdirectory VIDEOS.

    Raises:
        ConfigError: if the environment cannot be rendered on this host.
    """

    def __init__(self, config: EnvConfig, run_dir: Path):
        # without it, pygame warns on hosts without a display
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        rendered = replace(config, options={**config.options, "render_mode": "rgb_array"})
        try:
            env = make_env(rendered)
            env.reset()
            if not isinstance(env.render(), np.ndarray):
                raise TypeError("render() returns no image")
        # displays and graphics libraries raise many kinds of errors
        except Exception as error:
            message = str(error) or type(error).__name__
            raise ConfigError(f"video=true: {config.id} cannot be rendered here: {message}") from error
        self._env = gymnasium.wrappers.RenderCollection(gymnasium.wrappers.TimeLimit(env, MAX_STEPS))
        self.close = self._env.close
        self._directory = run_dir / VIDEOS
        # Keep every n-th frame, so that the GIF has the speed of the game.
        speed = float(env.metadata.get("render_fps") or FRAMES_PER_SECOND)
        self._stride = max(1, round(speed / FRAMES_PER_SECOND))
        self._duration = 1000 * self._stride / speed

    def record(self, policy: Policy, *, epsilon: float, seed: list[int], step: int) -> None:
        """Play an episode and write it to `step_<step>.gif`.

        Args:
            policy: see :func:`~recipes.common.evaluation.evaluate`.
            epsilon: see :func:`~recipes.common.evaluation.evaluate`.
            seed: see :func:`~recipes.common.evaluation.evaluate`.
            step: number of env steps trained.

        Raises:
            OSError: if the file cannot be written; no partial file is left.
        """
        evaluate(policy, [self._env], epsilon=epsilon, seed=seed)
        images = [Image.fromarray(np.asarray(frame)) for frame in self._env.render()[:: self._stride]]
        width, height = images[0].size
        if width > WIDTH:
            images = [image.resize((WIDTH, round(height * WIDTH / width))) for image in images]
        self._directory.mkdir(exist_ok=True)
        with atomic_write(self._directory / f"step_{step}.gif") as path:
            images[0].save(path, save_all=True, append_images=images[1:], duration=self._duration, loop=0)
