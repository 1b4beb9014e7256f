from itertools import repeat

import numpy as np

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
