"""ACER for discrete actions, against a loop over single steps that follows Algorithm 2."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import ActorValueOperator, MaskedCategorical, OneHotCategorical, ProbabilisticActor
from torchrl.objectives import SoftUpdate

from tests.objectives.trajectories import (
    HIDDEN,
    OBSERVATION,
    Sums,
    assert_agrees,
    assert_compiles,
    assert_same_gradients,
    cut_rows,
    episodes,
    gradients,
    losses,
    project,
    refuses,
    set_average,
    unlike,
)
from torchrl_replay_ext import ACERLoss

ACTIONS = 4
STATISTICS = ("probs", "logits", "log_probs")


class Networks(nn.Module):
    """Policy and critic with two trunks ("apart"), or one trunk run by both ("modules") or the actor ("hidden")."""

    def __init__(self, kind: str = "logits", trunk: str = "apart"):
        super().__init__()
        self.kind, self.layout = kind, trunk
        self.trunk = nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh())
        self.other_trunk = nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh()) if trunk == "apart" else self.trunk
        self.policy_head, self.value_head = nn.Linear(HIDDEN, ACTIONS), nn.Linear(HIDDEN, ACTIONS)
        self.to(torch.float64)

    def logits(self, observation: Tensor) -> Tensor:
        return self.policy_head(self.trunk(observation))

    def value(self, observation: Tensor) -> Tensor:
        return self.value_head(self.other_trunk(observation))

    def actor(self, observation: Any = "observation", **arguments: Any) -> ProbabilisticActor:
        head = self.policy_head
        if self.kind == "probs":
            head = nn.Sequential(head, nn.Softmax(-1))
        if self.layout == "hidden":
            module = TensorDictSequential(
                TensorDictModule(self.trunk, in_keys=[observation], out_keys=["hidden"]),
                TensorDictModule(head, in_keys=["hidden"], out_keys=[self.kind]),
            )
        else:
            module = TensorDictModule(nn.Sequential(self.trunk, head), in_keys=[observation], out_keys=[self.kind])
        arguments = {"distribution_class": Categorical, **arguments}
        return ProbabilisticActor(module, in_keys=[self.kind], **arguments)

    def critic(self, observation: Any = "observation", action_value: Any = "action_value") -> TensorDictModule:
        if self.layout == "hidden":
            return TensorDictModule(self.value_head, in_keys=["hidden"], out_keys=[action_value])
        network = nn.Sequential(self.other_trunk, self.value_head)
        return TensorDictModule(network, in_keys=[observation], out_keys=[action_value])


class Setting:
    """A loss module, its networks, and an average policy unlike the current one."""

    def __init__(self, kind: str = "logits", trunk: str = "apart", *, distance: float = 0.5, **arguments: Any):
        self.networks = Networks(kind, trunk)
        self.average = unlike(copy.deepcopy(self.networks), distance)
        # numbers that float32 represents exactly
        arguments = {"gamma": 0.9, "c": 1.5, "delta": 0.05, "entropy_coeff": 0.25, **arguments}
        self.loss = ACERLoss(self.networks.actor(), self.networks.critic(), **arguments)
        self.updater = SoftUpdate(self.loss, eps=0.75)
        set_average(self.loss, self.average.actor())

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.networks.parameters())


def rows(*, mask: bool = False, key: Any = "logits", spread: float = 1.5, one_hot: bool = False) -> TensorDict:
    """Rows [4, T] of a random behaviour policy; with a mask, its masked statistics are invalid."""
    batch = cut_rows(mask=mask)
    mu = Categorical(logits=spread * torch.randn(*batch.shape, ACTIONS, dtype=torch.float64))
    action = mu.sample()
    batch["action"] = nn.functional.one_hot(action, ACTIONS) if one_hot else action
    # logits need not be normalised; adding a constant changes nothing
    last = key if isinstance(key, str) else key[-1]
    batch[key] = mu.probs if last == "probs" else mu.logits + 3
    if mask:
        batch[key][~batch["collector", "mask"]] = 0
    return batch


# --- Algorithm 2


def log_density(statistics: str, phi: Tensor) -> Tensor:
    """log f(·|φ) for one state."""
    return {"probs": phi.log, "logits": lambda: phi.log_softmax(-1), "log_probs": lambda: phi}[statistics]()


def algorithm_2(setting: Setting, batch: TensorDict, *, mu_key: Any = "logits", returns: str = "retrace") -> Sums:
    """Values and gradients as means over valid steps, step by step, with c, δ and so on of the loss module."""
    loss, networks, sums = setting.loss, setting.networks, Sums(setting.parameters)
    of_probabilities = (mu_key if isinstance(mu_key, str) else mu_key[-1]) == "probs"
    count = 0
    for piece in episodes(batch):
        last = batch["next"][piece[-1]]
        target = torch.zeros((), dtype=torch.float64)
        if not last["terminated"]:
            target = networks.value(last["observation"]) @ networks.logits(last["observation"]).softmax(-1)
        target = target.item()
        for position in reversed(piece):
            step, count = batch[position], count + 1
            a = int(step["action"])
            logits, q = networks.logits(step["observation"]), networks.value(step["observation"])
            statistic = {"probs": logits.softmax(-1), "logits": logits, "log_probs": logits.log_softmax(-1)}
            pi, q_now = logits.softmax(-1).detach(), q.detach()
            mu = step[mu_key] if of_probabilities else step[mu_key].softmax(-1)
            average = setting.average.logits(step["observation"]).softmax(-1).detach()
            target = float(step["next", "reward"]) + loss.gamma * target
            value = float(q_now @ pi)
            # g and k, by autograd, one action at a time
            phi = statistic[loss.statistics].detach().requires_grad_()
            log_f = log_density(loss.statistics, phi)
            rho = [float(pi[b] / mu[b]) for b in range(ACTIONS)]
            g = torch.zeros(ACTIONS, dtype=torch.float64)
            correction = 0.0
            for b in range(ACTIONS):
                (score,) = torch.autograd.grad(log_f[b], phi, retain_graph=True)
                if b == a:
                    g += min(loss.c, rho[b]) * score * (target - value)
                weight = 0.0 if math.isinf(loss.c) else max(0.0, 1 - loss.c / rho[b])
                g += weight * float(pi[b]) * score * (float(q_now[b]) - value)
                correction += weight * float(pi[b])
            divergence = (average * (average.log() - log_f)).sum()
            (k,) = torch.autograd.grad(divergence, phi)
            z = project(g, k, loss.delta) if loss.trust_region else g
            sums.backpropagate("loss_actor", statistic[loss.statistics], -z)
            sums.backpropagate("loss_qvalue", q[a], -2 * loss.critic_coeff * (target - q_now[a]))
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum()
            sums.backpropagate("loss_entropy", entropy, -loss.entropy_coeff)
            sums.add("loss_actor", -(statistic[loss.statistics] @ z))
            sums.add("loss_qvalue", loss.critic_coeff * (target - q_now[a]) ** 2)
            sums.add("loss_entropy", -loss.entropy_coeff * entropy)
            sums.add("entropy", entropy)
            sums.add("kl", (average * (average / pi).log()).sum())
            sums.add("rho", min(loss.c, rho[a]))
            sums.add("bc_weight", correction)
            sums.add("tr_active", float(not torch.equal(z, g)))
            if returns == "importance_sampling":
                target = rho[a] * target
            else:
                trace = loss.lmbda * min(loss.retrace_thresh, rho[a])
                target = trace * (target - float(q_now[a])) + value
    return sums.means(count)


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("trust_region", [True, False])
@pytest.mark.parametrize("c", [0.0, 0.5, 1.0, 10.0, math.inf])
def test_is_algorithm_2(statistics, trust_region, c):
    setting = Setting(c=c, trust_region=trust_region, statistics=statistics, delta=0.01)
    batch = rows()
    result = setting.loss(batch)
    assert_agrees(result, algorithm_2(setting, batch))
    if trust_region:
        # the constraint is active in some steps, but not in all
        assert 0 < result["tr_active"] < 1
    if c in (0.5, 1.0):
        assert result["bc_weight"] > 0.05


@pytest.mark.parametrize("trunk", ["apart", "hidden", "modules"])
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("mu_key", ["logits", ("collector", "probs")])
@pytest.mark.parametrize("mask", [False, True])
def test_is_algorithm_2_for_any_networks_and_batches(trunk, kind, mu_key, mask):
    setting = Setting(kind, trunk, behaviour_key=mu_key)
    batch = rows(mask=mask, key=mu_key)
    expected = algorithm_2(setting, batch, mu_key=mu_key)
    assert_agrees(setting.loss(batch), expected)
    assert batch["td_error"].shape == batch.shape
    valid = batch["collector", "mask"] if mask else torch.ones(batch.shape, dtype=torch.bool)
    assert not batch["td_error"][~valid].any()
    mean = setting.loss.critic_coeff * batch["td_error"][valid].mean()
    torch.testing.assert_close(mean.item(), expected.values["loss_qvalue"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"lmbda": 0.7},
        {"lmbda": 0.0},
        {"retrace_thresh": 2.5},
        {"gamma": 0.0},
        {"gamma": 1.0},
        {"delta": 0.0},
        {"critic_coeff": 0.75},
        {"returns": "importance_sampling"},
        {"returns": "importance_sampling", "statistics": "logits"},
    ],
    ids=str,
)
def test_is_algorithm_2_with_any_argument(arguments):
    setting, batch = Setting(**arguments), rows(mask=True)
    assert_agrees(setting.loss(batch), algorithm_2(setting, batch, returns=arguments.get("returns", "retrace")))


# --- identities


@pytest.mark.parametrize("c", [0.0, 0.3, 1.0, 2.0, math.inf])
def test_truncation_with_correction_leaves_the_policy_gradient(c):
    """Eq. 7: if the return is Q, the mean gradient over μ is that of Σ_a π(a) Q(a), for every c."""
    setting = Setting(c=c, trust_region=False)
    observation = torch.randn(5, 1, OBSERVATION, dtype=torch.float64).repeat_interleave(ACTIONS, 0)
    mu = (2 * torch.randn(5, 1, ACTIONS, dtype=torch.float64)).softmax(-1).repeat_interleave(ACTIONS, 0)
    action = torch.arange(ACTIONS).repeat(5).unsqueeze(-1)
    q = setting.networks.value(observation).detach()
    ended = torch.ones(5 * ACTIONS, 1, 1, dtype=torch.bool)
    following = {"observation": observation, "reward": q.gather(-1, action.unsqueeze(-1))}
    batch = {
        "observation": observation,
        "action": action,
        "logits": mu.log(),
        "priority_weight": mu.gather(-1, action.unsqueeze(-1)),
        "next": {**following, "done": ended, "terminated": ended},
    }
    result = setting.loss(TensorDict(batch, action.shape))
    # the weights are μ, so their sum over the actions of a state is 1
    value = (setting.networks.logits(observation).softmax(-1) * q).sum(-1).mean()
    assert_same_gradients(gradients(result["loss_actor"], setting.parameters), gradients(-value, setting.parameters))


def on_policy(setting: Setting) -> TensorDict:
    batch = rows()
    batch["logits"] = setting.networks.logits(batch["observation"]).detach()
    batch["action"] = Categorical(logits=batch["logits"]).sample()
    return batch


def score_function(setting: Setting, batch: TensorDict, weight: Tensor) -> Tensor:
    """The mean of −weight · log π(a_t|x_t)."""
    log_pi = setting.networks.logits(batch["observation"]).log_softmax(-1)
    return -(weight.detach() * log_pi.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)).mean()


def advantages(setting: Setting, batch: TensorDict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q^ret − V [B, T], and Q − V, π and μ [B, T, A], by a loop over time."""
    pi, mu = setting.networks.logits(batch["observation"]).softmax(-1), batch["logits"].softmax(-1)
    q = setting.networks.value(batch["observation"])
    value = (pi * q).sum(-1)
    taken = batch["action"].unsqueeze(-1)
    following = batch["next", "observation"]
    next_value = (setting.networks.logits(following).softmax(-1) * setting.networks.value(following)).sum(-1)
    target = torch.zeros(batch.shape, dtype=torch.float64)
    done, terminated = batch["next", "done"].squeeze(-1), batch["next", "terminated"].squeeze(-1)
    correction = torch.zeros(batch.shape[0], dtype=torch.float64)
    for t in reversed(range(batch.shape[1])):
        future = torch.where(done[:, t], 0.0, correction) + next_value[:, t]
        future = torch.where(terminated[:, t], 0.0, future)
        target[:, t] = batch["next", "reward"][:, t, 0] + setting.loss.gamma * future
        rho = (pi / mu).gather(-1, taken)[:, t, 0].clamp_max(1)
        correction = rho * (target[:, t] - q.gather(-1, taken)[:, t, 0])
    return target - value, q - value.unsqueeze(-1), pi, mu


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("c", [1.0, 10.0, math.inf])
def test_on_policy_it_is_an_actor_critic(statistics, c):
    setting = Setting(c=c, trust_region=False, statistics=statistics)
    batch = on_policy(setting)
    result = setting.loss(batch)
    assert abs(result["rho"].item() - 1) < 1e-12
    assert result["bc_weight"].item() < 1e-12
    expected = score_function(setting, batch, advantages(setting, batch)[0])
    assert_same_gradients(gradients(result["loss_actor"], setting.parameters), gradients(expected, setting.parameters))


