"""Event tables in the recipes: from the environment's info to what batches are made of."""

from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

from recipes import dqn
from recipes.common.collector import EpsilonRandom, VectorCollector
from recipes.common.config import EnvConfig
from recipes.common.environment import make_discrete_env
from recipes.common.remote import FlagReader
from recipes.common.replay import land_between_flags, land_near_middle
from tests.recipes.countdown import Countdown
from tests.recipes.runs import Recipe, buffer_of, composed, eager_and_compiled, tiny

# near_initial happens within the first steps
TINY = [
    "env=tworooms",
    "+env.events.near_initial={history: 5, eta: 0.1}",
    "sampler=sset",
    *tiny("dqn", evaluation_episodes=None, hidden_sizes=None),
    "+env.options.max_episode_steps=30",
]
recipe = Recipe("dqn", TINY)


def single(flags):
    env = GymWrapper(Countdown(), categorical_action_encoding=True)
    env.set_info_dict_reader(FlagReader(flags))
    policy = QValueActor(torch.nn.Linear(1, 3), in_keys=["observation"], action_space="categorical")
    return Collector(env, policy, frames_per_batch=12, auto_register_policy_transforms=False)


def vector(flags):
    behaviour = EpsilonRandom(lambda observations: np.zeros(len(observations)), Countdown.action_space, seed=0)
    return VectorCollector(
        [Countdown, lambda: Countdown(3), lambda: Countdown(1)], behaviour, frames_per_batch=36, seed=0, flags=flags
    )


