"""DecoupledSampler: the batches of the actor, the sampler of the critic, copies, graphs and bad input."""

import copy
import math
import pickle
from unittest.mock import patch

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import OneHot
from torchrl.data.replay_buffers import RandomSampler
from torchrl.modules import (
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    TruncatedNormal,
)

from tests.chi_square import p_value
from tests.data import buffer_with, event_sampler, learn, linear_policy, rows
from tests.events import scripted
from torchrl_replay_ext import DecoupledSampler, ProportionalSampler, ReaPERSampler
from torchrl_replay_ext.functional import gaussian_policy_kl

POLICY = linear_policy(3, 2)
torch.nn.init.normal_(POLICY.module.weight, generator=torch.Generator().manual_seed(1))
torch.nn.init.zeros_(POLICY.module.bias)


def act(observation):
    """The actions of the policy."""
    with torch.no_grad():
        return POLICY.module(observation)


def experience(count):
    """Rows whose actions are closer to the policy the later they are."""
    observation = torch.randn(count, 3)
    spread = torch.linspace(2.0, 0.1, count).unsqueeze(1)
    return rows(count, observation=observation, action=act(observation) + spread * torch.randn(count, 2))


def make(critic=None, policy=POLICY, batch_size=32, count=500, size=1000, data=None, **arguments):
    """Buffers of the critic and of the actor that hold ``data``, by default ``count`` rows of experience."""
    sampler = DecoupledSampler(ProportionalSampler(1000) if critic is None else critic, policy, **arguments)
    rb = buffer_with(sampler, size, batch_size=batch_size)
    actor_rb = sampler.actor_buffer(rb)
    if data is not None or count:
        rb.extend(experience(count) if data is None else data)
    return rb, actor_rb


def score_of(batch):
    return gaussian_policy_kl(batch["action"] - act(batch["observation"]), 0.1)


def test_actions_of_half_precision_are_scored_in_float32():
    policy = copy.deepcopy(POLICY).to(torch.bfloat16)
    data = experience(500)
    data = data.update({key: data[key].to(torch.bfloat16) for key in ("observation", "action")})
    _, actor_rb = make(policy=policy, data=data)
    batch = actor_rb.sample()
    with torch.no_grad():
        difference = batch["action"] - policy.module(batch["observation"])
    torch.testing.assert_close(batch["score"][0], gaussian_policy_kl(difference, 0.1))


def test_the_best_candidate_is_chosen():
    rb, actor_rb = make(num_candidates=4)
    places = set()
    for _ in range(50):
        with patch.object(POLICY.module, "forward", wraps=POLICY.module.forward) as forward:
            batch, info = actor_rb.sample(return_info=True)
        assert forward.call_count == 1
        assert batch.shape == (32,) and batch["candidate_scores"].shape == (32, 4)
        torch.testing.assert_close(batch["score"], batch["candidate_scores"].amin(1))
        torch.testing.assert_close(batch["score"][0], score_of(batch))
        assert torch.equal(batch["observation"], rb.storage[:]["observation"][info["index"]])
        places.add(int(batch["candidate_scores"][0].argmin()))
    assert places == {0, 1, 2, 3}
    assert rb.sampler.stats()["actor_score"] < rb.sampler.stats()["actor_candidate_score"]


def test_one_candidate_is_uniform():
    _, actor_rb = make(num_candidates=1, count=64, batch_size=500)
    drawn = torch.cat([actor_rb.sample(return_info=True)[1]["index"] for _ in range(100)])
    assert p_value(drawn, torch.ones(64)) > 1e-4
    _, actor_rb = make(num_candidates=5, count=64, batch_size=10)
    drawn = torch.cat([actor_rb.sample(return_info=True)[1]["index"] for _ in range(1000)])
    assert p_value(drawn, torch.ones(64)) < 1e-4


def test_groups_choose_more():
    means = {}
    for granularity in ("batch", "group"):
        _, actor_rb = make(num_candidates=4, granularity=granularity, batch_size=64)
        distance = []
        for _ in range(20):
            batch = actor_rb.sample()
            assert batch["candidate_scores"].shape == (64, 4)
            distance.append((batch["action"] - act(batch["observation"])).square().sum(-1).mean())
            if granularity == "group":
                for group in range(4):
                    part = batch[16 * group : 16 * group + 16]
                    torch.testing.assert_close(part["score"][0], score_of(part))
                    torch.testing.assert_close(part["score"], part["candidate_scores"].amin(1))
        means[granularity] = float(torch.stack(distance).mean())
    assert means["group"] < 0.8 * means["batch"]


def stochastic_policy(distribution, **keywords):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=distribution, distribution_kwargs=keywords
    )


