"""Recurrent networks on rows that hold several episodes, against evaluations of each episode step by step."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import LSTMModule, ProbabilisticActor, set_recurrent_mode

from tests.data import buffer_with
from tests.objectives.q_networks import ACTIONS, GAMMA, OBSERVATION, estimator_of, experience
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

    def run(self, observation, state):
        """Features [N, HIDDEN] of states, and the hidden states after them, [1, N, HIDDEN] each, from torch's LSTM."""
        features, state = self.lstm.lstm(observation.unsqueeze(1), state)
        return features.squeeze(1), state

    @torch.no_grad()
    def collect(self):
        """Rows [B, T] that start anywhere in an episode."""
        rows = experience(ROWS, BEFORE + TIME)
        observation, following, done = rows["observation"], rows["next", "observation"], rows["next", "done"]
        before, after, state = [], [], torch.zeros(2, 1, ROWS, HIDDEN, dtype=torch.float64)
        for t in range(BEFORE + TIME):
            if t > 0:
                observation[:, t] = torch.where(done[:, t - 1], observation[:, t], following[:, t - 1])
            before.append(state)
            after.append(torch.stack(self.run(observation[:, t], state.unbind())[1]))
            state = after[-1] * ~done[:, t]
        for part, states in ((rows, before), (rows["next"], after)):
            part["h"], part["c"] = torch.stack(states, 3).movedim(1, 3)
            part["is_init"] = torch.zeros_like(done)
        rows["is_init"][:, 0] = True
        rows["is_init"][:, 1:] = done[:, :-1]
        return rows[:, BEFORE:]

    @torch.no_grad()
    def of_states(self, rows):
        """Q and the policy of each state, [*, ACTIONS], from the hidden state that is stored with it."""
        flat = rows.select("observation", "h", "c").reshape(-1)
        features, _ = self.run(flat["observation"], (flat["h"].transpose(0, 1), flat["c"].transpose(0, 1)))
        features = features.reshape(*rows.shape, HIDDEN)
        return self.value_head(features), self.policy_head(features).softmax(-1)


def values(setting, rows, policy="actor"):
    """Q^ret by the loop of Algorithm 2, and Q of the actions taken, [B, T]; steps use values of their own episode."""
    (q, pi), (q_next, pi_next) = setting.of_states(rows), setting.of_states(rows["next"])
    if policy == "greedy":
        pi, pi_next = (nn.functional.one_hot(each.argmax(-1), ACTIONS) for each in (q, q_next))
    action = rows["action"].unsqueeze(-1)
    rho, taken = (pi / rows["logits"].softmax(-1)).gather(-1, action), q.gather(-1, action)
    v_next = (pi_next * q_next).sum(-1, keepdim=True)
    return q_ret_of(rows, GAMMA, rho, taken, v_next).squeeze(-1), taken.squeeze(-1)


def assert_values_of_episodes(setting, rows, valid):
    """Compare ACER's errors of valid steps with the loop; returns the loss and the batch."""
    loss = averaged(ACERLoss(setting.actor, setting.critic, gamma=GAMMA, reduction="none"))
    batch = rows.exclude("priority_weight")
    result, (q_ret, taken) = loss(batch), values(setting, rows)
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
    expected, _ = values(setting, setting.rows, policy)
    with set_recurrent_mode(over_time):
        result = estimator.value_estimate(setting.rows.clone())
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
    zeros = slices.exclude("priority_weight").clone()
    zeros["h"][:, 0], zeros["c"][:, 0] = 0, 0
    loss(zeros)
    changed = (zeros["td_error"] != batch["td_error"])[:, 0]
    assert torch.equal(changed, inside)
