"""n-step transitions of several environments, against sums written out step by step."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.modules import QValueActor

from recipes import dqn
from recipes.common.collector import TERMINATED, NStep
from tests.recipes.runs import Recipe, noted_replays, tiny

GAMMA = 0.9


def steps(number, ends):
    """One step of every environment; `ends` maps environments to "terminated" or "truncated"."""
    envs = 3
    names = {
        name: torch.tensor([[ends.get(env) == name] for env in range(envs)]) for name in ("terminated", "truncated")
    }
    time = torch.full((envs, 1), float(number)) + 100 * torch.arange(envs).unsqueeze(1)
    after = {
        "observation": time + 0.5,
        "reward": time.square(),
        "done": names["terminated"] | names["truncated"],
        **names,
    }
    after["events"] = {"goal": torch.full((envs, 1), number % 4 == 0)}
    return TensorDict({"observation": time, "next": after}, [envs])


def naive(rows, n):
    """The n-step transitions of one environment's rows, those of the last n left out."""
    found = []
    for i in range(len(rows) - n):
        reward = 0.0
        for k in range(n):
            row = rows[i + k]
            reward += GAMMA**k * row["next", "reward"].item()
            if row["next", "done"]:
                break
        found.append((reward, row["next", "observation"].item(), k + 1, bool(row["next", "terminated"])))
    return found


@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("chunks", [[12, 6, 6, 6], [6, 1, 1, 1, 1, 20]])
def test_transitions_sum_up_the_rewards_of_n_steps_within_an_episode(n, chunks):
    rng = np.random.default_rng(0)
    all_steps = []
    for number in range(sum(chunks)):
        ends = {env: rng.choice(["terminated", "truncated"]) for env in range(3) if rng.random() < 0.2}
        all_steps.append(steps(number, ends))
    n_step, written, first = NStep(n, GAMMA, 3, flags=["goal"]), [], 0
    for chunk in chunks:
        before = n_step.missing
        written.append(n_step(torch.cat(all_steps[first : first + chunk])))
        assert len(written[-1]) == (chunk - before) * 3
        first += chunk
    written = torch.cat(written).reshape(-1, 3)
    original = torch.stack(all_steps)
    for env in range(3):
        rows, mine = original[:, env], written[:, env]
        expected = naive(rows, n)
        assert len(mine) == len(expected) == len(rows) - n
        columns = [torch.tensor(column) for column in zip(*expected, strict=True)]
        found = mine["next", "reward"], mine["next", "observation"], mine["steps_to_next_obs"], mine["next", TERMINATED]
        for column, own in zip(columns, found, strict=True):
            torch.testing.assert_close(own.flatten().to(column.dtype), column)
        for key in (
            "observation",
            ("next", "done"),
            ("next", "terminated"),
            ("next", "truncated"),
            ("next", "events", "goal"),
        ):
            assert torch.equal(mine[key], rows[key][:-n]), key


@pytest.mark.parametrize(("name", "sampler"), [("dqn", "per"), ("dqn", "uniform"), ("td3", "reaper"), ("sac", "rank")])
def test_runs_store_n_step_transitions(tmp_path, name, sampler):
    words = [f"{name}.n_step=3", f"sampler={sampler}", "num_envs=2", "+env.options={max_episode_steps: 7}"]
    with noted_replays() as replays:
        Recipe(name, tiny(name)).run(tmp_path, *words)
    (replay,) = replays
    stored = replay[:]
    # 6 steps (3 of each environment) are held back, and 64 slots keep the newest
    assert replay.write_count == 96 // 16 * 16 and len(stored) == 64
    number = stored["steps_to_next_obs"]
    assert set(number.tolist()) == {1, 2, 3}
    own_end = stored["next", "done"].flatten()
    assert (number[own_end] == 1).all()
    assert torch.equal(number == 1, own_end)


def test_targets_are_those_of_n_steps():
    """Double DQN, written out: rewards of up to n steps, then the value discounted by their number."""
    torch.manual_seed(0)
    settings = Recipe("dqn", tiny("dqn")).settings("dqn.n_step=3", "dqn.gamma=0.9", "dqn.loss_function=l2")
    network = torch.nn.Linear(1, 2)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss_module, _ = dqn.make_loss(settings, actor)
    # the network prefers action 1 from observation 50 on, the target network from 150 on
    targets = {key[-1]: value for key, value in loss_module.target_value_network_params.items(True, True)}
    for linear, scale, bound in ((dict(network.named_parameters()), 1.0, 50.0), (targets, 2.0, 150.0)):
        linear["weight"].data.copy_(torch.tensor([[0.0], [scale]]))
        linear["bias"].data.copy_(torch.tensor([scale * bound, 0.0]))
    n_step = NStep(3, 0.9, 3, flags=["goal"])
    batch = n_step(
        torch.cat([steps(number, {0: "terminated", 1: "truncated"} if number == 5 else {}) for number in range(9)])
    )
    batch["action"] = torch.randint(2, (len(batch),))
    loss_module(batch)

    def values(observation):
        return actor(TensorDict(observation=observation))["action_value"]

    with torch.no_grad():
        q, following = values(batch["observation"]), values(batch["next", "observation"])
        with loss_module.target_value_network_params.to_module(loss_module.value_network):
            later = loss_module.value_network(TensorDict(observation=batch["next", "observation"]))["action_value"]
    assert (later.argmax(1) != following.argmax(1)).sum() == 6  # those of the second environment
    value = later.gather(1, following.argmax(1, keepdim=True)).squeeze(1)
    ended = batch["next", TERMINATED].flatten()
    assert ended.sum() == 3  # steps 3, 4 and 5 of the first environment
    expected = batch["next", "reward"].flatten() + 0.9 ** batch["steps_to_next_obs"] * ~ended * value
    error = expected - q.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(batch["td_error"].flatten(), error.square())