@pytest.mark.parametrize("statistics", STATISTICS)
def test_without_truncation_it_is_importance_sampling(statistics):
    setting, batch = Setting(c=math.inf, trust_region=False, statistics=statistics), rows()
    result = setting.loss(batch)
    of_return, _, pi, mu = advantages(setting, batch)
    rho = (pi / mu).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    assert_same_gradients(
        gradients(result["loss_actor"], setting.parameters),
        gradients(score_function(setting, batch, rho * of_return), setting.parameters),
    )
    assert result["bc_weight"] == 0


@pytest.mark.parametrize("statistics", STATISTICS)
def test_with_c_0_it_learns_from_q_alone(statistics):
    setting, batch = Setting(c=0.0, trust_region=False, statistics=statistics), rows()
    result = setting.loss(batch)
    _, of_critic, pi, _ = advantages(setting, batch)
    expected = -(pi * of_critic.detach()).sum(-1).mean()
    assert_same_gradients(gradients(result["loss_actor"], setting.parameters), gradients(expected, setting.parameters))
    assert result["rho"] == 0


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_without_a_trust_region_all_statistics_are_one(kind):
    found = []
    for statistics in STATISTICS:
        torch.manual_seed(1)
        setting = Setting(kind, trust_region=False, statistics=statistics)
        found.append(gradients(setting.loss(rows())["loss_actor"], setting.parameters))
    assert_same_gradients(found[0], found[1])
    assert_same_gradients(found[0], found[2])


