"""Videos of the evaluated agent, and the data that a logger's backend receives."""

import os
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from recipes.common import evaluation, progress
from tests.recipes.runs import Recipe, tiny

recipe = Recipe("dqn", tiny("dqn", total_steps=64, num_evaluations=2, evaluation_episodes=2, hidden_sizes=None))


@pytest.fixture
def backend(monkeypatch):
    """A logger that notes the calls that it receives."""
    backend = Mock()
    monkeypatch.setattr(progress, "get_logger", lambda name, **_: backend if name else None)
    return backend


def test_videos_change_nothing_else(tmp_path, backend):
    tables = []
    for number, words in enumerate(([], ["video=true", "logger.backend=csv"])):
        table = recipe.run(tmp_path / str(number), "dqn.evaluation_epsilon=0.1", *words)
        tables.append([{k: v for k, v in row.items() if k not in ("wall_time", "cpu_time")} for row in table])
    assert tables[0] == tables[1]
    assert not (tmp_path / "0" / evaluation.VIDEOS).exists()
    assert sorted(os.listdir(tmp_path / "1" / evaluation.VIDEOS)) == ["step_32.gif", "step_64.gif"]
    with Image.open(tmp_path / "1" / evaluation.VIDEOS / "step_64.gif") as image:
        assert image.size == (evaluation.WIDTH, 160) and image.n_frames > 2
        # CartPole has 50 steps in a second, every second one is shown; what does not change is one frame
        assert image.info["duration"] % 40 == 0
    scalars, histograms = (
        [(call.args[0], call.kwargs["step"]) for call in method.call_args_list]
        for method in (backend.log_scalar, backend.log_histogram)
    )
    assert histograms == [("sampler/probability", 32), ("sampler/probability", 64)]
    assert ("sampler/alpha", 64) in scalars and ("return_mean", 32) in scalars
    for call in backend.log_histogram.call_args_list:
        assert np.mean(call.args[1]) == pytest.approx(1)
