"""Soft actor-critic (SAC) with automatic entropy tuning and uniform, PER, rank-based or ReaPER replay, or event tables.

    python -m recipes.sac env=pendulum sampler=per seed=1
    python -m recipes.sac -m seed=1,2,3 sampler=uniform,per
    python -m recipes.sac env=lunarlander_continuous compile=true num_envs=8
    python -m recipes.sac env=lunarlander_continuous sampler=sset
    python -m recipes.sac resume=runs/sac/pendulum/per/seed1-...

The settings are from the event-table paper (table 2), except for pendulum; see conf/sac/<env>.yaml.

progress.csv has one row per evaluation, with the columns

    env_steps, updates     totals so far
    return_mean            mean return of the evaluation's episodes, played with the mode of the policy
    return_0, return_1 ... return of each episode
    loss_actor, loss_qvalue, loss_alpha
    alpha                  weight of the entropy
    entropy                entropy of the policy
    wall_time              seconds, including the time before a resume
    cpu_time               CPU seconds of this process, including the time before a resume
    sampler/...            scalars of the sampler's stats()

Losses, alpha and entropy are means over the updates since the previous row.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from gymnasium.spaces import flatdim
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss, SoftUpdate

from recipes.common.cli import run_recipe
from recipes.common.collector import EpsilonRandom
from recipes.common.config import RunConfig
from recipes.common.environment import make_continuous_env
from recipes.common.networks import on_arrays
from recipes.common.replay import actor_batches, decouple, make_sampler, make_writer, set_targets
from recipes.common.run import Run
from recipes.common.schemas import DistributedRun, SACConfig, SACRun
from recipes.common.update import Update, make_optimizers, make_round, stack_updates, weight_factor
from torchrl_replay_ext import AdamStep, CompilableReplayBuffer, CompilableTensorStorage


def make_actor(policy: nn.Module) -> ProbabilisticActor:
    """The policy network as a module that writes actions."""
    return ProbabilisticActor(
        TensorDictModule(policy, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"safe_tanh": False},  # needed only to invert tanh, which the loss does not do
        return_log_prob=True,
    )


def make_loss(
    sac: SACConfig, num_observed: int, num_actions: int, device: torch.device
) -> tuple[nn.Sequential, SACLoss]:
    """The policy network and the loss, which also holds two critics and alpha.

    The policy outputs location and scale of a normal distribution; tanh maps its samples to [-1, 1].
    """
    mlp = partial(MLP, num_cells=sac.hidden_sizes, activation_class=nn.ReLU, device=device)
    policy = nn.Sequential(mlp(num_observed, 2 * num_actions), NormalParamExtractor())
    actor = make_actor(policy)
    critics = [ValueOperator(mlp(num_observed + num_actions, 1), in_keys=["observation", "action"]) for _ in range(2)]
    loss_module = SACLoss(
        actor,
        critics,  # pyright: ignore[reportArgumentType]: annotated as one network, documented as a list too
        loss_function="l2",
        alpha_init=sac.initial_alpha,
        target_entropy=sac.target_entropy,
    )
    set_targets(loss_module, sac)
    _ = loss_module.target_entropy  # created at its first use, which must not happen in a graph
    return policy, loss_module


def make_update(
    config: RunConfig,
    replay: TensorDictReplayBuffer,
    loss_module: SACLoss,
    target: SoftUpdate,
    optimizers: Mapping[str, torch.optim.Adam],
    actor_batch: Callable[[], TensorDictBase] | None = None,
) -> Update:
    """Build the function that writes new transitions and makes `updates_per_graph` updates, eager or in a graph.

    The losses are those of loss_module(batch), except that only the critics' loss uses the sampler's "priority_weight".
    The weights correct the bias that prioritisation adds to the expected target at a state and action (Schaul et al.
    2016, section 3.4). The objectives of the actor and alpha are defined per state. They are valid for any distribution
    of states, so the states are used as the sampler draws them, without weights.

    Args:
        config: the configuration of the run.
        replay: the buffer.
        loss_module: the loss.
        target: updates the target networks.
        optimizers: see make_optimizers. If they are restored from a checkpoint, restore them before.
        actor_batch: draws the batches of the actor and alpha (DPER). Default: None, the batch of the critics.
    """
    steps = [AdamStep(optimizers[f"{name}_optimizer"]) for name in ("actor", "critic", "alpha")]

    def update(data: TensorDictBase | None) -> dict[str, Tensor]:
        if data is not None:
            replay.extend(data)
        results = []
        for _ in range(config.updates_per_graph):
            batch = replay.sample()
            # Unlike DQNLoss and TD3Loss, SACLoss gives ABSOLUTE TD errors: the larger one of the two critics' errors.
            loss_qvalue, of_critics = loss_module.qvalue_v2_loss(batch)
            loss_qvalue = loss_qvalue * weight_factor(batch, config.weights)
            batch["td_error"] = of_critics["td_error"]
            loss_actor, of_actor = loss_module.actor_loss(
                batch.exclude("priority_weight") if actor_batch is None else actor_batch()
            )
            loss_alpha = loss_module.alpha_loss(of_actor["log_prob"]).mean()
            losses = {"loss_actor": loss_actor, "loss_qvalue": loss_qvalue, "loss_alpha": loss_alpha}
            pairs = zip(losses.values(), steps, strict=True)
            gradients = [torch.autograd.grad(loss, step.parameters) for loss, step in pairs]
            alpha = loss_module.log_alpha.exp()  # pyright: ignore[reportCallIssue]: a parameter or a buffer
            for step, own in zip(steps, gradients, strict=True):
                step(own)
            target.step()
            replay.update_tensordict_priority(batch)
            results.append(losses | {"alpha": alpha, "entropy": -of_actor["log_prob"].mean()})
        return stack_updates(results)

    return update


def train(config: SACRun | DistributedRun, run_dir: Path) -> int:
    """Train and evaluate; write config.yaml, progress.csv, learning_curve.png and checkpoint.zip to `run_dir`.

    Args:
        config: the configuration.
        run_dir: directory of the run.

    Returns:
        The exit code.
    """
    sac: SACConfig = config.learning
    # One environment per evaluation episode. The collector makes the training environments.
    run = Run(config, run_dir, make_continuous_env)
    device, evaluation = run.device, run.evaluation
    num_observed, num_actions = math.prod(evaluation.observation_space.shape or ()), flatdim(evaluation.action_space)

    # Networks, loss and optimizers.
    policy, loss_module = make_loss(sac, num_observed, num_actions, device)
    target = SoftUpdate(loss_module, tau=sac.tau)
    optimizers = make_optimizers(sac, loss_module)
    actor = make_actor(policy)

    # The buffer. SACLoss gives ABSOLUTE TD errors.
    if isinstance(config, DistributedRun):
        replay = run.make_remote_replay(td_error="absolute")
    else:
        critic_sampler = make_sampler(config, td_error="absolute")
        replay = CompilableReplayBuffer(
            storage=CompilableTensorStorage(sac.buffer_size, device=device),
            sampler=decouple(config, critic_sampler, actor),
            writer=make_writer(critic_sampler),
            batch_size=sac.batch_size,
        )

    # The policy as functions of arrays: samples for training, the mode for evaluations.
    stochastic = on_arrays(lambda observations: torch.tanh(torch.normal(*policy(observations))), device)
    deterministic = on_arrays(lambda observations: torch.tanh(policy(observations)[0]), device)
    behaviour = EpsilonRandom(stochastic, evaluation.action_space, seed=config.seed)
    run.attach(
        behaviour,
        replay,
        actor=actor,
        policy=deterministic,
        losses=("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"),
        state={"loss": loss_module, "behaviour": behaviour, **optimizers},
    )
    update = make_update(config, replay, loss_module, target, optimizers, actor_batches(replay))
    learn = make_round(update, replay, run)

    with run:
        while run.continues():
            behaviour.epsilon = sac.epsilon(run.env_steps)  # random actions at first
            learn(run.collect())  # writes the batch; updates begin after sac.learning_starts
            run.end_round()
    return run.exit_code


if __name__ == "__main__":
    run_recipe("sac")