@pytest.mark.parametrize("statistics", STATISTICS)
def test_the_trust_region_lets_go_where_the_average_is_the_policy(statistics):
    found = []
    for trust_region in (True, False):
        torch.manual_seed(1)
        setting = Setting(distance=0.0, trust_region=trust_region, statistics=statistics, delta=0.0)
        result = setting.loss(rows())
        assert abs(result["kl"].item()) < 1e-12
        found.append(gradients(result["loss_actor"], setting.parameters))
    assert_same_gradients(*found)


def test_no_step_leaves_the_trust_region():
    setting, batch = Setting(statistics="logits", reduction="sum"), rows()
    logits = []
    setting.networks.policy_head.register_forward_hook(lambda module, arguments, output: logits.append(output))
    result = setting.loss(batch)
    # the first call of the hook has the logits for x_t
    (gradient,) = torch.autograd.grad(result["loss_actor"], logits[0])
    average = setting.average.logits(batch["observation"]).softmax(-1).detach()
    increase = ((logits[0].softmax(-1) - average) * -gradient).sum(-1).detach()
    at_bound = (increase - setting.loss.delta).abs() < 1e-12
    assert (at_bound | (increase < setting.loss.delta)).all()
    assert at_bound.double().mean() == result["tr_active"]


# --- batches


