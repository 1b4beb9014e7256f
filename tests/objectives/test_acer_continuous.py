"""ACER for continuous actions, against a loop over single steps that follows Algorithm 3."""

import copy
import functools
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence
from torchrl.modules import IndependentNormal, ProbabilisticActor, TanhNormal

from tests.objectives.trajectories import (
    HIDDEN,
    OBSERVATION,
    Sums,
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
from torchrl_replay_ext import ACERContinuousLoss, SeparateValueNetworks, StochasticDuelingNetwork

ACTION = 2
LOC, BOTH = STATISTICS = ("loc",), ("loc", "scale")
# numbers that float32 represents exactly
EXACT = {"gamma": 0.9, "c": 1.0, "delta": 0.1, "num_samples": 3, "entropy_coeff": 0.25}
BEHAVIOUR = ("loc", "scale")


class GaussianHead(nn.Module):
    """Mean and standard deviation; the latter depends on the state unless it is fixed."""

    def __init__(self, fixed: bool):
        super().__init__()
        self.mean = nn.Linear(HIDDEN, ACTION)
        self.log_scale = None if fixed else nn.Linear(HIDDEN, ACTION)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.mean(features)
        if self.log_scale is None:
            return loc, torch.full_like(loc, 0.5)
        return loc, (self.log_scale(features) - 0.5).exp()


class Networks(nn.Module):
    """Policy and critic, with a shared trunk or separate trunks."""

    def __init__(self, *, fixed: bool = False, shared: bool = False, dueling: bool = True):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh())
        other = self.trunk if shared else nn.Sequential(nn.Linear(OBSERVATION, HIDDEN), nn.Tanh())
        self.head = GaussianHead(fixed)
        kind = StochasticDuelingNetwork if dueling else SeparateValueNetworks
        beside = nn.Sequential(nn.Linear(HIDDEN + ACTION, 5), nn.Tanh(), nn.Linear(5, 1))
        self.critic = kind(nn.Linear(HIDDEN, 1), beside, other)
        self.to(torch.float64)

    def actor(self, observation: Any = "observation", keys: Any = ("loc", "scale"), **arguments: Any) -> Any:
        module = TensorDictModule(nn.Sequential(self.trunk, self.head), in_keys=[observation], out_keys=list(keys))
        arguments = {"distribution_class": IndependentNormal, **arguments}
        return ProbabilisticActor(module, in_keys=dict(zip(("loc", "scale"), keys, strict=True)), **arguments)

    def policy(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.trunk(observation))


class Setting:
    """A loss module that records its samples, its networks, and an average policy that differs from the current one."""

    def __init__(
        self,
        *,
        fixed: bool = False,
        shared: bool = False,
        dueling: bool = True,
        distribution: Any = IndependentNormal,
        **arguments: Any,
    ):
        self.squashed = distribution is TanhNormal
        self.networks = Networks(fixed=fixed, shared=shared, dueling=dueling)
        self.average = unlike(copy.deepcopy(self.networks))
        self.parameters = list(self.networks.parameters())
        actor = self.networks.actor(distribution_class=distribution)
        self.loss = averaged(ACERContinuousLoss(actor, self.networks.critic, **{**EXACT, **arguments}))
        set_average(self.loss, self.average.actor())
        self.drawn: list[Tensor] = []

    def record(self) -> "Setting":
        draw = self.loss.sample_actions

        def sample_actions(*arguments: Any) -> Tensor:
            self.drawn.append(draw(*arguments))
            return self.drawn[-1]

        self.loss.sample_actions = sample_actions
        return self


def with_own_keys(networks: Networks, observation: Any) -> ACERContinuousLoss:
    keys = ("mu", "loc"), ("mu", "scale")
    actor = networks.actor(observation, ("mean", "std"))
    loss = ACERContinuousLoss(actor, networks.critic, behaviour_keys=keys, **EXACT)
    loss.set_keys(observation=observation, loc="mean", scale="std")
    return loss


def rows(*, mask: bool = False, squashed: bool = False) -> TensorDict:
    """Rows [4, T] of a random behaviour policy; with a mask, its masked statistics are invalid."""
    batch = cut_rows(mask=mask)
    shape = (*batch.shape, ACTION)
    batch["loc"] = 0.5 * torch.randn(shape, dtype=torch.float64)
    batch["scale"] = 0.3 + 0.7 * torch.rand(shape, dtype=torch.float64)
    action = batch["loc"] + batch["scale"] * torch.randn(shape, dtype=torch.float64)
    batch["action"] = action.tanh() if squashed else action
    if mask:
        for key in ("loc", "scale", "action"):
            batch[key][~batch["collector", "mask"]] = 0
    return batch