def test_stochastic_policies_are_whitened():
    policy, data = stochastic_policy(TanhNormal), experience(200)
    data["action"] = data["action"].clamp(-1, 1)
    _, actor_rb = make(policy=policy, num_candidates=3, data=data)
    batch = actor_rb.sample()
    with torch.no_grad():
        of_policy = policy.get_dist_params(batch.select("observation"))
        u = batch["action"].clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        z = (u - of_policy["loc"]) / of_policy["scale"]
    torch.testing.assert_close(batch["score"][0], gaussian_policy_kl(z, 1.0))


def test_actions_that_no_tanh_gives_are_refused():
    data = experience(200)
    data["action"] = torch.full((200, 2), 2.0)
    _, actor_rb = make(policy=stochastic_policy(TanhNormal), data=data)
    with pytest.raises(ValueError, match=r"DecoupledSampler: a stored action is 2 in absolute value.*\[-1, 1\]"):
        actor_rb.sample()


@pytest.mark.parametrize("columns", [1, 2])
def test_critic_and_actor_do_not_disturb_each_other(columns):
    sampler = DecoupledSampler(ReaPERSampler(1000), POLICY)
    rb = buffer_with(sampler, 1000, ndim=columns, batch_size=32)
    data = experience(500)
    rb.extend(data if columns == 1 else data.reshape(2, 250))
    actor_rb = sampler.actor_buffer(rb, batch_size=16)
    before = sampler.probabilities(rb.storage)
    actor_batch = actor_rb.sample()
    assert actor_batch.shape == (16,)
    assert torch.equal(sampler.probabilities(rb.storage), before)
    learn(rb)
    assert not torch.equal(sampler.probabilities(rb.storage), before)
    assert sampler.stats()["num_items"] == 500


def test_transforms_may_read_and_write_anything():
    def add_reward(data):
        return data.set("seen", data["observation"] + data["next", "done"])

    policy = TensorDictModule(POLICY.module, in_keys=["seen"], out_keys=["action"])
    rb, actor_rb = make(policy=policy)
    rb.append_transform(add_reward)
    batch = actor_rb.sample()
    torch.testing.assert_close(batch["seen"], batch["observation"])
    torch.testing.assert_close(batch["score"][0], score_of(batch))


def test_a_candidate_that_is_not_a_number_is_never_chosen():
    data = experience(200)
    data["action"][::9] = math.nan
    _, actor_rb = make(RandomSampler(), batch_size=4, data=data)
    for _ in range(100):
        batch = actor_rb.sample()
        assert batch["action"].isfinite().all() or batch["candidate_scores"].isinf().all()


def test_what_the_critics_sampler_answers():
    rb, actor_rb = make(ProportionalSampler(1000, alpha=0.7, beta=0.5))
    assert (rb.sampler.alpha, rb.sampler.beta) == pytest.approx((0.7, 0.5))
    rb.sampler.beta = 0.9
    assert rb.sampler.critic_sampler.beta == pytest.approx(0.9)
    rb.empty()
    with pytest.raises(RuntimeError, match="empty"):
        actor_rb.sample()
    with pytest.raises(AttributeError):
        _ = make(RandomSampler())[0].sampler.alpha


def test_event_tables_for_the_critic():
    sampler = DecoupledSampler(event_sampler(30, ("next", "a"), 5), linear_policy(3, 1))
    rb = buffer_with(sampler, 100, batch_size=16)
    data = scripted(80)
    data["action"] = torch.randn(80, 1)
    rb.extend(data)
    assert (rb.sample()["table"] == 1).sum() == 8
    sampler.event_share = 0.25
    assert (rb.sample()["table"] == 1).sum() == 4
    assert sampler.actor_buffer(rb).sample()["score"].isfinite().all()


def test_pickles_leave_the_policy_out():
    rb, actor_rb = make()
    for each in (rb, actor_rb):
        assert b"Linear" not in pickle.dumps(each)
    other = pickle.loads(pickle.dumps(rb))
    assert other.sample().shape == (32,)
    actor = other.sampler.actor_buffer(other)
    with pytest.raises(RuntimeError, match=r"set sampler\.policy first"):
        actor.sample()
    other.sampler.policy = POLICY
    assert actor.sample().shape == (32,)
    # copies in memory share it
    assert copy.deepcopy(rb).sampler.policy is POLICY


# --- in a graph