@pytest.mark.parametrize("one_hot", [True, False])
def test_padding_is_not_there(one_hot):
    setting, real = Setting(), rows(one_hot=one_hot)[:, :5]
    padded = torch.cat([real, torch.zeros_like(real)], 1)
    padded["next", "reward"][:, 5:] = torch.nan
    padded["collector", "mask"] = (torch.arange(10) < 5).expand(4, 10)
    if not one_hot:
        padded["action"][:, 5:] = -1
    with_padding, without = setting.loss(padded), setting.loss(real)
    for key, value in without.items():
        torch.testing.assert_close(with_padding[key], value, rtol=0, atol=1e-12)
    assert_same_gradients(
        gradients(losses(with_padding), setting.parameters), gradients(losses(without), setting.parameters), 1e-13
    )
    torch.testing.assert_close(padded["td_error"][:, :5], real["td_error"])
    assert not padded["td_error"][:, 5:].any()


@pytest.mark.parametrize("trunk", ["apart", "modules", "hidden"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_masked_steps_may_hold_anything(bad, trunk):
    setting, batch = Setting(trunk=trunk), rows(mask=True)
    results = []
    for value in (0.0, bad):
        for key in ("observation", "logits", ("next", "observation"), ("next", "reward")):
            batch[key][~batch["collector", "mask"]] = value
        result = setting.loss(batch)
        results.append((dict(result.items()), gradients(losses(result), setting.parameters), batch["td_error"]))
    assert all(g.isfinite().all() for g in results[1][1])
    torch.testing.assert_close(*results)


def test_nothing_is_valid():
    setting, batch = Setting(), rows()
    batch["collector", "mask"] = torch.zeros(batch.shape, dtype=torch.bool)
    result = setting.loss(batch)
    assert all(value == 0 for value in result.values())
    assert not any(g.any() for g in gradients(losses(result), setting.parameters))


def test_encodings_of_actions():
    setting, batch = Setting(), rows()
    expected = setting.loss(batch)
    action = batch["action"]
    one_hot = nn.functional.one_hot(action, ACTIONS)
    encodings = [action.unsqueeze(-1), action.int(), one_hot, one_hot.bool(), one_hot.float()]
    for encoding in encodings:
        assert torch.equal(setting.loss(batch.set("action", encoding))["loss_actor"], expected["loss_actor"])


def test_any_number_of_batch_dimensions():
    setting, batch = Setting(reduction="none"), rows()
    expected = setting.loss(batch)["loss_actor"]
    nested = batch.clone().reshape(2, 2, -1)
    result = setting.loss(nested)
    torch.testing.assert_close(result["loss_actor"].reshape(expected.shape), expected)
    assert nested["td_error"].shape == nested.shape
    single = batch[1].clone()
    torch.testing.assert_close(setting.loss(single)["loss_actor"], expected[1])
    assert single["td_error"].shape == single.shape


def test_keys_of_ones_own():
    expected_setting, batch = Setting(), rows(mask=True)
    networks = expected_setting.networks
    observation = ("agent", "observation")
    loss = ACERLoss(
        networks.actor(observation),
        networks.critic(observation, ("critic", "values")),
        gamma=0.9,
        c=1.5,
        delta=0.05,
        entropy_coeff=0.25,
        behaviour_key=("mu", "logits"),
    )
    loss.set_keys(
        action="move",
        reward=("agent", "reward"),
        done="over",
        terminated="lost",
        action_value=("critic", "values"),
        priority=("replay", "error"),
    )
    loss.loss_mask_key = "real"
    SoftUpdate(loss, eps=0.75)
    set_average(loss, expected_setting.average.actor(observation))
    renamed = TensorDict(
        {
            "agent": {"observation": batch["observation"]},
            "mu": {"logits": batch["logits"]},
            "move": batch["action"],
            "real": batch["collector", "mask"].unsqueeze(-1),
            "next": {
                "agent": {"observation": batch["next", "observation"], "reward": batch["next", "reward"]},
                "over": batch["next", "done"],
                "lost": batch["next", "terminated"],
            },
        },
        batch.shape,
    )
    before = set(renamed.keys(True, True))
    assert set(loss.in_keys) == before - {"real"}
    result, expected = loss(renamed), expected_setting.loss(batch)
    assert set(renamed.keys(True, True)) == before | {("replay", "error")}
    assert torch.equal(renamed["replay", "error"], batch["td_error"])
    for key, value in expected.items():
        assert torch.equal(result[key], value)


@pytest.mark.parametrize("name", ["logits", "probs"])
@pytest.mark.parametrize("entry", ["pi_parameters", ("agents", "policy"), ("agents", "logits")], ids=str)
def test_the_policys_logits_or_probabilities_may_have_any_entry(name, entry):
    mu_key = ("mu", name)
    expected_setting, batch = Setting(name, behaviour_key=mu_key), rows(mask=True, key=mu_key)
    renamed = {}
    for which, networks in (("current", expected_setting.networks), ("average", expected_setting.average)):
        module = TensorDictModule(networks.actor()[0].module, in_keys=["observation"], out_keys=[entry])
        renamed[which] = ProbabilisticActor(module, in_keys={name: entry}, distribution_class=Categorical)
    loss = ACERLoss(
        renamed["current"],
        expected_setting.networks.critic(),
        gamma=0.9,
        c=1.5,
        delta=0.05,
        entropy_coeff=0.25,
        behaviour_key=mu_key,
    )
    SoftUpdate(loss, eps=0.75)
    set_average(loss, renamed["average"])
    result, expected = loss(batch.clone()), expected_setting.loss(batch)
    assert expected["kl"] > 0
    for key, value in expected.items():
        assert torch.equal(result[key], value)


def test_a_nested_entry_whose_last_part_is_logits_needs_no_mapping():
    networks, batch = Networks(), rows()
    module = TensorDictModule(networks.actor()[0].module, in_keys=["observation"], out_keys=[("agent", "logits")])
    actor = ProbabilisticActor(module, in_keys=[("agent", "logits")], distribution_class=Categorical)
    losses_of = [ACERLoss(a, networks.critic()) for a in (actor, networks.actor())]
    for loss in losses_of:
        SoftUpdate(loss, eps=0.75)
    assert torch.equal(losses_of[0](batch)["loss_actor"], losses_of[1](batch)["loss_actor"])


def test_several_agents_are_refused():
    networks, batch = Networks(), rows()
    for key in ("observation", ("next", "observation")):
        batch[key] = batch[key].unsqueeze(-2).expand(4, 9, 2, OBSERVATION)
    loss = ACERLoss(networks.actor(), networks.critic())
    SoftUpdate(loss, eps=0.75)
    with pytest.raises(ValueError, match=r"'logits'.*\(4, 9, 2, 4\), expected \(4, 9, 'A'\).*[Ss]everal agents"):
        loss(batch)


# --- where gradients flow


def test_only_the_networks_learn():
    setting, batch = Setting(), rows()
    for key in ("logits", "observation", ("next", "observation"), ("next", "reward")):
        batch[key].requires_grad_()
    result = setting.loss(batch)
    losses(result).backward()
    assert batch["logits"].grad is None
    assert batch["next", "reward"].grad is None
    assert batch["next", "observation"].grad is None
    assert not any(value.requires_grad for value in setting.loss.target_actor_network_params.values(True, True))
    assert not batch["td_error"].requires_grad
    assert all(not result[key].requires_grad for key in setting.loss._DIAGNOSTICS)


def test_actor_and_critic_learn_from_their_own_loss():
    setting, batch = Setting(), rows()
    result = setting.loss(batch)
    of_policy = [*setting.networks.trunk.parameters(), *setting.networks.policy_head.parameters()]
    of_critic = [*setting.networks.other_trunk.parameters(), *setting.networks.value_head.parameters()]
    for key, others in (("loss_actor", of_critic), ("loss_entropy", of_critic), ("loss_qvalue", of_policy)):
        assert torch.autograd.grad(result[key], others, allow_unused=True, retain_graph=True) == (None,) * len(others)
    assert {id(p) for p in setting.loss.parameters()} == {id(p) for p in of_policy + of_critic}


def test_gradcheck_where_nothing_is_constant():
    """The entropy, and the critic's loss if each step terminates, so that its return is the reward."""
    setting, batch = Setting(), rows()[1:2]
    batch["next", "done"].fill_(True)
    batch["next", "terminated"].fill_(True)

    def evaluate(observation: Tensor) -> tuple[Tensor, ...]:
        result = setting.loss(batch.clone().set("observation", observation))
        return result["loss_entropy"], result["loss_qvalue"]

    assert torch.autograd.gradcheck(evaluate, batch["observation"].clone().requires_grad_())


# --- extremes


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("c", [0.0, 10.0, math.inf])
def test_float32_of_certain_policies(kind, statistics, c):
    """Log-probabilities of the policy, the average policy and the behaviour policy are as low as −240."""
    setting = Setting(kind, c=c, statistics=statistics, delta=1.0)
    setting.loss.to(torch.float32)
    for network, value in ((setting.networks, 120.0), (setting.average, -120.0)):
        head = network.policy_head
        with torch.no_grad():
            head.weight.zero_()
            head.bias.copy_(value * torch.tensor([1.0, -1.0, 0.0, 1.0]))
    set_average(setting.loss, setting.average.actor())
    # every action with every behaviour policy under which it is possible
    logits = torch.tensor([[0.0, 0, 0, 0], [240, 0, 0, 0], [0, 0, 100, 100]]).repeat_interleave(ACTIONS, 0)
    logits = torch.cat([logits, torch.tensor([[-math.inf, 0, 0, 0]]).expand(3, 4)])
    action = torch.tensor([*range(ACTIONS)] * 3 + [1, 2, 3])
    count = len(action)
    flags = dict.fromkeys(("done", "terminated"), torch.zeros(1, count, 1, dtype=torch.bool))
    following = {"observation": torch.randn(1, count, OBSERVATION), "reward": torch.randn(1, count, 1), **flags}
    batch = {"observation": torch.randn(1, count, OBSERVATION), "action": action[None], "logits": logits[None]}
    result = setting.loss(TensorDict({**batch, "next": following}, [1, count]))
    assert all(value.dtype == torch.float32 for value in result.values())
    # the divergence is infinite if float32 rounds a probability to 0
    assert kind == "probs" or result["kl"].isfinite()
    assert all(value.isfinite() for key, value in result.items() if key != "kl")
    assert all(g.isfinite().all() for g in gradients(losses(result), setting.parameters))


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("c", [0.0, 0.5, 1.5, math.inf])
def test_actions_that_are_not_allowed(statistics, c):
    """An action with logits of −inf in all three policies has no effect, as if it did not exist."""
    setting, batch = Setting(statistics=statistics), rows()
    found = []
    for allowed in (ACTIONS, ACTIONS - 1):
        networks, average = copy.deepcopy(setting.networks), copy.deepcopy(setting.average)
        given = batch.clone()
        given["action"] = batch["action"] % (ACTIONS - 1)
        given["logits"] = given["logits"][..., :allowed].clone()
        given["logits"][..., ACTIONS - 1 :] = -math.inf
        for network in (networks, average):
            with torch.no_grad():
                network.policy_head.bias[-1] = -math.inf
            for head in (network.policy_head, network.value_head):
                head.weight, head.bias = nn.Parameter(head.weight[:allowed]), nn.Parameter(head.bias[:allowed])
        loss = ACERLoss(networks.actor(), networks.critic(), c=c, delta=0.01, statistics=statistics)
        SoftUpdate(loss, eps=0.75)
        set_average(loss, average.actor())
        result = loss(given)
        losses(result).backward()
        found.append((result, [networks.trunk[0].weight.grad, networks.other_trunk[0].weight.grad]))
    (first, gradients_of_first), (second, gradients_of_second) = found
    for key, value in second.items():
        torch.testing.assert_close(first[key], value)
    assert_same_gradients(gradients_of_first, gradients_of_second, 1e-12)


# --- the conventions of TorchRL's loss modules


def test_without_an_updater_there_is_a_warning():
    networks = Networks()
    loss = ACERLoss(networks.actor(), networks.critic())
    with pytest.warns(UserWarning, match="No target network updater"):
        loss(rows())


@pytest.mark.parametrize(
    ("duplicate", "trunk"),
    [
        (copy.deepcopy, "apart"),
        (copy.deepcopy, "hidden"),
        # copy.deepcopy of TorchRL's loss modules does not preserve parameters that two modules share
        *((lambda x: pickle.loads(pickle.dumps(x)), trunk) for trunk in ("apart", "hidden", "modules")),
    ],
)
def test_copies(duplicate, trunk):
    setting, batch = Setting(trunk=trunk), rows()
    twin = duplicate(setting.loss)
    expected, result = setting.loss(batch), twin(batch)
    for key, value in expected.items():
        assert torch.equal(result[key], value)
    mine, theirs = list(setting.loss.parameters()), list(twin.parameters())
    assert len(theirs) == len(mine) == (8 if trunk == "apart" else 6)
    assert not {id(p) for p in mine} & {id(p) for p in theirs}
    assert_same_gradients(gradients(losses(result), theirs), gradients(losses(expected), mine))
    SoftUpdate(twin, eps=0.75).step()


@pytest.mark.parametrize("trunk", ["apart", "hidden", "modules"])
def test_to_another_dtype(trunk):
    setting, batch = Setting(trunk=trunk), rows()
    expected = setting.loss(batch)
    setting.loss.to(torch.float32)
    given = batch.apply(lambda x: x.float() if x.is_floating_point() else x)
    result = setting.loss(given)
    for key, value in expected.items():
        assert result[key].dtype == torch.float32
        torch.testing.assert_close(result[key], value.float(), rtol=1e-4, atol=1e-5)
    assert given["td_error"].dtype == torch.float32
    # shared parameters stay shared, and the updater still works
    assert len(list(setting.loss.parameters())) == (8 if trunk == "apart" else 6)
    with torch.no_grad():
        for parameter in setting.loss.parameters():
            parameter.zero_()
    for _ in range(200):
        setting.updater.step()
    assert all(p.abs().max() < 1e-6 for p in setting.loss.target_actor_network_params.values(True, True))


def test_actor_and_critic_of_one_operator():
    """An ActorValueOperator, TorchRL's way to share a trunk, works with the loss."""
    networks, batch = Networks(trunk="hidden"), rows()
    operator = ActorValueOperator(
        TensorDictModule(networks.trunk, in_keys=["observation"], out_keys=["hidden"]),
        ProbabilisticActor(
            TensorDictModule(networks.policy_head, in_keys=["hidden"], out_keys=["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
        ),
        networks.critic(),
    )
    found = []
    for critic in (operator.get_value_head(), operator.get_value_operator()):
        loss = ACERLoss(operator.get_policy_operator(), critic)
        SoftUpdate(loss, eps=0.75)
        found.append(gradients(losses(loss(batch)), list(networks.parameters())))
    assert_same_gradients(*found)


@pytest.mark.parametrize("distribution", [torch.distributions.OneHotCategorical, OneHotCategorical])
def test_one_hot_policies(distribution):
    networks, batch = Networks(), rows(one_hot=True)
    loss = ACERLoss(networks.actor(distribution_class=distribution), networks.critic())
    SoftUpdate(loss, eps=0.75)
    expected = ACERLoss(networks.actor(), networks.critic())
    SoftUpdate(expected, eps=0.75)
    assert torch.equal(loss(batch)["loss_actor"], expected(batch)["loss_actor"])


def test_in_one_graph():
    setting, batch = Setting(trunk="hidden"), rows(mask=True)
    assert_compiles(setting.loss, batch, setting.parameters)


# --- bad input


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gamma", 1.1),
        ("gamma", math.nan),
        ("lmbda", -0.1),
        ("c", -1.0),
        ("c", math.nan),
        ("delta", -0.5),
        ("statistics", "scores"),
        ("entropy_coeff", -1e-3),
        ("critic_coeff", math.inf),
        ("retrace_thresh", -1.0),
        ("returns", "monte_carlo"),
        ("reduction", "median"),
    ],
)
def test_arguments_out_of_range(key, value):
    with pytest.raises(ValueError, match=rf"ACERLoss\({key}={value!r}\): {key} must be"):
        Setting(**{key: value})


def test_networks_that_do_not_fit():
    networks = Networks()
    actor, critic = networks.actor(), networks.critic()
    with pytest.raises(TypeError, match=r"actor_network must be a ProbabilisticActor.*TensorDictModule"):
        ACERLoss(actor[0], critic)
    with pytest.raises(TypeError, match=r"qvalue_network must be a TensorDictModule.*Linear"):
        ACERLoss(actor, networks.value_head)
    module = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["loc"])
    with pytest.raises(ValueError, match=r"'logits' or 'probs'.*loc.*in_keys=\{'logits': <entry>\}"):
        ACERLoss(ProbabilisticActor(module, in_keys=["loc"], distribution_class=Categorical), critic)
    with pytest.raises(ValueError, match=r"Categorical.*Bernoulli"):
        ACERLoss(networks.actor(distribution_class=torch.distributions.Bernoulli), critic)
    module = TensorDictModule(nn.Linear(3, 4), in_keys=["observation"], out_keys=["logits"])
    masked = ProbabilisticActor(module, in_keys=["logits", "mask"], distribution_class=MaskedCategorical)
    with pytest.raises(ValueError, match=r"Categorical.*mask"):
        ACERLoss(masked, critic)


@pytest.mark.parametrize(
    ("key", "author"),
    [
        ("observation", "environment"),
        ("action", "policy"),
        ("logits", "policy"),
        (("next", "observation"), "environment"),
        (("next", "reward"), "environment"),
        (("next", "done"), "environment"),
        (("next", "terminated"), "environment"),
    ],
    ids=str,
)
def test_missing_entries(key, author):
    setting, batch = Setting(), rows()
    last = key if isinstance(key, str) else key[-1]
    refuses(setting, batch.exclude(key), KeyError, rf"ACERLoss: the batch has no entry .*{last}.*{author}")


def test_a_missing_action_value():
    setting, batch = Setting(), rows()
    setting.loss.set_keys(action_value="q")
    refuses(setting, batch, KeyError, r"'q'.*qvalue_network.*action_value")


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        (("next", "reward"), (4, 9), r"'reward'.*\(4, 9\), expected \(4, 9, 1\).*environment"),
        (("next", "done"), (4, 9, 2), r"'done'.*\(4, 9, 2\), expected \(4, 9, 1\).*environment"),
        (("next", "terminated"), (4, 9), r"'terminated'.*\(4, 9\), expected \(4, 9, 1\).*environment"),
        ("logits", (4, 9, ACTIONS + 1), r"'logits'.*\(4, 9, 5\), expected \(4, 9, 4\).*collector"),
        ("action", (4, 9, ACTIONS + 1), r"'action'.*\(4, 9, 5\).*indices.*one-hot"),
        (("collector", "mask"), (4, 9, 2), r"'mask'.*\(4, 9, 2\), expected \(4, 9\).*sampler"),
        ("priority_weight", (4, 9, 2), r"'priority_weight'.*\(4, 9, 2\), expected \(4, 9\).*sampler"),
    ],
    ids=str,
)
def test_shapes(key, shape, words):
    setting, batch = Setting(), rows()
    dtype = batch[key].dtype if key in batch.keys(True) else torch.bool
    batch[key] = torch.zeros(shape, dtype=dtype)
    refuses(setting, batch, ValueError, words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_masks_of_numbers(dtype):
    setting, batch = Setting(), rows(mask=True)
    batch["collector", "mask"] = batch["collector", "mask"].to(dtype)
    refuses(setting, batch, TypeError, rf"'mask'.*{dtype}.*bool.*sampler")


def test_values_of_some_actions():
    networks = Networks()
    critic = TensorDictModule(nn.Linear(3, 1).double(), in_keys=["observation"], out_keys=["action_value"])
    setting = Setting()
    setting.loss = ACERLoss(networks.actor(), critic)
    SoftUpdate(setting.loss, eps=0.75)
    refuses(setting, rows(), ValueError, r"'action_value'.*\(4, 9, 1\), expected \(4, 9, 4\).*qvalue_network")


def not_one_hot(batch: TensorDict) -> Tensor:
    action = nn.functional.one_hot(batch["action"], ACTIONS)
    action[1, 2] = 1
    return action


def outside(batch: TensorDict) -> Tensor:
    return batch["action"].masked_fill(batch["action"] == 2, ACTIONS)


def below(batch: TensorDict) -> Tensor:
    return batch["action"] - 1


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (not_one_hot, "'action'.*not one-hot"),
        (outside, r"'action'.*not in \[0, 4\)"),
        (below, r"'action'.*not in \[0, 4\)"),
        (lambda batch: batch["action"].double(), "'action'.*float64.*indices"),
    ],
)
def test_actions_that_are_none(action, words):
    setting, batch = Setting(), rows()
    refuses(setting, batch.set("action", action(batch)), ValueError, words)


def test_a_batch_without_time():
    setting = Setting()
    refuses(setting, rows()[0, 0].exclude("td_error"), ValueError, r"\[\*B, T\]")


def test_what_is_not_to_be_used():
    setting = Setting()
    with pytest.raises(NotImplementedError, match="gamma=, lmbda=, returns="):
        setting.loss.make_value_estimator()
    with pytest.raises(AttributeError, match="set_keys"):
        setting.loss.in_keys = ["observation"]
    with pytest.raises(ValueError, match="not an accepted"):
        setting.loss.set_keys(advantage="advantage")
