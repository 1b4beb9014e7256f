from itertools import repeat

import numpy as np
import pytest

from recipes.experiments import sset_tabular


def test_the_stream_is_that_of_the_seed():
    world = sset_tabular.make_world()
    truth = world.dynamics.optimal_q(sset_tabular.DISCOUNT)
    first, again, other = (sset_tabular.make_stream(world, truth, seed) for seed in (0, 0, 1))
    assert (first == again).all() and not (first == other).all()
    going_on = ~first["next", "done"][:-1]
    assert (first["next", "state"][:-1] == first["state"][1:])[going_on].all()
    assert (first["next", "events", "done"] == first["next", "terminated"]).all()
    assert (first["next", "reward"] == first["next", "terminated"].float()).all()
    assert first["next", "events", "at_gap"].any() and first["next", "terminated"].any()


def test_learning_makes_the_update_of_q_learning():
    world = sset_tabular.make_world()
    stream = sset_tabular.make_stream(world, world.dynamics.optimal_q(sset_tabular.DISCOUNT), 2)[:50]
    q = np.random.default_rng(0).random((world.num_states, 3))
    expected = q.copy()
    for row in stream:
        state, action = int(row["state"]), int(row["action"])
        target = float(row["next", "reward"])
        if not row["next", "terminated"]:
            target += 0.99 * expected[int(row["next", "state"])].max()
        expected[state, action] += 0.2 * (target - expected[state, action])
    learned = q.tolist()
    taken = stream["state"].numpy(), stream["action"].numpy()
    errors = sset_tabular.learn(learned, world.dynamics, *taken, repeat(0.2), 0.99)
    np.testing.assert_allclose(learned, expected)
    assert len(errors) == 50


@pytest.mark.slow
def test_histories_speed_up_q_learning_and_events_alone_do_not():
    """The gate of ten seeds, with one of them."""
    methods = ("uniform", "history 60", "history 1")
    needed = {method: sset_tabular.steps_needed(sset_tabular.run(method, 3)) for method in methods}
    assert needed["history 60"] <= 0.65 * needed["uniform"]
    assert needed["history 1"] >= needed["uniform"]