@pytest.mark.usefixtures("from_scratch")
def test_one_graph_draws_what_eager_code_draws():
    policy = linear_policy(3, 2)
    sampler = DecoupledSampler(ProportionalSampler(1000), policy, num_candidates=3, granularity="group")
    rb = buffer_with(sampler, 1000, compilable=True, batch_size=32)
    rb.extend(experience(400))
    actor_rb = sampler.actor_buffer(rb)

    def draw():
        return rb.sample(), actor_rb.sample()

    in_graph = torch.compile(draw, fullgraph=True)
    with torch._inductor.config.patch(fallback_random=True):
        for seed in range(5):
            torch.manual_seed(seed)
            expected, of_actor = draw()
            torch.manual_seed(seed)
            found, actor_found = in_graph()
            assert torch.equal(expected["index"], found["index"])
            assert torch.equal(of_actor["observation"], actor_found["observation"])
            for key in ("score", "candidate_scores"):
                torch.testing.assert_close(of_actor[key], actor_found[key], rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                policy.module.weight.mul_(0.9)


LOGITS = TensorDictModule(torch.nn.Linear(3, 3), in_keys=["observation"], out_keys=["logits"])
GREEDY = QValueActor(torch.nn.Linear(3, 3), in_keys=["observation"], spec=OneHot(3))
WIDE = {"low": -torch.ones(2), "high": torch.tensor([1.0, 2.0])}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (stochastic_policy(TanhNormal, low=-2.0, high=2.0), "set noise_scale"),
        (stochastic_policy(TanhNormal, **WIDE), "set noise_scale"),
        (stochastic_policy(TanhNormal, tanh_loc=True), "set noise_scale"),
        (stochastic_policy(TruncatedNormal), "set noise_scale"),
        (ProbabilisticActor(LOGITS, ["logits"], distribution_class=OneHotCategorical), "distribution OneHotCategoric"),
        (GREEDY, "a spec of class OneHot"),
    ],
)
def test_policies_without_a_gaussian_or_without_continuous_actions_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        DecoupledSampler(RandomSampler(), policy)


def test_pinned_tables_are_refused():
    sampler = DecoupledSampler(event_sampler(30, ("next", "a"), 5, default=50), POLICY)
    rb = buffer_with(sampler, 80, batch_size=16)
    with pytest.raises(ValueError, match="leave some slots in no table; use retention='ring'"):
        sampler.actor_buffer(rb)


def test_what_does_not_fit_together():
    rb, _ = make()
    for batch_size, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="batch_size must be an integer >= 1"):
            rb.sampler.actor_buffer(rb, batch_size=batch_size)
    rb, actor_rb = make(noise_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"noise_scale has shape \(3,\)"):
        actor_rb.sample()
    with pytest.raises(ValueError, match="must be the buffer that has this sampler"):
        rb.sampler.actor_buffer(make()[0])
    rb, _ = make(granularity="group", batch_size=32)
    with pytest.raises(ValueError, match="group_size=16 must divide it"):
        rb.sampler.actor_buffer(rb, batch_size=24)
    _, actor_rb = make(data=experience(20).exclude("action"))
    with pytest.raises(KeyError, match=r"no entries \['action'\]"):
        actor_rb.sample()


ONE_HOT = torch.nn.functional.one_hot(torch.arange(40) % 3)


@pytest.mark.parametrize(
    ("stored", "shape", "dtype"),
    [
        (torch.randn(40), (1,), torch.float32),
        (torch.randn(40, 1), (), torch.float32),
        (torch.randn(40, 3), (1,), torch.float32),
        (torch.randn(40), (), torch.float32),
        (torch.randn(40, 2, 2), (2, 2), torch.float32),
        (ONE_HOT, (3,), torch.float32),
        (ONE_HOT.float(), (3,), torch.int64),
    ],
    ids=["flat", "flat policy", "broadcast", "both flat", "agents", "discrete", "discrete policy"],
)
def test_actions_must_be_rows_of_numbers(stored, shape, dtype):
    """The policy's actions of an observation have this shape and dtype."""

    def first_entry(observation):
        return observation[:, :1].reshape(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)

    policy = TensorDictModule(first_entry, in_keys=["observation"], out_keys=["action"])
    _, actor_rb = make(policy=policy, data=rows(40, observation=torch.randn(40, 3), action=stored))
    with pytest.raises(ValueError, match=r"stored actions are .* both must be continuous, \[B, A\]"):
        actor_rb.sample()


def test_the_actors_buffer_collates_as_the_critics():
    def collate(data):
        return data.set("collated", torch.ones(data.shape))

    sampler = DecoupledSampler(RandomSampler(), POLICY)
    rb = buffer_with(sampler, 100, batch_size=8, collate_fn=collate, transform=lambda data: data)
    rb.extend(experience(50))
    for buffer in (rb, sampler.actor_buffer(rb)):
        assert (buffer.sample()["collated"] == 1).all()


def test_the_actors_buffer_takes_neither_data_nor_priorities():
    rb, actor_rb = make()
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        actor_rb.extend(experience(5))
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        actor_rb.empty()
    assert len(rb) == 500
    batch = actor_rb.sample()
    assert "index" not in batch
    batch["td_error"] = torch.rand(32)
    for part in (batch, batch[16:].clone()):
        with pytest.raises((AttributeError, KeyError)):
            rb.update_tensordict_priority(part)
        with pytest.raises(ValueError, match="The actor's buffer takes no priorities"):
            actor_rb.update_tensordict_priority(part)
