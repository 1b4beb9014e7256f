import math
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
import torch

from recipes import acer
from recipes.common import evaluation
from recipes.common.config import EnvConfig
from recipes.common.environment import make_env
from recipes.common.networks import OBSERVED
from tests.recipes.countdown import Countdown
from tests.recipes.runs import RECIPES
from torchrl_replay_ext import CompilableReplayBuffer

recipe = RECIPES["acer"]
DISCRETE, CONTINUOUS = "env=cartpole", "env=pendulum"


class FromOne(Countdown):
    """Has the actions 1 and 2."""

    action_space = gymnasium.spaces.Discrete(2, start=1)
    received: ClassVar[set[int]] = set()

    def step(self, action):
        self.received.add(int(action))
        return super().step(action)


@pytest.mark.parametrize("name", ["acer", "dqn"])
def test_environments_receive_actions_of_their_own_numbering(tmp_path, monkeypatch, name):
    monkeypatch.setitem(
        gymnasium.registry, "FromOne-v0", gymnasium.envs.registration.EnvSpec("FromOne-v0", entry_point=FromOne)
    )
    FromOne.received.clear()
    RECIPES[name].run(tmp_path, "env=cartpole", "env.id=FromOne-v0")
    assert FromOne.received == {1, 2}


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["acer.returns=importance_sampling", "acer.trust_region=false", "acer.c=inf"], DISCRETE),
        (["acer.statistics=logits", "acer.shared_layers=true"], DISCRETE),
        (["acer.returns=importance_sampling", "acer.shared_layers=true", "acer.dueling=false"], CONTINUOUS),
        (["acer.use_q_opc=false", "acer.trust_region=false", "acer.normalize_observations=true"], CONTINUOUS),
        (["acer.on_policy=false", "acer.c=inf"], CONTINUOUS),
    ],
)
def test_switches_of_the_ablation(tmp_path, words, env):
    last = recipe.run(tmp_path, env, *words)[-1]
    assert np.isfinite([float(last[name]) for name in ("loss_actor", "loss_qvalue", "kl")]).all()
    if "acer.trust_region=false" in words:
        assert float(last["tr_active"]) == 0
    if "acer.c=inf" in words:
        assert float(last["bc_weight"]) == 0


@pytest.mark.parametrize(
    ("words", "on_policy"),
    [
        (["acer.shared_layers=true", "sampler=per"], False),
        (["acer.trust_region=false", "acer.on_policy=false"], False),
        (["acer.replay_ratio=0", "acer.dueling=false"], True),
    ],
)
def test_baselines_of_the_paper_learn_v_and_no_q(tmp_path, words, on_policy):
    words = ["acer.returns=truncated_importance_sampling", "acer.learning_rate=0.1", *words]
    last = {key: float(value) for key, value in recipe.run(tmp_path, CONTINUOUS, *words)[-1].items()}
    assert np.isfinite([last[name] for name in ("loss_actor", "kl", "tr_active")]).all()
    assert (last["loss_qvalue"], last["bc_weight"]) == (0, 0)
    assert last["loss_value"] > 0
    # on-policy, all importance ratios are 1
    assert (abs(last["rho"] - 1) < 1e-4) == on_policy


@pytest.mark.parametrize("on_policy", [True, False])
def test_rounds_are_those_of_algorithm_1(tmp_path, monkeypatch, on_policy):
    """The newest steps once, then Poisson(replay_ratio) replayed batches."""
    calls, names = [], ["loss_actor", "loss_qvalue", "loss_entropy", "entropy", "kl", "rho", "bc_weight", "tr_active"]

    def fake(name):
        def update():
            calls.append(name)
            return dict.fromkeys(names, torch.zeros(1))

        return update

    monkeypatch.setattr(acer, "make_updates", lambda *_, **__: (fake("newest"), fake("replayed")))
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: [evaluation.Episode({})])
    words = ["acer.total_steps=8000", "acer.replay_ratio=3", f"acer.on_policy={on_policy}", "acer.num_evaluations=1"]
    recipe.run(tmp_path, *words)
    counts, rounds = np.unique(calls, return_counts=True), 500
    counts = dict(zip(*(column.tolist() for column in counts), strict=True))
    assert counts.get("newest", 0) == rounds * on_policy
    # 4 standard deviations
    assert abs(counts["replayed"] - 3 * rounds) < 4 * math.sqrt(3 * rounds)
    # those on the newest steps draw nothing, and schedules count draws
    assert recipe.configuration(*words).acer.num_updates() == 3 * rounds