# --- Algorithm 3


def distribution(loc: Tensor, scale: Tensor, squashed: bool = False) -> Any:
    gaussian = Independent(Normal(loc, scale), 1)
    return TransformedDistribution(gaussian, [TanhTransform()]) if squashed else gaussian


def policy_step(
    setting: Setting, step: TensorDict, sums: Sums, weights: list[tuple[Tensor, float]], kind: Any = None
) -> None:
    """Add loss_actor, loss_entropy and diagnostics of a step; g is the sum of scores of actions with given weights."""
    loss, kind = setting.loss, kind or functools.partial(distribution, squashed=setting.squashed)
    loc, scale = setting.networks.policy(step["observation"])
    live = loc if loss.statistics == LOC else torch.cat([loc, scale])
    phi = live.detach().requires_grad_()
    parameters = (phi, scale.detach()) if loss.statistics == LOC else phi.split(ACTION)
    g = sum(w * torch.autograd.grad(kind(*parameters).log_prob(a), phi, retain_graph=True)[0] for a, w in weights)
    loc_avg, scale_avg = (x.detach() for x in setting.average.policy(step["observation"]))
    divergence = kl_divergence(distribution(loc_avg, scale_avg), distribution(*parameters))
    (k,) = torch.autograd.grad(divergence, phi)
    z = project(g, k, loss.delta) if loss.trust_region else g
    entropy = Normal(loc, scale).entropy().sum()
    sums.backpropagate("loss_actor", live, -z)
    sums.backpropagate("loss_entropy", entropy, -loss.entropy_coeff.item())
    sums.add("loss_actor", -(live @ z))
    sums.add("loss_entropy", -loss.entropy_coeff.item() * entropy)
    sums.add("entropy", entropy)
    sums.add("kl", divergence)
    sums.add("tr_active", float(not torch.equal(z, g)))


