"""Networks, experience and a reference loop for tests of the Retrace estimator."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor

from tests.objectives.trajectories import q_ret_of
from torchrl_replay_ext import RetraceEstimator

OBSERVATION, ACTIONS, GAMMA = 3, 4, 0.9


def mlp(outputs=ACTIONS):
    return nn.Sequential(nn.Linear(OBSERVATION, 8), nn.Tanh(), nn.Linear(8, outputs)).to(torch.float64)


def critic(network=None, in_key="observation", out_key="action_value"):
    return TensorDictModule(network or mlp(), in_keys=[in_key], out_keys=[out_key])


def actor(network=None, distribution=Categorical, in_key="observation", **arguments):
    module = TensorDictModule(network or mlp(), in_keys=[in_key], out_keys=["logits"])
    return ProbabilisticActor(module, in_keys=["logits"], distribution_class=distribution, **arguments)


def estimator_of(value=None, pi=None, **arguments):
    """An estimator for the networks of Q and π; for the greedy policy if it gets neither π nor an actor."""
    actor_network = None if pi is None else actor(pi)
    networks = {"value_network": critic(value), "actor_network": actor_network}
    return RetraceEstimator(**{"gamma": GAMMA, **networks, **arguments})


def experience(*shape, seed=0):
    """Rows [*shape] of a random policy, with terminated and truncated episodes."""
    g = torch.Generator().manual_seed(seed)
    double = {"dtype": torch.float64, "generator": g}
    done = torch.rand(*shape, 1, generator=g) < 0.25
    logits = torch.randn(*shape, ACTIONS, **double)
    action = torch.multinomial(logits.softmax(-1).reshape(-1, ACTIONS), 1, generator=g).reshape(*shape, 1)
    return TensorDict(
        {
            "observation": torch.randn(*shape, OBSERVATION, **double),
            "action": action.squeeze(-1),
            "logits": logits,
            "action_log_prob": logits.log_softmax(-1).gather(-1, action).squeeze(-1),
            "next": {
                "observation": torch.randn(*shape, OBSERVATION, **double),
                "reward": torch.randn(*shape, 1, **double),
                "done": done,
                "terminated": done & (torch.rand(*shape, 1, generator=g) < 0.5),
            },
        },
        shape,
    )


@torch.no_grad()
def naive(batch, value, policy=None, *, lmbda=1.0, c=1.0, power=1.0):
    """Q^ret [S, T, 1] by the loop of Algorithm 2; without ``policy``, for the greedy policy."""

    def probabilities(x):
        if policy is not None:
            return policy(x).softmax(-1)
        return nn.functional.one_hot(value(x).argmax(-1), ACTIONS).to(x.dtype)

    x, behind, action = batch["observation"], batch["next", "observation"], batch["action"].unsqueeze(-1)
    rho = probabilities(x).gather(-1, action) / batch["action_log_prob"].exp().unsqueeze(-1)
    v_next = (probabilities(behind) * value(behind)).sum(-1, keepdim=True)
    return q_ret_of(batch, GAMMA, rho**power, value(x).gather(-1, action), v_next, lmbda=lmbda, c=c)


def assert_near(result, expected):
    assert result.sub(expected).abs().max() < 1e-10
