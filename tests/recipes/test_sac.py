"""SAC: what the recipe computes, the runs it makes, its presets and its errors."""

import torch
from tensordict import TensorDict
from torchrl.objectives import SoftUpdate

from recipes import sac
from tests.recipes.runs import (
    Composer,
    Replay,
    tiny,
)

composer = Composer("sac", tiny("sac", evaluation_episodes=2, hidden_sizes="[16, 16]"))


def test_presets_make_an_update_per_step_whatever_the_number_of_environments():
    settings = composer.settings("num_envs=8")
    assert (settings.train_interval, settings.gradient_steps) == (8, 8)
    assert settings.num_updates() == 7504 - 496  # whole rounds of 8 that begin before 7,500 steps, and end after 500


def test_weights_are_for_the_critics_and_td_errors_are_absolute():
    config = composer.configuration("updates_per_graph=1")
    settings = config.sac
    torch.manual_seed(0)
    _, loss_module = sac.make_loss(settings, 3, 2, torch.device("cpu"))
    target = SoftUpdate(loss_module, tau=0.5)
    settings.actor_learning_rate = settings.critic_learning_rate = settings.alpha_learning_rate = 0.0
    done = torch.ones(5, 1, dtype=torch.bool)  # then the targets are the rewards
    reward = torch.tensor([[0.0], [3.0], [-7.0], [20.0], [5.0]])
    following = {"observation": torch.randn(5, 3), "reward": reward, "done": done, "terminated": done}
    data = TensorDict({"observation": torch.randn(5, 3), "action": torch.rand(5, 2) * 2 - 1, "next": following}, [5])
    values = []
    for parameters in loss_module.qvalue_network_params.data.unbind(0):
        with parameters.to_module(loss_module.qvalue_network):
            values.append(loss_module.qvalue_network(data.clone())["state_action_value"])
    delta = (reward - torch.stack(values)).squeeze(2)

    results = []
    for weight in (torch.ones(5), torch.tensor([0.0, 0.0, 2.0, 0.0, 0.0])):
        torch.manual_seed(1)
        replay = Replay(data.clone().set("priority_weight", weight))
        update = sac.make_update(config, replay, loss_module, target, sac.make_optimizers(settings, loss_module))
        results.append({name: value.squeeze(0) for name, value in update(None).items()})
        (sample,) = replay.returned
        torch.testing.assert_close(sample["td_error"], delta.abs().amax(0))
    even, one = results
    torch.testing.assert_close(even["loss_qvalue"], delta.square().sum(0).mean())
    torch.testing.assert_close(one["loss_qvalue"], delta[:, 2].square().sum())
    for name in ("loss_actor", "loss_alpha", "entropy"):
        assert torch.equal(one[name], even[name])
    with torch.no_grad():
        torch.manual_seed(1)
        whole = loss_module(data.clone())  # without weights: all of TorchRL's own
    for name in ("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"):
        torch.testing.assert_close(whole[name], even[name])
