import numpy as np
import pytest

from recipes.common.atari_presets import GAMES
from recipes.common.errors import ConfigError
from recipes.studies.curves import Curve
from recipes.studies.peaks import Peaks

# scores of random actions, from the table of the recipes
AMIDAR, BOWLING, PONG = (GAMES[game][0] for game in ("amidar", "bowling", "pong"))


def run(scores, seed=0, every=10):
    steps = every * np.arange(1, len(scores) + 1)
    return Curve("", "", seed, None, steps, {"return_mean": np.array(scores, dtype=float)})


@pytest.fixture
def peaks():
    runs = {
        "atari/amidar": {
            "per": [run([AMIDAR, AMIDAR + 40, AMIDAR + 20]), run([AMIDAR + 10, AMIDAR, np.nan], seed=1)],
            "reaper": [run([AMIDAR + 50, AMIDAR + 100, AMIDAR])],
        },
        "atari/bowling": {
            "per": [run([BOWLING + 4, BOWLING + 8, BOWLING])],
            "reaper": [run([BOWLING, BOWLING + 4, BOWLING + 6])],
        },
        "atari/pong": {
            "per": [run([PONG, PONG, PONG])],
            "reaper": [run([PONG + 1, PONG + 2, PONG + 3])],
        },
        # only one of the variants has finished
        "atari/qbert": {"per": [run([1e6])], "reaper": []},
    }
    return Peaks(runs, ["per", "reaper"], "per")


def test_peaks_are_means_over_seeds_of_the_highest_evaluations(peaks):
    assert peaks.games == ["atari/amidar", "atari/bowling", "atari/pong"]
    assert peaks.peak("atari/amidar", "per") == pytest.approx(AMIDAR + 25)
    assert peaks.peak("atari/amidar", "reaper") == pytest.approx(AMIDAR + 100)
    assert peaks.ends["atari/bowling"] == pytest.approx((BOWLING, BOWLING + 8))


def test_increases_are_relative_to_random_actions(peaks):
    assert peaks.increase("atari/amidar", "reaper") == pytest.approx(300)
    assert peaks.increase("atari/bowling", "reaper") == pytest.approx(-25)
    # PER is not better than random actions
    assert np.isnan(peaks.increase("atari/pong", "reaper"))


def test_curves_are_medians_over_games_of_normalized_scores(peaks):
    steps, curves = peaks.curves()
    assert steps.tolist() == [10, 20, 30]
    # amidar: seeds 0, 40, 40 and 10, 10, 10 of 100; bowling: 4, 8, 8 of 8; pong: 0
    assert curves["per"] == pytest.approx([0.05, 0.25, 0.25])
    # amidar: .5, 1, 1; bowling: 0, .5, .75; pong: 1/3, 2/3, 1
    assert curves["reaper"] == pytest.approx([1 / 3, 2 / 3, 1])


def test_the_table_has_each_game_and_the_mean_and_median_increase(peaks):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in peaks.table().splitlines() if "|" in line]
    table = {cells[0]: cells for cells in lines}
    assert table["Amidar"][-1] == "+300.0 %"
    assert table["Pong"][-1] == ""
    assert table["mean of games"][-1] == "+137.5 %"
    assert table["median of games"][-1] == "+137.5 %"
    assert table["median, normalized"][3:5] == ["0.250", "1.000"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({"atari/qbert": {"per": [run([1.0])]}}, "no game yet in which every variant"),
        ({"cartpole": {"per": [run([1.0])], "reaper": [run([1.0])]}}, "random actions in cartpole is not known"),
    ],
)
def test_games_that_cannot_be_compared(runs, message):
    with pytest.raises(ConfigError, match=message):
        Peaks(runs, ["per", "reaper"], "per")
