import sys
from collections import deque
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from recipes.common.config import EnvConfig
from recipes.common.environment import make_discrete_env
from recipes.common.errors import ConfigError
from recipes.envs.grid import DOOR, DROP, FORWARD, KEY, LAVA, LEFT, LOCKED, OPEN, PICKUP, SPIKE, TOGGLE
from recipes.envs.objects import ObjectWorld, ObstacleCourse, RandomizedSkill
from recipes.envs.rooms import SHAPING, ThreeRooms, TwoRooms

GRIDS = {"ThreeRooms": 500, "TwoRooms": 500, "ObstacleCourse": 1000, "RandomizedSkill": 200}  # with their time limits
NAMES = (*GRIDS, "DeepSea", "MinAtar")
ROOMS = (ThreeRooms, TwoRooms)


def make(name, **kwargs):
    if name == "MinAtar":
        pytest.importorskip("minatar")
    return gymnasium.make(f"recipes.envs:{name}-v0", **kwargs)


def rollout(env, steps, seed):
    rng = np.random.default_rng(seed)
    history = [env.reset(seed=seed)]
    for action in rng.integers(env.action_space.n, size=steps).tolist():
        history.append(env.step(action))
        if history[-1][2] or history[-1][3]:
            history.append(env.reset())
    return history


# All of them.


@pytest.mark.parametrize("name", NAMES)
def test_follows_the_api_of_gymnasium_and_is_reproducible_by_its_seed(name):
    env = make(name)
    check_env(env.unwrapped)
    assert isinstance(env.action_space, gymnasium.spaces.Discrete)
    first, second = (rollout(make(name), 500, 7) for _ in range(2))
    for (observation, *rest), (same_observation, *same_rest) in zip(first, second, strict=True):
        assert np.array_equal(observation, same_observation) and rest == same_rest


@pytest.mark.parametrize("name", GRIDS)
def test_info_holds_a_bool_for_each_event(name):
    env = make(name)
    events = env.get_wrapper_attr("EVENTS")
    happened = set()
    for observation, *result, info in rollout(env, 3000, 0):
        assert observation in env.observation_space
        assert all(type(info[event]) is bool for event in events)
        if result:
            assert type(result[0]) is float and result[1] == (info["done"] or info.get("at_lava", False))
        else:
            assert not any(info[event] for event in events)
        happened |= {event for event in events if info[event]}
    assert happened


@pytest.mark.parametrize("name", GRIDS)
def test_the_time_limit_truncates(name):
    env = make(name)
    env.reset(seed=0)
    ends = [env.step(LEFT)[2:4] for _ in range(GRIDS[name])]
    assert ends == [(False, False)] * (GRIDS[name] - 1) + [(False, True)]


def test_without_its_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "minatar", None)
    with pytest.raises(ConfigError, match="pip install minatar"):
        make_discrete_env(EnvConfig("env", "recipes.envs:MinAtar-v0", None))


# Rooms.


@pytest.mark.parametrize("world", ROOMS)
def test_the_tables_are_what_step_does(world):
    env = world(shaping="gap", gamma=0.9)
    next_state, reward, terminal = env.dynamics
    env.reset()
    rng = np.random.default_rng(0)
    for action in rng.integers(3, size=2000).tolist():
        state = env.state
        observation, r, terminated, truncated, info = env.step(action)
        assert env.state == next_state[state, action]
        assert (r, terminated, truncated) == (reward[state, action], terminal[state, action], False)
        x, y, theta = env.pose_of(env.state)
        assert env.state_of(x, y, theta) == env.state
        expected = [2 * x / (env.WIDTH - 1) - 1, 2 * y / (env.HEIGHT - 1) - 1, 2 * theta / 3 - 1]
        assert observation == pytest.approx(expected)
        assert info["at_gap"] == ((x, y) in env.GAPS) and info["done"] == ((x, y) == env.GOAL) == terminated
        if terminated:
            env.reset()
    goal = slice(env.num_states - 4, None)
    assert (next_state[goal] == np.arange(env.num_states)[goal, None]).all()
    assert terminal[goal].all() and not reward[goal].any()
    assert not next_state.flags.writeable


@pytest.mark.parametrize(("world", "states", "length"), [(ThreeRooms, 304, 33), (TwoRooms, 4 * (2 * 49 + 1 - 1), 29)])
def test_optimal_values_and_path(world, states, length):
    env = world()
    assert env.num_states == states + 4
    q = env.dynamics.optimal_q(0.99)
    next_state, reward, terminal = env.dynamics
    np.testing.assert_allclose(q, reward + 0.99 * ~terminal * q.max(1)[next_state], atol=1e-10)
    env.reset()
    rewards, visited = [], []
    terminated = False
    while not terminated:
        _, r, terminated, _, info = env.step(q[env.state].argmax())
        rewards.append(r)
        visited.append(info["at_gap"])
    assert rewards == [-0.1] * (length - 1) + [1.0]
    assert sum(visited) == len(env.GAPS)
    value = sum(0.99**t * r for t, r in enumerate(rewards))
    assert q[env.state_of(*env.START)].max() == pytest.approx(value)
    # With rewards of 0 and 1, the value is the discount for the steps left.
    q = world(rewards=(1.0, 0.0)).dynamics.optimal_q(0.9)
    assert q[env.state_of(*env.START)].max() == pytest.approx(0.9 ** (length - 1))