def test_td_errors_of_replayed_slices_are_given_back_to_the_buffer(tmp_path, monkeypatch):
    """Those of the loss with the networks that drew the slices; a learning rate of almost 0 keeps them as they are."""
    returned, losses, make, update = [], [], acer.make_updates, CompilableReplayBuffer.update_tensordict_priority

    def noting(replay, batch):
        returned.append(batch.clone())
        update(replay, batch)

    def making(settings, replay, loss_module, *rest, **options):
        losses.append((loss_module, replay))
        return make(settings, replay, loss_module, *rest, **options)

    monkeypatch.setattr(CompilableReplayBuffer, "update_tensordict_priority", noting)
    monkeypatch.setattr(acer, "make_updates", making)
    words = ["sampler=per", "acer.learning_rate=1e-30", "acer.replay_ratio=2", "acer.reward_scale=1"]
    assert float(recipe.run(tmp_path, *words)[-1]["sampler/never_updated"]) < 1
    ((loss_module, replay),) = losses
    assert len(returned) > 3 and replay.sampler.stats()["never_updated"] < 1
    for batch in returned:
        again = batch.exclude("td_error").reshape(-1, 4)
        loss_module(again, shifted=True)
        assert again["td_error"].unique().numel() > 1
        torch.testing.assert_close(batch["td_error"], again["td_error"].reshape(-1))


def test_behaviour_keeps_what_it_drew_from():
    torch.manual_seed(0)
    observations = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    normalizer = acer.Normalizer(3, active=False)
    logits = torch.nn.Linear(3, 4)
    drawn = acer.CurrentPolicy(logits, normalizer, torch.device("cpu"))(observations)
    expected = logits(torch.as_tensor(observations)).detach()
    np.testing.assert_allclose(drawn["logits"], expected, rtol=1e-5, atol=1e-6)
    shares = np.bincount(drawn["action"], minlength=4) / 5000
    np.testing.assert_allclose(shares, expected.softmax(-1).mean(0), atol=0.03)

    policy = acer.FixedScale(torch.nn.Linear(3, 2), 0.4)
    drawn = acer.CurrentPolicy(policy, normalizer, torch.device("cpu"))(observations)
    whitened = (drawn["action"] - drawn["loc"]) / drawn["scale"]
    assert (drawn["scale"] == np.float32(0.4)).all()
    assert abs(whitened.mean()) < 0.05 and abs(whitened.std() - 1) < 0.05


def test_normalizer():
    torch.manual_seed(0)
    data = 3 * torch.randn(1000, 2) + torch.tensor([1.0, -5.0])
    normalizer = acer.Normalizer(2, active=True)
    assert torch.equal(normalizer(data[:1] / 10), data[:1] / 10)  # nothing is known yet
    for part in data.split(130):
        normalizer.update(part)
    expected = (data - data.mean(0)) / data.std(0, correction=0)
    torch.testing.assert_close(normalizer(data), expected, rtol=1e-4, atol=1e-5)
    assert normalizer(data).dtype == torch.float32
    assert normalizer(1e6 * data).abs().max() == OBSERVED


def test_actions_out_of_range_count_as_the_bound():
    env = make_env(EnvConfig(name="pendulum", id="Pendulum-v1", reward_threshold=None))
    following = []
    for action in (1.0, 7.0):
        env.reset(seed=0)
        following.append(env.step(np.array([action], dtype=np.float32))[0])
    np.testing.assert_array_equal(*following)
