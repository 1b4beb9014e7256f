"""TD3: what the recipe computes, and its presets."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torchrl.objectives import SoftUpdate

from recipes import td3
from tests.data import learnable
from tests.recipes.runs import Replay, buffer_of, composed
from tests.samplers.experience import assert_priorities

transitions = partial(learnable, observation=3, action=2, done=0.3)


class Plain:
    """TD3 by the paper's Algorithm 1, in plain torch, with the networks of a TorchRL loss."""

    noise, clip, gamma, tau = 0.6, 0.5, 0.9, 0.1

    def __init__(self, policy, loss_module):
        self.policy = copy.deepcopy(policy)
        self.critics = []
        for parameters in loss_module.qvalue_network_params.data.unbind(0):
            critic = copy.deepcopy(loss_module.qvalue_network.module)
            parameters["module"].to_module(critic)
            self.critics.append(copy.deepcopy(critic).requires_grad_())
        self.target_policy, self.target_critics = copy.deepcopy((self.policy, self.critics))
        self.actor_optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        critic_parameters = [parameter for critic in self.critics for parameter in critic.parameters()]
        self.critic_optimizer = torch.optim.Adam(critic_parameters, lr=1e-2)

    def update_critics(self, batch):
        following = batch["next"]
        with torch.no_grad():
            epsilon = self.noise * torch.randn(batch["action"].shape)
            before = self.target_policy(following["observation"]) + epsilon.clip(-self.clip, self.clip)
            action = before.clip(-1, 1)
            self.share_clipped = (epsilon.abs() > self.clip).float().mean(), (before.abs() > 1).float().mean()
            inputs = torch.cat([following["observation"], action], 1)
            value = torch.minimum(*(critic(inputs) for critic in self.target_critics))
            target = following["reward"] + self.gamma * ~following["terminated"] * value
        inputs = torch.cat([batch["observation"], batch["action"]], 1)
        errors = [(critic(inputs) - target).square() for critic in self.critics]
        loss = errors[0].mean() + errors[1].mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.detach(), torch.maximum(*errors).squeeze(1).detach()

    def update_actor_and_targets(self, batch):
        loss = -self.critics[0](torch.cat([batch["observation"], self.policy(batch["observation"])], 1)).mean()
        self.actor_optimizer.zero_grad()
        loss.backward()
        self.actor_optimizer.step()
        online, targets = [self.policy, *self.critics], [self.target_policy, *self.target_critics]
        for network, target in zip(online, targets, strict=True):
            for source, parameter in zip(network.parameters(), target.parameters(), strict=True):
                parameter.data.mul_(1 - self.tau).add_(self.tau * source.data)
        return loss.detach()

    def parameters(self):
        """As the loss has them: actor, critics, target actor, target critics."""
        for policy, critics in ((self.policy, self.critics), (self.target_policy, self.target_critics)):
            yield from policy.parameters()
            for parameters in zip(*(critic.parameters() for critic in critics), strict=True):
                yield torch.stack(parameters)


NETWORKS = ["actor_network_params", "qvalue_network_params", "target_actor_network_params"]
NETWORKS += ["target_qvalue_network_params"]


def parameters_of(loss_module):
    return [value.detach().clone() for name in NETWORKS for value in getattr(loss_module, name).flatten_keys().values()]


@pytest.mark.parametrize("own_batch", [False, True])
def test_two_cycles_are_those_of_the_paper(own_batch):
    """Twin critics, smoothed and clipped targets, delayed actor and targets; also if the actor has its own batches."""
    torch.manual_seed(0)
    cfg = composed("td3", "td3.policy_noise=0.6", "td3.noise_clip=0.5", "td3.gamma=0.9", "td3.hidden_sizes=[16]")
    policy, loss_module = td3.make_loss(cfg.td3, 3, 2, torch.device("cpu"))
    for parameter in policy.parameters():
        parameter.data.mul_(3)  # then it gives actions near -1 and 1 too
    plain = Plain(policy, loss_module)
    optimizers = {
        name: torch.optim.Adam(getattr(loss_module, network).flatten_keys().values(), lr=1e-2)
        for name, network in zip(("actor_optimizer", "critic_optimizer"), NETWORKS[:2], strict=True)
    }
    batches, own = [transitions(32) for _ in range(4)], [transitions(8) for _ in range(2)]
    replay = Replay(*batches)
    update = td3.make_update(
        cfg,
        replay,
        loss_module,
        SoftUpdate(loss_module, tau=plain.tau),
        optimizers,
        actor_batch=Replay(*(batch.select("observation", "action") for batch in own)).sample if own_batch else None,
    )

    for cycle in range(2):
        torch.manual_seed(cycle)
        losses = update(None)
        torch.manual_seed(cycle)
        for number, batch in enumerate(batches[2 * cycle : 2 * cycle + 2]):
            loss, td_error = plain.update_critics(batch)
            assert all(0.1 < share < 0.9 for share in plain.share_clipped)
            torch.testing.assert_close(losses["loss_qvalue"][number], loss)
            torch.testing.assert_close(replay.returned[2 * cycle + number]["td_error"], td_error)
        loss = plain.update_actor_and_targets(own[cycle] if own_batch else batch)
        torch.testing.assert_close(losses["loss_actor"], loss.unsqueeze(0))
        for mine, reference in zip(parameters_of(loss_module), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, reference.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_envs", "delay", "interval"), [(1, 2, 2), (8, 2, 8), (3, 2, 6), (1, 1, 1), (4, 3, 12)])
def test_presets_make_an_update_per_step_in_whole_cycles(num_envs, delay, interval):
    config = composed("td3", f"num_envs={num_envs}", f"td3.policy_delay={delay}")
    assert (config.td3.train_interval, config.td3.gradient_steps) == (interval, interval)
    assert config.updates_per_graph == delay


def test_lap_has_the_huber_loss_priorities_of_at_least_1_and_no_weights():
    """The rest is in tests/samplers/test_proportional.py."""
    config = composed("td3", "sampler=lap")
    assert config.td3.loss_function == "smooth_l1"
    replay = buffer_of(config)
    replay.extend(transitions(64, action=1))
    replay.sampler.update_priority(torch.arange(64), torch.linspace(0.01, 9, 64))
    assert (replay.sample()["priority_weight"] == 1).all()
    assert_priorities(replay, torch.linspace(0.01, 9, 64).sqrt().clamp_min(1), alpha=0.4)


@pytest.mark.parametrize("kind", ["gaussian", "ou"])
def test_noise_has_its_deviation_and_its_correlation(kind):
    torch.manual_seed(0)
    noise = td3.ExplorationNoise(0.3, td3.THETA[kind])
    draws = np.stack([noise((500, 2)) for _ in range(60)])[20:]
    assert draws.dtype == np.float32
    assert draws.std() == pytest.approx(0.3, rel=0.02)
    assert np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1] == pytest.approx(1 - td3.THETA[kind], abs=0.02)
    assert np.corrcoef(draws[..., 0].ravel(), draws[..., 1].ravel())[0, 1] == pytest.approx(0, abs=0.05)