def algorithm(setting: Setting, batch: TensorDict) -> Sums:
    """Values and gradients as means over valid steps, step by step, with c, δ and so on of the loss module."""
    loss, networks, sums = setting.loss, setting.networks, Sums(setting.parameters)
    critic, squashed = networks.critic, setting.squashed
    dueling = isinstance(critic, StochasticDuelingNetwork)
    (drawn,) = setting.drawn
    count = 0

    def q_and_v(observation: Tensor, action: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        features = critic.trunk(observation)
        v = critic.value_net(features)[0]
        if not dueling:
            return critic.action_value_net(torch.cat([features, action]))[0], v
        q = v + critic.advantage_net(torch.cat([features, action]))[0]
        for sample in u:
            q = q - critic.advantage_net(torch.cat([features, sample]))[0] / len(u)
        return q, v

    for piece in episodes(batch):
        last = batch["next"][piece[-1]]
        ret = 0.0
        if not last["terminated"]:
            ret = critic.value_net(critic.trunk(last["observation"])).item()
        opc = ret
        for position in reversed(piece):
            step, count = batch[position], count + 1
            observation, a = step["observation"], step["action"]
            other, *u = drawn[position]
            if squashed:
                other, u = other.tanh(), [sample.tanh() for sample in u]
            assert len(u) == loss.num_samples
            loc, scale = networks.policy(observation)
            pi = distribution(loc.detach(), scale.detach(), squashed)
            mu = distribution(step["loc"], step["scale"], squashed)
            rho, rho_other = ((pi.log_prob(x) - mu.log_prob(x)).exp().item() for x in (a, other))
            c_i = min(loss.retrace_thresh, rho ** (1 / ACTION))
            q, v = q_and_v(observation, a, u)
            q_other = q_and_v(observation, other, u)[0].item()
            reward = step["next", "reward"].item()
            ret, opc = reward + loss.gamma * ret, reward + loss.gamma * opc
            of_actor = opc if loss.use_q_opc and loss.returns == "retrace" else ret
            weight = 0.0 if math.isinf(loss.c) else max(0.0, 1 - loss.c / rho_other)
            of_scores = min(loss.c, rho) * (of_actor - v.item()), weight * (q_other - v.item())
            policy_step(setting, step, sums, [*zip((a, other), of_scores, strict=True)])
            error = ret - q.item()
            sums.backpropagate("loss_qvalue", q, -2 * loss.critic_coeff.item() * error)
            v_gradient = min(1.0, rho) * error if dueling else rho * (ret - v.item())
            sums.backpropagate("loss_value", v, -2 * loss.value_coeff.item() * v_gradient)
            sums.add("loss_qvalue", loss.critic_coeff.item() * error**2)
            v_loss = v_gradient**2 if dueling else rho * (ret - v.item()) ** 2
            sums.add("loss_value", loss.value_coeff.item() * v_loss)
            sums.add("rho", min(loss.c, rho))
            sums.add("bc_weight", weight)
            if loss.returns == "importance_sampling":
                ret = rho * ret
            else:
                ret = loss.lmbda * c_i * (ret - q.item()) + v.item()
                opc = loss.lmbda * (opc - q.item()) + v.item()
    return sums.means(count)


# --- draws


def test_draws_are_of_the_policy():
    loss = Setting().loss
    loc = torch.tensor([[1.0, -2.0], [0.0, 5.0]], dtype=torch.float64)
    scale = torch.tensor([[0.1, 1.0], [2.0, 0.5]], dtype=torch.float64)
    drawn = loss.sample_actions(loc, scale, 40_000)
    assert drawn.shape == (2, 40_000, 2)
    assert drawn.dtype == torch.float64
    assert ((drawn.mean(-2) - loc) / scale).abs().max() < 5 / 200
    assert (drawn.std(-2) / scale - 1).abs().max() < 0.02
    correlation = torch.corrcoef(drawn.permute(0, 2, 1).reshape(4, -1)) - torch.eye(4)
    assert correlation.abs().max() < 5 / 200


# --- batches


def sample_the_same(setting: Setting) -> None:
    """Replace the random samples by numbers that do not depend on the shape of the batch."""

    def sample_actions(loc: Tensor, scale: Tensor, n: int) -> Tensor:
        noise = torch.linspace(-1, 1, n * ACTION, dtype=loc.dtype, device=loc.device).reshape(n, ACTION)
        return loc.unsqueeze(-2) + scale.unsqueeze(-2) * noise

    setting.loss.sample_actions = sample_actions


@pytest.mark.parametrize("value", [1.5, -1.01])
def test_actions_that_no_tanh_gives_are_refused(value):
    setting, batch = Setting(distribution=TanhNormal), rows(squashed=True, mask=True)
    batch["action"][~batch["collector", "mask"]] = value
    setting.loss(batch)
    batch["action"][0, 0, 0] = value
    with pytest.raises(ValueError, match=rf"ACERContinuousLoss: a stored action is {abs(value)}.*\[-1, 1\]"):
        setting.loss(batch)


def test_what_the_actor_alone_reads_is_not_needed_of_the_next_state():
    networks, batch = Networks(), rows()
    loss = averaged(ACERContinuousLoss(networks.actor("features"), networks.critic))
    batch["features"] = batch["observation"]
    assert ("next", "features") not in loss.in_keys
    assert loss(batch)["loss_actor"].isfinite()


# --- extremes


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal])
@pytest.mark.parametrize("statistics", [LOC, BOTH])
@pytest.mark.parametrize("c", [0.0, 5.0, math.inf])
@pytest.mark.parametrize("arguments", [{}, {"dueling": False}, {"returns": "truncated_importance_sampling"}], ids=str)
def test_float32_of_policies_far_apart(kind, statistics, c, arguments):
    """Actions at the bounds; policy, average policy and behaviour policy are many standard deviations apart."""
    setting, batch = Setting(c=c, statistics=statistics, distribution=kind, **arguments), rows(squashed=True)
    setting.loss.to(torch.float32)
    batch = batch.apply(lambda x: x.float() if x.is_floating_point() else x)
    batch["next", "observation"].nan_to_num_()
    batch["action"][0], batch["action"][1] = 1.0, -1.0
    batch["loc"][2] += 100 * batch["scale"][2]
    batch["scale"][3] *= 1e-3
    with torch.no_grad():
        setting.average.head.mean.bias += 50
    set_average(setting.loss, setting.average.actor())
    result = setting.loss(batch)
    assert all(value.dtype == torch.float32 and value.isfinite() for value in result.values())
    assert all(g.isfinite().all() for g in gradients(losses(result), setting.parameters))


