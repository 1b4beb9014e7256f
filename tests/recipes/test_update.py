"""Compiled updates: they change the buffer and the networks they were made for, as the eager one does."""

from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor

from recipes import dqn, sac, td3
from tests.data import buffer_of, learnable
from tests.recipes.runs import composed
from torchrl_replay_ext import ProportionalSampler, compile_step


class Learner:
    """A small network with a buffer, and its update."""

    def __init__(self, optimizer=torch.optim.Adam, **options):
        torch.manual_seed(3)
        config = composed("dqn", "dqn.max_grad_norm=1", "dqn.gamma=0.9", "updates_per_graph=2")
        self.replay = buffer_of(ProportionalSampler, 64, compilable=True, batch_size=8)
        self.replay.extend(learnable(40))
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        self.loss_module, self.target = dqn.make_loss(config.dqn, actor)
        self.optimizer = optimizer(self.loss_module.parameters(), lr=1e-2, **options)
        self.update = dqn.make_update(config, self.replay, self.loss_module, self.target, self.optimizer)


def test_compiled_updates_are_the_eager_ones():
    torch._dynamo.reset()
    eager, first, second = Learner(fused=True), Learner(fused=True), Learner(fused=True)
    with torch._inductor.config.patch(fallback_random=True):
        # made at once: none may run the graph of the other
        graphs = [compile_step(learner.update) for learner in (first, second)]
        for step in range(12):
            data = learnable(3)
            due = step % 4 == 3
            torch.manual_seed(step)
            if due:
                eager.target.step()
            loss = eager.update(data.clone())["loss"]
            assert loss.shape == (2,)
            for number, (learner, graph) in enumerate(zip((first, second), graphs, strict=True)):
                if number == 1 and step % 2:
                    continue
                torch.manual_seed(step)
                if due:
                    learner.target.step()
                theirs = graph(data.clone())["loss"]
                if number == 0:
                    torch.testing.assert_close(theirs, loss, rtol=1e-4, atol=1e-6)
    assert first.replay.write_count == eager.replay.write_count == 40 + 36
    assert second.replay.write_count == 40 + 18
    for mine, theirs in zip(first.loss_module.parameters(), eager.loss_module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    steps = [next(iter(learner.optimizer.state.values()))["step"].item() for learner in (eager, first, second)]
    assert steps == [24, 24, 12]
    for learner in (first, second):
        learner.replay.sampler.check_valid()
    torch.testing.assert_close(
        first.replay.sampler.probabilities(first.replay.storage),
        eager.replay.sampler.probabilities(eager.replay.storage),
        rtol=1e-3,
        atol=1e-9,
    )


META = torch.device("meta")


def dqn_loss():
    network = nn.Sequential(nn.Linear(4, 8, device=META), nn.Linear(8, 2, device=META))
    config = composed("dqn").dqn
    # target networks need real tensors
    with patch.object(dqn, "HardUpdate"):
        return dqn.make_loss(config, QValueActor(network, in_keys=["observation"], action_space="categorical"))[0]


def td3_loss():
    return td3.make_loss(composed("td3").td3, 3, 2, META)[1]


def sac_loss():
    return sac.make_loss(composed("sac").sac, 3, 2, META)[1]


@pytest.mark.parametrize("make_loss", [dqn_loss, td3_loss, sac_loss])
def test_losses_are_on_the_device_before_their_first_use(make_loss):
    """A graph cannot move a tensor, such as gamma, at its first call."""
    loss_module = make_loss()
    gamma = loss_module.value_estimator.gamma
    tensors = [*loss_module.parameters(), *loss_module.buffers(), gamma]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
