import csv

import numpy as np
import pytest

from recipes.experiments import sset_tabular


@pytest.fixture
def short(monkeypatch):
    """A quarter of the experience."""
    monkeypatch.setattr(sset_tabular, "STEPS", 5_000)


def test_the_stream_is_that_of_the_seed():
    world = sset_tabular.make_world()
    truth = world.optimal_q(sset_tabular.DISCOUNT)
    first, again, other = (sset_tabular.make_stream(world, truth, seed) for seed in (0, 0, 1))
    assert (first == again).all() and not (first == other).all()
    going_on = ~first["next", "done"][:-1]
    assert (first["next", "state"][:-1] == first["state"][1:])[going_on].all()
    assert (first["next", "events", "done"] == first["next", "terminated"]).all()
    assert (first["next", "reward"] == first["next", "terminated"].float()).all()
    assert first["next", "events", "at_gap"].any() and first["next", "terminated"].any()


def test_learning_makes_the_update_of_q_learning():
    world = sset_tabular.make_world()
    stream = sset_tabular.make_stream(world, world.optimal_q(sset_tabular.DISCOUNT), 2)[:50]
    q = np.random.default_rng(0).random((world.num_states, 3))
    expected = q.copy()
    for row in stream:
        state, action = int(row["state"]), int(row["action"])
        target = float(row["next", "reward"])
        if not row["next", "terminated"]:
            target += 0.99 * expected[int(row["next", "state"])].max()
        expected[state, action] += 0.2 * (target - expected[state, action])
    learned = q.tolist()
    errors = sset_tabular.learn(learned, stream)
    np.testing.assert_allclose(learned, expected)
    assert len(errors) == 50


@pytest.mark.slow
def test_histories_speed_up_q_learning_and_events_alone_do_not():
    """The gate of ten seeds, with one of them."""
    methods = ("uniform", "history 60", "history 1")
    needed = {method: sset_tabular.steps_needed(sset_tabular.run(method, 3)) for method in methods}
    assert needed["history 60"] <= 0.65 * needed["uniform"]
    assert needed["history 1"] >= needed["uniform"]


@pytest.mark.usefixtures("short")
def test_command_line(tmp_path, capsys):
    sset_tabular.main(["--out", str(tmp_path), "--seeds", "1"])
    assert "history 60" in capsys.readouterr().out
    with (tmp_path / "sset_tabular.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 5
    again = tmp_path / "again"
    assert len(sset_tabular.main(["--out", str(again), "--read", str(tmp_path / "sset_tabular.csv")])) == 5
    assert sorted(path.name for path in again.iterdir()) == ["sset_tabular.png", "sset_tabular.svg"]
    assert (tmp_path / "sset_tabular.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        sset_tabular.main(["--out", str(tmp_path), "--seeds", "0"])