@pytest.mark.parametrize("shaping", SHAPING)
@pytest.mark.parametrize("world", ROOMS)
def test_shaping_leaves_optimal_policies_as_they_are(world, shaping):
    plain, shaped = world(), world(shaping=shaping, gamma=0.95)
    phi = shaped.potential
    assert phi.min() == 0 and 0.9 < phi.max() <= 1 and not phi[-4:].any()
    q, shaped_q = plain.dynamics.optimal_q(0.95), shaped.dynamics.optimal_q(0.95)
    # Ng et al.: Q*(s, a) becomes Q*(s, a) - φ(s), so that no action of a state gains on another.
    np.testing.assert_allclose(shaped_q, q - phi[:, None], atol=1e-9)


def test_potentials():
    def phi(shaping, x, y):
        env = TwoRooms(shaping=shaping)
        return env.potential[env.state_of(x, y, 0)]

    assert [phi("gap", *cell) for cell in ((7, 0), (6, 0), (0, 6))] == [1, 0, 0]
    # Farthest from the goal (14, 6) is (0, 0), 20 steps away; farthest from the gap (7, 0) are the other corners, 13.
    assert [phi("manhattan_goal", *cell) for cell in ((0, 0), (13, 6))] == pytest.approx([0, 19 / 20])
    assert [phi("manhattan_gap", *cell) for cell in ((7, 0), (0, 6), (6, 0))] == pytest.approx([1, 0, 12 / 13])
    assert [phi("right_wall", *cell) for cell in ((14, 0), (0, 0), (7, 0))] == pytest.approx([1, 0, 0.5])
    assert [phi("left_wall", *cell) for cell in ((14, 0), (0, 0), (7, 0))] == pytest.approx([0, 1, 0.5])


# Obstacle course and skills.


def solve(env):
    """The shortest sequence of actions without spikes and lava, by breadth-first search through `step`."""

    def save():
        return env.pose, env.carried, env.cells.tobytes()

    def load(state):
        env.pose, env.carried, cells = state
        env.cells[:] = np.frombuffer(cells, env.cells.dtype).reshape(env.cells.shape)

    start = save()
    came_from = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for action in range(6):
            load(state)
            _, reward, terminated, _, _ = env.step(action)
            if reward < 0 or save() in came_from:
                continue
            came_from[save()] = (state, action)
            if terminated:
                actions, at = [], save()
                while came_from[at] is not None:
                    at, action = came_from[at]
                    actions.append(action)
                load(start)
                return actions[::-1]
            queue.append(save())
    return None


COURSES = [((1, 1), 4), ((1, 4), 4), ((1, 3), 3)]


@pytest.mark.parametrize(
    "make_env",
    [
        *(partial(ObstacleCourse, start=start, rows=rows) for start, rows in COURSES),
        *(partial(RandomizedSkill, scenario=scenario) for scenario in ("lava", "gap", "door")),
    ],
)
def test_every_layout_is_solved_by_playing_it(make_env):
    env, layouts = make_env(), set()
    for seed in range(8):
        observation, _ = env.reset(seed=seed)
        layouts.add(env.cells.tobytes())
        actions = solve(env)
        assert np.array_equal(env.reset(seed=seed)[0], observation)
        steps = [env.step(action) for action in actions]
        assert [reward for _, reward, *_ in steps] == [0.0] * (len(actions) - 1) + [1.0]
        assert [terminated for _, _, terminated, _, _ in steps] == [False] * (len(actions) - 1) + [True]
        count = {event: sum(info[event] for *_, info in steps) for event in env.EVENTS}
        assert count["done"] == 1 and not count["at_lava"]
        # The door is opened, and then walked through.
        assert count["at_door"] in (0, 2) and (count["at_door"] == 0 or count["pickup_key"] >= 1)
    assert len(layouts) > 4


class Bench(ObjectWorld):
    """A row with one of everything, from left to right."""

    width, height = 9, 3
    EVENTS = ObstacleCourse.EVENTS

    def _build(self):
        self._put(2, 1, SPIKE)
        self._put(3, 1, KEY, 2)
        self._put_wall(5)
        self._put(5, 1, DOOR, 2, LOCKED)
        self._put(7, 1, LAVA)
        return {}


def test_objects_step_by_step():
    env = Bench(step_reward=-0.01)
    env.reset()

    def act(action):
        observation, reward, terminated, _, info = env.step(action)
        return observation, reward, terminated, [event for event in env.EVENTS if info[event]]

    assert act(FORWARD)[1:] == (-1.0, False, ["at_spike"])
    # Staying on it hurts as well; a key blocks the way.
    assert act(FORWARD)[1:] == (-1.0, False, ["at_spike"])
    assert act(TOGGLE)[1:] == (-1.0, False, ["at_spike"])
    assert act(DROP)[1:] == (-1.0, False, ["at_spike"])
    observation, *result = act(PICKUP)
    assert result == [-1.0, False, ["at_spike", "pickup_key"]]
    assert observation[-6:-3] == pytest.approx([1.0, 5 / 6, 2 / 5])
    assert act(PICKUP)[3] == ["at_spike"]
    assert act(DROP)[0][-6:-3] == pytest.approx([0.0, -1.0, -1.0])
    assert env.cells[1, 3].tolist() == [KEY, 2, 0]
    assert act(PICKUP)[3] == ["at_spike", "pickup_key"]
    assert act(FORWARD)[1:] == (-0.01, False, [])
    act(FORWARD)
    act(FORWARD)
    assert env.pose == (4, 1, 0)
    # A key of another colour does not open the door.
    env.carried = 3
    assert act(TOGGLE)[3] == []
    env.carried = 2
    assert act(TOGGLE)[3] == ["at_door"]
    assert env.cells[1, 5].tolist() == [DOOR, 2, OPEN]
    assert act(TOGGLE)[3] == []
    assert act(FORWARD)[1:] == (-0.01, False, ["at_door"])
    act(FORWARD)
    assert act(FORWARD)[1:] == (-1.0, True, ["at_lava"])