@pytest.mark.parametrize(("dtype", "mean"), [(torch.float32, 2.0), (torch.float64, 8.0)])
def test_ratios_of_saturated_actions(dtype, mean):
    """The tanh cancels out as long as the dtype tells an action from 1: in float32 up to |atanh a| = 7.25."""
    shape = (1, 3, ACTION)
    loc, scale = torch.full(shape, mean, dtype=dtype), torch.full(shape, 0.5, dtype=dtype)
    action = TanhNormal(loc, scale).sample()

    def log_density(loc):
        return distribution(loc.double(), scale.double(), squashed=True).log_prob(action.double())

    setting = Setting(distribution=TanhNormal, c=1e6)
    setting.loss.to(dtype)
    setting.loss._policy = lambda batch, *, average=False: Normal(loc + 0.2, scale)
    batch = rows(squashed=True)[:1, :3].to(dtype)
    batch.update({"action": action, "loc": loc, "scale": scale})
    expected = (log_density(loc + 0.2) - log_density(loc)).exp().mean()
    torch.testing.assert_close(setting.loss(batch)["rho"].double(), expected, rtol=1e-2, atol=0)


# --- the conventions of TorchRL's loss modules


class StateValue(nn.Module):
    """A critic that only has the method ``state_value``."""

    def __init__(self):
        super().__init__()
        self.number = nn.Parameter(torch.ones((), dtype=torch.float64))

    def state_value(self, observation: Tensor) -> Tensor:
        return self.number * observation.sum(-1, keepdim=True)


class BothValues(StateValue):
    def forward(self, observation: Tensor, actions: Tensor, policy_samples: Tensor) -> tuple[Tensor, Tensor]:
        return self.number * actions.sum(-1, keepdim=True), self.state_value(observation)


@pytest.mark.parametrize(
    ("critic", "returns"), [(BothValues, "retrace"), (StateValue, "truncated_importance_sampling")]
)
def test_a_critic_of_ones_own(critic, returns):
    """The critic may be any module with the methods ``forward``, which only Retrace needs, and ``state_value``."""
    loss = averaged(ACERContinuousLoss(Networks().actor(), critic(), returns=returns))
    assert torch.autograd.grad(loss(rows())["loss_value"], loss.sdn.number)[0] != 0


# --- bad input


def test_behaviour_needs_two_keys():
    with pytest.raises(ValueError, match=r"behaviour_keys=\('loc',\)"):
        Setting(behaviour_keys=("loc",))


def test_networks_that_do_not_fit():
    networks = Networks()
    with pytest.raises(TypeError, match=r"actor_network must be a ProbabilisticActor.*TensorDictModule"):
        ACERContinuousLoss(networks.actor()[0], networks.critic)
    with pytest.raises(TypeError, match=r"sdn must be a StochasticDuelingNetwork.*state_value.*Linear"):
        ACERContinuousLoss(networks.actor(), nn.Linear(5, 1))
    with pytest.raises(ValueError, match=r"ACERContinuousLoss: the policy's distribution.*Laplace.*must be Normal"):
        ACERContinuousLoss(networks.actor(distribution_class=torch.distributions.Laplace), networks.critic)
    with pytest.raises(ValueError, match=r"low.*actions in \[-1, 1\]"):
        ACERContinuousLoss(
            networks.actor(distribution_class=TanhNormal, distribution_kwargs={"low": -2.0, "high": 2.0}),
            networks.critic,
        )


def test_statistics_of_another_name():
    setting = Setting()
    setting.loss.set_keys(loc="mean")
    refuses(setting, rows(), KeyError, r"'mean'.*actor_network.*set_keys\(loc=")


@pytest.mark.parametrize("returns", ["retrace", "truncated_importance_sampling"])
def test_values_of_another_shape(returns):
    setting = Setting()
    setting.networks.critic.value_net = nn.Linear(HIDDEN, 2).double()
    setting.loss = averaged(ACERContinuousLoss(setting.networks.actor(), setting.networks.critic, returns=returns))
    refuses(setting, rows(), ValueError, r"'V' has shape \(4, 9, 2\), expected \(4, 9, 1\); sdn")
