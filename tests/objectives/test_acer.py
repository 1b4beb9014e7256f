"""ACER for discrete actions, against a loop over single steps that follows Algorithm 2."""

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor

from tests.objectives.trajectories import (
    HIDDEN,
    OBSERVATION,
    Sums,
    assert_same,
    assert_same_gradients,
    averaged,
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
# numbers that float32 represents exactly
EXACT = {"gamma": 0.9, "c": 1.5, "delta": 0.05, "entropy_coeff": 0.25}
BEHAVIOUR = ("logits",)
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

    def __init__(self, kind: str = "logits", trunk: str = "apart", **arguments: Any):
        self.networks = Networks(kind, trunk)
        self.average = unlike(copy.deepcopy(self.networks), 0.5)
        self.parameters = list(self.networks.parameters())
        self.loss = averaged(ACERLoss(self.networks.actor(), self.networks.critic(), **{**EXACT, **arguments}))
        set_average(self.loss, self.average.actor())

    def record(self) -> "Setting":
        """Nothing is drawn."""
        return self


def with_own_keys(networks: Networks, observation: Any) -> ACERLoss:
    critic = networks.critic(observation, ("critic", "values"))
    loss = ACERLoss(networks.actor(observation), critic, behaviour_key=("mu", "logits"), **EXACT)
    loss.set_keys(action_value=("critic", "values"))
    return loss


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
        masked = ~batch["collector", "mask"]
        batch[key][masked] = 0
        batch["action"][masked] = 0 if one_hot else -1
    return batch


# --- Algorithm 2


def log_density(statistics: str, phi: Tensor) -> Tensor:
    """log f(·|φ) for one state."""
    return {"probs": phi.log, "logits": lambda: phi.log_softmax(-1), "log_probs": lambda: phi}[statistics]()


def algorithm(setting: Setting, batch: TensorDict) -> Sums:
    """Values and gradients as means over valid steps, step by step, with c, δ and so on of the loss module."""
    loss, networks, sums = setting.loss, setting.networks, Sums(setting.parameters)
    mu_key = loss.tensor_keys.behaviour
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
            if loss.returns == "importance_sampling":
                target = rho[a] * target
            else:
                trace = loss.lmbda * min(loss.retrace_thresh, rho[a])
                target = trace * (target - float(q_now[a])) + value
    return sums.means(count)


# --- batches


@pytest.mark.parametrize("name", ["logits", "probs"])
@pytest.mark.parametrize("entry", ["pi_parameters", ("agents", "policy"), ("agents", "logits")], ids=str)
def test_the_policys_logits_or_probabilities_may_have_any_entry(name, entry):
    mu_key = ("mu", name)
    expected_setting, batch = Setting(name, behaviour_key=mu_key), rows(mask=True, key=mu_key)
    renamed = {}
    for which, networks in (("current", expected_setting.networks), ("average", expected_setting.average)):
        module = TensorDictModule(networks.actor()[0].module, in_keys=["observation"], out_keys=[entry])
        # an entry whose last part is the name needs no mapping
        in_keys = [entry] if entry[-1] == name else {name: entry}
        renamed[which] = ProbabilisticActor(module, in_keys=in_keys, distribution_class=Categorical)
    loss = averaged(ACERLoss(renamed["current"], expected_setting.networks.critic(), behaviour_key=mu_key, **EXACT))
    set_average(loss, renamed["average"])
    result, expected = loss(batch.clone()), expected_setting.loss(batch)
    assert expected["kl"] > 0
    assert_same(result, expected)


def test_several_agents_are_refused():
    setting, batch = Setting(), rows()
    for key in ("observation", ("next", "observation")):
        batch[key] = batch[key].unsqueeze(-2).expand(4, 9, 2, OBSERVATION)
    refuses(setting, batch, ValueError, r"logits.*\(4, 9, 2, 4\).*expected \(4, 9, 'A'\).*[Ss]everal agents")


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
@pytest.mark.parametrize("c", [0.0, 2.0, math.inf])
def test_half_precision_stays_finite(statistics, c):
    setting, batch = Setting(statistics=statistics, c=c), rows(spread=15.0)
    batch = batch.apply(lambda x: x.half() if x.is_floating_point() else x)
    setting.loss.to(torch.float16)
    result = setting.loss(batch)
    assert all(value.isfinite() for value in result.values())


@pytest.mark.parametrize("statistics", STATISTICS)
@pytest.mark.parametrize("c", [0.0, 0.5, 1.5, math.inf])
@pytest.mark.parametrize("value", [3.0, -math.inf])
def test_actions_that_are_not_allowed(statistics, c, value):
    """An action with logits of −inf in all three policies has no effect, as if it did not exist, whatever its Q is."""
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
                network.policy_head.bias[-1], network.value_head.bias[-1] = -math.inf, value
            for head in (network.policy_head, network.value_head):
                head.weight, head.bias = nn.Parameter(head.weight[:allowed]), nn.Parameter(head.bias[:allowed])
        loss = averaged(ACERLoss(networks.actor(), networks.critic(), c=c, delta=0.01, statistics=statistics))
        set_average(loss, average.actor())
        result = loss(given)
        losses(result).backward()
        assert all(p.grad.isfinite().all() for p in networks.parameters())
        found.append((result, [networks.trunk[0].weight.grad, networks.other_trunk[0].weight.grad]))
    (first, gradients_of_first), (second, gradients_of_second) = found
    assert_same(first, second, 1e-9)
    assert_same_gradients(gradients_of_first, gradients_of_second, 1e-12)


# --- the conventions of TorchRL's loss modules


@pytest.mark.parametrize("distribution", [torch.distributions.OneHotCategorical, OneHotCategorical])
def test_one_hot_policies(distribution):
    networks, batch = Networks(), rows(one_hot=True)
    loss = averaged(ACERLoss(networks.actor(distribution_class=distribution), networks.critic()))
    expected = averaged(ACERLoss(networks.actor(), networks.critic()))
    assert torch.equal(loss(batch)["loss_actor"], expected(batch)["loss_actor"])


# --- bad input


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


@pytest.mark.parametrize("kind", [MaskedCategorical, OneHotCategorical])
def test_arguments_that_change_the_probabilities_are_refused(kind):
    networks = Networks()
    mask = torch.tensor([True, True, False, True])
    arguments = {"mask": mask} if kind is MaskedCategorical else {"temperature": 2.0}
    actor = networks.actor(distribution_class=kind, distribution_kwargs=arguments)
    with pytest.raises(ValueError, match="may change its probabilities"):
        ACERLoss(actor, networks.critic())


def test_a_missing_action_value():
    setting, batch = Setting(), rows()
    setting.loss.set_keys(action_value="q")
    refuses(setting, batch, KeyError, r"'q'.*qvalue_network.*action_value")


def test_values_of_some_actions():
    setting = Setting()
    critic = TensorDictModule(nn.Linear(3, 1).double(), in_keys=["observation"], out_keys=["action_value"])
    setting.loss = averaged(ACERLoss(setting.networks.actor(), critic))
    refuses(setting, rows(), ValueError, r"logits.*\(4, 9, 4\).*action values.*\(4, 9, 1\), expected \(4, 9, 'A'\)")