@pytest.mark.parametrize("make", [single, vector])
def test_flags_arrive_on_the_last_step_of_an_episode_too(make):
    source = make(("second", "last", "late"))
    data = next(iter(source))
    events = data["next", "events"]
    left = data["next", "observation"]
    length = torch.tensor([4.0, 4.0, 4.0] if make is single else [4.0, 3.0, 1.0]).repeat(len(data) // 3)[:, None]
    assert all(flag.dtype == torch.bool and flag.shape == (len(data), 1) for flag in events.values())
    assert torch.equal(events["second"], left == length - 2)
    assert torch.equal(events["last"], data["next", "done"]) and torch.equal(events["late"], data["next", "done"])
    assert events["last"].any() and events["second"].any()
    source.shutdown()


@pytest.mark.parametrize(
    ("sampler", "backend"),
    [
        ("sset_per", "aot_eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("sset", "sset_per")),
    ],
)
def test_tables_fill_and_the_compiled_update_learns_what_the_eager_one_does(tmp_path, monkeypatch, sampler, backend):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    results = []
    for table in eager_and_compiled(recipe, tmp_path, f"sampler={sampler}", "sampler.min_size=1"):
        assert int(float(table[-1]["sampler/size_near_initial"])) == 6  # .1 of 64, its capacity
        assert int(float(table[-1]["sampler/size_default"])) == 38
        results.append([float(row[name]) for row in table[1:] for name in ("loss", "q_sum", "q_error")])
    assert np.isfinite(results).all()
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def steps(trajectories):
    """One step of each of these trajectories, in which nothing happens."""
    no = torch.zeros(len(trajectories), 1, dtype=torch.bool)
    events = {name: no.clone() for name in ("at_gap", "done", "near_initial", "near_goal")}
    following = {"done": no, "terminated": no.clone(), "truncated": no.clone(), "events": events}
    data = {"collector": {"traj_ids": torch.tensor(trajectories)}, "next": following}
    return TensorDict(data, [len(trajectories)])


def test_priorities_inside_tables_are_told_what_td_errors_are_and_annealed():
    cfg = recipe.configuration("sampler=sset_per", "sampler.priority.beta={start: 0.4, end: 1.0}")
    replay = buffer_of(cfg, "absolute")
    sampler = replay.sampler
    assert sampler.tables.names == ["default", "at_gap", "done", "near_initial"]
    assert sampler.eta == pytest.approx({"default": 0.6, "at_gap": 0.15, "done": 0.15, "near_initial": 0.1})
    assert "td_error='absolute'" in repr(sampler)
    assert sampler.alpha == pytest.approx(0.65) and sampler.beta == pytest.approx(0.4)
    replay.extend(steps([0]))
    for _ in range(cfg.dqn.num_updates()):
        replay.update_priority(torch.tensor([0]), torch.ones(1))
    assert sampler.beta == pytest.approx(1.0)


def test_shares_are_annealed_over_all_updates(tmp_path):
    schedule = "env.events.done.eta={start: 0.05, end: 0.25}"
    words = (schedule, "sampler.min_size=1", "dqn.train_interval=8", "updates_per_graph=2")
    changed = {word.split("=")[0] for word in words}
    config = composed("dqn", *(word for word in TINY if word.split("=")[0] not in changed), *words)
    table = recipe.train(config, tmp_path)
    # 16 updates: 8 rounds of 2, the first one after 40 steps
    for row, updates in zip(table, (0, 8, 16), strict=True):
        assert int(row["updates"]) == updates
        assert float(row["sampler/eta_done"]) == pytest.approx(0.05 + 0.2 * updates / 16)
        assert float(row["sampler/eta_default"]) == pytest.approx(0.7 - 0.2 * updates / 16)
        assert int(float(row["sampler/size_done"])) <= 16  # .25 of 64, the largest share


def test_q_columns_are_those_of_the_target_network():
    torch.manual_seed(0)
    config = EnvConfig("threerooms", "recipes.envs:ThreeRooms-v0", None)
    actor = QValueActor(torch.nn.Linear(3, 3), in_keys=["observation"], action_space="categorical")
    loss_module = DQNLoss(actor, delay_value=True, action_space="categorical")
    SoftUpdate(loss_module, tau=0.5)
    columns = dqn.room_columns(config, dqn.TargetValues(loss_module, torch.device("cpu")), 0.9)
    world = make_discrete_env(config).unwrapped
    q = actor(observation=torch.from_numpy(world.observations[:-4]))[1].detach().numpy()
    for parameter in loss_module.parameters():
        parameter.data.zero_()  # the network itself has nothing to do with it
    values = columns()
    assert values["q_sum"] == pytest.approx(q.sum(), rel=1e-5)
    error = q - world.dynamics.optimal_q(0.9)[:-4]
    assert values["q_error"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)
    assert dqn.room_columns(EnvConfig("cartpole", "CartPole-v1", None), None, 0.9)() == {}


def test_events_that_adapt_need_nothing_from_the_environment(tmp_path):
    events = "{best: {quantile: 0.5, history: 5, eta: 0.2}, new: {novel: 2, history: 5, eta: 0.2}}"
    words = [word for word in TINY if "events" not in word]
    config = composed("dqn", *words, "~env.events.at_gap", "~env.events.done", f"+env.events={events}")
    assert not config.env.flags
    last = recipe.train(config, tmp_path)[-1]
    # all rewards are the same
    assert int(float(last["sampler/size_best"])) == 0 and int(float(last["sampler/size_new"])) > 0


def test_lunar_lander_conditions():
    lf, lm = "land_between_flags", "land_near_middle"
    #       x     y    vx vy θ ω left right
    hand = [
        ((0.2, 0.0, 0, 0, 0, 0, 1, 1), {lf}),
        ((-0.15, 0.3, 0, 0, 0, 0, 1, 1), {lf}),
        ((0.21, 0.0, 0, 0, 0, 0, 1, 1), set()),
        ((0.0, 0.0, 0, 0, 0, 0, 1, 0), {lm}),
        ((0.0, 0.0, 0, 0, 0, 0, 0, 1), {lm}),
        ((-0.1, 0.1, 0, 0, 0, 0, 0, 0), {lm}),
        ((0.0, -0.11, 0, 0, 0, 0, 1, 1), {lf}),
        ((0.05, 0.05, 0, 0, 0, 0, 1, 1), {lf, lm}),
    ]
    data = TensorDict(next={"observation": torch.tensor([state for state, _ in hand])}, batch_size=[len(hand)])
    assert land_between_flags(data).tolist() == [lf in events for _, events in hand]
    assert land_near_middle(data).tolist() == [lm in events for _, events in hand]
