"""DecoupledSampler: the divergence of policies, the batches and the noise of the actor, the sampler of the critic."""

import copy
import math
import pickle

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torchrl.data import OneHot
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement
from torchrl.modules import (
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    TruncatedNormal,
)

from tests.chi_square import p_value
from tests.data import buffer_with, event_sampler, learn, linear_policy
from tests.events import scripted
from tests.samplers.experience import assert_same_state
from torchrl_replay_ext import (
    DecoupledSampler,
    ProportionalSampler,
    ReaPERSampler,
    RecencySampler,
)
from torchrl_replay_ext.functional import gaussian_policy_kl, ornstein_uhlenbeck_scale

# --- the divergence


def moments(difference):
    mean = difference.mean(0)
    centred = difference - mean
    return mean, centred.T @ centred / len(difference)


def test_the_full_divergence_is_that_of_torch():
    torch.manual_seed(0)
    difference = torch.randn(5, 40, 3, dtype=torch.float64)
    noise = torch.tensor([[0.5, 0.1, 0.0], [0.1, 0.4, 0.05], [0.0, 0.05, 0.3]], dtype=torch.float64)
    for eps in (0.0, 1e-2):
        result = gaussian_policy_kl(difference, noise, covariance="full", eps=eps)
        for k in range(5):
            mean, covariance = moments(difference[k])
            ours = MultivariateNormal(mean, covariance + eps * torch.eye(3))
            expected = kl_divergence(ours, MultivariateNormal(torch.zeros(3, dtype=torch.float64), noise))
            torch.testing.assert_close(result[k], expected)
    scale = torch.tensor([0.5, 0.2, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        gaussian_policy_kl(difference, scale, covariance="full"),
        gaussian_policy_kl(difference, scale.square().diag(), covariance="full"),
    )


def test_the_diagonal_divergence_is_that_of_torch():
    torch.manual_seed(0)
    difference = torch.randn(40, 3, dtype=torch.float64) * torch.tensor([0.1, 1.0, 3.0])
    for scale in (0.3, torch.tensor([0.5, 0.2, 1.0], dtype=torch.float64)):
        mean, covariance = moments(difference)
        ours = Normal(mean, covariance.diagonal().sqrt())
        expected = kl_divergence(ours, Normal(torch.zeros(3, dtype=torch.float64), scale)).sum()
        torch.testing.assert_close(gaussian_policy_kl(difference, scale, eps=0.0), expected)
    # MSE / 2s - 1/2 (1 + ln(v / s))
    mean, covariance = moments(difference)
    mse, v, s = difference.square().mean(0), covariance.diagonal(), 0.09
    torch.testing.assert_close(
        gaussian_policy_kl(difference, 0.3, eps=0.0), (mse / (2 * s) - 0.5 * (1 + (v / s).log())).sum()
    )


def test_singular_covariances_are_infinitely_far_and_never_nan():
    assert gaussian_policy_kl(torch.zeros(10, 2), 0.1, eps=0.0) == math.inf
    assert gaussian_policy_kl(torch.zeros(10, 2), 0.1, covariance="full", eps=0.0) == math.inf
    assert gaussian_policy_kl(torch.zeros(10, 2), 0.1).isfinite()
    few = torch.randn(7, 3, 3)
    assert gaussian_policy_kl(few, 0.1, covariance="full").tolist() == [math.inf] * 7
    assert gaussian_policy_kl(few, 0.1).isfinite().all()
    copies = torch.tensor([[1.0], [-1.0], [3.0]]).expand(3, 2)
    assert gaussian_policy_kl(copies, 0.1, covariance="full", eps=0.0) == math.inf


def test_ornstein_uhlenbeck_noise():
    torch.manual_seed(0)
    x, values = torch.zeros(2000), []
    for step in range(400):
        x = x - 0.15 * x * 0.5 + 0.3 * math.sqrt(0.5) * torch.randn(2000)
        if step > 200 and step % 20 == 0:
            values.append(x)
    assert ornstein_uhlenbeck_scale(0.3, 0.15, 0.5) == pytest.approx(float(torch.cat(values).std()), rel=0.03)
    with pytest.raises(ValueError, match="0 < theta"):
        ornstein_uhlenbeck_scale(0.3, 3.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_scale": torch.ones(3)}, r"noise_scale has shape \(3,\); actions of 2 dimensions"),
        ({"noise_scale": 0.1, "covariance": "block"}, "covariance must be 'diag' or 'full'"),
        ({"noise_scale": 0.1, "eps": -1.0}, "eps must be >= 0 and finite"),
        ({"noise_scale": 1e-23, "eps": 0.0}, "its square"),
        ({"noise_scale": math.inf}, "noise_scale must be finite"),
        ({"noise_scale": math.nan}, "noise_scale must be finite"),
        ({"noise_scale": 0.0}, "noise_scale must be > 0"),
        ({"noise_scale": torch.tensor([0.1, -0.1])}, "noise_scale must be > 0"),
        ({"noise_scale": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}, "a covariance matrix must be symmetric"),
        ({"noise_scale": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}, "must be positive definite"),
        # not in float32, in which the differences are
        ({"noise_scale": torch.tensor([[1.0, 1 - 1e-9], [1 - 1e-9, 1.0]], dtype=torch.float64)}, "positive definite"),
    ],
)
def test_bad_arguments_of_the_divergence(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_policy_kl(torch.randn(5, 2), **arguments)


@pytest.mark.parametrize("covariance", ["diag", "full"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype, covariance):
    difference = torch.randn(20, 2, dtype=dtype) * 1e-3
    found = gaussian_policy_kl(difference, 1e-4, covariance=covariance, eps=1e-12)
    torch.testing.assert_close(found, gaussian_policy_kl(difference.float(), 1e-4, covariance=covariance, eps=1e-12))
    with pytest.raises(TypeError, match=r"must be floating point, not torch.int64"):
        gaussian_policy_kl(torch.ones(5, 2, dtype=torch.int64), 0.1)


# --- the sampler


class Linear(torch.nn.Module):
    """A policy that counts its calls."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 2, generator=torch.Generator().manual_seed(1)))
        self.calls = 0

    def forward(self, observation):
        self.calls += 1
        return observation @ self.weight


def make_policy():
    return TensorDictModule(Linear(), in_keys=["observation"], out_keys=["action"])


def experience(count, policy=None, seed=0):
    """Rows whose actions are closer to the policy the later they are."""
    generator = torch.Generator().manual_seed(seed)
    observation = torch.randn(count, 3, generator=generator)
    spread = torch.linspace(2.0, 0.1, count).unsqueeze(1)
    weight = (policy or make_policy()).module.weight.detach()
    action = observation @ weight + spread * torch.randn(count, 2, generator=generator)
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict(
        {"observation": observation, "action": action, "number": torch.arange(count), "next": {"done": done}}, [count]
    )


def make(critic=None, policy=None, batch_size=32, count=500, size=1000, **arguments):
    policy = make_policy() if policy is None else policy
    sampler = DecoupledSampler(ProportionalSampler(1000) if critic is None else critic, policy, **arguments)
    rb = buffer_with(sampler, size, batch_size=batch_size, priority_key="td_error")
    actor_rb = sampler.actor_buffer(rb)
    if count:
        rb.extend(experience(count))
    return rb, actor_rb


def score_of(batch, policy, **arguments):
    with torch.no_grad():
        difference = batch["action"] - policy.module(batch["observation"])
    return gaussian_policy_kl(difference, arguments.pop("noise_scale", 0.1), **arguments)


@pytest.mark.parametrize("covariance", ["diag", "full"])
def test_the_best_candidate_is_chosen(covariance):
    torch.manual_seed(0)
    policy = make_policy()
    rb, actor_rb = make(policy=policy, num_candidates=4, covariance=covariance)
    places = set()
    for _ in range(50):
        before = policy.module.calls
        batch = actor_rb.sample()
        assert policy.module.calls == before + 1
        assert batch.shape == (32,) and batch["candidate_scores"].shape == (32, 4)
        torch.testing.assert_close(batch["score"], batch["candidate_scores"].amin(1))
        torch.testing.assert_close(batch["score"][0], score_of(batch, policy, covariance=covariance))
        assert torch.equal(batch["observation"], rb.storage[:]["observation"][batch["index"]])
        places.add(int(batch["candidate_scores"][0].argmin()))
    assert places == {0, 1, 2, 3}
    assert rb.sampler.stats()["actor_score"] < rb.sampler.stats()["actor_candidate_score"]


def test_one_candidate_is_uniform():
    torch.manual_seed(0)
    _, actor_rb = make(num_candidates=1, count=64, batch_size=500)
    drawn = torch.cat([actor_rb.sample()["index"] for _ in range(100)])
    assert p_value(drawn, torch.ones(64)) > 1e-4
    _, actor_rb = make(num_candidates=5, count=64, batch_size=10)
    drawn = torch.cat([actor_rb.sample()["index"] for _ in range(1000)])
    assert p_value(drawn, torch.ones(64)) < 1e-4


def test_groups_and_transitions_choose_more():
    torch.manual_seed(0)
    means = {}
    for granularity in ("batch", "group", "transition"):
        policy = make_policy()
        _, actor_rb = make(policy=policy, num_candidates=4, granularity=granularity, batch_size=64)
        distance = []
        for _ in range(20):
            batch = actor_rb.sample()
            assert batch["candidate_scores"].shape == (64, 4)
            with torch.no_grad():
                each = (batch["action"] - policy.module(batch["observation"])).square().sum(-1)
            distance.append(each.mean())
            if granularity == "group":
                for group in range(4):
                    rows = batch[16 * group : 16 * group + 16]
                    torch.testing.assert_close(rows["score"][0], score_of(rows, policy))
                    torch.testing.assert_close(rows["score"], rows["candidate_scores"].amin(1))
            if granularity == "transition":
                torch.testing.assert_close(batch["score"], each / 0.1**2)
                assert batch["score"].max() <= batch["candidate_scores"].reshape(-1).sort().values[64]
        means[granularity] = float(torch.stack(distance).mean())
    assert means["transition"] < 0.6 * means["group"] < 0.6 * means["batch"]


def constant_of(noise):
    """The part of −log π that all actions have, for a covariance matrix."""
    return noise.logdet() / 2 + len(noise) / 2 * math.log(2 * math.pi)


def test_mean_squared_errors_and_log_probabilities():
    torch.manual_seed(0)
    policy = make_policy()
    scale = torch.tensor([0.1, 0.4])
    _, actor_rb = make(policy=policy, score="mse", noise_scale=scale)
    batch = actor_rb.sample()
    with torch.no_grad():
        z = (batch["action"] - policy.module(batch["observation"])) / scale
    torch.testing.assert_close(batch["score"][0], z.square().sum(-1).mean())
    rb, actor_rb = make(policy=policy, score="logprob", noise_scale=scale, num_candidates=3)
    batch = actor_rb.sample()
    with torch.no_grad():
        mean = policy.module(rb.storage[:]["observation"])
    log_prob = Normal(mean, scale).log_prob(rb.storage[:]["action"]).sum(-1)[batch["index"]]
    torch.testing.assert_close(batch["score"][0], -log_prob.mean() - constant_of(scale.square().diag()))
    # correlated noise
    noise = torch.tensor([[0.1, 0.05], [0.05, 0.2]])
    _, actor_rb = make(policy=policy, score="logprob", noise_scale=noise)
    batch = actor_rb.sample()
    with torch.no_grad():
        mean = policy.module(batch["observation"])
    log_prob = MultivariateNormal(mean, noise).log_prob(batch["action"])
    torch.testing.assert_close(batch["score"][0], -log_prob.mean() - constant_of(noise))


def stochastic_policy(distribution, **keywords):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
    module = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        module, in_keys=["loc", "scale"], distribution_class=distribution, distribution_kwargs=keywords
    )


@pytest.mark.parametrize("score", ["kl", "logprob"])
def test_stochastic_policies_are_whitened(score):
    torch.manual_seed(0)
    policy = stochastic_policy(TanhNormal)
    rb, actor_rb = make(policy=policy, score=score, num_candidates=3, count=0)
    data = experience(200)
    data["action"] = data["action"].clamp(-1, 1)
    rb.extend(data)
    batch = actor_rb.sample()
    with torch.no_grad():
        of_policy = policy.get_dist_params(batch.select("observation"))
        u = batch["action"].clamp(-1 + 1e-6, 1 - 1e-6).atanh()
        z = (u - of_policy["loc"]) / of_policy["scale"]
        inner = batch["action"].clamp(-1 + 1e-6, 1 - 1e-6)
        log_prob = Normal(of_policy["loc"], of_policy["scale"]).log_prob(u) - (1 - inner.square()).log()
    if score == "kl":
        torch.testing.assert_close(batch["score"][0], gaussian_policy_kl(z, 1.0))
    else:
        expected = -log_prob.sum(-1).mean() - math.log(2 * math.pi)
        torch.testing.assert_close(batch["score"][0], expected, rtol=1e-4, atol=1e-4)


def test_actions_that_no_tanh_gives_are_refused():
    rb, actor_rb = make(policy=stochastic_policy(TanhNormal), num_candidates=3, count=0)
    data = experience(200)
    data["action"] = 2 * torch.ones_like(data["action"])
    rb.extend(data)
    with pytest.raises(ValueError, match=r"DecoupledSampler: a stored action is 2 in absolute value.*\[-1, 1\]"):
        actor_rb.sample()


@pytest.mark.parametrize("columns", [1, 2])
def test_critic_and_actor_do_not_disturb_each_other(columns):
    sampler = DecoupledSampler(ReaPERSampler(1000), make_policy())
    rb = buffer_with(sampler, 1000, ndim=columns, batch_size=32, priority_key="td_error")
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

    policy = TensorDictModule(Linear(), in_keys=["seen"], out_keys=["action"])
    sampler = DecoupledSampler(RandomSampler(), policy)
    rb = buffer_with(sampler, 100, batch_size=32)
    actor_rb = sampler.actor_buffer(rb)
    rb.append_transform(add_reward)
    rb.extend(experience(100))
    batch = actor_rb.sample()
    torch.testing.assert_close(batch["seen"], batch["observation"])
    with torch.no_grad():
        difference = batch["action"] - policy.module(batch["seen"])
    torch.testing.assert_close(batch["score"][0], gaussian_policy_kl(difference, 0.1))


def test_a_candidate_that_is_not_a_number_is_never_chosen():
    rb, actor_rb = make(RandomSampler(), batch_size=4, count=0)
    data = experience(200)
    data["action"][::9] = math.nan
    rb.extend(data)
    chosen = [actor_rb.sample() for _ in range(100)]
    for batch in chosen:
        assert batch["action"].isfinite().all() or batch["candidate_scores"].isinf().all()


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
@pytest.mark.parametrize("written", [0, 7])
def test_a_checkpoint_includes_the_sampler_of_the_candidates(written, how, tmp_path):
    def fresh():
        return make(ProportionalSampler(20), count=0, size=20, candidate_sampler=RecencySampler(half_life=0.01))

    rb, _ = fresh()
    rb.extend(experience(25))
    loaded, loaded_actor = fresh()
    if written:
        loaded.extend(experience(written))
    if how == "dumps":
        rb.dumps(tmp_path)
        loaded.loads(tmp_path)
    else:
        loaded.load_state_dict(rb.state_dict())
    loaded.sampler.check_valid()
    assert (loaded_actor.sample()["index"] == 4).all()  # the newest
    loaded.extend(experience(1))
    assert (loaded_actor.sample()["index"] == 5).all()


def without_numbers_of_candidates(state):
    """A state without the numbers of writes to the candidates: a load that is undone raises them."""
    kept = {key: value for key, value in state["candidate_sampler"].items() if key != "num_writes"}
    return {**state, "candidate_sampler": {**kept, "generation": kept["generation"] > 0}}


def test_a_state_that_does_not_fit_changes_neither_sampler(tmp_path):
    rb, _ = make(ProportionalSampler(20), count=10, size=20, candidate_sampler=RecencySampler(half_life=2))
    other, _ = make(ProportionalSampler(30), count=25, size=30, candidate_sampler=RecencySampler(half_life=2))
    plain, _ = make(ProportionalSampler(20), count=10, size=20)
    before, fits = rb.sampler.state_dict(), plain.sampler.state_dict()
    without = {key: value for key, value in fits.items() if key != "candidate_sampler"}
    mixed = {**other.sampler.state_dict(), "candidate_sampler": before["candidate_sampler"]}
    longer, shorter = (
        make(ProportionalSampler(20), count=count, size=20, candidate_sampler=RecencySampler(half_life=2))[0]
        for count in (15, 5)
    )
    # the storage holds fewer rows than the critic's state
    unheld = {**longer.sampler.state_dict(), "candidate_sampler": shorter.sampler.state_dict()["candidate_sampler"]}
    for state in (other.sampler.state_dict(), without, fits, mixed, unheld):
        with pytest.raises(ValueError, match="load_state_dict"):
            rb.sampler.load_state_dict(state)
        assert_same_state(*map(without_numbers_of_candidates, (rb.sampler.state_dict(), before)))
    with pytest.raises(ValueError, match="the state has an entry 'candidate_sampler'"):
        plain.sampler.load_state_dict(before)
    plain.sampler.load_state_dict(without)  # candidates that are drawn uniformly have no state
    other.dumps(tmp_path)
    with pytest.raises(ValueError, match="load_state_dict"):
        rb.sampler.loads(tmp_path / "sampler")
    assert_same_state(*map(without_numbers_of_candidates, (rb.sampler.state_dict(), before)))


def test_a_sampler_that_runs_out_of_candidates_is_refused():
    _, actor_rb = make(RandomSampler(), candidate_sampler=SamplerWithoutReplacement())
    with pytest.raises(ValueError, match=r"SamplerWithoutReplacement drew .* rows, not num_candidates . batch_size ="):
        for _ in range(10):
            actor_rb.sample()


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
    other.sampler.policy = make_policy()
    assert actor.sample().shape == (32,)


def test_copies_share_the_policy():
    rb, _ = make()
    twin = copy.deepcopy(rb)
    assert twin.sampler.policy is rb.sampler.policy
    twin.extend(experience(10, seed=1))
    assert (len(twin), len(rb)) == (510, 500)
    assert twin.sampler.actor_buffer(twin).sample().shape == (32,)


# --- in a graph


@pytest.mark.usefixtures("from_scratch")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_one_graph_draws_what_eager_code_draws():
    policy = linear_policy(3, 2)
    buffers = []
    for _ in range(2):
        sampler = DecoupledSampler(ProportionalSampler(1000), policy, num_candidates=3, granularity="group")
        rb = buffer_with(sampler, 1000, compilable=True, batch_size=32)
        rb.extend(experience(400))
        buffers.append((rb, sampler.actor_buffer(rb)))
    (eager, eager_actor), (compiled, compiled_actor) = buffers

    def step(rb, actor_rb):
        batch, actor_batch = rb.sample(), actor_rb.sample()
        batch["td_error"] = batch["observation"].square().sum(-1)
        rb.update_tensordict_priority(batch)
        return batch, actor_batch

    in_graph = torch.compile(lambda: step(compiled, compiled_actor), fullgraph=True)
    with torch._inductor.config.patch(fallback_random=True):
        for seed in range(5):
            torch.manual_seed(seed)
            expected = step(eager, eager_actor)
            torch.manual_seed(seed)
            found = in_graph()
            for one, other in zip(expected, found, strict=True):
                assert torch.equal(one["index"], other["index"])
            for key in ("score", "candidate_scores"):
                torch.testing.assert_close(expected[1][key], found[1][key], rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                policy.module.weight.mul_(0.9)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_candidates": 0}, "num_candidates must be an integer >= 1"),
        ({"num_candidates": 2.0}, "num_candidates must be an integer >= 1"),
        ({"score": "entropy"}, "score must be 'kl', 'mse' or 'logprob'"),
        ({"covariance": "block"}, "covariance must be 'diag' or 'full'"),
        ({"granularity": "row"}, "granularity must be 'batch', 'group' or 'transition'"),
        ({"eps": -1.0}, "eps must be >= 0"),
        ({"action_key": "act"}, "it must write 'act'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        DecoupledSampler(RandomSampler(), make_policy(), **arguments)


def test_the_choice_among_candidates_cannot_be_assigned():
    with pytest.raises(AttributeError):
        DecoupledSampler(RandomSampler(), make_policy()).num_candidates = 3


def test_distributions_that_are_not_understood():
    wide = {"low": -torch.ones(2), "high": torch.tensor([1.0, 2.0])}
    for distribution, keywords in (
        (TanhNormal, {"low": -2.0, "high": 2.0}),
        (TanhNormal, wide),
        (TanhNormal, {"tanh_loc": True}),
        (TruncatedNormal, {}),
    ):
        with pytest.raises(ValueError, match=r"the policy's distribution is .* set noise_scale"):
            DecoupledSampler(RandomSampler(), stochastic_policy(distribution, **keywords))


def test_pinned_tables_need_candidates_of_their_own():
    sampler = DecoupledSampler(event_sampler(30, ("next", "a"), 5, default=50), make_policy())
    rb = buffer_with(sampler, 80, batch_size=16)
    with pytest.raises(ValueError, match="pass an EventTableSampler as candidate_sampler"):
        sampler.actor_buffer(rb)
    # it draws from all slots too
    sampler.candidate_sampler = ProportionalSampler(80)
    with pytest.raises(ValueError, match="pass an EventTableSampler as candidate_sampler"):
        sampler.actor_buffer(rb)


def test_what_does_not_fit_together():
    with pytest.raises(ValueError, match="must be a TensorDictModule"):
        DecoupledSampler(RandomSampler(), lambda td: td)
    with pytest.raises(TypeError, match="critic_sampler must be a Sampler"):
        DecoupledSampler("per", make_policy())
    with pytest.raises(TypeError, match="candidate_sampler must be a Sampler"):
        DecoupledSampler(RandomSampler(), make_policy(), candidate_sampler="uniform")
    with pytest.raises(TypeError, match="action_key must be the name of an entry"):
        DecoupledSampler(RandomSampler(), make_policy(), action_key=None)
    for noise_scale in ("0.1", True, None):
        with pytest.raises(TypeError, match="noise_scale must be"):
            DecoupledSampler(RandomSampler(), make_policy(), noise_scale=noise_scale)
    for batch_size in (0, 2.5, True):
        rb, _ = make()
        with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
            rb.sampler.actor_buffer(rb, batch_size=batch_size)
    rb, actor_rb = make(noise_scale=torch.ones(3))
    with pytest.raises(ValueError, match=r"noise_scale has shape \(3,\)"):
        actor_rb.sample()
    with pytest.raises(ValueError, match="must be the buffer that has this sampler"):
        rb.sampler.actor_buffer(make()[0])
    rb, _ = make(granularity="group", batch_size=32)
    with pytest.raises(ValueError, match="group_size=16 must divide it"):
        rb.sampler.actor_buffer(rb, batch_size=24)
    rb, actor_rb = make(count=0)
    rb.extend(experience(20).exclude("action"))
    with pytest.raises(KeyError, match=r"no entries \['action'\]"):
        actor_rb.sample()


@pytest.mark.parametrize(
    ("stored", "of_policy"),
    [
        (torch.randn(40), (1,)),
        (torch.randn(40, 1), ()),
        (torch.randn(40, 3), (1,)),
        (torch.randn(40), ()),
        (torch.randn(40, 2, 2), (2, 2)),
        (torch.nn.functional.one_hot(torch.arange(40) % 3), (3,)),
    ],
    ids=["flat", "flat policy", "broadcast", "both flat", "agents", "discrete"],
)
def test_actions_must_be_rows_of_numbers(stored, of_policy):
    def act(observation):
        return observation[:, :1].reshape(-1, *[1] * len(of_policy)).expand(-1, *of_policy)

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    rb, actor_rb = make(policy=policy, count=0)
    rb.extend(TensorDict({"observation": torch.randn(40, 3), "action": stored}, [40]))
    with pytest.raises(ValueError, match=r"stored actions are .* both must be continuous, \[B, A\]"):
        actor_rb.sample()


@pytest.mark.parametrize(("granularity", "what"), [("batch", "the actor's batch_size"), ("group", "group_size")])
def test_a_full_covariance_needs_more_rows_than_dimensions(granularity, what):
    arguments = {"covariance": "full", "granularity": granularity, "batch_size": 4, "group_size": 2}
    rb, actor_rb = make(**arguments)
    with pytest.raises(ValueError, match=f"{what} is 2, and actions have 2 dimensions.* Use at least 3 rows"):
        (actor_rb if granularity == "group" else rb.sampler.actor_buffer(rb, batch_size=2)).sample()
    rb, _ = make(**{**arguments, "batch_size": 3, "group_size": 3})
    assert rb.sampler.actor_buffer(rb, batch_size=3).sample()["candidate_scores"].isfinite().all()
    for other in ({"covariance": "diag"}, {"score": "mse"}, {"granularity": "transition"}):
        rb, _ = make(**{"covariance": "full", "num_candidates": 3, **other})
        assert rb.sampler.actor_buffer(rb, batch_size=2).sample()["score"].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_discrete_policies_are_refused_where_they_say_so(dtype):
    def act(observation):
        return torch.nn.functional.one_hot(observation.argmax(1), 3).to(dtype)

    net = TensorDictModule(torch.nn.Linear(3, 3), in_keys=["observation"], out_keys=["logits"])
    sampled = ProbabilisticActor(net, in_keys=["logits"], distribution_class=OneHotCategorical)
    greedy = QValueActor(torch.nn.Linear(3, 3), in_keys=["observation"], spec=OneHot(3))
    for policy, message in ((sampled, "the distribution OneHotCategorical"), (greedy, "a spec of class OneHot")):
        with pytest.raises(ValueError, match=message):
            DecoupledSampler(RandomSampler(), policy)
    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action"])
    rb, actor_rb = make(policy=policy, count=0)
    stored = torch.nn.functional.one_hot(torch.arange(40) % 3, 3).float()
    rb.extend(TensorDict({"observation": torch.randn(40, 3), "action": stored}, [40]))
    if dtype == torch.int64:
        with pytest.raises(ValueError, match=r"the policy's torch.int64 of shape .* must be continuous"):
            actor_rb.sample()
    else:
        # this case cannot be detected
        assert actor_rb.sample()["score"].isfinite().all()


def test_the_actors_buffer_collates_as_the_critics():
    def collate(data):
        return data.set("collated", torch.ones(data.shape))

    sampler = DecoupledSampler(RandomSampler(), make_policy())
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
    batch["td_error"] = torch.rand(32)
    with pytest.raises(ValueError, match="takes no priorities"):
        actor_rb.update_tensordict_priority(batch)
    for part in (batch, batch[16:]):
        with pytest.raises(ValueError, match="this is an actor batch"):
            rb.update_tensordict_priority(part)
