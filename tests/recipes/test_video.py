"""Videos of the evaluated agent, and the data that a logger's backend receives."""

import os

import numpy as np
import pytest
from PIL import Image

from recipes import dqn
from recipes.common import evaluation, progress
from recipes.common.cli import DONE
from recipes.common.errors import ConfigError
from tests.recipes.runs import Composer, rows, tiny

composer = Composer("dqn", tiny("dqn", total_steps=64, num_evaluations=2, evaluation_episodes=2, hidden_sizes=None))


class Backend:
    """A logger that keeps all data it receives."""

    def __init__(self):
        self.scalars, self.histograms = [], []

    def log_scalar(self, name, value, step):
        self.scalars.append((name, step))

    def log_histogram(self, name, data, *, step, bins):
        self.histograms.append((name, data, step))


@pytest.fixture
def backend(monkeypatch):
    backend = Backend()
    monkeypatch.setattr(progress, "get_logger", lambda name, **_: backend if name else None)
    return backend


def test_videos_change_nothing_else(tmp_path, backend):
    tables = []
    for number, words in enumerate(([], ["video=true", "logger=tensorboard", "logger.csv=true"])):
        run_dir = tmp_path / str(number)
        run_dir.mkdir()
        assert dqn.train(composer.configuration("dqn.evaluation_epsilon=0.1", *words), run_dir) == DONE
        tables.append([{k: v for k, v in row.items() if k not in ("wall_time", "cpu_time")} for row in rows(run_dir)])
    assert tables[0] == tables[1]
    assert not (tmp_path / "0" / evaluation.VIDEOS).exists()
    assert sorted(os.listdir(tmp_path / "1" / evaluation.VIDEOS)) == ["step_32.gif", "step_64.gif"]
    with Image.open(tmp_path / "1" / evaluation.VIDEOS / "step_64.gif") as image:
        assert image.size == (evaluation.WIDTH, 160) and image.n_frames > 2
        # CartPole has 50 steps in a second, every second one is shown; what does not change is one frame
        assert image.info["duration"] % 40 == 0
    assert [(name, step) for name, _, step in backend.histograms] == [("sampler/probability", s) for s in (32, 64)]
    assert ("sampler/alpha", 64) in backend.scalars and ("return_mean", 32) in backend.scalars
    for _, relative, _ in backend.histograms:
        assert np.mean(relative) == pytest.approx(1)


def test_what_cannot_be_rendered_is_a_config_error(tmp_path, monkeypatch):
    def fails(_config):
        raise RuntimeError("no display")

    monkeypatch.setattr(evaluation, "make_env", fails)
    with pytest.raises(ConfigError, match="video=true: CartPole-v1 cannot be rendered here: no display"):
        dqn.train(composer.configuration("video=true"), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_costs_a_video_only(tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evaluation.Camera, "record", fails)
    assert dqn.train(composer.configuration("video=true"), tmp_path) == DONE
    assert "no video of step 32" in capsys.readouterr().err
