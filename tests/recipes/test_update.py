"""Compiled updates: they change the buffer and the networks they were made for, as the eager one does."""

import pytest
import torch
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, HardUpdate

from recipes.common.update import CompiledUpdate, eager_update, target_pairs
from tests.data import buffer_of, learnable
from torchrl_replay_ext import ProportionalSampler


class Learner:
    def __init__(self):
        torch.manual_seed(3)
        self.replay = buffer_of(ProportionalSampler, 64, compilable=True, batch_size=8)
        self.replay.extend(learnable(40))
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        self.loss_module = DQNLoss(actor, delay_value=True, double_dqn=True, action_space="categorical")
        self.loss_module.make_value_estimator(gamma=0.9)
        HardUpdate(self.loss_module, value_network_update_interval=0)
        self.optimizer = torch.optim.Adam(self.loss_module.parameters(), lr=1e-2, fused=True)

    def arguments(self):
        return self.replay, self.loss_module, [self.optimizer], 1.0

    def targets(self):
        return target_pairs(self.loss_module)


def test_compiled_updates_are_the_eager_ones():
    torch._dynamo.reset()
    eager, first, second = Learner(), Learner(), Learner()
    update = eager_update(*eager.arguments())
    with torch._inductor.config.patch(fallback_random=True):
        # made at once: none may run the graph of the other
        compiled = [
            CompiledUpdate(*learner.arguments(), targets=learner.targets(), extends=True) for learner in (first, second)
        ]
        for step in range(12):
            data = learnable(3)
            eager.replay.extend(data.clone())
            due = step % 4 == 3
            if due:
                for target, source in eager.targets():
                    target.copy_(source)
            torch.manual_seed(step)
            loss = update()["loss"]
            for number, learner in enumerate(compiled):
                if number == 1 and step % 2:
                    continue
                torch.manual_seed(step)
                theirs = learner(data.clone(), target_due=due)["loss"]
                if number == 0:
                    torch.testing.assert_close(theirs, loss, rtol=1e-4, atol=1e-6)
    assert first.replay.write_count == eager.replay.write_count == 40 + 36
    assert second.replay.write_count == 40 + 18
    for mine, theirs in zip(first.loss_module.parameters(), eager.loss_module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    steps = [next(iter(learner.optimizer.state.values()))["step"].item() for learner in (eager, first, second)]
    assert steps == [12, 12, 6]
    for learner in (first, second):
        learner.replay.sampler.check_valid()
    torch.testing.assert_close(
        first.replay.sampler.probabilities(first.replay.storage),
        eager.replay.sampler.probabilities(eager.replay.storage),
        rtol=1e-3,
        atol=1e-9,
    )


def test_only_adam_with_one_group():
    learner = Learner()
    parameters = list(learner.loss_module.parameters())
    optimizer = torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(ValueError):
        CompiledUpdate(learner.replay, learner.loss_module, [optimizer], 1.0)
