"""TD3 (Fujimoto et al. 2018) with uniform, PER, rank-based or ReaPER replay, event tables, or DPER.

    python -m recipes.td3 env=pendulum sampler=per seed=1
    python -m recipes.td3 -m seed=1,2,3 sampler=uniform,per
    python -m recipes.td3 env=lunarlander_continuous compile=true num_envs=8
    python -m recipes.td3 env=halfcheetah sampler=sset
    python -m recipes.td3 env=hopper sampler=dper compile=true
    python -m recipes.td3 resume=runs/td3/pendulum/per/seed1-...

The settings are from the authors' code, except for pendulum; see conf/td3/<env>.yaml. With one environment, a cycle is
policy_delay steps, then as many updates of the critics, then one update of the actor and all targets.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far; updates are those of the critics
    return_mean            mean return of the evaluation's episodes, played without noise
    return_0, return_1 ... return of each episode
    loss_actor             minus the first critic's value of the policy's actions; mean since the previous row
    loss_qvalue            mean over the updates since the previous row
    wall_time              seconds, including the time before a resume
    cpu_time               CPU seconds of this process, including the time before a resume
    sampler/...            scalars of the sampler's stats()
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gymnasium.spaces import flatdim
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import SoftUpdate, TD3Loss

from recipes.common.cli import run_recipe
from recipes.common.collector import EpsilonRandom
from recipes.common.config import RunConfig
from recipes.common.environment import make_continuous_env
from recipes.common.networks import on_arrays
from recipes.common.replay import actor_batches, decouple, make_sampler, make_writer, set_targets
from recipes.common.run import Run
from recipes.common.schemas import THETA, DistributedRun, TD3Config, TD3Run
from recipes.common.update import Update, make_optimizers, make_round, stack_updates, weight_factor
from torchrl_replay_ext import AdamStep, CompilableReplayBuffer, CompilableTensorStorage


class ExplorationNoise:
    """Gaussian exploration noise: x ← (1 − θ) x + σ √(1 − (1 − θ)²) ε, starting at x = 0, with ε ~ N(0, 1).

    With θ = 1, steps are independent and x has standard deviation σ. With θ < 1, x is an Ornstein-Uhlenbeck process
    whose standard deviation tends to σ. The process begins with the run, or when it is resumed, not with each episode.
    The DDPG paper gives the factor of ε instead of σ; it is 0.53 σ for the paper's θ = 0.15. Samples are from torch's
    global generator.

    Args:
        sigma: σ, >= 0, in units of actions in [-1, 1].
        theta: θ, in (0, 1].
    """

    def __init__(self, sigma: float, theta: float):
        self._keep = 1 - theta
        self._scale = sigma * (1 - self._keep**2) ** 0.5
        self._value = np.float32(0)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next x, float32; `shape` must be the same in all calls."""
        self._value = self._keep * self._value + self._scale * torch.randn(shape).numpy()
        return self._value


def make_loss(
    td3: TD3Config, num_observed: int, num_actions: int, device: torch.device
) -> tuple[nn.Sequential, TD3Loss]:
    """The policy network, whose actions are in [-1, 1], and the loss, which also holds two critics."""
    mlp = partial(MLP, num_cells=td3.hidden_sizes, activation_class=nn.ReLU, device=device)
    policy = nn.Sequential(mlp(num_observed, num_actions), nn.Tanh())
    actor = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])
    critics = [ValueOperator(mlp(num_observed + num_actions, 1), in_keys=["observation", "action"]) for _ in range(2)]
    loss_module = TD3Loss(
        actor,
        critics,  # pyright: ignore[reportArgumentType]: annotated as one network, documented as a list too
        bounds=(-1.0, 1.0),  # pyright: ignore[reportArgumentType]: annotated as a tuple of one
        policy_noise=td3.policy_noise,
        noise_clip=td3.noise_clip,
        loss_function=td3.loss_function,
    )
    set_targets(loss_module, td3)
    return policy, loss_module


