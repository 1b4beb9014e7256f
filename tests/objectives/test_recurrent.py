"""Recurrent networks on rows that hold several episodes, against evaluations of each episode step by step."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import LSTMModule, ProbabilisticActor, set_recurrent_mode

from tests.data import buffer_with
from tests.objectives.q_networks import ACTIONS, GAMMA, OBSERVATION, estimator_of
from tests.objectives.trajectories import averaged, q_ret_of
from torchrl_replay_ext import ACERLoss, ProportionalSampler, TrajectoryRetraceSampler

HIDDEN = 5
ROWS, TIME, BEFORE = 6, 10, 3


class Recurrent:
    """An LSTM with heads for the policy and for action values, and rows of experience that stores its hidden states."""

    def __init__(self):
        torch.manual_seed(0)
        keys = ["observation", "h", "c"]
        out_keys = ["features", ("next", "h"), ("next", "c")]
        self.lstm = LSTMModule(OBSERVATION, HIDDEN, in_keys=keys, out_keys=out_keys).double()
        self.policy_head, self.value_head = (nn.Linear(HIDDEN, ACTIONS, dtype=torch.float64) for _ in range(2))
        logits = TensorDictModule(self.policy_head, in_keys=["features"], out_keys=["logits"])
        sequence = TensorDictSequential(self.lstm, logits)
        self.actor = ProbabilisticActor(sequence, in_keys=["logits"], distribution_class=Categorical)
        self.critic = TensorDictModule(self.value_head, in_keys=["features"], out_keys=["action_value"])
        self.q_network = TensorDictSequential(self.lstm, self.critic)
        self.rows = self.collect()

    def step(self, observation, state):
        """Features [HIDDEN] of a state, and the hidden state after it, from torch's LSTM."""
        features, state = self.lstm.lstm(observation.unsqueeze(0), state)
        return features.squeeze(0), state

    @torch.no_grad()
    def collect(self):
        """Rows [B, T] that start anywhere in an episode; V(x_{t+1}) is stored in "expected"."""
        rows = []
        for _ in range(ROWS):
            steps, initial = [], True
            for _ in range(BEFORE + TIME):
                if initial:
                    state = torch.zeros(2, 1, HIDDEN, dtype=torch.float64).unbind()
                    observation = torch.randn(OBSERVATION, dtype=torch.float64)
                features, behind = self.step(observation, state)
                following = torch.randn(OBSERVATION, dtype=torch.float64)
                terminated, truncated = torch.rand(2) < 0.2
                # the features of the next state, in the same episode
                after = self.step(following, behind)[0]
                logits, mu = self.policy_head(features), torch.randn(ACTIONS, dtype=torch.float64)
                q = self.value_head(after)
                action = torch.randint(ACTIONS, ())
                steps.append(
                    TensorDict(
                        {
                            "observation": observation,
                            "h": state[0],
                            "c": state[1],
                            "is_init": torch.tensor([initial]),
                            "logits": mu,
                            "action": action,
                            "action_log_prob": mu.log_softmax(-1)[action],
                            "next": {
                                "observation": following,
                                "h": behind[0],
                                "c": behind[1],
                                "is_init": torch.tensor([False]),
                                "reward": torch.randn(1, dtype=torch.float64),
                                "done": (terminated | truncated).unsqueeze(0),
                                "terminated": terminated.unsqueeze(0),
                            },
                            "expected": {
                                "q": self.value_head(features),
                                "pi": logits.softmax(-1),
                                "next_value": self.policy_head(after).softmax(-1) @ q,
                                "next_max": q.max(),
                            },
                        }
                    )
                )
                initial, state, observation = bool(terminated | truncated), behind, following
            rows.append(torch.stack(steps[BEFORE:]))
        return torch.stack(rows)


def values(rows, policy="actor"):
    """Q^ret by the loop of Algorithm 2, and Q of the actions taken, [B, T]; steps use values of their own episode."""
    action, q = rows["action"].unsqueeze(-1), rows["expected", "q"]
    if policy == "actor":
        pi, v_next = rows["expected", "pi"], rows["expected", "next_value"]
    else:
        pi, v_next = nn.functional.one_hot(q.argmax(-1), ACTIONS), rows["expected", "next_max"]
    rho = (pi / rows["logits"].softmax(-1)).gather(-1, action)
    taken = q.gather(-1, action)
    return q_ret_of(rows, GAMMA, rho, taken, v_next.unsqueeze(-1)).squeeze(-1), taken.squeeze(-1)


def assert_values_of_episodes(setting, rows, valid):
    """Compare ACER's errors of valid steps with the loop; returns the loss and the batch."""
    loss = averaged(ACERLoss(setting.actor, setting.critic, gamma=GAMMA, reduction="none"))
    batch = rows.exclude("expected", "priority_weight")
    result, (q_ret, taken) = loss(batch), values(rows)
    error = (q_ret - taken)[valid].square()
    torch.testing.assert_close(result["loss_qvalue"][valid], 0.5 * error, rtol=0, atol=1e-10)
    torch.testing.assert_close(batch["td_error"][valid], error, rtol=0, atol=1e-10)
    return loss, batch


@pytest.mark.parametrize("over_time", [True, False])
@pytest.mark.parametrize("policy", ["actor", "greedy"])
def test_the_estimator_keeps_the_hidden_states_of_episodes_apart(policy, over_time):
    setting = Recurrent()
    assert setting.rows["next", "done"][:, :-1].any() and not setting.rows["is_init"][:, 0].all()
    estimator = estimator_of(
        value_network=setting.q_network, actor_network=setting.actor if policy == "actor" else None
    )
    expected, _ = values(setting.rows, policy)
    with set_recurrent_mode(over_time):
        result = estimator.value_estimate(setting.rows.exclude("expected"))
    torch.testing.assert_close(result.squeeze(-1), expected, rtol=0, atol=1e-10)


def test_acer_keeps_the_hidden_states_of_episodes_apart():
    setting = Recurrent()
    assert_values_of_episodes(setting, setting.rows, ...)


@pytest.mark.parametrize("prioritized", [False, True])
def test_acer_evaluates_replayed_slices_from_the_recurrent_state_stored_at_their_start(prioritized):
    setting = Recurrent()
    sampler = TrajectoryRetraceSampler(slice_len=4, anchors=ProportionalSampler() if prioritized else "uniform")
    # a column per row
    rb = buffer_with(sampler, ROWS * TIME, ndim=2, batch_size=8 * 4)
    rb.extend(setting.rows)
    slices = rb.sample().reshape(-1, 4)
    valid, inside = slices["collector", "mask"], ~slices["is_init"][:, 0].squeeze(-1)
    assert inside.any() and slices["is_init"].any() and not valid.all()
    loss, batch = assert_values_of_episodes(setting, slices, valid)
    # other states at the starts of slices inside episodes, as with zeros, give other values
    zeros = slices.exclude("expected", "priority_weight").clone()
    zeros["h"][:, 0], zeros["c"][:, 0] = 0, 0
    loss(zeros)
    changed = (zeros["td_error"] != batch["td_error"])[:, 0]
    assert torch.equal(changed, inside)
