"""The baseline TIS of ACER (A3C if it is on-policy), against a loop over single steps that follows App. E.2."""

import math

import pytest
from tensordict import TensorDict
from torch import Tensor
from torch.distributions import Normal
from torchrl.modules import TanhNormal

from tests.objectives.test_acer_continuous import BOTH, STATISTICS, Setting, distribution, policy_step, rows
from tests.objectives.trajectories import Sums, assert_agrees, episodes


def appendix_e2(setting: Setting, batch: TensorDict) -> Sums:
    """Values and gradients as means over valid steps, step by step, with c, δ and so on of the loss module."""
    loss, networks, sums = setting.loss, setting.networks, Sums(setting.parameters)
    critic, count = networks.critic, 0

    def v_of(observation: Tensor) -> Tensor:
        return critic.value_net(critic.trunk(observation))[0]

    for piece in episodes(batch):
        steps = [batch[position] for position in piece]
        actions = [step["action"].atanh() if setting.squashed else step["action"] for step in steps]
        rho = []
        for step, a in zip(steps, actions, strict=True):
            loc, scale = (x.detach() for x in networks.policy(step["observation"]))
            rho.append(distribution(loc, scale).log_prob(a) - distribution(step["loc"], step["scale"]).log_prob(a))
        last = steps[-1]["next"]
        bootstrap = 0.0 if last["terminated"] else v_of(last["observation"]).item()
        for t, (step, a) in enumerate(zip(steps, actions, strict=True)):
            k, count = len(steps) - t, count + 1
            weight = min(loss.c, math.prod(rho[t + i].exp().item() for i in range(k)))
            target = sum(loss.gamma**i * steps[t + i]["next", "reward"].item() for i in range(k))
            target += loss.gamma**k * bootstrap
            v = v_of(step["observation"])
            policy_step(setting, step, sums, [(a, weight * (target - v.item()))], distribution)
            sums.backpropagate("loss_value", v, -2 * loss.value_coeff.item() * weight * (target - v.item()))
            sums.add("loss_qvalue", 0.0)
            sums.add("loss_value", loss.value_coeff.item() * weight * (target - v.item()) ** 2)
            sums.add("rho", weight)
            sums.add("bc_weight", 0.0)
    return sums.means(count)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            {"c": c, "trust_region": trust_region, "statistics": statistics}
            for c in (0.5, 1.0, 5.0, math.inf)
            for trust_region in (True, False)
            for statistics in STATISTICS
        ),
        {"shared": True},
        {"dueling": False},
        {"fixed": True},
        {"distribution": Normal, "statistics": BOTH},
        {"distribution": TanhNormal, "statistics": BOTH},
        {"gamma": 1.0},
        {"value_coeff": 0.125},
        {"lmbda": 0.3, "retrace_thresh": 2.5, "use_q_opc": False, "num_samples": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", [False, True])
def test_is_appendix_e2(arguments, mask):
    setting = Setting(returns="truncated_importance_sampling", **{"c": 2.0, **arguments})
    batch = rows(mask=mask, squashed=setting.squashed)
    result = setting.loss(batch)
    assert_agrees(result, appendix_e2(setting, batch))
    if arguments.get("trust_region"):
        # the constraint is active in some steps, but not in all
        assert 0 < result["tr_active"] < 1