def make_update(
    config: RunConfig,
    replay: TensorDictReplayBuffer,
    loss_module: TD3Loss,
    target: SoftUpdate,
    optimizers: Mapping[str, torch.optim.Adam],
    actor_batch: Callable[[], TensorDictBase] | None = None,
) -> Update:
    """Build the function that writes new transitions and makes `updates_per_graph` updates, eager or in a graph.

    Args:
        config: the configuration of the run, whose hyperparameters are a TD3Config.
        replay: the buffer.
        loss_module: the loss.
        target: updates the target networks.
        optimizers: see make_optimizers. If they are restored from a checkpoint, restore them before.
        actor_batch: draws the batches of the actor (DPER). Default: None, the batch of the preceding update.
    """
    actor_step, critic_step = AdamStep(optimizers["actor_optimizer"]), AdamStep(optimizers["critic_optimizer"])

    def update(data: TensorDictBase | None) -> dict[str, Tensor]:
        if data is not None:
            replay.extend(data)
        results = []
        for number in range(1, config.updates_per_graph + 1):
            batch = replay.sample()
            # The loss applies batch["priority_weight"]. Each critic has a SQUARED TD error; the larger one counts.
            loss_qvalue, of_critics = loss_module.value_loss(batch)
            loss_qvalue = loss_qvalue * weight_factor(batch, config.weights)
            batch["td_error"] = of_critics["td_error"].detach().amax(0)
            critic_step(torch.autograd.grad(loss_qvalue, critic_step.parameters))
            losses = {"loss_qvalue": loss_qvalue}
            if number % config.learning.policy_delay == 0:
                # without importance-sampling weights; recipes.sac.make_update explains why
                of_actor = batch.exclude("priority_weight") if actor_batch is None else actor_batch()
                loss_actor, _ = loss_module.actor_loss(of_actor)
                actor_step(torch.autograd.grad(loss_actor, actor_step.parameters))
                target.step()
                losses["loss_actor"] = loss_actor
            replay.update_tensordict_priority(batch)
            results.append(losses)
        return stack_updates(results)

    return update


def train(config: TD3Run | DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration.
        run_dir: directory of the run.

    Returns:
        The exit code.
    """
    td3: TD3Config = config.learning
    # One environment per evaluation episode. The collector makes the training environments.
    run = Run(config, run_dir, make_continuous_env)
    device, evaluation = run.device, run.evaluation
    num_observed, num_actions = math.prod(evaluation.observation_space.shape or ()), flatdim(evaluation.action_space)

    # Networks, loss and optimizers.
    policy, loss_module = make_loss(td3, num_observed, num_actions, device)
    target = SoftUpdate(loss_module, tau=td3.tau)
    optimizers = make_optimizers(td3, loss_module)
    actor = TensorDictModule(policy, in_keys=["observation"], out_keys=["action"])

    # The buffer. TD3Loss gives SQUARED TD errors.
    if isinstance(config, DistributedRun):
        replay = run.make_remote_replay(td_error="squared")
    else:
        critic_sampler = make_sampler(config, td_error="squared")
        replay = CompilableReplayBuffer(
            storage=CompilableTensorStorage(td3.buffer_size, device=device),
            sampler=decouple(config, critic_sampler, actor, td3.exploration_noise),
            writer=make_writer(critic_sampler),
            batch_size=td3.batch_size,
        )

    # The policy as functions of arrays: with noise for training, without noise for evaluations.
    deterministic = on_arrays(policy, device)
    noise = ExplorationNoise(td3.exploration_noise, THETA[td3.noise])

    def noisy(observations: np.ndarray) -> np.ndarray:
        action = deterministic(observations)
        return (action + noise(action.shape)).clip(-1, 1)

    behaviour = EpsilonRandom(noisy, evaluation.action_space, seed=config.seed)
    run.attach(
        behaviour,
        replay,
        actor=actor,
        noise_scale=td3.exploration_noise,
        policy=deterministic,
        losses=("loss_actor", "loss_qvalue"),
        state={"loss": loss_module, "behaviour": behaviour, **optimizers},
    )
    update = make_update(config, replay, loss_module, target, optimizers, actor_batches(replay))
    learn = make_round(update, replay, run)

    with run:
        while run.continues():
            behaviour.epsilon = td3.epsilon(run.env_steps)  # random actions at first
            learn(run.collect())  # writes the batch; updates begin after td3.learning_starts
            run.end_round()
    return run.exit_code


if __name__ == "__main__":
    run_recipe("td3")
